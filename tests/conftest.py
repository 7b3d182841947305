"""Fixtures that several test modules share."""

import json

import numpy as np
import pytest

import records
from tensorflow_v1 import tf

TINY = dict(
  vocab_size=100,
  hidden_size=32,
  num_hidden_layers=2,
  num_attention_heads=2,
  intermediate_size=64,
  max_position_embeddings=64,
  type_vocab_size=2,
)


def write_records(path, count, seed=0, s=32, p=5, vocab_size=100):
  """Writes `count` records of random tokens; returns the path as a string."""
  rng = np.random.default_rng(seed)
  with records.ShardWriter(str(path)) as writer:
    for _ in range(count):
      features = records.fake_features(rng, s, p, vocab_size)
      writer.write(records.encode_example(features))
  return str(path)


def write_config(path, **changes):
  """Writes a tiny BERT config; returns the path as a string."""
  path.write_text(json.dumps({**TINY, **changes}))
  return str(path)


@pytest.fixture
def tiny_run(tmp_path):
  """A tiny config and 2 x 60 records: (config path, records glob)."""
  for i in range(2):
    write_records(tmp_path / f"data-{i}.tfrecord", 60, seed=i)
  config = write_config(tmp_path / "config.json")
  return config, str(tmp_path / "data-*.tfrecord")


@pytest.fixture(autouse=True)
def reference_variables():
  """Runs switch resource variables on, for good: not for the next test."""
  yield
  tf.disable_resource_variables()
