"""Runs of run_pretraining.py for tests: in this process or as commands.

Functions that need TensorFlow import it: tests of data do without.
"""

import contextlib
import copy
import fcntl
import glob
import hashlib
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import threading
import time
from unittest import mock

import numpy as np

# For what hangs only: a machine may be many times slower than another.
HANG_SECONDS = 600

ROOT = os.path.dirname(
  os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
)
BIN = os.path.dirname(sys.executable)


def config(tiny_run, output_dir, **changes):
  """A small training run's config: 20 updates of 24 examples, no dropout."""
  import modeling
  from config.exchange_config import AllreduceConfig
  from config.optimizers import OptimizerConfig
  from config.precision import LossScaleConfig
  from config.pretraining import PretrainingConfig

  config_file, files = tiny_run
  bert = modeling.BertConfig.from_json_file(config_file)
  bert.hidden_dropout_prob = changes.pop("dropout", 0.0)
  bert.attention_probs_dropout_prob = bert.hidden_dropout_prob
  settings = dict(
    bert=bert,
    optimizer=OptimizerConfig(**changes.pop("optimizer", {})),
    loss_scale=LossScaleConfig(**changes.pop("loss_scale", {})),
    allreduce=AllreduceConfig(),
    input_file=files,
    output_dir=str(output_dir),
    do_train=True,
    do_eval=False,
    max_seq_length=32,
    max_predictions_per_seq=5,
    train_batch_size=24,
    eval_batch_size=16,
    global_batch_size=24,
    learning_rate=1e-3,
    num_train_steps=20,
    num_warmup_steps=4,
    log_every_steps=1,
    xla="off",  # compiling takes longer than these runs; test_jit.py has it
  )
  return PretrainingConfig(**{**settings, **changes})


def pretrain(tiny_run, output_dir, comm=None, **changes):
  """Runs in this process, alone unless in `comm`; returns the run's result."""
  import run_pretraining
  from gradients.distributed import Comm

  return run_pretraining.pretrain(
    config(tiny_run, output_dir, **changes), comm or Comm()
  )


def graph_sizes(tiny_run, output_dir, comm=None, **changes):
  """Name -> elements here of each global variable in a training's graph."""
  import run_pretraining
  from common.tensorflow_v1 import tf
  from gradients.distributed import Comm
  from training import training_run

  settings = config(tiny_run, output_dir, **changes)
  with training_run.graph(settings):
    run_pretraining.training_task(settings, comm or Comm())
    return {v.op.name: v.shape.num_elements() for v in tf.global_variables()}


@contextlib.contextmanager
def ended_after(update):
  """Training in the block ends without a word after `update`."""
  import pytest

  from training import train_loop

  run_update = train_loop.run_update

  def until(run, number, *rest):
    if number > update:
      raise InterruptedError
    return run_update(run, number, *rest)

  with (
    mock.patch.object(train_loop, "run_update", until),
    pytest.raises(InterruptedError),
  ):
    yield


def spikes_at(monkeypatch, first, last):
  """Makes updates `first` to `last` spikes, of which three are many."""
  from common.tensorflow_v1 import tf
  from gradients import spikes
  from training import divergence

  def heights(_, norm, loss):
    del loss
    made = tf.convert_to_tensor(tf.train.get_or_create_global_step())
    spike = tf.where((made >= first - 1) & (made < last), norm, 0.0 * norm)
    return tf.stack([spike, spike])

  monkeypatch.setattr(spikes.SpikeGuard, "heights", heights)
  monkeypatch.setattr(divergence, "PATIENCE", 3)


class Killed(BaseException):
  """Stands for SIGKILL in `killed_at`."""


@contextlib.contextmanager
def killed_at(moment):
  """From its `moment`-th rename or removal on the block changes no file.

  As by SIGKILL, also where it cleans up. Yields a list, empty if it ended well.
  """
  calls, was_killed = 0, []

  def ending(function):
    def call(*arguments, **named):
      nonlocal calls
      calls += 1
      if calls > moment:
        was_killed.append(function)
        raise Killed
      return function(*arguments, **named)

    return call

  with contextlib.ExitStack() as patches, contextlib.suppress(Killed):
    for module, names in (
      (os, ("replace", "rename", "unlink", "remove", "rmdir")),
      (shutil, ("rmtree",)),
    ):
      for name in names:
        now = ending(getattr(module, name))
        patches.enter_context(mock.patch.object(module, name, now))
    yield was_killed


def trained(tiny_run, output_dir, **settings):
  """The run folder of `pretrain`; equal ones are made once a session."""
  config_file, pattern = map(str, tiny_run)
  inputs = [config_file, *sorted(glob.glob(pattern))]
  digest = hashlib.sha256(repr(sorted(settings.items())).encode())
  for path in inputs:
    digest.update(pathlib.Path(path).read_bytes())
  kept = pathlib.Path(os.environ["TRAINED_RUNS"]) / digest.hexdigest()
  with open(f"{kept}.lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)  # several workers
    if not kept.exists():
      pretrain(tiny_run, f"{kept}.made", **copy.deepcopy(settings))
      os.rename(f"{kept}.made", kept)
  copy_run(kept, output_dir, made_in=f"{kept}.made")


def copy_run(folder, output_dir, made_in=None):
  """A run folder elsewhere, as if the run had been there."""
  shutil.copytree(folder, output_dir, dirs_exist_ok=True)
  newest = pathlib.Path(output_dir) / "checkpoint"  # names its folder
  text = newest.read_text().replace(str(made_in or folder), str(output_dir))
  newest.write_text(text)


def launch(arguments, ranks=1, timeout=HANG_SECONDS, stop=None, launcher=None):
  """Runs a Python command, under horovodrun for several ranks.

  `launcher` are horovodrun's flags, instead of the number of ranks. When
  `stop()`, which is called again and again, is true it gets SIGTERM.

  Returns the finished process, with its output as text. A run that hangs is
  killed with its ranks and fails the test.
  """
  if launcher is None and ranks > 1:
    launcher = ["-np", str(ranks)]
  launcher = [f"{BIN}/horovodrun", *launcher] if launcher else []
  process = subprocess.Popen(
    [*launcher, sys.executable, *arguments],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
    env={**os.environ, "PYTHONPATH": ROOT},
  )
  if stop:
    threading.Thread(target=_terminate, args=[process, stop]).start()
  try:
    stdout, stderr = process.communicate(timeout=timeout)
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, 9)
    stdout, stderr = process.communicate()
    raise AssertionError(f"hung for {timeout} s:\n{stderr[-3000:]}") from None
  return subprocess.CompletedProcess(
    process.args, process.returncode, stdout, stderr
  )


