"""Checkpoint files: each is whole or not there, and damage is noticed.

A checkpoint is TensorFlow's pair `model.ckpt-N.index`, `.data-00000-of-00001`
(google/bert's format) and, put there last, `model.ckpt-N.json`: sizes and
CRC-32C of both, by which a checkpoint is known to be whole. New ones are
written aside, in the background, and renamed; older ones go when a newer one is
there.
"""

import contextlib
import math
import os
import re
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping

import google_crc32c
import numpy as np
from google.protobuf import message

from common import json_files
from common.errors import UserError
from common.tensorflow_v1 import tensor_bundle_pb2, tf
from data import tfrecord

PREFIX = "model.ckpt"
_SUFFIXES = (".index", ".data-00000-of-00001")
_MARKER = re.compile(rf"{re.escape(PREFIX)}-(\d+)\.json")
_ASIDE = ".saving"  # the folder in which a checkpoint is being written
_CHUNK = 16 << 20
RETRY_SECONDS = 60  # after a failure


class CheckpointError(UserError):
  """A checkpoint that cannot be used; the message says which and why."""


def _checksum(path: str) -> str:
  """CRC-32C of a file, in hex."""
  crc = google_crc32c.Checksum()
  with open(path, "rb") as f:
    while chunk := f.read(_CHUNK):
      crc.update(chunk)
  return crc.hexdigest().decode()


# -----------------------------------------------------------------------------
# The index of a checkpoint that has no marker
# -----------------------------------------------------------------------------

# A table as LevelDB's (https://github.com/google/leveldb, doc/table_format.md),
# of the messages in tensorflow/core/protobuf/tensor_bundle.proto by name.
_FOOTER_BYTES, _MAGIC = 48, bytes.fromhex("57fb808b247547db")
_TRAILER = struct.Struct("<BI")  # of a block: compression, masked CRC-32C
_MAX_ELEMENTS, _MAX_RANK = 1 << 48, 16


def check_index(prefix: str) -> None:
  """Checks what TensorFlow's reader takes for granted in PREFIX.index.

  It ends the process, without an exception, if an entry is no message or has a
  shape that cannot be. A checkpoint without an index (of TensorFlow's older
  format, or none at all) is left to it.

  Raises:
    CheckpointError: the index is damaged, or cannot be read.
  """
  path = prefix + _SUFFIXES[0]
  try:
    with open(path, "rb") as f:
      data = f.read()
  except FileNotFoundError:
    return
  except OSError as e:
    raise CheckpointError(f"{path}: {e.strerror}") from e
  try:
    for name, value in _table_entries(data):
      if name:  # the first one is a header, which TensorFlow checks
        name.decode()
        _check_entry(value)
  # TypeError: no such dtype; IndexError: a number without its end.
  except (message.DecodeError, ValueError, TypeError, IndexError) as e:
    raise CheckpointError(f"{path}: damaged ({e}). Copy it again") from e


# Of a damaged tensor; IndexError is the reader's "Read less bytes than
# requested".
READ_ERRORS = (tf.errors.OpError, ValueError, IndexError)


def open_reader(prefix: str):
  """TensorFlow's reader of a checkpoint of any origin.

  Raises:
    CheckpointError: there is none, or it cannot be read.
  """
  check_index(prefix)
  try:
    if os.path.isdir(prefix):
      raise ValueError("it is a folder")
    reader = tf.train.load_checkpoint(prefix)
    # So are files of a checkpoint, taken for the older format.
    if not reader.get_variable_to_shape_map():
      raise ValueError("there are no variables in it")
  except (tf.errors.OpError, ValueError) as e:
    why = str(e).splitlines()[0]
    raise CheckpointError(
      f"{prefix}: no readable checkpoint ({why}). Give the name without "
      ".index or .data-..., for example OUTPUT_DIR/model.ckpt-1000"
    ) from e
  return reader


def _table_entries(data: bytes) -> Iterator[tuple[bytes, bytes]]:
  """(key, value) of all entries of a table."""
  if len(data) < _FOOTER_BYTES or not data.endswith(_MAGIC):
    raise ValueError("cut off, or no index")
  at = len(data) - _FOOTER_BYTES
  for _ in range(2):  # of a block that is not used
    _, at = _varint(data, at)
  for _, place in _block_entries(data, data[at:]):
    yield from _block_entries(data, place)


def _block_entries(data: bytes, place: bytes) -> Iterator[tuple[bytes, bytes]]:
  """(key, value) of the entries of one block, `place` says which."""
  start, at = _varint(place, 0)
  size, _ = _varint(place, at)
  if start + size + _TRAILER.size > len(data) or size < 4:
    raise ValueError("a block beyond the end")
  compression, crc = _TRAILER.unpack_from(data, start + size)
  if compression:
    raise ValueError("compressed, as TensorFlow does not write it")
  if crc != tfrecord.masked_crc(data[start : start + size + 1]):
    raise ValueError("checksum mismatch")
  block = data[start : start + size]
  (restarts,) = struct.unpack_from("<I", block, size - 4)
  end = size - 4 * (restarts + 1)
  key, at = b"", 0
  while at < end:
    shared, at = _varint(block, at)
    own, at = _varint(block, at)
    length, at = _varint(block, at)
    if shared > len(key) or at + own + length > end:
      raise ValueError("an entry beyond its block")
    key = key[:shared] + block[at : at + own]
    at += own + length
    yield key, block[at - length : at]


