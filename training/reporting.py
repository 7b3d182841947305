"""Reports of updates in metrics.jsonl, TensorBoard and on stderr."""

import collections
import contextlib
import math
import resource
import statistics
import time

import numpy as np

from checkpoints import metrics
from common import tensorflow_v1 as later
from common.console import Progress, shown, tell
from training import divergence

# Parts of the time between two reports.
_PARTS = ("input", "step", "all_reduce", "save", "evaluation")


class Clock:
  """Measures parts of the time, and speeds: between reports and over a run."""

  def __init__(self):
    self._started = time.monotonic()
    self._speeds: list[dict] = []  # of each report
    self._all: collections.Counter = collections.Counter()
    self._begin()

  def _begin(self) -> None:
    self._parts = dict.fromkeys(_PARTS, 0.0)
    self._now: collections.Counter = collections.Counter()

  def add(self, update: dict, task) -> None:
    waited, seconds = update["input_seconds"], update["seconds"]
    reduced = float(update["all_reduce_seconds"])
    # NaN if it cannot be measured: then it is part of the step.
    known = 0.0 if math.isnan(reduced) else reduced
    self._parts["input"] += waited
    self._parts["all_reduce"] += reduced
    self._parts["step"] += max(0.0, seconds - waited - known)
    sums = {"records": update["records"], **update["sums"]}
    flops = 0.0
    for name, each in task.flops.items():
      flops += each * float(sums[name])
    counts = {
      "updates": 1,
      "flops": flops,
      "seconds": seconds,
      "examples": float(sums["examples"]),
      "tokens": float(sums["tokens"]),
    }
    if not update["dropped_micro_batches"]:  # else its padding is unknown
      counts["positions"] = update["records"] * task.positions
      counts["tokens_in_positions"] = counts["tokens"]
    self._now.update(counts)
    self._all.update(counts)

  @contextlib.contextmanager
  def timing(self, part: str):
    began = time.monotonic()
    try:
      yield
    finally:
      self._parts[part] += time.monotonic() - began

  def rates(self, task, peak_tflops: float | None) -> dict:
    """Since the last report: speeds of all ranks, and of a rank's arithmetic.

    Speeds are None if all micro-batches were dropped.
    """
    flops = self._now["flops"] / task.plan.ranks
    tflops = flops / self._now["seconds"] / 1e12
    rates = {**self._now_speeds(), "model_tflops_per_second": tflops}
    if peak_tflops:
      rates["mfu"] = tflops / peak_tflops
    return rates

  def _now_speeds(self) -> dict:
    seconds = self._now["seconds"]
    return {
      f"{name}_per_second": ratio(self._now[name], seconds) or None
      for name in ("examples", "tokens")
    }

  def shares(self) -> dict:
    """Seconds of each part since the last report, as far as they are known."""
    shares = {}
    for part, seconds in self._parts.items():
      if not math.isnan(seconds):
        shares[f"{part}_seconds"] = seconds
    return shares

  def lap(self) -> None:
    """A report has been made."""
    if self._now["examples"]:
      self._speeds.append(self._now_speeds())
    self._begin()

  def closing(self) -> dict:
    """Speeds of the whole training, and the medians of the reports' speeds."""
    if not self._all["updates"]:
      return {"updates": 0}
    seconds = time.monotonic() - self._started
    closing: dict = {"updates": self._all["updates"], "seconds": seconds}
    for name in ("examples", "tokens"):
      # End to end: with saving, evaluation and compilation.
      closing[f"{name}_per_second"] = self._all[name] / seconds
    for name in ("examples_per_second", "tokens_per_second"):
      speeds = [report[name] for report in self._speeds]
      closing[f"steady_{name}"] = statistics.median(speeds) if speeds else None
    tokens = self._all["tokens_in_positions"]
    closing["padding"] = padding(tokens, self._all["positions"])
    return closing


def ratio(total, count) -> float | None:
  """`total` / `count`; None if that is 0."""
  return float(total) / float(count) if count else None


def padding(tokens: float, positions: int) -> float | None:
  """Share of token positions without a token; None without positions."""
  return 1.0 - tokens / positions if positions else None


def peak_memory() -> dict:
  """The most memory that this process has used, in MB (2^20 bytes)."""
  # For systems without VmHWM; this one counts the parent process, too.
  peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  with open("/proc/self/status", encoding="utf-8") as f:
    for line in f:
      if line.startswith("VmHWM"):
        peak_kb = int(line.split()[1])
  peaks = {"peak_memory_mb": peak_kb / 1024}
  if later.tf.config.list_physical_devices("GPU"):
    memory = later.tf.config.experimental.get_memory_info("GPU:0")
    peaks["gpu_peak_memory_mb"] = memory["peak"] / 2**20
  return peaks


