"""Documents of any input: plain text, JSON lines, tables, Parquet, Arrow.

Files of any format (`input_files.format_of`) are cut into pieces for many
workers, and the documents are the same for any pieces. Memory holds one
document, or a few rows.
"""

import contextlib
import csv
import dataclasses
import functools
import itertools
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from common import input_files, json_files, stores
from common.errors import DataError, needing
from common.input_files import Format
from corpus import text_files
from corpus.text_files import Piece, TextFormat

MAX_DOCUMENT_BYTES = 64 << 20  # longer documents of plain text are cut
_BATCH_ROWS = 256  # that are in memory at a time
_LABEL = re.compile("[BIOESLU](-.+)?")  # of a word


class Source(NamedTuple):
  """A file of text."""

  path: str
  field: str = ""  # of its records; "": as `TextFormat` says


class Document(NamedTuple):
  """A text and its name; both are the same for any cut into pieces."""

  id: str  # the value of --id_field, or else FILE:N, its first byte or row
  # Stripped, not split into sentences; "" between paragraphs only. A record
  # without text has none.
  lines: list[str]


@dataclasses.dataclass(frozen=True)
class DocumentFormat:
  """How documents are read; without a `text_field` all strings are text."""

  text: TextFormat = TextFormat()  # but for its `prose`
  id_field: str = "id"  # of a record or a table
  whole_files: bool = False  # blank lines of plain text end paragraphs only

  def of_all_strings(self) -> "DocumentFormat":
    text = dataclasses.replace(self.text, text_field=None)
    return dataclasses.replace(self, text=text, whole_files=False)


def expand_patterns(patterns: str) -> list[Source]:
  """As `input_files.expand_patterns`; a folder of `datasets` is its files.

  An item may name the field of its files, as FILES:FIELD.
  """
  sources: set[Source] = set()
  for item in input_files.listed(patterns):
    paths: list[str] = []
    name, _, field = item.rpartition(":")
    # The rest of a URL is no field, nor is that of a file's own name.
    if not name or "/" in field or stores.at(item).matches():
      name, field = item, ""
    state = os.path.join(name, "state.json")
    splits = os.path.join(name, "dataset_dict.json")
    if stores.at(name).is_file():  # a URL's query would hide what follows it
      paths.append(name)
    elif stores.at(state).is_file():
      form = {"_data_files": [{"filename": str}]}
      for file in json_files.read(state, form)["_data_files"]:
        paths.append(os.path.join(name, file["filename"]))
    elif stores.at(splits).is_file():
      folders = json_files.read(splits, {"splits": [str]})["splits"]
      raise DataError(
        f"{name}: holds several data sets: name the folders of those to read, "
        + ",".join(os.path.join(name, folder) for folder in folders)
      )
    else:
      paths += input_files.expand_patterns(name)
    sources |= {Source(path, field) for path in paths}
  return sorted(sources)


def split_into_pieces(
  sources: Iterable[Source], form: DocumentFormat
) -> list[Piece]:
  """Pieces of all files, in order; DataError for one that cannot be read."""
  pieces: list[Piece] = []
  sources = list(sources)
  formats = input_files.formats_of(path for path, _ in sources)
  for path, field in sources:
    if path in formats:
      pieces += _split(Piece(path, 0, math.inf, formats[path], field), form)
  return pieces


def read_documents(
  pieces: Iterable[Piece], form: DocumentFormat
) -> Iterator[Document]:
  """The documents of pieces, in order; DataError says where bad text is."""
  for piece in pieces:
    if piece.format is Format.TEXT:
      yield from _read_plain(piece, form)
      continue
    field = text_files.field_of(piece, form.text)
    for number, record in RECORDS[piece.format](piece, form):
      # `number` is the record's offset or row.
      name = name_of(record, f"{piece.path}:{number}", form)
      lines = list(text_files.lines_of(record[field]))
      yield Document(name, _trimmed(lines))


def name_of(record: Mapping, default: str, form: DocumentFormat) -> str:
  """A record's name: the value of its field of names, or a default."""
  own = record.get(form.id_field)
  return text_files.only_text(default if own in (None, "") else str(own))


