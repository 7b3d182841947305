"""The documents: links, names of files, flags and examples hold."""

import collections
import contextlib
import doctest
import functools
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest
import trained
from absl.flags import FlagValues

import convert_checkpoint
from common import settings
from tools import flags_reference

ROOT = pathlib.Path(__file__).parents[2]
# Files of others that the pages name.
FOREIGN = {"extract_features.py", "run_mlm.py"}
README_LINES = 180
# The models of docs/python_api.md: kind -> folder.
MODELS = {
  "pretraining": "pretrain",
  "classifier": "first_or_last",
  "ner": "ner",
}


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


CURRENT = [page for page in pages() if page != "CHANGELOG.md"]


@pytest.mark.parametrize("page", CURRENT)
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


def test_what_people_change_is_where_the_table_says():
  rows = re.findall(r"`([\w/]+\.py)` \| `(\w+)`", read("CONTRIBUTING.md"))
  assert len(rows) == 5
  for path, name in rows:
    pattern = rf"^ *(def )?{name}\b"
    assert re.search(pattern, read(path), re.M), f"{name} is not in {path}"


def test_readme_is_short():
  assert len(read("README.md").splitlines()) <= README_LINES


def test_python_examples_run(tmp_path, monkeypatch, letters):
  monkeypatch.chdir(tmp_path)
  mine = tmp_path / "runs/mine"
  for kind, name in MODELS.items():
    trained.write_model(mine / name, kind, letters)
  convert_checkpoint.main(
    convert_checkpoint.ConversionSettings(output=str(mine / "hugging_face")),
    str(mine / "pretrain"),
  )
  (tmp_path / "texts.csv").write_text("id,sentence\n1,a b\n2,c\n")
  text = re.sub(r"^```.*$", "", read("docs/python_api.md"), flags=re.M)
  test = doctest.DocTestParser().get_doctest(
    text, {}, "python_api.md", "docs/python_api.md", 0
  )
  assert len(test.examples) > 20
  said = []
  failed = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
  assert not failed.failed, "".join(said)
  assert (
    (tmp_path / "labels.csv").read_text().startswith("sentence,label\na b,")
  )


# Commands ---------------------------------------------------------------------


@functools.cache
def known_flags():
  """Command -> its flags, of docs/flags.md, which a test holds to the code."""
  sections = re.split(r"^## ", read("docs/flags.md"), flags=re.M)[1:]
  found = collections.defaultdict(set)
  for section in sections:
    heading = section.split("\n")[0]
    rows = re.findall(r"^\| `--(\[no\])?(\w+)` ", section, re.M)
    names = {name for _, name in rows}
    names |= {f"no{name}" for no, name in rows if no}
    for command in heading.split(", "):
      found[command.removeprefix("python -m ").strip()] |= names
  return found


def commands(text):
  """(script or module, flags) of all commands in blocks and in code spans."""
  text = re.sub(r"\\\n", " ", text)
  for line in text.split("\n"):
    spans = re.findall(r"`([^`]+)`", line) if "`" in line else [line]
    for span in spans:
      for part in re.split(r"[;|]|&&| -- ", span.replace("\\|", "/")):
        part = part.split(" # ")[0]
        found = re.search(
          r"(?:-m |^|[\s/])((?:tools|benchmarks)\.[\w.]+|\w+\.py)(\s.*)?$", part
        )
        if found:
          own, _, rest = (found[2] or "").partition(" -- ")
          yield found[1], re.findall(r"(?<!\S)--(\w+)", own)
          if found[1] == "tools.run_tasks":  # flags of the runs it makes
            yield "run_classifier.py", re.findall(r"(?<!\S)--(\w+)", rest)


ABSL = {"flagfile", "help", "helpfull", "helpshort"}


def text_of(page):
  """What a page says; a cell of a notebook is a block."""
  text = read(page)
  if page.endswith(".ipynb"):
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"]]
    text = "".join(f"```\n{cell}\n```\n" for cell in cells)
  return text


