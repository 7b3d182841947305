"""The folder in which a data set is made, by any workers that come.

It has a folder 0 for the first start of work, and 1 for the one after it, if
that has another plan (text, settings, tokenizer). A worker joins the newest
start of its own plan, or begins one. So a stop leaves its work for the next
start, and nobody waits for a worker that has not come.
"""

import contextlib
import os
import shutil
import tempfile
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from common import console, errors, files, json_files
from workers import leases

# The files and folders of a start.
_PLAN, _END, _RUNS, _WORK = "plan.json", "end.json", "runs", "work"
_ASIDE = ".tmp"  # the ending of a start that is being made
_POLL_SECONDS = 0.05
_SAY_SECONDS = 60  # between lines that report a wait

T = TypeVar("T")


class Worker(NamedTuple):
  """One of the commands that make a data set together."""

  run: str  # that all of them have
  number: int = 0
  size: int = 1  # of them
  local_size: int = 1  # of those on this machine


def alone() -> Worker:
  """The only one of its run."""
  return Worker(uuid.uuid4().hex)


class _Over(Exception):
  """Another worker has finished the data set."""


class Start:
  """A start of work, as one of its workers sees it."""

  def __init__(self, path: str, held: leases.Leases):
    self.path, self.leases = path, held
    self.folder = os.path.join(path, _WORK)
    self._watch = leases.Watch(path)
    self._next_look, self._lives = 0.0, frozenset[str]()
    self.gone = frozenset[str]()

  def has_lost_workers(self) -> bool:
    """Whether workers have left or are gone since the last call."""
    if time.monotonic() < self._next_look:
      return False
    self._next_look = time.monotonic() + min(1.0, leases.BEAT_SECONDS)
    gone, before = self.gone, self._lives
    self._lives, self.gone = self._watch.look()
    return bool(self.gone - gone or before - self._lives)

  def check(self) -> None:
    """Ends the work if another worker has finished it, or cannot go on."""
    end = _read(os.path.join(self.path, _END))
    if end.get("error"):
      raise errors.DataError(end["error"])
    if end:
      raise _Over
    if not os.path.exists(os.path.join(self.path, _PLAN)):
      raise errors.UserError(
        f"{self.path}: a start with other text or settings has deleted it; "
        "give this command another --output_file"
      )

  def finish(self, error: str = "") -> None:
    """From now on nothing is left to do for any worker."""
    json_files.write(os.path.join(self.path, _END), {"error": error})

  def leave(self, worker: Worker) -> None:
    """Deletes the work; the last worker of its run deletes all."""
    _clear(self.path)
    run = _run_folder(self.path, worker)
    with contextlib.suppress(FileNotFoundError):  # another was the last
      open(os.path.join(run, str(worker.number)), "wb").close()
      lives, _ = self._watch.look()
      if len(os.listdir(run)) >= worker.size and not lives:
        os.rename(run, run + _ASIDE)  # only one can
        _delete(self.path)
    with contextlib.suppress(OSError):  # it holds a newer start
      os.rmdir(os.path.dirname(self.path))


@contextlib.contextmanager
def work_folder(path: str, plan: dict, worker: Worker) -> Iterator[Start]:
  """Opens the newest start in `path` if it has this plan, or begins one.

  `plan`, JSON values, has all that decides the contents. When another worker
  has finished all, `Start.check` ends the block, and this is no error: it is to
  be called first, and in all waits. A DataError in the block ends the work of
  all workers; other errors leave it for the next start. UserError if
  others work there by another plan, or the folder holds other files.
  """
  place = _joined(path, plan, worker)
  try:
    with leases.heart(place) as held:
      start = Start(place, held)
      try:
        yield start
      except (OSError, errors.DataError):
        start.check()  # after the end it is no error that files are missing
        raise
  except _Over:
    pass
  except errors.DataError as e:
    with contextlib.suppress(OSError):
      start.finish(str(e))
    start.leave(worker)
    raise
  except BaseException:
    console.tell(
      f"{path} keeps what is finished: the same command resumes from it"
    )
    raise
  start.leave(worker)


def _read(path: str) -> dict:
  """What a file that workers wrote says; {} without one, or if damaged."""
  try:
    return dict(json_files.read(path))
  except (TypeError, ValueError):
    return {}


def _run_folder(place: str, worker: Worker) -> str:
  """Has a file for each worker of a run that has left."""
  return os.path.join(place, _RUNS, urllib.parse.quote(worker.run, safe=""))


