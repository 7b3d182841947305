"""Starts the workers of a data set as tasks of a Ray cluster.

  python -m tools.ray_workers --workers=16 -- create_pretraining_data.py ...
  python -m tools.ray_workers --workers=16 -- -m tools.prepare_corpus ...

What follows -- is the command of a worker, for this folder. All machines see
this folder, the repository and the command's files at the same paths. Ray
starts the workers of a lost machine again. An error or Ctrl-C ends all of them,
and the same command resumes.
"""

import dataclasses
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid

from common import errors, processes
from common.console import tell
from common.processes import start
from common.settings import run_with, setting

_RETRIES = 20  # of one worker, when its machine or its process is lost
_STOP_SECONDS = 30
_LOCAL = "local"  # Ray's name of a cluster that ends with this command
_PROGRESS = re.compile(r"worker \d+: \d\d:\d\d:\d\d  ")  # of console.Progress
_TOKEN = (
  "the token of the cluster is missing here, or it is another one: set "
  "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE for this command and for "
  "each ray start, with the same file on all machines"
)


@dataclasses.dataclass(frozen=True)
class RayWorkersSettings:
  """The flags of tools.ray_workers."""

  # fmt: off
  workers: int = setting(help=
    "Workers that share the work. Those for which the cluster has no room yet "
    "wait.", low=1, high=100_000)
  cpus_per_worker: int = setting(1,
    "Number of CPUs that Ray keeps for a worker, and its --num_workers.",
    low=1, high=4096)
  address: str = setting("",
    "Cluster that this machine belongs to, as HOST:PORT, or auto. Default: "
    "RAY_ADDRESS, or else Ray on this machine that ends with this command.")
  # fmt: on


def _work(number: int, command: list[str], script: str, folder: str, lines):
  """Runs a worker, on any machine: (exit status, its output or its error)."""
  machine = os.uname().nodename
  if not (os.path.exists(script) and os.path.isdir(folder)):
    return 1, (
      f"ray_workers.py: error: {machine} has no {script}, or no {folder}: name "
      "the script after --, and have both at the same path on all machines"
    )
  lines.put(f"worker {number}: starts on {machine}")
  line = ""

  def pass_on(stream):
    nonlocal line
    for line in map(str.rstrip, stream):
      if ": error: " not in line:  # the driver shows that of one worker
        lines.put(f"worker {number}: {line}")

  with (
    tempfile.TemporaryFile("w+") as out,
    start(command, cwd=folder, stdout=out, stderr=subprocess.PIPE) as process,
  ):
    # When Ray asks this thread to stop, that does not interrupt its reading.
    reader = threading.Thread(target=pass_on, args=[process.stderr])
    try:
      reader.start()
      while process.poll() is None:
        time.sleep(0.1)
    finally:
      process.terminate()
      if reader.ident:  # it has started
        reader.join()
    out.seek(0)
    if process.returncode < 0:
      raise ChildProcessError(f"killed by signal {-process.returncode}")
    return process.returncode, line if process.returncode else out.read()


def _connect(address: str):
  """The module ray, connected to a cluster; UserError if that fails."""
  os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
  if address == _LOCAL:
    # Else Ray leaves a token in ~/.ray. A cluster that is started here later
    # would want it from all machines.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", uuid.uuid4().hex)
  # C++ code prints on the file of stderr, so that is what is turned aside.
  stderr = os.dup(2)
  with tempfile.TemporaryFile("w+") as messages:
    os.dup2(messages.fileno(), 2)
    try:
      import ray
      import ray.util.queue

      host, _, port = address.rpartition(":")
      if port.isdigit():  # Ray itself tries for minutes
        socket.create_connection((host, int(port)), timeout=10).close()
      quiet = {"include_dashboard": False, "log_to_driver": False}
      ray.init(address, logging_level="ERROR", **quiet)
    except Exception as e:
      messages.seek(0)
      problem, remedy = errors.reason(e), "see --address in --help"
      if isinstance(e, ImportError):
        problem = "the package ray is not installed"
        remedy = ".venv/bin/pip install -r requirements/ray.txt"
      elif "Auth" in type(e).__name__ + messages.read():
        problem, remedy = problem.partition(". Ensure")[0], _TOKEN
      raise errors.UserError(f"--address={address}: {problem}: {remedy}") from e
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)
  # A machine without the repository can unpickle the tasks, and says so.
  ray.cloudpickle.register_pickle_by_value(processes)
  return ray


def _await(ray, waiting: list, lines) -> tuple[int, str]:
  """The result of `_work` for all: the first error, or the whole output."""
  printed = ""
  while waiting:
    ended, waiting = ray.wait(waiting, timeout=5.0)
    messages = lines.get_nowait_batch(lines.qsize())
    # Of all progress the newest line is enough.
    progress = list(filter(_PROGRESS.match, messages))
    newest = [*itertools.filterfalse(_PROGRESS.match, messages), *progress[-1:]]
    tell(*newest, end="\n" if newest else "")
    for task in ended:
      try:
        status, text = ray.get(task)
      except ray.exceptions.RayError as e:
        reason = errors.reason(getattr(e, "cause", None) or e)
        raise errors.UserError(
          f"a worker was lost {_RETRIES + 1} times: {reason}: give it more "
          "memory, or start fewer workers on a machine"
        ) from e
      if status:
        return status, text
      printed += text
  return 0, printed


def main(settings: RayWorkersSettings, script: str, *flags: str) -> None:
  """Runs the command by all workers and shows what they print."""
  signal.signal(signal.SIGINT, signal.SIG_DFL)  # no work is lost yet
  ray = _connect(settings.address or os.environ.get("RAY_ADDRESS") or _LOCAL)
  errors.end_on_signals()
  cpus = settings.cpus_per_worker
  room = ray.cluster_resources().get("CPU", 0)
  tell(f"{settings.workers} workers of {cpus} of {room:.0f} CPUs")
  here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
    ray.get_runtime_context().get_node_id(), soft=False
  )
  # The queue of messages stays on this machine: another one may be lost.
  options = {"num_cpus": 0, "scheduling_strategy": here}
  lines = ray.util.queue.Queue(actor_options=options)
  work = ray.remote(_work).options(
    num_cpus=cpus,
    scheduling_strategy="SPREAD",
    max_retries=_RETRIES,
    retry_exceptions=[ChildProcessError],
  )
  command = [sys.executable, script, *flags, f"--num_workers={cpus}"]
  command += [f"--workers={settings.workers}", f"--run={uuid.uuid4().hex}"]
  paths = os.path.abspath(__file__ if script == "-m" else script), os.getcwd()
  tasks = [
    work.remote(number, [*command, f"--worker={number}"], *paths, lines)
    for number in range(settings.workers)
  ]
  # On an error, too, no worker may go on without this command.
  try:
    status, text = _await(ray, tasks, lines)
  except SystemExit:  # Ray's C++ code gives a stop another status
    sys.exit(errors.STOPPED_STATUS)
  finally:
    for task in tasks:
      ray.cancel(task)
    ray.wait(tasks, num_returns=len(tasks), timeout=_STOP_SECONDS)
  if status:
    tell(text)
    sys.exit(status)
  print(text, end="")


if __name__ == "__main__":
  run_with(RayWorkersSettings, main, arguments=None)
