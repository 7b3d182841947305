"""--report_to: what W&B and MLflow get, with stand-ins and, offline, really."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time

import pytest
import runs

from common.errors import UserError
from training import services

# Packages that write what they are asked for to the file $CALLS. They fail
# while the file $DOWN is there, and hang while it holds "hang".
_START = """
import json, os, time
def call(*what):
  if os.path.exists(os.environ["DOWN"]):
    while "hang" in open(os.environ["DOWN"]).read():
      time.sleep(0.1)
    raise ConnectionError("no network\\nwith details")
  with open(os.environ["CALLS"], "a") as f:
    f.write(json.dumps(what) + "\\n")
"""
_WANDB = """
class Config:
  def update(self, values, allow_val_change):
    call("config", values)
class Run:
  dir, url, config = "here", None, Config()
  def define_metric(self, *a, **k): pass
  def log(self, values): call("log", values)
  def finish(self): call("end")
def Settings(**settings): return settings
def init(id, resume, **given):
  call("start", id, resume)
  run = Run()
  run.id = id
  return run
"""
_MLFLOW = """
class Some:
  def __init__(self, **values): self.__dict__.update(values)
params = {}
class MlflowClient:
  def get_run(self, run_id): return Some(data=Some(params=dict(params)))
  def log_param(self, run_id, name, value):
    assert run_id and len(value) <= 500 and name not in params
    params[name] = value
    call("params", {name: value})
  def log_dict(self, run_id, value, name):
    assert not os.path.exists(os.environ["DOWN"] + "_store"), "no store"
    call("dict", name)
  def log_metric(self, run_id, name, value, step):
    call("log", {name: value, "update": step})
  def set_terminated(self, run_id): call("end")
def start_run(run_id, run_name):
  call("start", run_id, run_name)
  return Some(info=Some(run_id=run_id or "made"))
