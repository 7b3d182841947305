"""Tables of text: TSV, CSV, JSON Lines and Parquet, by column names."""

import csv
import json
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from common import files, input_files, json_files
from common.console import tell
from common.errors import DataError
from corpus import documents, text_files

# Share of rows with missing fields, as in GLUE; more mean another format.
_LEFT_OUT_AT_MOST = 0.01
_EMPTY = "is empty"


class Row(NamedTuple):
  """A line of a table."""

  line: int  # in the file, from 1
  values: dict  # column -> str, or a value of JSON


_Line = tuple[int, dict | str]  # its number, and its values or why it has none


def read_table(
  path: str, columns: Sequence[str] | None = None, all_rows: bool = False
) -> list[Row]:
  """Reads a UTF-8 table without empty lines and, with a report, malformed rows.

  .tsv and .txt have tabs between fields, and quotes are text. .csv has commas,
  and quotes around fields with commas or line ends. JSON lines have an object
  in each. `columns` are the names if the first line is no header.
  With `all_rows` a skipped row is an error (but not empty lines at the end), so
  that the n-th row is the n-th of the file.
  """
  form = input_files.format_of(path)
  kinds = input_files.PARQUET, input_files.ARROW
  with input_files.open_input(path, *kinds) as file:
    f = text_files.utf8_lines(file, path)
    lines: list[_Line]
    try:
      if form is input_files.Format.EMPTY:
        lines = []
      elif form in documents.TABLES:
        lines = [*enumerate(documents.table_rows(path, form), 1)]
      elif form in (input_files.Format.JSON_LINES, input_files.Format.JSON):
        lines = [*_objects(f)]
      elif form is input_files.Format.CSV:
        lines = [*_named(documents.csv_rows(f), columns)]
      elif input_files.ending(path) in (".tsv", ".txt"):
        lines = [*_named(documents.tsv_rows(f), columns)]
      else:
        raise ValueError(
          "no JSON lines, Parquet or Arrow, nor .tsv, .txt or .csv"
        )
    except DataError:  # it names the file
      raise
    except (ValueError, csv.Error) as e:
      raise DataError(f"{path}: {e}") from e
  while lines and lines[-1][1] == _EMPTY:
    lines.pop()
  # Malformed rows are reported with their reason, empty lines are not.
  rows, odd = [], []
  for line, values in lines:
    if isinstance(values, dict):
      rows.append(Row(line, values))
    elif all_rows or values != _EMPTY:
      odd.append(f"line {line} {values}")
  if odd:
    count = len(rows) + len(odd)
    message = (
      f"{path}: {len(odd)} of {count} rows are not like the others, first "
      f"{odd[0]}"
    )
    if all_rows or len(odd) > _LEFT_OUT_AT_MOST * count:
      raise DataError(f"{message}: correct or remove them (.tsv has tabs)")
    tell(f"{message}; left out")
  if not rows:
    raise DataError(f"{path}: no rows")
  return rows


def _named(lines: Iterator, columns: Sequence[str] | None) -> Iterator[_Line]:
  """Rows by the columns' names, from (line, fields)."""
  names = columns or next(lines, (0, ()))[1]
  if len(set(names)) < len(names):
    raise ValueError(f"two columns have one name: {', '.join(names)}")
  for line, fields in lines:
    if len(fields) == len(names):
      yield line, dict(zip(names, fields, strict=True))
    elif fields:
      yield line, f"has {len(fields)} fields for {len(names)} columns"
    else:
      yield line, _EMPTY


def _objects(file) -> Iterator[_Line]:
  """The objects of JSON lines, each of which names its own columns."""
  for number, line in enumerate(file, 1):
    if not line.strip():
      yield number, _EMPTY
      continue
    try:
      yield number, json_files.parse(line, {}, strict=False)
    except ValueError as e:
      raise ValueError(f"line {number} is no JSON object: {e}") from e


def write(path: str, lines: Sequence[str]) -> None:
  """Writes lines in UTF-8; half of a surrogate pair, as JSON's, is escaped."""
  text = "".join(f"{line}\n" for line in lines)
  files.write(path, text.encode(errors="backslashreplace"))


def column(
  path: str, rows: Sequence[Row], name: str, flag: str,
  may_be_empty: bool = True,
) -> list[str]:  # fmt: skip
  """Values as text; `DataError` if a row lacks the column; `flag` names it."""
  texts = []
  for line, values in rows:
    value = values.get(name)
    # JSON's null and NaN say that there is none; NaN differs from itself.
    is_one = isinstance(value, (str, int, float)) and value == value
    if not is_one or not (may_be_empty or str(value).strip()):
      wrong = f"has no {name!r}"
      if name in values:
        shown = json.dumps(value, default=str)[:60]
        wrong = f"has {shown} where {name!r} should be"
      raise DataError(
        f"{path}: line {line} {wrong}; its columns are {', '.join(values)}: "
        f"correct it, or name another column by {flag}"
      )
    texts.append(str(value))
  return texts


def as_number(text: str) -> float:
  """The number that a text is; NaN for a word."""
  try:
    return float(text)
  except ValueError:
    return math.nan


def numbers(
  path: str, rows: Sequence[Row], name: str, texts: Sequence[str]
) -> list[float]:
  """The finite numbers that a column's `texts` are, or `DataError`."""
  values = [as_number(text) for text in texts]
  for row, text, value in zip(rows, texts, values, strict=True):
    if not math.isfinite(value):
      raise DataError(
        f"{path}: line {row.line}: {name} is {text!r}, not a finite number"
      )
  return values


def lists(path: str, rows: Sequence[Row], name: str) -> list[list[str]]:
  """Values as texts or lists of texts, of which empty ones are left out.

  `DataError` for another value; a row may lack the column.
  """
  values = []
  for row in rows:
    value = row.values.get(name)
    try:
      json_files.expect(value, (str, None, [(str, None)]), name)
    except ValueError as e:
      raise DataError(
        f"{path}: line {row.line}: {e}: write a text or a list of texts"
      ) from e
    texts = value if isinstance(value, list) else [value]
    values.append([text for text in texts if text and text.strip()])
  return values
