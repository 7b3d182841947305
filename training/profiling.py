"""--profile_steps: a few updates for the trace viewer of TensorBoard."""

import contextlib
import os
from typing import NamedTuple

from common.console import tell
from common.errors import UserError
from common.tensorflow_v1 import profiler, tf


class Window(NamedTuple):
  """Updates to look at, by their numbers in the run, from 1."""

  first: int
  last: int


def window(words) -> Window | None:
  """What --profile_steps says; None if nothing.

  Args:
    words: what is between its commas.

  Raises:
    UserError: they are no two numbers in order.
  """
  if not words:
    return None
  try:
    found = Window(*map(int, words))
  except (TypeError, ValueError):
    found = Window(0, 0)
  if not 1 <= found.first <= found.last:
    raise UserError(
      f"--profile_steps={','.join(map(str, words))}: want FIRST,LAST, the "
      "numbers of two updates, for example 20,24"
    )
  return found


class Profile:
  """Records the window's updates on rank 0: ops, threads, the GPU's kernels.

  A `with` block's end, whatever the reason, ends the recording. It is in the
  folder of TensorBoard's events, because under a folder of several runs
  TensorBoard looks for profiles beside events only.

  Attributes:
    folder: for TensorBoard, once there is a recording; else None.
  """

  def __init__(self, updates: Window | None, output_dir: str, comm):
    """Without `updates`, and on other ranks, does nothing."""
    self._updates = updates if comm.is_root else None
    self._target = os.path.join(output_dir, "train")
    self._active = False
    self.folder: str | None = None

  def __enter__(self) -> "Profile":
    return self

  def __exit__(self, *_) -> None:
    self._stop()

  def at(self, update: int) -> None:
    """Begins or ends the recording, if it is time to, before an update."""
    if self._updates is None:
      return
    if self._active and update > self._updates.last:
      self._stop()
    elif not self._active and self.folder is None:
      if self._updates.first <= update <= self._updates.last:
        options = profiler.ProfilerOptions(
          host_tracer_level=2, python_tracer_level=0, device_tracer_level=1
        )
        profiler.start(self._target, options)
        self._active = True

  def update(self, number: int):
    """A context in which the recording has this update as one step."""
    if not self._active:
      return contextlib.nullcontext()
    return profiler.Trace("update", step_num=number, _r=1)

  def _stop(self) -> None:
    if not self._active:
      return
    self._active = False
    try:
      profiler.stop()
      self.folder = self._target
    except (tf.errors.OpError, OSError) as e:
      tell(f"--profile_steps: nothing was written: {str(e).splitlines()[0]}")
