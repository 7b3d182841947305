"""Small inputs of tests: configs, records, vocabularies, text."""

import dataclasses
import json
import os
import shutil
import types

import numpy as np
from absl import flags

from common import settings
from records import creation, data_set, tf_example, tfrecord
from text_encoders import kinds
from text_encoders.base import SPECIAL_TOKENS, TokenizerInfo
from workers import launchers, work_dir

work_dir._POLL_SECONDS = 0.005  # what tests wait for takes no longer

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


def write_config(path, **changes):
  """Writes a tiny BERT config; returns the path as a string."""
  path.write_text(json.dumps({**TINY, **changes}))
  return str(path)


def fp32_run(bert, sampled_softmax=0):
  """What `model_flops.of_run` reads of a run's config."""
  return types.SimpleNamespace(
    stage_bert=bert, precision="fp32", precision_policy=(),
    sampled_softmax=sampled_softmax, xla="off",
  )  # fmt: skip


def write_vocabulary(path, tokens):
  """Writes a vocab.txt of these lines; returns the path as a string."""
  path.write_bytes("".join(f"{token}\n" for token in tokens).encode())
  return str(path)


def fake_records(count, seed, s=32, p=5, vocab_size=100, examples_per_record=1):
  """The features of `count` records of random tokens."""
  rng = np.random.default_rng(seed)
  sizes = (s, p, vocab_size, examples_per_record)
  return [data_set.fake_features(rng, *sizes) for _ in range(count)]


def encode_example(features):
  """Arrays [n] as one `tf.train.Example`."""
  rows = {name: np.asarray(values)[None] for name, values in features.items()}
  return tf_example.encode_examples(rows)[0]


def write_shard(path, made):
  """Writes records of these features; returns what a manifest says of them."""
  with tfrecord.shard_writer(str(path)) as writer:
    for features in made:
      writer.write(encode_example(features))
  return writer.info


def write_records(path, count, seed=0, **sizes):
  """Writes `count` records of random tokens; returns the path as a string."""
  write_shard(path, fake_records(count, seed, **sizes))
  return str(path)


def write_packed(folder, dynamic=False, s=32):
  """2 x 60 records of 1 to 3 examples each, with their manifest.

  With `dynamic` masks, of whole words, are left to be drawn on reading.
  Returns the files' pattern and the examples of 24 records on average, cut to
  a whole number.
  """
  files, examples = [], 0
  for i in range(2):
    made = fake_records(60, seed=i, s=s, examples_per_record=3)
    for features in made if dynamic else ():
      for name in ("positions", "ids", "weights"):
        del features[f"masked_lm_{name}"]
      features["is_continuation"] = (features["input_ids"] % 3 == 0) * 1
    files.append(write_shard(folder / f"data-{i}.tfrecord", made))
    examples += sum(int(features["input_mask"].max()) for features in made)
  data_set.Manifest(
    max_seq_length=s,
    max_predictions_per_seq=5,
    examples_per_record=3,
    masking="dynamic" if dynamic else "static",
    tokenizer=TokenizerInfo("wordpiece", "vocab.txt", "", 100, True, 4),
    settings={"masked_lm_prob": 0.1, "do_whole_word_mask": True},
    counts={"examples": examples},
    files=tuple(files),
  ).save(str(folder / f"data{data_set.MANIFEST_SUFFIX}"))
  return str(folder / "data-*.tfrecord"), 24 * examples // 120


def change_manifest(folder, settings=(), tokenizer=(), **changes):
  """Changes the manifest of a folder; (its path, what it was before)."""
  (path,) = folder.glob(f"*{data_set.MANIFEST_SUFFIX}")
  before = data_set.Manifest.load(str(path))
  changes["settings"] = {**before.settings, **dict(settings)}
  changes["tokenizer"] = dataclasses.replace(
    before.tokenizer, **dict(tokenizer)
  )
  dataclasses.replace(before, **changes).save(str(path))
  return path, before


def write_records_of(folder, vocab_file, do_lower_case):
  """As `write_packed`, made with a vocabulary that is beside the records.

  Returns what run.json says of the data of a run on them.
  """
  folder.mkdir()
  write_packed(folder)
  path = str(folder / f"data{data_set.MANIFEST_SUFFIX}")
  info = kinds.load_tokenizer(vocab_file, do_lower_case).info()
  manifest = data_set.Manifest.load(path)
  dataclasses.replace(manifest, tokenizer=info).save(path)
  shutil.copyfile(vocab_file, folder / "vocab.txt")
  return {
    "files": [str(folder / "data-0.tfrecord")],
    "tokenizer": dataclasses.asdict(info),
  }


def feature_values(record):
  """name -> list of values, by TensorFlow."""
  from common.tensorflow_v1 import tf  # here: data's tests do not load it

  found = tf.train.Example.FromString(record).features.feature
  kinds = {name: feature.WhichOneof("kind") for name, feature in found.items()}
  return {n: list(getattr(found[n], k).value) for n, k in kinds.items() if k}


WORDS = [f"w{i}" for i in range(40)]
LETTERS = [
  *SPECIAL_TOKENS,
  *"abcdefghijklmnopqrstuvwxyz0123456789",
  *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz0123456789"),
  ".",
]


def write_documents(path, count, seed=0):
  """Random documents of 1 to 9 sentences of 1 to 9 words."""
  rng = np.random.default_rng(seed)
  sentence = lambda: " ".join(rng.choice(WORDS, rng.integers(1, 10))) + "."
  documents = [
    "\n".join(sentence() for _ in range(rng.integers(1, 10)))
    for _ in range(count)
  ]
  path.write_text("\n\n".join(documents) + "\n")


def settings_of(tmp_path, input_file, vocab_file, **changes):
  """Settings that make records of up to 32 tokens in tmp_path/out.

  `num_workers`, and another name for `out`, are among the changes, too.
  """
  values = dict(
    input_file=input_file,
    output_file=f"{tmp_path}/{changes.pop('out', 'out')}/train.tfrecord",
    vocab_file=vocab_file,
    max_seq_length=32,
    max_predictions_per_seq=6,
    dupe_factor=3,
    workers=launchers.WorkerSettings(changes.pop("num_workers", 1)),
  )
  return creation.CreationSettings(**{**values, **changes})


def create(*arguments, **changes):
  """Makes the records of `settings_of`; their summary."""
  return creation.create(settings_of(*arguments, **changes))


def contents(folder):
  """File name -> bytes."""
  return {
    name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))
  }


def flag_values(kind, words):
  """The flags of a command with these words, and the words that are none."""
  values = flags.FlagValues()
  values.set_gnu_getopt()
  settings.define_flags(kind, values)
  _, *others = values(["command", *map(str, words)])
  return values, others


def parsed(kind, words):
  """The settings of a command with these words, and those that are no flags."""
  values, others = flag_values(kind, words)
  return settings.from_flags(kind, values), others


def listing(path):
  """(path, manifest) of the manifest that lists a record file, or None."""
  return data_set.find_manifests([path]).get(path)
