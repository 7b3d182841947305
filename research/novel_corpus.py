"""Makes a corpus of novels, film reviews and news, out of three repositories.

  git clone https://github.com/computationalstylistics/100_english_novels
  git clone https://github.com/COST-ELTeC/ELTeC-eng
  git clone https://github.com/nltk/nltk_data
  python research/novel_corpus.py FOLDER 100_english_novels ELTeC-eng nltk_data

writes FOLDER/*.txt: a paragraph or a sentence a line, a blank line after each
document. A novel gives a document for each 40 paragraphs. The novels, of 1840
to 1936, are in the public domain, the markup of ELTeC's is CC BY 4.0; reviews
and news as NLTK's packages say.
"""

import glob
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Iterable, Iterator

PARAGRAPHS = 40  # of a novel in one document
TEI = "{http://www.tei-c.org/ns/1.0}"


def one_line(text: str) -> str:
  """A text without line breaks, and without marks of italics."""
  return " ".join(text.replace("_", "").split())


def documents(lines: Iterable[str]) -> Iterator[list[str]]:
  """A novel's documents, without headings in capitals and rules."""
  text = [line for line in lines if re.search(r"[a-z]{2}", line)]
  for first in range(0, len(text), PARAGRAPHS):
    yield text[first : first + PARAGRAPHS]


def plain_novels(folder: str) -> Iterator[list[str]]:
  """Novels of plain text, whose paragraphs blank lines separate."""
  for path in sorted(glob.glob(os.path.join(folder, "corpus", "*.txt"))):
    with open(path, encoding="utf-8-sig", errors="replace") as f:
      yield from documents(map(one_line, re.split(r"\n\s*\n", f.read())))


def tei_novels(folder: str) -> Iterator[list[str]]:
  """The paragraphs in the bodies of TEI files."""
  for path in sorted(glob.glob(os.path.join(folder, "level1", "*.xml"))):
    body = ElementTree.parse(path).getroot().find(f".//{TEI}body")
    texts = ("".join(part.itertext()) for part in body.iter(f"{TEI}p"))
    yield from documents(map(one_line, texts))


def package(folder: str, name: str) -> Iterator[list[str]]:
  """The lines of each text of one of NLTK's corpora."""
  path = os.path.join(folder, "packages", "corpora", f"{name}.zip")
  with zipfile.ZipFile(path) as archive:
    for member in sorted(archive.namelist()):
      if member.endswith(".txt"):
        text = archive.read(member).decode("latin-1")
        yield [*map(one_line, text.splitlines())]


def news(folder: str) -> Iterator[list[str]]:
  """The news of the Australian Broadcasting Corporation."""
  for lines in package(folder, "abc"):
    yield from documents(lines)


def main() -> None:
  """Writes the files."""
  folder, plain_folder, tei_folder, nltk_folder = sys.argv[1:]
  os.makedirs(folder, exist_ok=True)
  for name, texts in {
    "novels": plain_novels(plain_folder),
    "eltec": tei_novels(tei_folder),
    "reviews": package(nltk_folder, "movie_reviews"),
    "news": news(nltk_folder),
  }.items():
    with open(os.path.join(folder, f"{name}.txt"), "w") as f:
      for lines in texts:
        f.write("\n".join(filter(None, lines)) + "\n\n")


if __name__ == "__main__":
  main()
