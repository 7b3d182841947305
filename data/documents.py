"""Documents of any input: plain text, JSON lines, tables, Parquet, Arrow.

A file's content, or else its name, tells its format (`_FORMATS`). Files are cut
into pieces for many workers; the documents are the same for any pieces. Memory
holds a document, or a batch of rows.
"""

import contextlib
import csv
import dataclasses
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from common import errors, input_files, json_files
from data import records, text_files
from data.text_files import Piece, TextFormat

MAX_DOCUMENT = 16 << 20  # characters; longer documents of plain text are cut
_BATCH_ROWS = 1024
_NEEDS = "pip install -r requirements/text.txt"


class Document(NamedTuple):
  """A text with a name, the same for any cut of the input."""

  id: str  # --id_field's value, or else FILE:PLACE
  lines: list[str]  # stripped; "" between paragraphs, not split into sentences


@dataclasses.dataclass(frozen=True)
class DocumentFormat:
  """How documents are read; DataError for an impossible encoding."""

  text: TextFormat = TextFormat()
  id_field: str = "id"
  whole_files: bool = False  # a file of plain text is one document


def _lines(text: str) -> list[str]:
  """The lines of a document, without blank ones at its ends."""
  lines = list(text_files.lines_of(text.strip()))
  return lines if any(lines) else []


# Formats ----------------------------------------------------------------------


def _text_documents(piece: Piece, form: DocumentFormat) -> Iterator[Document]:
  """What stands between blank lines, from the first blank one in the piece.

  The document after a blank line belongs to the piece of that line.
  """
  to_end = dataclasses.replace(piece, end=math.inf)
  name, lines, size = "", list[str](), 0
  is_ours = piece.start == 0
  for place, line in text_files.placed_lines(to_end, form.text):
    if lines and (not line or size >= MAX_DOCUMENT):
      yield Document(name, lines)
      lines, size = [], 0
    if not line:
      is_ours = True
    # After the piece only its last document goes on.
    if place >= piece.end and (not line or not is_ours):
      break
    if line and is_ours:
      name = name if lines else f"{piece.path}:{place}"
      lines.append(line)
      size += len(line)
  if lines:
    yield Document(name, lines)


def _whole_document(piece: Piece, form: DocumentFormat) -> Iterator[Document]:
  lines = [line for _, line in text_files.placed_lines(piece, form.text)]
  yield Document(piece.path, _lines("\n".join(lines)))


def _json_documents(piece: Piece, form: DocumentFormat) -> Iterator[Document]:
  for place, line in text_files.placed_lines(piece, form.text):
    if line:
      record = text_files.parse_record(piece, place, line, form.text)
      name = record.get(form.id_field, f"{piece.path}:{place}")
      yield Document(str(name), _lines(record[form.text.text_field]))


def _table_documents(piece: Piece, form: DocumentFormat) -> Iterator[Document]:
  """Rows of a CSV or TSV file with a header."""
  path = piece.path
  comma = "\t" if text_files.is_named(path, ".tsv") else ","
  csv.field_size_limit(text_files.MAX_RECORD_BYTES)
  with (
    input_files.unpacked(path) as (content, _),
    io.TextIOWrapper(content, _encoding(form), newline="") as f,
  ):
    rows = csv.DictReader(f, delimiter=comma, strict=True)
    try:
      _expect_column(form.text.text_field, rows.fieldnames or [], path)
      for row in rows:
        name = row.get(form.id_field) or f"{path}:{rows.line_num}"
        yield Document(name, _lines(row[form.text.text_field] or ""))
    except (csv.Error, UnicodeError) as e:
      raise errors.DataError(
        f"{path}: line {rows.line_num + 1}: no row of a table in "
        f"{form.text.encoding} ({e})"
      ) from e


def _encoding(form: DocumentFormat) -> str:
  return "utf-8-sig" if form.text.is_utf8 else form.text.encoding


def _expect_column(name: str, columns: Iterable[str], path: str) -> None:
  if name not in columns:
    raise errors.DataError(
      f"{path}: has no column {name}, but {', '.join(columns)}: name one of "
      "them by --text_field"
    )


@contextlib.contextmanager
def _arrow_library(path: str) -> Iterator:
  """pyarrow; its errors, and that it is missing, become a DataError."""
  try:
    import pyarrow
    import pyarrow.parquet
  except ImportError as e:
    raise errors.DataError(f"{path}: needs pyarrow: {_NEEDS}") from e
  try:
    yield pyarrow
  except (pyarrow.ArrowException, OSError) as e:
    raise errors.DataError(
      f"{path}: damaged ({' '.join(str(e).split())})"
    ) from e


def _parquet_pieces(path: str) -> list[Piece]:
  """A piece for each group of rows."""
  with _arrow_library(path) as arrow, arrow.parquet.ParquetFile(path) as f:
    return [Piece(path, i, i + 1) for i in range(f.num_row_groups)]


