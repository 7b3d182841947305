"""Work that any number of workers share, in phases of tasks.

The workers see one folder (work_dir.py), where each task is leased to one of
them (leases.py), and does it in a process of its own (workers.py).
"""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from common import errors, files, stores
from workers import leases, work_dir
from workers.pool import Pool, available_cores

T = TypeVar("T")


class Inputs(NamedTuple):
  """Files that the work reads, as they were when it began."""

  states: list[list]  # [path, bytes, what tells a change]

  @classmethod
  def of(cls, paths: Iterable[str]) -> "Inputs":
    return cls([_state(path) for path in paths])

  def expect_unchanged(self) -> None:
    """Raises DataError if a file has changed."""
    for state in self.states:
      if _state(state[0]) != state:
        raise errors.DataError(
          f"{state[0]} was changed while it was read: start again when it is "
          "whole"
        )


def _state(path: str) -> list:
  return [path, *stores.at(path).state()]


class SharedWork(NamedTuple):
  """The work as one of its workers sees it."""

  start: work_dir.Start
  pool: Pool

  def folder(self, name: str) -> str:
    """A folder of the work, which holds the files of a phase."""
    path = os.path.join(self.start.folder, name)
    os.makedirs(path, exist_ok=True)
    return path

  def phase(
    self, function: Callable, tasks: Sequence[leases.Task] = ()
  ) -> "Phase":
    """Begins function(task, folder of its lease) for all tasks."""
    return Phase(function, tasks, self)

  def once(
    self,
    name: str,
    make: Callable[[str], None],
    read: Callable[[], T | None],
    what: str,
    phase: "Phase | None" = None,
  ) -> T:
    """Returns `read()`, after one worker called make(folder of its lease).

    Meanwhile the tasks of `phase` go on.
    """

    def result() -> T | None:
      scratch = self._take(name)
      if scratch and not read():
        with files.naming(scratch):
          make(scratch)
      return read()

    check = (phase or self.phase(leases.do)).check
    return work_dir.wait_until(result, what, check)

  def await_publishing(self) -> None:
    """Waits until this worker is to move the files to their places."""
    take = functools.partial(self._take, "publish")
    what = "the files to be moved to their places"
    work_dir.wait_until(take, what, self.phase(leases.do).check)

  def _take(self, name: str) -> str | None:
    return self.start.leases.take(name, self.start.gone)


class Phase:
  """Tasks of one kind; those of lost workers go on."""

  def __init__(
    self, function: Callable, tasks: Sequence[leases.Task], work: SharedWork
  ):
    self._function, self._tasks, self._work = function, tasks, work
    work.start.has_lost_workers()
    self.kept = len(tasks) - self._offer()  # those done before

  def _offer(self) -> int:
    """Has the pool take free tasks in turn; returns how many are not done."""
    start, pool = self._work
    take_and_do = functools.partial(
      leases.do, self._function, start.leases, start.gone
    )
    tasks = [t for t in self._tasks if not os.path.exists(t.done_file)]
    pool.start(take_and_do, tasks)
    return len(tasks)

  def wait(self, *paths: str) -> None:
    """Waits until one of the files is there."""
    work_dir.wait_until(
      lambda: any(map(os.path.exists, paths)), paths[0], self.check
    )

  def check(self) -> None:
    """What to do while waiting: errors end it, tasks of lost workers go on."""
    start, pool = self._work
    start.check()
    pool.check()
    if start.has_lost_workers():
      self._offer()


def share(
  function: Callable[[SharedWork], T],
  path: str,
  plan: dict,
  worker: work_dir.Worker,
  num_workers: int | None,
) -> T | None:
  """Returns function(work), or None if another worker has finished the work.

  The work is in the folder `path`, as `work_dir.work_folder` opens it.
  `num_workers` processes do the tasks; None: one for each core.
  """
  cores = max(1, available_cores() // worker.local_size)
  with (
    work_dir.work_folder(path, plan, worker) as start,
    # One pool for all phases: its processes keep the tokenizer.
    Pool(num_workers or cores) as pool,
  ):
    start.check()
    return function(SharedWork(start, pool))
  return None  # `start` has ended the block
