"""Fixtures that several test modules share."""

import gzip
import json
import os

import numpy as np
import pytest

import tokenization
from common.tensorflow_v1 import tf
from data import creation, records, tf_example, tfrecord

TINY = dict(
  vocab_size=100,
  hidden_size=32,
  num_hidden_layers=2,
  num_attention_heads=2,
  intermediate_size=64,
  max_position_embeddings=64,
  type_vocab_size=2,
)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def fake_records(count, seed, s=32, p=5, vocab_size=100, examples_per_record=1):
  """The features of `count` records of random tokens."""
  rng = np.random.default_rng(seed)
  sizes = (s, p, vocab_size, examples_per_record)
  return [records.fake_features(rng, *sizes) for _ in range(count)]


def write_records(path, count, seed=0, **sizes):
  """Writes `count` records of random tokens; returns the path as a string."""
  with tfrecord.ShardWriter(str(path)) as writer:
    for features in fake_records(count, seed, **sizes):
      writer.write(tf_example.encode_example(features))
  return str(path)


def write_packed(folder, dynamic=False):
  """2 x 60 records of 1 to 3 examples each, with their manifest.

  With `dynamic` masks, of whole words, are left to be drawn on reading.
  Returns the files' pattern and the examples of 24 records on average, cut to
  a whole number.
  """
  files, examples = [], 0
  for i in range(2):
    made = fake_records(60, seed=i, examples_per_record=3)
    for features in made if dynamic else ():
      for name in ("positions", "ids", "weights"):
        del features[f"masked_lm_{name}"]
      features["is_continuation"] = (features["input_ids"] % 3 == 0) * 1
    with tfrecord.ShardWriter(str(folder / f"data-{i}.tfrecord")) as writer:
      for features in made:
        writer.write(tf_example.encode_example(features))
    files.append(writer.info)
    examples += sum(int(features["input_mask"].max()) for features in made)
  records.Manifest(
    max_seq_length=32,
    max_predictions_per_seq=5,
    examples_per_record=3,
    masking="dynamic" if dynamic else "static",
    tokenizer=tokenization.TokenizerInfo(
      "wordpiece", "vocab.txt", "", 100, True, 4
    ),
    settings={"masked_lm_prob": 0.1, "do_whole_word_mask": True},
    counts={"examples": examples},
    files=tuple(files),
  ).save(str(folder / f"data{records.MANIFEST_SUFFIX}"))
  return str(folder / "data-*.tfrecord"), 24 * examples // 120


def feature_values(record):
  """name -> list of values, by TensorFlow."""
  example = tf.train.Example.FromString(record)
  return {
    name: list(
      feature.float_list.value
      if feature.HasField("float_list")
      else feature.int64_list.value
    )
    for name, feature in example.features.feature.items()
  }


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


@pytest.fixture
def packed_run(tmp_path):
  """As tiny_run, packed: ((config path, records glob), global batch size)."""
  pattern, global_batch = write_packed(tmp_path)
  return (write_config(tmp_path / "config.json"), pattern), global_batch


@pytest.fixture
def dynamic_run(tmp_path):
  """As packed_run, with whole-word masks that are drawn on reading."""
  pattern, global_batch = write_packed(tmp_path, dynamic=True)
  return (write_config(tmp_path / "config.json"), pattern), global_batch


@pytest.fixture(autouse=True)
def reference_variables():
  """Runs switch resource variables on, for good: not for the next test."""
  yield
  tf.disable_resource_variables()


# Text -------------------------------------------------------------------------

WORDS = [f"w{i}" for i in range(40)]
LETTERS = [
  *tokenization.SPECIAL_TOKENS,
  *"abcdefghijklmnopqrstuvwxyz0123456789",
  *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz0123456789"),
  ".",
]


@pytest.fixture(scope="session")
def letters(tmp_path_factory):
  """A vocabulary of letters and digits."""
  path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
  path.write_text("".join(f"{t}\n" for t in LETTERS))
  return str(path)


@pytest.fixture(scope="session")
def spm_model(tmp_path_factory):
  """A SentencePiece model of 60 pieces, of words and digits."""
  import sentencepiece

  folder = tmp_path_factory.mktemp("spm")
  corpus = folder / "text.txt"
  line = "the cat sat on the mat in paris . good bad w0 w1 w2 345 678 9 , ?\n"
  corpus.write_text(line * 50)
  sentencepiece.SentencePieceTrainer.train(
    input=str(corpus), model_prefix=str(folder / "m"), vocab_size=60,
    pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, pad_piece="[PAD]",
    unk_piece="[UNK]", control_symbols="[CLS],[SEP],[MASK]",
    hard_vocab_limit=False, minloglevel=2,
  )  # fmt: skip
  return str(folder / "m.model")


def write_documents(path, count, seed=0):
  """Random documents of 1 to 9 sentences of 1 to 9 words."""
  rng = np.random.default_rng(seed)
  sentence = lambda: " ".join(rng.choice(WORDS, rng.integers(1, 10))) + "."
  documents = [
    "\n".join(sentence() for _ in range(rng.integers(1, 10)))
    for _ in range(count)
  ]
  path.write_text("\n\n".join(documents) + "\n")


@pytest.fixture
def texts(tmp_path):
  """60 documents over a plain and a .gz file; returns the pattern."""
  write_documents(tmp_path / "a.txt", 40, seed=1)
  write_documents(tmp_path / "b", 20, seed=2)
  (tmp_path / "b.txt.gz").write_bytes(
    gzip.compress(b"\n" + (tmp_path / "b").read_bytes())
  )
  return f"{tmp_path}/*.txt*"


def settings_of(tmp_path, input_file, vocab_file, **changes):
  """Settings that make records of up to 32 tokens in tmp_path/out."""
  values = dict(
    input_file=input_file,
    output_file=f"{tmp_path}/out/train.tfrecord",
    vocab_file=vocab_file,
    max_seq_length=32,
    max_predictions_per_seq=6,
    dupe_factor=3,
    num_workers=1,
  )
  return creation.Settings(**{**values, **changes})


def contents(folder):
  """File name -> bytes."""
  return {
    name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))
  }