def _parquet_documents(
  piece: Piece, form: DocumentFormat
) -> Iterator[Document]:
  with (
    _arrow_library(piece.path) as arrow,
    arrow.parquet.ParquetFile(piece.path) as f,
  ):
    columns = _columns(f.schema_arrow, piece.path, form)
    groups = map(f.metadata.row_group, range(piece.start))
    row = sum(group.num_rows for group in groups)
    batches = f.iter_batches(_BATCH_ROWS, [piece.start], columns)
    yield from _row_documents(batches, row, piece.path, form)


def _arrow_documents(piece: Piece, form: DocumentFormat) -> Iterator[Document]:
  path = piece.path
  with _arrow_library(path) as arrow, arrow.memory_map(path) as f:
    # A file with a list of its batches, or a stream of them.
    if f.read(6) == b"ARROW1":
      reader = arrow.ipc.open_file(f)
      batches = map(reader.get_batch, range(reader.num_record_batches))
    else:
      f.seek(0)
      batches = reader = arrow.ipc.open_stream(f)
    columns = _columns(reader.schema, path, form)
    rows = (batch.select(columns) for batch in batches)
    yield from _row_documents(rows, 0, path, form)


def _columns(schema, path: str, form: DocumentFormat) -> list[str]:
  """The names of the columns that are read."""
  name = form.text.text_field
  _expect_column(name, schema.names, path)
  kind = str(schema.field(name).type)
  if not re.match("(large_)?string|dictionary<values=(large_)?string", kind):
    raise errors.DataError(
      f"{path}: its column {name} holds {kind}, not text: name another one by "
      "--text_field"
    )
  return [name, *({form.id_field} & set(schema.names))]


def _row_documents(
  batches: Iterable, row: int, path: str, form: DocumentFormat
) -> Iterator[Document]:
  for batch in batches:
    for start in range(0, batch.num_rows, _BATCH_ROWS):
      for record in batch.slice(start, _BATCH_ROWS).to_pylist():
        name = record.get(form.id_field)
        name = f"{path}:{row}" if name is None else str(name)
        yield Document(name, _lines(record[form.text.text_field] or ""))
        row += 1


def _one_piece(path: str) -> list[Piece]:
  return [Piece(path, 0, math.inf)]


class _Format(NamedTuple):
  read: Callable[[Piece, DocumentFormat], Iterator[Document]]
  # None: pieces of bytes.
  split: Callable[[str], list[Piece]] | None = _one_piece


_PLAIN, _WHOLE = _Format(_text_documents, None), _Format(_whole_document)
_BY_KIND = {
  input_files.PARQUET: _Format(_parquet_documents, _parquet_pieces),
  input_files.ARROW: _Format(_arrow_documents),
}
_BY_NAME = {
  (".jsonl", ".ndjson"): _Format(_json_documents, None),
  (".csv", ".tsv"): _Format(_table_documents),
}


def _format_of(path: str, form: DocumentFormat) -> _Format:
  with input_files.open_input(path, *input_files.COMPRESSED, *_BY_KIND) as f:
    kind = input_files.kind_of(f, path, *input_files.COMPRESSED, *_BY_KIND)
  if kind in _BY_KIND:
    return _BY_KIND[kind]
  for endings, found in _BY_NAME.items():
    if text_files.is_named(path, *endings):
      return found
  return _WHOLE if form.whole_files else _PLAIN


# All of them ------------------------------------------------------------------


def expand_patterns(patterns: str) -> list[str]:
  """As `records.expand_patterns`, with folders of Hugging Face's data sets."""
  paths = []
  for name in records.listed(patterns):
    state = os.path.join(name, "state.json")
    if os.path.exists(state):
      files = json_files.read(state, {"_data_files": [{"filename": str}]})
      paths += [os.path.join(name, f["filename"]) for f in files["_data_files"]]
    elif os.path.exists(splits := os.path.join(name, "dataset_dict.json")):
      found = json_files.read(splits, {"splits": [str]})["splits"]
      raise errors.DataError(
        f"{name}: holds several data sets, name the folder of one: "
        + ", ".join(os.path.join(name, split) for split in found)
      )
    else:
      paths += records.expand_patterns(name)
  return sorted(set(paths))


def split_into_pieces(
  paths: Iterable[str], form: DocumentFormat
) -> list[Piece]:
  """Pieces of all files, in order; DataError for one that cannot be read."""
  pieces: list[Piece] = []
  for path in paths:
    split = _format_of(path, form).split
    if split:
      pieces += split(path)
    else:
      pieces += text_files.split_into_pieces([path], form.text)
  return pieces


def read_documents(piece: Piece, form: DocumentFormat) -> Iterator[Document]:
  """The documents of a piece; DataError names the place of bad input."""
  return _format_of(piece.path, form).read(piece, form)
