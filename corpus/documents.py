"""Documents of any input: plain text, JSON lines, tables, Parquet, Arrow.

A file's format is known by its first bytes, or else by its name (`_BY_CONTENT`,
`_BY_NAME`). Files are cut into pieces for many workers, and the documents are
the same for any pieces. Memory holds one document, or a few rows.
"""

import contextlib
import csv
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from common import input_files, json_files, stores
from common.errors import DataError
from corpus import text_files
from corpus.text_files import Piece, TextFormat

MAX_DOCUMENT_BYTES = 64 << 20  # longer documents of plain text are cut
_BATCH_ROWS = 256  # that are in memory at a time


class Document(NamedTuple):
  """A text and its name; both are the same for any cut into pieces."""

  id: str  # the value of --id_field, or else FILE:N, its first byte or row
  # Stripped, not split into sentences; "" between paragraphs only. A record
  # without text has none.
  lines: list[str]


@dataclasses.dataclass(frozen=True)
class DocumentFormat:
  """How documents are read."""

  text: TextFormat = TextFormat()  # but for its `prose`
  id_field: str = "id"  # of a record or a table
  whole_files: bool = False  # blank lines of plain text end paragraphs only


def expand_patterns(patterns: str) -> list[str]:
  """As `input_files.expand_patterns`; a folder of `datasets` is its files."""
  paths: set[str] = set()
  for name in input_files.listed(patterns):
    state = os.path.join(name, "state.json")
    splits = os.path.join(name, "dataset_dict.json")
    if stores.at(state).is_file():
      form = {"_data_files": [{"filename": str}]}
      for file in json_files.read(state, form)["_data_files"]:
        paths.add(os.path.join(name, file["filename"]))
    elif stores.at(splits).is_file():
      folders = json_files.read(splits, {"splits": [str]})["splits"]
      raise DataError(
        f"{name}: holds several data sets: name the folders of those to read, "
        + ",".join(os.path.join(name, folder) for folder in folders)
      )
    else:
      paths.update(input_files.expand_patterns(name))
  return sorted(paths)


def split_into_pieces(
  paths: Iterable[str], form: DocumentFormat
) -> list[Piece]:
  """Pieces of all files, in order; DataError for one that cannot be read."""
  pieces: list[Piece] = []
  for path in paths:
    pieces += _format_of(path, form).split(path, form)
  return pieces


def read_documents(
  pieces: Iterable[Piece], form: DocumentFormat
) -> Iterator[Document]:
  """The documents of pieces, in order; DataError says where bad text is."""
  for piece in pieces:
    yield from _format_of(piece.path, form).read(piece, form)


# Plain text and records -------------------------------------------------------


def _split_bytes(path: str, form: DocumentFormat) -> list[Piece]:
  return text_files.split_into_pieces([path], form.text)


def _one_piece(path: str, _: DocumentFormat) -> list[Piece]:
  return [Piece(path, 0, math.inf)]


def _read_plain(piece: Piece, form: DocumentFormat) -> Iterator[Document]:
  # A document belongs to the piece with the blank line before it, and is read
  # beyond the end of that piece.
  to_end = piece._replace(end=math.inf)
  lines: list[str] = []
  start, is_inside = 0, piece.start == 0
  for offset, line in text_files.offset_lines(to_end, form.text):
    is_border = not line and not form.whole_files
    if lines and (is_border or offset - start >= MAX_DOCUMENT_BYTES):
      yield Document(f"{piece.path}:{start}", _trimmed(lines))
      lines = []
    if offset >= piece.end and (is_border or not is_inside):
      return
    is_inside = is_inside or is_border
    if is_inside and (line or lines):
      start = start if lines else offset
      lines.append(line)
  if lines:
    yield Document(f"{piece.path}:{start}", _trimmed(lines))


def _read_json(piece: Piece, form: DocumentFormat) -> Iterator[Document]:
  for offset, line in text_files.offset_lines(piece, form.text):
    if line:
      record = text_files.parse_record(piece, offset, line, form.text)
      yield _record_document(record, offset, piece, form)


