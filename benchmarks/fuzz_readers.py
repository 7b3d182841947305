"""What `benchmarks.fuzz` damages, how it is read, and what would be right.

The checks here say apart from the readers which inputs are valid: they are
written from the formats' descriptions and use none of the readers' code.
"""

import contextlib
import copy
import gzip
import io
import json
import math
import os
import shutil
import struct

import google_crc32c
import numpy as np
from absl import flags
from backports import zstd

import tokenization
from common import settings
from data import (
  creation,
  record_report,
  records,
  text_files,
  tf_example,
  tfrecord,
)
from tools import prepare_corpus, train_tokenizer

# -----------------------------------------------------------------------------
# Damage
# -----------------------------------------------------------------------------

_HUGE = tuple(
  value.to_bytes(8, "little")
  for value in (0, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1)
)


def choose(rng, items):
  """One of some items, of any types."""
  return items[int(rng.integers(len(items)))]


def damaged(rng, data: bytes, other: bytes = b"") -> bytes:
  """`data` with up to 3 things done to it; `other` is of the same kind."""
  for _ in range(int(rng.integers(1, 4))):
    data = _damaged_once(rng, data, other)
  return data


def _damaged_once(rng, data: bytes, other: bytes) -> bytes:
  size = len(data)
  start, end = sorted(rng.integers(0, size + 1, 2).tolist())
  end = min(end, start + int(2 ** rng.integers(0, 12)))
  part = data[start:end]
  noise = rng.bytes(int(2 ** rng.integers(0, 8)))
  kind = int(rng.integers(13))
  if kind < 3 and size:  # a bit, a byte, some bytes
    changed = bytearray(data)
    for _ in range((1, 1, 9)[kind]):
      place = int(rng.integers(size))
      new = int(rng.integers(256))
      changed[place] = changed[place] ^ 1 << new % 8 if kind == 0 else new
    return bytes(changed)
  return {
    3: data[:start],
    4: data[:start] + noise + data[start:],
    5: data[:start] + data[end:],
    6: data[:end] + part + data[end:],
    7: data[end:] + part + data[:start],
    8: data[:start] + bytes(end - start) + data[end:],
    9: data[:start] + choose(rng, _HUGE) + data[start + 8 :],
    10: data[:start] + other[start:] if other else data + noise,
    11: data + part,
  }.get(kind, choose(rng, (b"", noise, bytes(100), data[start:])))


# Values in a JSON file's text that are no such value, or not a sane one.
_JSON_VALUES = (
  "null", "true", "false", "-1", "0", "1", "2", "0.5", "-0.0", "1e400",
  "-1e400", "1e39", "NaN", "Infinity", "-Infinity", str(2**31), str(2**63),
  str(10**30), "9" * 400, "9" * 5000, '""', '"x"', '"1"', '"\\ud800"',
  '"\\u0000"', "[]", "{}", "[1]", "[[]]", '{"x": 1}', '["../../x"]',
  "[" * 100_000, '{"a":' * 100_000, "[" * 500 + "]" * 500, "1 2", "'x'", "--1",
)  # fmt: skip
_MARK = "@value@"


def _places(value, path=()):
  """Paths of all values in a JSON value."""
  yield path
  children = ()
  if isinstance(value, dict):
    children = value.items()
  elif isinstance(value, list):
    children = enumerate(value)
  for key, child in children:
    yield from _places(child, (*path, key))


def damaged_json(rng, value) -> bytes:
  """The text of a JSON value with some of its parts changed, or its bytes."""
  if rng.random() < 0.25:
    return damaged(rng, json.dumps(value, indent=1).encode())
  value, new = copy.deepcopy(value), choose(rng, _JSON_VALUES)
  path = choose(rng, list(_places(value)))
  if not path:
    return new.encode()
  inside = value
  for key in path[:-1]:
    inside = inside[key]
  kind = int(rng.integers(6))
  if kind == 0:
    del inside[path[-1]]
  elif kind == 1 and isinstance(inside, dict):
    inside[choose(rng, ("x", "", "__class__", "\ud800"))] = _MARK
  elif kind == 2 and isinstance(inside, dict):  # the same key twice
    key = path[-1]
    pairs = [(k, v) for k, v in inside.items()]
    pairs.insert(int(rng.integers(len(pairs) + 1)), (key, _MARK))
    text = ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in pairs)
    holder = _replaced(value, path[:-1], "@object@")
    text = json.dumps(holder).replace('"@object@"', "{" + text + "}")
    return text.replace(f'"{_MARK}"', new).encode("utf-8", "surrogatepass")
  else:
    inside[path[-1]] = _MARK
  text = json.dumps(value).replace(f'"{_MARK}"', new)
  return text.encode("utf-8", "surrogatepass")


def _replaced(value, path, new):
  if not path:
    return new
  inside = value
  for key in path[:-1]:
    inside = inside[key]
  inside[path[-1]] = new
  return value


def strict_json(data: bytes):
  """A JSON value as its standard has it; ValueError if it is none."""

  def pairs(items):
    if len(dict(items)) < len(items):
      raise ValueError("a key twice")
    return dict(items)

  def constant(name):
    raise ValueError(name)

  try:
    return json.loads(
      data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant
    )
  except RecursionError as e:
    raise ValueError("nested too deeply") from e


def _is_int(value, low, high=1 << 31) -> bool:
  return type(value) is int and low <= value < high


def _is_number(value, low, high) -> bool:
  return type(value) in (int, float) and low <= value <= high


# -----------------------------------------------------------------------------
# Readers
# -----------------------------------------------------------------------------


class Reader:
  """One reader of the project, and what it is given.

  Attributes:
    weight: its share of all inputs.
    cost: seconds of a thousand inputs, about: the dearest come first.
  """

  weight, cost = 1.0, 1.0

  def __init__(self, folder: str):
    self.folder = folder
    self.file = ""  # the last damaged one

  def damage(self, rng) -> None:
    """Makes the next input."""
    raise NotImplementedError

  def read(self):
    """Reads it, as the project does."""
    raise NotImplementedError

  def wrong(self, result) -> str:
    """Why what was read is not right; "" if it is."""
    raise NotImplementedError

  def mentions(self) -> tuple:
    """An error names one of these."""
    return (self.file,)

  def describe(self) -> str:
    """The input, for people."""
    if not os.path.isfile(self.file):
      return f"{self.file} (no file)"
    with open(self.file, "rb") as f:
      data = f.read()
    return f"{self.file}, {len(data)} bytes, {data[:1500]!r}"

  def path(self, name: str) -> str:
    return os.path.join(self.folder, name)

  def write(self, name: str, data: bytes) -> str:
    """Writes a file; returns its path."""
    with open(self.path(name), "wb") as f:
      f.write(data)
    return self.path(name)

  def put(self, rng, name: str, data: bytes) -> None:
    """The damaged file; now and then it is a folder instead."""
    self.file = self.path(name)
    if os.path.isdir(self.file):
      os.rmdir(self.file)
    if rng.random() < 0.005:
      with contextlib.suppress(FileNotFoundError):
        os.unlink(self.file)
      os.mkdir(self.file)
    else:
      self.write(name, data)


