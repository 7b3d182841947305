"""The values of all variables at one update, in memory."""

import threading
from typing import Any

import numpy as np

from checkpoints.checkpoint_files import CheckpointFiles
from common.tensorflow_v1 import tf
from gradients.sharded_variables import SHARDED_VARIABLES

_ALIGNMENT = 64  # bytes


class Snapshot:
  """Memory for the values of all variables, and the last copy."""

  # In an elastic run a rank's snapshot outlives its worlds, so it refers to no
  # graph; all ranks return to theirs when one is lost. So does `files`, which
  # writes it to the disk.

  def __init__(self, copies: int = 2):
    """With 2 copies `values` stay whole while the next ones are taken."""
    self.step = 0  # of `values`
    self.values: Any = None  # name -> array, once there are values
    self._copies = copies
    self._sets: list[dict[str, np.ndarray]] = []
    self._thread: Any = None
    self._shapes: dict[str, list[int]] = {}  # of the tensors it is for
    self._trouble = ""  # why there is no memory
    self.files: CheckpointFiles | None = None

  def prepare(self, tensors: dict) -> None:
    """Begins to get memory for `tensors`, by name, unless there is such."""

    # Getting memory from the system takes ten times as long as copying into it:
    # a thread gets it once, beside the first updates.
    sets: list[dict[str, np.ndarray]] = []

    def allocate() -> None:
      try:
        for _ in range(self._copies):
          sets.append({n: _aligned(t) for n, t in tensors.items()})
      except MemoryError as e:
        self._trouble = f"the copy of all variables that a save writes: {e}"

    shapes = {name: t.shape.as_list() for name, t in tensors.items()}
    if self._shapes != shapes:  # at first, and when a stage's model grows
      self._shapes, self._sets = shapes, sets
      self._thread = threading.Thread(target=allocate, daemon=True)
      self._thread.start()

  def next_values(self) -> dict[str, np.ndarray]:
    """The arrays to fill with the next values; call `finish` afterwards.

    Raises `MemoryError` if there was no memory for them.
    """
    self._thread.join()
    if self._trouble:
      raise MemoryError(self._trouble)
    return self._sets[0]

  def finish(self, step: int) -> None:
    """Makes these arrays the values after update `step`."""
    self.step, self.values = step, self._sets[0]
    # With two sets the next copy goes into the other one.
    self._sets.append(self._sets.pop(0))


def _aligned(like: tf.Tensor) -> np.ndarray:
  """An array of zeros that TensorFlow reads without a copy."""
  shape, dtype = like.shape.as_list(), like.dtype.as_numpy_dtype
  size = int(np.prod(shape)) * np.dtype(dtype).itemsize
  memory = np.empty(size + _ALIGNMENT, np.uint8)
  memory.fill(0)  # makes the system provide it
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + size].view(dtype).reshape(shape)


class SavedVariables:
  """A graph's global variables as checkpoints have them, each whole."""

  def __init__(self, snapshot: Snapshot, is_kept: bool):
    """Adds copies to `snapshot`; if not `is_kept`, only helps other ranks."""
    self.sharded = tf.get_collection(SHARDED_VARIABLES)
    self.parts = {s.part.op.name: s.part for s in self.sharded}
    self.whole = [  # that each rank holds, unlike those of `sharded`
      v for v in tf.global_variables() if v.op.name not in self.parts
    ]
    whole = {v.op.name: tf.convert_to_tensor(v) for v in self.whole}
    groups, tensors = [whole], {**whole}
    for sharded in self.sharded:
      groups.append(sharded.whole)
      tensors |= sharded.whole
    self.shapes = {name: t.shape.as_list() for name, t in tensors.items()}
    # To run one after the other, which saves memory. Where nothing is kept
    # they make the whole tensors with the other ranks.
    if is_kept:
      self.copies = [_copy_op(group, snapshot) for group in groups]
      snapshot.prepare(tensors)
    else:
      self.copies = [[t.op for t in group.values()] for group in groups[1:]]


def _copy_op(tensors: dict, snapshot: Snapshot) -> tf.Operation:
  def copy(*arrays) -> np.int32:
    kept = snapshot.next_values()
    for name, array in zip(tensors, arrays, strict=True):
      np.copyto(kept[name], array)
    return np.int32(0)

  return tf.numpy_function(copy, list(tensors.values()), tf.int32).op
