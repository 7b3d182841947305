"""Kills, stops and damages runs on random schedules; the results must not know.

  python -m benchmarks.faults.fault_schedules \\
    --schedules=50 --seed=1 [--first=K]

A schedule is one to four faults that strike a small training run of one or two
ranks, which is started again with the same command until it is complete: kills,
SIGTERM and SIGINT (of ranks and of horovodrun; in start-up, at an update, while
a checkpoint is written), SIGSTOP for a while or for good, a newest checkpoint
that is damaged between two starts, a full disk (a limit on the size of rank 0's
files). Then it is held against an uninterrupted run on as many ranks:

  - every array of the last checkpoint is equal to the last bit;
  - metrics.jsonl has each update once with the same values, speeds aside;
  - the records that the updates consumed, as `recorded_run` wrote them down,
    are the same in the same order, masks included, none lost and none repeated;
  - after each end no process is left, and at last no half-written file.

One JSON line. A schedule is a function of --seed and its number, so
--first=NUMBER --schedules=1 runs a failed one alone.
"""

import collections
import contextlib
import dataclasses
import glob
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid

import psutil
from absl import flags

import tokenization
from benchmarks import fake_records
from benchmarks.faults import recorded_run
from checkpoints import checkpoint_files, metrics
from common import errors, json_files
from common.tensorflow_v1 import tf
from data import records
from training import next_steps, reporting

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
PACE = 0.05  # seconds of rest after a micro-batch, for faults to strike between
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


def define_flags() -> None:
  flags.DEFINE_integer("schedules", 50, "How many.", lower_bound=1)
  flags.DEFINE_integer("seed", 1, "Of the schedules.")
  flags.DEFINE_integer("first", 1, "Number of the first schedule.")
  flags.DEFINE_string(
    "folder", None, "Where to work and leave everything; default: temporary."
  )


@dataclasses.dataclass(frozen=True)
class Setting:
  """What is trained how; runs of one setting are equal."""

  ranks: int
  accumulation: int
  precision: str

  def __str__(self):
    return f"{self.ranks}x{self.accumulation}-{self.precision}"

  def command(self, folder: str) -> list[str]:
    """The training of this setting in `folder`, beside which the data are."""
    data, launcher, scale = os.path.dirname(folder), [], {}
    if self.ranks > 1:
      beside = os.path.join(os.path.dirname(sys.executable), "horovodrun")
      launcher = [beside, "-np", str(self.ranks)]
    if self.precision == "fp16":  # too high at first, and doubles again soon
      scale = dict(initial_loss_scale=2**30, loss_scale_hysteresis=1)
      scale["loss_scale_window"] = 4
    given = next_steps.given(dict(
      do_train=True, bert_config_file=f"{data}/bert_config.json",
      input_file=f"{data}/data-*.tfrecord", output_dir=f"{folder}/run",
      train_batch_size=GLOBAL_BATCH // self.ranks // self.accumulation,
      global_batch_size=GLOBAL_BATCH, num_train_steps=UPDATES,
      num_warmup_steps=5, learning_rate=1e-3, log_every_steps=1,
      save_checkpoints_steps=SAVE_EVERY, num_threads=1, xla="off",
      precision=self.precision, **scale,
    ))  # fmt: skip
    module = ["-m", "benchmarks.faults.recorded_run"]
    return [*launcher, sys.executable, *module, *given]


SETTINGS = [
  Setting(ranks, accumulation, precision)
  for precision in ("fp32", "fp16")
  for accumulation in (1, 2)
  for ranks in (2, 1)
]


@dataclasses.dataclass(frozen=True)
class Fault:
  """One fault.

  Attributes:
    kind: one of `SIGNALS`, `DAMAGES` or `FULL`.
    target: a rank or `LAUNCHER`.
    moment: "start", "update" or "saving": seconds after the start; after some
      updates of this start (or since the fault before); when then next a
      checkpoint is being written.
    updates: that many.
    delay: seconds after that moment.
    chance: what else is random, from 0 to 1.
  """

  kind: str
  target: int = 0
  moment: str = "update"
  updates: int = 3
  delay: float = 0.0
  chance: float = 0.5

  def __str__(self):
    target = "launcher" if self.target == LAUNCHER else f"rank{self.target}"
    at = "" if self.moment == "start" else f"+{self.updates}"
    return f"{self.kind}:{target}:{self.moment}{at}+{self.delay:.3f}s"


