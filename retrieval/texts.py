"""The texts of a file, each with an id, in an order that numbers them."""

import array
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from common import stores
from common.input_files import Format
from corpus import documents, text_files
from corpus.documents import DocumentFormat
from corpus.text_files import Piece, TextFormat

# Of a folder of BEIR's form, see beir.py.
CORPUS_FILE, QUERIES_FILE = "corpus.jsonl", "queries.jsonl"
_BEIR = DocumentFormat(TextFormat(text_field="text"), "_id")
_LINES = (Format.TEXT, Format.JSON_LINES)
_PIECE_BYTES = 256 << 10
_END = "\0"  # of an id: text holds no NUL


class Texts(NamedTuple):
  """Files of texts, in pieces that can be read alone."""

  pieces: list[Piece]
  form: DocumentFormat
  are_beir: bool = False

  def read(self) -> Iterator[tuple[str, str]]:
    """(id, text) of each; DataError names a bad line.

    A line of plain text is a text, but for empty ones, and so is a record or
    a row, whose text may be empty. An id is the value of the column of ids, or
    FILE:N, the text's first byte or row.
    """
    form = self.form
    for piece in self.pieces:
      if piece.format is Format.TEXT:
        for offset, line in text_files.offset_lines(piece, form.text):
          if line:
            yield f"{piece.path}:{offset}", line
        continue
      field = text_files.field_of(piece, form.text)
      for offset, record in documents.RECORDS[piece.format](piece, form):
        name = documents.name_of(record, f"{piece.path}:{offset}", form)
        title = record.get("title") if self.are_beir else ""
        parts = str(title or ""), record[field] or ""
        yield name, text_files.only_text(" ".join(parts).strip())


def is_beir(path: str) -> bool:
  """Whether a path is a folder of BEIR's form."""
  file = os.path.join(path, CORPUS_FILE)
  # A URL's query would hide the file's name, which follows it.
  return stores.path_of(file) == file and stores.at(file).is_file()


def of_beir(path: str) -> Texts:
  """The documents of a file of BEIR's form, titles first, or its queries."""
  return _texts([documents.Source(path)], _BEIR)._replace(are_beir=True)


def find(
  files: str, text_field: str, id_field: str, name: str = CORPUS_FILE
) -> Texts:
  """The texts of files, names and globs, or of a folder of BEIR's form.

  `name`: the file of such a folder. DataError for a file without the columns.
  """
  if is_beir(files):
    return of_beir(os.path.join(files, name))
  form = DocumentFormat(TextFormat(text_field=text_field), id_field)
  return _texts(documents.expand_patterns(files), form)


def _texts(sources: list[documents.Source], form: DocumentFormat) -> Texts:
  pieces: list[Piece] = []
  for piece in documents.split_into_pieces(sources, form):
    # Lines may be cut anywhere; a model takes long for what is read at once.
    step = _PIECE_BYTES if piece.format in _LINES else piece.end
    start = piece.start
    while start + step < piece.end < math.inf:
      pieces.append(piece._replace(start=start, end=start + step))
      start += int(step)
    pieces.append(piece._replace(start=start))
  return Texts(pieces, form)


class OnDisk:
  """Texts by number, in a temporary file: memory holds 8 bytes of each."""

  def __init__(self, texts: Iterable[tuple[str, str]]):
    self._file, self._offsets = tempfile.TemporaryFile(), array.array("q", [0])
    for name, text in texts:
      self._file.write(f"{name}{_END}{text}".encode())
      self._offsets.append(self._file.tell())

  def __len__(self) -> int:
    return len(self._offsets) - 1

  def __getitem__(self, number: int) -> tuple[str, str]:
    """(id, text)."""
    start, end = self._offsets[number : number + 2]
    self._file.seek(start)
    name, _, text = self._file.read(end - start).decode().partition(_END)
    return name, text