def masked_crc(data: bytes) -> int:
  """TFRecord's and TensorFlow's tables'."""
  crc = google_crc32c.value(data)
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(record: bytes) -> bytes:
  """A record as a record file has it."""
  length = struct.pack("<Q", len(record))
  checks = [struct.pack("<I", masked_crc(b)) for b in (length, record)]
  return length + checks[0] + record + checks[1]


def unframed(data: bytes) -> list[bytes] | None:
  """The records of a record file; None if it is not whole."""
  found = []
  while data:
    (length,) = struct.unpack("<Q", data[:8].ljust(8, b"\0"))
    if length > len(data):
      return None
    record = data[12 : 12 + length]
    if data[: length + 16] != frame(record):
      return None
    found.append(record)
    data = data[length + 16 :]
  return found


class Framing(Reader):
  """Damaged record files, with and without an index."""

  weight = 1.5

  def __init__(self, folder):
    super().__init__(folder)
    rng = np.random.default_rng(0)
    self.records = [rng.bytes(int(n)) for n in rng.integers(0, 200, 12)]
    with tfrecord.ShardWriter(self.path("x.tfrecord")) as writer:
      for record in self.records:
        writer.write(record)
    with open(self.path("x.tfrecord"), "rb") as f:
      self.whole = f.read()
    self.info = writer.info
    self.other = b"".join(frame(r[::-1]) for r in self.records)
    with open(self.path("x.tfrecord.index"), "rb") as f:
      self.index = f.read()

  def damage(self, rng):
    data = damaged(rng, self.whole, self.other)
    if rng.random() < 0.2:  # a length with its checksum
      number = int(rng.integers(12))
      start = sum(16 + len(r) for r in self.records[:number])
      length = choose(rng, [*_HUGE, struct.pack("<Q", int(rng.integers(300)))])
      crc = struct.pack("<I", masked_crc(length))
      data = self.whole[:start] + length + crc + self.whole[start + 12 :]
    self.data = data
    self.put(rng, "x.tfrecord", data)
    self.has_index = rng.random() < 0.5
    self.verified = rng.random() < 0.5
    if self.has_index:
      self.write("x.tfrecord.index", self.index)
    elif os.path.exists(self.path("x.tfrecord.index")):
      os.unlink(self.path("x.tfrecord.index"))

  def read(self):
    if self.verified:
      tfrecord.verify_file(self.file, self.info if self.has_index else None)
    return list(tfrecord.RecordSet([self.file]))

  def wrong(self, result):
    if self.has_index and self.verified:  # against the manifest's hash
      return "" if result == self.records else "other records"
    if self.has_index and result == self.records:
      return ""  # it says where records are, and their checksums what
    return "" if result and result == unframed(self.data) else "not whole"


class _Opened:
  """Unpickled, it leaves a file: code of an input must not run."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return open, (self.path, "w")


class Index(Framing):
  """Damaged indexes of whole record files."""

  weight = 1.5

  def damage(self, rng):
    self.write("x.tfrecord", self.whole)
    data = damaged(rng, self.index)
    if rng.random() < 0.6:
      data = self._array(rng)
    self.put(rng, "x.tfrecord.index", data)
    self.verified = rng.random() < 0.3

  def _array(self, rng) -> bytes:
    """Another array, whole."""
    offsets = np.load(io.BytesIO(self.index)).copy()
    size, top = offsets[-1], np.iinfo(np.int64).max
    place = int(rng.integers(len(offsets)))
    out = io.BytesIO()
    kind = int(rng.integers(10))
    if kind == 0:
      offsets[place] = choose(rng, (-1, 0, 1, size, size + 1, top, -top))
    elif kind == 1:  # differences that overflow
      offsets = np.array([0, top, -top + 16, -20, size])
    elif kind == 2:
      offsets = offsets.astype(
        choose(rng, ("i4", "u8", ">i8", "f8", "O", "S9"))
      )
    elif kind == 3:
      offsets = choose(
        rng, (offsets[None], offsets[0], offsets[:0], offsets[:1])
      )
    elif kind == 4:
      offsets = np.delete(offsets, place)
    elif kind == 5:
      offsets = np.sort(rng.integers(0, size + 1, len(offsets)))
    elif kind == 6:
      np.savez(out, offsets)
      return out.getvalue()
    elif kind == 7:
      offsets = np.array([_Opened(self.path("ran"))] * 2, object)
    elif kind == 8:
      shape = choose(rng, ("(-1,)", "(1<<60,)", "(13,)*9", "(" * 5000, "()"))
      text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}\n"
      head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) & 0xFFFF)
      return head + text.encode() + offsets.tobytes()
    else:
      offsets[place] += int(rng.integers(-20, 20))
    np.save(out, offsets)
    return out.getvalue()

  def read(self):
    if self.verified:
      tfrecord.verify_file(self.path("x.tfrecord"), self.info)
    return list(tfrecord.RecordSet([self.path("x.tfrecord")]))

  def wrong(self, result):
    if os.path.exists(self.path("ran")):
      os.unlink(self.path("ran"))
      return "code of the file was run"
    return "" if result == self.records else "other records"

  def mentions(self):
    return (self.path("x.tfrecord"),)


def example_problem(values: dict, s, p, e, vocab_size, dynamic, words) -> str:
  """What is wrong with the values of a record, by the schema; "" if nothing.

  Args:
    values: name -> list.
  """
  sizes = {"input_ids": s, "input_mask": s, "segment_ids": s}
  sizes["next_sentence_labels"] = e
  bounds = dict(input_ids=vocab_size, input_mask=e + 1, segment_ids=2)
  bounds |= dict(next_sentence_labels=2, masked_lm_positions=s)
  bounds |= dict(masked_lm_ids=vocab_size, is_continuation=2)
  if not dynamic:
    for name in ("positions", "ids", "weights"):
      sizes[f"masked_lm_{name}"] = p
  elif words:
    sizes["is_continuation"] = s
  for name, size in sizes.items():
    if name not in values or len(values[name]) != size:
      return f"size of {name}"
    if name == "masked_lm_weights":
      if not all(w in (0.0, 1.0) for w in values[name]):
        return "weights"
    elif not all(
      type(v) is int and 0 <= v < bounds[name] for v in values[name]
    ):
      return f"range of {name}"
  mask = values["input_mask"]
  number = 0
  for i, m in enumerate(mask):
    if m == 0 and any(mask[i:]):
      return "padding between tokens"
    if m not in (0, number, number + 1):
      return "numbers of examples"
    number = m or number
  if not number:
    return "no tokens"
  if not dynamic:
    used = [
      position
      for position, weight in zip(
        values["masked_lm_positions"], values["masked_lm_weights"], strict=True
      )
      if weight
    ]
    if len(set(used)) < len(used) or any(not mask[i] for i in used):
      return "masked positions"
  return ""


class Content(Reader):
  """Whole frames and checksums around damaged records."""

  weight = 2.5
  cost = 4

  def __init__(self, folder):
    super().__init__(folder)
    # As the independent check.
    from common.tensorflow_v1 import tf

    self.example = tf.train.Example

  def damage(self, rng):
    e = choose(rng, (1, 1, 3))
    dynamic, words = choose(
      rng, [(False, False)] * 3 + [(True, False), (True, True)]
    )
    s, p, vocab = 16, 4, choose(rng, (30, 300))
    self.shape = (s, p, e, vocab, dynamic, words)
    features = records.fake_features(rng, s, p, vocab, e)
    if dynamic:
      for name in ("positions", "ids", "weights"):
        del features[f"masked_lm_{name}"]
      if words:
        features["is_continuation"] = rng.integers(0, 2, s)
    encoded = tf_example.encode_example(features)
    self.sound = frame(encoded)
    if rng.random() < 0.4:
      other = tf_example.encode_example(
        records.fake_features(rng, s, p, vocab, e)
      )
      self.record = damaged(rng, encoded, other)
    else:
      self.record = self._of_other_values(rng, features)
    self.put(rng, "x.tfrecord", self.sound + frame(self.record))

  def _of_other_values(self, rng, features) -> bytes:
    example = self.example()
    target = choose(rng, list(features))
    for name, array in features.items():
      values = array.tolist()
      place = int(rng.integers(len(values)))
      if name == target:
        kind = int(rng.integers(9))
        if kind < 4:
          values[place] = choose(
            rng, (-1, 0, 1, 2, 3, 7, 15, 16, 29, 30, 300, 2**31, 2**32 + 1,
                  -(2**63), 2**63 - 1, math.nan, math.inf, -0.5, 1e30, 1.0),
          )  # fmt: skip
        elif kind == 4:
          values.pop(place)
        elif kind == 5:
          values.insert(place, values[place])
        elif kind == 6:
          continue
        elif kind == 7:
          rng.shuffle(values)
        else:
          values = choose(rng, ([], [0] * len(values), [1] * len(values)))
      feature = example.features.feature[name]
      if all(isinstance(v, int) for v in values) and array.dtype.kind != "f":
        feature.int64_list.value.extend(values)
      elif choose(rng, (True, True, True, False)) or name != target:
        feature.float_list.value.extend(map(float, values))
      else:
        feature.bytes_list.value.extend(str(v).encode() for v in values)
    return example.SerializeToString()

  def read(self):
    files = tfrecord.RecordSet([self.file])
    return record_report.read_record(
      files, 1, records.record_features(*self.shape)
    )

  def values(self) -> dict | None:
    """The damaged record's, by TensorFlow; None if it is no Example."""
    from google.protobuf.message import DecodeError

    try:
      example = self.example.FromString(self.record)
    except DecodeError:
      return None
    values = {}
    for name, feature in example.features.feature.items():
      kind = feature.WhichOneof("kind")
      values[name] = list(getattr(feature, kind).value) if kind else []
    return values

  def wrong(self, result):
    values = self.values()
    if values is None:
      return "no tf.train.Example"
    if problem := example_problem(values, *self.shape):
      return problem
    for name, array in result.items():
      if name in values and array.tolist() != values[name]:
        return f"other values of {name}"
    return ""


