"""Tables of labelled text: TSV, CSV and JSON Lines, by column names."""

import csv
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from common import json_files
from common.console import tell
from common.errors import DataError

# The share of rows with another number of fields. A few of GLUE's rows have too
# few; more than a few mean another format.
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
  """The rows of a table.

  Lines end with \\n or \\r\\n; other \\r are text. Empty lines are skipped, and
  a few rows with another number of fields are left out and reported.

  Args:
    path: .tsv or .txt: tabs, quotes are text; .csv: commas, fields with commas
      or line ends are quoted; .jsonl or .json: an object in each line. UTF-8.
    columns: names, for a file without a header in its first line.
    all_rows: a line that would be skipped or left out is an error, so that the
      n-th row is the n-th of the file. Empty lines at the end are no errors.
  """
  kinds = dict.fromkeys((".tsv", ".txt", ".csv"), _separated)
  kinds |= dict.fromkeys((".jsonl", ".json"), _objects)
  kind = os.path.splitext(path)[1].lower()
  if kind not in kinds:
    raise DataError(f"{path}: not a table by its name: {', '.join(kinds)}")
  try:
    # newline: a carriage return alone ends no line, and none is changed.
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
  """Those of the lines that are rows."""
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
  """(line, fields); no fields of an empty line."""
  for number, line in enumerate(file, 1):
    text = line.replace("\0", "").removesuffix("\n").removesuffix("\r")
    yield number, text.split("\t") if text else []


def _csv(path: str, file) -> Iterator[tuple[int, list]]:
  reader = csv.reader(file, strict=True)
  try:
    for fields in reader:
      yield reader.line_num, fields
  except csv.Error as e:
    # What follows " - " is advice for programmers.
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


def column(path: str, rows: Sequence[Row], name: str) -> list[str]:
  """A column's values as text; raises `DataError` if a row lacks it."""
  values = []
  for row in rows:
    value = row.values.get(name)
    if not isinstance(value, (str, int, float)):
      raise DataError(
        f"{path}: line {row.line} has no {name!r}; its columns are "
        f"{', '.join(row.values)}"
      )
    values.append(str(value))
  return values
