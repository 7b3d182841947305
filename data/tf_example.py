"""`tf.train.Example` to bytes and back, without TensorFlow.

The messages, as in tensorflow/core/example/{example,feature}.proto:

  Example    { Features features = 1; }
  Features   { map<string, Feature> feature = 1; }  an entry: key = 1, value = 2
  Feature    { oneof: bytes_list = 1, float_list = 2, int64_list = 3 }
  each list  { repeated value = 1; }  numbers packed, or one by one

in protocol buffers' wire format (https://protobuf.dev/programming-guides/encoding).
"""

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from common.errors import DataError

# Wire types; then field numbers of Feature.
VARINT, FIXED64, LENGTH, _GROUP, _GROUP_END, FIXED32 = range(6)
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_UNPACKED = {_FLOAT_LIST: FIXED32, _INT64_LIST: VARINT}  # a value by itself
_VARINT_BYTES, _UINT64_MAX = 10, (1 << 64) - 1

# -----------------------------------------------------------------------------
# Encoding
# -----------------------------------------------------------------------------


def _varint_rows(values: np.ndarray) -> list[bytes]:
  """Protocol buffer varints of non-negative integers [B, n], row by row."""
  rows, n = values.shape
  top = int(values.max()) if values.size else 0
  if values.size and int(values.min()) < 0:
    raise ValueError(f"negative value {values.min()} in a record's feature")
  if top < 0x80:
    flat = values.astype(np.uint8).tobytes()
    return [flat[i * n : (i + 1) * n] for i in range(rows)]
  width = (top.bit_length() + 6) // 7
  shifts = np.arange(width, dtype=np.uint64) * np.uint64(7)
  rest = values.astype(np.uint64)[:, :, None] >> shifts  # [B, n, width]
  groups = (rest & np.uint64(0x7F)).astype(np.uint8)
  used = rest > 0
  groups[:, :, :-1] |= used[:, :, 1:] * np.uint8(0x80)  # more groups follow
  used[:, :, 0] = True
  ends = np.cumsum(used.sum((1, 2))).tolist()
  flat = groups[used].tobytes()
  return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _field_head(number: int, length: int) -> bytes:
  """What precedes the payload of a length-delimited protocol buffer field."""
  head = [number << 3 | LENGTH]
  while length > 0x7F:
    head.append(length & 0x7F | 0x80)
    length >>= 7
  head.append(length)
  return bytes(head)


@functools.lru_cache(maxsize=4096)
def _entry_head(name: str, list_field: int, length: int) -> bytes:
  """What precedes a feature's packed values in `tf.train.Features`.

  The nesting is Features.feature (a map entry of key and Feature), then
  `list_field` of Feature, then the list's `value`.
  """
  head = _field_head(1, length)
  for number in (list_field, 2):
    head = _field_head(number, len(head) + length) + head
  head = _field_head(1, len(name.encode())) + name.encode() + head
  return _field_head(1, len(head) + length) + head


def encode_examples(features: Mapping[str, np.ndarray]) -> list[bytes]:
  """Serializes the rows of 2-D arrays, each as a `tf.train.Example`.

  Args:
    features: name -> array [B, n] with the same B; integers become an
      int64_list, floats a float_list (float32).

  Returns:
    B times the bytes that `tf.train.Example.SerializeToString` gives for the
    same features in the same order (protocol buffers do not fix an order;
    readers must not care).

  Raises:
    ValueError: an integer is negative, an array is not 2-D, or B differs.
  """
  columns = []
  for name, values in features.items():
    values = np.asarray(values)
    if values.ndim != 2:
      raise ValueError(f"feature {name} has shape {values.shape}, want [B, n]")
    if np.issubdtype(values.dtype, np.floating):
      list_field = _FLOAT_LIST
      payloads = [row.tobytes() for row in values.astype("<f4")]
    else:
      list_field, payloads = _INT64_LIST, _varint_rows(values)
    columns.append(
      [_entry_head(name, list_field, len(p)) + p for p in payloads]
    )
  examples = map(b"".join, zip(*columns, strict=True))
  return [_field_head(1, len(e)) + e for e in examples]


def encode_example(features: Mapping[str, np.ndarray]) -> bytes:
  """Serializes 1-D arrays as one `tf.train.Example`; see `encode_examples`.

  Args:
    features: name -> array [n].

  Raises:
    ValueError: an integer is negative or an array is not 1-D.
  """
  rows = {}
  for name, values in features.items():
    values = np.asarray(values)
    if values.ndim != 1:
      raise ValueError(f"feature {name} has shape {values.shape}, want [n]")
    rows[name] = values[None]
  return encode_examples(rows)[0]


# -----------------------------------------------------------------------------
# Decoding
# -----------------------------------------------------------------------------


def decode_example(record: bytes) -> dict[str, np.ndarray]:
  """Parses a `tf.train.Example`, as `tf.train.Example.FromString` does.

  Args:
    record: the message's bytes. Fields and map entries may come in any order
      and in pieces, numbers packed or not; unknown fields are skipped.

  Returns:
    name -> array [n]: int64 of an int64_list, float32 of a float_list, object
    (of bytes) of a bytes_list; int64 [0] of a feature without a list.

  Raises:
    DataError: these bytes are no such message; it says why, not where from.
  """
  features = {}
  for body in _bodies(record):
    for entry in _bodies(body):
      name, values = _decode_entry(entry)
      features[name] = values
  return features


def _bodies(message: bytes) -> Iterator[bytes]:
  """The messages in field 1."""
  for number, wire, body in fields(message):
    if (number, wire) == (1, LENGTH):
      yield body


def fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
  """(number, wire type, payload) of any message's fields, without groups.

  Raises:
    DataError: these bytes are no message.
  """
  at, end = 0, len(message)
  groups = []  # open ones: an old way to nest, which no reader knows here
  while at < end:
    tag, at = varint(message, at)
    number, wire = tag >> 3, tag & 7
    if number >> 29 or not (number or groups):  # groups may hold any
      raise DataError(f"a field has the number {number}")
    start = stop = at
    if wire == LENGTH:
      size, start = varint(message, at)
      stop = start + size
    elif wire == VARINT:
      _, stop = varint(message, at)
    elif wire == FIXED32:
      stop = at + 4
    elif wire == FIXED64:
      stop = at + 8
    elif wire == _GROUP:
      groups.append(number)
    elif wire != _GROUP_END or not groups or groups.pop() != number:
      raise DataError(f"a field of wire type {wire} where none can be")
    if stop > end:
      raise DataError(f"a field needs {stop - start} bytes, {end - start} left")
    if not groups and wire != _GROUP_END:
      yield number, wire, message[start:stop]
    at = stop
  if groups:
    raise DataError(f"group {groups[-1]} does not end")


def varint(data: bytes, at: int) -> tuple[int, int]:
  """(value, where it ends) of the varint at a place.

  Raises:
    DataError: there is none.
  """
  if at < len(data) and data[at] < 0x80:
    return data[at], at + 1
  value = 0
  for i, byte in enumerate(data[at : at + _VARINT_BYTES]):
    value |= (byte & 0x7F) << 7 * i
    if byte < 0x80:
      return value & _UINT64_MAX, at + i + 1
  if len(data) - at < _VARINT_BYTES:
    raise DataError("a number is cut off")
  raise DataError("a number of more than 64 bits")


def _decode_entry(entry: bytes) -> tuple[str, np.ndarray]:
  """Name and values of an entry of `Features.feature`."""
  name, kind, chunks = b"", None, []
  for number, wire, body in fields(entry):
    if (number, wire) == (1, LENGTH):
      name = body
    elif (number, wire) == (2, LENGTH):
      for which, wire, values in fields(body):
        if wire == LENGTH and which in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST):
          if which != kind:  # of the oneof's members the last one counts
            kind, chunks = which, []
          chunks += _list_chunks(values, kind)
  try:
    return name.decode(), _to_array(chunks, kind)
  except UnicodeDecodeError as e:
    raise DataError(f"a feature's name is not UTF-8: {name[:40]!r}") from e


def _list_chunks(message: bytes, kind: int) -> Iterator[bytes]:
  """The bytes of a list's values, of one or of many in a chunk."""
  for number, wire, chunk in fields(message):
    if number == 1 and wire == LENGTH:
      if kind == _FLOAT_LIST and len(chunk) % 4:
        raise DataError(f"{len(chunk)} bytes are no whole number of floats")
      if kind == _INT64_LIST and chunk and chunk[-1] >= 0x80:
        raise DataError("a number is cut off")
      yield chunk
    elif number == 1 and wire == _UNPACKED.get(kind):
      yield chunk


def _to_array(chunks: list[bytes], kind: int | None) -> np.ndarray:
  if kind == _BYTES_LIST:
    return np.array(chunks, object)
  data = b"".join(chunks)
  if kind == _FLOAT_LIST:
    return np.frombuffer(data, "<f4").astype(np.float32)
  groups = np.frombuffer(data, np.uint8)
  if data.isascii():  # every value takes one byte
    return groups.astype(np.int64)
  last = np.flatnonzero(groups < 0x80)  # places of the values' last bytes
  first = np.zeros_like(last)
  first[1:] = last[:-1] + 1
  more = int((last - first).max())  # bytes of the longest value after its first
  if more >= _VARINT_BYTES:
    raise DataError("a number of more than 64 bits")
  # At each place the value that would begin there, a byte longer at a time.
  bits = (groups & 0x7F).astype(np.int64)
  scale = (groups & 0x80).astype(np.int64)[:-1]  # 0 where nothing follows
  values = bits
  for _ in range(more):
    longer = bits.copy()
    longer[:-1] += values[1:] * scale
    values = longer
  return values[first]


# -----------------------------------------------------------------------------
# Checking
# -----------------------------------------------------------------------------


class Feature(NamedTuple):
  """What the values of a feature must be."""

  size: int
  # The first integer that is too large; None: floats, weights of 0 or 1.
  bound: int | None


def check_example(
  values: Mapping[str, np.ndarray], features: Mapping[str, Feature]
) -> None:
  """Checks decoded values; others than those of `features` may be there.

  Args:
    values: name -> array [n], see `decode_example`.
    features: name -> what it must be.

  Raises:
    DataError: the first that is missing, or of another type, length or range.
  """
  for name, (size, bound) in features.items():
    if name not in values:
      raise DataError(f"no feature {name!r}")
    array = values[name]
    if len(array) != size:
      raise DataError(f"{name} has {len(array)} values, expected {size}")
    if array.dtype.kind != ("f" if bound is None else "i"):
      want = "a float_list" if bound is None else "an int64_list"
      raise DataError(f"{name} has values of {array.dtype}, expected {want}")
    if bound is None:
      wrong = array[(array != 0.0) & (array != 1.0)]  # NaN is, too
      if len(wrong):
        raise DataError(f"{name} holds {wrong[0]}, expected 0 or 1")
      continue
    # As unsigned integers negative ones are the largest.
    if array.view(np.uint64).max(initial=0) >= bound:
      wrong = array[(array < 0) | (array >= bound)][0]
      raise DataError(f"{name} holds {wrong}, expected 0 to {bound - 1}")