class Pipeline(Content):
  """The same, as training reads them."""

  weight, cost = 0.15, 200

  def __init__(self, folder):
    super().__init__(folder)
    from training import input_pipeline

    self.pipeline = input_pipeline

  def read(self):
    from data import masking

    s, p, e, vocab, dynamic, words = self.shape
    masks = masking.MaskSettings(0.15, p, 4, vocab) if dynamic else None
    if e > 1 and masks:
      masks = masks._replace(masked_lm_prob=0.1)
    shape = self.pipeline.RecordShape(s, p, vocab, e, masks, words)
    source = self.pipeline.Source(self.file, shape)
    try:
      return self.pipeline.first_batch(source, 2)
    except self.pipeline.READ_ERRORS as error:
      if explained := source.explain(np.arange(2)):
        raise explained from error
      raise

  def wrong(self, result):
    values = self.values()
    if values is None:  # TensorFlow's parser, another one, took it: for what?
      values = {name: rows[1].tolist() for name, rows in result.items()}
    return example_problem(values, *self.shape)


class Manifest(Reader):
  """Damaged manifests of whole records."""

  weight, cost = 1.5, 3

  def __init__(self, folder):
    super().__init__(folder)
    from training import input_pipeline

    self.manifest_shape = input_pipeline.manifest_shape
    rng = np.random.default_rng(0)
    self.made = {}
    for dynamic in (False, True):
      features = records.fake_features(rng, 32, 5, 100, 3)
      if dynamic:
        for name in ("positions", "ids", "weights"):
          del features[f"masked_lm_{name}"]
      with tfrecord.ShardWriter(self.path("x.tfrecord")) as writer:
        writer.write(tf_example.encode_example(features))
      manifest = records.Manifest(
        max_seq_length=32,
        max_predictions_per_seq=5,
        examples_per_record=3,
        masking="dynamic" if dynamic else "static",
        tokenizer=tokenization.TokenizerInfo(
          "wordpiece", "vocab.txt", "ab" * 32, 100, True, 4
        ),
        settings={"masked_lm_prob": 0.1, "do_whole_word_mask": False},
        counts={"examples": 3, "documents": 2, "unigram_entropy": 6.5},
        files=(writer.info, tfrecord.ShardInfo("y", 2, 30, "cd" * 32)),
      )
      path = self.path("x" + records.MANIFEST_SUFFIX)
      manifest.save(path)
      with open(path, "rb") as f:
        self.made[dynamic] = json.load(f)

  def damage(self, rng):
    self.data = damaged_json(rng, self.made[rng.random() < 0.5])
    self.put(rng, "x" + records.MANIFEST_SUFFIX, self.data)

  def read(self):
    path = self.path("x.tfrecord")
    found = records.find_manifest(path)
    shape = self.manifest_shape(path)
    if found:
      _, manifest = found
      return (
        manifest.features(),
        manifest.mask_settings(),
        manifest.packing_factor,
        manifest.describe(self.folder),
        shape,
      )
    return None

  def wrong(self, result):
    try:
      return manifest_problem(strict_json(self.data))
    except ValueError as e:
      return f"no JSON: {e}"


