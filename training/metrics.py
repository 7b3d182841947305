"""What a run tells: metrics.jsonl, TensorBoard, the progress line, run.json."""

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from typing import NamedTuple

from common import json_files
from common.errors import DataError
from common.tensorflow_v1 import tf

METRICS_FILE = "metrics.jsonl"
EVAL_METRICS_FILE = "eval_metrics.jsonl"
EVAL_RESULTS_FILE = "eval_results.json"
TRAINING_RESULTS_FILE = "training_results.json"
RUN_FILE = "run.json"


def tell(*lines: str, end: str = "\n") -> None:
  """Prints lines on stderr, if they get there.

  If nobody reads them any more, or their file finds no space, work goes on.
  """
  with contextlib.suppress(OSError):
    print(*lines, sep="\n", end=end, file=sys.stderr, flush=True)


def shown(value: float | None, form: str) -> str:
  """A number in a line for people; "-" if there is none."""
  return "-" if value is None else format(value, form)


def read_jsonl(path: str) -> list[dict]:
  """The objects of a .jsonl file; [] if there is none.

  A last line without its end is left out: its writer was killed.

  Raises:
    DataError: another line is no JSON.
  """
  if not os.path.exists(path):
    return []
  found = []
  with open(path, encoding="utf-8", errors="replace") as f:
    for number, line in enumerate(f, 1):
      if not line.strip() or not line.endswith("\n"):
        continue
      try:
        found.append(json.loads(line))
      except ValueError as e:
        raise DataError(
          f"{path}: line {number} is no JSON ({e}); remove the line, or move "
          "the file away"
        ) from e
  return found


class BestBy(NamedTuple):
  """Which evaluation is the best.

  Attributes:
    keys: results that are added up.
    higher: whether more is better.
  """

  keys: tuple
  higher: bool

  def score(self, results: dict) -> float:
    """Of an evaluation; a higher one is better, NaN is none."""
    values = [results[key] for key in self.keys]
    if None in values:
      return math.nan
    return sum(values) if self.higher else -sum(values)


def best_evaluation(output_dir: str, step: int, by: BestBy) -> int | None:
  """The first update up to `step` whose evaluation was the best, if any.

  The untrained weights of update 0 are none.
  """
  scores = _scores(output_dir, step, by)
  return max(scores, key=scores.get) if scores else None


def was_evaluated(output_dir: str, step: int) -> bool:
  """Whether eval_metrics.jsonl has an evaluation of update `step`."""
  found = read_jsonl(os.path.join(output_dir, EVAL_METRICS_FILE))
  return any(results.get("global_step") == step for results in found)


def evaluations_since_best(output_dir: str, step: int, by: BestBy) -> int:
  """How many evaluations up to `step` came after the best; 0 without any."""
  best = best_evaluation(output_dir, step, by)
  return sum(s > best for s in _scores(output_dir, step, by)) if best else 0


def _scores(output_dir: str, step: int, by: BestBy) -> dict:
  """Update -> score of the evaluations that gave numbers."""
  path = os.path.join(output_dir, EVAL_METRICS_FILE)
  found = {}
  for results in read_jsonl(path):
    missing = [key for key in by.keys if key not in results]
    if missing:
      raise DataError(
        f"{path}: an evaluation without {missing[0]}: of another task. Use "
        "another --output_dir, or remove it"
      )
    if 0 < results["global_step"] <= step:
      found[results["global_step"]] = by.score(results)
  return {s: score for s, score in found.items() if math.isfinite(score)}


# Exit status after SIGTERM or SIGINT: saved, and not yet at the plan's last
# update (EX_TEMPFAIL of sysexits.h).
STOPPED_STATUS = 75

_TICK = 0.5  # seconds


class StopSignals:
  """Notes SIGTERM and SIGINT while its block runs; a second one ends at once.

  Attributes:
    received: the signal's name, or None.
    settled: all ranks are ending, saved: after the block, too, a signal that
      comes late (each rank gets its own) changes nothing.
  """

  def __init__(self):
    self.received: str | None = None
    self.settled = False
    self._when = 0.0
    self._before = {}

  def since(self) -> float:
    """Seconds since the signal; 0 without one."""
    return time.monotonic() - self._when if self.received else 0.0

  def __enter__(self) -> "StopSignals":
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._before[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *_) -> None:
    for number, handler in self._before.items():
      signal.signal(number, signal.SIG_IGN if self.settled else handler)

  def _note(self, number, _) -> None:
    self.received = signal.Signals(number).name
    self._when = time.monotonic()
    signal.signal(number, self._before[number])
    tell(f"{self.received}: saving after this update, then stopping")


