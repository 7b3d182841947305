"""What a run tells: metrics.jsonl, TensorBoard, the progress line, run.json."""

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

from tensorflow_v1 import tf

METRICS_FILE = "metrics.jsonl"
EVAL_METRICS_FILE = "eval_metrics.jsonl"
EVAL_RESULTS_FILE = "eval_results.json"
TRAINING_RESULTS_FILE = "training_results.json"
RUN_FILE = "run.json"


def read_jsonl(path: str) -> list[dict]:
  """The objects of a .jsonl file; [] if there is none."""
  if not os.path.exists(path):
    return []
  with open(path, encoding="utf-8") as f:
    return [json.loads(line) for line in f if line.strip()]


def best_evaluation(output_dir: str, step: int) -> int | None:
  """The update up to `step` whose held-out loss was the lowest, if any.

  The untrained weights of update 0 are none.
  """
  sums = {
    r["global_step"]: r["masked_lm_loss"] + r["next_sentence_loss"]
    for r in read_jsonl(os.path.join(output_dir, EVAL_METRICS_FILE))
    if 0 < r["global_step"] <= step
  }
  finite = [s for s in sums if math.isfinite(sums[s])]
  return min(finite, key=sums.get) if finite else None


def write_json(path: str, value: dict) -> None:
  """Writes a JSON file, whole or not at all."""
  with open(path + ".tmp", "w", encoding="utf-8") as f:
    json.dump(value, f, indent=2)
    f.write("\n")
  os.replace(path + ".tmp", path)


# Exit status after SIGTERM or SIGINT: saved, and not yet at the plan's last
# update (EX_TEMPFAIL of sysexits.h).
STOPPED_STATUS = 75


class StopSignals:
  """Notes SIGTERM and SIGINT while its block runs; a second one ends at once.

  Attributes:
    received: the signal's name, or None.
  """

  def __init__(self):
    self.received: str | None = None
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
      signal.signal(number, handler)

  def _note(self, number, _) -> None:
    self.received = signal.Signals(number).name
    self._when = time.monotonic()
    signal.signal(number, self._before[number])
    print(
      f"{self.received}: saving after this update, then stopping",
      file=sys.stderr,
      flush=True,
    )


class MetricsLog:
  """A .jsonl file of reports with TensorBoard events of the same numbers."""

  def __init__(self, output_dir: str, name: str, resume_step: int, tag: str):
    """Opens the log, dropping reports that a resumed run will make again.

    Args:
      output_dir: the run's folder.
      name: the file's name.
      resume_step: reports of later updates are dropped.
      tag: subfolder of the events and prefix in TensorBoard.
    """
    path = os.path.join(output_dir, name)
    kept = [r for r in read_jsonl(path) if r["global_step"] <= resume_step]
    self._file = open(path + ".tmp", "w", encoding="utf-8")  # noqa: SIM115
    for report in kept:
      self._file.write(json.dumps(report) + "\n")
    self._file.flush()
    os.replace(path + ".tmp", path)
    self._events = tf.summary.FileWriter(os.path.join(output_dir, tag))
    self._tag = tag

  def write(self, report: dict) -> None:
    """Appends one report; `global_step` is its place in TensorBoard."""
    self._file.write(json.dumps(report) + "\n")
    self._file.flush()
    values = [
      tf.Summary.Value(tag=f"{self._tag}/{key}", simple_value=value)
      for key, value in report.items()
      if isinstance(value, (int, float)) and key != "global_step"
    ]
    step = report["global_step"]
    self._events.add_summary(tf.Summary(value=values), step)
    self._events.flush()

  def close(self) -> None:
    """Closes file and events."""
    self._file.close()
    self._events.close()


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

  def __init__(self, total: int, first: int, log_seconds: float = 10.0):
    self._total, self._first = total, first
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
      f"update {step:,}/{self._total:,}  loss {report['loss']:.3f}  "
      f"mlm {report['masked_lm_loss']:.3f}  "
      f"nsp {report['next_sentence_loss']:.3f}  "
      f"lr {report['learning_rate']:.2e}  "
      f"{report['examples_per_second']:.0f} examples/s  "
      f"{report['tokens_per_second']:.0f} tokens/s  eta {_clock(left)}"
    )
    end = "\n" if not self._tty or step >= self._total else ""
    start = "\r\x1b[K" if self._tty else ""
    print(start + line, end=end, file=sys.stderr, flush=True)


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
  return (
    f"trained {training['updates']:,} updates in {training['seconds']:.0f} s: "
    f"{training['examples_per_second']:.1f} examples/s and "
    f"{training['tokens_per_second']:.0f} tokens/s end to end, "
    f"{training['steady_examples_per_second']:.1f} and "
    f"{training['steady_tokens_per_second']:.0f} steady; "
    f"{training['padding']:.1%} padding"
  )


def write_run_file(output_dir: str, flags: dict, plan, data, devices) -> None:
  """Writes run.json: how this run was started and on what.

  A resumed run adds itself to the list, so that none is forgotten.
  """
  path = os.path.join(output_dir, RUN_FILE)
  runs = _read_runs(path) if os.path.exists(path) else []
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
  write_json(path, {"runs": runs})


def _read_runs(path: str) -> list[dict]:
  with open(path, encoding="utf-8") as f:
    return json.load(f)["runs"]


def trained_on(output_dir: str) -> list[str]:
  """The record files of a run folder's newest training; [] without one."""
  for run in reversed(_read_runs(os.path.join(output_dir, RUN_FILE))):
    if run["data"]:  # an evaluation alone has none
      return run["data"]["files"]
  return []
