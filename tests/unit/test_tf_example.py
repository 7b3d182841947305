"""tf.train.Example: TensorFlow reads what we write, and we what it writes."""

import numpy as np
import pytest
from google.protobuf import unknown_fields
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import encode_example, feature_values

from common.errors import DataError
from common.tensorflow_v1 import tf
from records import tf_example
from tests.fuzz.damage import damaged


@settings(deadline=None, max_examples=200)
@given(
  st.dictionaries(
    st.text(min_size=1, max_size=200).filter(lambda s: s.isprintable()),
    st.one_of(
      st.lists(st.integers(0, 2**63 - 1), max_size=20),
      st.lists(st.integers(0, 300), min_size=60, max_size=300),
      st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20),
    ),
    min_size=1,
    max_size=5,
  )
)
def test_example_round_trip(features):
  arrays = {
    name: np.array(v, np.float32 if v and type(v[0]) is float else np.int64)
    for name, v in features.items()
  }
  record = encode_example(arrays)
  assert feature_values(record) == features
  decoded = tf_example.decode_example(record)
  assert {name: v.tolist() for name, v in decoded.items()} == features
  assert {name: v.dtype for name, v in decoded.items()} == {
    name: v.dtype for name, v in arrays.items()
  }


def test_rows_are_encoded_as_single_examples():
  rng = np.random.default_rng(0)
  batch = {
    "ids": rng.integers(0, 30522, (5, 64), dtype=np.int32),
    "weights": rng.random((5, 7), np.float32),
  }
  batch["ids"][2] = 1  # a row of short varints between long ones
  assert tf_example.encode_examples(batch) == [
    encode_example({k: v[i] for k, v in batch.items()}) for i in range(5)
  ]


def test_bytes_are_those_of_tensorflow():
  # One feature: with several the order of a map is free.
  values, example = [0, 1, 127, 128, 16384, 30521, 2**40], tf.train.Example()
  example.features.feature["x" * 130].int64_list.value.extend(values)
  encoded = encode_example({"x" * 130: np.array(values)})
  assert encoded == example.SerializeToString()


def test_unencodable_features():
  with pytest.raises(ValueError, match="negative value -1"):
    encode_example({"x": np.array([3, -1])})
  with pytest.raises(ValueError):
    tf_example.encode_examples({"x": np.ones((2, 1)), "y": np.ones((3, 1))})
  features = {"x": tf_example.Feature(2, 5)}
  with pytest.raises(DataError, match="x holds -1, expected 0 to 4"):
    tf_example.check_example({"x": np.array([0, -1])}, features)


# Decoding ---------------------------------------------------------------------


def by_tensorflow(record):
  """name -> (kind, values); None where TensorFlow finds no Example."""
  try:
    message = tf.train.Example.FromString(record)
  except Exception:  # google.protobuf.message.DecodeError
    return None
  unknown = unknown_fields.UnknownFieldSet(message.features)
  if any(field.field_number == 1 for field in unknown):
    # protobuf for Python leaves out a map entry that has an unknown field
    # inside, against its other implementations, which skip the field.
    return None
  found = {}
  for name, feature in message.features.feature.items():
    kind = feature.WhichOneof("kind")
    values = list(getattr(feature, kind).value) if kind else []
    found[name] = (kind or "int64_list", values)
  return found


def by_us(record):
  """As `by_tensorflow`; whatever the bytes, there is no other error."""
  try:
    decoded = tf_example.decode_example(record)
  except DataError as e:
    assert str(e)
    return None
  kinds = {"i": "int64_list", "f": "float_list", "O": "bytes_list"}
  for values in decoded.values():
    assert values.ndim == 1 and values.dtype in (np.int64, np.float32, object)
  return {n: (kinds[v.dtype.kind], v.tolist()) for n, v in decoded.items()}


def same_as_tensorflow(record):
  """Whether TensorFlow parses the message; if so we must get the same."""
  theirs, ours = by_tensorflow(record), by_us(record)
  if theirs is not None:
    assert ours is not None
    # By their text: a NaN is the same NaN.
    assert sorted(map(repr, ours.items())) == sorted(map(repr, theirs.items()))
  return theirs is not None


@st.composite
def examples(draw):
  """Features, and the bytes that TensorFlow writes for them."""
  features = draw(
    st.dictionaries(
      st.text(max_size=5),
      st.one_of(
        st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9),
        st.lists(st.floats(width=32), min_size=1, max_size=9),
        st.lists(st.binary(max_size=9), min_size=1, max_size=9),
      ),
      max_size=4,
    )
  )
  example = tf.train.Example()
  for name, values in features.items():
    feature = example.features.feature[name]
    kinds = {int: feature.int64_list, float: feature.float_list}
    kind = kinds.get(type(values[0]) if values else int, feature.bytes_list)
    kind.value.extend(values)
  return features, example.SerializeToString()


@settings(deadline=None, max_examples=200)
@given(examples())
def test_what_tensorflow_writes(example):
  features, record = example
  assert same_as_tensorflow(record)
  assert by_us(record).keys() == features.keys()


@settings(deadline=None, max_examples=500)
@given(examples().flatmap(lambda e: damaged(e[1]) | st.binary(max_size=60)))
def test_damaged_bytes_are_an_error_or_what_tensorflow_reads(record):
  same_as_tensorflow(record)


def field(number, wire_type, payload):
  """A short field: tag, the length where there is one, payload."""
  length = bytes([len(payload)]) if wire_type == 2 else b""
  return bytes([number << 3 | wire_type]) + length + payload


def entry(name, kind, values, more=b""):
  """An Example of one feature whose list has these bytes."""
  feature = field(1, 2, name) + field(2, 2, field(kind, 2, values)) + more
  return field(1, 2, field(1, 2, feature))


ODD = {
  "unpacked": entry(b"a", 3, field(1, 0, b"\5") + field(1, 0, b"\6")),
  "twice": entry(b"a", 3, field(1, 2, b"\5") + field(1, 2, b"\6")),
  "unknown field in a list": entry(
    b"a", 3, field(1, 2, b"\5\6") + field(9, 0, b"\1")
  ),
  # protobuf drops entries of a map that have one.
  "unknown field in an entry": entry(
    b"a", 3, field(1, 2, b"\5\6"), field(9, 0, b"\1")
  ),
}


@pytest.mark.parametrize("record", ODD.values(), ids=ODD)
def test_odd_encodings_are_read(record):
  assert tf_example.decode_example(record)["a"].tolist() == [5, 6]


DAMAGED = {
  "a number is cut off": b"\x0a",
  "5 bytes are announced, 1 is left": b"\x0a\x05\x00",
  "a number of more than 64 bits": b"\xff" * 11,
  "a name that is not UTF-8": entry(b"\xff", 3, b""),
  "1.25 floats": entry(b"a", 2, field(1, 2, b"12345")),
  "a cut number in a list": entry(b"a", 3, field(1, 2, b"\x80")),
}


@pytest.mark.parametrize("record", DAMAGED.values(), ids=DAMAGED)
def test_damage_is_reported(record):
  assert by_tensorflow(record) is None
  with pytest.raises(DataError, match=r"not a tf\.train\.Example"):
    tf_example.decode_example(record)