def draw(seed: int, number: int) -> tuple[Setting, list[Fault]]:
  """Schedule `number`."""
  rng = random.Random(f"{seed} {number}")
  setting = SETTINGS[number % len(SETTINGS)]
  return setting, [_draw_fault(rng, setting) for _ in range(rng.randint(1, 4))]


def _draw_fault(rng: random.Random, setting: Setting) -> Fault:
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
  """One start of the command, and all its processes.

  Attributes:
    process: the one that was started: rank 0, or horovodrun.
    lines: of its stderr so far.
  """

  def __init__(self, setting: Setting, folder: str, number: int, pace: float):
    """Starts it in the schedule's `folder`; `pace` is `recorded_run`'s."""
    self.output_dir = os.path.join(folder, "run")
    self._metrics = os.path.join(self.output_dir, metrics.METRICS_FILE)
    self._metrics_before = self._inode()
    self._setting, self._mark = setting, uuid.uuid4().hex
    self._messages = os.path.join(folder, f"stderr-{number}")
    self.process = subprocess.Popen(
      setting.command(folder),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
      errors="replace",
      start_new_session=True,
      env={
        **os.environ,
        **HOROVOD,
        "PYTHONPATH": next_steps.ROOT,
        _MARK: self._mark,
        recorded_run.LOG: os.path.join(folder, f"consumed-{number}"),
        recorded_run.PACE: str(pace),
      },
    )
    self.began = time.monotonic()
    self.lines: list[str] = []
    # A pipe, for a limit on the size of files is none on this.
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def _read(self):
    with open(self._messages, "w", encoding="utf-8") as f:
      for line in self.process.stderr:
        self.lines.append(line.rstrip("\n"))
        f.write(line)

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
      return psutil.Process(self.process.pid)
    for process in self.processes():
      with contextlib.suppress(psutil.Error):
        rank = process.environ().get("HOROVOD_RANK")
        if rank == str(target) and process.cmdline()[0] == sys.executable:
          return process
    return None

  def has_ended(self) -> bool:
    """Whether the process that was started has."""
    return self.process.poll() is not None

  def _inode(self):
    with contextlib.suppress(FileNotFoundError):
      return os.stat(self._metrics).st_ino

  def updates(self) -> int | None:
    """Updates reported so far; None before this start has its report open."""
    if self._inode() == self._metrics_before:
      return None
    with open(self._metrics, "rb") as f:
      return f.read().count(b"\n")

  def is_saving(self) -> bool:
    return os.path.exists(os.path.join(self.output_dir, ".saving"))

  def until(self, condition, pause: float = 0.003):
    """Waits for the condition and returns it.

    Raises:
      Missed: the run ended before.
      TimeoutError: neither.
    """
    give_up = time.monotonic() + LIMIT
    while not (value := condition()):
      if self.has_ended():
        raise Missed
      if time.monotonic() > give_up:
        raise TimeoutError(f"nothing happened for {LIMIT} s")
      time.sleep(pause)
    return value

  def wait(self) -> bool:
    """Waits for the end of all processes; False if it had to end them."""
    give_up = time.monotonic() + LIMIT
    while time.monotonic() < give_up:
      if self.has_ended() and not self.processes():
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
    with contextlib.suppress(subprocess.TimeoutExpired):
      self.process.wait(timeout=10)

  def last_lines(self) -> dict[str, str]:
    """The last line of each rank, without horovodrun's prefix."""
    last = {}
    for line in self.lines:
      of_rank = re.match(r"\[(\d+)\]<std\w+>:(.*)", line)
      rank, text = of_rank.groups() if of_rank else ("0", line)
      from_shell = text in ("", "Terminated", "Killed", "Aborted")
      if not from_shell and (of_rank or self._setting.ranks == 1):
        last[rank] = text
    return last

  def traceback(self) -> bool:
    """Whether a rank ended as by a bug."""
    begins = r"\[\d+\]<std\w+>:Traceback"
    if self._setting.ranks == 1:
      begins = "Traceback"
    return any(re.match(begins, line) for line in self.lines)


def newest_checkpoints(output_dir: str) -> list[int]:
  """Updates of those that are whole, newest first."""
  files, whole = checkpoint_files.CheckpointFiles(output_dir, 1), []
  for step in files.steps():
    with contextlib.suppress(checkpoint_files.CheckpointError):
      files.check(step)
      whole.append(step)
  return whole