def _joined(path: str, plan: dict, worker: Worker) -> str:
  """The folder of the start that a worker belongs to."""
  while True:
    os.makedirs(path, exist_ok=True)
    newest = _newest(path)
    place = os.path.join(path, str(newest))
    run, before = _run_folder(place, worker), _read(os.path.join(place, _PLAN))
    end, is_ours = _read(os.path.join(place, _END)), os.path.exists(run)
    if before == plan and (is_ours or not end):
      with contextlib.suppress(FileNotFoundError):  # it was just deleted
        if not is_ours:
          os.mkdir(run)
        return place
      continue
    if before and (not end or (is_ours and not end["error"])):
      _replace(path, place, _differences(plan, before), is_ours)
    if _begin(path, newest + 1, plan, worker):
      return os.path.join(path, str(newest + 1))


def _newest(path: str) -> int:
  """The number of the newest start, or -1."""
  newest = -1
  for name in sorted(os.listdir(path)):
    if name.isdigit():
      newest = max(newest, int(name))
    elif not name.endswith(_ASIDE):
      raise errors.UserError(
        f"{path}: holds {name}, which this command did not make: move it "
        "away, or give another --output_file"
      )
  return newest


def _replace(path: str, place: str, differences: str, is_same_run: bool):
  """Makes room for another plan, when no worker works by the one of `place`."""
  if is_same_run:
    raise errors.UserError(
      f"this worker has other text or settings than the first one of its run "
      f"({differences}): all machines must see the same files under the same "
      "names"
    )
  watch = leases.Watch(place)
  while True:
    lives, gone = watch.look()
    if lives:
      raise errors.UserError(
        f"{path}: another process works there ({min(lives)}); wait for it or "
        "end it"
      )
    unknown = watch.workers() - gone
    if not unknown:
      break
    console.tell(
      f"{path}: looking for up to a minute whether {min(unknown)} still works "
      "there"
    )
    time.sleep(leases.BEAT_SECONDS)
  console.tell(
    f"{path} held work of other text or settings ({differences}): deleted it"
  )
  # Without its plan nobody joins it, also when this is stopped half-way.
  os.unlink(os.path.join(place, _PLAN))
  _clear(place)


def _begin(path: str, number: int, plan: dict, worker: Worker) -> bool:
  """Makes a start, whole, and deletes older ones; False: another was faster."""
  place = os.path.join(path, str(number))
  with files.naming(path):
    aside = tempfile.mkdtemp(dir=path, prefix=f"{number}.", suffix=_ASIDE)
  try:
    for name in (leases.WORKERS, leases.LEASES):
      os.mkdir(os.path.join(aside, name))
    os.makedirs(_run_folder(aside, worker))
    json_files.write(os.path.join(aside, _PLAN), plan)
    os.rename(aside, place)
  except OSError:
    shutil.rmtree(aside, ignore_errors=True)
    if not os.path.exists(place):
      raise
    return False
  for name in set(os.listdir(path)) - {str(number)}:
    if int(name.partition(".")[0]) <= number:
      _delete(os.path.join(path, name))
  return True


def _differences(plan: dict, other: dict) -> str:
  """The names of what two plans have unlike."""
  names = sorted({**plan, **other})
  return ", ".join([n for n in names if plan.get(n) != other.get(n)])


def _clear(place: str) -> None:
  """Deletes the work of a start, which vanishes at once."""
  # The leases first: without them nobody makes again what has gone.
  for name in (leases.LEASES, _WORK):
    _delete(os.path.join(place, name))


def _delete(folder: str) -> None:
  """Deletes a folder; others see either all of it or nothing."""
  aside = f"{folder}.{uuid.uuid4().hex}{_ASIDE}"
  with contextlib.suppress(FileNotFoundError):
    os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def wait_until(
  ready: Callable[[], T | None], what: str, check: Callable[[], None]
) -> T:
  """Returns the first true `ready()`; meanwhile `check()` may raise."""
  start = time.monotonic()
  next_line = start + _SAY_SECONDS
  while not (answer := ready()):
    check()
    now = time.monotonic()
    if now >= next_line:
      next_line = now + _SAY_SECONDS
      console.tell(f"waiting for {what}: {console.minutes(now - start)} so far")
    time.sleep(_POLL_SECONDS)
  return answer
