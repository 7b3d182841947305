"""Checkpoint files: whole or absent, with checksums against damage.

A checkpoint is TensorFlow's pair `model.ckpt-N.index`, `.data-00000-of-00001`
(google/bert's format) and a marker, `model.ckpt-N.json`, with size and CRC-32C
of both. A thread writes a checkpoint to a folder aside, moves its files from
there, the marker last, and then deletes older checkpoints.
"""

import contextlib
import glob
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

import google_crc32c
import numpy as np

from common import input_files, json_files
from common import tensorflow_v1 as later
from common.console import tell
from common.errors import UserError, reason
from common.files import folder_aside, sync, write

PREFIX = "model.ckpt"
_SUFFIXES = (".index", ".data-00000-of-00001")
_WITH_MARKER = (*_SUFFIXES, ".json")  # it comes last
_STEP = re.compile(rf"{re.escape(PREFIX)}-(\d+)")
_ENDING = re.compile(r"\.(index|meta|json|data-\d+-of-\d+)$")  # of its files
_ASIDE = ".saving"  # the folder in which a checkpoint is being written
_CHUNK = 16 << 20
RETRY_SECONDS = 60  # after a failure
_held: dict = {}  # prefix -> TensorFlow's open reader, see `hold`


class CheckpointError(UserError):
  """A checkpoint that cannot be used; the message says which and why."""


def _read_errors() -> tuple:
  """The errors of TensorFlow's reader."""
  # It raises some of its own as built-in ones, such as IndexError for "Read
  # less bytes than requested".
  return later.tf.errors.OpError, ValueError, IndexError, RuntimeError


def _described(path: str) -> dict:
  """Size and CRC-32C of a file, as a marker has them."""
  crc = google_crc32c.Checksum()
  with input_files.open_input(path) as f:
    while chunk := f.read(_CHUNK):
      crc.update(chunk)
  return {"bytes": os.path.getsize(path), "crc32c": crc.hexdigest().decode()}


class Checkpoint:
  """Any checkpoint: name -> array; its `shapes`: name -> list of int."""

  left_out: Sequence[str] = ()  # lines for people: what has no name here

  def __init__(self, prefix: str):
    self.path = prefix
    input_files.expect_plain(glob.glob(glob.escape(prefix) + ".*"))
    try:
      if os.path.isdir(prefix):
        raise ValueError("it is a folder")
      load = later.tf.train.load_checkpoint
      self._reader = _held.pop(prefix, None) or load(prefix)
      self.shapes: dict = self._reader.get_variable_to_shape_map()
      # TensorFlow reads any file as its older format.
      if not self.shapes:
        raise ValueError("there are no variables in it")
    # MemoryError: a damaged index may state a block of any size.
    except (*_read_errors(), MemoryError) as e:
      raise CheckpointError(
        f"{prefix}: no readable checkpoint ({reason(e)}). Name one such as "
        "OUTPUT_DIR/model.ckpt-1000"
      ) from e

  def __getitem__(self, name: str) -> np.ndarray:
    """Raises `CheckpointError` for a value that is damaged or not finite."""
    try:
      value = np.asarray(self._reader.get_tensor(name))
    except _read_errors() as e:
      raise CheckpointError(
        f"{self.path}: damaged ({name}: {reason(e)}). Copy it "
        "again, or delete its files to use the one before"
      ) from e
    is_float = value.dtype.kind == "f" or value.dtype.name == "bfloat16"
    if is_float and not np.isfinite(value.astype("f4", copy=False)).all():
      raise CheckpointError(
        f"{self.path}: {name} holds values that are not finite: use an earlier "
        "checkpoint"
      )
    return value


def hold(prefix: str) -> bool:
  """Opens a chosen checkpoint for the next `Checkpoint` of that name.

  False if it is gone. Only reading it raises what is wrong with it. Nothing
  removes a folder, which is Hugging Face's.
  """
  # The run that wrote it may remove it before it is read. An open file can
  # still be read then.
  _held.pop(prefix, None)
  with contextlib.suppress(UserError):
    held = Checkpoint(prefix)
    held[min(held.shapes)]  # opens the file of all values
    _held[prefix] = held._reader
  is_there = os.path.isdir(prefix) or glob.glob(glob.escape(prefix) + ".*")
  return prefix in _held or bool(is_there)