class Watchdog:
  """Ends this rank when nothing moves any more, as when another one hangs.

  Horovod notices ranks that cannot be reached, but not one whose program
  stands still: the others would wait for it for ever.
  """

  SECONDS = 45.0  # or LONGEST times the longest wait so far
  LONGEST = 20.0

  def __init__(self, comm):
    """Looks away until `watch`, and always if there are no other ranks."""
    self._comm = comm
    self._waited = self._longest = 0.0
    self._watching = False
    self._thread = None
    self._ended = threading.Event()

  def __enter__(self) -> "Watchdog":
    return self

  def __exit__(self, *_) -> None:
    self.look_away()
    self._ended.set()

  def moved(self) -> None:
    """To be called after each part of the work."""
    if self._watching:
      self._longest = max(self._longest, self._waited)
    self._waited = 0.0

  def watch(self) -> None:
    """As `moved`, and from here on it is expected to go on moving.

    Not before a whole update: until then each rank has been compiling.
    """
    self.moved()
    self._watching = True
    if self._thread is None and self._comm.size > 1:
      main = threading.get_ident()
      self._thread = threading.Thread(
        target=self._watch, args=(main,), daemon=True
      )
      self._thread.start()

  def look_away(self) -> None:
    """Something else is done until the next `watch`, however long."""
    self._watching = False

  def _watch(self, main: int) -> None:
    # Counted and not read from a clock, which runs on while all are suspended.
    while not self._ended.wait(_TICK):
      self._waited += _TICK
      limit = max(self.SECONDS, self.LONGEST * self._longest)
      if self._watching and self._waited > limit:
        self._end(sys._current_frames()[main])

  def _end(self, frame) -> None:
    tell(
      f"{os.path.basename(sys.argv[0])}: error: nothing has moved for "
      f"{self._waited:.0f} s, which took {self._longest:.0f} s at most before: "
      f"a rank hangs. This one is in {frame.f_code.co_name} "
      f"({frame.f_code.co_filename}:{frame.f_lineno}). The same command goes "
      "on from the newest checkpoint"
    )
    os._exit(1)  # the main thread may be where no exception reaches it


class MetricsLog:
  """A .jsonl file of reports with TensorBoard events of the same numbers."""

  _trouble: str | None = None

  def __init__(self, output_dir: str, name: str, resume_step: int, tag: str):
    """Opens the log, dropping reports that a resumed run will make again.

    Args:
      output_dir: the run's folder.
      name: the file's name.
      resume_step: reports of later updates are dropped.
      tag: subfolder of the events and prefix in TensorBoard.
    """
    self._path = path = os.path.join(output_dir, name)
    kept = [r for r in read_jsonl(path) if r["global_step"] <= resume_step]
    self._waiting = b"".join(map(_line, kept))
    self._written = 0
    self._file = open(path + ".tmp", "wb", buffering=0)  # noqa: SIM115
    self._flush()
    if self._waiting:
      raise DataError(f"{path}.tmp: {self._trouble}")
    os.replace(path + ".tmp", path)
    self._events = tf.summary.FileWriter(os.path.join(output_dir, tag))
    # TensorBoard then drops what it has of later updates.
    start = tf.SessionLog(status=tf.SessionLog.START)
    self._add_events(lambda e: e.add_session_log(start, resume_step + 1))
    self._tag = tag

  def write(self, report: dict) -> None:
    """Appends one report; `global_step` is its place in TensorBoard.

    What cannot be written (no space) is told once, and written later.
    """
    self._waiting += _line(report)
    told = self._trouble
    self._flush()
    if self._trouble and not told:
      tell(f"{self._path}: {self._trouble}; training goes on and tries again")
    values = [
      tf.Summary.Value(tag=f"{self._tag}/{key}", simple_value=value)
      for key, value in report.items()
      if isinstance(value, (int, float)) and key != "global_step"
    ]
    summary, step = tf.Summary(value=values), report["global_step"]
    self._add_events(lambda e: e.add_summary(summary, step))

  def _add_events(self, add) -> None:
    """Calls add(writer), or tells once that TensorBoard gets no more."""
    if self._events is None:
      return
    try:
      add(self._events)
      self._events.flush()
    except (tf.errors.OpError, OSError, IndexError, RuntimeError) as e:
      # TensorFlow gives some errors of the file system as built-in ones.
      self._events = None
      tell(f"TensorBoard gets no more of this run: {str(e).splitlines()[0]}")

  def _flush(self) -> None:
    """Writes what waits, whole or not at all."""
    try:
      done = 0
      while done < len(self._waiting):
        done += self._file.write(self._waiting[done:])
    except OSError as e:
      self._trouble = e.strerror
      self._file.truncate(self._written)
      self._file.seek(self._written)
    else:
      self._trouble = None
      self._written += len(self._waiting)
      self._waiting = b""

  def close(self) -> None:
    """Closes file and events.

    Raises:
      DataError: some reports could not be written.
    """
    self._flush()
    self._file.close()
    if self._events is not None:
      self._events.close()
    if self._waiting:
      reports = self._waiting.count(b"\n")
      raise DataError(
        f"{self._path}: {reports} reports could not be written: {self._trouble}"
      )


def _line(report: dict) -> bytes:
  return json_files.text(report).encode() + b"\n"