def end_run(status): assert status == "RUNNING"
def get_tracking_uri(): return "here"
"""


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
  """A function that gives the calls so far; tmp_path/down is $DOWN."""
  packages = tmp_path / "packages"
  packages.mkdir()
  (packages / "wandb.py").write_text(_START + _WANDB)
  (packages / "mlflow.py").write_text(_START + _MLFLOW)
  monkeypatch.setenv("PYTHONPATH", str(packages))
  monkeypatch.syspath_prepend(packages)
  monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
  monkeypatch.setenv("DOWN", str(tmp_path / "down"))

  def calls():
    path = tmp_path / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]

  yield calls
  for name in ("wandb", "mlflow"):
    sys.modules.pop(name, None)


def make_run(folder, flags=3):
  """A run folder with its settings, before the first report."""
  folder.mkdir(exist_ok=True)
  many = {f"flag{i}": "x" * 600 for i in range(flags)}
  run = {"flags": {"seed": 1, "optimizer": {"beta_1": 0.9}, **many}}
  (folder / "run.json").write_text(json.dumps({"runs": [{}, run]}))
  return str(folder)


def write(folder, name, steps, loss=1.0):
  """Replaces a file of reports, as a resumed run does."""
  path = os.path.join(folder, name)
  with open(path + ".new", "w") as f:
    for step in steps:
      report = {"global_step": step, "loss": loss, "mfu": None, "name": "a"}
      f.write(json.dumps(report) + "\n")
  os.replace(path + ".new", path)


def updates(calls, key="train/loss"):
  return [c[1]["update"] for c in calls if c[0] == "log" and key in c[1]]


def follow(names, folder, step=0, steps=(10, 20)):
  with services.reporting(names, folder, step):
    write(folder, "metrics.jsonl", steps)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_service_gets_settings_reports_and_evaluations(
  tmp_path, stand_ins, name, capfd
):
  folder = make_run(tmp_path / "run", flags=150)
  with services.reporting((name, name), folder, 0):
    write(folder, "metrics.jsonl", [10, 20])
    write(folder, "eval_metrics.jsonl", [0, 20])
  calls = stand_ins()
  assert calls[0][0] == "start" and calls[-1] == ["end"]
  assert ["log", {"train/loss": 1.0, "update": 10}] in calls
  assert updates(calls, "eval/loss") == [0, 20]
  if name == "wandb":
    assert calls[1][1]["flags"]["optimizer"] == {"beta_1": 0.9}
  else:
    params = {k: v for c in calls if c[0] == "params" for k, v in c[1].items()}
    assert params["flags.optimizer.beta_1"] == "0.9" and len(params) == 152
  assert f"{name}: here" in capfd.readouterr().err
  # A run that resumes from update 10 makes 20 again, and 30: in the same run.
  before = len(calls)
  follow((name,), folder, 10, [10, 20, 30])
  calls = stand_ins()[before:]
  known = json.loads((tmp_path / "run" / f"{name}.json").read_text())["id"]
  assert calls[0][:2] == ["start", known] and known
  assert updates(calls) == [20, 30]
  assert not [c for c in calls if c[0] == "params"]
  # By hand: nothing is left to send.
  services.main(folder, name)
  assert updates(stand_ins()[before:]) == [20, 30]


def test_what_failed_is_told_once_and_can_be_sent_later(
  tmp_path, stand_ins, capfd
):
  folder = make_run(tmp_path / "run")
  (tmp_path / "down").touch()
  follow(("wandb", "mlflow"), folder)
  said = capfd.readouterr().err
  for name in ("wandb", "mlflow"):
    assert said.count(f"{name} gets no reports now: no network; training") == 1
    assert f"python -m training.services {folder} {name}" in said
  assert "Traceback" not in said and not stand_ins()
  (tmp_path / "down").unlink()
  services.main(folder, "wandb")
  assert updates(stand_ins()) == [10, 20]
  # An error of the training is not hidden.
  with pytest.raises(KeyError), services.reporting(("wandb",), folder, 20):
    raise KeyError


def test_a_run_that_was_begun_in_vain_is_continued(tmp_path, stand_ins):
  """By the next try, which sends its settings."""
  folder = make_run(tmp_path / "run")
  write(folder, "metrics.jsonl", [10, 20])
  (tmp_path / "down_store").touch()
  sender = services.Sender(folder, "mlflow")
  with pytest.raises(AssertionError, match="no store"):
    sender.send()
  (tmp_path / "down_store").unlink()
  sender.send()
  calls = stand_ins()
  assert updates(calls) == [10, 20]
  begun = [call[1] for call in calls if call[0] == "start"]
  assert begun == [None, "made"]
  parameters = [name for c in calls if c[0] == "params" for name in c[1]]
  assert parameters and len(parameters) == len(set(parameters))
  assert ["dict", "run.json"] in calls


def test_a_service_that_hangs_is_ended(tmp_path, stand_ins, capfd, monkeypatch):
  folder = make_run(tmp_path / "run")
  (tmp_path / "down").write_text("hang")
  monkeypatch.setattr(services, "_END_SECONDS", 0.5)
  began = time.monotonic()
  follow(("wandb",), folder)
  assert time.monotonic() - began < services._EVERY_SECONDS
  assert "wandb lacks the last reports; to send them" in capfd.readouterr().err
  (tmp_path / "down").unlink()
  for thread in threading.enumerate():
    if thread.name == "reports to wandb":
      thread.join()  # or it would speak in another test


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
  (tmp_path / "wandb").mkdir()  # as W&B's own folder of runs
  monkeypatch.setattr(sys, "path", [str(tmp_path)])
  importlib.invalidate_caches()
  for name in ("wandb", "mlflow"):
    with pytest.raises(UserError, match=r"pip install -r requirements/rep"):
      services.check_installed((name,))


def test_a_training_starts_the_services(tiny_run, tmp_path, stand_ins):
  runs.pretrain(
    tiny_run, tmp_path / "run", report_to=("wandb",), num_train_steps=2,
    num_warmup_steps=1, do_eval=True,
  )  # fmt: skip
  assert [c[0] for c in stand_ins()].count("start") == 1
  assert updates(stand_ins()) == [1, 2]
  assert updates(stand_ins(), "eval/masked_lm_loss") == [2]


# The packages themselves, without a network -----------------------------------


def really(name, folder, tmp_path, **env):
  """Sends a run with the installed package; skips without it."""
  if importlib.util.find_spec(name) is None:
    pytest.skip(f"{name} is not installed")
  command = [sys.executable, "-m", "training.services", folder, name]
  path = os.pathsep.join([runs.ROOT, os.environ.get("PYTHONPATH", "")])
  done = subprocess.run(
    command, env={**os.environ, "PYTHONPATH": path, **env}, text=True,
    capture_output=True, cwd=tmp_path, timeout=runs.HANG_SECONDS,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr


def test_wandb_offline(tmp_path):
  folder = make_run(tmp_path / "run")
  for steps in ([10], [10, 20]):
    write(folder, "metrics.jsonl", steps)
    really("wandb", folder, tmp_path, WANDB_MODE="offline")
  made = [*(tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")]
  known = json.loads((tmp_path / "run" / "wandb.json").read_text())
  assert len(made) == 2 and {p.stem for p in made} == {f"run-{known['id']}"}
  assert known["sent"] == {"train": 20}


def test_mlflow_in_a_folder(tmp_path):
  folder = make_run(tmp_path / "run", flags=150)
  store = {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/store"}
  for steps in ([10], [10, 20]):
    write(folder, "metrics.jsonl", steps)
    really("mlflow", folder, tmp_path, MLFLOW_ALLOW_FILE_STORE="true", **store)
  (made,) = (tmp_path / "store").glob("*/*/metrics/train/loss")
  sent = [line.split()[2] for line in made.read_text().splitlines()]
  assert sent == ["10", "20"]
