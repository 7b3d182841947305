"""Record files: TFRecord framing and checksums, with an index beside each file.

A record is framed by uint64 length, masked CRC-32C of it, the record, masked
CRC-32C of the record (https://www.tensorflow.org/tutorials/load_data/tfrecord).

The index of a file `X` is `X.index`: a NumPy .npy array, int64 [records + 1],
with the byte offsets at which records start, the file's size last. Files
without one (google/bert's, NVIDIA's) are scanned.
"""

import array
import contextlib
import dataclasses
import hashlib
import io
import mmap
import os
import resource
import struct
import weakref
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import google_crc32c
import numpy as np

from common import files, input_files, stores
from common.errors import DataError
from common.input_files import INDEX_SUFFIX as INDEX_SUFFIX

_LENGTH = struct.Struct("<Q")
_HEADER = struct.Struct("<QI")  # length, masked CRC of the length
_FOOTER = struct.Struct("<I")  # masked CRC of the data
_FRAME_BYTES = _HEADER.size + _FOOTER.size

# One call makes Linux read at most a device's read-ahead: by default this much.
_ADVICE_BYTES = 128 << 10
_CHECKED_AT_ONCE = 1 << 17  # offsets of an index: 1 MiB
_OTHER_FILES = 256  # that a process may have open besides records
_REMEDY = "Copy or make the file again."


def masked_crc(data: bytes) -> int:
  """CRC-32C, masked as in TFRecord files and in TensorFlow's tables."""
  crc = google_crc32c.value(data)
  return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@dataclasses.dataclass(frozen=True)
class ShardInfo:
  """One record file as the manifest lists it."""

  name: str  # without folder
  records: int
  bytes: int
  sha256: str


class _ShardWriter:
  """Frames records, and counts what the index and the manifest say of them."""

  def __init__(self, path: str, file: BinaryIO):
    self._path, self._file = path, file
    self._sha256 = hashlib.sha256()
    self.offsets = array.array("q", [0])

  def write(self, record: bytes) -> None:
    header = _HEADER.pack(len(record), masked_crc(_LENGTH.pack(len(record))))
    frame = header + record + _FOOTER.pack(masked_crc(record))
    self._file.write(frame)
    self._sha256.update(frame)
    self.offsets.append(self.offsets[-1] + len(frame))

  @property
  def info(self) -> ShardInfo:
    name, count = os.path.basename(self._path), len(self.offsets) - 1
    return ShardInfo(name, count, self.offsets[-1], self._sha256.hexdigest())


@contextlib.contextmanager
def shard_writer(path: str) -> Iterator[_ShardWriter]:
  """Writes a file and its index, which appear when whole."""
  with files.atomic_write(path) as f:
    writer = _ShardWriter(path, f)
    yield writer
    f.flush()  # may find the disk full
    index = io.BytesIO()  # NumPy's own writing loses the system's reason
    np.save(index, np.frombuffer(writer.offsets, np.int64), allow_pickle=False)
    files.write(path + INDEX_SUFFIX, index.getvalue())


def _frame_bytes(header: bytes) -> int:
  """The bytes of a record in its file; 0 if `header` begins none."""
  # Only a length with the right checksum may be jumped over.
  if len(header) == _HEADER.size:
    length, crc = _HEADER.unpack(header)
    if crc == masked_crc(header[: _LENGTH.size]):
      return length + _FRAME_BYTES
  return 0


def expect_records(path: str) -> None:
  """Raises `DataError` for a file that does not begin as record files do."""
  with input_files.open_input(path) as f:
    if not _frame_bytes(f.read(_HEADER.size)):
      raise DataError(
        f"{path}: not a TFRecord file: make records of text with "
        "create_pretraining_data.py, or copy the file again"
      )


def scan_offsets(path: str, data: mmap.mmap) -> np.ndarray:
  """Record offsets, as in an index, from the framing; DataError if damaged."""
  offsets = array.array("q", [0])  # a fifth of a list's memory
  start, end = 0, len(data)
  while start < end:
    size = _frame_bytes(data[start : start + _HEADER.size])
    if not size or start + size > end:
      raise DataError(
        f"{path}: record {len(offsets) - 1} at byte {start} has a damaged "
        f"length or is cut off, or this is not a TFRecord file. {_REMEDY}"
      )
    start += size
    offsets.append(start)
  return np.frombuffer(offsets, np.int64)


