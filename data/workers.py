"""Runs tasks in other processes: all cores, in order, and no orphans."""

import concurrent.futures
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator


def available_cores() -> int:
  """The number of cores that this process may use."""
  return len(os.sched_getaffinity(0))


def _prepare_worker() -> None:
  """Makes a worker end when its parent has ended, in any way."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C

  def watch(parent):
    parent.join()
    os._exit(1)

  parent = multiprocessing.parent_process()
  threading.Thread(target=watch, args=[parent], daemon=True).start()


class Workers:
  """Runs tasks in other processes; one worker is a thread of this one."""

  def __init__(self, num_workers: int):
    self._pool: concurrent.futures.Executor
    if num_workers == 1:
      self._pool = concurrent.futures.ThreadPoolExecutor(1)
    else:
      self._pool = concurrent.futures.ProcessPoolExecutor(
        num_workers,
        # Not fork: the caller may have threads, which fork breaks.
        multiprocessing.get_context("spawn"),
        _prepare_worker,
      )
    self._error: BaseException | None = None

  def __enter__(self) -> "Workers":
    return self

  def __exit__(self, *_) -> None:
    """Waits for running tasks and drops those that have not started."""
    self._pool.shutdown(cancel_futures=True)

  def start(self, function: Callable, tasks: Iterable) -> None:
    for task in tasks:
      self._pool.submit(function, task).add_done_callback(self._note)

  def map(self, function: Callable, *arguments: Iterable) -> Iterator:
    return self._pool.map(function, *arguments)

  def _note(self, future) -> None:
    if not future.cancelled() and self._error is None:
      self._error = future.exception()

  def check(self) -> None:
    """Raises what a task raised; OSError if a process died."""
    if isinstance(self._error, concurrent.futures.BrokenExecutor):
      raise OSError(
        "a worker process died, most likely for lack of memory: give fewer "
        "--num_workers"
      ) from self._error
    if self._error:
      raise self._error
