"""Kills, stops and damages runs on random schedules; the results must not know.

  python -m benchmarks.faults.fault_schedules \\
    --schedules=50 --seed=1 [--first=K]

A schedule is one to four faults that strike a small training run of one or two
ranks, which is started again with the same command until it is complete: kills,
SIGTERM and SIGINT (of ranks and of horovodrun; in start-up, at an update, while
a checkpoint is written), SIGSTOP for a while or for good, a newest checkpoint
that is damaged between two starts, a full disk (a limit on the size of rank 0's
files). Then `outcome.compare` compares it with an uninterrupted run on as many
ranks: checkpoints and reports to the last bit, and the records that updates
consumed. After each end no process is left, and at last no half-written file.

One JSON line. A schedule is a function of --seed and its number, so
--first=NUMBER --schedules=1 runs a failed one alone.
"""

import collections
import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from typing import NamedTuple

import psutil
from absl import flags

from benchmarks import fake_records, measuring
from benchmarks.faults import outcome, recorded_run
from checkpoints import metrics
from common import errors, json_files, processes
from records import data_set
from text_encoders.base import TokenizerInfo
from training import next_steps

FLAGS = flags.FLAGS
_MARK = "FAULT_SCHEDULES_RUN"  # environment: in all processes of one start

RECORDS = 150  # of which 48 updates of 8 are more than two epochs
UPDATES = 48
SAVE_EVERY = 4
GLOBAL_BATCH = 8
LENGTH, PREDICTIONS = 16, 3
BERT = dict(
  vocab_size=400, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
  intermediate_size=64, max_position_embeddings=LENGTH, type_vocab_size=2,
  hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
)  # fmt: skip
LIMIT = 150  # seconds for anything to happen: a start, an end after a fault
# Seconds; a few instead of Horovod's 30, which is only waiting here. Ranks that
# start on a busy machine must still find each other.
HOROVOD = {
  "HOROVOD_GLOO_TIMEOUT_SECONDS": "8",
  "HOROVOD_RANK_TERMINATION_SECONDS": "15",
}

SIGNALS = {
  "kill": signal.SIGKILL,
  "terminate": signal.SIGTERM,
  "interrupt": signal.SIGINT,
  "pause": signal.SIGSTOP,  # for a few seconds
  "stop": signal.SIGSTOP,  # for good: the other ranks must end the run
}
DAMAGES = ("flip", "cut", "delete")  # of the newest checkpoint, after a kill
FULL = ("full", "full_report")  # disk: for a checkpoint; for any report
OFTEN = ("kill", "kill", "terminate", "stop", "stop")  # as in life
GRACEFUL = ("terminate", "interrupt")
LAUNCHER = -1  # as the target: horovodrun
# A moment of a fault -> the longest delay after it, in seconds.
MOMENTS = {"start": 7.0, "update": 0.15, "saving": 0.02}


class Setting(NamedTuple):
  """A way to train; runs of one setting are equal."""

  ranks: int
  accumulation: int
  precision: str

  def __str__(self):
    return f"{self.ranks}x{self.accumulation}-{self.precision}"

  def command(self, folder: str) -> list[str]:
    """The training of this setting in `folder`, beside which the data are."""
    data, scale = os.path.dirname(folder), {}
    if self.precision == "fp16":  # too high at first, and doubles again soon
      scale = dict(initial_loss_scale=2**30, loss_scale_hysteresis=1)
      scale["loss_scale_window"] = 4
    given = next_steps.flag_words(dict(
      do_train=True, bert_config_file=f"{data}/bert_config.json",
      input_file=f"{data}/data-*.tfrecord", output_dir=f"{folder}/run",
      train_batch_size=GLOBAL_BATCH // self.ranks // self.accumulation,
      global_batch_size=GLOBAL_BATCH, num_train_steps=UPDATES,
      num_warmup_steps=5, learning_rate=1e-3, log_every_steps=1,
      save_checkpoints_steps=SAVE_EVERY, num_threads=1, xla="off",
      precision=self.precision, **scale,
    ))  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.faults.recorded_run", *given]
    return processes.horovodrun(self.ranks, command)


SETTINGS = [
  Setting(ranks, accumulation, precision)
  for precision in ("fp32", "fp16")
  for accumulation in (1, 2)
  for ranks in (2, 1)
]


