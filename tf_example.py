"""`tf.train.Example` to bytes and back, without TensorFlow.

The messages, as in tensorflow/core/example/{example,feature}.proto:

  Example    { Features features = 1; }
  Features   { map<string, Feature> feature = 1; }  an entry: key = 1, value = 2
  Feature    { oneof: bytes_list = 1, float_list = 2, int64_list = 3 }
  each list  { repeated value = 1; }  numbers packed, or one by one

in protocol buffers' wire format (https://protobuf.dev/programming-guides/encoding).
"""

import functools
from collections.abc import Mapping

import numpy as np


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
  head = [number << 3 | 2]
  while length > 0x7F:
    head.append(length & 0x7F | 0x80)
    length >>= 7
  head.append(length)
  return bytes(head)


@functools.lru_cache(maxsize=4096)
def _entry_head(name: str, list_field: int, length: int) -> bytes:
  """What precedes a feature's packed values in `tf.train.Features`.

  The nesting is Features.feature (a map entry of key and Feature), then
  Feature.float_list (field 2) or int64_list (3), then the list's `value`.
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
      list_field = 2
      payloads = [row.tobytes() for row in values.astype("<f4")]
    else:
      list_field, payloads = 3, _varint_rows(values)
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