def manifest_problem(raw) -> str:
  """What is wrong with a manifest, by its description."""
  numbers = ("max_seq_length", "max_predictions_per_seq", "examples_per_record")
  names = {*numbers, "masking", "tokenizer", "settings", "counts", "files"}
  if not isinstance(raw, dict) or set(raw) - {"version"} != names:
    return "keys"
  if raw.get("version") != 1 or type(raw["version"]) is not int:
    return "version"
  for name in numbers:
    if not _is_int(raw[name], 1):
      return name
  if raw["masking"] not in ("static", "dynamic"):
    return "masking"
  t = raw["tokenizer"]
  wanted = {"kind", "file", "sha256", "vocab_size", "do_lower_case"}
  if not isinstance(t, dict) or set(t) - {"mask_id"} != wanted:
    return "tokenizer"
  if t["kind"] not in ("wordpiece", "sentencepiece"):
    return "tokenizer.kind"
  if not all(isinstance(t[n], str) for n in ("file", "sha256")):
    return "tokenizer's file"
  if not _is_int(t["vocab_size"], 1) or type(t["do_lower_case"]) is not bool:
    return "tokenizer's numbers"
  if t.get("mask_id") is not None and not _is_int(
    t["mask_id"], 0, t["vocab_size"]
  ):
    return "mask_id"
  settings = raw["settings"]
  if not isinstance(settings, dict) or not isinstance(raw["counts"], dict):
    return "settings, counts"
  probability = settings.get("masked_lm_prob", 0.1)
  if not _is_number(probability, 0, 1) or not 0 < probability < 1:
    return "masked_lm_prob"
  if type(settings.get("do_whole_word_mask", False)) is not bool:
    return "do_whole_word_mask"
  for value in raw["counts"].values():
    if not _is_number(value, 0, 1e18):
      return "counts"
  if raw["masking"] == "dynamic" and (
    "masked_lm_prob" not in settings or t.get("mask_id") is None
  ):
    return "masks cannot be drawn"
  if not isinstance(raw["files"], list) or not raw["files"]:
    return "files"
  for info in raw["files"]:
    if not isinstance(info, dict) or set(info) != {
      "name", "records", "bytes", "sha256",
    }:  # fmt: skip
      return "a file's keys"
    if not isinstance(info["name"], str) or not isinstance(info["sha256"], str):
      return "a file's name"
    if not all(_is_int(info[n], 1, 1 << 62) for n in ("records", "bytes")):
      return "a file's numbers"
  if raw["examples_per_record"] > 1:
    count = sum(info["records"] for info in raw["files"])
    examples = raw["counts"].get("examples", 0)
    if not count <= examples <= count * raw["examples_per_record"]:
      return "examples"
  return ""


_WORDS = ["the", "cat", "sat", "on", "mat", "##s", "##ing", "new", "中", "é"]


class Vocabulary(Reader):
  """Damaged vocab.txt files."""

  weight = 1.0

  def __init__(self, folder):
    super().__init__(folder)
    self.tokens = [*tokenization.SPECIAL_TOKENS, *_WORDS, *"abcdefghij."]
    self.whole = "".join(f"{t}\n" for t in self.tokens).encode()

  def damage(self, rng):
    kind = int(rng.integers(8))
    data = damaged(rng, self.whole)
    if kind == 0:
      encoding = choose(rng, ("utf-16", "utf-32", "utf-16-le", "utf-8-sig"))
      data = self.whole.decode().encode(encoding)
    elif kind == 1:
      tokens = list(self.tokens)
      tokens[int(rng.integers(len(tokens)))] = choose(
        rng, ("", "the", "[PAD]", "x" * 100_000, "a b", "\0", "##", "\u2028")
      )
      data = "\n".join(tokens).encode()
    elif kind == 2:
      data = choose(rng, (b"\n" * 100_000, b"\xff" * 999, self.whole * 2))
    elif kind == 3:
      data = self.whole.replace(b"\n", b"\r\n")
    self.data = data
    self.put(rng, "vocab.txt", data)

  def read(self):
    encoder = tokenization.load_tokenizer(self.file, True)
    encoder.encode_words(["the cat sat 中中 éé \0 x" + "y" * 300])
    encoder.info()
    return encoder

  def wrong(self, result):
    try:
      text = self.data.decode("utf-8")
    except UnicodeDecodeError:
      return "not UTF-8"
    lines = text.split("\n")
    if not lines[-1]:
      lines.pop()
    tokens = [line.strip() for line in lines]
    if any(tokens.count(t) != 1 for t in tokenization.SPECIAL_TOKENS):
      return "special tokens"
    filled = [t for t in tokens if t]
    if len(set(filled)) < len(filled):
      return "a token twice"
    # Of blank lines the last one keeps its place, others have none.
    ours = [t for t in result.tokens if t]
    return "" if ours == filled else "other tokens"


class SentencePiece(Reader):
  """Damaged SentencePiece models."""

  weight, cost = 1.0, 3

  def __init__(self, folder):
    super().__init__(folder)
    text = [
      "the cat sat on the mat and stole the egg of the cook",
      "Ein Mops kam in die Küche und stahl dem Koch ein Ei. 中文",
    ]
    self.models = []
    for i, lower in enumerate((True, False)):
      path = self.path(f"{i}.model")
      train_tokenizer.train_sentencepiece(text * 20, path, 60, lower)
      with open(path, "rb") as f:
        self.models.append(f.read())

  def damage(self, rng):
    from sentencepiece import sentencepiece_model_pb2

    data = damaged(rng, *self.models)
    if rng.random() < 0.5:  # a whole message of other values
      model = sentencepiece_model_pb2.ModelProto.FromString(self.models[0])
      for _ in range(int(rng.integers(1, 4))):
        self._change(rng, model)
      data = model.SerializePartialToString()
    self.data = data
    self.put(rng, "m.model", data)

  def _change(self, rng, model):
    piece = choose(rng, model.pieces) if model.pieces else model.pieces.add()
    kind = int(rng.integers(9))
    if kind == 0:
      piece.score = choose(rng, (math.nan, math.inf, -math.inf, 1e38, 0.0))
    elif kind == 1:
      piece.piece = choose(
        rng, ("", "\0", "the", "[PAD]", "x" * 10_000, "\u2581")
      )
    elif kind == 2:
      piece.type = int(rng.integers(1, 7))
    elif kind == 3:
      del model.pieces[int(rng.integers(len(model.pieces))) :]
    elif kind == 4:
      chars = model.normalizer_spec.precompiled_charsmap
      model.normalizer_spec.precompiled_charsmap = damaged(rng, chars)
    elif kind == 5:
      model.trainer_spec.model_type = int(rng.integers(1, 5))
    elif kind == 6:
      spec = model.trainer_spec
      name = choose(rng, ("unk_id", "pad_id", "bos_id", "eos_id"))
      setattr(spec, name, choose(rng, (-1, 0, 1, 5, 1 << 30, -(1 << 31))))
    elif kind == 7:
      model.normalizer_spec.name = choose(rng, ("", "nfkc", "x"))
    else:
      del model.pieces[:]

  def read(self):
    encoder = tokenization.load_tokenizer(None, True, self.file)
    lines = ["the cat sat 中中 éé \0 x" + "y" * 300, "", "\ud800", "Küche ﬁ ①"]
    words = encoder.encode_words(lines)
    encoder.info()
    return encoder, words

  def wrong(self, result):
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    encoder, words = result
    try:
      model = sentencepiece_model_pb2.ModelProto.FromString(self.data)
    except DecodeError:
      return "no model"
    pieces = [p.piece for p in model.pieces]
    if pieces != encoder.tokens or len(set(pieces)) < len(pieces):
      return "other pieces"
    if not all(math.isfinite(p.score) for p in model.pieces):
      return "a score that is no number"
    for token in tokenization.SPECIAL_TOKENS:
      other = token.lower().strip("[]").join("<>")
      if token not in pieces and other not in pieces:
        return "special pieces"
    for ids, _ in words:
      if len(ids) and not 0 <= ids.min() <= ids.max() < len(pieces):
        return "ids out of range"
    return ""


# -----------------------------------------------------------------------------
# Settings
# -----------------------------------------------------------------------------

_BERT = dict(
  vocab_size=100,
  hidden_size=32,
  num_hidden_layers=2,
  num_attention_heads=2,
  intermediate_size=64,
  hidden_act="gelu",
  hidden_dropout_prob=0.1,
  attention_probs_dropout_prob=0.1,
  max_position_embeddings=64,
  type_vocab_size=2,
  initializer_range=0.02,
  pre_layer_norm=False,
)