def read_strings(
  pieces: Iterable[Piece], form: DocumentFormat
) -> Iterator[str]:
  """The texts of pieces; all strings where no field is named.

  The words of a sentence that has one on each line, or in a list, are a text.
  """
  for piece in pieces:
    is_table = piece.format is Format.TSV
    names_field = text_files.field_of(piece, form.text) is not None
    if names_field and piece.format != Format.TEXT:
      for document in read_documents([piece], form):
        yield "\n".join(document.lines)
    elif is_table or piece.format is Format.TEXT:
      for document in _read_plain(piece, form):
        yield from _strings_of_lines(document.lines, is_table)
    else:
      for _, record in RECORDS[piece.format](piece, form):
        yield from _strings_of(record)


def _strings_of(value: Any) -> Iterator[str]:
  """All strings in a value of JSON."""
  items = value.values() if isinstance(value, dict) else value
  if isinstance(value, str):
    yield value
  elif isinstance(value, (list, dict)):
    words = [item for item in items if isinstance(item, str)]
    if isinstance(value, list) and words:
      yield " ".join(words)
    for item in items:
      yield from _strings_of(item)


def _strings_of_lines(lines: list[str], is_table: bool) -> Iterator[str]:
  """The text or the cells of lines; or their words, if they end in labels."""
  words = []
  for line in lines:
    fields = line.split()
    # A text that counts has 13 words or more, a table of words fewer columns.
    if 1 < len(fields) < 13 and _LABEL.fullmatch(fields[-1]):
      words.append(fields[0])
  if len(words) == len(lines):
    yield " ".join(words)
  elif not is_table:
    yield "\n".join(lines)
  else:
    for line in lines:
      yield from line.split("\t")


# Plain text and records -------------------------------------------------------


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


# (number, record) of each record: its offset or row, and its fields.
_Records = Iterator[tuple[int, Mapping]]


def _json_value(piece: Piece, form: DocumentFormat) -> _Records:
  with input_files.unpacked(piece.path) as (content, _):
    try:
      yield 0, {"": json_files.parse(content.read(), strict=False)}
    except ValueError as e:
      raise DataError(f"{piece.path}: no JSON: {str(e)[:200]}") from e


def _trimmed(lines: list[str]) -> list[str]:
  """Lines without blank ones at the ends."""
  text = "\n".join(lines).strip("\n")
  return text.split("\n") if text else []


# Tables of text ---------------------------------------------------------------


