"""Strategies that damage what the project wrote itself."""

import copy
import functools
import json
import operator
import struct

import google_crc32c
from hypothesis import strategies as st

HUGE = [
  number.to_bytes(8, "little")
  for number in (0, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1)
]


@st.composite
def damaged(draw, data: bytes, other: bytes = b"") -> bytes:
  """`data` changed in one to three ways; `other` is of the same kind."""
  for _ in range(draw(st.integers(1, 3))):
    start = draw(st.integers(0, len(data)))
    end = min(len(data), start + draw(st.sampled_from([1, 8, 64, 2048])))
    before, part, after = data[:start], data[start:end], data[end:]
    new = draw(st.sampled_from(HUGE) | st.binary(min_size=1, max_size=100))
    changed = [
      *(before, before + after, before + bytes(len(part)) + after),
      *(before + part + part + after, after + part + before, data + part),
      *(before + new + after, before + new + part + after, new),
      before + other[start:],
      *[before + new + data[start + len(new) :]] * 5,  # most often
    ]
    data = changed[draw(st.integers(0, len(changed) - 1))]
  return data


# Text that is no JSON value, or a value that fits hardly anywhere.
JSON_VALUES = (
  "null", "true", "-1", "0", "1", "2", "0.5", "-0.0", "1e400", "-1e400", "1e39",
  "NaN", "Infinity", str(2**31), str(2**63), str(10**30), "9" * 400, "9" * 5000,
  '""', '"x"', '"1"', '"\\ud800"', '"\\u0000"', "[]", "{}", "[1]", "[[]]",
  '{"x": 1}', '["../../x"]', "[" * 100_000, '{"a":' * 100_000,
  "[" * 500 + "]" * 500, "1 2", "'x'", "--1",
)  # fmt: skip
_VALUE, _TWICE = "@value@", "@twice@"


def _places(value, path=()):
  """Paths of all values inside of a JSON value."""
  for key, inside in (
    value.items() if isinstance(value, dict) else enumerate(value)
  ):
    yield (*path, key)
    if isinstance(inside, (dict, list)):
      yield from _places(inside, (*path, key))


@st.composite
def damaged_json(draw, value) -> bytes:
  """The text of a JSON object of which a part is changed, or its bytes."""
  if draw(st.integers(0, 3)) == 3:
    return draw(damaged(json.dumps(value, indent=1).encode()))
  new, value = draw(st.sampled_from(JSON_VALUES)), copy.deepcopy(value)
  path = draw(st.sampled_from([(), *_places(value)]))
  if not path:
    return new.encode()
  inside, last = functools.reduce(operator.getitem, path[:-1], value), path[-1]
  kind = draw(st.sampled_from(["changed", "changed", "gone", "added", "twice"]))
  if kind == "gone":
    del inside[last]
  elif kind == "changed" or isinstance(inside, list):
    inside[last] = _VALUE
  else:
    names = ["x", "", "__class__", "\ud800"] if kind == "added" else [_TWICE]
    inside[draw(st.sampled_from(names))] = _VALUE
  text = json.dumps(value).replace(f'"{_VALUE}"', new)
  return text.replace(f'"{_TWICE}"', json.dumps(last)).encode()


def strict_json(data: bytes):
  """A JSON value as the standard has it; ValueError if it is none."""

  def pairs(items):
    if len(dict(items)) < len(items):
      raise ValueError("a key twice")
    return dict(items)

  def constant(name):
    raise ValueError(name)

  try:
    return json.loads(
      data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant
    )
  except RecursionError as e:
    raise ValueError("nested too deeply") from e


def masked_crc(data: bytes) -> bytes:
  """The checksum of TFRecord files and of TensorFlow's tables."""
  crc = google_crc32c.value(data)
  crc = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
  return struct.pack("<I", crc)


def frame(record: bytes) -> bytes:
  """A record as a record file has it."""
  length = struct.pack("<Q", len(record))
  return length + masked_crc(length) + record + masked_crc(record)


def unframed(data: bytes) -> list[bytes] | None:
  """The records of a record file; None if it is not whole."""
  found = []
  while data:
    end = int.from_bytes(data[:8], "little") + 16
    if end > len(data) or data[:end] != frame(data[12 : end - 4]):
      return None
    found.append(data[12 : end - 4])
    data = data[end:]
  return found
