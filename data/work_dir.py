"""The folder in which a data set is made; a stop leaves it for the next start.

It records the plan (text, settings, tokenizer): the same command resumes with
its contents, any other deletes them. Under `horovodrun` all ranks share the
folder. Each makes its part of the files, and every file appears complete.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from common import console, errors, files, json_files

_PLAN, _LOCK = "plan.json", "lock"
_POLL_SECONDS = 0.05
_SAY_SECONDS = 60  # between lines that report a wait

T = TypeVar("T")


class Ranks(NamedTuple):
  """The processes that make a data set, as `horovodrun` numbers them."""

  rank: int = 0
  size: int = 1
  local_size: int = 1  # ranks on this machine
  run: str = ""  # identifies one start of all ranks


ALONE = Ranks()


def ranks_of_environment() -> Ranks:
  """horovodrun's ranks; without it, one rank. UserError without Gloo."""
  get = os.environ.get
  size, server = int(get("HOROVOD_SIZE", "1")), "HOROVOD_GLOO_RENDEZVOUS_"
  run = f"{get(f'{server}ADDR', '')}:{get(f'{server}PORT', '')}"
  if size > 1 and run == ":":
    raise errors.UserError(
      f"HOROVOD_SIZE={size}, but the ranks cannot find each other: start them "
      "by horovodrun with Gloo (horovodrun --gloo ...)"
    )
  rank, local_size = get("HOROVOD_RANK", "0"), get("HOROVOD_LOCAL_SIZE", "1")
  return Ranks(int(rank), size, int(local_size), run)


@contextlib.contextmanager
def work_folder(path: str, plan: dict, ranks: Ranks) -> Iterator[str]:
  """Opens `path` with the finished work of the same plan.

  `plan`, JSON values, has all that decides the contents. A DataError in the
  block deletes the folder; other errors leave it for the next start. UserError
  if another process works in it, it holds other files, or ranks' plans differ.
  """
  # By this file each rank reports that its part is finished.
  rank_file = os.path.join(path, "rank-{}.json").format
  if ranks.rank:
    _await_plan(path, plan, ranks)
    yield path
    json_files.write(rank_file(ranks.rank), {"run": ranks.run})
    return
  os.makedirs(path, exist_ok=True)
  with open(os.path.join(path, _LOCK), "wb") as lock:
    files.lock(lock, path)
    _prepare(path, plan, ranks)
    try:
      yield path
    except errors.DataError:
      # Other ranks may still write there; the plan is gone in any case.
      with contextlib.suppress(OSError):
        _remove(path)
      raise
    except BaseException:
      console.tell(
        f"{path} keeps what is finished: the same command resumes from it"
      )
      raise
    # A late rank must still find the folder, with nothing left to do.
    for rank in range(1, ranks.size):
      _wait_for_run(rank_file(rank), f"rank {rank} to finish its part", ranks)
    _remove(path)


def _read(path: str) -> dict:
  """What a file that ranks wrote says; {} without one, or if it is damaged."""
  try:
    return dict(json_files.read(path))
  except (TypeError, ValueError):
    return {}


def plan_of(path: str) -> dict | None:
  """The plan of a work folder; None if there is no readable one."""
  return _read(os.path.join(path, _PLAN)).get("plan")


def _wait_for_run(file: str, what: str, ranks: Ranks) -> None:
  """Waits until this start's ranks, not an earlier one's, wrote a file."""
  wait_until(
    lambda: _read(file).get("run") == ranks.run, f"{what} and write {file}"
  )


def _await_plan(path: str, plan: dict, ranks: Ranks) -> None:
  _wait_for_run(os.path.join(path, _PLAN), "rank 0 to begin", ranks)
  first = plan_of(path)
  if first != plan:
    raise errors.UserError(
      f"rank {ranks.rank} has other text or settings than rank 0 "
      f"({_differences(plan, first)}): all machines must see the same files "
      "under the same names"
    )


def _differences(plan: dict, other: dict | None) -> str:
  """The names of what two plans have unlike."""
  before = other or {}
  names = [
    name for name in {**plan, **before} if plan.get(name) != before.get(name)
  ]
  return ", ".join(sorted(names))


def _prepare(path: str, plan: dict, ranks: Ranks) -> None:
  """Empties a folder of another plan, and writes ours for the other ranks."""
  plan_file = os.path.join(path, _PLAN)
  contents, before = _contents(path), plan_of(path)
  if contents and not os.path.exists(plan_file):
    raise errors.UserError(
      f"{path}: holds {contents[0]}, which this command did not make: move it "
      "away, or give another --output_file"
    )
  if contents and before != plan:
    if before:
      console.tell(
        f"{path} held work of other text or settings "
        f"({_differences(plan, before)}): deleted it"
      )
    _empty(path)
  json_files.write(plan_file, {"run": ranks.run, "plan": plan})


def _contents(path: str) -> list[str]:
  return sorted(set(os.listdir(path)) - {_LOCK, _PLAN, _PLAN + ".tmp"})


def _empty(path: str) -> None:
  """Deletes the contents; what a stop leaves of them has no plan."""
  os.truncate(os.path.join(path, _PLAN), 0)
  for name in _contents(path):
    item = os.path.join(path, name)
    shutil.rmtree(item) if os.path.isdir(item) else os.unlink(item)


def _remove(path: str) -> None:
  _empty(path)  # the plan stays to the end: it marks the folder as ours
  shutil.rmtree(path)


def wait_until(
  ready: Callable[[], T | None],
  what: str,
  check: Callable[[], None] = lambda: None,
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
