"""Runs tasks in other processes: all cores, in order, and no orphans."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

from common import console
from common.processes import end_with

stopping = threading.Event()  # set: a task should end at its next chunk


def available_cores() -> int:
  """The number of cores that this process may use."""
  return len(os.sched_getaffinity(0))


def _prepare_process(parent: int) -> None:
  # A terminal's Ctrl-C reaches all processes; the parent ends its children.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  end_with(parent, signal.SIGKILL)


class Pool(contextlib.AbstractContextManager):
  """Runs tasks in other processes; one worker is a thread of this one."""

  def __init__(self, num_workers: int):
    self._error: BaseException | None = None
    self._is_thread = num_workers == 1
    self._unfinished: set[concurrent.futures.Future] = set()
    self._pool: concurrent.futures.Executor
    if self._is_thread:
      self._pool = concurrent.futures.ThreadPoolExecutor(1)
      return
    # Not fork: the caller may have threads, which fork breaks.
    spawn = multiprocessing.get_context("spawn")
    self._pool = concurrent.futures.ProcessPoolExecutor(
      num_workers, spawn, _prepare_process, (os.getpid(),)
    )

  def __exit__(self, error, *_) -> None:
    """Waits for running tasks; after an error ends the processes instead."""
    if error and self._is_thread:
      stopping.set()
      if any(future.running() for future in set(self._unfinished)):
        console.tell("waiting for the end of what one worker is doing ...")
    elif error:
      # Their files appear whole or not at all, so they may end at any time.
      for process in multiprocessing.active_children():
        process.terminate()
    self._pool.shutdown(cancel_futures=True)
    stopping.clear()

  def start(self, function: Callable, tasks: Iterable) -> None:
    """Begins function(task) for each task; results are dropped."""
    with _explaining():
      for task in tasks:
        future = self._pool.submit(function, task)
        self._unfinished.add(future)
        future.add_done_callback(self._note_end)

  def map(self, function: Callable, *arguments: Iterable) -> Iterator:
    """As the built-in `map`."""
    with _explaining():
      yield from self._pool.map(function, *arguments)

  def _note_end(self, future: concurrent.futures.Future) -> None:
    # In a thread of the executor; `raise_error` raises it in the caller's.
    self._unfinished.discard(future)
    if not future.cancelled() and self._error is None:
      self._error = future.exception()

  def raise_error(self) -> None:
    """Raises the first error of a task; OSError if a process died."""
    with _explaining():
      if self._error:
        raise self._error


@contextlib.contextmanager
def _explaining() -> Iterator[None]:
  try:
    yield
  except concurrent.futures.BrokenExecutor as e:
    raise OSError(
      "a worker process died, most likely for lack of memory: give fewer "
      "--num_workers"
    ) from e
