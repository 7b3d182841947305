"""Labelled text as people have it: TSV, CSV and JSON Lines, by column names."""

import csv
import json
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from errors import DataError
from training import training_hooks

# Of GLUE's files a few rows have too few fields; more are another format.
_LEFT_OUT_AT_MOST = 0.01

csv.field_size_limit(1 << 27)  # a document may be one field


class Row(NamedTuple):
  """A line of a table."""

  line: int  # in the file, from 1
  values: dict  # column -> str, or what JSON has


def read_table(path: str, columns: Sequence[str] | None = None) -> list[Row]:
  """The rows of a table.

  Args:
    path: .tsv or .txt: tabs, quotes are text; .csv: commas, fields with commas
      or line ends are quoted; .jsonl or .json: an object a line. UTF-8.
    columns: names, for a file without a header; by default the first line has
      them.

  Raises:
    DataError: the file is not there, has another format or no rows.
  """
  kinds = {".tsv": _separated, ".txt": _separated, ".csv": _separated}
  kinds |= {".jsonl": _objects, ".json": _objects}
  kind = os.path.splitext(path)[1].lower()
  if kind not in kinds:
    raise DataError(f"{path}: not a table by its name: {', '.join(kinds)}")
  try:
    # newline="": the csv module wants to see the line ends that it is given.
    with open(path, encoding="utf-8-sig", newline="") as f:
      rows = list(kinds[kind](path, f, columns))
  except OSError as e:
    raise DataError(f"{path}: {e.strerror}") from e
  except UnicodeDecodeError as e:
    raise DataError(f"{path}: not UTF-8 ({e})") from e
  if not rows:
    raise DataError(f"{path}: no rows")
  return rows


def _separated(path: str, file, columns) -> Iterator[Row]:
  if path.lower().endswith(".csv"):
    reader = csv.reader(file, strict=True)
  else:
    lines = (line.replace("\0", "") for line in file)
    reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
  count, odd = 0, []
  try:
    names = columns or next(reader, None)
    if names is None:
      return
    if len(set(names)) < len(names):
      raise DataError(f"{path}: two columns have one name: {', '.join(names)}")
    for fields in reader:
      if not fields:
        continue
      count += 1
      if len(fields) == len(names):
        values = dict(zip(names, fields, strict=True))
        yield Row(reader.line_num, values)
      else:
        odd.append((reader.line_num, len(fields)))
  except csv.Error as e:
    raise DataError(f"{path}: line {reader.line_num}: {e}") from e
  if odd:
    message = (
      f"{path}: {len(odd)} of {count} rows have another number of fields than "
      f"the {len(names)} columns, first line {odd[0][0]} with {odd[0][1]}"
    )
    if len(odd) > _LEFT_OUT_AT_MOST * count:
      raise DataError(f"{message}: another format (columns are apart by tabs)?")
    training_hooks.tell(f"{message}; left out")


def _objects(path: str, file, columns) -> Iterator[Row]:
  del columns  # each line names its own
  for number, line in enumerate(file, 1):
    if not line.strip():
      continue
    try:
      values = json.loads(line)
    except ValueError as e:
      raise DataError(f"{path}: line {number} is no JSON ({e})") from e
    if not isinstance(values, dict):
      raise DataError(f"{path}: line {number} is not an object")
    yield Row(number, values)


def column(path: str, rows: Sequence[Row], name: str) -> list[str]:
  """A column's values as text.

  Raises:
    DataError: it is not there, or not everywhere.
  """
  for row in rows:
    value = row.values.get(name)
    if not isinstance(value, (str, int, float)):
      raise DataError(
        f"{path}: line {row.line} has no {name!r}; its columns are "
        f"{', '.join(row.values)}"
      )
  return [str(row.values[name]) for row in rows]
