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
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

import tokenization
from common import json_files
from common.errors import DataError
from data import record_report, tfrecord
from data.masking import MaskSettings
from data.tf_example import Feature, decode_example

MANIFEST_VERSION = 1
# What records are made for: masked LM with next sentence prediction, or alone.
OBJECTIVES = ("mlm_nsp", "mlm")
MANIFEST_SUFFIX = ".manifest.json"
NO_RECORDS = (tfrecord.INDEX_SUFFIX, ".json", ".tmp")  # files beside records
_MOST_COMMAS = 32  # in a file's name


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


def features_of_first(
  paths: Sequence[str], vocab_size: int
) -> dict[str, Feature]:
  """The features of files without a manifest, from their first whole record."""
  for path in paths:
    with contextlib.suppress(DataError):
      return features_of_record(tfrecord.RecordSet([path]).read(0), vocab_size)
  return {}  # all are damaged, as the survey will report


def features_of_record(data: bytes, vocab_size: int) -> dict[str, Feature]:
  """The features of a data set with this record; DataError if it is damaged."""
  found = decode_example(data)
  return record_features(
    len(found.get("input_ids", ())),
    len(found.get("masked_lm_ids", ())),
    len(found.get("next_sentence_labels", ())),
    vocab_size,
    "masked_lm_ids" not in found,
    "is_continuation" in found,
  )


def fake_features(
  rng: np.random.Generator,
  max_seq_length: int,
  max_predictions_per_seq: int,
  vocab_size: int,
  examples_per_record: int = 1,
  predictions: int | None = None,
) -> dict[str, np.ndarray]:
  """One record with random tokens and padding, for tests and dry runs.

  It has so many `predictions`; None: a random number of them, not 0.
  """
  s, p, e = max_seq_length, max_predictions_per_seq, examples_per_record
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


_MAX_COUNT = 1 << 62


def _is_count(value, low: int, high: int = 1 << 31) -> bool:
  return type(value) is int and low <= value < high