class _RecordFile:
  """An open record file and the offsets of its records."""

  def __init__(self, path: str, use_index: bool = True):
    self.path = path
    with input_files.open_input(path) as f:
      self._fd = os.dup(f.fileno())
    weakref.finalize(self, os.close, self._fd)
    self.size = os.fstat(self._fd).st_size
    if not self.size:
      raise DataError(f"{path}: the file is empty")
    self.index = stores.beside(path, INDEX_SUFFIX)
    if use_index and stores.at(self.index).exists():
      offsets = self.load_index()
    else:
      with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as data:
        offsets = scan_offsets(path, data)
    # Gives Python's integers, faster than an array does.
    self.offsets = offsets.data

  def load_index(self) -> np.ndarray:
    """The offsets in the index; DataError if they do not fit this file."""
    path = stores.at(self.index).local()
    try:
      # Unlike np.load it reads nothing but arrays of numbers.
      offsets = np.lib.format.open_memmap(path, mode="r")
      fits = (
        offsets.ndim == 1
        and offsets.dtype == np.int64
        and len(offsets) > 1
        and offsets[0] == 0
        and offsets[-1] == self.size
      )
      # Parts of it at a time, to copy little.
      for first in range(0, len(offsets) if fits else 0, _CHECKED_AT_ONCE):
        some = offsets[first : first + _CHECKED_AT_ONCE + 1]
        # Differences of negative numbers may overflow.
        fits &= np.all(some >= 0) and np.all(np.diff(some) >= _FRAME_BYTES)
    except Exception:  # of many types: a header is parsed as Python
      fits = False
    if not fits:
      raise DataError(
        f"{self.index}: damaged, or not the index of {self.path} ({self.size} "
        "bytes): delete it to have the file scanned, or make both again"
      )
    return np.asarray(offsets)

  def where(self, number: int) -> str:
    return f"{self.path}: record {number} at byte {self.offsets[number]}"

  def read(self, number: int) -> bytes:
    start, end = self.offsets[number], self.offsets[number + 1]
    # Unlike a memory map this reads only what it needs, touches no page table,
    # and lets other threads run while the disk works.
    try:
      frame = os.pread(self._fd, end - start, start)
    except OSError as e:
      raise DataError(f"{self.where(number)}: {e.strerror}") from e
    record = frame[_HEADER.size : -_FOOTER.size]
    if (
      len(frame) != end - start
      or _HEADER.unpack_from(frame)[0] != len(record)
      or _FOOTER.unpack_from(frame, len(frame) - _FOOTER.size)[0]
      != masked_crc(record)
    ):
      raise DataError(
        f"{self.where(number)} is damaged (checksum mismatch). {_REMEDY}"
      )
    return record

  def read_ahead(self, first: int, last: int) -> None:
    for start in range(self.offsets[first], self.offsets[last], _ADVICE_BYTES):
      size = min(_ADVICE_BYTES, self.offsets[last] - start)
      os.posix_fadvise(self._fd, start, size, os.POSIX_FADV_WILLNEED)


def verify_file(path: str, info: ShardInfo | None = None) -> None:
  """Raises `DataError` if a checksum, index or line of manifest is wrong."""
  file = _RecordFile(path, use_index=False)
  count = len(file.offsets) - 1
  # Reading a record checks its checksums.
  for number in range(count):
    file.read(number)
  if info:
    got = dataclasses.replace(
      info, records=count, bytes=file.size,
      sha256=files.file_sha256(stores.at(path).local()),
    )  # fmt: skip
    if got != info:
      raise DataError(
        f"{path}: records, bytes or SHA-256 are not those of its manifest: "
        "copy or make both again"
      )
  if stores.at(file.index).exists():
    if not np.array_equal(file.load_index(), file.offsets):
      raise DataError(
        f"{file.index}: the index has other records than {path}: "
        "delete it to have the file scanned"
      )


class RecordSet:
  """All records of some files, in the order given, read by number.

  The ranks of a host share indexes, 8 bytes a record, in memory, but not scans.
  """

  def __init__(self, paths: Sequence[str]):
    self.paths = list(paths)
    # All files stay open: opening one for each record would cost more than
    # reading it, so the process may need a higher limit.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * len(paths) + _OTHER_FILES  # with their memory-mapped indexes
    if resource.RLIM_INFINITY != soft < wanted:
      if resource.RLIM_INFINITY != hard < wanted:
        raise DataError(
          f"{len(paths)} record files are more than may be open: the limit is "
          f"{hard} (ulimit -Hn). Make the records with fewer --num_shards."
        )
      resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    self._files = [_RecordFile(path) for path in self.paths]
    self.counts = [len(f.offsets) - 1 for f in self._files]
    self.sizes = [file.size for file in self._files]
    self._ends = np.cumsum(self.counts)
    self._starts = self._ends - self.counts
    self.starts: list[int] = self._starts.tolist()  # files' first records

  def __len__(self) -> int:
    return int(self._ends[-1])

  def locate(self, number: int) -> tuple[str, int]:
    """(file, number in that file) of a record."""
    which = int(np.searchsorted(self._ends, number, side="right"))
    return self.paths[which], number - int(self._starts[which])

  def where(self, number: int) -> str:
    """FILE: record N at byte B, for messages."""
    path, within = self.locate(number)
    return self._files[self.paths.index(path)].where(within)

  def read(self, number: int) -> bytes:
    return self.read_many(np.array([number]))[0]

  def read_many(self, numbers: np.ndarray) -> list[bytes]:
    """The serialized records of numbers, int64 [n]; DataError if damaged."""
    which = np.searchsorted(self._ends, numbers, side="right")
    within = (numbers - self._starts[which]).tolist()
    files = [self._files[number] for number in which.tolist()]
    return list(map(_RecordFile.read, files, within))

  def read_ahead(self, first: int, count: int) -> None:
    """Asks the kernel to read records; record 0 follows the last one."""
    stop = first + count
    if stop > len(self):
      self.read_ahead(0, stop - len(self))
      stop = len(self)
    ends = self._ends.tolist()
    for file, start, end in zip(self._files, self.starts, ends, strict=True):
      if start < stop and first < end:
        file.read_ahead(max(first, start) - start, min(stop, end) - start)

  def __iter__(self) -> Iterator[bytes]:
    return map(self.read, range(len(self)))
