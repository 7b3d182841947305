"""The values of all variables at one update, in memory."""

import threading
from collections.abc import Callable

import numpy as np

from common.tensorflow_v1 import tf
from gradients.sharded_variables import SHARDED_VARIABLES

_ALIGNMENT = 64  # bytes


class Snapshot:
  """Memory for the values of all variables, and what was last copied there.

  To get memory from the system takes ten times as long as to copy into it, so
  it is taken once, beside the first updates. In an elastic run each rank has
  a snapshot that outlives its worlds (so it refers to no graph), to which all
  return when a rank is lost.

  Attributes:
    step: updates up to it.
    values: of all variables by name; None before there is one. Not to be used
      across the next `begin` with one copy, the one after it with two.
  """

  def __init__(self, copies: int = 2):
    """With 2 copies `values` stay whole while the next ones are taken."""
    self.step, self.values = 0, None
    self._copies, self._sets = copies, []
    self._thread: threading.Thread | None = None

  def prepare(self, tensors: dict) -> None:
    """Begins to get the memory for `tensors`, by name, if not done yet."""
    if self._thread is None:
      shapes = {
        name: (tensor.shape.as_list(), tensor.dtype.as_numpy_dtype)
        for name, tensor in tensors.items()
      }
      self._thread = threading.Thread(
        target=self._allocate, args=(shapes,), daemon=True
      )
      self._thread.start()

  def _allocate(self, shapes: dict) -> None:
    for _ in range(self._copies):
      arrays = {name: _aligned(*shape) for name, shape in shapes.items()}
      self._sets.append(arrays)

  def begin(self) -> dict:
    """The arrays, by name, to put the next values into; then `finish` it."""
    self._thread.join()
    return self._sets[0]

  def finish(self, step: int) -> None:
    """What `begin` gave holds the values after this update."""
    self.step, self.values = step, self._sets[0]
    self._sets.append(self._sets.pop(0))


def _aligned(shape: list, dtype) -> np.ndarray:
  """An array of zeros that TensorFlow reads where it is, without a copy."""
  size = int(np.prod(shape)) * np.dtype(dtype).itemsize
  memory = np.empty(size + _ALIGNMENT, np.uint8)
  memory.fill(0)  # only now there is memory behind it
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + size].view(dtype).reshape(shape)


class SavedVariables:
  """A graph's global variables as checkpoints have them, each whole.

  Attributes:
    own: variables that each rank holds whole.
    sharded: list of `ShardedVariable`, of the others.
    shapes: name -> list of int, of all.
  """

  def __init__(self, snapshot: Snapshot, is_kept: bool):
    """Adds to the graph what copies all values to `snapshot`.

    With `is_kept` false this rank helps to make whole values, and keeps none.
    """
    self.sharded = tf.get_collection(SHARDED_VARIABLES)
    self._parts = {s.part.op.name: s.part for s in self.sharded}
    self.own = [
      v for v in tf.global_variables() if v.op.name not in self._parts
    ]
    self._own = {v.op.name: tf.convert_to_tensor(v) for v in self.own}
    groups = [self._own, *(s.whole for s in self.sharded)]
    tensors = {name: t for group in groups for name, t in group.items()}
    self.shapes = {name: t.shape.as_list() for name, t in tensors.items()}
    if is_kept:
      self._copies = [_copy_op(group, snapshot) for group in groups]
      snapshot.prepare(tensors)
    else:
      self._copies = [[t.op for t in group.values()] for group in groups[1:]]

  def copy(self, session: tf.Session, heartbeat: Callable[[], None]) -> None:
    """Copies all values; on all ranks."""
    for copy in self._copies:
      session.run(copy)
      heartbeat()  # the first time each of them is prepared, for a second

  def values(self, session: tf.Session) -> dict:
    """What this rank holds, by name: the whole of a variable, or its part."""
    return session.run({**self._own, **self._parts})


def _copy_op(tensors: dict, snapshot: Snapshot) -> tf.Operation:
  """Copies `tensors`, by name, to where the snapshot's next values go."""

  def copy(*arrays) -> np.int32:
    kept = snapshot.begin()
    for name, array in zip(tensors, arrays, strict=True):
      np.copyto(kept[name], array)
    return np.int32(0)

  return tf.numpy_function(copy, list(tensors.values()), tf.int32).op