def _record_document(
  record: Mapping[str, Any], number: int, piece: Piece, form: DocumentFormat
) -> Document:
  """The document of a record; `number` is its offset or row."""
  own = record.get(form.id_field)
  name = f"{piece.path}:{number}" if own in (None, "") else str(own)
  lines = list(text_files.lines_of(record[form.text.text_field]))
  return Document(text_files.only_text(name), _trimmed(lines))


def _trimmed(lines: list[str]) -> list[str]:
  """Lines without blank ones at the ends."""
  text = "\n".join(lines).strip("\n")
  return text.split("\n") if text else []


# Tables of text ---------------------------------------------------------------


def _read_csv(
  piece: Piece, form: DocumentFormat, delimiter: str
) -> Iterator[Document]:
  # The module's own limit of 128 KB is shorter than many documents.
  csv.field_size_limit(text_files.MAX_RECORD_BYTES)
  lines = text_files.table_lines(piece.path, form.text)
  reader = csv.reader(lines, delimiter=delimiter, strict=True)
  start, number = 1, 0  # the line where the next row starts; its number
  try:
    header = next(filter(None, reader), [])
    _expect_column(header, piece.path, form)
    start = reader.line_num + 1
    for row in reader:
      if row and len(row) != len(header):
        raise csv.Error(f"{len(row)} cells, but {len(header)} in the header")
      if row:  # no blank line
        record = dict(zip(header, row, strict=True))
        yield _record_document(record, number, piece, form)
        number += 1
      start = reader.line_num + 1
  except csv.Error as e:
    raise DataError(
      f"{piece.path}: line {start}: no row of the table ({e}): put cells with "
      'quotes, line breaks or the delimiter in quotes, as "a ""b"" c"'
    ) from e


def _expect_column(names: list[str], path: str, form: DocumentFormat) -> None:
  if form.text.text_field not in names:
    raise DataError(
      f"{path}: none of its {len(names)} columns is "
      f"--text_field={form.text.text_field}: name another ({', '.join(names)})"
    )


# Tables of pyarrow ------------------------------------------------------------


class _Group(NamedTuple):
  """Rows that can be read alone: a row group, or a record batch."""

  rows: int
  bytes: int
  read: Callable[[list[str]], Iterable]  # columns -> record batches


# pyarrow and the name of a file -> its schema and groups.
_OpenTable = Callable[[Any, str], tuple[Any, Iterator[_Group]]]


def _parquet_table(arrow: Any, path: str) -> tuple[Any, Iterator[_Group]]:
  local, size = stores.at(path).local(), 1 << 20
  file = arrow.parquet.ParquetFile(local, buffer_size=size, pre_buffer=False)

  def group(number: int) -> _Group:
    facts = file.metadata.row_group(number)
    read = functools.partial(
      file.iter_batches, _BATCH_ROWS, [number], use_threads=False
    )
    return _Group(facts.num_rows, facts.total_byte_size, read)

  return file.schema_arrow, map(group, range(file.num_row_groups))


def _arrow_table(arrow: Any, path: str) -> tuple[Any, Iterator[_Group]]:
  """Opens a file, which lists its record batches, or a stream of them."""
  file, mark = arrow.memory_map(stores.at(path).local()), b"ARROW1"
  is_file = file.read(len(mark)) == mark
  file.seek(0)
  if is_file:
    reader = arrow.ipc.open_file(file)
    batches = map(reader.get_batch, range(reader.num_record_batches))
  else:
    batches = reader = arrow.ipc.open_stream(file)

  def group(batch: Any) -> _Group:
    read = lambda columns: [batch.select(columns)]
    return _Group(batch.num_rows, batch.nbytes, read)

  return reader.schema, map(group, batches)


