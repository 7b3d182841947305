"""--report_to: processes that send a run's reports to W&B and MLflow.

  python -m training.services RUN wandb

sends what the service does not have yet. A training starts one such process for
each service, which follows the run's files: neither an error nor a network that
hangs reaches the training. RUN/wandb.json holds the service's id of the run and
what was sent, so a resumed run continues it.
"""

import contextlib
import importlib.util
import math
import os
import secrets
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from common import json_files
from common.console import tell
from common.errors import UserError

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FILES = {"train": "metrics.jsonl", "eval": "eval_metrics.jsonl"}
_EVERY_SECONDS, _RETRY_SECONDS = 2.0, 60.0
_END_SECONDS = 8  # for the last reports: horovodrun ends a stopped run in 10


class Wandb:
  """A run of Weights & Biases. WANDB_PROJECT, WANDB_MODE, ... are its own."""

  def __init__(self, folder: str, known: str | None):
    import wandb

    self._run = wandb.init(
      project=os.environ.get("WANDB_PROJECT", "perseus-bert"),
      name=os.environ.get("WANDB_NAME", folder),
      dir=os.environ.get("WANDB_DIR", folder),
      id=known or secrets.token_hex(4),
      resume="allow",
      settings=wandb.Settings(console="off", silent=True),
    )
    self.id, self.where = self._run.id, self._run.url or self._run.dir

  def describe(self, run: dict, is_new: bool) -> None:
    del is_new
    self._run.config.update(run, allow_val_change=True)
    # Evaluations and repeated updates do not come in the order of steps.
    self._run.define_metric("update")
    self._run.define_metric("*", step_metric="update")

  def send(self, step: int, values: dict[str, float]) -> None:
    self._run.log({**values, "update": step})

  def end(self) -> None:
    self._run.finish()


class Mlflow:
  """A run of MLflow. MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME name where."""

  def __init__(self, folder: str, known: str | None):
    import mlflow

    self._mlflow = mlflow
    name = None if known else folder
    self.id = mlflow.start_run(run_id=known, run_name=name).info.run_id
    self.where = mlflow.get_tracking_uri()

  def describe(self, run: dict, is_new: bool) -> None:
    params = list(_flat(run)) if is_new else []  # they cannot change
    for first in range(0, len(params), 100):  # the most that it takes
      self._mlflow.log_params(dict(params[first : first + 100]))
    self._mlflow.log_dict(run, "run.json")

  def send(self, step: int, values: dict[str, float]) -> None:
    self._mlflow.log_metrics(values, step=step)

  def end(self) -> None:
    self._mlflow.end_run()


SERVICES: dict[str, type] = {"wandb": Wandb, "mlflow": Mlflow}


def _flat(value: dict, prefix: str = "") -> Iterator[tuple[str, str]]:
  for key, item in value.items():
    if isinstance(item, dict):
      yield from _flat(item, f"{prefix}{key}.")
    else:
      yield f"{prefix}{key}", str(item)[:500]


def check_installed(names: tuple[str, ...]) -> None:
  """Raises `UserError` for a service whose package is not there."""
  for name in names:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:  # a mere folder of that name
      raise UserError(
        f"--report_to={name}: the package {name} is not installed: pip install "
        "-r requirements/reports.txt"
      )


# In a training ----------------------------------------------------------------


@contextlib.contextmanager
def reporting(names: tuple[str, ...], folder: str, step: int) -> Iterator[None]:
  """Sends what a training that starts after update `step` writes to its files.

  At the end the services have `_END_SECONDS`, after an error 2 seconds.
  """
  path = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
  # docker/on_host.sh knows ranks, which it ends, by these.
  ranks = ("PERSEUS_BERT_RUN", "HOROVOD_HOSTNAME")
  own = {n: value for n, value in os.environ.items() if n not in ranks}
  started = {}
  for name in dict.fromkeys(names):
    # -P: no folder of the user's named training, or common, comes first.
    command = ["-P", "-m", "training.services", folder, name, str(step)]
    try:
      started[name] = subprocess.Popen(
        [sys.executable, *command],
        env={**own, "PYTHONPATH": path},
        stdin=subprocess.PIPE,  # its end is the run's, also if this is killed
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not for it
      )
    except OSError as e:
      tell(f"{name} gets no reports: {e.strerror}; training continues")
  seconds = 2
  try:
    yield
    seconds = _END_SECONDS
  finally:
    for process in started.values():
      if process.stdin:
        process.stdin.close()
    until = time.monotonic() + seconds
    for name, process in started.items():
      try:
        process.wait(max(0.0, until - time.monotonic()))
      except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
      if process.wait():
        send = [sys.executable, "-m", "training.services"]
        send += [os.path.abspath(folder), name]
        tell(
          f"{name} lacks the last reports; to send them later: "
          f"cd {shlex.quote(_ROOT)} && {shlex.join(send)}"
        )