class Fault(NamedTuple):
  """One fault.

  Its moment is `delay` seconds after the start ("start"), after some updates of
  this start or since the fault before ("update"), or when then next a
  checkpoint is being written ("saving").
  """

  kind: str  # one of SIGNALS, DAMAGES or FULL
  target: int = 0  # a rank or LAUNCHER
  moment: str = "update"
  updates: int = 3
  delay: float = 0.0
  chance: float = 0.5  # what else is random, from 0 to 1

  def __str__(self):
    target = "launcher" if self.target == LAUNCHER else f"rank{self.target}"
    at = "" if self.moment == "start" else f"+{self.updates}"
    return f"{self.kind}:{target}:{self.moment}{at}+{self.delay:.3f}s"


def draw(seed: int, number: int) -> tuple[Setting, list[Fault]]:
  """Schedule `number`."""
  rng = random.Random(f"{seed} {number}")
  setting = SETTINGS[number % len(SETTINGS)]
  count = rng.randint(1, 4)
  return setting, [draw_fault(rng, setting) for _ in range(count)]


def draw_fault(rng: random.Random, setting: Setting) -> Fault:
  """A fault of any kind that the setting can have."""
  kinds = [*SIGNALS, *DAMAGES, *FULL, *OFTEN]
  if setting.ranks == 1:  # nobody would end a run that stands still
    kinds = [kind for kind in kinds if kind != "stop"]
  kind = rng.choice(kinds)
  # Rank 0 alone writes what is damaged, and fills a disk.
  targets, moments = [0], ["update"]
  if kind in SIGNALS:
    targets, moments = [*range(setting.ranks)], ["update", "saving", "start"]
  if kind in ("kill", *GRACEFUL) and setting.ranks > 1:
    targets.append(LAUNCHER)
  moment = rng.choice(moments)
  return Fault(
    kind=kind,
    moment=moment,
    target=rng.choice(targets),
    updates=rng.randint(1, 9),
    delay=rng.uniform(0, MOMENTS[moment]),
    chance=rng.random(),
  )


class Missed(Exception):
  """The run was over before the fault's moment came."""


class Start:
  """One start of the command, and all its processes."""

  def __init__(self, setting: Setting, folder: str, number: int):
    self.output_dir = os.path.join(folder, "run")
    self.metrics = os.path.join(self.output_dir, metrics.METRICS_FILE)
    self._setting, self._mark = setting, uuid.uuid4().hex
    self._consumed = os.path.join(folder, f"consumed-{number}")
    ours = {_MARK: self._mark, recorded_run.LOG: self._consumed}
    # Messages go to a pipe, which no limit on the size of files touches.
    self._process = subprocess.Popen(
      setting.command(folder),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
      errors="replace",
      cwd=next_steps.ROOT,
      env={**os.environ, **HOROVOD, **ours},
      start_new_session=True,
    )
    self.messages: list[str] = []
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def _read(self):
    for line in self._process.stderr:
      self.messages.append(line.rstrip("\n"))

  @property
  def status(self) -> int | None:
    """The exit status of the process that was started; None: it runs."""
    return self._process.poll()

  def update(self) -> int | None:
    """The update that rank 0 is at; None before the first of this start."""
    return max(recorded_run.read(f"{self._consumed}-0"), default=None)

  def processes(self) -> list[psutil.Process]:
    """All that this start has left, of whatever parent."""
    ours = []
    for process in psutil.process_iter():
      # None of the others, one that has ended, or somebody else's.
      with contextlib.suppress(psutil.Error, OSError):
        if process.environ().get(_MARK) == self._mark:
          ours.append(process)
    return ours

  def find(self, target: int) -> psutil.Process | None:
    """A rank or the launcher, if it is there (yet)."""
    if target == LAUNCHER or self._setting.ranks == 1:
      return psutil.Process(self._process.pid)
    for process in self.processes():
      with contextlib.suppress(psutil.Error):
        rank = process.environ().get("HOROVOD_RANK")
        if rank == str(target) and process.cmdline()[0] == sys.executable:
          return process
    return None

  def until(self, condition, pause: float = 0.003):
    """Waits for the condition and returns it; `Missed` if the run ended."""
    give_up = time.monotonic() + LIMIT
    while not (value := condition()):
      if self.status is not None:
        raise Missed
      if time.monotonic() > give_up:
        raise TimeoutError(f"nothing happened for {LIMIT} s")
      time.sleep(pause)
    return value

  def wait(self) -> bool:
    """Waits for the end of all processes; False if it had to end them."""
    give_up = time.monotonic() + LIMIT
    while time.monotonic() < give_up:
      if self.status is not None and not self.processes():
        self._reader.join(timeout=5)
        return True
      time.sleep(0.05)
    self.end()
    return False

  def end(self) -> None:
    """Ends what is left."""
    for process in self.processes():
      with contextlib.suppress(psutil.Error):
        process.kill()
    self._process.wait(timeout=5)


