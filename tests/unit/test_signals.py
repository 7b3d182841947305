"""Stopping: signals, the ranks' vote, the watchdog."""

import os
import queue
import signal
import subprocess
import sys
import time
import traceback
from unittest import mock

import psutil
import pytest
import runs

from checkpoints.metrics import read_jsonl
from common import errors
from gradients.distributed import Comm
from training import evaluation, signals

# Also where the tests run under nohup.
HEARS_HANGUPS = ["env", "--default-signal=HUP"]


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_is_saved_when_stopped(
  tiny_run, tmp_path
):
  """As when horovodrun was killed: what it passed on goes nowhere."""
  flags = ["--num_train_steps=100000", "--train_batch_size=12", "--xla=off"]
  process = subprocess.Popen(
    [sys.executable, *runs.arguments(tiny_run, tmp_path), *flags],
    stderr=subprocess.PIPE,
    env={**os.environ, "PYTHONPATH": runs.ROOT},
  )
  try:
    end = time.monotonic() + runs.HANG_SECONDS
    while len(read_jsonl(f"{tmp_path}/metrics.jsonl")) < 5:
      assert time.monotonic() < end and process.poll() is None
      time.sleep(0.1)
    process.stderr.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=runs.HANG_SECONDS) == errors.STOPPED_STATUS
  finally:
    process.kill()
  saved = runs.weights(tmp_path)["global_step"]
  assert saved == len(runs.metrics(tmp_path)) >= 5


def test_a_world_changes_only_when_ranks_are_elastic():
  class Comm:
    size, elastic = 4, False

    def allreduce(self, tensor, name):
      return tensor

    def hosts_changed(self):
      return False

  comm = Comm()
  vote = signals.StopVote(comm)

  def verdict(asked, overdue, changed):
    return vote.verdict([asked, overdue, changed, 0, 0])

  assert verdict(0, 0, 0) is None
  assert verdict(1, 0, 0) == verdict(4, 4, 0) == "stop"
  comm.elastic = True
  assert verdict(0, 0, 0) is None
  assert verdict(1, 0, 0) is None  # the others may be asked in a moment
  assert verdict(1, 1, 0) == verdict(0, 0, 1) == "change"
  assert verdict(4, 0, 0) == verdict(4, 4, 1) == "stop"


# As in hvd.init, which may wait long: no Python code runs meanwhile.
IN_C = """
import ctypes
from common import errors
errors.end_on_signals()
with errors.leaving_in_c():
  pass
with errors.leaving_in_c():
  mutex = ctypes.create_string_buffer(64)
  lock = ctypes.CDLL(None).pthread_mutex_lock
  print(flush=True)
  lock(mutex)
  lock(mutex)  # for ever; a signal does not end it
"""
RUNNING = """
import time
from common import errors
def main(_):
  print(flush=True)
  time.sleep(600)
errors.run_main(main)
"""
IMPORTING = "import time\nprint(flush=True)\ntime.sleep(600)\n"


@pytest.mark.parametrize(
  "arguments, names",
  [
    (["run_pretraining.py"], ["SIGTERM"]),
    (["run_pretraining.py"], ["SIGINT"]),
    (["run_pretraining.py"], ["SIGHUP"]),
    (["run_squad.py"], ["SIGTERM"]),
    (["-c", RUNNING], ["SIGINT"]),
    (["-c", IN_C], ["SIGTERM"]),
    (["-c", IN_C], ["SIGINT"]),
    (["-c", IN_C], ["SIGHUP"]),
    (["-c", IN_C], ["SIGHUP", "SIGTERM"]),  # under nohup, without the first
  ],
)
def test_a_stop_before_there_is_something_to_save(tmp_path, arguments, names):
  """While TensorFlow is imported, or ranks look for each other."""
  (tmp_path / "tensorflow.py").write_text(IMPORTING)
  launcher = ["nohup"] if len(names) > 1 else HEARS_HANGUPS
  # Rank 0 would check the flags first.
  folders = {"PYTHONPATH": f"{tmp_path}:{runs.ROOT}", "HOROVOD_RANK": "1"}
  process = subprocess.Popen(
    [*launcher, sys.executable, *arguments], cwd=runs.ROOT, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    env={**os.environ, **folders},
  )  # fmt: skip
  process.stdout.readline()
  for name in names:
    time.sleep(0.1)
    process.send_signal(getattr(signal, name))
  _, said = process.communicate(timeout=runs.HANG_SECONDS)
  assert process.returncode == errors.STOPPED_STATUS
  # nohup itself says that it ignores input.
  *others, last = said.splitlines()
  stopped = "stopped as asked: the same command completes it"
  assert last == f"{names[-1]}: {stopped}"
  assert launcher == ["nohup"] or not others


ENDING = """
import atexit, os, signal, sys
from training import train_loop
ask = lambda: os.kill(os.getpid(), signal.SIGINT)
atexit.register(ask)
class Last:
  def __del__(self):
    ask()
last = Last()  # goes after Python has put back what signals do by default
train_loop.run_main(lambda _: print("done"))
"""


def test_no_signal_changes_how_a_run_has_ended():
  done = subprocess.run(
    [sys.executable, "-c", ENDING], cwd=runs.ROOT, capture_output=True,
    text=True, timeout=runs.HANG_SECONDS,
  )  # fmt: skip
  assert (done.returncode, done.stdout) == (0, "done\n")
  assert "stopped" not in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def dispositions():
  """Those of signals, which are put back at the end."""
  names = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
  before = {number: signal.getsignal(number) for number in names}
  yield before
  for number, handler in before.items():
    signal.signal(number, handler)