@dataclasses.dataclass(frozen=True)
class Manifest:
  """What one data set holds and how it was made."""

  max_seq_length: int
  max_predictions_per_seq: int
  examples_per_record: int  # at most; 1 means not packed
  masking: str  # "static", in the records, or "dynamic", drawn on reading
  tokenizer: tokenization.TokenizerInfo
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
      self._knows_words,
    )

  @property
  def _knows_words(self) -> bool:
    return self.settings.get("do_whole_word_mask", False)

  @property
  def objective(self) -> str:
    return self.settings.get("objective", OBJECTIVES[0])

  @property
  def has_pairs(self) -> bool:
    """Whether examples are pairs of segments, for next sentence prediction."""
    return self.objective == OBJECTIVES[0]

  def mask_settings(self) -> MaskSettings | None:
    """How to draw dynamic masks; None for static ones, or if not known."""
    prob = self.settings.get("masked_lm_prob")
    if self.masking != "dynamic" or not prob or self.tokenizer.mask_id is None:
      return None
    return MaskSettings(
      prob,
      self.max_predictions_per_seq,
      self.tokenizer.mask_id,
      self.tokenizer.vocab_size,
    )

  def describe(self, folder: str) -> str:
    """A table for people, with the files that `folder` lacks."""
    tokenizer, names = self.tokenizer, [info.name for info in self.files]
    missing = [n for n in names if not os.path.exists(os.path.join(folder, n))]
    case = "lower-cased" if tokenizer.do_lower_case else "cased"
    rows = {
      "lengths": f"{self.max_seq_length} tokens, at most "
      f"{self.max_predictions_per_seq} to predict",
      "packing": f"examples in a record: at most {self.examples_per_record}, "
      f"{self.packing_factor:.2f} on average",
      "masks": "static, in the records"
      if self.masking == "static"
      else "dynamic, drawn when records are read, of "
      + ("tokens or words" if self._knows_words else "tokens")
      + " in any share",
      "tokenizer": f"{tokenizer.kind} {tokenizer.file}, "
      f"{tokenizer.vocab_size:,} tokens, {case}, SHA-256 {tokenizer.sha256}",
      "settings": ", ".join(f"{k}={v}" for k, v in self.settings.items()),
      "counts": ", ".join(
        f"{name.replace('_', ' ')} {round(n, 3):,}"
        for name, n in self.counts.items()
      ),
      "files": f"{len(names)} with {self.num_records:,} records, "
      f"{sum(f.bytes for f in self.files) / 1e6:,.1f} MB",
    }
    if missing:
      rows["missing"] = f"{len(missing)} files, such as {missing[0]}"
    return record_report.table(rows)

  def save(self, path: str) -> None:
    json_files.write(path, dataclasses.asdict(self))

  @classmethod
  def load(cls, path: str) -> "Manifest":
    """Reads a manifest; DataError if it is damaged or of another version."""
    try:
      raw = json_files.read(path)
    except OSError as e:
      raise DataError(f"{path}: not a readable manifest: {e.strerror}") from e
    try:
      if raw.get("version") != MANIFEST_VERSION:
        raise DataError(
          f"{path}: manifest version {raw.get('version')}, this code reads "
          f"version {MANIFEST_VERSION}: make the records again with this "
          "create_pretraining_data.py"
        )
      raw["tokenizer"] = tokenization.TokenizerInfo(**raw["tokenizer"])
      raw["files"] = tuple(tfrecord.ShardInfo(**f) for f in raw["files"])
      manifest = cls(**raw)
    except (TypeError, KeyError, AttributeError) as e:
      raise DataError(f"{path}: not a manifest of this project: {e}") from e
    for name, fits in manifest._checks():
      if not fits:
        raise DataError(
          f"{path}: {name} has an impossible value: the manifest is damaged or "
          "was changed. Copy it or make the records again"
        )
    return manifest

  def _checks(self) -> Iterator[tuple[str, bool]]:
    """(field, whether its value is possible); each relies on earlier ones."""
    yield "version", type(self.version) is int  # and not true
    yield "max_seq_length", _is_count(self.max_seq_length, 1)
    yield "max_predictions_per_seq", _is_count(self.max_predictions_per_seq, 1)
    yield "examples_per_record", _is_count(self.examples_per_record, 1)
    yield "masking", self.masking in ("static", "dynamic")
    t = self.tokenizer
    yield "tokenizer.kind", t.kind in ("wordpiece", "sentencepiece")
    yield "tokenizer.file", isinstance(t.file, str)
    yield "tokenizer.sha256", isinstance(t.sha256, str)
    yield "tokenizer.vocab_size", _is_count(t.vocab_size, 1)
    yield "tokenizer.do_lower_case", isinstance(t.do_lower_case, bool)
    fits = t.mask_id is None or _is_count(t.mask_id, 0, t.vocab_size)
    yield "tokenizer.mask_id", fits
    yield "settings", isinstance(self.settings, dict)
    prob = self.settings.get("masked_lm_prob", 0.15)
    yield "settings.masked_lm_prob", isinstance(prob, float) and 0 < prob < 1
    whole_words = self.settings.get("do_whole_word_mask", False)
    yield "settings.do_whole_word_mask", isinstance(whole_words, bool)
    yield "settings.objective", self.objective in OBJECTIVES
    yield "counts", isinstance(self.counts, dict)
    for name, n in self.counts.items():
      yield f"counts.{name}", type(n) in (int, float) and 0 <= n < _MAX_COUNT
    yield "files", bool(self.files)
    for info in self.files:
      yield "files.name", isinstance(info.name, str)
      yield "files.sha256", isinstance(info.sha256, str)
      yield "files.records", _is_count(info.records, 1, _MAX_COUNT)
      yield "files.bytes", _is_count(info.bytes, 1, _MAX_COUNT)
    if self.examples_per_record > 1:
      examples = self.counts.get("examples", 0) / self.num_records
      yield "counts.examples", 1 <= examples <= self.examples_per_record


_OURS = 3  # keys of a manifest; others' have "version" and "files" at most


def _is_ours(path: str) -> bool:
  """Whether a file is a manifest of ours, perhaps damaged."""
  try:
    found = json_files.read(path)
  except DataError:
    return True
  keys = {field.name for field in dataclasses.fields(Manifest)}
  return not isinstance(found, dict) or len(keys & found.keys()) >= _OURS


