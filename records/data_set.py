"""The one record schema, and the manifest of a data set.

A record is a serialized `tf.train.Example` with google/bert's features, so its
scripts read our files and we read theirs (S = max_seq_length, P =
max_predictions_per_seq, E = examples in a record at most, 1 unless packed):

  input_ids            int64 [S]   token ids, zero-padded
  input_mask           int64 [S]   the number of the token's example in the
                                   record, ascending from 1; 0 for padding
  segment_ids          int64 [S]   0 for segment A and padding, 1 for segment B;
                                   without pairs 0 and 1 in turn for documents
  masked_lm_positions  int64 [P]   positions of the masked tokens, zero-padded
  masked_lm_ids        int64 [P]   the tokens that stood there
  masked_lm_weights    float [P]   1 for masked tokens, 0 for padding
  next_sentence_labels int64 [E]   0: B follows A; 1: B is from elsewhere;
                                   zero-padded; without pairs 0

With dynamic masks there are no masked_lm_*, and input_ids are the original
tokens; for whole-word masks there is also

  is_continuation      int64 [S]   1 for tokens that continue a word

`NAME.manifest.json` in their folder describes the files of a data set;
google/bert's and NVIDIA's have none.
"""

import collections
import contextlib
import dataclasses
import functools
import glob
import hashlib
import os
import re
from collections.abc import Iterable, Sequence

import numpy as np

from common import json_files, stores
from common.errors import DataError
from records import record_report, tfrecord
from records.masking import MaskSettings
from records.tf_example import Feature, decode_example
from text_encoders import kinds
from text_encoders.base import TokenizerInfo

MANIFEST_VERSION = 1
# What records are made for: masked LM with next sentence prediction, or alone.
OBJECTIVES = ("mlm_nsp", "mlm")
MANIFEST_SUFFIX = ".manifest.json"


def record_features(
  max_seq_length: int,
  max_predictions_per_seq: int,
  examples_per_record: int,
  vocab_size: int,
  dynamic: bool = False,
  whole_words: bool = False,
) -> dict[str, Feature]:
  """The features of each record of a data set, see above."""
  s, p, e = max_seq_length, max_predictions_per_seq, examples_per_record
  features = {
    "input_ids": Feature(s, vocab_size),
    "input_mask": Feature(s, e + 1),
    "segment_ids": Feature(s, 2),
    "next_sentence_labels": Feature(e, 2),
  }
  if not dynamic:
    features["masked_lm_positions"] = Feature(p, s)
    features["masked_lm_ids"] = Feature(p, vocab_size)
    features["masked_lm_weights"] = Feature(p, None)
  elif whole_words:
    features["is_continuation"] = Feature(s, 2)
  return features


def features_of_first(paths: list[str], vocab_size: int) -> dict[str, Feature]:
  """The features of files without a manifest, from their first whole record."""
  for path in paths:
    with contextlib.suppress(DataError):
      return features_of_record(tfrecord.RecordSet([path]).read(0), vocab_size)
  return {}  # all are damaged, as the survey will report


def features_of_record(data: bytes, vocab_size: int) -> dict[str, Feature]:
  """The features of a data set with this record; DataError if it is damaged."""
  values = decode_example(data)
  # What is missing has size 0; the check of the record names it.
  return record_features(
    len(values.get("input_ids", ())),
    len(values.get("masked_lm_ids", ())),
    len(values.get("next_sentence_labels", ())),
    vocab_size,
    "masked_lm_ids" not in values,
    "is_continuation" in values,
  )