@contextlib.contextmanager
def _pyarrow(where: Callable[[], str]) -> Iterator[Any]:
  """The library; DataError without it, and for its errors about a file."""
  try:
    import pyarrow.parquet
  except ImportError as e:
    raise DataError(
      f"{where()}: only pyarrow reads it, which is not here ({e}): install it "
      "by pip install -r requirements/text.txt"
    ) from e
  try:
    yield pyarrow
  except (pyarrow.ArrowException, OSError) as e:
    reason = " ".join(str(e).split())
    raise DataError(
      f"{where()}: damaged ({reason[:200]}): copy the file again"
    ) from e


def _split_groups(
  path: str, form: DocumentFormat, open_table: _OpenTable
) -> list[Piece]:
  """Consecutive groups of about `text_files.PIECE_BYTES`."""
  pieces, start, size, end = [], 0, 0, 0
  with _pyarrow(lambda: path) as arrow:
    schema, groups = open_table(arrow, path)
    _columns(schema, path, form)
    for end, group in enumerate(groups, 1):
      size += group.bytes
      if size >= text_files.PIECE_BYTES:
        pieces.append(Piece(path, start, end))
        start, size = end, 0
  if end > start:
    pieces.append(Piece(path, start, end))
  return pieces


def _read_groups(
  piece: Piece, form: DocumentFormat, open_table: _OpenTable
) -> Iterator[Document]:
  row = 0
  with _pyarrow(lambda: f"{piece.path}: row {row} or a later one") as arrow:
    schema, groups = open_table(arrow, piece.path)
    columns = _columns(schema, piece.path, form)
    for number, group in enumerate(groups):
      # Groups are opened in order, so those before the piece are counted only.
      if number == piece.end:
        return
      if number < piece.start:
        row += group.rows
        continue
      for batch in group.read(columns):
        for first in range(0, batch.num_rows, _BATCH_ROWS):
          some = batch.slice(first, _BATCH_ROWS)
          some.validate(full=True)  # else bad offsets or UTF-8 crash it
          for record in some.to_pylist():
            yield _record_document(record, row, piece, form)
            row += 1


def _columns(schema: Any, path: str, form: DocumentFormat) -> list[str]:
  """The names of the columns to read; DataError if none holds the text."""
  name = form.text.text_field
  _expect_column(schema.names, path, form)
  kind = str(schema.field(name).type)
  if not re.match(r"(dictionary<values=)?(large_)?string", kind):
    raise DataError(
      f"{path}: the column --text_field={name} holds {kind}, not text: name "
      f"another ({', '.join(schema.names)})"
    )
  return list(dict.fromkeys([name, *({form.id_field} & set(schema.names))]))


# Formats ----------------------------------------------------------------------


class _Format(NamedTuple):
  split: Callable[[str, DocumentFormat], list[Piece]]
  read: Callable[[Piece, DocumentFormat], Iterator[Document]]


def _table_format(open_table: _OpenTable) -> _Format:
  return _Format(
    functools.partial(_split_groups, open_table=open_table),
    functools.partial(_read_groups, open_table=open_table),
  )


_BY_CONTENT = {
  input_files.PARQUET: _table_format(_parquet_table),
  input_files.ARROW: _table_format(_arrow_table),
}
_BY_NAME = {
  **dict.fromkeys(text_files.JSON_LINES, _Format(_split_bytes, _read_json)),
  # Quoted cells may hold line breaks.
  ".csv": _Format(_one_piece, functools.partial(_read_csv, delimiter=",")),
  ".tsv": _Format(_one_piece, functools.partial(_read_csv, delimiter="\t")),
}


def _format_of(path: str, form: DocumentFormat) -> _Format:
  readable = (*input_files.COMPRESSED, *_BY_CONTENT)
  with input_files.open_input(path, *readable) as f:
    kind = input_files.kind_of(f, path, *readable)
  if kind in _BY_CONTENT:
    return _BY_CONTENT[kind]
  for ending, named in _BY_NAME.items():
    if text_files.is_named(path, ending):
      return named
  split = _one_piece if form.whole_files else _split_bytes
  return _Format(split, _read_plain)
