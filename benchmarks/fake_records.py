"""Records of random tokens for benchmarks."""

import os

import numpy as np
from absl import flags

from benchmarks import measuring
from config.bert_config import read_bert
from records import data_set, tf_example, tfrecord


def write(
  path: str,
  count: int,
  length: int,
  predictions: int,
  vocab_size: int,
  first_number: int | None = None,
) -> tfrecord.ShardInfo:
  """Writes `count` full records.

  With a `first_number` the masks are left to training, and the first token of
  a record, [CLS], which is never masked, is the record's number from there on.
  """
  rng = np.random.default_rng(first_number or 0)
  with tfrecord.shard_writer(path) as writer:
    for index in range(count):
      features = data_set.fake_features(
        rng, length, predictions, vocab_size, 1, predictions
      )
      if first_number is not None:
        for name in ("positions", "ids", "weights"):
          del features[f"masked_lm_{name}"]
        features["input_ids"][0] = first_number + index
      rows = {name: values[None] for name, values in features.items()}
      writer.write(*tf_example.encode_examples(rows))
  return writer.info


def model(default: str) -> str:
  """The --bert_config_file, or the preset that is measured without it."""
  return flags.FLAGS.bert_config_file or measuring.size(default, "tiny")


def of_model(
  folder: str, bert: str, count: int, length: int, predictions: int
) -> str:
  """Writes records for the vocabulary of a model; returns their path."""
  path = os.path.join(folder, "fake.tfrecord")
  write(path, count, length, predictions, read_bert(bert).vocab_size)
  return path