def fake_features(
  rng: np.random.Generator,
  max_seq_length: int,
  max_predictions_per_seq: int,
  vocab_size: int,
  examples_per_record: int = 1,
  predictions: int | None = None,
) -> dict[str, np.ndarray]:
  """One record with random tokens and padding, for tests and dry runs."""
  s, p, e = max_seq_length, max_predictions_per_seq, examples_per_record
  # At least half full, and with room for all predictions beside [CLS], [SEP].
  length = int(rng.integers(min(s, max(s // 2, p + 2)), s + 1))
  examples = int(rng.integers(1, e + 1))
  token = np.arange(s)
  masked = predictions or int(rng.integers(1, p + 1))
  real = token < length
  example = token * examples // length
  half = length / examples / 2
  used = np.arange(p) < masked
  positions = np.sort(rng.choice(length, p, replace=False))
  return {
    "input_ids": real * rng.integers(0, vocab_size, s),
    "input_mask": real * (example + 1),
    "segment_ids": real * (token - 2 * half * example >= half).astype(int),
    "masked_lm_positions": used * positions,
    "masked_lm_ids": used * rng.integers(0, vocab_size, p),
    "masked_lm_weights": used.astype(np.float32),
    "next_sentence_labels": (np.arange(e) < examples) * rng.integers(0, 2, e),
  }


_SIZE, _COUNT = range(1, 1 << 31), range(1, 1 << 62)
# What a `TokenizerInfo` and a manifest must be, for `json_files.expect`.
TOKENIZER = {
  "kind": tuple(kinds.KINDS), "file": str, "sha256": str, "vocab_size": _SIZE,
  "do_lower_case": bool, "mask_id": int,
}  # fmt: skip
_FORM = {
  "version": MANIFEST_VERSION,
  "max_seq_length": _SIZE,
  "max_predictions_per_seq": _SIZE,
  "examples_per_record": _SIZE,
  "masking": ("static", "dynamic"),
  "tokenizer": TOKENIZER,
  "settings": {
    "masked_lm_prob": float,
    "do_whole_word_mask?": bool,
    "objective?": OBJECTIVES,
  },
  "counts": dict,
  "files": [{"name": str, "records": _COUNT, "bytes": _COUNT, "sha256": str}],
}


@dataclasses.dataclass(frozen=True)
class Manifest:
  """The contents of a data set, and the settings that made it."""

  max_seq_length: int
  max_predictions_per_seq: int
  examples_per_record: int  # at most; 1 means not packed
  masking: str  # "static", in the records, or "dynamic", drawn on reading
  tokenizer: TokenizerInfo
  settings: dict  # the flags that decide the bytes
  counts: dict  # of documents, tokens, ...; unigram_entropy: the text's, nats
  files: tuple[tfrecord.ShardInfo, ...]
  version: int = MANIFEST_VERSION

  @functools.cached_property
  def shards(self) -> dict[str, tfrecord.ShardInfo]:
    """The files by name."""
    return {info.name: info for info in self.files}

  @property
  def num_records(self) -> int:
    return sum(info.records for info in self.files)

  @property
  def packing_factor(self) -> float:
    """Examples in a record on average."""
    if self.examples_per_record == 1:
      return 1.0
    return self.counts["examples"] / self.num_records

  def features(self) -> dict[str, Feature]:
    return record_features(
      self.max_seq_length,
      self.max_predictions_per_seq,
      self.examples_per_record,
      self.tokenizer.vocab_size,
      self.masking == "dynamic",
      self.knows_words,
    )

  @property
  def knows_words(self) -> bool:
    """Whether masks can be of whole words."""
    return self.settings.get("do_whole_word_mask", False)

  @property
  def objective(self) -> str:
    return self.settings.get("objective", OBJECTIVES[0])

  @property
  def has_pairs(self) -> bool:
    """Whether examples are pairs of segments, for next sentence prediction."""
    return self.objective == OBJECTIVES[0]

  def mask_settings(self) -> MaskSettings | None:
    """How to draw dynamic masks; None for static ones."""
    if self.masking == "static":
      return None
    prob, most = self.settings["masked_lm_prob"], self.max_predictions_per_seq
    mask, vocab_size = self.tokenizer.mask_id, self.tokenizer.vocab_size
    return MaskSettings(prob, most, mask, vocab_size)

  def describe(self, folder: str) -> str:
    """A table for people, with the files that `folder` lacks."""
    tokenizer, names, counts = self.tokenizer, list(self.shards), []
    masks = "static, in the records"
    if self.masking == "dynamic":
      what = "tokens or words" if self.knows_words else "tokens"
      masks = f"dynamic, drawn when records are read, of {what} in any share"
    for name, count in self.counts.items():
      counts.append(f"{name.replace('_', ' ')} {round(count, 3):,}")
    rows = {
      "lengths": f"{self.max_seq_length} tokens, at most "
      f"{self.max_predictions_per_seq} to predict",
      "packing": f"examples in a record: at most {self.examples_per_record}, "
      f"{self.packing_factor:.2f} on average",
      "masks": masks,
      "tokenizer": f"{tokenizer.kind} {tokenizer.file}, "
      f"{tokenizer.vocab_size:,} tokens, {tokenizer.case}, "
      f"SHA-256 {tokenizer.sha256}",
      "settings": ", ".join([f"{k}={v}" for k, v in self.settings.items()]),
      "counts": ", ".join(counts),
      "files": f"{len(names)} with {self.num_records:,} records, "
      f"{sum([info.bytes for info in self.files]) / 1e6:,.1f} MB",
    }
    missing = []
    for name in names:
      if not stores.at(os.path.join(folder, name)).is_file():
        missing.append(name)
    if missing:
      rows["missing"] = f"{len(missing)}, such as {missing[0]}"
    return record_report.table(rows)

  def save(self, path: str) -> None:
    json_files.write(path, dataclasses.asdict(self))

  @classmethod
  def load(cls, path: str) -> "Manifest":
    """Reads a manifest; DataError if it is damaged or of another version."""
    raw = json_files.read(path)
    try:
      # First each field by itself, then what must hold between them.
      json_files.expect(raw, _FORM)
      raw["tokenizer"] = TokenizerInfo(**raw["tokenizer"])
      raw["files"] = tuple(tfrecord.ShardInfo(**f) for f in raw["files"])
      manifest = cls(**raw)
      manifest._check_values()
    except (TypeError, ValueError) as e:
      raise DataError(
        f"{path}: {e}: the manifest is damaged or of another program: copy it "
        "again, or make the records again"
      ) from e
    return manifest

  def _check_values(self) -> None:
    """ValueError for a value that is possible alone but not beside others."""
    for name, count in self.counts.items():
      if type(count) not in (int, float) or not 0 <= count < _COUNT.stop:
        raise ValueError(f"counts.{name} is {count!r}, not a count")
    records, vocab_size = self.num_records, self.tokenizer.vocab_size
    # Only packed records need the count of examples, see `packing_factor`.
    average = self.counts.get("examples", 0) / max(1, records)
    is_packed = self.examples_per_record > 1
    fits = {
      "files": records > 0,
      "tokenizer.mask_id": 0 <= self.tokenizer.mask_id < vocab_size,
      "settings.masked_lm_prob": 0 < self.settings["masked_lm_prob"] < 1,
      "counts.examples": not is_packed
      or 1 <= average <= self.examples_per_record,
    }
    for name, does_fit in fits.items():
      if not does_fit:
        raise ValueError(f"{name} has an impossible value")


def find_manifests(files: Sequence[str]) -> dict[str, tuple[str, Manifest]]:
  """Record path -> (path, manifest) for records that a manifest lists.

  It is beside them, or beside the file that a link of the same name leads to.
  """
  folders: dict[str, dict[str, str]] = collections.defaultdict(dict)
  for path in files:
    folders[os.path.dirname(path)][os.path.basename(path)] = path
  manifests = {}
  for folder, paths in folders.items():
    pattern = os.path.join(glob.escape(folder), "*" + MANIFEST_SUFFIX)
    for manifest_path in stores.at(pattern).matches():
      # When all records have one, it does not matter what others hold.
      if paths and _may_list(manifest_path, paths):
        manifest = Manifest.load(manifest_path)
        for name in paths.keys() & manifest.shards.keys():
          manifests[paths.pop(name)] = manifest_path, manifest
    # What is left may be links to a folder with a manifest.
    links = {}
    for name, path in paths.items():
      target = os.path.realpath(path)
      if os.path.islink(path) and os.path.basename(target) == name:
        links[target] = path
    if links:
      for target, listing in find_manifests([*links]).items():
        manifests[links[target]] = listing
  return manifests


def _may_list(manifest_path: str, names: Iterable[str]) -> bool:
  """Whether a manifest is of our format, or damaged, or named as records."""
  stem = os.path.basename(manifest_path).removesuffix(MANIFEST_SUFFIX)
  for name in names:
    if name.startswith((f"{stem}.", f"{stem}-")):
      return True
  try:
    raw = json_files.read(manifest_path)
  except DataError:
    return True
  # Other programs' manifests share two keys with ours at most.
  return not isinstance(raw, dict) or len(_FORM.keys() & raw.keys()) > 2


def digest(
  record_paths: Sequence[str], manifests: dict[str, tuple[str, Manifest]]
) -> str | None:
  """Digest of the SHA-256 that manifests list; None if one has no manifest."""
  # The files' order counts, because it numbers their records.
  total = hashlib.sha256()
  for path in record_paths:
    if path not in manifests:
      return None
    shard = manifests[path][1].shards[os.path.basename(path)]
    total.update(shard.sha256.encode())
  return total.hexdigest()[:16]


def data_set_of(path: str) -> str:
  """NAME.EXT of NAME-00000-of-00004.EXT; other paths as they are."""
  folder, name = os.path.split(path)
  return os.path.join(folder, re.sub(r"-\d{5,}-of-\d{5,}(?=\.|$)", "", name))
