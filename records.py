"""The one record schema: encode, write, index, describe and read TFRecords.

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

A record file `X` has its record index beside it in `X.index` (a NumPy .npy
array, int64 [records + 1], of the byte offsets at which records start, the
file's size last). The files of one data set are described by one
`NAME.manifest.json` in their folder. Files without either (google/bert's,
NVIDIA's) are indexed by a scan of their framing and carry no description.

TFRecord framing: uint64 length, masked CRC-32C of it, data, masked CRC-32C of
the data (https://www.tensorflow.org/tutorials/load_data/tfrecord).
This module does not need TensorFlow, so that data workers start fast.
"""

import dataclasses
import functools
import glob
import hashlib
import json
import mmap
import os
import struct
import weakref
from collections.abc import Iterator, Mapping, Sequence

import google_crc32c
import numpy as np

from errors import UserError

_HEADER = struct.Struct("<QI")  # length, masked CRC of the length
_FOOTER = struct.Struct("<I")  # masked CRC of the data
_FRAME_BYTES = _HEADER.size + _FOOTER.size

# Linux reads no more ahead for one call than a device's read-ahead, of which
# this is the default.
_ADVICE_BYTES = 128 << 10

MANIFEST_VERSION = 1
MANIFEST_SUFFIX = ".manifest.json"
INDEX_SUFFIX = ".index"


class DataError(UserError):
  """Input that cannot be used; the message names the file and what to do."""


# -----------------------------------------------------------------------------
# tf.train.Example
# -----------------------------------------------------------------------------


def _varint_rows(values: np.ndarray) -> list[bytes]:
  """Protocol buffer varints of non-negative integers [B, n], row by row."""
  rows, n = values.shape
  top = int(values.max()) if values.size else 0
  if values.size and int(values.min()) < 0:
    raise ValueError(f"negative value {values.min()} in a record's feature")
  if top < 0x80:
    flat = values.astype(np.uint8).tobytes()
    return [flat[i * n : (i + 1) * n] for i in range(rows)]
  width = (top.bit_length() + 6) // 7
  shifts = np.arange(width, dtype=np.uint64) * np.uint64(7)
  rest = values.astype(np.uint64)[:, :, None] >> shifts  # [B, n, width]
  groups = (rest & np.uint64(0x7F)).astype(np.uint8)
  used = rest > 0
  groups[:, :, :-1] |= used[:, :, 1:] * np.uint8(0x80)  # more groups follow
  used[:, :, 0] = True
  ends = np.cumsum(used.sum((1, 2))).tolist()
  flat = groups[used].tobytes()
  return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _field_head(number: int, length: int) -> bytes:
  """What precedes the payload of a length-delimited protocol buffer field."""
  head = [number << 3 | 2]
  while length > 0x7F:
    head.append(length & 0x7F | 0x80)
    length >>= 7
  head.append(length)
  return bytes(head)


@functools.lru_cache(maxsize=4096)
def _entry_head(name: str, list_field: int, length: int) -> bytes:
  """What precedes a feature's packed values in `tf.train.Features`.

  The nesting is Features.feature (a map entry of key and Feature), then
  Feature.float_list (field 2) or int64_list (3), then the list's `value`.
  """
  head = _field_head(1, length)
  for number in (list_field, 2):
    head = _field_head(number, len(head) + length) + head
  head = _field_head(1, len(name.encode())) + name.encode() + head
  return _field_head(1, len(head) + length) + head


def encode_examples(features: Mapping[str, np.ndarray]) -> list[bytes]:
  """Serializes the rows of 2-D arrays, each as a `tf.train.Example`.

  Args:
    features: name -> array [B, n] with the same B; integers become an
      int64_list, floats a float_list (float32).

  Returns:
    B times the bytes that `tf.train.Example.SerializeToString` gives for the
    same features in the same order (protocol buffers do not fix an order;
    readers must not care).

  Raises:
    ValueError: an integer is negative, an array is not 2-D, or B differs.
  """
  columns = []
  for name, values in features.items():
    values = np.asarray(values)
    if values.ndim != 2:
      raise ValueError(f"feature {name} has shape {values.shape}, want [B, n]")
    if np.issubdtype(values.dtype, np.floating):
      list_field = 2
      payloads = [row.tobytes() for row in values.astype("<f4")]
    else:
      list_field, payloads = 3, _varint_rows(values)
    columns.append(
      [_entry_head(name, list_field, len(p)) + p for p in payloads]
    )
  examples = map(b"".join, zip(*columns, strict=True))
  return [_field_head(1, len(e)) + e for e in examples]


def encode_example(features: Mapping[str, np.ndarray]) -> bytes:
  """Serializes 1-D arrays as one `tf.train.Example`; see `encode_examples`.

  Args:
    features: name -> array [n].

  Raises:
    ValueError: an integer is negative or an array is not 1-D.
  """
  rows = {}
  for name, values in features.items():
    values = np.asarray(values)
    if values.ndim != 1:
      raise ValueError(f"feature {name} has shape {values.shape}, want [n]")
    rows[name] = values[None]
  return encode_examples(rows)[0]


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
# Writing
# -----------------------------------------------------------------------------


