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
import pathlib
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

import numpy as np
import psutil
from absl import flags

import tokenization
from benchmarks.faults import recorded_run
from checkpoints import checkpoint_files, metrics
from common import errors
from common.tensorflow_v1 import tf
from data import records, tf_example, tfrecord
from training import reporting

FLAGS = flags.FLAGS
_ROOT = str(pathlib.Path(__file__).parents[2])
_MARK = "FAULT_SCHEDULES_RUN"  # environment: in all processes of one start

RECORDS = 150  # of which 48 updates of 8 are more than two epochs
UPDATES = 48
SAVE_EVERY = 4
GLOBAL_BATCH = 8
LENGTH, PREDICTIONS = 16, 3
BERT = dict(
  vocab_size=400,
  hidden_size=32,
  num_hidden_layers=2,
  num_attention_heads=2,
  intermediate_size=64,
  max_position_embeddings=LENGTH,
  type_vocab_size=2,
  hidden_dropout_prob=0.1,
  attention_probs_dropout_prob=0.1,
)
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
KINDS = (*SIGNALS, *DAMAGES, *FULL)
GRACEFUL = ("terminate", "interrupt")
LAUNCHER = -1  # as the target: horovodrun


def define_flags() -> None:
  flags.DEFINE_integer("schedules", 50, "How many.", lower_bound=1)
  flags.DEFINE_integer("seed", 1, "Of the schedules.")
  flags.DEFINE_integer("first", 1, "Number of the first schedule.")
  flags.DEFINE_string(
    "folder", None, "Where to work and leave everything; default: temporary."
  )


# -----------------------------------------------------------------------------
# Schedules
# -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setting:
  """What is trained how; runs of one setting are equal."""

  ranks: int
  accumulation: int
  precision: str

  def __str__(self):
    return f"{self.ranks}x{self.accumulation}-{self.precision}"

  def flags(self) -> list[str]:
    """Of run_pretraining.py."""
    micro = GLOBAL_BATCH // self.ranks // self.accumulation
    return [
      f"--train_batch_size={micro}",
      f"--global_batch_size={GLOBAL_BATCH}",
      f"--num_train_steps={UPDATES}",
      "--num_warmup_steps=5",
      "--learning_rate=1e-3",
      "--log_every_steps=1",
      f"--save_checkpoints_steps={SAVE_EVERY}",
      "--num_threads=1",
      "--xla=off",
      f"--precision={self.precision}",
      # A scale that is too high at first, and doubles again soon.
      *(
        [
          "--initial_loss_scale=1073741824",
          "--loss_scale_hysteresis=1",
          "--loss_scale_window=4",
        ]
        if self.precision == "fp16"
        else []
      ),
    ]


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
    kind: one of `KINDS`.
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
  kinds = [k for k in KINDS if setting.ranks > 1 or k != "stop"]
  # What happens most.
  often = ["kill", "kill", "terminate", "stop", "stop"]
  kind = rng.choice([*kinds, *(k for k in often if k in kinds)])
  targets, moments = list(range(setting.ranks)), ["update"]
  if kind in SIGNALS:
    moments += ["saving", "start"]
  else:
    targets = [0]  # which alone writes
  if kind in ("kill", *GRACEFUL) and setting.ranks > 1:
    targets.append(LAUNCHER)
  moment = rng.choice(moments)
  longest = {"start": 7.0, "update": 0.15, "saving": 0.02}[moment]
  return Fault(
    kind=kind,
    target=rng.choice(targets),
    moment=moment,
    updates=rng.randint(1, 9),
    delay=rng.uniform(0, longest),
    chance=rng.random(),
  )


# -----------------------------------------------------------------------------
# Runs
# -----------------------------------------------------------------------------


