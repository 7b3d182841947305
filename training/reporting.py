"""What is reported of updates, in metrics.jsonl, TensorBoard and on stderr.

`report` says what is in a report. Speeds and shares of time are those of rank 0
since the report before.
"""

import collections
import contextlib
import math
import resource
import statistics
import time

import numpy as np

from common.console import Progress, shown, tell
from common.tensorflow_v1 import tf
from training import metrics

# What the time between two reports is made of.
_PARTS = ("input", "step", "all_reduce", "save", "evaluation")
# Keys that differ between runs that are otherwise equal to the last bit.
MEASURED = frozenset(
  (
    "examples_per_second",
    "tokens_per_second",
    "model_tflops_per_second",
    "mfu",
    *(f"{part}_seconds" for part in _PARTS),
    "peak_memory_mb",
    "gpu_peak_memory_mb",
  )
)


class Clock:
  """Where time goes since the last report; speeds over the whole run."""

  def __init__(self):
    self._started = time.monotonic()
    self._speeds = []  # of each report
    # Sums of all updates, and of those without a dropped micro-batch, whose
    # padding is known.
    self._all, self._whole = collections.Counter(), collections.Counter()
    self._begin()

  def _begin(self) -> None:
    self._parts = dict.fromkeys(_PARTS, 0.0)
    self._now = collections.Counter()

  def add(self, update: dict, task) -> None:
    """Counts an `update` of `train_loop.run_update`."""
    waited = update["input_seconds"]
    reduced = float(update["all_reduce_seconds"])
    # Not a number where it cannot be measured: then it is part of the step.
    known = 0.0 if math.isnan(reduced) else reduced
    self._parts["input"] += waited
    self._parts["all_reduce"] += reduced
    self._parts["step"] += max(0.0, update["seconds"] - waited - known)
    counts = {
      "updates": 1,
      "seconds": update["seconds"],
      "examples": float(update["sums"][task.examples]),
      "tokens": float(update["sums"][task.tokens]),
    }
    self._now.update(counts)
    self._all.update(counts)
    if not update["dropped_micro_batches"]:
      self._whole.update(tokens=counts["tokens"], capacity=task.capacity)

  @contextlib.contextmanager
  def timing(self, part: str):
    """Counts the block's time as "save" or "evaluation"."""
    began = time.monotonic()
    try:
      yield
    finally:
      self._parts[part] += time.monotonic() - began

  def speeds(self) -> dict:
    """Of examples and tokens since the last report; None if all were dropped.

    What is dropped trains nothing and is not counted.
    """
    return {
      f"{name}_per_second": self._now[name] / self._now["seconds"]
      if self._now[name]
      else None
      for name in ("examples", "tokens")
    }

  def rates(self, task, peak_tflops: float | None) -> dict:
    """Speeds since the last report; arguments as of `report`."""
    flops = task.flops / task.plan.ranks * self._now["updates"]
    tflops = flops / self._now["seconds"] / 1e12
    found = {**self.speeds(), "model_tflops_per_second": tflops}
    return {**found, "mfu": tflops / peak_tflops} if peak_tflops else found

  def shares(self) -> dict:
    """Seconds of each part since the last report."""
    return {
      f"{part}_seconds": seconds
      for part, seconds in self._parts.items()
      if not math.isnan(seconds)
    }

  def lap(self) -> None:
    """Begins the time until the next report."""
    if self._now["examples"]:
      self._speeds.append(self.speeds())
    self._begin()

  def closing(self) -> dict:
    """What all updates did, and how fast."""
    if not self._all["updates"]:
      return {"updates": 0}
    seconds = time.monotonic() - self._started
    steady = lambda key: _median([s[key] for s in self._speeds])
    return {
      "updates": self._all["updates"],
      "seconds": seconds,
      # End to end: saving, evaluation and warming up included. Steady: the
      # median report interval.
      "examples_per_second": self._all["examples"] / seconds,
      "tokens_per_second": self._all["tokens"] / seconds,
      "steady_examples_per_second": steady("examples_per_second"),
      "steady_tokens_per_second": steady("tokens_per_second"),
      "padding": padding(self._whole["tokens"], self._whole["capacity"]),
    }


def _median(values: list) -> float | None:
  known = [value for value in values if value is not None]
  return statistics.median(known) if known else None


def ratio(total, count) -> float | None:
  """The mean of `count` numbers that sum up to `total`; None of none."""
  return float(total) / float(count) if count else None


def padding(tokens: float, capacity: int) -> float | None:
  """Share of token positions without a token; None of no positions."""
  return 1.0 - tokens / capacity if capacity else None


def peak_memory() -> dict:
  """The most that this process has had so far, MB (2^20 bytes)."""
  kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  found = {"peak_memory_mb": kilobytes / 1024}
  if tf.config.list_physical_devices("GPU"):
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    found["gpu_peak_memory_mb"] = peak / 2**20
  return found


