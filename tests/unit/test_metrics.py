"""Reports that survive what befalls them: no space, a kill, nobody to read."""

import os
import queue
import resource
import signal
import subprocess
import sys
import time
import traceback

import pytest
import runs

from common.errors import DataError
from gradients.distributed import Comm
from training import training_hooks


def report(step):
  return {"global_step": step, "loss": 1.0 / step}


def log_of(folder, resume_step=0):
  return training_hooks.MetricsLog(str(folder), "m.jsonl", resume_step, "train")


def steps(folder):
  found = training_hooks.read_jsonl(str(folder / "m.jsonl"))
  return [r["global_step"] for r in found]


def test_a_line_that_a_kill_cut_off_is_made_again(tmp_path):
  log = log_of(tmp_path)
  for step in (1, 2, 3):
    log.write(report(step))
  log.close()
  path = tmp_path / "m.jsonl"
  path.write_bytes(path.read_bytes()[:-5])
  assert steps(tmp_path) == [1, 2]
  log = log_of(tmp_path, resume_step=2)
  log.write(report(3))
  log.close()
  assert steps(tmp_path) == [1, 2, 3]
  assert path.read_bytes().count(b"\n") == 3


def test_another_damaged_line_is_named(tmp_path):
  (tmp_path / "m.jsonl").write_text('{"global_step": 1}\n{"global\n{}\n')
  with pytest.raises(DataError, match=r"m\.jsonl: line 2 is no JSON"):
    log_of(tmp_path)


FULL = """
import resource, sys
from training import training_hooks
log = training_hooks.MetricsLog(sys.argv[1], "m.jsonl", 0, "train")
limit = lambda size: resource.setrlimit(
  resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY)
)
for step in range(1, 7):
  if step == 3: limit(FULL_AT)
  if step == 5: limit(resource.RLIM_INFINITY)
  log.write({"global_step": step, "loss": 0.5})
  print(step, open(sys.argv[1] + "/m.jsonl").read().count("\\n"))
log.close()
"""


def test_no_space_for_reports_is_told_and_they_are_written_later(tmp_path):
  size = len(training_hooks._line({"global_step": 1, "loss": 0.5}))
  process = runs.launch(
    ["-c", FULL.replace("FULL_AT", str(2 * size + 9)), str(tmp_path)]
  )
  assert process.returncode == 0, process.stderr
  assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
  # In between there are whole lines only.
  assert process.stdout.split() == "1 1 2 2 3 2 4 2 5 5 6 6".split()
  assert process.stderr.count("training goes on and tries again") == 1
  assert process.stderr.count("TensorBoard gets no more of this run") == 1


def test_reports_that_never_found_space_are_an_error(tmp_path):
  log = log_of(tmp_path)
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
  try:
    log.write(report(1))
    with pytest.raises(DataError, match=r"m\.jsonl: 1 reports could not"):
      log.close()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_is_saved_when_stopped(
  tiny_run, tmp_path
):
  """As when horovodrun was killed: what it passed on goes nowhere."""
  process = subprocess.Popen(
    [
      sys.executable,
      *runs.arguments(tiny_run, tmp_path),
      "--num_train_steps=100000",
      "--train_batch_size=12",
      "--xla=off",
    ],
    stderr=subprocess.PIPE,
    env={**os.environ, "PYTHONPATH": runs.ROOT},
  )
  try:
    end = time.monotonic() + runs.HANG_SECONDS
    while len(training_hooks.read_jsonl(f"{tmp_path}/metrics.jsonl")) < 5:
      assert time.monotonic() < end and process.poll() is None
      time.sleep(0.1)
    process.stderr.close()
    process.send_signal(signal.SIGTERM)
    assert (
      process.wait(timeout=runs.HANG_SECONDS) == training_hooks.STOPPED_STATUS
    )
  finally:
    process.kill()
  saved = runs.weights(tmp_path)["global_step"]
  assert saved == len(runs.metrics(tmp_path)) >= 5


class Ticks:
  """The half seconds that a watchdog counts, at the test's own speed."""

  def __init__(self, dog):
    self._next, self._asked = queue.Queue(), queue.Queue()
    dog._ended = self

  def wait(self, _):
    self._asked.put(None)
    return self._next.get()

  def set(self):
    self._next.put(True)

  def pass_by(self, seconds):
    for _ in range(int(seconds / training_hooks._TICK)):
      self._asked.get()
      self._next.put(False)
    self._asked.get()  # all are counted
    self._asked.put(None)


def test_the_watchdog_counts_from_the_first_whole_update(monkeypatch):
  ended = []
  monkeypatch.setattr(
    training_hooks.Watchdog, "_end", lambda self, frame: ended.append(frame)
  )
  comm = Comm()
  comm.size = 2
  with training_hooks.Watchdog(comm) as dog:
    assert dog._thread is None
    dog.moved()
    assert dog._thread is None, "compiling takes its time"
    ticks = Ticks(dog)
    dog.watch()
    for _ in range(3):
      ticks.pass_by(40)
      dog.moved()
    ticks.pass_by(40)
    assert not ended
    dog.look_away()
    ticks.pass_by(100)
    assert not ended
    dog.watch()
    ticks.pass_by(45)
    assert not ended, "it took 40 s before, so 800 s are waited"
    ticks.pass_by(756)
    assert any(
      frame.f_code.co_name == "pass_by"
      for frame, _ in traceback.walk_stack(ended[0])
    ), "it says where this rank is"
  dog._thread.join()  # with its world
