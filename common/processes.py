"""Runs other commands of this project."""

import contextlib
import ctypes
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from common.environment import ROOT
from common.errors import STOP_SIGNALS, STOPPED_STATUS, UserError

# horovodrun marks each line with its rank.
_RANK_MARK = re.compile(r"^\[\d+\]<std(?:out|err)>:")
# It is missing where Horovod was not built.
HOROVODRUN = os.path.join(os.path.dirname(sys.executable), "horovodrun")


def horovodrun(ranks: int, command: list[str]) -> list[str]:
  """The command on several ranks of this machine; as it is on one."""
  if ranks == 1:
    return command
  return [os.path.relpath(HOROVODRUN), "-np", str(ranks), *command]


def started() -> tuple[int, int]:
  """This process' rank and their number, as horovodrun says; else 0 and 1."""
  rank, size = os.environ.get("HOROVOD_RANK"), os.environ.get("HOROVOD_SIZE")
  return int(rank or 0), int(size or 1)


def end_with(parent: int, number: int) -> None:
  """Makes Linux send this process `number` when its parent ends, however."""
  ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
  if os.getppid() != parent:  # it has ended already
    os._exit(1)


def start(command: list[str], **options) -> subprocess.Popen[str]:
  """Starts a command, from any folder; the end of this program stops it."""
  path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
  return subprocess.Popen(
    command, env={**os.environ, "PYTHONPATH": path}, text=True,
    errors="replace", **options,
    preexec_fn=functools.partial(end_with, os.getpid(), signal.SIGTERM),
  )  # fmt: skip


def run(title: str, command: list[str], each_line: Callable) -> float:
  """Runs a command, from any folder; returns how many seconds it took.

  `each_line` gets the lines of its stdout and stderr. A signal that asks this
  program to stop is passed on to the command, and then this program ends with
  the same status; the end of this one stops the command, too. UserError with
  `title` if it failed.
  """
  began = time.monotonic()
  signals: list[int] = []  # that asked this program to stop
  with (
    start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process,
    contextlib.ExitStack() as handlers,
  ):

    def pass_on(number: int, _) -> None:
      # The command saves. The terminal sends it SIGINT by itself.
      signals.append(number)
      if number != signal.SIGINT:
        process.send_signal(number)

    for number in STOP_SIGNALS:
      before = signal.signal(number, pass_on)
      handlers.callback(signal.signal, number, before)  # at the block's end
    for line in process.stdout or ():
      each_line(_RANK_MARK.sub("", line))
    process.wait()
  if signals or process.returncode == STOPPED_STATUS:
    sys.exit(STOPPED_STATUS)
  if process.returncode:
    raise UserError(f"{title}: failed, see above")
  return time.monotonic() - began