def bert_problem(raw) -> str:
  """What is wrong with a BERT config."""
  extra = (
    "directionality", "pooler_fc_size", "pooler_num_attention_heads",
    "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type",
  )  # fmt: skip
  if not isinstance(raw, dict) or set(raw) - set(_BERT) - set(extra):
    return "keys"
  if "vocab_size" not in raw:
    return "no vocab_size"
  made = {"hidden_size": 768, "num_attention_heads": 12, **raw}
  for name in (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "intermediate_size", "max_position_embeddings", "type_vocab_size",
  ):  # fmt: skip
    if not _is_int(made.get(name, 1), 1):
      return name
  if made.get("num_hidden_layers", 1) > 10_000:
    return "no such network can be built"
  if made["hidden_size"] % made["num_attention_heads"]:
    return "heads"
  for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
    value = made.get(name, 0.1)
    if not _is_number(value, 0, 1) or value == 1:
      return name
  if not _is_number(made.get("initializer_range", 0.02), 1e-300, 1e9):
    return "initializer_range"
  if type(made.get("pre_layer_norm", False)) is not bool:
    return "pre_layer_norm"
  act = made.get("hidden_act", "gelu")
  if act is not None and (
    not isinstance(act, str)
    or act.lower() not in ("", "linear", "relu", "gelu", "gelu_erf", "tanh")
  ):
    return "hidden_act"
  return ""


class RunFlags(Reader):
  """Flags of run_pretraining.py, of all values and combinations."""

  weight, cost = 1.5, 3

  def __init__(self, folder):
    super().__init__(folder)
    import run_pretraining

    run_pretraining.define_flags()
    self.bert = self.write("bert.json", json.dumps(_BERT).encode())
    self.extra = ()

  values = (
    "-1", "0", "1", "2", "8", "-0.5", "0.5", "nan", "inf", "-inf", "1e400",
    "1e39", "-1e39", "1e30", str(10**30), str(2**31), str(2**63), "", "x",
    "0x10", "1_000", "ten", "True", " 5", "1e3", "9" * 400, "9" * 5000, "½",
    "٣", "-",
    "fp16", "bf16", "lamb", "cosine", "layer", "attention=fp16", "a=b", "../x",
  )  # fmt: skip

  def names(self):
    own = ("bert_config_file",)
    return [
      name
      for module, found in flags.FLAGS.flags_by_module_dict().items()
      for name in (f.name for f in found)
      if name not in own and not module.startswith("absl")
    ]

  def damage(self, rng):
    self.given = {
      "bert_config_file": self.bert,
      "do_train": "true",
      "input_file": self.path("x.tfrecord"),
      "output_dir": self.path("out"),
      "global_batch_size": "64",
    }
    for _ in range(int(rng.integers(1, 5))):
      self.given[choose(rng, sorted(set(self.names())))] = choose(
        rng, self.values
      )

  def argv(self):
    return ["command", *(f"--{n}={v}" for n, v in self.given.items())]

  def parsed(self):
    flags.FLAGS.unparse_flags()
    flags.FLAGS(self.argv())
    return flags.FLAGS

  def read(self):
    from gradients.lr_schedule import scale_peak
    from training import training_plan
    from training.config import PretrainingConfig

    config = PretrainingConfig.from_flags(self.parsed())
    plan = training_plan.resolve(
      ranks=config.dry_run_ranks if config.dry_run else 1,
      records=None if config.dry_run else 1 << 40,
      train_batch_size=config.train_batch_size,
      num_train_steps=config.num_train_steps,
      num_warmup_steps=config.num_warmup_steps,
      num_accumulation_steps=config.num_accumulation_steps,
      global_batch_size=config.global_batch_size,
    )
    shape = config.record_shape("")
    config.policy.describe()
    config.loss_scale.check(config.uses_fp16)
    rate = config.schedule(
      scale_peak(config.learning_rate, config.lr_scaling, plan.ranks),
      plan.updates,
      plan.warmup_updates,
      plan.divisor,
    )
    places = np.unique(np.linspace(0, plan.updates - 1, 5).astype(np.int64))
    return config, plan, shape, np.float32(rate(places))

  def wrong(self, result):
    config, plan, shape, rates = result
    return run_problem(config, plan, shape, rates)

  def mentions(self):
    return ("--", "lag")

  def describe(self):
    return " ".join(self.argv())


def run_problem(config, plan, shape, rates) -> str:
  """What is wrong with a run's settings that were accepted."""
  least = dict(
    train_batch_size=1, eval_batch_size=1, num_accumulation_steps=1,
    global_batch_size=1, log_every_steps=1, keep_checkpoints=1, seed=0,
    num_train_steps=1, num_warmup_steps=0, save_checkpoints_steps=0,
    eval_every_steps=0, max_eval_steps=0, num_threads=0, lr_decay_steps=1,
    shuffle_block_records=0, dry_run_ranks=1, max_seq_length=1,
    max_predictions_per_seq=1,
  )  # fmt: skip
  for name, low in least.items():
    value = getattr(config, name)
    if value is not None and not _is_int(value, low, 1 << 63):
      return f"{name}={value}"
    if name != "seed" and value is not None and value >= 1 << 31:
      return f"{name}={value}"
  if config.num_threads > 1 << 16:
    return "so many threads"
  floats = (
    (config, "learning_rate"), (config, "lr_offset"), (config, "lr_power"),
    (config, "lr_decay_rate"), (config.optimizer, "weight_decay_rate"),
    (config.optimizer, "beta_1"), (config.optimizer, "beta_2"),
    (config.optimizer, "epsilon"), (config.optimizer, "min_trust_ratio"),
    (config.optimizer, "max_trust_ratio"), (config.optimizer, "clip_norm"),
    (config.loss_scale, "loss_scale"), (config.loss_scale, "min_loss_scale"),
    (config.loss_scale, "initial_loss_scale"),
  )  # fmt: skip
  for part, name in floats:
    value = getattr(part, name)
    if value is not None and not _is_number(value, 0, 3.4e38):
      return f"{name}={value}"
  if not np.all(np.isfinite(rates)) or np.any(rates < 0):
    return f"learning rates {rates}"
  if plan.updates < 1 or not 0 <= plan.warmup_updates <= plan.updates:
    return "updates"
  for name in ("input_file", "output_dir"):
    if not config.dry_run and not getattr(config, name):
      return name
  for name in ("init_checkpoint", "eval_input_file"):
    if getattr(config, name) == "":
      return f"an empty {name}"
  if shape.max_predictions_per_seq > shape.max_seq_length:
    return "more to predict than there is"
  return ""


class BertConfigFile(RunFlags):
  """Damaged BERT configs."""

  weight, cost = 1.0, 3

  def damage(self, rng):
    raw = dict(_BERT)
    self.data = damaged_json(rng, raw)
    self.put(rng, "damaged.json", self.data)
    self.given = {
      "bert_config_file": self.file,
      "do_train": "true",
      "input_file": "x",
      "output_dir": "x",
    }

  def read(self):
    from training.config import PretrainingConfig

    return PretrainingConfig.from_flags(self.parsed()).bert

  def wrong(self, result):
    try:
      return bert_problem(strict_json(self.data))
    except ValueError as e:
      return f"no JSON: {e}"

  def mentions(self):
    return (self.file,)

  def describe(self):
    return Reader.describe(self)


