"""Tables of labelled text: TSV, CSV and JSON Lines, by column names."""

import csv
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from common import json_files
from common.console import tell
from common.errors import DataError

# Share of rows with missing fields, as in GLUE; more mean another format.
_LEFT_OUT_AT_MOST = 0.01

csv.field_size_limit(1 << 27)  # a document may be one field


class Row(NamedTuple):
  """A line of a table."""

  line: int  # in the file, from 1
  values: dict  # column -> str, or a value of JSON
  odd: str | None = None  # why it is no row; "" for an empty line


def read_table(
  path: str, columns: Sequence[str] | None = None, all_rows: bool = False
) -> list[Row]:
  """Reads a UTF-8 table without empty lines and, with a report, malformed rows.

  .tsv and .txt have tabs between fields, and quotes are text. .csv has commas,
  and quotes around fields with commas or line ends. .jsonl and .json have an
  object in each line. `columns` are the names if the first line is no header.
  With `all_rows` a skipped row is an error (but not empty lines at the end), so
  that the n-th row is the n-th of the file.
  """
  kinds = dict.fromkeys((".tsv", ".txt", ".csv"), _separated)
  kinds |= dict.fromkeys((".jsonl", ".json"), _objects)
  kind = os.path.splitext(path)[1].lower()
  if kind not in kinds:
    raise DataError(f"{path}: not a table by its name: {', '.join(kinds)}")
  try:
    # newline: \r alone is text and ends no line.
    with open(path, encoding="utf-8-sig", newline="\n") as f:
      found = list(kinds[kind](path, f, columns))
  except OSError as e:
    raise DataError(f"{path}: {e.strerror}") from e
  except UnicodeDecodeError as e:
    raise DataError(f"{path}: not UTF-8 ({e})") from e
  rows = _rows(path, found, all_rows)
  if not rows:
    raise DataError(f"{path}: no rows")
  return rows


def _rows(path: str, found: list, all_rows: bool) -> list[Row]:
  while found and found[-1].odd == "":
    found.pop()
  rows = [row for row in found if row.odd is None]
  left_out = [row for row in found if row.odd is not None]
  if all_rows and left_out:
    line, _, why = left_out[0]
    raise DataError(
      f"{path}: line {line} {why or 'is empty'}: there is one prediction for "
      "each row, so none is left out; correct the line, or remove it"
    )
  odd = [row for row in left_out if row.odd]
  if odd:
    count = len(rows) + len(odd)
    message = (
      f"{path}: {len(odd)} of {count} rows are not like the others, first "
      f"line {odd[0].line} {odd[0].odd}"
    )
    if len(odd) > _LEFT_OUT_AT_MOST * count:
      raise DataError(f"{message}: another format (tabs separate columns)?")
    tell(f"{message}; left out")
  return rows


def _separated(path: str, file, columns) -> Iterator[Row]:
  numbered = _csv(path, file) if path.lower().endswith(".csv") else _tsv(file)
  names = columns or next(numbered, (0, None))[1]
  if names is None:
    return
  if len(set(names)) < len(names):
    raise DataError(f"{path}: two columns have one name: {', '.join(names)}")
  for line, fields in numbered:
    if len(fields) == len(names):
      yield Row(line, dict(zip(names, fields, strict=True)))
    else:
      odd = f"has {len(fields)} fields for {len(names)} columns"
      yield Row(line, {}, odd if fields else "")


def _tsv(file) -> Iterator[tuple[int, list]]:
  """(line, fields); an empty line has no fields."""
  for number, line in enumerate(file, 1):
    text = line.replace("\0", "").removesuffix("\n").removesuffix("\r")
    yield number, text.split("\t") if text else []


def _csv(path: str, file) -> Iterator[tuple[int, list]]:
  reader = csv.reader(file, strict=True)
  try:
    for fields in reader:
      yield reader.line_num, fields
  except csv.Error as e:
    # After " - " comes advice for programmers.
    what = str(e).split(" - ")[0]
    raise DataError(f"{path}: line {reader.line_num}: {what}") from e


def _objects(path: str, file, columns) -> Iterator[Row]:
  del columns  # each line names its own
  for number, line in enumerate(file, 1):
    if not line.strip():
      yield Row(number, {}, "")
      continue
    try:
      values = json_files.parse(line, strict=False)
    except ValueError as e:
      raise DataError(f"{path}: line {number} is no JSON ({e})") from e
    if not isinstance(values, dict):
      raise DataError(f"{path}: line {number} is not an object")
    yield Row(number, values)


def column(
  path: str, rows: Sequence[Row], name: str, may_be_empty: bool = True
) -> list[str]:
  """Values as text; `DataError` if a row lacks the column."""
  values = []
  for row in rows:
    value = row.values.get(name)
    if not may_be_empty and value == "":
      raise DataError(f"{path}: line {row.line}: its {name!r} is empty")
    if not isinstance(value, (str, int, float)):
      raise DataError(
        f"{path}: line {row.line} has no {name!r}; its columns are "
        f"{', '.join(row.values)}"
      )
    values.append(str(value))
  return values
