"""--report_to: sends a run's reports to W&B and MLflow.

  python -m training.services RUN wandb

sends what the service does not have yet. In a training a thread of rank 0 does
so for each service, every few seconds: the training waits for it only at its
end, for some seconds. RUN/wandb.json holds the service's id of the run and what
was sent, so a resumed run continues it.
"""

import contextlib
import importlib.util
import math
import os
import secrets
import shlex
import threading
import time
from collections.abc import Iterator
from typing import Any

from checkpoints import description, metrics
from common import json_files
from common.console import tell
from common.errors import UserError, run_main

_FILES = {"train": metrics.METRICS_FILE, "eval": metrics.EVAL_METRICS_FILE}
_EVERY_SECONDS = 10.0
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

    self._client = mlflow.MlflowClient()
    run = mlflow.start_run(run_id=known, run_name=None if known else folder)
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


class Sender(threading.Thread):
  """Sends the reports in a run folder's files to one service."""

  def __init__(self, folder: str, service: str, resumed: float = math.inf):
    """`resumed`: reports after this update are made, and sent, again."""
    # A daemon: a service that hangs must not keep the process.
    super().__init__(name=f"reports to {service}", daemon=True)
    self.service_name, self._folder = service, folder
    self.run_ended = threading.Event()
    self.trouble: str | None = None  # why the last try failed
    self._state_file = os.path.join(folder, f"{service}.json")
    self._id, self._sent = None, dict.fromkeys(_FILES, -1)
    if os.path.exists(self._state_file):
      state = json_files.read_own(self._state_file, "remove it")
      self._id = state["id"]
      for tag, step in state["sent"].items():
        self._sent[tag] = min(step, resumed)
    self._service: Any = None

  def _write_state(self) -> None:
    json_files.write(self._state_file, {"id": self._id, "sent": self._sent})

  def send(self, is_last: bool = False) -> None:
    """Sends what is new in the files; what fails is sent again next time."""
    if self._service is None:
      service = SERVICES[self.service_name](self._folder, self._id)
      self._id = service.id  # also for the next try if the rest fails
      self._write_state()
      runs = json_files.read(os.path.join(self._folder, description.RUN_FILE))
      service.describe(runs["runs"][-1])
      self._service = service
      tell(f"{self.service_name}: {service.where}")
    sent = dict(self._sent)
    for tag, file in _FILES.items():
      for report in metrics.read_jsonl(os.path.join(self._folder, file)):
        step = report.pop("global_step")
        if step <= self._sent[tag]:
          continue
        # Services take numbers only: names and what is not finite stay here.
        numbers = {}
        for key, value in report.items():
          if isinstance(value, (int, float)) and math.isfinite(value):
            numbers[f"{tag}/{key}"] = float(value)
        self._service.send(step, numbers)
        self._sent[tag] = step
    if self._sent != sent:
      self._write_state()
    if is_last:
      self._service.end()

  def run(self) -> None:
    """Sends until the run ends, and tries again what fails."""
    is_last = False
    while not is_last:
      is_last = self.run_ended.wait(_EVERY_SECONDS)
      before, self.trouble = self.trouble, None
      try:
        self.send(is_last)
      except Exception as e:  # the services' own are of many types
        self.trouble = (str(e).splitlines() or [type(e).__name__])[0]
        # The same trouble comes every few seconds: it is told once.
        if self.trouble != before:
          tell(
            f"{self.service_name} gets no reports now: {self.trouble}; "
            "training continues"
          )


@contextlib.contextmanager
def reporting(names: tuple[str, ...], folder: str, step: int) -> Iterator[None]:
  """Sends what a training that starts after update `step` reports."""
  senders = [Sender(folder, name, step) for name in dict.fromkeys(names)]
  for sender in senders:
    sender.start()
  seconds = 2
  try:
    yield
    seconds = _END_SECONDS
  finally:
    until = time.monotonic() + seconds
    for sender in senders:
      sender.run_ended.set()
    for sender in senders:
      sender.join(max(0.0, until - time.monotonic()))
      if sender.is_alive() or sender.trouble:
        name = sender.service_name
        tell(
          f"{name} lacks the last reports; to send them later: python -m "
          f"training.services {shlex.quote(folder)} {name}"
        )


def main(folder: str, name: str) -> None:
  """Sends a run's reports."""
  if name not in SERVICES:
    raise UserError(f"{name} is not one of {', '.join(SERVICES)}")
  check_installed((name,))
  Sender(folder, name).send(is_last=True)


if __name__ == "__main__":
  run_main(lambda argv: main(*argv[1:]), arguments=2)