@pytest.mark.parametrize("first", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_closed_terminal_asks_once(dispositions, monkeypatch, first):
  """It sends several SIGHUPs, of which none ends a run that is saving."""
  first = getattr(signal, first)
  monkeypatch.setattr(signals, "STOP_SIGNALS", [*dispositions])
  with signals.StopSignals() as noted:
    assert signal.getsignal(first) == noted._note
    os.kill(os.getpid(), first)
    assert noted.received == first.name
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
  for number, handler in dispositions.items():
    assert signal.getsignal(number) == handler


# A child that prints its number and sleeps, and programs that start it.
CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
COMMAND = f"""
import sys
from common import processes
processes.run("x", [sys.executable, "-c", {CHILD!r}],
  lambda line: print(line, end="", flush=True))
"""
CHILDREN = {
  "a command's command": f"""
import sys
from common import processes
processes.run("x", [sys.executable, "-c", {COMMAND!r}],
  lambda line: print(line, end="", flush=True))
""",
  "a worker": f"""
from workers.pool import Pool
if __name__ == "__main__":
  with Pool(2) as pool:
    pool.start(exec, [{CHILD!r}])
    while True:
      pool.raise_error()
""",
  "a measured plan": f"""
import os, time
from training import dry_run
def sleep(*_):
  exec({CHILD!r})
dry_run._measured = sleep
if __name__ == "__main__":
  dry_run.Job(None, None, None, 1, 0, 1e9, None).try_size(1)
""",
}


@pytest.mark.parametrize(
  "kind",
  [
    "a command's command",
    "a worker",
    pytest.param("a measured plan", marks=pytest.mark.slow),
  ],
)
def test_a_program_that_is_killed_leaves_no_child(tmp_path, kind):
  (tmp_path / "program.py").write_text(CHILDREN[kind])
  process = subprocess.Popen(
    [sys.executable, str(tmp_path / "program.py")],
    stdout=subprocess.PIPE, text=True,
    env={**os.environ, "PYTHONPATH": runs.ROOT},
  )  # fmt: skip
  child = psutil.Process(int(process.stdout.readline()))
  try:
    process.kill()
    child.wait(timeout=30)
  finally:
    if child.is_running():
      child.kill()
    process.communicate()


def test_one_ranks_wish_for_a_checkpoint_is_all_ranks():
  vote = signals.StopVote(Comm())
  wish = vote.feed(signals.StopSignals(), save=True)
  (asked,) = wish.values()
  assert list(map(float, asked)) == [0, 0, 0, 1, 0]
  assert vote.verdict([0, 0, 0, 1, 0]) is None


def test_a_budget_counts_updates_laps(monkeypatch):
  clock = [100.0]
  monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
  budget = signals.Budget(minutes=1)
  budget.passed = 20.0  # of an earlier start
  clock[0] += 50  # compiles
  assert budget.lap() == 0.0 and budget.share() == pytest.approx(1 / 3)
  for _ in range(4):
    budget.after_update(budget.lap())
    clock[0] += 10
  assert budget.lap() == 10.0 and budget.share() == 1.0
  assert budget.passed == 50.0 and budget.is_over()
  assert not signals.Budget(minutes=1).is_over()
  part = signals.Budget(10, 0.5, 0.8)  # a stage of three of ten minutes
  for passed, share in ((200.0, 0.0), (390.0, 0.5), (600.0, 1.0)):
    part.passed = passed
    assert part.share() == pytest.approx(share)
    assert part.is_over() == (passed >= 480)


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
    for _ in range(int(seconds / signals._TICK)):
      self._asked.get()
      self._next.put(False)
    self._asked.get()  # all are counted
    self._asked.put(None)


def test_the_watchdog_counts_from_the_first_whole_update(monkeypatch):
  ended = []
  monkeypatch.setattr(
    signals.Watchdog, "_end", lambda self, frame: ended.append(frame)
  )
  comm = Comm()
  comm.size = 2
  with signals.Watchdog(comm) as dog:
    assert dog._thread is None
    dog.heartbeat()
    assert dog._thread is None, "compiling takes its time"
    ticks = Ticks(dog)
    dog.resume()
    for _ in range(3):
      ticks.pass_by(40)
      dog.heartbeat()
    ticks.pass_by(40)
    assert not ended
    dog.pause()
    ticks.pass_by(100)
    assert not ended
    dog.resume()
    ticks.pass_by(45)
    assert not ended, "it took 40 s before, so 800 s are waited"
    ticks.pass_by(756)
    stack = [frame for frame, _ in traceback.walk_stack(ended[0])]
    names = [frame.f_code.co_name for frame in stack]
    assert "pass_by" in names, "it says where this rank is"
  dog._thread.join()  # with its world


@pytest.mark.parametrize("ranks, end", [("1", " as asked: the"), ("2", "\n")])
def test_of_several_ranks_the_launcher_says_why(ranks, end):
  """It knows whether another rank has failed."""
  code = (
    "from common import errors; import os, signal; errors.end_on_signals();"
    "os.kill(os.getpid(), signal.SIGTERM)"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=runs.ROOT, text=True, capture_output=True,
    env={**os.environ, "HOROVOD_SIZE": ranks},
  )  # fmt: skip
  assert done.returncode == errors.STOPPED_STATUS
  assert done.stderr.startswith(f"SIGTERM: stopped{end}")


def test_an_updates_weights_are_evaluated_once():
  """Also the best one's, after the last one's."""
  calls, comm = [], Comm()
  config = mock.Mock(evaluate_average=False)
  evaluate = evaluation.Evaluator(
    lambda *_: calls.append(0) or {"examples": len(calls)},
    str,
    config,
    "",
    comm,
  )
  results = []
  for step in (2, 4, 2):
    results.append(evaluate(None, step, None, mock.Mock(), log=False))
  assert results[0] == results[2] != results[1] and len(calls) == 2
