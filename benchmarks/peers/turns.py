"""Programs that are timed in turns: each answers a line with a JSON line.

Imports nothing of this project, for programs of other environments.
"""

import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

ROOT = str(pathlib.Path(__file__).parents[2])


def serve(answer: Callable[[], dict], **about) -> None:
  """Prints what this program is, then answers each line on stdin."""
  print(json.dumps(about), flush=True)
  for _ in sys.stdin:
    print(json.dumps(answer()), flush=True)


class Worker:
  """A program that serves.

  Attributes:
    about: its first line, for which this waits; {} if it ended.
    last_words: the line that it printed at its end.
  """

  def __init__(self, command: list[str], messages=sys.stderr):
    print(*command, file=messages, flush=True)
    self._process = subprocess.Popen(
      command,
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=messages,
      text=True,
      # A thread that waits for work must not take the other's cores.
      env={**os.environ, "OMP_WAIT_POLICY": "passive"},
    )
    self.last_words = {}

  @functools.cached_property
  def about(self) -> dict:
    return self._line()

  def _line(self) -> dict:
    return json.loads(self._process.stdout.readline() or "{}")

  def ask(self) -> dict:
    """The answer to a line; {} if it ended."""
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.write("go\n")
      self._process.stdin.flush()
    return self._line()

  def kill(self) -> None:
    """For a program that takes too long."""
    self._process.kill()

  def close(self) -> None:
    """Ends the program."""
    last, _ = self._process.communicate()
    self.last_words = json.loads(last.strip() or "{}")


@contextlib.contextmanager
def workers(commands: dict):
  """Starts them; name -> `Worker`. They end with the block."""
  with contextlib.ExitStack() as stack:
    started = {}
    for name, command in commands.items():
      started[name] = Worker(command)
      print(name, started[name].about, file=sys.stderr)  # when it is ready
      stack.callback(started[name].close)
    yield started
