"""The folder that workers share while they make something together.

It has a folder for each attempt, 0 for the first. An attempt has one plan
(text, settings, tokenizer); a command with another plan begins the next one. A
worker joins the newest attempt of its own plan, or begins one.
"""

import contextlib
import glob
import os
import shutil
import tempfile
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from common import console, errors, files, json_files, stores
from workers import leases

# The files and folders of an attempt.
_PLAN, _END, _RUNS, _WORK = "plan.json", "end.json", "runs", "work"
_ASIDE = ".tmp"  # ends the names of folders that are not whole
_POLL_SECONDS = 0.05
_REPORT_SECONDS = 60  # between lines that report a wait

T = TypeVar("T")


class Worker(NamedTuple):
  """One of the commands that work together."""

  run: str  # the same for all of them
  number: int = 0
  size: int = 1  # number of workers
  local_size: int = 1  # number of workers on this machine


class Job(NamedTuple):
  """The work that workers share."""

  folder: str  # holds the attempts
  plan: dict  # JSON values: all that decides the contents of the output
  flag: str  # names the output, for messages
  output: str = ""  # the folder of what is made, or its URL


def alone() -> Worker:
  """The only worker of its run."""
  return Worker(uuid.uuid4().hex)


class _Over(Exception):
  """Another worker has finished the job."""


class Attempt:
  """An attempt at a job, as one of its workers sees it."""

  def __init__(self, path: str, job: Job, worker_leases: leases.Leases):
    self.path, self.leases = path, worker_leases
    self.folder = os.path.join(path, _WORK)
    self._job, self._watch = job, leases.Watch(path)
    self._next_look = 0.0
    self._seen: tuple = ()  # what the last look saw of workers

  def has_lost_workers(self) -> bool:
    """Whether workers have come, left or are gone since the last look."""
    if time.monotonic() < self._next_look:
      return False
    self._next_look = time.monotonic() + min(1.0, leases.BEAT_SECONDS)
    # One may come and leave between two looks: their folder tells.
    before, changed = self._seen, self._watch.changed()
    _, gone = self._watch.look()
    self.leases, self._seen = self.leases._replace(gone=gone), (changed, gone)
    return self._seen != before

  def stop_if_over(self) -> None:
    """Ends the block of `work_folder` if another worker has ended the work."""
    end = _read_facts(self.path, _END)
    if end.get("error"):
      raise errors.DataError(end["error"])
    if end:
      raise _Over
    if not os.path.exists(os.path.join(self.path, _PLAN)):
      raise errors.UserError(
        f"{self.path}: a command with other text or settings has deleted it; "
        f"give this command another {self._job.flag}"
      )

  def finish(self, error: str = "", outputs: Iterable[str] = ()) -> None:
    """Tells all workers that nothing is left to do while `outputs` stay."""
    end = {"error": error, "outputs": list(outputs)}
    json_files.write(os.path.join(self.path, _END), end)

  def leave(self, worker: Worker) -> None:
    """Deletes the work; the last worker of all runs deletes the attempt."""
    _delete_work(self.path)
    # Plan and end stay until the last worker of each run has come: a late one
    # must see that nothing is left to do.
    run = _run_folder(self.path, worker)
    with contextlib.suppress(FileNotFoundError):  # another was the last
      open(os.path.join(run, str(worker.number)), "wb").close()
      alive, _ = self._watch.look()
      if len(os.listdir(run)) >= worker.size:
        os.rename(run, run + _ASIDE)  # works for one of them only
        shutil.rmtree(run + _ASIDE)
        runs = glob.escape(os.path.dirname(run))
        if not (alive or glob.glob(f"{runs}/*/*")):  # or another run waits
          _delete(self.path)
    with contextlib.suppress(OSError):  # it holds a newer attempt
      os.rmdir(os.path.dirname(self.path))


@contextlib.contextmanager
def work_folder(job: Job, worker: Worker) -> Iterator[Attempt]:
  """Opens the newest attempt of the job's plan, or begins one.

  A DataError in the block ends the work of all workers; other errors leave it
  for the next command. UserError if others work in the folder by another plan,
  or if it holds other files.
  """
  path = _join_attempt(job, worker)
  # A worker shows that it is alive before it looks at the work.
  try:
    with leases.heart(path) as worker_leases:
      attempt = Attempt(path, job, worker_leases)
      try:
        yield attempt
      except (OSError, errors.DataError):
        # Files that are missing after the end are no error.
        attempt.stop_if_over()
        raise
  except _Over:
    pass
  except errors.DataError as e:
    with contextlib.suppress(OSError):
      attempt.finish(str(e))
    attempt.leave(worker)
    raise
  except BaseException:
    console.tell(
      f"{job.folder} keeps what is finished: the same command resumes from it"
    )
    raise
  attempt.leave(worker)


def _read_facts(path: str, name: str) -> dict:
  """The JSON of an attempt's file; {} if it is missing or damaged."""
  try:
    return dict(json_files.read(os.path.join(path, name)))
  except (TypeError, ValueError):
    return {}


def _run_folder(path: str, worker: Worker) -> str:
  """A run's folder, with a file for each of its workers that has left."""
  return os.path.join(path, _RUNS, urllib.parse.quote(worker.run, safe=""))


