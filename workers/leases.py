"""Leases: each task on a shared folder goes to one of its workers.

A lease is a folder, NAME.0. One rename makes it appear together with the name
of its owner, so only one worker gets it. The owner keeps its unfinished files
there. When the owner is gone, the next lease is NAME.1, and so on. Leases are
never deleted, so a stale worker cannot remove a newer one. A suspended owner
continues in its own folder; both owners write identical files.

A worker is alive while its file changes. Each watcher counts its own looks, so
no two clocks are compared. On one machine the end of a worker shows at once, by
the lock on its file.
"""

import contextlib
import fcntl
import itertools
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from common import files

BEAT_SECONDS = 5.0
# A worker is gone after so many looks, a beat apart, at the same file.
LOST_BEATS = 12
_OWNER = "owner"
WORKERS, LEASES = "workers", "leases"  # the folders
# The boot's id tells containers of one machine apart from other machines.
with open("/proc/sys/kernel/random/boot_id") as _boot_id:
  _MACHINE = f"{os.uname().nodename} {_boot_id.read().strip()}"


class Task(NamedTuple):
  """Work for one worker, by functions that processes share."""

  done_file: str  # the task is done when it is there
  # Writes that file to a path in the folder of a lease, others beside it.
  make: Callable[[str], Any]
  # Of a piece of the input: number -> the file that makes a chunk whole.
  chunk_file: Callable[[int], str] = str


class Leases(NamedTuple):
  """The leases of a folder, as one worker takes them; processes share it."""

  folder: str
  worker: str
  # Workers that have ended, beside those whose file is gone.
  gone: frozenset[str] = frozenset()

  def take(self, name: str) -> str | None:
    """The folder of a new lease; None if a worker that is alive has it."""
    # The first lease whose owner is not alive, and so no longer works.
    for number in itertools.count():
      lease = os.path.join(self.folder, LEASES, f"{name}.{number}")
      if not os.path.isdir(lease):
        break
      # A power cut empties files: then nobody is named who could be alive.
      owner = _owner_of(lease).partition(" ")[0]
      beats = os.path.join(self.folder, WORKERS, owner)
      if owner and owner not in self.gone and os.path.exists(beats):
        return None
    owner = f"{self.worker} {uuid.uuid4().hex}"
    aside = tempfile.mkdtemp(dir=os.path.dirname(lease), prefix="new-")
    with files.naming(aside), open(os.path.join(aside, _OWNER), "w") as f:
      f.write(owner)
    # A full folder is never replaced. Whether it worked is read from the disk:
    # on a network the answer to a rename that worked may be lost.
    with contextlib.suppress(OSError):
      os.rename(aside, lease)
    if _owner_of(lease) == owner:
      return lease
    shutil.rmtree(aside, ignore_errors=True)
    return None


def _owner_of(lease: str) -> str:
  """The worker that has a lease, and its claim; "": nobody."""
  try:
    with open(os.path.join(lease, _OWNER)) as f:
      return f.read()
  except FileNotFoundError:
    return ""


def do(leases: Leases, task: Task) -> Any:
  """The result of `task.make`, if the task is still free.

  What it leaves in the folder of its lease is delivered beside `done_file`.
  """
  if os.path.exists(task.done_file):
    return None
  scratch = leases.take(os.path.basename(task.done_file))
  # The last owner may have finished between the two looks.
  if not scratch or os.path.exists(task.done_file):
    return None
  try:
    with files.naming(scratch):
      result = task.make(unfinished(scratch, task.done_file))
      if not os.path.exists(task.done_file):
        deliver(scratch, task.done_file)
        return result
  except OSError:
    if not os.path.exists(task.done_file):
      raise
  # While this worker was suspended another did it, and may have gone on.
  return None


def unfinished(scratch: str, path: str) -> str:
  """The path, in a lease, of a file that will be delivered to `path`."""
  return os.path.join(scratch, os.path.basename(path))


def deliver(scratch: str, done_file: str) -> None:
  """Moves what is in a lease to the folder of `done_file`, which goes last."""
  folder, last = os.path.split(done_file)
  # The lease first: when all of the work is deleted, no folder is made again.
  names = sorted({*os.listdir(scratch)} - {_OWNER, last})
  os.makedirs(folder, exist_ok=True)
  for name in (*names, last):  # none has its name before all are on the disk
    files.sync(os.path.join(scratch, name))
  for name in (*names, last):
    os.replace(os.path.join(scratch, name), os.path.join(folder, name))


class Watch:
  """Watches the workers of a folder."""

  def __init__(self, folder: str):
    self._folder = os.path.join(folder, WORKERS)
    self._looks, self._last_look = 0, 0.0
    # Worker -> (last beat, the look that first saw it, whether another was).
    self._seen: dict[str, tuple[int, int, bool]] = {}

  def changed(self) -> int:
    """Another number when a worker has come or left."""
    return os.stat(self._folder).st_mtime_ns

  def workers(self) -> frozenset[str]:
    """All that came and did not leave; some may have been killed."""
    return frozenset(os.listdir(self._folder))

  def look(self) -> tuple[frozenset[str], frozenset[str]]:
    """(workers that are alive, workers that are gone); in doubt in neither."""
    now = time.monotonic()
    # Looks, not seconds: while this process is stopped, nobody is lost.
    if now - self._last_look >= BEAT_SECONDS:
      self._looks, self._last_look = self._looks + 1, now
    alive, gone = set[str](), set[str]()
    for name in self.workers():
      state = self._is_alive(name)
      if state is not None:
        (alive if state else gone).add(name)
    return frozenset(alive), frozenset(gone)

  def _is_alive(self, name: str) -> bool | None:
    """None: it is not known yet."""
    is_locked = None
    try:
      # Opening a file asks the server of a network's folder for its time.
      with open(os.path.join(self._folder, name)) as f:
        beat = os.fstat(f.fileno()).st_mtime_ns
        # The owner holds the lock of its file until its process ends.
        if f.read() == _MACHINE:
          try:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
            is_locked = False
          except BlockingIOError:
            is_locked = True
          except OSError:
            pass  # this file system has no locks, so only beats count
    except FileNotFoundError:
      return False
    last, since, changed = self._seen.get(name, (beat, self._looks, False))
    if beat != last:
      since, changed = self._looks, True
    self._seen[name] = beat, since, changed
    if self._looks - since > LOST_BEATS:
      return False
    if is_locked is not None:
      return is_locked
    # One look at a file of another machine shows no change, so no life.
    return changed or None


@contextlib.contextmanager
def heart(folder: str) -> Iterator[Leases]:
  """This process as a worker of a folder: its file changes in each beat."""
  worker = f"{os.uname().nodename}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
  path = os.path.join(folder, WORKERS, worker)
  # It is locked before others see it; without locks only its beats count.
  aside = os.path.join(folder, worker)
  ended = threading.Event()

  # A thread, so that it beats while the worker computes.
  def beat():
    while not ended.wait(BEAT_SECONDS):
      with contextlib.suppress(OSError):
        os.utime(path)

  beating = threading.Thread(target=beat, daemon=True)
  with open(aside, "w") as f:
    with files.naming(aside):
      f.write(_MACHINE)
      f.flush()
    with contextlib.suppress(OSError):
      fcntl.flock(f, fcntl.LOCK_EX)
    os.rename(aside, path)
    beating.start()
    try:
      yield Leases(folder, worker)
    finally:
      ended.set()
      beating.join()
      with contextlib.suppress(OSError):
        os.unlink(path)