def words_of_commands(text):
  """(command, its flags with their values) of all in blocks."""
  for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S):
    for line in re.sub(r"\\\n", " ", block).split("\n"):
      with contextlib.suppress(ValueError):  # an answer with an apostrophe
        words = shlex.split(line, comments=True)
        for command in flags_reference.COMMANDS:
          if (script := command.split()[-1]) in words:
            own = words[words.index(script) : [*words, "--"].index("--")]
            yield command, [word for word in own if re.match(r"--\w", word)]


@pytest.mark.parametrize("page", [*CURRENT, "docs/quickstart.ipynb"])
def test_values_in_documented_commands_are_taken(page):
  for command, words in words_of_commands(text_of(page)):
    known = FlagValues()
    settings.define_flags(flags_reference.settings_class(command), known)
    known([command, *words])
    for name, value in settings.present(known).items():
      problem = known[name].setting.problem(value)
      assert not problem, f"{page}: {command} --{name}={value}: {problem}"


@pytest.mark.parametrize("page", [*CURRENT, "docs/quickstart.ipynb"])
def test_documented_commands_have_their_flags(page):
  found = list(commands(text_of(page)))
  assert found or page not in ("README.md", "docs/quickstart.ipynb")
  for command, flags in found:
    known = known_flags().get(command)
    if known is None:
      names = command.replace(".", "/") + ".py", command
      files = ([p for p in tracked() if p.match(name)] for name in names)
      source = "".join(map(read, next(filter(None, files), ())))
      known = {flag for flag in flags if re.search(rf"\b{flag}\b", source)}
      if "define_flags(PretrainingConfig)" in source:
        known |= known_flags()["run_pretraining.py"]
    wrong = set(flags) - known - ABSL
    assert not wrong, f"{page}: {command} has no --{', --'.join(wrong)}"


def test_flags_of_the_page_for_newcomers_exist():
  """The right column of its tables."""
  known = set().union(*known_flags().values())
  for line in read("docs/coming_from.md").split("\n"):
    here = line.replace("\\|", "/").rstrip(" |").split("|")[-1]
    if line.startswith("| ") and not line.startswith("| `--model_name"):
      for name in re.findall(r"--(\w+)\b(?!\.\.\.)", here):
        assert name in known or name == "lr_", line


# Messages ---------------------------------------------------------------------


@functools.cache
def sources():
  """The product's files, with strings of several lines in one."""
  texts = []
  for path in tracked():
    if {*path.parts} & {"tests", "benchmarks", "research", "docs"}:
      continue
    if path.suffix in (".py", ".sh"):
      texts.append(re.sub(r"""["']\s*\n\s*f?["']""", "", read(path)))
  return texts


def is_said(message):
  """Whether one file has the parts between a message's values, in order."""
  message = re.sub("^.*: error: ", "", message)  # the program's name
  # Values: ..., capitals, numbers, lists.
  parts = re.split(r"0x\.\.|\.\.\.|\b[NMB]\b|\[?\b\d[\d.]*\b\]?", message)
  parts = filter(None, (part.strip(" '():,") for part in parts))
  in_order = re.compile(".*".join(map(re.escape, parts)), re.S)
  return any(map(in_order.search, sources()))


@pytest.mark.parametrize("page", ["README.md", "docs/troubleshooting.md"])
def test_quoted_messages_are_in_the_sources(page):
  table = read(page).split("| message")[1].split("\n\n")[0]
  quoted = re.findall(r"^\| `([^|]*)` \|", table, re.M)
  assert len(quoted) > 5
  for message in quoted:
    assert is_said(message), f"{page}: {message}"


@pytest.mark.slow
def test_the_commands_of_the_readme_paste(tmp_path):
  """Its `sh` blocks in order, but `make test` (this is it), then a search's."""
  for path in tracked():
    if (ROOT / path).is_file():
      (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(ROOT / path, tmp_path / path)
  (tmp_path / ".venv").symlink_to((ROOT / ".venv").resolve())
  blocks = []
  for page in ("README.md", "docs/search.md"):
    blocks += re.findall(r"^```sh\n(.*?)^```", read(page), re.M | re.S)
  # The environment is there: make must not make it again.
  script = """set -euo pipefail
make() { [ "$1" = test ] || command make -o .venv/.ready "$@"; }
"""
  done = subprocess.run(
    ["bash", "-c", script + "".join(blocks)],
    cwd=tmp_path,
    env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
