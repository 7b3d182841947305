"""The one record schema, and the manifest that describes a data set.

A record is a serialized `tf.train.Example` with google/bert's features, so its
scripts read our files and we read theirs (S = max_seq_length, P =
max_predictions_per_seq, E = examples in a record at most, 1 unless packed):

  input_ids            int64 [S]   token ids, zero-padded
  input_mask           int64 [S]   0 for padding, else the number of the token's
                                   example in the record, from 1; one after
                                   another
  segment_ids          int64 [S]   0 for segment A and padding, 1 for segment B
  masked_lm_positions  int64 [P]   positions of the masked tokens, zero-padded
  masked_lm_ids        int64 [P]   the tokens that stood there
  masked_lm_weights    float [P]   1 for masked tokens, 0 for padding
  next_sentence_labels int64 [E]   0: B follows A; 1: B is from elsewhere;
                                   zero-padded

With dynamic masks there are no masked_lm_* and input_ids is what stood there;
with whole words too there is

  is_continuation      int64 [S]   1 for tokens that go on with a word

The files of one data set are described by one `NAME.manifest.json` in their
folder; google/bert's and NVIDIA's have none. `tfrecord` has the framing,
`tf_example` the bytes of a `tf.train.Example`.
This module does not need TensorFlow, so that data workers start fast.
"""

import dataclasses
import glob
import json
import os

import numpy as np

import tfrecord
import tokenization
from errors import DataError

MANIFEST_VERSION = 1
MANIFEST_SUFFIX = ".manifest.json"


def fake_features(
  rng: np.random.Generator,
  max_seq_length: int,
  max_predictions_per_seq: int,
  vocab_size: int,
  examples_per_record: int = 1,
) -> dict[str, np.ndarray]:
  """The features of one record of random tokens, for tests and dry runs.

  The number of tokens and of masked tokens vary from record to record.
  """
  s, p = max_seq_length, max_predictions_per_seq
  length = int(rng.integers(max(s // 2, p + 2), s + 1))
  examples = int(rng.integers(1, examples_per_record + 1))
  places = np.arange(s)
  masked = int(rng.integers(1, p + 1))
  real = places < length
  place = places * examples // length  # of a token's example in the record
  half = length / examples / 2
  used = np.arange(p) < masked
  positions = np.sort(rng.choice(length, p, replace=False))
  positions[masked:] = 0
  return {
    "input_ids": np.where(real, rng.integers(0, vocab_size, s), 0),
    "input_mask": np.where(real, place + 1, 0),
    "segment_ids": np.where(real & (places - 2 * half * place >= half), 1, 0),
    "masked_lm_positions": positions,
    "masked_lm_ids": np.where(used, rng.integers(0, vocab_size, p), 0),
    "masked_lm_weights": used.astype(np.float32),
    "next_sentence_labels": np.where(
      np.arange(examples_per_record) < examples,
      rng.integers(0, 2, examples_per_record),
      0,
    ),
  }


# -----------------------------------------------------------------------------
# The manifest
# -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Manifest:
  """What one data set holds and how it was made.

  `settings` are the flags that decide the bytes (seed, probabilities, ...);
  `counts` what came out (documents, sentences, tokens, examples, ...), and
  `counts["unigram_entropy"]` is the entropy of the corpus' token distribution
  in nats: the loss of a model that knows word frequencies and nothing else.
  """

  max_seq_length: int
  max_predictions_per_seq: int
  examples_per_record: int  # at most; 1 means not packed
  masking: (
    str  # "static": masks are in the records; "dynamic": drawn on reading
  )
  tokenizer: tokenization.TokenizerInfo
  settings: dict
  counts: dict
  files: tuple[tfrecord.ShardInfo, ...]
  version: int = MANIFEST_VERSION

  @property
  def packing_factor(self) -> float:
    """Examples in a record on average; 1 if not packed."""
    if self.examples_per_record == 1:
      return 1.0
    return self.counts["examples"] / sum(info.records for info in self.files)

  def save(self, path: str) -> None:
    """Writes the manifest as JSON, whole or not at all."""
    with open(path + ".tmp", "w", encoding="utf-8") as f:
      json.dump(dataclasses.asdict(self), f, indent=2)
      f.write("\n")
    os.replace(path + ".tmp", path)

  @classmethod
  def load(cls, path: str) -> "Manifest":
    """Reads a manifest.

    Raises:
      DataError: not JSON, of another version, or with missing/unknown keys.
    """
    try:
      with open(path, encoding="utf-8") as f:
        raw = json.load(f)
    except (ValueError, OSError) as e:
      raise DataError(f"{path}: not a readable manifest: {e}") from e
    try:
      if raw.get("version") != MANIFEST_VERSION:
        raise DataError(
          f"{path}: manifest version {raw.get('version')}, this code reads "
          f"version {MANIFEST_VERSION}: make the records again with this "
          "create_pretraining_data.py"
        )
      raw["tokenizer"] = tokenization.TokenizerInfo(**raw["tokenizer"])
      raw["files"] = tuple(tfrecord.ShardInfo(**f) for f in raw["files"])
      return cls(**raw)
    except (TypeError, KeyError, AttributeError) as e:
      raise DataError(f"{path}: not a manifest of this project: {e}") from e


def find_manifest(record_path: str) -> tuple[str, Manifest] | None:
  """The manifest beside a record file that lists it, with its path, or None."""
  folder, name = os.path.split(record_path)
  for path in sorted(
    glob.glob(os.path.join(glob.escape(folder), "*" + MANIFEST_SUFFIX))
  ):
    manifest = Manifest.load(path)
    if any(info.name == name for info in manifest.files):
      return path, manifest
  return None


def expand_patterns(patterns: str) -> list[str]:
  """Files of a comma-separated list of names and globs, sorted, once each.

  The order matters (a record's number is its place in it), so it is a function
  of the names alone. Index and manifest files that a broad glob catches are
  left out.

  Raises:
    DataError: a name or pattern matches no file.
  """
  paths: list[str] = []
  for pattern in filter(None, (p.strip() for p in patterns.split(","))):
    found = [
      p
      for p in glob.glob(pattern)
      if not p.endswith((tfrecord.INDEX_SUFFIX, ".json", ".tmp"))
      and os.path.isfile(p)
    ]
    if not found:
      raise DataError(f"{pattern}: no such file (from {patterns!r})")
    paths.extend(found)
  if not paths:
    raise DataError(f"no input files in {patterns!r}")
  return sorted(set(paths))