def wait_for_moment(fault: Fault, start: Start, base: int | None) -> None:
  """Returns when the fault is to strike; see `Fault`.

  `base`: updates when the fault before struck this start; None: none has.
  """
  if fault.moment == "start":
    wait = start.began + fault.delay - time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
      start.process.wait(timeout=max(0.0, wait))
    start.until(lambda: start.find(fault.target))
    return
  if base is None:
    start.until(lambda: start.updates() is not None)
    base = start.updates()
  target = min(base + fault.updates, UPDATES - 2)
  start.until(lambda: start.updates() >= target)
  if fault.moment == "saving":
    start.until(start.is_saving, pause=0.0003)
  if fault.kind in DAMAGES:
    start.until(lambda: len(newest_checkpoints(start.output_dir)) >= 2)
  time.sleep(fault.delay)


def strike(fault: Fault, start: Start) -> bool:
  """Does it; returns whether it ends the run.

  Raises:
    Missed: the target has ended.
    TimeoutError: the fault was without consequence.
  """
  target = start.until(lambda: start.find(fault.target))
  try:
    if fault.kind in FULL:
      return _fill_disk(fault, start, target)
    target.send_signal(SIGNALS.get(fault.kind, signal.SIGKILL))
    if fault.kind == "pause":
      time.sleep(1 + 3 * fault.chance)
      target.send_signal(signal.SIGCONT)
  except psutil.NoSuchProcess as e:
    raise Missed from e
  return fault.kind != "pause"


def _fill_disk(fault: Fault, start: Start, rank0: psutil.Process) -> bool:
  """Limits the size of rank 0's files until it has told the consequence."""
  told = lambda: any("could not be written" in line for line in start.lines)
  size = 100_000  # of a checkpoint that has more than three times that
  if fault.kind == "full_report":
    told = start.has_ended
    path = os.path.join(start.output_dir, metrics.METRICS_FILE)
    size = os.path.getsize(path) + int(800 * fault.chance)  # in a line
  last = min(start.updates() + 10, UPDATES)
  unlimited = resource.RLIM_INFINITY
  rank0.rlimit(resource.RLIMIT_FSIZE, (size, unlimited))
  try:
    start.until(lambda: told() or start.updates() >= last)
  except Missed:
    return True  # it was the last checkpoint
  finally:
    with contextlib.suppress(psutil.NoSuchProcess):
      rank0.rlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
  if not told():
    raise TimeoutError("the disk was full and nobody said so")
  return start.has_ended()


