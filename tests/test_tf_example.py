"""tf.train.Example: TensorFlow reads what we write, and we what it writes."""

import numpy as np
import pytest
from conftest import feature_values
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_example
from tensorflow_v1 import tf


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
  assert feature_values(tf_example.encode_example(arrays)) == features


def test_rows_are_encoded_as_single_examples():
  rng = np.random.default_rng(0)
  batch = {
    "ids": rng.integers(0, 30522, (5, 64), dtype=np.int32),
    "small": rng.integers(0, 100, (5, 3)),
    "weights": rng.random((5, 7), np.float32),
  }
  batch["ids"][2] = 1  # a row of short varints between long ones
  assert tf_example.encode_examples(batch) == [
    tf_example.encode_example({k: v[i] for k, v in batch.items()})
    for i in range(5)
  ]


def test_bytes_are_those_of_tensorflow():
  # One feature: with several the order of a map is free.
  values = [0, 1, 127, 128, 16384, 30521, 2**40]
  want = tf.train.Example(
    features=tf.train.Features(
      feature={
        "x" * 130: tf.train.Feature(int64_list=tf.train.Int64List(value=values))
      }
    )
  ).SerializeToString()
  assert tf_example.encode_example({"x" * 130: np.array(values)}) == want


def test_unencodable_features():
  with pytest.raises(ValueError, match="negative value -1"):
    tf_example.encode_example({"x": np.array([3, -1])})
  with pytest.raises(ValueError, match=r"feature x has shape \(1, 1\)"):
    tf_example.encode_example({"x": np.array([[3]])})
  with pytest.raises(ValueError):
    tf_example.encode_examples({"x": np.ones((2, 1)), "y": np.ones((3, 1))})