def _terminate(process, stop):
  while process.poll() is None and not stop():
    time.sleep(0.05)
  process.terminate()


def arguments(tiny_run, output_dir):
  """The command of a 20-step training with run_pretraining.py."""
  return [
    f"{ROOT}/run_pretraining.py",
    "--do_train",
    f"--bert_config_file={tiny_run[0]}",
    f"--input_file={tiny_run[1]}",
    f"--output_dir={output_dir}",
    "--max_seq_length=32",
    "--max_predictions_per_seq=5",
    "--learning_rate=1e-3",
    "--num_train_steps=20",
    "--num_warmup_steps=4",
    "--log_every_steps=1",
  ]


def command(
  tiny_run, output_dir, ranks=1, flags=(), timeout=HANG_SECONDS, stop=None
):
  """`launch` of that training."""
  return launch(
    [*arguments(tiny_run, output_dir), *flags], ranks, timeout, stop
  )


def complete(*training, **settings):
  """The process of that `command`, which ends well."""
  process = command(*training, **settings)
  assert process.returncode == 0, process.stderr[-3000:]
  return process


def patched(path, patch: str) -> str:
  """Writes a script: run_pretraining.py after `patch`; returns `path`."""
  path.write_text(
    "import os, signal, time\n"
    "import run_pretraining\n"
    "from interop import run_settings\n"
    "from training import signals, train_loop\n"
    f"{patch}\n"
    "kind = run_pretraining.PretrainingConfig\n"
    "command = run_settings.read_command(kind)\n"
    "train_loop.run_read(lambda: run_pretraining.main(command))\n"
  )
  return str(path)


def metrics(output_dir, key="loss"):
  """One key of every report."""
  from checkpoints import metrics as metrics_module

  path = os.path.join(str(output_dir), metrics_module.METRICS_FILE)
  return [report[key] for report in metrics_module.read_jsonl(path)]


def assert_alike(got, want, rtol=1e-5):
  """Two runs have the same losses, gradients and evaluation."""
  for key in ("loss", "masked_lm_loss", "next_sentence_loss", "grad_norm"):
    tolerance = rtol if "loss" in key else 10 * rtol
    np.testing.assert_allclose(
      metrics(got, key), metrics(want, key), rtol=tolerance, err_msg=key
    )
  for key in ("examples", "padding", "masked_lm_accuracy", "skipped_updates"):
    np.testing.assert_allclose(
      metrics(got, key), metrics(want, key), rtol=1e-6, atol=rtol, err_msg=key
    )
  here, there = (read_json(f, "eval_results.json") for f in (got, want))
  assert here["examples"] == there["examples"] > 120
  whose = "evaluated_weights"
  assert here.pop(whose, None) == there.pop(whose, None)
  for key, value in there.items():
    np.testing.assert_allclose(here[key], value, rtol=10 * rtol, err_msg=key)


def assert_same_updates(got, want, updates):
  """Two runs have these updates, of the same examples and losses."""
  assert metrics(got, "global_step") == list(range(1, updates + 1))
  for key in ("examples", "padding", "learning_rate"):
    pair = metrics(got, key), metrics(want, key)
    np.testing.assert_allclose(*pair, rtol=1e-12, atol=1e-12, err_msg=key)
  np.testing.assert_allclose(metrics(got), metrics(want), rtol=1e-5)


def weights(output_dir):
  """Name -> array of everything in the newest checkpoint."""
  from common.tensorflow_v1 import tf

  reader = tf.train.load_checkpoint(str(output_dir))
  return {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()}


def read_json(output_dir, name):
  """A JSON file of the run folder."""
  with open(os.path.join(str(output_dir), name), encoding="utf-8") as f:
    return json.load(f)


def assert_equal(got, want):
  """Arrays by name are equal to the last bit."""
  assert got.keys() == want.keys()
  for name, value in want.items():
    np.testing.assert_array_equal(got[name], value, err_msg=name)


def change_run(output_dir, plan=(), **flags):
  """Changes what run.json says of the newest training."""
  path = pathlib.Path(output_dir) / "run.json"
  said = json.loads(path.read_text())
  said["runs"][-1]["flags"].update(flags)
  said["runs"][-1]["plan"].update(plan)
  path.write_text(json.dumps(said))


def updates_take(monkeypatch, seconds):
  """Of --max_train_minutes; the first update of a start, which compiles, 0."""
  from training import signals

  lap = lambda budget: 0.0 if budget._last is None else seconds
  monkeypatch.setattr(signals.Budget, "lap", lap)


@contextlib.contextmanager
def small_files(size):
  """A block in which no file may be larger than so many bytes."""
  before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
