"""JSON files: read strictly, written atomically."""

import json
import math
import os

from common import files, input_files, stores
from common.errors import DataError


def parse(text: str | bytes, form=None, strict: bool = True):
  """Parses JSON; a ValueError if it has not the `form` that `expect` describes.

  If `strict`, repeated keys and NaN are one, too.
  """
  hooks: dict = {}
  if strict:
    text = text.decode() if isinstance(text, bytes) else text

    def no_number(name: str):
      raise ValueError(f"{name} is not JSON")

    hooks = {"object_pairs_hook": _distinct, "parse_constant": no_number}
  try:
    value = json.loads(text, **hooks)
  except RecursionError as e:
    raise ValueError("nested too deeply") from e
  if form is not None:
    expect(value, form)
  return value


def _distinct(pairs: list) -> dict:
  value: dict = {}
  for key, item in pairs:
    if key in value:
      raise ValueError(f"the key {key!r} occurs twice")
    value[key] = item
  return value


def read(path: str, form=None, problem: str = "not readable as JSON: {}"):
  """The value of a JSON file; DataError if it has not the `form`, see `expect`.

  `problem` is its message, with a place for the reason.
  """
  content = input_files.read(path)
  try:
    return parse(content, form)
  except ValueError as e:
    raise DataError(f"{path}: {problem.format(e)}") from e


def read_own(path: str, remedy: str, form=None):
  """As `read`, of a file that `write` wrote; the error names a `remedy`."""
  return read(path, form, f"damaged: {{}}; {remedy}")


def read_lines(path: str, form=None, strict: bool = True) -> list:
  """The values of a .jsonl file; [] without one.

  DataError for a line that is not JSON of the `form`, see `expect`.
  """
  values: list = []
  if not os.path.exists(path):
    return values
  with open(path, encoding="utf-8", errors="replace") as f:
    for number, line in enumerate(f, 1):
      # A last line without its end does not count: its writer was killed.
      if not line.strip() or not line.endswith("\n"):
        continue
      try:
        values.append(parse(line, form, strict))
      except ValueError as e:
        raise DataError(
          f"{path}: line {number} does not belong there ({e}): remove the "
          "line, or move the file away"
        ) from e
  return values


def append_line(path: str, value) -> None:
  """Adds a value to a .jsonl file, in place of a last line without its end."""
  with files.naming(path), open(path, "a+b") as f:
    # A writer that was killed left a part of a line.
    f.seek(0)
    f.truncate(f.read().rfind(b"\n") + 1)
    f.write(f"{text(value)}\n".encode())
    f.flush()
    os.fsync(f.fileno())


def expect(value, form, name: str = "") -> None:
  """Raises a ValueError that names what of a JSON value has another form.

  A form is a type, a value, a tuple of forms to choose from, a range of
  integers, [form] for a list, or {"key": form, "key?": form} for an object
  which may lack the second key, and may have others.
  """
  if isinstance(form, dict) and isinstance(value, dict):
    for key, inner in form.items():
      plain = key.removesuffix("?")
      inside = f"{name}.{plain}" if name else plain
      if plain in value:
        expect(value[plain], inner, inside)
      elif plain == key:
        raise ValueError(f"{inside} is missing")
  elif isinstance(form, list) and isinstance(value, list):
    for number, item in enumerate(value):
      expect(item, form[0], f"{name}[{number}]")
  else:
    # The first form of the same kind, if any, says what is wrong inside.
    for choice in form if isinstance(form, tuple) else (form,):
      if _fits(value, choice):
        return
      if isinstance(choice, (dict, list)) and type(choice) is type(value):
        return expect(value, choice, name)
    raise ValueError(f"{name or 'it'} is {value!r}, not {_in_words(form)}")


def _fits(value, form) -> bool:
  """Whether a value is of a simple form; JSON's true is no number."""
  if isinstance(form, (dict, list)):
    return False
  if isinstance(form, range):
    return type(value) is int and value in form
  if form is float:
    return type(value) in (int, float)
  if isinstance(form, type):
    return type(value) is form
  return type(value) is type(form) and value == form


_NAMES = {
  str: "text", int: "an integer", float: "a number", bool: "true or false",
  dict: "an object", list: "a list", None: "null",
}  # fmt: skip


def _in_words(form) -> str:
  if isinstance(form, tuple):
    return " or ".join(map(_in_words, form))
  if isinstance(form, range):
    return f"an integer from {form.start} to {form.stop - 1}"
  if isinstance(form, (dict, list)):
    form = type(form)
  return _NAMES[form] if form in _NAMES else str(form)


def text(value, indent: int | None = None) -> str:
  """A value as JSON, with null for NaN and Infinity, which JSON lacks."""
  return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value):
  if isinstance(value, dict):
    return {key: _finite(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_finite(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def write(path: str, value) -> None:
  """Replaces a file atomically by `text(value)`."""
  stores.at(path).write(f"{text(value, indent=2)}\n".encode())