_RECIPE = {
  "train_batch_size": 4096,
  "train_micro_batch_size_per_gpu": 64,
  "steps_per_print": 10,
  "gradient_clipping": 1.0,
  "optimizer": {
    "type": "Lamb",
    "params": {
      "lr": 11e-3,
      "weight_decay": 0.01,
      "bias_correction": False,
      "max_coeff": 0.3,
      "min_coeff": 0.01,
      "betas": [0.9, 0.999],
      "eps": 1e-6,
    },
  },
  "scheduler": {
    "type": "warmup_exp_decay_exp",
    "params": {
      "total_num_steps": 7500,
      "warmup_proportion": 0.02,
      "decay_rate": 0.9,
      "decay_step": 250,
      "lr_offset": 0.001,
      "rewarmup": True,
    },
  },
  "fp16": {
    "enabled": True,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
  },
}


class DeepSpeedFile(RunFlags):
  """Damaged DeepSpeed-style JSON."""

  weight, cost = 1.5, 3

  def damage(self, rng):
    self.data = damaged_json(rng, _RECIPE)
    self.put(rng, "ds.json", self.data)
    self.given = {
      "bert_config_file": self.bert,
      "config_json": self.file,
      "do_train": "true",
      "input_file": "x",
      "output_dir": "x",
    }

  def wrong(self, result):
    try:
      raw = strict_json(self.data)
    except ValueError as e:
      return f"no JSON: {e}"
    if problem := super().wrong(result):
      return problem
    return _lost(raw, result[0])

  def mentions(self):
    # What a field's flag may not be is said of the flag.
    return (self.file, "--")

  def describe(self):
    return Reader.describe(self)


def _lost(raw, config) -> str:
  """A field of a recipe that the run does not have; "" if there is none."""
  if not isinstance(raw, dict):
    return "no object"
  params = raw.get("optimizer", {}).get("params", {})
  schedule = raw.get("scheduler", {}).get("params", {})
  pairs = (
    (raw, "train_batch_size", config.global_batch_size),
    (raw, "train_micro_batch_size_per_gpu", config.train_batch_size),
    (raw, "steps_per_print", config.log_every_steps),
    (raw, "gradient_clipping", config.optimizer.clip_norm),
    (params, "lr", config.learning_rate),
    (params, "weight_decay", config.optimizer.weight_decay_rate),
    (params, "bias_correction", config.optimizer.bias_correction),
    (params, "eps", config.optimizer.epsilon),
    (schedule, "total_num_steps", config.num_train_steps),
    (schedule, "decay_step", config.lr_decay_steps),
    (schedule, "lr_offset", config.lr_offset),
    (schedule, "rewarmup", config.rewarmup),
  )
  for section, name, here in pairs:
    if name in section and section[name] != here:
      return f"{name} is {here} in the run"
  return ""


class DataFlags(RunFlags):
  """Flags of create_pretraining_data.py."""

  weight, cost = 1.5, 1

  def __init__(self, folder):
    Reader.__init__(self, folder)
    settings.define_flags(creation.Settings)

  def damage(self, rng):
    self.given = {
      "input_file": "x",
      "output_file": "out/y",
      "vocab_file": "vocab.txt",
    }
    for _ in range(int(rng.integers(1, 4))):
      name = choose(rng, sorted(set(self.names())))
      self.given[name] = choose(
        rng, (*self.values, "out/", "a,a", "a,b/c", ",")
      )

  def read(self):
    return settings.from_flags(creation.Settings, self.parsed())

  def wrong(self, result):
    s = result
    for name, low, high in (
      ("max_seq_length", 8, 1 << 20), ("max_predictions_per_seq", 1, 1 << 20),
      ("dupe_factor", 1, 1 << 20), ("random_seed", 0, 1 << 63),
      ("examples_per_record", 1, 1 << 20), ("num_shards", 1, 1 << 20),
      ("num_workers", 1, 1 << 16),
    ):  # fmt: skip
      value = getattr(s, name)
      if value is not None and not _is_int(value, low, high):
        return f"{name}={value}"
    if s.max_predictions_per_seq > s.max_seq_length:
      return "max_predictions_per_seq"
    if s.examples_per_record > s.max_seq_length:
      return "examples_per_record"
    if not 0 < s.masked_lm_prob < 1 or not 0 <= s.short_seq_prob <= 1:
      return "probabilities"
    if any(not os.path.basename(p) for p in s.output_file.split(",") if p):
      return "output_file"
    if s.prose and not (s.prose.isascii() and s.prose.isalpha()):
      return f"prose={s.prose}"
    return ""


# -----------------------------------------------------------------------------
# Text
# -----------------------------------------------------------------------------

_TEXT = (
  "The cat sat on the mat. It was new.\nEin Mops, éé!\n\n"
  "今天天气好。我去北京。\n"
  "a b c\n\nthe cats\nsat sitting on mats\n\n\nthe end, of\nthis document\n"
) * 3
_ODD = (
  b"\0", b"\0" * 100, b"\xff", b"\xed\xa0\x80", b"\xf4\x90\x80\x80",
  b"\xc0\x80",
  "\u2028".encode(), "\x85".encode(), "\ufeff".encode(), b"\r", b"\x1c",
  b"\x0b",
  "\u0301".encode() * 500, "\u0301\u0316".encode() * 300, "ﷺ".encode(),
  "\u202e".encode(), "Σ".encode(), "İ".encode(), "\U000e0001".encode(),
  b"a" * 3000, b"[MASK]", b"\n" * 300, b'"', "가".encode() * 50, "ẞ".encode(),
)  # fmt: skip


def is_utf8(data: bytes) -> bool:
  """Whether it is text in UTF-8."""
  try:
    return "\0" not in data.decode()
  except UnicodeDecodeError:
    return False


def odd_text(rng) -> bytes:
  """Text with odd characters, in odd encodings, damaged."""
  data = _TEXT.encode()
  for _ in range(int(rng.integers(0, 5))):
    place = int(rng.integers(len(data)))
    data = data[:place] + choose(rng, _ODD) + data[place:]
  kind = int(rng.integers(8))
  if kind == 0:
    encoding = choose(
      rng, ("utf-16", "utf-32", "utf-16-be", "latin-1", "gb18030", "utf-8-sig")
    )
    data = data.decode("utf-8", "ignore").encode(encoding, "replace")
  elif kind < 4:
    data = damaged(rng, data)
  elif kind == 4:
    data = choose(
      rng, (rng.bytes(2000), b"\n" * 5000, b"\0" * 5000, b" " * 999)
    )
  return data