def _clock(seconds: float) -> str:
  minutes, seconds = divmod(int(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return (
    f"{hours}:{minutes:02}:{seconds:02}"
    if hours
    else (f"{minutes}:{seconds:02}")
  )


class Progress:
  """One line on stderr that says how far the run is, on rank 0.

  On a terminal the line is rewritten in place; in a log file it is a new line
  every `log_seconds`.
  """

  def __init__(
    self, total: int, first: int, headline, log_seconds: float = 10.0
  ):
    """Begins after update `first` of `total`; `headline`: report -> text."""
    self._total, self._first, self._headline = total, first, headline
    self._tty = sys.stderr.isatty()
    self._every = 0.5 if self._tty else log_seconds
    self._start = time.monotonic()
    self._last = -self._every

  def show(self, step: int, report: dict) -> None:
    """Shows the report of update `step` unless the last was just shown."""
    now = time.monotonic()
    if now - self._last < self._every and step < self._total:
      return
    self._last = now
    done = step - self._first
    left = (now - self._start) / max(1, done) * (self._total - step)
    line = (
      f"update {step:,}/{self._total:,}  loss {shown(report['loss'], '.3f')}  "
      f"{self._headline(report)}  "
      f"lr {report['learning_rate']:.2e}  "
      f"{shown(report['examples_per_second'], '.0f')} examples/s  "
      f"{shown(report['tokens_per_second'], '.0f')} tokens/s  "
      f"eta {_clock(left)}"
    )
    end = "\n" if not self._tty or step >= self._total else ""
    start = "\r\x1b[K" if self._tty else ""
    tell(start + line, end=end)


def versions() -> dict:
  """Versions that decide a run's numbers, with the source's git revision."""
  names = ("tensorflow", "tensorflow-cpu", "horovod", "numpy", "tokenizers")
  found = {"python": platform.python_version(), "tensorflow": tf.__version__}
  for name in names[2:]:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = None
  folder = os.path.dirname(os.path.abspath(__file__))
  try:
    found["git"] = subprocess.run(
      ["git", "-C", folder, "describe", "--always", "--dirty"],
      capture_output=True,
      text=True,
      check=True,
    ).stdout.strip()
  except (OSError, subprocess.CalledProcessError):
    found["git"] = None  # not a git checkout
  return found


def speed_line(training: dict) -> str:
  """The closing line about speed, from `train_loop.train`'s result."""
  number = lambda key, form: shown(training[key], form)
  return (
    f"trained {training['updates']:,} updates in {training['seconds']:.0f} s: "
    f"{number('examples_per_second', '.1f')} examples/s and "
    f"{number('tokens_per_second', '.0f')} tokens/s end to end, "
    f"{number('steady_examples_per_second', '.1f')} and "
    f"{number('steady_tokens_per_second', '.0f')} steady; "
    f"{number('padding', '.1%')} padding"
  )


def write_run_file(output_dir: str, flags: dict, plan, data, devices) -> None:
  """Writes run.json: how this run was started and on what.

  A resumed run adds itself to the list, so that none is forgotten.
  """
  path = os.path.join(output_dir, RUN_FILE)
  runs = _runs(path) if os.path.exists(path) else []
  runs.append(
    {
      "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
      "flags": flags,
      "plan": dataclasses.asdict(plan) if plan else None,
      "data": data,
      "versions": versions(),
      "devices": devices,
    }
  )
  json_files.write(path, {"runs": runs})


def _runs(path: str) -> list[dict]:
  remedy = "move it away, or give another folder"
  found = json_files.read_own(path, remedy)
  if not isinstance(found, dict) or not isinstance(found.get("runs"), list):
    raise DataError(f"{path}: not a run's record; {remedy}")
  return found["runs"]


def last_training(output_dir: str) -> dict | None:
  """What run.json has of a run folder's newest training, if it has any.

  Raises:
    DataError: it is damaged.
  """
  path = os.path.join(output_dir, RUN_FILE)
  for run in reversed(_runs(path) if os.path.exists(path) else []):
    if run.get("plan"):  # an evaluation alone has none
      return run
  return None


def changes_since(before: dict, flags: dict, plan) -> list[str]:
  """How flags and plan differ from those of an earlier start.

  Args:
    before: of `last_training`.
    flags: of this start, nested as in run.json.
    plan: its `training_plan.TrainingPlan`.
  """
  old = _flat(before["flags"]) | _planned(before["plan"])
  new = _flat(json_files.parse(json_files.text(flags)))
  new |= _planned(dataclasses.asdict(plan))
  return [
    f"{name} {old[name]} -> {value}"
    for name, value in new.items()
    if name in old and old[name] != value
  ]


def _flat(flags: dict) -> dict:
  """Flags by their names, without the groups that a config has them in."""
  found = {}
  for name, value in flags.items():
    found |= _flat(value) if isinstance(value, dict) else {f"--{name}": value}
  return found


def _planned(plan: dict) -> dict:
  return {n: plan[n] for n in ("ranks", "updates", "warmup_updates")}


def trained_on(output_dir: str) -> list[str]:
  """The record files of a run folder's newest training; [] without one."""
  for run in reversed(_runs(os.path.join(output_dir, RUN_FILE))):
    if run["data"]:  # an evaluation alone has none
      return run["data"]["files"]
  return []