def write_records(folder: str) -> str:
  """Records to mask on reading whose first token is their number.

  [CLS] stands there, which is never masked. Returns the files' pattern.
  """
  rng, infos = np.random.default_rng(0), []
  for shard in range(2):
    path = os.path.join(folder, f"data-{shard}.tfrecord")
    with tfrecord.ShardWriter(path) as writer:
      for place in range(RECORDS // 2):
        features = records.fake_features(
          rng, LENGTH, PREDICTIONS, BERT["vocab_size"]
        )
        for name in ("positions", "ids", "weights"):
          del features[f"masked_lm_{name}"]
        features["input_ids"][0] = shard * (RECORDS // 2) + place
        writer.write(tf_example.encode_example(features))
    infos.append(writer.info)
  records.Manifest(
    max_seq_length=LENGTH,
    max_predictions_per_seq=PREDICTIONS,
    examples_per_record=1,
    masking="dynamic",
    tokenizer=tokenization.TokenizerInfo(
      "wordpiece", "vocab.txt", "", BERT["vocab_size"], True, 4
    ),
    settings={"masked_lm_prob": 0.15},
    counts={"examples": RECORDS},
    files=tuple(infos),
  ).save(os.path.join(folder, f"data{records.MANIFEST_SUFFIX}"))
  return os.path.join(folder, "data-*.tfrecord")


class Start:
  """One start of the command, and all its processes.

  Attributes:
    process: the one that was started: rank 0, or horovodrun.
    lines: of its stderr so far.
  """

  def __init__(self, setting: Setting, folder: str, number: int, pace: float):
    """Starts it.

    Args:
      setting: what to train.
      folder: of the schedule; its parent has the data.
      number: of this start.
      pace: see `recorded_run`.
    """
    self.output_dir = os.path.join(folder, "run")
    self._metrics = os.path.join(self.output_dir, metrics.METRICS_FILE)
    self._metrics_before = self._inode()
    self._setting, self._mark = setting, uuid.uuid4().hex
    data = os.path.dirname(folder)
    launcher = [
      os.path.join(os.path.dirname(sys.executable), "horovodrun"),
      "-np",
      str(setting.ranks),
    ]
    self.process = subprocess.Popen(
      [
        *(launcher if setting.ranks > 1 else []),
        sys.executable,
        "-m",
        "benchmarks.faults.recorded_run",
        "--do_train",
        f"--bert_config_file={data}/bert_config.json",
        f"--input_file={data}/data-*.tfrecord",
        f"--output_dir={self.output_dir}",
        *setting.flags(),
      ],
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
      errors="replace",
      start_new_session=True,
      env={
        **os.environ,
        **HOROVOD,
        "PYTHONPATH": _ROOT,
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
    for line in self.process.stderr:
      self.lines.append(line.rstrip("\n"))

  def processes(self) -> list[psutil.Process]:
    """All that this start has left, of whatever parent."""
    found = []
    for process in psutil.process_iter():
      # None of the others, one that has ended, or somebody else's.
      with contextlib.suppress(psutil.Error, OSError):
        if process.environ().get(_MARK) == self._mark:
          found.append(process)
    return found

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
    try:
      return os.stat(self._metrics).st_ino
    except FileNotFoundError:
      return None

  def updates(self) -> int | None:
    """Updates reported so far; None before this start has its report open."""
    if self._inode() == self._metrics_before:
      return None
    with open(self._metrics, "rb") as f:
      return f.read().count(b"\n")

  def is_saving(self) -> bool:
    return os.path.exists(os.path.join(self.output_dir, ".saving"))

  def wait(self) -> bool:
    """Waits for the end of all processes; False if it had to end them."""
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
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
      found = re.match(r"\[(\d+)\]<std\w+>:(.*)", line)
      rank, text = found.groups() if found else ("0", line)
      if text in ("", "Terminated", "Killed", "Aborted"):  # the shell's
        continue
      if found or self._setting.ranks == 1:
        last[rank] = text
    return last

  def traceback(self) -> bool:
    """Whether a rank ended as by a bug."""
    return any(
      re.match(r"(\[\d+\]<std\w+>:)?Traceback", line)
      for line in self.lines
      if self._setting.ranks == 1 or line.startswith("[")
    )


def newest_checkpoints(output_dir: str) -> list[int]:
  """Updates of those that are whole, newest first."""
  files = checkpoint_files.CheckpointFiles(output_dir, 1)

  def is_whole(step):
    try:
      files.check(step)
    except checkpoint_files.CheckpointError:
      return False
    return True

  return [step for step in files.steps() if is_whole(step)]


# -----------------------------------------------------------------------------
# Faults
# -----------------------------------------------------------------------------


class Missed(Exception):
  """The run was over before the fault's moment came."""


def _until(condition, start: Start, pause: float = 0.003):
  """Waits for the condition and returns it.

  Raises:
    Missed: the run ended before.
    TimeoutError: neither.
  """
  until = time.monotonic() + LIMIT
  while not (got := condition()):
    if start.has_ended():
      raise Missed
    if time.monotonic() > until:
      raise TimeoutError(f"nothing happened for {LIMIT} s")
    time.sleep(pause)
  return got


def wait_for_moment(fault: Fault, start: Start, base: int | None) -> None:
  """Returns when the fault is to strike; see `Fault`.

  Args:
    fault: the next one.
    start: the run.
    base: updates when the fault before struck this start; None: none has.
  """
  if fault.moment == "start":
    wait = start.began + fault.delay - time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
      start.process.wait(timeout=max(0.0, wait))
    _until(lambda: start.find(fault.target), start)
    return
  if base is None:
    _until(lambda: start.updates() is not None, start)
    base = start.updates()
  target = min(base + fault.updates, UPDATES - 2)
  _until(lambda: start.updates() >= target, start)
  if fault.moment == "saving":
    _until(start.is_saving, start, pause=0.0003)
  if fault.kind in DAMAGES:
    _until(lambda: len(newest_checkpoints(start.output_dir)) >= 2, start)
  time.sleep(fault.delay)


def strike(fault: Fault, start: Start) -> bool:
  """Does it; returns whether it ends the run.

  Raises:
    Missed: the target has ended.
    TimeoutError: the fault was without consequence.
  """
  target = _until(lambda: start.find(fault.target), start)
  try:
    if fault.kind in FULL:
      return _fill_disk(fault, start, target)
    target.send_signal(SIGNALS.get(fault.kind, signal.SIGKILL))
    if fault.kind == "pause":
      time.sleep(1 + 3 * fault.chance)
      target.send_signal(signal.SIGCONT)
      return False
  except psutil.NoSuchProcess as e:
    raise Missed from e
  return True


def _fill_disk(fault: Fault, start: Start, rank0: psutil.Process) -> bool:
  """Limits the size of rank 0's files until it has told the consequence."""
  told = lambda: any("could not be written" in line for line in start.lines)
  size = 100_000  # of a checkpoint that has more than three times that
  if fault.kind == "full_report":
    told = start.has_ended
    path = os.path.join(start.output_dir, metrics.METRICS_FILE)
    size = os.path.getsize(path) + int(800 * fault.chance)  # in a line
  before, size = start.updates(), (size, resource.RLIM_INFINITY)
  rank0.rlimit(resource.RLIMIT_FSIZE, size)
  try:
    _until(
      lambda: told() or start.updates() >= min(before + 10, UPDATES), start
    )
  except Missed:
    return True  # it was the last checkpoint
  finally:
    with contextlib.suppress(psutil.NoSuchProcess):
      rank0.rlimit(
        resource.RLIMIT_FSIZE,
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
      )
  if not told():
    raise TimeoutError("the disk was full and nobody said so")
  return start.has_ended()


def damage(fault: Fault, output_dir: str) -> str:
  """Damages the newest of several checkpoints; says what was done."""
  steps = newest_checkpoints(output_dir)
  if len(steps) < 2:
    return "only one checkpoint"
  files = sorted(
    glob.glob(
      os.path.join(output_dir, f"{checkpoint_files.PREFIX}-{steps[0]}.*")
    )
  )
  path = files[int(fault.chance * len(files))]
  if fault.kind == "delete":
    os.unlink(path)
    return f"deleted {os.path.basename(path)}"
  size = os.path.getsize(path)
  place = int(fault.chance * len(files) % 1 * size)
  with open(path, "r+b") as f:
    if fault.kind == "cut":
      f.truncate(place)
    else:
      f.seek(place)
      byte = f.read(1)[0]
      f.seek(place)
      f.write(bytes([byte ^ 0x10]))
  return f"{fault.kind} byte {place} of {os.path.basename(path)}"


# -----------------------------------------------------------------------------
# What a run leaves
# -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What is compared.

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
    path = os.path.join(output_dir, metrics.METRICS_FILE)
    with open(path, encoding="utf-8") as f:
      reports = [json.loads(line) for line in f]
    reports = [
      json.dumps(
        {k: v for k, v in report.items() if k not in reporting.MEASURED}
      )
      for report in reports
    ]
    consumed, redone = {}, []
    for start in range(1, starts + 1):
      _add_start(consumed, redone, folder, setting, start)
    return cls(
      {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()},
      reports,
      {update: consumed[update] for update in sorted(consumed)},
      redone,
    )

  def records(self) -> list[int]:
    """Record numbers in the order of the stream."""
    return [
      number
      for ranks in self.consumed.values()
      for micro_batches in ranks
      for _, numbers, _ in micro_batches
      for number in numbers
    ]


def _whole_lines(path: str) -> list:
  """JSON of each line that was written whole; a rank may have none."""
  if not os.path.exists(path):
    return []
  with open(path, encoding="utf-8") as f:
    return [json.loads(line) for line in f if line.endswith("\n")]


def _add_start(consumed, redone, folder, setting, start) -> None:
  """Adds what one start did to what those before did."""
  by_rank = []
  for rank in range(setting.ranks):
    updates = collections.defaultdict(list)
    path = os.path.join(folder, f"consumed-{start}-{rank}")
    for step, *rest in _whole_lines(path):
      updates[step + 1].append(rest)
    by_rank.append(updates)
  for update in sorted(set().union(*by_rank)):
    ranks = [updates[update] for updates in by_rank]
    if update in consumed:
      same = all(
        now[: len(before)] == before[: len(now)]
        for now, before in zip(ranks, consumed[update], strict=True)
      )
      if not same:
        redone.append(f"update {update} was of other records in start {start}")
    if all(len(done) == setting.accumulation for done in ranks):
      consumed[update] = ranks
    elif any(len(done) > setting.accumulation for done in ranks):
      redone.append(f"update {update} has too many micro-batches")


def _few(updates: list[int]) -> str:
  more = f" and {len(updates) - 5} more" if len(updates) > 5 else ""
  return f"{updates[:5]}{more}"


def compare(got: Outcome, want: Outcome) -> tuple[list[str], int, int]:
  """(differences in words, records lost, records repeated)."""
  problems = list(got.redone)
  if got.arrays.keys() != want.arrays.keys():
    problems.append("the checkpoint has other variables")
  unequal = [
    name
    for name in got.arrays.keys() & want.arrays.keys()
    if got.arrays[name].dtype != want.arrays[name].dtype
    or got.arrays[name].tobytes() != want.arrays[name].tobytes()
  ]
  if unequal:
    problems.append(f"{len(unequal)} arrays differ, as {sorted(unequal)[0]}")
  if got.reports != want.reports:
    steps = [json.loads(line)["global_step"] for line in got.reports]
    counts = collections.Counter(steps)
    updates = range(1, UPDATES + 1)
    missing = [n for n in updates if n not in counts]
    double = [n for n in updates if counts[n] > 1]
    other = sorted(
      json.loads(line)["global_step"]
      for line in set(got.reports) - set(want.reports)
    )
    problems.append(
      f"metrics.jsonl: missing {_few(missing)}, double {_few(double)}, other "
      f"values in {_few(other)}"
    )
  if got.consumed != want.consumed:
    updates = [
      n
      for n in range(1, UPDATES + 1)
      if got.consumed.get(n) != want.consumed.get(n)
    ]
    problems.append(f"other records or masks in updates {_few(updates)}")
  had = collections.Counter(got.records())
  due = collections.Counter(want.records())
  return problems, (due - had).total(), (had - due).total()


def check_reference(outcome: Outcome) -> None:
  """An uninterrupted run consumes each record once an epoch.

  Raises:
    errors.UserError: it does not.
  """
  stream = outcome.records()
  epochs = [stream[i : i + RECORDS] for i in range(0, len(stream), RECORDS)]
  if (
    len(stream) != UPDATES * GLOBAL_BATCH
    or len(outcome.reports) != UPDATES
    or any(len(set(epoch)) != len(epoch) for epoch in epochs)
  ):
    raise errors.UserError("the uninterrupted run lost or repeated records")


def leftovers(output_dir: str) -> list[str]:
  """Half-written files."""
  return [
    name
    for name in sorted(os.listdir(output_dir))
    if name == ".saving" or ".tmp" in name
  ]


# -----------------------------------------------------------------------------
# Running schedules
# -----------------------------------------------------------------------------


class Schedules:
  """Runs schedules, each beside the uninterrupted run of its setting."""

  def __init__(self, folder: str):
    """Writes the data into `folder`."""
    self.folder = os.path.abspath(folder)
    os.makedirs(self.folder, exist_ok=True)
    write_records(self.folder)
    path = os.path.join(self.folder, "bert_config.json")
    with open(path, "w", encoding="utf-8") as f:
      json.dump(BERT, f)
    self._references = {}

  def reference(self, setting: Setting) -> Outcome:
    """What the uninterrupted run leaves.

    Raises:
      errors.UserError: it fails.
    """
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
    """Runs one schedule; see `_Schedule.result`."""
    want = self.reference(setting)
    folder = os.path.join(self.folder, f"schedule-{name}")
    os.makedirs(folder)
    schedule = _Schedule(folder, setting, faults)
    began = time.monotonic()
    if schedule.complete():
      schedule.compare(want)
    return {
      "schedule": name,
      **schedule.result(),
      "seconds": round(time.monotonic() - began, 1),
    }


class _Schedule:
  """One run under faults."""

  def __init__(self, folder: str, setting: Setting, faults: list[Fault]):
    self._folder, self._setting = folder, setting
    self._output_dir = os.path.join(folder, "run")
    self._faults = list(faults)
    self._most = len(faults) + 1  # each ends one start at most
    self._starts = 0
    self._struck, self._missed, self._problems = [], [], []
    self._ends, self._last_lines, self._tracebacks = [], [], []
    self._lost = self._repeated = None

  def result(self) -> dict:
    """What happened, and in `problems` what must not."""
    return {
      "setting": str(self._setting),
      "struck": self._struck,
      "missed": self._missed,
      "starts": self._starts,
      "problems": self._problems,
      "lost": self._lost,
      "repeated": self._repeated,
      "longest_end": round(max(self._ends, default=0.0), 1),
      "last_lines": self._last_lines,
      "tracebacks": self._tracebacks,
    }

  def compare(self, want: Outcome) -> None:
    """Holds what the run left against what it should have."""
    got = Outcome.of(self._folder, self._setting, self._starts)
    found, self._lost, self._repeated = compare(got, want)
    self._problems += found
    if left := leftovers(self._output_dir):
      self._problems.append(f"left behind: {', '.join(left)}")

  def complete(self) -> bool:
    """Starts the command until the run is complete; False if it never is."""
    while self._starts < self._most:
      self._starts += 1
      start = Start(self._setting, self._folder, self._starts, PACE)
      try:
        status = self._one(start)
      finally:
        start.end()
        path = os.path.join(self._folder, f"stderr-{self._starts}")
        with open(path, "w", encoding="utf-8") as f:
          f.writelines(line + "\n" for line in list(start.lines))
      if status == 0:
        return True
      if status is None:
        return False
    self._problems.append(f"not complete after {self._starts} starts")
    return False

  def _one(self, start: Start) -> int | None:
    """Strikes a start until it ends; its exit status, None for a failure."""
    ending = full = struck = base = None
    while self._faults and ending is None:
      fault = self._faults[0]
      try:
        wait_for_moment(fault, start, base)
        base = start.updates()
        struck = time.monotonic()
        if strike(fault, start):
          ending = fault
        full = fault if fault.kind == "full" else full
      except Missed:
        # At the run's end all faults that are left come too late.
        break
      except TimeoutError as e:
        self._problems.append(f"{fault}: {e}")
        return None
      self._struck.append(str(self._faults.pop(0)))
    if not start.wait():
      self._problems.append(
        f"no end after {self._struck[-1:]} within {LIMIT} s, last lines "
        f"{start.last_lines()}"
      )
      return None
    status = start.process.returncode
    if full and status and not ending:
      # The last checkpoint: told, and then the end.
      if any("could not be written" in t for t in start.last_lines().values()):
        ending = full
    if ending:
      self._ends.append(time.monotonic() - struck)
      self._note_end(start, ending)
    if status == 0:
      self._missed = [str(f) for f in self._faults]
      return 0
    if not ending:
      self._problems.append(
        f"start {self._starts} ended with {status} by itself: "
        f"{start.last_lines()}"
      )
      return None
    self._check_end(start, ending, status)
    if ending.kind in DAMAGES:
      self._struck[-1] += f" ({damage(ending, self._output_dir)})"
    return status

  def _note_end(self, start: Start, fault: Fault) -> None:
    """For a person to read."""
    said = sorted(set(start.last_lines().values()))
    self._last_lines.append([str(fault), start.process.returncode, *said])
    if os.path.exists(os.path.join(self._output_dir, ".saving")):
      self._struck[-1] += " (while saving)"
    if start.traceback():
      self._tracebacks.append(str(fault))

  def _check_end(self, start: Start, fault: Fault, status: int) -> None:
    """After a request to end everything that was reported is saved."""
    if fault.kind not in GRACEFUL or not start.updates():
      return  # in start-up there is nothing to save yet
    # horovodrun has a status of its own, unless it passes the ranks' on.
    if status not in ((75,) if self._setting.ranks == 1 else (75, 1)):
      self._problems.append(f"{fault}: exit status {status}")
    saved = newest_checkpoints(self._output_dir)[:1]
    if saved != [start.updates()]:
      self._problems.append(
        f"{fault}: update {start.updates()} was reported, {saved} saved"
      )


def summary(results: list[dict], seed: int, seconds: float) -> dict:
  """The benchmark's result."""
  kinds = collections.Counter()
  for result in results:
    kinds.update(struck.split(":")[0] for struck in result["struck"])
  ends = collections.Counter()
  for result in results:
    for fault, status, *said in result["last_lines"]:
      for line in said:
        line = re.sub(r"/\S*/", "", line)
        kind, target = fault.split(":")[:2]
        ends[f"{kind} {target}: {re.sub('[0-9.]+', 'N', line)}"] += 1
      if not said:
        ends[f"{fault.split(':')[0]}: (nothing), status {status}"] += 1
  failed = [r for r in results if r["problems"]]
  return {
    "schedules": len(results),
    "equal": len(results) - len(failed),
    "records_lost": sum(r["lost"] or 0 for r in results),
    "records_repeated": sum(r["repeated"] or 0 for r in results),
    "faults": dict(sorted(kinds.items())),
    "while_saving": sum(
      "while saving" in s for r in results for s in r["struck"]
    ),
    "missed": sum(len(r["missed"]) for r in results),
    "starts": sum(r["starts"] for r in results),
    "longest_end_seconds": max(r["longest_end"] for r in results),
    "seconds": round(seconds, 1),
    "seed": seed,
    "tracebacks": sorted({t for r in results for t in r["tracebacks"]}),
    "last_lines": dict(ends.most_common()),
    "failed": [
      {
        key: r[key]
        for key in ("schedule", "setting", "struck", "missed", "problems")
      }
      for r in failed
    ],
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
      state = "; ".join(result["problems"]) or "equal"
      print(
        f"{number}: {setting} {', '.join(result['struck'])}"
        + (f"; missed {', '.join(result['missed'])}" * bool(result["missed"]))
        + f"; {result['starts']} starts, {result['seconds']} s: {state}",
        file=sys.stderr,
        flush=True,
      )
  print(json.dumps(summary(results, FLAGS.seed, time.monotonic() - began)))
  if any(result["problems"] for result in results):
    raise errors.UserError("some schedules failed, see above")


if __name__ == "__main__":
  define_flags()
  errors.run_main(main)