def json_lines(rng, data: bytes) -> bytes:
  """Text as JSON Lines, some damaged."""
  text = data.decode("utf-8", "ignore")
  lines = [
    json.dumps({"id": i, "text": part})
    for i, part in enumerate(text.split("\n\n"))
  ]
  if rng.random() < 0.7:
    lines[int(rng.integers(len(lines)))] = choose(
      rng, ("", " ", "{", "[1]", "null", '{"text": 1}', '{"\\ud800": 1}', "x",
            '{"text": "\\ud800 x"}', "[" * 100_000, "9" * 5000, "\ufeff{}",
            '{"text": "a", "text": 2}', '{"text": "x"}'),
    )  # fmt: skip
  joined = "\n".join(lines).encode()
  if rng.random() < 0.1:
    joined = b"\n" * 10_000 + choose(rng, (b"", joined))
  return joined if rng.random() < 0.7 else damaged(rng, joined)


class Text(Reader):
  """Text of all encodings, plain, compressed and as JSON Lines."""

  weight, cost = 2.5, 6
  kinds = ("t.txt", "t.txt", "t.jsonl", "t.txt.gz", "t.jsonl.zst")

  def __init__(self, folder):
    super().__init__(folder)
    vocab = [*tokenization.SPECIAL_TOKENS, *_WORDS, *"abcdefghij."]
    self.vocab = self.write(
      "vocab.txt", "".join(f"{t}\n" for t in vocab).encode()
    )
    self.encoder = tokenization.load_tokenizer(self.vocab, True)
    self.reference = tokenization.FullTokenizer(self.vocab)

  def damage(self, rng):
    self.name = choose(rng, self.kinds)
    data = odd_text(rng)
    if ".jsonl" in self.name:
      data = json_lines(rng, data)
    self.content = data
    if self.name.endswith((".gz", ".zst")):
      compress = gzip.compress if self.name.endswith("gz") else zstd.compress
      data = compress(data)
      if rng.random() < 0.5:
        data = damaged(rng, data)
        self.content = self._decompressed(data)
    if os.path.isdir(self.path(self.name)):
      os.rmdir(self.path(self.name))
    self.file = self.write(self.name, data)
    self.prose = choose(rng, ("", "", "en", "zh"))

  def _decompressed(self, data) -> bytes | None:
    """None if it is not whole."""
    try:
      if self.name.endswith("gz"):
        return gzip.decompress(data)
      return zstd.decompress(data)
    except (OSError, EOFError, ValueError, zstd.ZstdError):
      return None
    except Exception as e:  # zlib's own
      if type(e).__name__ == "error":
        return None
      raise

  def read(self):
    text = text_files.TextFormat(prose=self.prose)
    lines = list(text_files.read_lines([self.file], text))
    self.encoder.encode_batch(lines)
    words = self.encoder.encode_words(lines)
    return lines, [w.ids for w in words]

  def wrong(self, result):
    lines, ids = result
    if self.content is None:
      return "not whole"
    if not is_utf8(self.content):
      return "not UTF-8"
    if ".jsonl" in self.name:
      want = self._documents()
      if want is None:
        return "no JSON"
    else:
      text = self.content.split(b"\n")
      if not text[-1]:
        text.pop()
      want = [line.decode().strip() for line in text]
      if want:
        want[0] = want[0].removeprefix("\ufeff").strip()
    if not self.prose and lines != want:
      return "other lines"
    letters = lambda some: sorted("".join("".join(some).split()))
    if self.prose and letters(lines) != letters(want):
      return "other letters"
    for line, got in zip(lines, ids, strict=True):
      tokens = self.reference.tokenize(line)
      if self.reference.convert_tokens_to_ids(tokens) != got.tolist():
        return f"other tokens of {line[:100]!r}"
    return ""

  def _documents(self):
    want = []
    for line in self.content.split(b"\n"):
      if not line.strip():
        continue
      try:
        text = line.decode().strip().removeprefix("\ufeff")
        value = json.loads(text)["text"].replace("\0", "")
        value = value.encode("utf-8", "ignore").decode()
      except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
      parts = [part.strip() for part in value.split("\n")]
      want += ["", *filter(None, parts), ""]
    return want


class Create(Text):
  """The same, made into records."""

  weight, cost = 0.3, 250

  def read(self):
    out = self.path("out")
    shutil.rmtree(out, ignore_errors=True)
    settings = creation.Settings(
      input_file=self.file,
      output_file=os.path.join(out, "x.tfrecord"),
      vocab_file=self.vocab,
      max_seq_length=32,
      max_predictions_per_seq=5,
      dupe_factor=2,
      num_workers=1,
      prose=self.prose,
    )
    with contextlib.redirect_stderr(io.StringIO()):
      summary = creation.create(settings)
    return summary, out

  def mentions(self):
    return (self.file, "the input", "--num_shards")

  def wrong(self, result):
    summary, out = result
    if self.content is None:
      return "not whole"
    if not is_utf8(self.content):
      return "not UTF-8"
    vocab_size = self.encoder.vocab_size
    count = 0
    for name in os.listdir(out):
      if not name.endswith(".tfrecord"):
        continue
      with open(os.path.join(out, name), "rb") as f:
        made = unframed(f.read())
      for record in made:
        count += 1
        values = {
          n: a.tolist() for n, a in tf_example.decode_example(record).items()
        }
        if problem := example_problem(
          values, 32, 5, 1, vocab_size, False, False
        ):
          return problem
    return "" if count and count == summary["examples"] else "other examples"


class TrainTokenizer(Text):
  """Vocabularies of odd text, and corpora prepared from it."""

  weight, cost = 0.3, 60

  def damage(self, rng):
    super().damage(rng)
    self.what = choose(
      rng, ("wordpiece", "wordpiece", "sentencepiece", "corpus")
    )
    self.size = choose(rng, (-1, 0, 5, 6, 30, 60, 60, 60, 300, 1 << 33, 10**30))
    self.lower = rng.random() < 0.5

  def read(self):
    if self.what == "corpus":
      shutil.rmtree(self.path("corpus"), ignore_errors=True)
      return prepare_corpus.prepare(
        prepare_corpus.CorpusSettings(self.path("corpus"), self.file)
      )
    train = {
      "wordpiece": train_tokenizer.train_wordpiece,
      "sentencepiece": train_tokenizer.train_sentencepiece,
    }[self.what]
    lines = text_files.read_lines([self.file])
    return train(lines, self.path("made"), self.size, self.lower)

  def mentions(self):
    return (self.file, "--vocab_size", "no words", "documents", "SentencePiece")

  def wrong(self, result):
    if self.content is None:
      return "not whole"
    if not is_utf8(self.content):
      return "not UTF-8"
    if self.what == "corpus":
      return "" if min(result.documents) >= 2 else "too few documents"
    made = self.path("made")
    files = (made, None) if self.what == "wordpiece" else (None, made)
    encoder = tokenization.load_tokenizer(files[0], self.lower, files[1])
    if encoder.vocab_size != result or result > max(self.size, 5):
      return f"{result} tokens"
    encoder.encode_words(["the cat sat"])
    return ""


# -----------------------------------------------------------------------------
# Checkpoints
# -----------------------------------------------------------------------------

_DATA, _INDEX = ".data-00000-of-00001", ".index"


def _varint(data, at):
  value = shift = 0
  while True:
    byte = data[at]
    value |= (byte & 0x7F) << shift
    at, shift = at + 1, shift + 7
    if byte < 0x80:
      return value, at


