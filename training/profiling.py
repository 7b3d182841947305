"""--profile_steps: a recording of a few updates for TensorBoard."""

import contextlib
import os

from common.console import tell
from common.errors import reason
from common.tensorflow_v1 import tf


class Profile(contextlib.AbstractContextManager):
  """Records the window's updates on rank 0: ops, threads, the GPU's kernels."""

  def __init__(self, updates: tuple[int, int] | None, output_dir: str, comm):
    self._updates = updates if comm.is_root else None
    # TensorBoard finds the profiles of several runs beside events only.
    self._target = os.path.join(output_dir, "train")
    self._profiler = tf.compat.v2.profiler.experimental
    self._active = False
    self.folder: str | None = None  # once there is a recording

  def __exit__(self, *_) -> None:
    self._stop()

  def update(self, number: int):
    """A block with an update; the recording begins or ends before it."""
    first, last = self._updates or (0, 0)
    if number > last:
      self._stop()
    elif first <= number and not self._active and self.folder is None:
      options = self._profiler.ProfilerOptions(
        host_tracer_level=2, python_tracer_level=0, device_tracer_level=1
      )
      self._profiler.start(self._target, options)
      self._active = True
    if not self._active:
      return contextlib.nullcontext()
    return self._profiler.Trace("update", step_num=number, _r=1)

  def _stop(self) -> None:
    if not self._active:
      return
    self._active = False
    try:
      self._profiler.stop()
      self.folder = self._target
    except (tf.errors.OpError, OSError) as e:
      tell(f"--profile_steps: nothing was written: {reason(e)}")