def wait_for_moment(fault: Fault, start: Start) -> None:
  """Returns when the fault is to strike, counted from now; see `Fault`."""
  if fault.moment != "start":
    first = start.until(start.update)
    due = min(first + fault.updates, UPDATES - 2)
    start.until(lambda: start.update() >= due)
  if fault.moment == "saving":
    saving = os.path.join(start.output_dir, ".saving")
    start.until(lambda: os.path.exists(saving), pause=0.0003)
  if fault.kind in DAMAGES:
    start.until(lambda: len(outcome.newest_checkpoints(start.output_dir)) >= 2)
  time.sleep(fault.delay)


def strike(fault: Fault, start: Start) -> None:
  """Strikes a start with a fault; `Missed` if the target has ended.

  TimeoutError: the fault was without consequence.
  """
  target = start.until(lambda: start.find(fault.target))
  try:
    if fault.kind in FULL:
      _fill_disk(fault, start, target)
      return
    target.send_signal(SIGNALS.get(fault.kind, signal.SIGKILL))
    if fault.kind == "pause":
      time.sleep(1 + 3 * fault.chance)
      target.send_signal(signal.SIGCONT)
  except psutil.NoSuchProcess as e:
    raise Missed from e


def _fill_disk(fault: Fault, start: Start, rank0: psutil.Process) -> None:
  """Limits the size of rank 0's files until it says so or ends."""
  has_message = lambda: any("not be written" in m for m in start.messages)
  last = min(start.update() + 10, UPDATES)
  consequence = lambda: has_message() or start.update() >= last
  size = 100_000  # of a checkpoint that has more than three times that
  if fault.kind == "full_report":
    consequence = lambda: False
    size = os.path.getsize(start.metrics) + int(800 * fault.chance)  # in a line
  unlimited = resource.RLIM_INFINITY
  rank0.rlimit(resource.RLIMIT_FSIZE, (size, unlimited))
  try:
    start.until(consequence)
    if not has_message():
      raise TimeoutError("the disk was full and nobody said so")
  except Missed:
    pass  # it ended: that is a consequence, too
  finally:
    with contextlib.suppress(psutil.NoSuchProcess):
      rank0.rlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))


class Schedules:
  """Runs schedules, each beside the uninterrupted run of its setting."""

  def __init__(self, folder: str):
    self.folder = os.path.abspath(folder)
    sizes = RECORDS // 2, LENGTH, PREDICTIONS, BERT["vocab_size"]
    files = [
      fake_records.write(
        f"{self.folder}/data-{i}.tfrecord", *sizes, i * sizes[0]
      )
      for i in range(2)
    ]
    words = "wordpiece", "vocab.txt", "", BERT["vocab_size"], True, 4
    data_set.Manifest(
      max_seq_length=LENGTH,
      max_predictions_per_seq=PREDICTIONS,
      examples_per_record=1,
      masking="dynamic",
      tokenizer=TokenizerInfo(*words),
      settings={"masked_lm_prob": 0.15},
      counts={"examples": RECORDS},
      files=tuple(files),
    ).save(f"{self.folder}/data{data_set.MANIFEST_SUFFIX}")
    json_files.write(f"{self.folder}/bert_config.json", BERT)
    self._references = {}

  def reference(self, setting: Setting) -> outcome.Outcome:
    """What the uninterrupted run leaves."""
    if setting not in self._references:
      schedule = _Schedule(self.folder, f"reference-{setting}", setting, [])
      schedule.complete()
      found = outcome.read(schedule.folder, setting, schedule.starts, UPDATES)
      stream = found.records()
      epochs = [stream[i : i + RECORDS] for i in range(0, len(stream), RECORDS)]
      assert not schedule.problems, schedule.problems
      assert len(stream) == UPDATES * GLOBAL_BATCH
      assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
      self._references[setting] = found
    return self._references[setting]

  def run(self, name: str, setting: Setting, faults: list[Fault]) -> dict:
    """Runs one schedule: what happened, and in "problems" what must not."""
    want, began = self.reference(setting), time.monotonic()
    schedule = _Schedule(self.folder, f"schedule-{name}", setting, faults)
    lost = repeated = 0
    if schedule.complete():
      got = outcome.read(schedule.folder, setting, schedule.starts, UPDATES)
      problems, lost, repeated = outcome.compare(got, want)
      schedule.problems += problems
      for left in sorted(os.listdir(schedule.output_dir)):
        if left == ".saving" or ".tmp" in left:
          schedule.problems.append(f"left behind: {left}")
    return {
      "schedule": name,
      "setting": str(setting),
      "struck": [str(fault) for fault in schedule.struck],
      "missed": [str(fault) for fault in schedule.to_come],
      "starts": schedule.starts,
      "problems": schedule.problems,
      "lost": lost,
      "repeated": repeated,
      "longest_end": round(schedule.longest_end, 1),
      "seconds": round(time.monotonic() - began, 1),
    }


