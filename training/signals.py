"""How a run is stopped: signals, the ranks' vote, its time, the watchdog."""

import contextlib
import enum
import os
import signal
import sys
import threading
import time
from typing import NamedTuple

import numpy as np

from common.console import tell
from common.errors import STOP_SIGNALS
from common.tensorflow_v1 import tf

_TICK = 0.5  # seconds


class Stop(enum.StrEnum):
  """Why a training ends before its last update."""

  SIGNAL = "stop"
  WORLD_CHANGE = "change"  # ranks come or go
  NO_BETTER = "no better"  # evaluations
  TIME = "time"  # of --max_train_minutes


class StopSignals:
  """Notes signals that ask to stop; a second one ends the process at once."""

  def __init__(self):
    self.received: str | None = None  # the signal's name
    # All ranks have saved and are ending: late signals (each rank gets its own)
    # change nothing, also after the block.
    self.settled = False
    self._when = 0.0
    self._before: dict = {}

  def since(self) -> float:
    return time.monotonic() - self._when if self.received else 0.0

  def __enter__(self) -> "StopSignals":
    if threading.current_thread() is threading.main_thread():
      for number in STOP_SIGNALS:
        self._before[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *_) -> None:
    for number, handler in self._before.items():
      signal.signal(number, signal.SIG_IGN if self.settled else handler)

  def _note(self, number, _) -> None:
    self.received = signal.Signals(number).name
    self._when = time.monotonic()
    for other in STOP_SIGNALS:  # the next one ends the process
      signal.signal(other, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal sends several
    tell(f"{self.received}: saving after this micro-batch, then stopping")


class Votes(NamedTuple):
  """Sums over ranks in one micro-batch, as the floats of `StopVote.counts`."""

  signaled: float = 0.0  # ranks with a signal
  overdue: float = 0.0  # ranks with one for GRACE_SECONDS
  changed: float = 0.0  # ranks that know of hosts that came or went
  save: float = 0.0  # ranks that find a checkpoint due
  lap: float = 0.0  # rank 0's seconds since the last update


class StopVote:
  """All-reduces stop requests: all ranks act in the same micro-batch."""

  # After it an elastic run forms a world without the ranks that have a signal.
  GRACE_SECONDS = 3.0

  def __init__(self, comm, name: str = "stop_vote"):
    self._comm = comm
    none = np.array(Votes(), np.float32)
    self._own = tf.placeholder_with_default(none, none.shape, f"own_{name}")
    self.counts = comm.allreduce(self._own, name=name)

  def lap(self) -> tf.Tensor:
    """Rank 0's seconds since the last update, float32."""
    return self.counts[Votes._fields.index("lap")]

  def feed(
    self, signals: StopSignals | None, save: bool = False, seconds: float = 0.0
  ) -> dict:
    """This rank's part of `counts`; feed it whenever these are fetched."""
    # Without a feed TensorFlow may take the sum for a constant: some ranks
    # would then wait for others that do not take part.
    if signals is None:
      return {self._own: Votes()}
    overdue = signals.since() > self.GRACE_SECONDS
    signaled = signals.received is not None
    changed = self._comm.hosts_changed()
    return {self._own: Votes(signaled, overdue, changed, save, seconds)}

  def verdict(self, counts) -> Stop | None:
    """What all ranks do: end, leave for another world, or continue."""
    votes = Votes(*counts)
    # The other ranks of an elastic run continue in a world without those that
    # have a signal: only if all have one does the run end.
    is_everywhere = votes.signaled == self._comm.size
    if is_everywhere or (votes.signaled and not self._comm.elastic):
      return Stop.SIGNAL
    return Stop.WORLD_CHANGE if votes.overdue or votes.changed else None


class Budget:
  """The time that a run may train, --max_train_minutes, by rank 0's clock.

  It counts from the end of the first update of each start, which compiles, with
  evaluations and saves.
  """

  # All ranks add up the same seconds, which the votes have all-reduced: so they
  # all find it over after the same update.

  def __init__(self, minutes: float, first: float = 0.0, last: float = 1.0):
    """From share `first` of the time to `last`."""
    self._began = 60.0 * minutes * first
    self.seconds = 60.0 * minutes * last
    self.passed = 0.0  # up to the last update
    self._last: float | None = None  # this rank's clock then
    self._laps = (0.0, 0.0)

  def lap(self) -> float:
    """Seconds since the last update of this start, if there was one."""
    return 0.0 if self._last is None else time.monotonic() - self._last

  def after_update(self, seconds: float) -> None:
    """`seconds` are its lap, as all ranks have it."""
    self.passed += seconds
    self._last = time.monotonic() - self.lap() + seconds
    self._laps = (self._laps[1], seconds)

  def share(self) -> float:
    """Share of this stage's time that has passed, also during an update."""
    passed = self.passed + self.lap() - self._began
    return float(np.clip(passed / (self.seconds - self._began), 0.0, 1.0))

  def is_over(self) -> bool:
    """Whether there is no time for another update like the last ones."""
    return self.passed + min(self._laps) >= self.seconds


class Interrupted(Exception):
  """All ranks left an evaluation in the same batch, by `StopVote.verdict`."""

  def __init__(self, stop: Stop):
    super().__init__(f"the ranks' verdict is {stop}")
    self.stop = stop


class Watchdog(contextlib.AbstractContextManager):
  """Ends this rank if one hangs; Horovod notices only unreachable ranks."""

  SECONDS = 45.0  # or LONGEST times the longest wait so far
  LONGEST = 20.0

  def __init__(self, comm):
    # Paused until `resume`, and always if there are no other ranks.
    self._comm = comm
    self._waited = self._longest = 0.0
    self._watching = False
    self._thread: threading.Thread | None = None
    self._ended = threading.Event()

  def __exit__(self, *_) -> None:
    self.pause()
    self._ended.set()

  def heartbeat(self) -> None:
    if self._watching:
      self._longest = max(self._longest, self._waited)
    self._waited = 0.0

  def resume(self) -> None:
    """A heartbeat; watches from now on: the first update has compiled."""
    self.heartbeat()
    self._watching = True
    if self._thread is None and self._comm.size > 1:
      self._thread = threading.Thread(
        target=self._watch, args=(threading.get_ident(),), daemon=True
      )
      self._thread.start()

  def pause(self) -> None:
    self._watching = False

  def _watch(self, main: int) -> None:
    # Counts ticks: a clock continues while the machine is suspended.
    while not self._ended.wait(_TICK):
      self._waited += _TICK
      limit = max(self.SECONDS, self.LONGEST * self._longest)
      if self._watching and self._waited > limit:
        self._end(sys._current_frames()[main])

  def _end(self, frame) -> None:
    tell(
      f"{os.path.basename(sys.argv[0])}: error: no progress for "
      f"{self._waited:.0f} s, and before no step took more than "
      f"{self._longest:.0f} s: a rank hangs. This one is in "
      f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno}). "
      "The same command resumes from the newest checkpoint"
    )
    os._exit(1)  # the main thread may be where no exception reaches it