class _Writer:
  """Writes values as a TensorFlow checkpoint, apart from the training graph."""

  def __init__(self, values: Mapping[str, np.ndarray]):
    tf = later.tf
    graph = tf.Graph()
    with graph.as_default(), tf.device("/cpu:0"):
      self._prefix = tf.placeholder(tf.string, [])
      self._values = {n: tf.placeholder(v.dtype) for n, v in values.items()}
      self.names = self._values.keys()
      self._save = tf.raw_ops.SaveV2(
        prefix=self._prefix,
        tensor_names=list(self._values),
        shape_and_slices=[""] * len(self._values),
        tensors=list(self._values.values()),
      )
    config = tf.ConfigProto(
      device_count={"GPU": 0},
      # Threads of its own: otherwise sessions share the process' threads, and
      # training, which has one on a CPU, would wait for the writing.
      inter_op_parallelism_threads=1,
      use_per_session_threads=True,
    )
    self._session = tf.Session(graph=graph, config=config)

  def __call__(self, prefix: str, values: Mapping[str, np.ndarray]) -> None:
    feeds = {self._values[name]: value for name, value in values.items()}
    self._session.run(self._save, {**feeds, self._prefix: prefix})


def write_weights(prefix: str, values: Mapping, beside: Mapping = {}) -> None:
  """Writes a new checkpoint for --init_checkpoint, without a marker.

  `values` are arrays by name, `beside` the contents of its other files by path.
  """
  with folder_aside(prefix) as aside:
    name = os.path.join(aside, os.path.basename(prefix))
    if os.path.exists(f"{prefix}.index"):
      raise CheckpointError(
        f"{prefix}.index exists already: give another name, or remove it"
      )
    try:
      _Writer(values)(name, values)
    except later.tf.errors.OpError as e:
      raise CheckpointError(
        f"{prefix} could not be written ({reason(e)})"
      ) from e
    for path, content in beside.items():
      write(path, content)
    # The index last: without it a start that was killed can be made again.
    for suffix in reversed(_SUFFIXES):
      os.replace(name + suffix, prefix + suffix)


def step_of(path: str) -> int | None:
  """The update of a checkpoint's name, or None for a name of another form."""
  match = _STEP.fullmatch(os.path.basename(path))
  return int(match[1]) if match else None


def prefix_of(name: str) -> str:
  """The name of the checkpoint of which `name` may be a file; with a folder."""
  if not (os.path.dirname(name) or os.path.isdir(name)):
    name = os.path.join(os.curdir, name)
  ending = os.path.isfile(name) and _ENDING.search(name)
  if not ending:
    return name
  prefix, end = name.removesuffix(ending[0]), ending[0]
  tell(f"{name}: a checkpoint's name is without {end}: taken to mean {prefix}")
  return prefix


def has_begun(folder: str) -> bool:
  """Whether a run there has a checkpoint from which it would resume."""
  return bool(folder) and CheckpointFiles(folder, keep=1).has_any()