class _Schedule:
  """One run under faults."""

  def __init__(self, data: str, name: str, setting: Setting, faults: list):
    self.folder, self._setting = os.path.join(data, name), setting
    self.output_dir = os.path.join(self.folder, "run")
    os.makedirs(self.folder)
    self.to_come, self.struck = list(faults), []
    self.problems: list[str] = []
    self.starts, self.longest_end = 0, 0.0

  def complete(self) -> bool:
    """Starts the command until the run is complete; False if it never is."""
    for _ in range(len(self.to_come) + 1):  # a fault ends one start at most
      self.starts += 1
      start = Start(self._setting, self.folder, self.starts)
      try:
        newest = self._strike(start)
        status = start.status
      except TimeoutError as e:
        self.problems.append(f"{self.to_come[0]}: {e}")
        return False
      finally:
        start.end()
      if status == 0:
        return True
      if not newest or newest.kind == "pause":
        last = start.messages[-5:]
        self.problems.append(f"ended with {status} by itself: {last}")
      elif newest.kind in DAMAGES:
        outcome.damage(newest.kind, newest.chance, self.output_dir)
      elif newest.kind in GRACEFUL:
        self._check_end(start, newest)
      if self.problems:
        return False
    self.problems.append(f"not complete after {self.starts} starts")
    return False

  def _strike(self, start: Start) -> Fault | None:
    """Strikes a start until it ends; the last fault that it had."""
    newest, began = None, time.monotonic()
    while self.to_come and start.status is None:
      fault = self.to_come[0]
      try:
        wait_for_moment(fault, start)
        began = time.monotonic()
        strike(fault, start)
      except Missed:
        break  # at the run's end all faults that are left come too late
      newest = self.to_come.pop(0)
      self.struck.append(newest)
      if newest.kind not in ("pause", *FULL):
        break  # it ends the run
    if not start.wait():
      self.problems.append(f"no end {LIMIT} s after {newest}")
    elif newest and start.status:
      seconds = time.monotonic() - began
      self.longest_end = max(self.longest_end, seconds)
    return newest

  def _check_end(self, start: Start, fault: Fault) -> None:
    """After a request to end everything that was reported is saved."""
    if start.update() is None:
      return  # in start-up there is nothing to save yet
    # horovodrun has a status of its own, unless it passes the ranks' on.
    if start.status not in ((75,) if self._setting.ranks == 1 else (75, 1)):
      self.problems.append(f"{fault}: exit status {start.status}")
    reports = json_files.read_lines(start.metrics)
    reported = [report["global_step"] for report in reports[-1:]]
    saved = outcome.newest_checkpoints(self.output_dir)[:1]
    if saved != reported:
      difference = f"update {reported} was reported, {saved} saved"
      self.problems.append(f"{fault}: {difference}")


def summary(results: list[dict], seed: int) -> dict:
  """The benchmark's result."""
  struck = [fault for result in results for fault in result["struck"]]
  kinds = collections.Counter(fault.split(":")[0] for fault in struck)
  failed = [result for result in results if result["problems"]]

  def total(name):
    return sum(result[name] for result in results)

  return {
    "schedules": len(results),
    "equal": len(results) - len(failed),
    "records_lost": total("lost"),
    "records_repeated": total("repeated"),
    "faults": dict(sorted(kinds.items())),
    "missed": sum(len(result["missed"]) for result in results),
    "starts": total("starts"),
    "longest_end_seconds": max(result["longest_end"] for result in results),
    "seconds": round(total("seconds"), 1),
    "seed": seed,
    "failed": failed,
  }


def main(_) -> None:
  with tempfile.TemporaryDirectory() as folder:
    schedules, results = Schedules(folder), []
    for number in range(FLAGS.first, FLAGS.first + FLAGS.schedules):
      setting, faults = draw(FLAGS.seed, number)
      results.append(schedules.run(str(number), setting, faults))
      measuring.tell(results[-1])
  measuring.show(summary(results, FLAGS.seed))
  if any(result["problems"] for result in results):
    raise errors.UserError("some schedules failed, see above")


if __name__ == "__main__":
  flags.DEFINE_integer("schedules", 50, "How many.", lower_bound=1)
  flags.DEFINE_integer("seed", 1, "Of the schedules.")
  flags.DEFINE_integer("first", 1, "Number of the first schedule.")
  errors.run_main(main)