# In the process of a service --------------------------------------------------


class Sender:
  """Sends the reports in a run folder's files to one service."""

  def __init__(self, folder: str, name: str, resumed: int | None = None):
    """`resumed`: reports after this update may be made, and sent, again."""
    self._folder, self._name, self._resumed = folder, name, resumed
    self._state_file = os.path.join(folder, f"{name}.json")
    self._state: dict[str, Any] = {"id": None, "sent": {}, "described": False}
    if os.path.exists(self._state_file):
      found = json_files.read_own(self._state_file, "remove it")
      self._state |= {"described": True, **found}  # older ones do not say
    self._files = dict.fromkeys(_FILES, (0, 0))  # tag -> (inode, bytes read)
    self._service: Any = None

  def _connect(self) -> None:
    runs = json_files.read(os.path.join(self._folder, "run.json"))["runs"]
    service = SERVICES[self._name](self._folder, self._state["id"])
    self._state["id"] = service.id  # also if the rest fails: for the next try
    json_files.write(self._state_file, self._state)
    try:
      service.describe(runs[-1], not self._state["described"])
    except BaseException:
      service.end()  # or the next try finds an active one
      raise
    self._service, self._state["described"] = service, True
    json_files.write(self._state_file, self._state)
    tell(f"{self._name}: {service.where}")

  def send(self) -> None:
    """Sends what is new in the files; what fails is sent again next time."""
    if self._service is None:
      self._connect()
    sent = self._state["sent"]
    before = dict(sent)
    for tag, name in _FILES.items():
      path = os.path.join(self._folder, name)
      if not os.path.exists(path):
        continue
      with open(path, "rb") as f:
        inode, done = self._files[tag]
        if inode != os.fstat(f.fileno()).st_ino:  # a resumed run's
          inode, done = os.fstat(f.fileno()).st_ino, 0
          if self._resumed is not None:
            sent[tag] = min(sent.get(tag, -1), self._resumed)
        f.seek(done)
        for line in f:
          if not line.endswith(b"\n"):
            break
          report = json_files.parse(line, strict=False)  # older ones have NaN
          step = report.pop("global_step")
          if step > sent.get(tag, -1):
            numbers = {
              f"{tag}/{key}": float(value)
              for key, value in report.items()
              if isinstance(value, (int, float)) and math.isfinite(value)
            }
            self._service.send(step, numbers)
            sent[tag] = step
          done += len(line)
          self._files[tag] = inode, done
    if sent != before:
      json_files.write(self._state_file, self._state)

  def end(self) -> None:
    if self._service is not None:
      self._service.end()


def _follow(sender: Sender, name: str) -> bool:
  """Sends until stdin ends, and tries again what fails; False if it did."""
  told = failed = ended = False
  while not ended:
    wait = _RETRY_SECONDS if failed else _EVERY_SECONDS
    if select.select([sys.stdin], [], [], wait)[0]:
      ended = True
      signal.alarm(_END_SECONDS)  # if nobody is left to end this process
    try:
      failed = True
      sender.send()
      if ended:
        sender.end()
      failed = False
    except Exception as e:
      if not told:
        why = (str(e).splitlines() or [type(e).__name__])[0]
        tell(f"{name} gets no reports now: {why}; training continues")
      told = True
  return not failed


def main(folder: str, name: str, resumed: str = "") -> None:
  """Sends a run's reports; with `resumed` those of a run that goes on."""
  if name not in SERVICES:
    raise UserError(f"{name} is not one of {', '.join(SERVICES)}")
  check_installed((name,))
  if resumed:
    sys.exit(not _follow(Sender(folder, name, int(resumed)), name))
  sender = Sender(folder, name)
  sender.send()
  sender.end()


if __name__ == "__main__":
  try:
    if len(sys.argv) not in (3, 4):
      raise UserError("give a run folder and a service's name")
    main(*sys.argv[1:])
  except Exception as e:  # the services' own are of many types
    sys.exit(f"training.services: error: {e}")
