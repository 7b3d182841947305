"""JSON files: read to the letter, written whole or not at all."""

import json
import math
import os

from common.errors import DataError


def parse(text: str | bytes):
  """The value of a JSON text.

  Unlike Python's own parser it takes no key twice, of which one would be
  without effect, and neither NaN nor Infinity.

  Raises:
    ValueError: it is no JSON, not UTF-8, or nested too deeply.
  """
  try:
    return json.loads(
      text.decode() if isinstance(text, bytes) else text,
      object_pairs_hook=_distinct,
      parse_constant=_no_number,
    )
  except RecursionError as e:
    raise ValueError("nested too deeply") from e


def _distinct(pairs: list) -> dict:
  value = dict(pairs)
  if len(value) < len(pairs):
    keys = [key for key, _ in pairs]
    twice = next(key for key in keys if keys.count(key) > 1)
    raise ValueError(f"the key {twice!r} stands there twice")
  return value


def _no_number(name: str):
  raise ValueError(f"{name} is no JSON")


def read(path: str):
  """The value of a file, which may be the user's own.

  Raises:
    DataError: it is no JSON.
    OSError: it cannot be read.
  """
  try:
    with open(path, "rb") as f:
      return parse(f.read())
  except ValueError as e:
    raise DataError(f"{path}: not readable as JSON: {e}") from e


def read_own(path: str, remedy: str):
  """The value of a file that `write` wrote.

  Args:
    remedy: what the user can do if it is damaged.

  Raises:
    DataError: it is damaged.
    OSError: it cannot be read.
  """
  try:
    return read(path)
  except DataError as e:
    raise DataError(f"{e}: it is damaged; {remedy}") from e


def text(value, indent: int | None = None) -> str:
  """A value as JSON, which knows neither NaN nor Infinity: null stands there.

  So a reader learns that there is no number, in any language.
  """
  return json.dumps(_numbers(value), indent=indent, allow_nan=False)


def _numbers(value):
  """`value` with None for what is no finite number."""
  if isinstance(value, dict):
    return {key: _numbers(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_numbers(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def write(path: str, value) -> None:
  """Writes a file, or leaves what was there; see `text` for its numbers."""
  with open(path + ".tmp", "w", encoding="utf-8") as f:
    f.write(text(value, indent=2) + "\n")
  os.replace(path + ".tmp", path)