def tsv_rows(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
  """(line, cells) of each row; an empty line has no cells."""
  # The csv module would end a line at \r, and take quotes for marks.
  for line, text in enumerate(lines, 1):
    cells = text.replace("\0", "").removesuffix("\n").removesuffix("\r")
    yield line, cells.split("\t") if cells else []


def csv_rows(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
  """As `tsv_rows`, by the first line of a row; csv.Error names it."""
  # The module's own limit of 128 KB is shorter than many documents.
  csv.field_size_limit(text_files.MAX_RECORD_BYTES)
  reader = csv.reader(lines, strict=True)
  start = 1
  try:
    for row in reader:
      yield start, row
      start = reader.line_num + 1
  except csv.Error as e:
    reason = str(e).split(" - ")[0]  # what follows is advice for programmers
    raise csv.Error(f"line {start}: no row of the table ({reason})") from e


def _table(piece: Piece, form: DocumentFormat) -> _Records:
  rows = tsv_rows if piece.format is Format.TSV else csv_rows
  remedy = "write a tab or a line break in a cell as a space"
  if piece.format is Format.CSV:
    remedy = (
      'put cells with quotes, line breaks or commas in quotes, as "a ""b"" c"'
    )
  lines = text_files.table_lines(piece.path, form.text)
  all_rows = filter(operator.itemgetter(1), rows(lines))  # not the empty ones
  try:
    _, header = next(all_rows, (1, []))
    _expect_column(header, piece, form)
    first, names = [], [*header]
    if text_files.field_of(piece, form.text) is None:  # no header, or unused
      first, names = [(1, header)], [*map(str, range(len(header)))]
    for number, (line, row) in enumerate(itertools.chain(first, all_rows)):
      if len(row) != len(header):
        raise csv.Error(
          f"line {line}: no row of the table ({len(row)} cells, but "
          f"{len(header)} in the header)"
        )
      yield number, dict(zip(names, row, strict=True))
  except csv.Error as e:
    raise DataError(f"{piece.path}: {e}: {remedy}") from e


def _expect_column(
  names: list[str], piece: Piece, form: DocumentFormat
) -> None:
  field = text_files.field_of(piece, form.text)
  if field is not None and field not in names:
    raise DataError(
      f"{piece.path}: none of its {len(names)} columns is "
      f"{text_files.flag_of(piece, form.text)}: name another "
      f"({', '.join(names)}), or one for these files alone, as FILES:FIELD"
    )


# Tables of pyarrow ------------------------------------------------------------


class _Group(NamedTuple):
  """Rows that can be read alone: a row group, or a record batch."""

  rows: int
  bytes: int
  read: Callable[[list[str]], Iterable]  # columns -> record batches


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
  """The library; DataError for its errors about a file."""
  with needing("text", f"{where()}: only pyarrow reads it"):
    import pyarrow.parquet
  try:
    yield pyarrow
  except (pyarrow.ArrowException, OSError) as e:
    if input_files.is_of_system(e):
      raise
    reason = " ".join(str(e).split())
    raise DataError(
      f"{where()}: damaged ({reason[:200]}): copy the file again"
    ) from e


# Functions of pyarrow and a file's name: its schema and groups.
TABLES = {Format.PARQUET: _parquet_table, Format.ARROW: _arrow_table}


def table_rows(path: str, form: Format) -> Iterator[dict[str, Any]]:
  """The rows of a table, column -> value; `DataError` if it is damaged."""
  with _pyarrow(lambda: path) as arrow:
    schema, groups = TABLES[form](arrow, path)
    for group in groups:
      for batch in group.read(schema.names):
        yield from batch.to_pylist()


def _split_groups(whole: Piece, form: DocumentFormat) -> list[Piece]:
  """Consecutive groups of about `text_files.PIECE_BYTES`."""
  pieces, start, size_of = [], 0, operator.attrgetter("bytes")
  with _pyarrow(lambda: whole.path) as arrow:
    schema, groups = TABLES[whole.format](arrow, whole.path)
    _columns(schema, whole, form)
    for part in text_files.gathered(groups, size_of, text_files.PIECE_BYTES):
      pieces.append(whole._replace(start=start, end=start + len(part)))
      start += len(part)
  return pieces


def _groups(piece: Piece, form: DocumentFormat) -> _Records:
  row = 0
  with _pyarrow(lambda: f"{piece.path}: row {row} or a later one") as arrow:
    schema, groups = TABLES[piece.format](arrow, piece.path)
    columns = _columns(schema, piece, form)
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
            yield row, record
            row += 1


def _columns(schema: Any, piece: Piece, form: DocumentFormat) -> list[str]:
  """The names of the columns to read; DataError if none holds the text."""
  name = text_files.field_of(piece, form.text)
  if name is None:
    return schema.names
  _expect_column(schema.names, piece, form)
  kind = str(schema.field(name).type)
  # A shard without any text has the type null.
  if not re.match(r"(dictionary<values=)?(large_)?string|null$", kind):
    raise DataError(
      f"{piece.path}: the column {text_files.flag_of(piece, form.text)} holds "
      f"{kind}, not text: name another ({', '.join(schema.names)})"
    )
  return list(dict.fromkeys([name, *({form.id_field} & set(schema.names))]))


# Formats ----------------------------------------------------------------------


RECORDS: dict[Format, Callable[[Piece, DocumentFormat], _Records]] = {
  Format.JSON_LINES: lambda piece, form: text_files.records(piece, form.text),
  Format.JSON: _json_value,
  Format.CSV: _table,
  Format.TSV: _table,
  Format.PARQUET: _groups,
  Format.ARROW: _groups,
}


def _split(whole: Piece, form: DocumentFormat) -> list[Piece]:
  """The pieces of a file; DataError if it has not the field of its text."""
  if whole.format in TABLES:
    return _split_groups(whole, form)
  is_lines = whole.format in (Format.TEXT, Format.JSON_LINES)
  if is_lines and not (form.whole_files and whole.format is Format.TEXT):
    return text_files.pieces_of(whole, form.text)
  field = text_files.field_of(whole, form.text)
  if whole.format is Format.JSON and field is not None:
    raise DataError(
      f"{whole.path}: holds JSON that is not a record a line: write each "
      "document on a line of its own, as jq -c '.[]' does with a list"
    )
  # Quoted cells may hold line breaks.
  if whole.format in (Format.CSV, Format.TSV):
    next(_table(whole, form), None)
  return [whole]