def _varint(data: bytes, at: int) -> tuple[int, int]:
  """A number of variable length, and where the next one begins."""
  value = shift = 0
  while data[at] >= 128:
    value |= (data[at] & 127) << shift
    at, shift = at + 1, shift + 7
  return value | data[at] << shift, at + 1


def _check_entry(entry: bytes) -> None:
  found = tensor_bundle_pb2.BundleEntryProto.FromString(entry)
  if found.slices:
    raise ValueError("a variable in slices, which are not read")
  tf.as_dtype(found.dtype)
  sizes = [dim.size for dim in found.shape.dim]
  if (
    found.shape.unknown_rank
    or len(sizes) > _MAX_RANK
    or any(size < 0 for size in sizes)
    or math.prod(sizes) > _MAX_ELEMENTS
  ):
    raise ValueError("a shape that cannot be")


class _Writer:
  """Writes values as a TensorFlow checkpoint, apart from the training graph."""

  def __init__(self, dtypes: Mapping[str, tf.DType]):
    """`dtypes` of all variables that a checkpoint holds, by name."""
    self._graph = tf.Graph()
    with self._graph.as_default(), tf.device("/cpu:0"):
      self._prefix = tf.placeholder(tf.string, [])
      self._values = {n: tf.placeholder(d) for n, d in dtypes.items()}
      self._save = tf.raw_ops.SaveV2(
        prefix=self._prefix,
        tensor_names=list(self._values),
        shape_and_slices=[""] * len(self._values),
        tensors=list(self._values.values()),
      )
    self._session = None

  def __call__(self, prefix: str, values: Mapping[str, np.ndarray]) -> None:
    """Writes PREFIX.index and PREFIX.data-00000-of-00001."""
    if self._session is None:
      config = tf.ConfigProto(
        device_count={"GPU": 0},
        # Threads of its own: otherwise sessions share the process' threads, and
        # training, which has one on a CPU, would wait for the writing.
        inter_op_parallelism_threads=1,
        use_per_session_threads=True,
      )
      self._session = tf.Session(graph=self._graph, config=config)
    feeds = {self._values[name]: value for name, value in values.items()}
    self._session.run(self._save, {**feeds, self._prefix: prefix})


def write_weights(prefix: str, values: Mapping[str, np.ndarray]) -> None:
  """Writes a checkpoint of any name, without a marker, as google/bert's are.

  It is for --init_checkpoint, not to be resumed from.

  Raises:
    CheckpointError: there is one of that name, or it cannot be written.
  """
  folder = os.path.dirname(prefix) or "."
  for suffix in _SUFFIXES:
    if os.path.exists(prefix + suffix):
      raise CheckpointError(
        f"{prefix}{suffix} is there already: give another name, or remove it"
      )
  os.makedirs(folder, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder, prefix=_ASIDE) as aside:
    name = os.path.join(aside, os.path.basename(prefix))
    types = {name: tf.as_dtype(value.dtype) for name, value in values.items()}
    try:
      _Writer(types)(name, values)
    except tf.errors.OpError as e:
      raise CheckpointError(
        f"{prefix} could not be written ({_reason(e)})"
      ) from e
    for suffix in reversed(_SUFFIXES):  # the index says that it is there
      os.replace(name + suffix, prefix + suffix)