def report(
  step: int, update: dict, task, clock: Clock, peak_tflops=None
) -> dict:
  """The report of one update; docs/training.md has a table of its keys.

  A number that does not exist is None, null in the file: a loss that is not
  finite, or all of an update whose micro-batches were all dropped.

  Losses are in nats, means over the global batch; accuracies, `padding` and
  `mfu` from 0 to 1. `grad_norm` is that of the averaged gradient before
  clipping, trust ratios are |w| / |u| after clamping. `examples` (about, if
  records are packed) and `skipped_updates` count since the run began, stops
  included. Rates and `..._seconds` are since the report before, in this
  process: rates over the time of updates; `model_tflops_per_second` of a rank;
  `input_seconds` until batches were there that were not ready when rank 0 asked
  for them, in the first report with what TensorFlow prepares before it reads
  any. What follows an update is in the next report. The five add up to the time
  since the report before, but for about a millisecond an update. Memory is in
  MB of 2^20 bytes, the most so far of rank 0's process.

  Args:
    step: the update's number.
    update: of `train_loop.run_update`.
    task: a `train_loop.Task`.
    clock: with the update added.
    peak_tflops: (optional) 10^12 FLOP/s that a rank could reach.
  """
  kept = float(update["sums"][task.examples])
  return {
    "global_step": step,
    **task.summarize(update["sums"]),
    "learning_rate": float(update["learning_rate"]),
    "grad_norm": float(update["grad_norm"]) if kept else None,
    "loss_scale": float(update["loss_scale"]),
    "skipped": bool(update["skipped"]),
    "skipped_updates": int(update["skipped_updates"]),
    "dropped_micro_batches": int(update["dropped_micro_batches"]),
    **_trust_ratios(update, task.ops.variables),
    "examples": task.plan.examples(step * task.plan.records_per_update),
    "padding": None
    if update["dropped_micro_batches"]
    else padding(float(update["sums"][task.tokens]), task.capacity),
    **clock.rates(task, peak_tflops),
    **clock.shares(),
    **peak_memory(),
  }


def _trust_ratios(update: dict, variables) -> dict:
  ratios = update["trust_ratios"]
  if update["skipped"] or not len(ratios):
    return {}
  return {
    "trust_ratio_min": float(ratios.min()),
    "trust_ratio_median": float(np.median(ratios)),
    "trust_ratio_max": float(ratios.max()),
    "trust_ratio_min_variable": variables[int(ratios.argmin())].op.name,
  }


def tell_trouble(step: int, update: dict, variables) -> None:
  """Says on stderr when an update or a micro-batch was not finite."""
  bad = int(update["nonfinite_variable"])
  # Each may be finite and the sum of all squares not.
  which = variables[bad].op.name if bad >= 0 else "all variables together"
  dropped, scale = update["dropped_micro_batches"], update["loss_scale"]
  if update["skipped"]:
    tell(
      f"update {step}: skipped, the gradient of {which} is not finite (loss "
      f"scale {scale:g})"
    )
  elif dropped > 0:
    tell(
      f"update {step}: {dropped:.0f} micro-batches dropped, the gradient of "
      f"{which} was not finite (loss scale {scale:g})"
    )


class Reporter:
  """Reports updates on rank 0; on all ranks it counts their time."""

  def __init__(self, run, clock: Clock, step: int):
    """Opens the log of a `train_loop.Run` that starts after update `step`."""
    self._task, self._config, self._clock = run.task, run.config, clock
    self._is_root, self._first = run.comm.is_root, step + 1
    if self._is_root:
      self._log = metrics.MetricsLog(
        run.config.output_dir, metrics.METRICS_FILE, step, "train"
      )
      self._progress = Progress(
        "training", run.task.plan.updates, "updates", step, seconds=10.0
      )

  def report(self, step: int, update: dict) -> None:
    """Reports an `update` of `train_loop.run_update`."""
    task, config = self._task, self._config
    self._clock.add(update, task)
    if not self._is_root:
      return
    found = report(step, update, task, self._clock, config.peak_tflops)
    tell_trouble(step, update, task.ops.variables)
    total = task.plan.updates
    is_end = step in (self._first, total)
    self._progress.at(step, progress_line(found, total, task.headline), is_end)
    if step % config.log_every_steps == 0 or step == total:
      self._log.write(found)
      self._clock.lap()

  def close(self) -> None:
    """Closes the log.

    Raises:
      DataError: some reports could not be written.
    """
    if self._is_root:
      self._progress.close()
      self._log.close()


def progress_line(report: dict, updates: int, headline) -> str:
  """A report in one line, of a run of `updates`."""
  return (
    f"update {report['global_step']:,}/{updates:,}  "
    f"loss {shown(report['loss'], '.3f')}  {headline(report)}  "
    f"lr {report['learning_rate']:.2e}  "
    f"{shown(report['examples_per_second'], '.0f')} examples/s  "
    f"{shown(report['tokens_per_second'], '.0f')} tokens/s"
  )


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