def _masked_crc(data: bytes) -> int:
  crc = google_crc32c.value(data)
  return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@dataclasses.dataclass(frozen=True)
class ShardInfo:
  """One record file as the manifest lists it."""

  name: str  # file name without folder
  records: int
  bytes: int
  sha256: str


class ShardWriter:
  """Writes a record file and its index; neither exists until both are whole.

  Use as a context manager; `info` is set when the block ends without an error.
  """

  def __init__(self, path: str):
    self.path = path
    self.info: ShardInfo | None = None

  def __enter__(self) -> "ShardWriter":
    self._file = open(self.path + ".tmp", "wb", buffering=1 << 20)  # noqa: SIM115
    self._sha256 = hashlib.sha256()
    self._offsets = [0]
    return self

  def write(self, record: bytes) -> None:
    """Appends one serialized record."""
    length = struct.pack("<Q", len(record))
    frame = b"".join(
      (
        length,
        _FOOTER.pack(_masked_crc(length)),
        record,
        _FOOTER.pack(_masked_crc(record)),
      )
    )
    self._file.write(frame)
    self._sha256.update(frame)
    self._offsets.append(self._offsets[-1] + len(frame))

  def __exit__(self, error_type, error, traceback) -> None:
    self._file.close()
    if error_type is not None:
      os.unlink(self.path + ".tmp")
      return
    with open(self.path + INDEX_SUFFIX + ".tmp", "wb") as f:
      np.save(f, np.array(self._offsets, np.int64), allow_pickle=False)
    os.replace(self.path + INDEX_SUFFIX + ".tmp", self.path + INDEX_SUFFIX)
    os.replace(self.path + ".tmp", self.path)
    self.info = ShardInfo(
      name=os.path.basename(self.path),
      records=len(self._offsets) - 1,
      bytes=self._offsets[-1],
      sha256=self._sha256.hexdigest(),
    )


# -----------------------------------------------------------------------------
# The manifest
# -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TokenizerInfo:
  """What the tokens mean: which vocabulary made the records."""

  kind: str  # "wordpiece" or "sentencepiece"
  file: str  # file name without folder, for people
  sha256: str  # of the vocabulary or model file
  vocab_size: int
  do_lower_case: bool
  mask_id: int | None = None  # of [MASK]; needed for dynamic masks


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
  tokenizer: TokenizerInfo
  settings: dict
  counts: dict
  files: tuple[ShardInfo, ...]
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
      raw["tokenizer"] = TokenizerInfo(**raw["tokenizer"])
      raw["files"] = tuple(ShardInfo(**f) for f in raw["files"])
      return cls(**raw)
    except (TypeError, KeyError, AttributeError) as e:
      raise DataError(f"{path}: not a manifest of this project: {e}") from e


def file_sha256(path: str) -> str:
  """The SHA-256 of a file's bytes, in hex."""
  with open(path, "rb") as f:
    return hashlib.file_digest(f, "sha256").hexdigest()


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


# -----------------------------------------------------------------------------
# Reading
# -----------------------------------------------------------------------------


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
      if not p.endswith((INDEX_SUFFIX, ".json", ".tmp")) and os.path.isfile(p)
    ]
    if not found:
      raise DataError(f"{pattern}: no such file (from {patterns!r})")
    paths.extend(found)
  if not paths:
    raise DataError(f"no input files in {patterns!r}")
  return sorted(set(paths))


def scan_offsets(path: str, data: mmap.mmap) -> np.ndarray:
  """Record offsets from the framing alone, for files without an index.

  Returns:
    int64 [records + 1]; the last is the file's size.

  Raises:
    DataError: the framing is damaged, with the record's number.
  """
  offsets = [0]
  position, end = 0, len(data)
  while position < end:
    number = len(offsets) - 1
    if position + _HEADER.size > end:
      raise DataError(
        f"{path}: record {number} at byte {position} is cut off in its header: "
        f"the file ends at byte {end}. Copy or make the file again."
      )
    length, crc = _HEADER.unpack_from(data, position)
    if crc != _masked_crc(data[position : position + 8]):
      raise DataError(
        f"{path}: record {number} at byte {position} has a damaged length "
        "(checksum mismatch), or this is not a TFRecord file (compressed "
        "files are not read). Copy or make the file again."
      )
    position += length + _FRAME_BYTES
    if position > end:
      raise DataError(
        f"{path}: record {number} is cut off: it should end at byte {position} "
        f"but the file ends at byte {end}. Copy or make the file again."
      )
    offsets.append(position)
  return np.array(offsets, np.int64)