def table_blocks(data: bytes) -> list[tuple[int, int]]:
  """(place, size) of the blocks of a LevelDB-style table, its index last."""
  at, handles = len(data) - 48, []
  for _ in range(2):
    place, at = _varint(data, at)
    size, at = _varint(data, at)
    handles.append((place, size))
  place, size = handles[1]
  restarts = struct.unpack_from("<I", data, place + size - 4)[0]
  at, end, blocks = place, place + size - 4 * (restarts + 1), []
  while at < end:
    _, at = _varint(data, at)
    unshared, at = _varint(data, at)
    length, at = _varint(data, at)
    where, after = _varint(data, at + unshared)
    blocks.append((where, _varint(data, after)[0]))
    at += unshared + length
  return [*blocks, (place, size)]


def resealed(rng, data: bytes) -> bytes:
  """A table one of whose blocks is changed under a checksum of its own."""
  place, size = choose(rng, table_blocks(data))
  block = bytearray(data[place : place + size])
  for _ in range(int(rng.integers(1, 4))):
    kind, at = int(rng.integers(4)), int(rng.integers(size))
    if kind == 0:
      block[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
      block[at] = int(rng.integers(256))
    elif kind == 2:
      block[at : at + 8] = choose(rng, _HUGE)[: size - at]
    else:
      block[at : at + 4] = b"\xff\xff\xff\x7f"[: size - at]
  sealed = bytes(block[:size]) + data[place + size : place + size + 1]
  sealed += struct.pack("<I", masked_crc(sealed))
  return data[:place] + sealed + data[place + size + 5 :]


class Resume(Reader):
  """Folders of two checkpoints, damaged."""

  weight, cost = 0.7, 40
  markers = True

  def __init__(self, folder):
    super().__init__(folder)
    from common.tensorflow_v1 import tf
    from data import record_order
    from gradients import distributed
    from training import checkpointing

    self.tf, self.run = tf, self.path("run")
    self.kept = self.path("kept")
    self.graph = tf.Graph()
    with self.graph.as_default():
      tf.train.get_or_create_global_step()
      for name, shape in (("bert/a/kernel", [8, 16]), ("bert/a/bias", [16])):
        tf.get_variable(name, shape)
      checkpointing.TrainingState(record_order.Order(100, 5))
      self.checkpointer = checkpointing.Checkpointer(
        self.run, distributed.Comm(), keep=3
      )
      self.variables = {v.op.name: v for v in tf.global_variables()}
      self.session = tf.Session(
        config=tf.ConfigProto(
          intra_op_parallelism_threads=1, inter_op_parallelism_threads=1
        )
      )
      self.session.run(tf.global_variables_initializer())
      self.made = {}
      os.makedirs(self.run)
      for step in (5, 9):
        self.variables["global_step"].load(step, self.session)
        self.made[step] = self.session.run(self.variables)
        self.checkpointer.save(self.session, step)
        self.checkpointer.finish()
    if not self.markers:
      for step in (5, 9):
        os.unlink(f"{self.run}/model.ckpt-{step}.json")
    os.rename(self.run, self.kept)

  def damage(self, rng):
    shutil.rmtree(self.run, ignore_errors=True)
    shutil.copytree(self.kept, self.run)
    self.told, changed = [], set()
    for _ in range(int(rng.integers(1, 3))):
      names = sorted(os.listdir(self.run))
      if not names:
        break
      name = choose(rng, names)
      path = os.path.join(self.run, name)
      if os.path.isdir(path) or name in changed:
        continue
      with open(path, "rb") as f:
        data = f.read()
      kind = rng.random()
      self.told.append(f"{name} {kind:.2f}")
      if kind < 0.1:
        os.unlink(path)
        continue
      if kind < 0.13:
        os.unlink(path)
        os.mkdir(path)
        continue
      if name.endswith(".json"):
        new = damaged_json(rng, json.loads(data))
      elif name.endswith(_INDEX) and rng.random() < 0.7:
        new = resealed(rng, data)
      elif name == "checkpoint" and rng.random() < 0.5:
        new = choose(
          rng, (b"", b'model_checkpoint_path: "x"', b"\xff\xfe", b"model: 1",
                b'model_checkpoint_path: "model.ckpt-9"\n' * 2, b"\0" * 50,
                b'model_checkpoint_path: "' + b"x" * 5000 + b'"'),
        )  # fmt: skip
      else:
        other = b""
        if "-9" in name:
          with open(
            os.path.join(self.kept, name.replace("-9", "-5")), "rb"
          ) as f:
            other = f.read()
        new = damaged(rng, data, other)
      changed.add(name)
      with open(path, "wb") as f:
        f.write(new)
    self.file = self.run

  def read(self):
    with self.graph.as_default(), contextlib.redirect_stderr(io.StringIO()):
      if not self.checkpointer.restore.has_checkpoint():
        return None, None
      path = self.checkpointer.restore.resume(self.session)
      return path, self.session.run(self.variables)

  def wrong(self, result):
    path, values = result
    if path is None:
      # Without these it looks like a first save that was cut short.
      left = os.listdir(self.run)
      if any(name.endswith((".json", "checkpoint")) for name in left):
        return "a new run beside a checkpoint"
      return ""
    for step, made in self.made.items():
      if all(np.array_equal(made[n], v) for n, v in values.items()):
        if path.endswith(f"-{step}"):
          return ""
    return "other values"

  def describe(self):
    return f"{', '.join(self.told)} in {os.listdir(self.run)}"


class ResumeForeign(Resume):
  """The same without markers, as TensorFlow wrote them."""

  weight = 0.5
  markers = False


class InitCheckpoint(Resume):
  """Checkpoints of others as --init_checkpoint."""

  weight = 0.7
  markers = False

  def damage(self, rng):
    super().damage(rng)
    self.prefix = os.path.join(
      self.run,
      choose(
        rng, ["model.ckpt-9"] * 12
        + ["model.ckpt-9.index", "nowhere", "", "model.ckpt-*", "x y"],
      ),
    )  # fmt: skip
    self.schedule = rng.random() < 0.5

  def read(self):
    start = self.variables["training_state/schedule_start"]
    with self.graph.as_default(), contextlib.redirect_stderr(io.StringIO()):
      report = self.checkpointer.restore.initialise(
        self.session, self.prefix, start if self.schedule else None
      )
      return report, self.session.run(self.variables)

  def wrong(self, result):
    report, values = result
    if not report.loaded:
      return "nothing loaded"
    steps = (5, 9) if self.prefix == os.path.join(self.run, "") else (9,)
    for step in steps:
      made = self.made[step]
      if all(np.array_equal(values[n], made[n]) for n in report.loaded):
        start = values["training_state/schedule_start"]
        return "" if not self.schedule or start == step else "other schedule"
    return "other values"


READERS = {
  "framing": Framing,
  "index": Index,
  "record": Content,
  "pipeline": Pipeline,
  "manifest": Manifest,
  "vocab": Vocabulary,
  "sentencepiece": SentencePiece,
  "bert_config": BertConfigFile,
  "config_json": DeepSpeedFile,
  "run_flags": RunFlags,
  "data_flags": DataFlags,
  "text": Text,
  "create": Create,
  "tokenizer": TrainTokenizer,
  "resume": Resume,
  "resume_foreign": ResumeForeign,
  "init_checkpoint": InitCheckpoint,
}
