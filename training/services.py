"""--report_to: sends a run's reports to W&B and MLflow.

  python -m training.services RUN wandb

sends what the service does not have yet. In a training a thread of rank 0 does
so for each service: it follows the run's files, so the training never waits for
a service, but for some seconds at its end. RUN/wandb.json holds the service's
id of the run and what was sent, so a resumed run continues it.
"""

import contextlib
import importlib.util
import math
import os
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from checkpoints import description, metrics
from common import json_files
from common.console import tell
from common.errors import UserError

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FILES = {"train": metrics.METRICS_FILE, "eval": metrics.EVAL_METRICS_FILE}
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
      settings=wandb.Settings(
        console="off",
        silent=True,
        # Its exit handler waits no longer, either.
        finish_timeout=_END_SECONDS,
        finish_timeout_raises=True,
      ),
    )
    self.id, self.where = self._run.id, self._run.url or self._run.dir

  def describe(self, run: dict) -> None:
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
    # A server that does not answer is tried again by us, not for minutes here.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_END_SECONDS))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    import mlflow

    name = None if known else folder
    self._client = mlflow.MlflowClient()
    run = mlflow.start_run(run_id=known, run_name=name)
    self.id, self.where = run.info.run_id, mlflow.get_tracking_uri()
    mlflow.end_run("RUNNING")  # only the client's calls are of any thread

  def describe(self, run: dict) -> None:
    """Settings as the run's parameters, which cannot change later."""
    known = self._client.get_run(self.id).data.params
    for name, value in _flat(run):
      if name not in known:
        self._client.log_param(self.id, name, value)
    self._client.log_dict(self.id, run, description.RUN_FILE)

  def send(self, step: int, values: dict[str, float]) -> None:
    for name, value in values.items():
      self._client.log_metric(self.id, name, value, step=step)

  def end(self) -> None:
    self._client.set_terminated(self.id)


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
    package = importlib.util.find_spec(name)
    if package is None or package.origin is None:  # a folder of that name
      raise UserError(
        f"--report_to={name}: the package {name} is not installed: pip install "
        "-r requirements/reports.txt"
      )


class Sender:
  """Sends the reports in a run folder's files to one service."""

  def __init__(self, folder: str, name: str, resumed: int | None = None):
    """`resumed`: reports after this update may be made, and sent, again."""
    self.name = name
    self._folder, self._resumed = folder, resumed
    self._state_file = os.path.join(folder, f"{name}.json")
    self._state: dict[str, Any] = {"id": None, "sent": {}}
    if os.path.exists(self._state_file):
      self._state |= json_files.read_own(self._state_file, "remove it")
    self._places = dict.fromkeys(_FILES, (0, 0))  # (inode, bytes read)
    self._service: Any = None

  def send(self) -> None:
    """Sends what is new in the files; what fails is sent again next time."""
    if self._service is None:
      service = SERVICES[self.name](self._folder, self._state["id"])
      self._state["id"] = service.id  # also for the next try if the rest fails
      json_files.write(self._state_file, self._state)
      runs = json_files.read(os.path.join(self._folder, description.RUN_FILE))
      service.describe(runs["runs"][-1])
      self._service = service
      tell(f"{self.name}: {service.where}")
    for tag in _FILES:
      self._send_file(tag)

  def _send_file(self, tag: str) -> None:
    path = os.path.join(self._folder, _FILES[tag])
    if not os.path.exists(path):
      return
    sent = self._state["sent"]
    with open(path, "rb") as f:
      inode, done = self._places[tag]
      if inode != os.fstat(f.fileno()).st_ino:  # a resumed run's
        inode, done = os.fstat(f.fileno()).st_ino, 0
        if self._resumed is not None:
          sent[tag] = min(sent.get(tag, -1), self._resumed)
      f.seek(done)
      lines = f.readlines()
    if lines and not lines[-1].endswith(b"\n"):
      del lines[-1]  # it is being written
    for line in lines:
      report = json_files.parse(line)
      step = report.pop("global_step")
      if step > sent.get(tag, -1):
        numbers = {}
        for key, value in report.items():
          if isinstance(value, (int, float)) and math.isfinite(value):
            numbers[f"{tag}/{key}"] = float(value)
        self._service.send(step, numbers)
        sent[tag] = step
      done += len(line)
      self._places[tag] = inode, done
    if lines:
      json_files.write(self._state_file, self._state)

  def end(self) -> None:
    if self._service is not None:
      self._service.end()


class _Follower(threading.Thread):
  """Sends until the run ends, and tries again what fails."""

  def __init__(self, sender: Sender):
    super().__init__(name=f"reports to {sender.name}", daemon=True)
    self.sender = sender
    self.run_ended = threading.Event()
    self.failed = False

  def run(self) -> None:
    told = is_last = False
    while not is_last:
      is_last = self.run_ended.wait(
        _RETRY_SECONDS if self.failed else _EVERY_SECONDS
      )
      try:
        self.sender.send()
        if is_last:
          self.sender.end()
        self.failed = False
      except Exception as e:  # the services' own are of many types
        self.failed = True
        if not told:
          why = (str(e).splitlines() or [type(e).__name__])[0]
          name = self.sender.name
          tell(f"{name} gets no reports now: {why}; training continues")
          told = True


@contextlib.contextmanager
def reporting(names: tuple[str, ...], folder: str, step: int) -> Iterator[None]:
  """Sends what a training that starts after update `step` writes to its files.

  At the end the services have `_END_SECONDS`, after an error 2 seconds.
  """
  followers = []
  for name in dict.fromkeys(names):
    followers.append(_Follower(Sender(folder, name, step)))
    followers[-1].start()
  seconds = 2
  try:
    yield
    seconds = _END_SECONDS
  finally:
    until = time.monotonic() + seconds
    for follower in followers:
      follower.run_ended.set()
    for follower in followers:
      follower.join(max(0.0, until - time.monotonic()))
      if follower.is_alive() or follower.failed:
        name = follower.sender.name
        words = [sys.executable, "-m", "training.services"]
        words += [os.path.abspath(folder), name]
        tell(
          f"{name} lacks the last reports; to send them later: "
          f"cd {shlex.quote(_ROOT)} && {shlex.join(words)}"
        )


def main(folder: str, name: str) -> None:
  """Sends a run's reports."""
  if name not in SERVICES:
    raise UserError(f"{name} is not one of {', '.join(SERVICES)}")
  check_installed((name,))
  sender = Sender(folder, name)
  sender.send()
  sender.end()


if __name__ == "__main__":
  try:
    if len(sys.argv) != 3:
      raise UserError("give a run folder and a service's name")
    main(*sys.argv[1:])
  except Exception as e:  # the services' own are of many types
    sys.exit(f"training.services: error: {e}")