def find_manifests(
  record_paths: Sequence[str],
) -> dict[str, tuple[str, Manifest]]:
  """Record path -> (path, manifest) for records that a manifest lists.

  It is beside them, or beside the file that a link of the same name leads to.
  """
  wanted: dict[str, dict[str, str]] = collections.defaultdict(dict)
  for path in record_paths:
    wanted[os.path.dirname(path)][os.path.basename(path)] = path
  found = {}
  for folder, paths in wanted.items():
    pattern = os.path.join(glob.escape(folder), "*" + MANIFEST_SUFFIX)
    for manifest_path in sorted(glob.glob(pattern)):
      if not paths:
        break
      stem = os.path.basename(manifest_path).removesuffix(MANIFEST_SUFFIX)
      named = any(name.startswith((f"{stem}.", f"{stem}-")) for name in paths)
      if not (named or _is_ours(manifest_path)):
        continue
      manifest = Manifest.load(manifest_path)
      for info in manifest.files:
        if info.name in paths:
          found[paths.pop(info.name)] = manifest_path, manifest
    links = {
      os.path.realpath(path): path
      for name, path in paths.items()
      if os.path.islink(path)
      and os.path.basename(os.path.realpath(path)) == name
    }
    if links:
      there = find_manifests([*links])
      found |= {links[end]: made for end, made in there.items()}
  return found


def digest(
  record_paths: Sequence[str], manifests: dict[str, tuple[str, Manifest]]
) -> str | None:
  """Digest of the SHA-256 that manifests list; None if one has no manifest."""
  made = hashlib.sha256()
  for path in record_paths:
    if path not in manifests:
      return None
    shard = manifests[path][1].shards[os.path.basename(path)]
    made.update(shard.sha256.encode())
  return made.hexdigest()[:16]


def find_manifest(record_path: str) -> tuple[str, Manifest] | None:
  """(path, manifest) of the manifest that lists a record file, or None."""
  return find_manifests([record_path]).get(record_path)


def manifest_of(patterns: str) -> tuple[str, Manifest] | None:
  """`find_manifest` of the first of `expand_patterns`."""
  return find_manifest(expand_patterns(patterns)[0])


def expand_patterns(patterns: str) -> list[str]:
  """Files of a comma-separated list of names and globs, sorted, once each.

  The order, which numbers the records, depends on the names alone. An existing
  file may have commas and glob characters in its name. Globs leave out index
  and manifest files. DataError for an item that matches no file.
  """
  if os.path.isfile(patterns):
    return [patterns]
  paths: set[str] = set()
  parts = patterns.split(",")
  while parts:
    starts = itertools.accumulate(parts[:_MOST_COMMAS], "{},{}".format)
    names = [start.strip() for start in starts]
    count, found = _first_files(names)
    if names[0] and not found:
      raise DataError(f"{_none_such(names[0])} (from {patterns!r})")
    paths.update(found)
    parts = parts[count:]
  if not paths:
    raise DataError(f"no input files in {patterns!r}")
  return sorted(paths)


def without_shard(path: str) -> str:
  """NAME.EXT of NAME-00000-of-00004.EXT; other paths as they are."""
  folder, name = os.path.split(path)
  return os.path.join(folder, re.sub(r"-\d{5,}-of-\d{5,}(?=\.|$)", "", name))


def check_not_written(paths: Iterable[str], flag: str, *written: str) -> None:
  """DataError if one of `paths`, of `flag`, is a file that will be written."""
  outputs = set(map(os.path.realpath, written))
  for path in paths:
    if os.path.realpath(path) in outputs:
      raise DataError(
        f"{path} is of {flag}, and would be written: give another place to "
        "write to, or a narrower pattern"
      )


def _first_files(names: list[str]) -> tuple[int, list[str]]:
  """(parts, files) of the first item; `names` join 1, 2, ... of the parts."""
  for count in range(len(names), 0, -1):
    if os.path.isfile(names[count - 1]):
      return count, [names[count - 1]]
  for count, name in enumerate(names, 1):
    if found := _matches(name):
      return count, found
  return 1, []


def _matches(pattern: str) -> list[str]:
  other = tuple(end for end in NO_RECORDS if not pattern.endswith(end))
  return [
    path
    for path in glob.glob(pattern, recursive=True)
    if not path.endswith(other) and os.path.isfile(path)
  ]


def _none_such(pattern: str) -> str:
  found = [pattern]
  if not os.path.exists(pattern):
    found = sorted(glob.glob(pattern, recursive=True))
  if not found:
    return f"{pattern}: no such file"
  if os.path.isdir(found[0]):
    return (
      f"{found[0]} is a folder: name the files in it, for example by a glob"
    )
  return (
    f"{pattern}: matches {len(found)} files, such as {found[0]}, but none with "
    f"records ({', '.join(NO_RECORDS)} are other files): name it exactly"
  )