def report(
  step: int, update: dict, task, clock: Clock, peak_tflops=None
) -> dict:
  """The report of update `step`; docs/training.md has a table of its keys.

  None stands for a loss that is not finite, and for all numbers of an update
  that lost all its micro-batches. Speeds and `..._seconds` are rank 0's since
  the previous report; `clock` has added this update. The seconds add up to that
  time, except for about a millisecond an update.
  """
  kept = float(update["sums"]["examples"])
  padded = None  # unknown for a dropped micro-batch
  if not update["dropped_micro_batches"]:
    tokens = float(update["sums"]["tokens"])
    padded = padding(tokens, update["records"] * task.positions)
  # An update that was skipped has no factors, nor has AdamW.
  trust_ratios, ratios = {}, update["trust_ratios"]
  if len(ratios) and not update["skipped"]:
    smallest = task.ops.variables[int(ratios.argmin())]
    trust_ratios = {
      "trust_ratio_min": float(ratios.min()),
      "trust_ratio_median": float(np.median(ratios)),
      "trust_ratio_max": float(ratios.max()),
      "trust_ratio_min_variable": smallest.op.name,
    }
  return {
    "global_step": step,
    **task.summarize(update["sums"]),
    "learning_rate": float(update["learning_rate"]),
    "grad_norm": float(update["grad_norm"]) if kept else None,
    "loss_scale": float(update["loss_scale"]),
    "skipped": bool(update["skipped"]),
    "skipped_updates": int(update["skipped_updates"]),
    "dropped_micro_batches": int(update["dropped_micro_batches"]),
    **trust_ratios,
    "examples": task.plan.examples_before(step),
    "padding": padded,
    **clock.rates(task, peak_tflops),
    **clock.shares(),
    **peak_memory(),
  }


def tell_trouble(step: int, update: dict, variables) -> None:
  """Says on stderr if an update or a micro-batch was not finite."""
  dropped, what = update["dropped_micro_batches"], "skipped"
  if not update["skipped"]:
    what = f"{dropped:.0f} micro-batches dropped"
  if update["skipped"] or dropped:
    which = divergence.variable_named(update, variables)
    tell(
      f"update {step}: {what}, the gradient of {which} is not finite (loss "
      f"scale {update['loss_scale']:g})"
    )


class Reporter:
  """Reports updates on rank 0, and counts their time on all ranks."""

  def __init__(self, run, clock: Clock, step: int):
    """For a `train_loop.Run` that starts after update `step`."""
    self._task, self._config, self._clock = run.task, run.config, clock
    self._is_root, self._first = run.comm.is_root, step + 1
    if self._is_root:
      folder, name = run.config.output_dir, metrics.METRICS_FILE
      metrics.forget_evaluations(folder, step)
      self._log = metrics.MetricsLog(folder, name, step, "train")
      # Without the first update, which compiles.
      self._progress = Progress(
        "training", run.task.plan.updates, "updates", step + 1, seconds=10.0
      )
      self._loss = metrics.Smoothed()

  def report(self, step: int, update: dict, is_last: bool = False) -> None:
    task, config = self._task, self._config
    self._clock.add(update, task)
    if not self._is_root:
      return
    numbers = report(step, update, task, self._clock, config.peak_tflops)
    tell_trouble(step, update, task.ops.variables)
    is_first, total = step == self._first, task.plan.updates
    done: float = step
    counted = f"{step:,}/{total:,}"
    if task.budget:
      counted = f"{step:,}"  # the time may end it before `total`
      if not is_first:
        first = task.plan.stage.first_update
        done = max(step, first + task.budget.share() * (total - first))
    self._progress.at(
      done,
      counted,
      f"smoothed loss {shown(self._loss.add(numbers['loss']), '.3f')}",
      f"{shown(numbers['examples_per_second'], ',.0f')} ex/s",
      task.headline(numbers),
      now=is_last or is_first,
      # Evaluations and saves do not change when the rest will be done.
      seconds=0.0 if is_first else update["seconds"],
    )
    if is_last or step % config.log_every_steps == 0:
      self._log.write(numbers)
      self._clock.lap()

  def close(self) -> None:
    if self._is_root:
      self._progress.close()
      self._log.close()


def speed_lines(training: dict) -> str:
  """The closing lines about speed of a result of `train_loop.train`."""
  padded, speeds = shown(training["padding"], ".1%"), []
  for prefix in ("", "steady_"):
    examples = shown(training[f"{prefix}examples_per_second"], ",.1f")
    tokens = shown(training[f"{prefix}tokens_per_second"], ",.0f")
    speeds.append(f"{examples} examples/s, {tokens} tokens/s")
  return (
    f"trained {training['updates']:,} updates in {training['seconds']:.0f} s, "
    f"{padded} padding\n"
    f"speed       {speeds[0]} end to end\n            {speeds[1]} steady"
  )
