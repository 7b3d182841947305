"""The engine: what any number of workers make together, in phases of tasks.

The workers see one folder (work_dir.py). A task is leased to one of them
(leases.py), which does it in a process of its own (pool.py). The steps of a
job, for create_pretraining_data.py and tools.prepare_corpus alike:

  Phase    tasks that need all of an earlier step; each piece of the input
           gives numbered chunks
  once     one worker joins what the others made, in order
  publish  one worker moves the files to where they belong

A file appears when it is whole, so every step resumes from the files of a
stopped attempt.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from common import errors, json_files, stores
from common.console import Progress
from workers import leases, work_dir
from workers.leases import Task
from workers.pool import Pool, available_cores, stopping

T = TypeVar("T")
Output = stores.OnDisk | stores.InStore


def states_of(paths: Iterable[str]) -> list[list]:
  """[path, bytes, what tells a change] of each file that the work reads."""
  return [[path, *stores.at(path).state()] for path in paths]


def expect_unchanged(states: list[list]) -> None:
  """Raises DataError if a file has changed since `states_of`."""
  for path, *state in states:
    if stores.at(path).state() != state:
      raise errors.DataError(
        f"{path} was changed while it was read: start again when it is whole"
      )


def make_chunks(
  output: str,
  chunk_file: Callable[[int], str],
  items: Iterable[T],
  make: Callable[[T, str], None],
) -> None:
  """Makes a chunk of each item by make(item, path), and then `output`."""
  scratch, count = os.path.dirname(output), 0
  for item in items:
    if stopping.is_set():
      raise concurrent.futures.CancelledError
    path = chunk_file(count)
    # An earlier worker's stay: no piece that takes hours is read for nothing.
    if not os.path.exists(path):
      make(item, leases.unfinished(scratch, path))
      leases.deliver(scratch, path)
    count += 1
  json_files.write(output, {"chunks": count})


class SharedWork(NamedTuple):
  """The work as one of its workers sees it."""

  attempt: work_dir.Attempt
  pool: Pool

  def folder(self, name: str) -> str:
    """A folder of the work, which holds the files of a phase."""
    path = os.path.join(self.attempt.folder, name)
    os.makedirs(path, exist_ok=True)
    return path

  def keep_going(self) -> bool:
    """To be called in all waits: raises errors; whether workers were lost."""
    self.attempt.stop_if_over()
    self.pool.raise_error()
    return self.attempt.has_lost_workers()

  def once(
    self, task: Task, what: str, meanwhile: Callable[[], Any] | None = None
  ) -> Any:
    """One worker does the task and gets its result; all wait for its file."""
    result = None

    def is_done() -> bool:
      nonlocal result
      result = leases.do(self.attempt.leases, task)
      return os.path.exists(task.done_file)

    work_dir.wait_until(is_done, what, meanwhile or self.keep_going)
    return result

  def await_publishing(self) -> None:
    """Waits until this worker is the one that moves the files."""
    take = lambda: self.attempt.leases.take("publish")
    what = "another worker to move the files"
    work_dir.wait_until(take, what, self.keep_going)
    self.attempt.stop_if_over()  # the lease of a worker that has moved them

  def publish(
    self, moves: Iterable[tuple[str, Output]], stale: Iterable[Output] = ()
  ) -> None:
    """Moves files to where they belong, and finishes the work.

    The last one marks the whole. While the others are moved there is none:
    it is removed first, after the files that are `stale`, which an earlier one
    may list. Files that were moved before a stop are left alone.
    """
    moves = list(moves)
    for output in stale:
      output.remove()
    # From here on the output is not whole until the mark is moved.
    source, mark = moves[-1]
    if os.path.exists(source):
      mark.remove()
    for source, output in moves:
      # A worker that was thought to be gone may be moving them, too.
      with contextlib.suppress(FileNotFoundError):
        output.take(source)
    names = [os.path.basename(output.name) for _, output in moves]
    self.attempt.finish(outputs=names)


class Phase:
  """Begins tasks of one kind; those of lost workers are taken over."""

  def __init__(self, tasks: Sequence[Task], work: SharedWork):
    self._tasks, self._work = tasks, work
    # A look first: tasks of workers that are gone already are free.
    work.attempt.has_lost_workers()
    self.kept = len(tasks) - self._offer()  # those done before

  def _offer(self) -> int:
    """Gives the pool all tasks that are not done; returns their number."""
    attempt, pool = self._work
    tasks = [t for t in self._tasks if not os.path.exists(t.done_file)]
    pool.start(functools.partial(leases.do, attempt.leases), tasks)
    return len(tasks)

  def wait(self, *paths: str) -> None:
    """Waits until one of the files is there."""
    is_there = lambda: any(map(os.path.exists, paths))
    work_dir.wait_until(is_there, paths[0], self.keep_going)

  def keep_going(self) -> None:
    """To be called in all waits: raises errors, takes over lost tasks."""
    if self._work.keep_going():
      self._offer()

  def finish(
    self, title: str, unit: str = "pieces", size: float = 1
  ) -> list[str]:
    """Waits for all tasks, in order, of `size` units each: their files."""
    paths: list[str] = []
    with Progress(title, len(self._tasks) * size, unit) as bar:
      for task in self._tasks:
        self.wait(task.done_file)
        paths.append(task.done_file)
        bar.at(len(paths) * size)
    return paths

  def chunks(self) -> Iterator[str]:
    """The chunks' files, in the order of the input, each when it is whole."""
    for task in self._tasks:
      for number in itertools.count():
        chunk = task.chunk_file(number)
        self.wait(chunk, task.done_file)
        # One of these may be missing, if another worker has joined and removed
        # them: then who reads it gets the error.
        if not os.path.exists(chunk):
          if number == json_files.read(task.done_file)["chunks"]:
            break
        yield chunk


def share(
  function: Callable[[SharedWork], T],
  job: work_dir.Job,
  worker: work_dir.Worker | None,
  num_workers: int | None,  # processes; None: one for each core
) -> T | None:
  """Returns function(work), or None if another worker has finished the job."""
  worker = worker or work_dir.alone()
  cores = max(1, available_cores() // worker.local_size)
  with (
    work_dir.work_folder(job, worker) as attempt,
    # One pool for all phases: its processes keep the tokenizer.
    Pool(num_workers or cores) as pool,
  ):
    attempt.stop_if_over()
    return function(SharedWork(attempt, pool))
  return None  # `attempt` has ended the block