def _join_attempt(job: Job, worker: Worker) -> str:
  """The folder of the attempt that a worker belongs to."""
  while True:
    newest = _newest_attempt(job)
    path = os.path.join(job.folder, str(newest))
    run = _run_folder(path, worker)
    plan, end = _read_facts(path, _PLAN), _read_facts(path, _END)
    knows_run = os.path.exists(run)
    # A worker that comes late belongs to its run, even when that has ended.
    is_late = knows_run and _still_counts(end, job, run, worker)
    if plan == job.plan and (is_late or not end):
      with contextlib.suppress(FileNotFoundError):  # it was just deleted
        if not knows_run:
          with contextlib.suppress(FileExistsError):  # by another of the run
            os.mkdir(run)
        return path
      continue
    if plan and not end:
      with contextlib.suppress(FileNotFoundError):  # another was faster
        _abandon(path, plan, job, knows_run)
    if _begin(newest + 1, job, worker):
      return os.path.join(job.folder, str(newest + 1))


def _still_counts(end: dict, job: Job, run: str, worker: Worker) -> bool:
  """Whether the end of an attempt is the end for this worker of it, too."""
  # Who has seen the error and comes again has most likely done what it says.
  if end.get("error"):
    return not os.path.exists(os.path.join(run, str(worker.number)))
  # The same job may start the work again when its files have been moved.
  for name in end.get("outputs", ()):
    if not stores.at(os.path.join(job.output, name)).is_file():
      return False
  return True


def _newest_attempt(job: Job) -> int:
  """The number of the newest attempt, or -1; UserError for other files."""
  os.makedirs(job.folder, exist_ok=True)
  newest = -1
  for name in sorted(os.listdir(job.folder)):
    if name.isdigit():
      newest = max(newest, int(name))
    # Whatever else is there may be a user's: nothing of it is deleted.
    elif not name.endswith(_ASIDE):
      raise errors.UserError(
        f"{job.folder}: holds {name}, which this command did not make: move "
        f"it away, or give another {job.flag}"
      )
  return newest


def _abandon(path: str, plan: dict, job: Job, is_same_run: bool) -> None:
  """Deletes the work of an attempt with another plan, if nobody works there."""
  folder, keys = job.folder, []
  for key in sorted({**plan, **job.plan}):
    if plan.get(key) != job.plan.get(key):
      keys.append(key)
  differences = ", ".join(keys)
  # A worker on another machine shows only by its beats, so this may take as
  # long as it takes to find that it is lost.
  watch = leases.Watch(path)
  while True:
    alive, gone = watch.look()
    if alive and is_same_run:
      raise errors.UserError(
        f"this worker has other text or settings than the first one of its run "
        f"({differences}): all machines must see the same files under the same "
        "names"
      )
    if alive:
      raise errors.UserError(
        f"{folder}: another process works there ({min(alive)}); wait for it or "
        "end it"
      )
    unknown = watch.workers() - gone
    if not unknown:
      break
    console.tell(
      f"{folder}: looking for up to a minute whether {min(unknown)} still "
      "works there"
    )
    time.sleep(leases.BEAT_SECONDS)
  console.tell(
    f"{folder} held work of other text or settings ({differences}): deleted it"
  )
  # Without its plan nobody joins it, also when this is stopped half-way.
  os.unlink(os.path.join(path, _PLAN))
  _delete_work(path)


def _begin(number: int, job: Job, worker: Worker) -> bool:
  """Makes an attempt and deletes older ones; False: another was faster."""
  folder, path = job.folder, os.path.join(job.folder, str(number))
  with files.naming(folder):
    aside = tempfile.mkdtemp(dir=folder, prefix=f"{number}.", suffix=_ASIDE)
  # One rename makes the attempt appear whole, for one worker only.
  try:
    for name in (leases.WORKERS, leases.LEASES):
      os.mkdir(os.path.join(aside, name))
    os.makedirs(_run_folder(aside, worker))
    json_files.write(os.path.join(aside, _PLAN), job.plan)
    os.rename(aside, path)
  except OSError:
    shutil.rmtree(aside, ignore_errors=True)
    if not os.path.exists(path):
      raise
    return False
  # Older attempts, and what killed workers left of new ones.
  for name in set(os.listdir(folder)) - {str(number)}:
    if int(name.partition(".")[0]) <= number:
      _delete(os.path.join(folder, name))
  return True


def _delete_work(path: str) -> None:
  """Deletes the work of an attempt, and keeps its plan and its workers."""
  # The leases first: without them nobody makes again what has gone.
  for name in (leases.LEASES, _WORK):
    _delete(os.path.join(path, name))


def _delete(folder: str) -> None:
  """Deletes a folder; others see either all of it or nothing."""
  aside = f"{folder}.{uuid.uuid4().hex}{_ASIDE}"
  with contextlib.suppress(FileNotFoundError):
    os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def wait_until(
  ready: Callable[[], T | None], what: str, meanwhile: Callable[[], Any]
) -> T:
  """The first true `ready()`; meanwhile(), between the calls, may raise."""
  start = time.monotonic()
  next_line = start + _REPORT_SECONDS
  while not (answer := ready()):
    meanwhile()
    now = time.monotonic()
    if now >= next_line:
      next_line = now + _REPORT_SECONDS
      console.tell(f"waiting for {what}: {console.minutes(now - start)} so far")
    time.sleep(_POLL_SECONDS)
  return answer