class CheckpointFiles:
  """The checkpoints of one folder."""

  def __init__(self, folder: str, keep: int):
    """`keep`: how many of the newest are kept."""
    self.folder, self.keep = folder, keep
    self._protected: set[int] = set()
    self._writer = None
    self._thread: threading.Thread | None = None
    self._failure: str | None = None
    self._retry_at = None

  def prefix(self, step: int) -> str:
    """The name of a checkpoint, without its files' endings."""
    return os.path.join(self.folder, f"{PREFIX}-{step}")

  # Reading -------------------------------------------------------------------

  def steps(self) -> list[int]:
    """Updates that have a checkpoint that was whole, newest first."""
    try:
      names = os.listdir(self.folder)
    except FileNotFoundError:
      return []
    found = map(_MARKER.fullmatch, names)
    return sorted((int(m[1]) for m in found if m), reverse=True)

  def without_marker(self) -> str | None:
    """The newest checkpoint as TensorFlow's `checkpoint` file names it.

    Another program wrote it (google/bert), or a version without markers; None
    if there is no such file, or if there are `steps`.

    Raises:
      CheckpointError: that file names no checkpoint that is there.
    """
    list_file = os.path.join(self.folder, "checkpoint")
    if self.steps() or not os.path.exists(list_file):
      return None
    try:
      state = tf.train.get_checkpoint_state(self.folder)
      path = state.model_checkpoint_path if state else ""
    except ValueError:  # also what is not UTF-8
      path = ""
    if not (os.path.exists(path + _SUFFIXES[0]) or os.path.exists(path)):
      raise CheckpointError(
        f"{list_file}: names no checkpoint that is there ({path!r}). Bring it "
        "back, or start a new run in another --output_dir"
      )
    return path

  def check(self, step: int) -> None:
    """Raises `CheckpointError` if a checkpoint is not what was written."""
    prefix = self.prefix(step)
    try:
      with open(prefix + ".json", "rb") as f:
        files = json_files.parse(f.read())["files"]
      wanted = [
        (prefix + suffix, files[os.path.basename(prefix) + suffix])
        for suffix in _SUFFIXES
      ]
      wanted = [(path, w["bytes"], w["crc32c"]) for path, w in wanted]
    except OSError as e:
      raise CheckpointError(f"{e.filename}: {e.strerror}") from e
    except (ValueError, KeyError, TypeError) as e:
      raise CheckpointError(f"{prefix}.json: not a checkpoint's ({e!r})") from e
    for path, size, crc in wanted:
      try:
        found = os.path.getsize(path), _checksum(path)
      except OSError as e:
        raise CheckpointError(f"{path}: {e.strerror}") from e
      if found != (size, crc):
        raise CheckpointError(
          f"{path}: {found[0]} bytes with CRC-32C {found[1]}, but {size} with "
          f"{crc} were written"
        )

  # Writing -------------------------------------------------------------------

  def write(self, step: int, values: Mapping[str, np.ndarray]) -> None:
    """Begins to write a checkpoint, after the one that is being written.

    `values` are those of all variables by name, the same ones each time; they
    must not change until they are written.
    """
    self.wait()
    if self._writer is None:
      self._writer = _Writer(
        {name: tf.as_dtype(v.dtype) for name, v in values.items()}
      )
    self._thread = threading.Thread(target=self._work, args=(step, values))
    self._thread.start()

  def wait(self, seconds: float | None = None) -> bool:
    """Waits until nothing is being written, at most `seconds`; whether so."""
    if self._thread is not None:
      self._thread.join(seconds)
      if not self._thread.is_alive():
        self._thread = None
    return self._thread is None

  def failure(self) -> str | None:
    """What has gone wrong since the last call, if something has."""
    failure, self._failure = self._failure, None
    return failure

  def retry_is_due(self) -> bool:
    """Whether the last checkpoint failed, and long enough ago."""
    overdue = self._retry_at is not None and time.monotonic() >= self._retry_at
    return overdue and self.wait(0)  # a newer one may be under way

  def protect(self, step: int) -> None:
    """Keeps this checkpoint, whatever its age, in place of the one before."""
    self._protected = {step}

  def _work(self, step: int, values) -> None:
    aside = os.path.join(self.folder, _ASIDE)
    try:
      shutil.rmtree(aside, ignore_errors=True)
      os.makedirs(aside)
      self._write_aside(step, values, aside)
      self._retry_at = None
    except (OSError, tf.errors.OpError) as e:
      self._retry_at = time.monotonic() + RETRY_SECONDS
      self._failure = (
        f"{self.prefix(step)} could not be written ({_reason(e)}); the one "
        "before stays"
      )
    finally:
      shutil.rmtree(aside, ignore_errors=True)

  def _write_aside(self, step, values, aside) -> None:
    name = f"{PREFIX}-{step}"
    self._writer(os.path.join(aside, name), values)
    files = {}
    for suffix in _SUFFIXES:
      path = os.path.join(aside, name + suffix)
      with open(path, "rb") as f:
        os.fsync(f.fileno())
      size, crc = os.path.getsize(path), _checksum(path)
      files[name + suffix] = {"bytes": size, "crc32c": crc}
    marker = os.path.join(aside, name + ".json")
    with open(marker, "w", encoding="utf-8") as f:
      f.write(json_files.text({"global_step": step, "files": files}, 2) + "\n")
      f.flush()
      os.fsync(f.fileno())
    # Of the same step only if that one was damaged: it is none from here on.
    with contextlib.suppress(FileNotFoundError):
      os.unlink(self.prefix(step) + ".json")
    for suffix in (*_SUFFIXES, ".json"):
      os.replace(os.path.join(aside, name + suffix), self.prefix(step) + suffix)
    _sync_folder(self.folder)
    self._remove_old(step)

  def _remove_old(self, newest: int) -> None:
    steps = [s for s in self.steps() if s <= newest]
    kept = sorted({*steps[: self.keep], *self._protected.intersection(steps)})
    # For tools that read it: the newest is the last of the list.
    tf.train.update_checkpoint_state(
      self.folder, self.prefix(newest), [self.prefix(step) for step in kept]
    )
    for step in set(steps) - set(kept):
      for suffix in (".json", *_SUFFIXES):  # first what says that it is whole
        with contextlib.suppress(FileNotFoundError):
          os.unlink(self.prefix(step) + suffix)


def _reason(error: Exception) -> str:
  """What went wrong, without where in the graph it did."""
  lines = getattr(error, "message", str(error)).splitlines()
  return [line for line in lines if line and not line[0].isspace()][-1]


def _sync_folder(folder: str) -> None:
  """Makes renames last through a loss of power."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
