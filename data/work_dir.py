"""The folder of a data set that is being made: kept when the work is stopped.

It says for which plan (text, settings, tokenizer) its contents are, so that the
same command goes on with them and any other starts anew. Under `horovodrun`
all ranks work in the one folder, which their machines must share: each makes
its part of the files, and a file that is there is whole.
"""

import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from common import console, errors, json_files

_PLAN, _LOCK = "plan.json", "lock"
POLL_SECONDS = 0.05
_SAY_SECONDS = 60  # between lines that say what is waited for


class Ranks(NamedTuple):
  """Who works on it: as `horovodrun` tells each process."""

  rank: int = 0
  size: int = 1
  local_size: int = 1  # ranks on this machine
  run: str = ""  # tells one start of all ranks from another

  def mine(self, items: int) -> range:
    """This rank's share of numbered items."""
    return range(self.rank, items, self.size)


ALONE = Ranks()


def ranks_of_environment() -> Ranks:
  """What horovodrun set; a world of one without it.

  Raises:
    UserError: there are several ranks, but not by horovodrun with Gloo.
  """
  value = lambda name, default: os.environ.get("HOROVOD_" + name, default)
  size = int(value("SIZE", 1))
  run = (
    f"{value('GLOO_RENDEZVOUS_ADDR', '')}:{value('GLOO_RENDEZVOUS_PORT', '')}"
  )
  if size > 1 and run == ":":
    raise errors.UserError(
      f"HOROVOD_SIZE={size}, but the ranks cannot know each other: start them "
      "by horovodrun with Gloo (horovodrun --gloo ...)"
    )
  return Ranks(int(value("RANK", 0)), size, int(value("LOCAL_SIZE", 1)), run)


@contextlib.contextmanager
def work_folder(path: str, plan: dict, ranks: Ranks) -> Iterator[str]:
  """Opens the folder of some work, with what is left of the same work in it.

  Args:
    path: of the folder.
    plan: what decides its contents; JSON values.
    ranks: who works in it.

  Raises:
    UserError: another process works in it, it holds what is not ours, or this
      rank's plan is not rank 0's. Whatever is raised in the block: after a
      DataError the folder goes, after anything else it stays for the next
      start.
  """
  if ranks.rank:
    _await_plan(path, plan, ranks)
    yield path
    json_files.write(_rank_file(path, ranks.rank), {"run": ranks.run})
    return
  os.makedirs(path, exist_ok=True)
  with _locked(path):
    _prepare(path, plan, ranks)
    try:
      yield path
    except errors.DataError:
      _remove(path)
      raise
    except BaseException:
      print(
        f"what is finished is kept in {path}: the same command goes on there",
        file=sys.stderr,
        flush=True,
      )
      raise
    # One that comes late must still find that there is nothing to do.
    for rank in range(1, ranks.size):
      file = _rank_file(path, rank)
      wait_until(
        lambda file=file: _is_told(file, ranks),
        f"rank {rank} to say by {file} that its part is done",
      )
    _remove(path)


def _rank_file(path: str, rank: int) -> str:
  """Tells that a rank has done its part."""
  return os.path.join(path, f"rank-{rank}.json")


def _contents(path: str) -> list[str]:
  """What is in the folder beside the plan, which says that it is ours."""
  return sorted(set(os.listdir(path)) - {_LOCK, _PLAN, _PLAN + ".tmp"})


def _empty(path: str) -> None:
  """Deletes the contents; stopped halfway, what is left is of no work."""
  json_files.write(os.path.join(path, _PLAN), {"run": "", "plan": None})
  for name in _contents(path):
    item = os.path.join(path, name)
    shutil.rmtree(item) if os.path.isdir(item) else os.unlink(item)


def _remove(path: str) -> None:
  _empty(path)  # all but the plan, so that the folder stays ours
  shutil.rmtree(path)


def plan_of(path: str) -> dict | None:
  """The plan of the work in a folder; None if there is none to be read."""
  file = os.path.join(path, _PLAN)
  if not os.path.exists(file):
    return None
  with contextlib.suppress(errors.DataError):  # damaged: as without
    found = json_files.read(file)
    return found.get("plan") if isinstance(found, dict) else None
  return None


def _is_told(file: str, ranks: Ranks) -> bool:
  """Whether a file is there and of this start of the ranks."""
  return os.path.exists(file) and json_files.read(file)["run"] == ranks.run


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
  with open(os.path.join(path, _LOCK), "wb") as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
      raise errors.UserError(
        f"{path}: another process is at work there; wait for it or end it"
      ) from e
    yield


def _differences(plan: dict, other: dict) -> str:
  names = [k for k in {**plan, **other} if plan.get(k) != other.get(k)]
  return ", ".join(sorted(names))


def _prepare(path: str, plan: dict, ranks: Ranks) -> None:
  """Empties the folder if it is of another plan, and tells the other ranks."""
  plan_file = os.path.join(path, _PLAN)
  there = _contents(path)
  before = plan_of(path)
  if there and not os.path.exists(plan_file):
    raise errors.UserError(
      f"{path}: holds {there[0]}, which is no work of this command: move it "
      "away, or give another --output_file"
    )
  if there and before != plan:
    if before:
      print(
        f"{path} is of other work ({_differences(plan, before)}): started anew",
        file=sys.stderr,
        flush=True,
      )
    _empty(path)
  json_files.write(plan_file, {"run": ranks.run, "plan": plan})


def _await_plan(path: str, plan: dict, ranks: Ranks) -> None:
  plan_file = os.path.join(path, _PLAN)
  wait_until(lambda: _is_told(plan_file, ranks), f"rank 0 to write {plan_file}")
  first = json_files.read(plan_file)["plan"]
  if first != plan:
    raise errors.UserError(
      f"rank {ranks.rank} was started for other work than rank 0 "
      f"({_differences(plan, first)}): all machines must see the same files "
      "under the same names"
    )


def wait_until(
  ready: Callable[[], bool],
  what: str,
  check: Callable[[], None] = lambda: None,
) -> None:
  """Waits for what another process does.

  Args:
    ready: whether it is done.
    what: is waited for; a line a minute on stderr says so.
    check: called now and then; raises if it will never be.
  """
  start = time.monotonic()
  next_line = start + _SAY_SECONDS
  while not ready():
    check()
    if (now := time.monotonic()) >= next_line:
      next_line = now + _SAY_SECONDS
      print(
        f"waiting for {what}: {console.minutes(now - start)} so far",
        file=sys.stderr,
        flush=True,
      )
    time.sleep(POLL_SECONDS)