class _RecordFile:
  """One open record file with its offsets."""

  def __init__(self, path: str):
    self.path = path
    try:
      size = os.path.getsize(path)
      if size == 0:
        raise DataError(f"{path}: the file is empty")
      self._fd = os.open(path, os.O_RDONLY)
    except OSError as e:
      raise DataError(f"{path}: {e.strerror}") from e
    weakref.finalize(self, os.close, self._fd)
    index = path + INDEX_SUFFIX
    if os.path.exists(index):
      offsets = self._load_index(index, size)
    else:
      with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as data:
        offsets = scan_offsets(path, data)
    # Gives Python's own integers, in a fraction of an array's time.
    self.offsets = memoryview(np.asarray(offsets))

  def _load_index(self, index: str, size: int) -> np.ndarray:
    try:
      offsets = np.load(index, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as e:
      raise DataError(
        f"{index}: not a record index ({e}). Delete it: the file is then "
        "indexed by a scan."
      ) from e
    if (
      offsets.ndim != 1
      or offsets.dtype != np.int64
      or len(offsets) < 2
      or offsets[-1] != size
      or offsets[0] != 0
      or np.any(np.diff(offsets) < _FRAME_BYTES)
    ):
      raise DataError(
        f"{index}: the index does not fit {self.path} ({size} bytes). One of "
        "them is damaged or from another run: make the records again, or "
        "delete the index to have the file scanned."
      )
    return offsets

  def read(self, number: int) -> bytes:
    start, end = self.offsets[number], self.offsets[number + 1]
    # Unlike a memory map this reads no more than it needs, touches no page
    # table, and lets other threads run while the disk works.
    try:
      frame = os.pread(self._fd, end - start, start)
    except OSError as e:
      raise DataError(
        f"{self.path}: record {number} at byte {start}: {e.strerror}"
      ) from e
    record = frame[_HEADER.size : -_FOOTER.size]
    if (
      len(frame) != end - start
      or _HEADER.unpack_from(frame)[0] != len(record)
      or _FOOTER.unpack_from(frame, len(frame) - _FOOTER.size)[0]
      != _masked_crc(record)
    ):
      raise DataError(
        f"{self.path}: record {number} at byte {start} is damaged (checksum "
        "mismatch). Copy or make the file again."
      )
    return record

  def read_ahead(self, first: int, last: int) -> None:
    """Has the kernel begin to read records first to last - 1."""
    for start in range(self.offsets[first], self.offsets[last], _ADVICE_BYTES):
      size = min(_ADVICE_BYTES, self.offsets[last] - start)
      os.posix_fadvise(self._fd, start, size, os.POSIX_FADV_WILLNEED)


class RecordSet:
  """All records of some files as one sequence, read by number.

  Numbers run through the files in the order given. Nothing is kept in memory,
  so a set may be larger; indexes are memory-mapped.
  """

  def __init__(self, paths: Sequence[str]):
    """Opens the files and their indexes.

    Raises:
      DataError: a file is missing, empty, damaged in its framing, or does not
        fit its index.
    """
    self.paths = list(paths)
    self._files = [_RecordFile(path) for path in self.paths]
    counts = [len(f.offsets) - 1 for f in self._files]
    self._ends = np.cumsum(counts)
    self._starts = self._ends - counts

  def __len__(self) -> int:
    return int(self._ends[-1])

  def starts(self) -> list[int]:
    """The number of each file's first record."""
    return self._starts.tolist()

  def locate(self, number: int) -> tuple[str, int]:
    """(file, record number in that file) of a record, for messages."""
    which = int(np.searchsorted(self._ends, number, side="right"))
    return self.paths[which], number - int(self._starts[which])

  def read(self, number: int) -> bytes:
    """The serialized record, as `read_many`."""
    return self.read_many(np.array([number]))[0]

  def read_many(self, numbers: np.ndarray) -> list[bytes]:
    """The serialized records.

    Args:
      numbers: int64 [n].

    Raises:
      DataError: a checksum does not match, with file and record number.
    """
    which = np.searchsorted(self._ends, numbers, side="right")
    places = (numbers - self._starts[which]).tolist()
    files = self._files
    return [
      files[file].read(place)
      for file, place in zip(which.tolist(), places, strict=True)
    ]

  def read_ahead(self, first: int, count: int) -> None:
    """Has the kernel begin to read `count` records from `first` on.

    It returns before they are in the page cache. Records are counted around
    the end, from the last on to 0.
    """
    stop = first + count
    if stop > len(self):
      self.read_ahead(0, stop - len(self))
      stop = len(self)
    for file, start, end in zip(
      self._files, self._starts.tolist(), self._ends.tolist(), strict=True
    ):
      if start < stop and first < end:
        file.read_ahead(max(first, start) - start, min(stop, end) - start)

  def __iter__(self) -> Iterator[bytes]:
    return (self.read(i) for i in range(len(self)))