def damage(fault: Fault, output_dir: str) -> str:
  """Damages the newest of several checkpoints; says what was done."""
  steps = newest_checkpoints(output_dir)
  if len(steps) < 2:
    return "only one checkpoint"
  prefix = os.path.join(output_dir, checkpoint_files.PREFIX)
  files = sorted(glob.glob(f"{prefix}-{steps[0]}.*"))
  path = files[int(fault.chance * len(files))]
  if fault.kind == "delete":
    os.unlink(path)
    return f"deleted {os.path.basename(path)}"
  place = int(fault.chance * len(files) % 1 * os.path.getsize(path))
  with open(path, "r+b") as f:
    if fault.kind == "cut":
      f.truncate(place)
    else:
      f.seek(place)
      byte = f.read(1)[0]
      f.seek(place)
      f.write(bytes([byte ^ 0x10]))
  return f"{fault.kind} byte {place} of {os.path.basename(path)}"


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a complete run leaves, and what is compared.

  Attributes:
    arrays: of the last checkpoint, by name.
    reports: lines of metrics.jsonl, without speeds, as text.
    consumed: update -> what its micro-batches were, rank by rank, as
      `recorded_run` wrote it; as it was done last.
    redone: differences between that and how it was done before.
  """

  arrays: dict
  reports: list[str]
  consumed: dict
  redone: list[str]

  @classmethod
  def of(cls, folder: str, setting: Setting, starts: int) -> "Outcome":
    """Reads the folder of a schedule whose run is complete."""
    output_dir = os.path.join(folder, "run")
    prefix = os.path.join(output_dir, f"{checkpoint_files.PREFIX}-{UPDATES}")
    reader = tf.train.load_checkpoint(prefix)
    names = reader.get_variable_to_shape_map()
    reports = []
    path = os.path.join(output_dir, metrics.METRICS_FILE)
    for report in json_files.read_lines(path):
      for name in report.keys() & {*reporting.MEASURED}:
        del report[name]
      reports.append(json.dumps(report))
    consumed, redone = {}, []
    for start in range(1, starts + 1):
      _add_start(consumed, redone, folder, setting, start)
    arrays = {name: reader.get_tensor(name) for name in names}
    return cls(arrays, reports, dict(sorted(consumed.items())), redone)

  def records(self) -> list[int]:
    """Record numbers in the order of the stream."""
    stream = []
    for ranks in self.consumed.values():
      for micro_batches in ranks:
        for _, numbers, _ in micro_batches:
          stream += numbers
    return stream


def _consumption(path: str) -> dict[int, list]:
  """Update -> its micro-batches, from the lines that were written whole."""
  updates = collections.defaultdict(list)
  with contextlib.suppress(FileNotFoundError), open(path) as f:
    for line in f:
      if line.endswith("\n"):
        step, *micro_batch = json.loads(line)
        updates[step + 1].append(micro_batch)
  return updates


def _add_start(consumed, redone, folder, setting, start) -> None:
  """Adds what one start did to what those before did."""
  by_rank = [
    _consumption(os.path.join(folder, f"consumed-{start}-{rank}"))
    for rank in range(setting.ranks)
  ]
  for update in sorted(set().union(*by_rank)):
    ranks = [updates[update] for updates in by_rank]
    for now, before in zip(ranks, consumed.get(update, ranks), strict=True):
      if now[: len(before)] != before[: len(now)]:
        redone.append(f"update {update} was of other records in start {start}")
    counts = {len(done) for done in ranks}
    if counts == {setting.accumulation}:
      consumed[update] = ranks
    elif max(counts) > setting.accumulation:
      redone.append(f"update {update} has too many micro-batches")


def _few(updates: list[int]) -> str:
  more = f" and {len(updates) - 5} more" if len(updates) > 5 else ""
  return f"{updates[:5]}{more}"


def compare(got: Outcome, want: Outcome) -> tuple[list[str], int, int]:
  """(differences in words, records lost, records repeated)."""
  problems = list(got.redone)
  if got.arrays.keys() != want.arrays.keys():
    problems.append("the checkpoint has other variables")
  unequal = []
  for name in sorted(got.arrays.keys() & want.arrays.keys()):
    ours, theirs = got.arrays[name], want.arrays[name]
    if ours.dtype != theirs.dtype or ours.tobytes() != theirs.tobytes():
      unequal.append(name)
  if unequal:
    problems.append(f"{len(unequal)} arrays differ, as {unequal[0]}")
  if got.reports != want.reports:
    step_of = lambda line: json.loads(line)["global_step"]
    counts = collections.Counter(map(step_of, got.reports))
    missing = [n for n in range(1, UPDATES + 1) if n not in counts]
    double = [n for n, count in counts.items() if count > 1]
    other = sorted(map(step_of, set(got.reports) - set(want.reports)))
    problems.append(
      f"metrics.jsonl: missing {_few(missing)}, double {_few(double)}, other "
      f"values in {_few(other)}"
    )
  if got.consumed != want.consumed:
    updates = got.consumed.keys() | want.consumed.keys()
    other = [
      n for n in sorted(updates) if got.consumed.get(n) != want.consumed.get(n)
    ]
    problems.append(f"other records or masks in updates {_few(other)}")
  had = collections.Counter(got.records())
  due = collections.Counter(want.records())
  return problems, (due - had).total(), (had - due).total()


def check_reference(outcome: Outcome) -> None:
  """UserError unless an uninterrupted run has each record once an epoch."""
  stream = outcome.records()
  epochs = [stream[i : i + RECORDS] for i in range(0, len(stream), RECORDS)]
  if (
    len(stream) != UPDATES * GLOBAL_BATCH
    or len(outcome.reports) != UPDATES
    or any(len(set(epoch)) != len(epoch) for epoch in epochs)
  ):
    raise errors.UserError("the uninterrupted run lost or repeated records")


class Schedules:
  """Runs schedules, each beside the uninterrupted run of its setting."""

  def __init__(self, folder: str):
    """Writes the data into `folder`."""
    self.folder = os.path.abspath(folder)
    os.makedirs(self.folder, exist_ok=True)
    sizes = RECORDS // 2, LENGTH, PREDICTIONS, BERT["vocab_size"]
    files = [
      fake_records.write(
        f"{self.folder}/data-{i}.tfrecord", *sizes, i * sizes[0]
      )
      for i in range(2)
    ]
    words = "wordpiece", "vocab.txt", "", BERT["vocab_size"], True, 4
    records.Manifest(
      max_seq_length=LENGTH,
      max_predictions_per_seq=PREDICTIONS,
      examples_per_record=1,
      masking="dynamic",
      tokenizer=tokenization.TokenizerInfo(*words),
      settings={"masked_lm_prob": 0.15},
      counts={"examples": RECORDS},
      files=tuple(files),
    ).save(f"{self.folder}/data{records.MANIFEST_SUFFIX}")
    json_files.write(f"{self.folder}/bert_config.json", BERT)
    self._references = {}

  def reference(self, setting: Setting) -> Outcome:
    """What the uninterrupted run leaves; UserError if that fails."""
    if setting not in self._references:
      folder = os.path.join(self.folder, f"reference-{setting}")
      os.makedirs(folder)
      start = Start(setting, folder, 1, pace=0)
      if not start.wait() or start.process.returncode:
        raise errors.UserError(
          "the uninterrupted run failed:\n" + "\n".join(start.lines[-20:])
        )
      outcome = Outcome.of(folder, setting, 1)
      check_reference(outcome)
      self._references[setting] = outcome
    return self._references[setting]

  def run(self, name: str, setting: Setting, faults: list[Fault]) -> dict:
    """Runs one schedule: what happened, and in "problems" what must not."""
    want = self.reference(setting)
    folder = os.path.join(self.folder, f"schedule-{name}")
    os.makedirs(folder)
    schedule = _Schedule(folder, setting, faults)
    result, began = schedule.result, time.monotonic()
    if schedule.complete():
      outcome = Outcome.of(folder, setting, result["starts"])
      problems, result["lost"], result["repeated"] = compare(outcome, want)
      result["problems"] += problems
      for left in sorted(os.listdir(os.path.join(folder, "run"))):
        if left == ".saving" or ".tmp" in left:
          result["problems"].append(f"left behind: {left}")
    seconds = round(time.monotonic() - began, 1)
    return {"schedule": name, **result, "seconds": seconds}


class _Schedule:
  """One run under faults; `result` is its line."""

  def __init__(self, folder: str, setting: Setting, faults: list[Fault]):
    self._folder, self._setting = folder, setting
    self._output_dir = os.path.join(folder, "run")
    self._faults = list(faults)
    self.result = {
      "setting": str(setting), "struck": [], "missed": [], "starts": 0,
      "problems": [], "lost": None, "repeated": None, "longest_end": 0.0,
      "last_lines": [], "tracebacks": [],
    }  # fmt: skip

  def complete(self) -> bool:
    """Starts the command until the run is complete; False if it never is."""
    for number in range(1, len(self._faults) + 2):  # each ends one at most
      self.result["starts"] = number
      start = Start(self._setting, self._folder, number, PACE)
      try:
        status = self._strike(start)
      finally:
        start.end()
      if not status:
        return status == 0
    self._add_problem(f"not complete after {number} starts")
    return False

  def _add_problem(self, text: str) -> None:
    self.result["problems"].append(text)

  def _strike(self, start: Start) -> int | None:
    """Strikes a start until it ends; its exit status, None for a failure."""
    struck = self.result["struck"]
    ending = full = began = base = None
    while self._faults and ending is None:
      fault = self._faults[0]
      try:
        wait_for_moment(fault, start, base)
        base, began = start.updates(), time.monotonic()
        if strike(fault, start):
          ending = fault
        full = fault if fault.kind == "full" else full
      except Missed:
        break  # at the run's end all faults that are left come too late
      except TimeoutError as e:
        return self._add_problem(f"{fault}: {e}")
      struck.append(str(self._faults.pop(0)))
    if not start.wait():
      last = f"within {LIMIT} s, last lines {start.last_lines()}"
      return self._add_problem(f"no end after {struck[-1:]} {last}")
    status = start.process.returncode
    messages = start.last_lines()
    if full and status and not ending:
      # The last checkpoint: told, and then the end.
      if any("could not be written" in line for line in messages.values()):
        ending = full
    if ending:
      self._note_end(start, ending, time.monotonic() - began)
    if status == 0:
      self.result["missed"] = [str(fault) for fault in self._faults]
      return 0
    if not ending:
      by_itself = f"ended with {status} by itself: {messages}"
      return self._add_problem(f"start {self.result['starts']} {by_itself}")
    self._check_end(start, ending, status)
    if ending.kind in DAMAGES:
      struck[-1] += f" ({damage(ending, self._output_dir)})"
    return status

  def _note_end(self, start: Start, fault: Fault, seconds: float) -> None:
    """For a person to read."""
    result = self.result
    result["longest_end"] = max(result["longest_end"], round(seconds, 1))
    messages = sorted(set(start.last_lines().values()))
    result["last_lines"].append(
      [str(fault), start.process.returncode, *messages]
    )
    if start.is_saving():
      result["struck"][-1] += " (while saving)"
    if start.traceback():
      result["tracebacks"].append(str(fault))

  def _check_end(self, start: Start, fault: Fault, status: int) -> None:
    """After a request to end everything that was reported is saved."""
    if fault.kind not in GRACEFUL or not start.updates():
      return  # in start-up there is nothing to save yet
    # horovodrun has a status of its own, unless it passes the ranks' on.
    if status not in ((75,) if self._setting.ranks == 1 else (75, 1)):
      self._add_problem(f"{fault}: exit status {status}")
    saved = newest_checkpoints(self._output_dir)[:1]
    if saved != [start.updates()]:
      told = f"update {start.updates()} was reported, {saved} saved"
      self._add_problem(f"{fault}: {told}")


def _kind_of_end(fault: str, status: int, *messages: str) -> list[str]:
  """The fault and each last line, without what differs from run to run."""
  kind, target = fault.split(":")[:2]
  if not messages:
    return [f"{kind}: (nothing), status {status}"]
  plain = [re.sub(r"/\S*/", "", line) for line in messages]
  return [f"{kind} {target}: {re.sub('[0-9.]+', 'N', line)}" for line in plain]


def summary(results: list[dict], seed: int, seconds: float) -> dict:
  """The benchmark's result."""
  struck, ends, tracebacks = [], collections.Counter(), set()
  for result in results:
    struck += result["struck"]
    tracebacks |= {*result["tracebacks"]}
    for end in result["last_lines"]:
      ends.update(_kind_of_end(*end))
  kinds = collections.Counter(fault.split(":")[0] for fault in struck)
  failed = [result for result in results if result["problems"]]
  names = ("schedule", "setting", "struck", "missed", "problems")
  total = lambda name: sum(result[name] or 0 for result in results)
  return {
    "schedules": len(results),
    "equal": len(results) - len(failed),
    "records_lost": total("lost"),
    "records_repeated": total("repeated"),
    "faults": dict(sorted(kinds.items())),
    "while_saving": sum("while saving" in fault for fault in struck),
    "missed": sum(len(result["missed"]) for result in results),
    "starts": total("starts"),
    "longest_end_seconds": max(r["longest_end"] for r in results),
    "seconds": round(seconds, 1),
    "seed": seed,
    "tracebacks": sorted(tracebacks),
    "last_lines": dict(ends.most_common()),
    "failed": [{name: result[name] for name in names} for result in failed],
  }


def main(_) -> None:
  with contextlib.ExitStack() as stack:
    folder = FLAGS.folder or stack.enter_context(tempfile.TemporaryDirectory())
    schedules, results = Schedules(folder), []
    began = time.monotonic()
    for number in range(FLAGS.first, FLAGS.first + FLAGS.schedules):
      setting, faults = draw(FLAGS.seed, number)
      result = schedules.run(str(number), setting, faults)
      results.append(result)
      print(
        f"{number}: {setting} {', '.join(result['struck'])}; missed "
        f"{result['missed']}; {result['starts']} starts, {result['seconds']} "
        f"s: {'; '.join(result['problems']) or 'equal'}",
        file=sys.stderr,
        flush=True,
      )
  print(json.dumps(summary(results, FLAGS.seed, time.monotonic() - began)))
  if any(result["problems"] for result in results):
    raise errors.UserError("some schedules failed, see above")


if __name__ == "__main__":
  define_flags()
  errors.run_main(main)
