"""The documents: links, names of files, line numbers and examples hold."""

import doctest
import functools
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Files of others that the pages name.
FOREIGN = {"extract_features.py", "run_mlm.py"}
README_LINES = 180


@functools.cache
def tracked():
  """Our files, and their folders, as paths from the root."""
  files = subprocess.run(
    ["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard"],
    capture_output=True,
    text=True,
    check=True,
  ).stdout.split("\n")
  files = {pathlib.PurePath(name) for name in files if name}
  return files | {folder for name in files for folder in name.parents}


def pages():
  return sorted(str(p) for p in tracked() if p.suffix == ".md")


def read(page):
  return (ROOT / page).read_text(encoding="utf-8")


def anchors(page):
  """What links to headings of a page are called on GitHub."""
  headings = re.findall(r"^#+ (.*)$", read(page), re.M)
  words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
  return {word.replace(" ", "-") for word in words}


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page):
  prose = re.sub(r"^```.*?^```", "", read(page), flags=re.M | re.S)
  for target in re.findall(r"\]\(([^)\s]+)\)", prose):
    if re.match(r"\w+:", target):
      continue
    name, _, anchor = target.partition("#")
    path = ((ROOT / page).parent / name if name else ROOT / page).resolve()
    assert path.exists(), f"{page} links to {target}"
    if anchor:
      assert anchor in anchors(path), target


def is_ours(name):
  """Whether a path, a glob or a bare name is that of one of our files."""
  return name in FOREIGN or any(path.match(name) for path in tracked())


@pytest.mark.parametrize("page", [p for p in pages() if p != "CHANGELOG.md"])
def test_files_that_a_page_names_exist(page):
  text = read(page)
  folders = {p.parts[0] for p in tracked() if len(p.parts) > 1}
  inside = "|".join(map(re.escape, sorted(folders)))
  names = set(re.findall(rf"(?<![\w/.-])(?:{inside})/[\w./*-]*\w\*?", text))
  names |= set(re.findall(r"(?<![\w/.*-])[\w-]+\.(?:py|sh|yaml)\b", text))
  modules = re.findall(rf"-m ((?:{inside})(?:\.\w+)+)", text)
  names |= {module.replace(".", "/") + ".py" for module in modules}
  missing = sorted(name for name in names if not is_ours(name))
  assert not missing, f"{page} names {', '.join(missing)}"


def test_lines_that_people_change_hold_the_names():
  rows = re.findall(r"`([\w/]+\.py):(\d+)` \| `(\w+)`", read("CONTRIBUTING.md"))
  assert len(rows) == 5
  for path, number, name in rows:
    line = read(path).split("\n")[int(number) - 1]
    assert re.search(rf"\b{name}\b", line), f"{path}:{number} is {line!r}"


def test_readme_is_short():
  assert len(read("README.md").splitlines()) <= README_LINES


def test_python_examples_run(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  text = re.sub(r"^```.*$", "", read("docs/python_api.md"), flags=re.M)
  test = doctest.DocTestParser().get_doctest(
    text, {}, "python_api.md", "docs/python_api.md", 0
  )
  assert len(test.examples) > 20
  said = []
  failed = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
  assert not failed.failed, "".join(said)