class CheckpointFiles:
  """The checkpoints of one folder: the newest `keep`, and a protected one."""

  def __init__(self, folder: str, keep: int):
    self.folder, self.keep = folder, keep
    self.written: Mapping[str, np.ndarray] | None = None  # by the last `write`
    self.protected: int | None = None  # an update that is kept at any age
    self._writer: _Writer | None = None
    self._thread: threading.Thread | None = None
    self._failure: str | None = None
    self._retry_at = math.inf

  def prefix(self, step: int) -> str:
    return os.path.join(self.folder, f"{PREFIX}-{step}")

  # Reading -------------------------------------------------------------------

  def steps(self) -> list[int]:
    """Updates whose checkpoint has a marker, newest first."""
    try:
      names = os.listdir(self.folder)
    except FileNotFoundError:
      return []
    steps = []
    for name in names:
      stem, ending = os.path.splitext(name)
      step = step_of(stem)
      if ending == ".json" and step is not None:
        steps.append(step)
    return sorted(steps, reverse=True)

  def without_marker(self) -> str | None:
    """The newest, such as google/bert's, of a folder without markers."""
    list_file = os.path.join(self.folder, "checkpoint")
    if self.steps() or not os.path.exists(list_file):
      return None
    try:
      state = later.tf.train.get_checkpoint_state(self.folder)
      path = state.model_checkpoint_path if state else ""
    except ValueError:  # also what is not UTF-8
      path = ""
    moved = os.path.join(self.folder, os.path.basename(path))
    for prefix in (path, moved):  # it may name where the folder was
      is_there = os.path.exists(prefix + _SUFFIXES[0]) or os.path.isfile(prefix)
      if path and is_there:
        return prefix
    raise CheckpointError(
      f"{list_file}: names no checkpoint that exists ({path!r}). Bring it "
      "back, or start a new run in another --output_dir"
    )

  def has_any(self) -> bool:
    """Whether a run would resume from one."""
    return bool(self.steps() or self.without_marker())

  def newest_whole(self, before: float = math.inf) -> str | None:
    """The newest that is as it was written, of an update before `before`.

    None without any. Raises `CheckpointError` if all of a folder are damaged.
    """
    # Damaged ones are reported only if the run can go on without them.
    damaged = []
    for step in self.steps():
      if step >= before:
        continue
      try:
        self.check(step)
      except UserError as e:
        damaged.append(str(e))
      else:
        for line in damaged:
          tell(f"damaged: {line}")
        return self.prefix(step)
    if before < math.inf:
      return None
    if damaged:
      raise CheckpointError(
        f"{self.folder}: no checkpoint is whole ({'; '.join(damaged)}). "
        "Bring one back, or start a new run in another --output_dir"
      )
    return self.without_marker()

  def check(self, step: int) -> None:
    """Raises `UserError` if a checkpoint is not as it was written."""
    prefix = self.prefix(step)
    names = [os.path.basename(prefix) + suffix for suffix in _SUFFIXES]
    file: dict = {"bytes": int, "crc32c": str}
    form = {"files": dict.fromkeys(names, file)}
    marker = json_files.read_own(prefix + ".json", "delete it", form)
    for name in names:
      path, wanted = os.path.join(self.folder, name), marker["files"][name]
      present = _described(path)
      if present != wanted:
        raise CheckpointError(
          f"{path}: {present['bytes']} bytes with CRC-32C {present['crc32c']}, "
          f"but {wanted['bytes']} with {wanted['crc32c']} were written"
        )

  # Writing -------------------------------------------------------------------

  def write(self, step: int, values: Mapping[str, np.ndarray]) -> None:
    """Waits for the write before, and begins this one.

    They must not change until written.
    """
    self.wait()
    self.written = values
    # The same names each time, until the model grows.
    if not (self._writer and self._writer.names == values.keys()):
      self._writer = _Writer(values)
    arguments = step, values, self._writer
    self._thread = threading.Thread(target=self._write, args=arguments)
    self._thread.start()

  def wait(self, seconds: float | None = None) -> bool:
    """Waits at most `seconds`; returns whether nothing is being written."""
    if self._thread is not None:
      self._thread.join(seconds)
    return self._thread is None or not self._thread.is_alive()

  def failure(self) -> str | None:
    """The error of a write since the last call."""
    failure, self._failure = self._failure, None
    return failure

  def retry_is_due(self) -> bool:
    overdue = time.monotonic() >= self._retry_at
    return overdue and self.wait(0)  # a newer one may be under way

  def _write(self, step: int, values: Mapping, writer: _Writer) -> None:
    """In the thread: makes a checkpoint aside, then moves it to its place."""
    aside, target = os.path.join(self.folder, _ASIDE), self.prefix(step)
    path = os.path.join(aside, os.path.basename(target))
    try:
      shutil.rmtree(aside, ignore_errors=True)
      os.makedirs(aside)
      writer(path, values)
      files = {}
      for suffix in _SUFFIXES:
        files[os.path.basename(target) + suffix] = _described(path + suffix)
      json_files.write(path + ".json", {"global_step": step, "files": files})
      # All bytes are on the disk before a name says that they are.
      for suffix in _WITH_MARKER:
        sync(path + suffix)
      # A damaged one of the same step stops being a checkpoint here.
      with contextlib.suppress(FileNotFoundError):
        os.unlink(target + ".json")
      # The marker last: from then on this is a checkpoint.
      for suffix in _WITH_MARKER:
        os.replace(path + suffix, target + suffix)
      sync(self.folder)
      self._remove_old(step)
      self._failure, self._retry_at = None, math.inf
    except Exception as e:  # of whatever kind: training reports it
      self._retry_at = time.monotonic() + RETRY_SECONDS
      self._failure = (
        f"{target} could not be written ({reason(e)}); the one before stays"
      )
    finally:
      shutil.rmtree(aside, ignore_errors=True)

  def _remove_old(self, newest: int) -> None:
    # A run that went back has later ones still: it writes them again.
    steps = [s for s in self.steps() if s <= newest]
    kept = [s for s in steps if s in (*steps[: self.keep], self.protected)]
    # Tools read this list, with the newest last.
    later.tf.train.update_checkpoint_state(
      self.folder, self.prefix(newest), [*map(self.prefix, reversed(kept))]
    )
    self.remove(set(steps) - set(kept))

  def remove(self, steps: Iterable[int]) -> None:
    """Removes the checkpoints of these updates."""
    for step in steps:
      # The marker first: half a checkpoint must not look like one.
      for suffix in (".json", *_SUFFIXES):
        with contextlib.suppress(FileNotFoundError):
          os.unlink(self.prefix(step) + suffix)
