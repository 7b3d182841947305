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
_SPEEDS = ("examples_per_second", "tokens_per_second")


class Reporter:
  """Times and speeds of updates on all ranks; rank 0 reports them."""

  def __init__(self, run, step: int):
    """For a `train_loop.Run` that starts after update `step`."""
    self._task, self._config = run.task, run.config
    self._first, self._log = step + 1, None
    self._started = time.monotonic()
    self._speeds: list[dict] = []  # of each report
    self._all: collections.Counter = collections.Counter()
    self._begin()
    if run.comm.is_root:
      folder, name = run.config.output_dir, metrics.METRICS_FILE
      # A run that went back makes other evaluations, and names other spikes.
      for log in (metrics.EVAL_METRICS_FILE, metrics.SPIKES_FILE):
        metrics.forget_after(folder, log, step)
      self._log = metrics.MetricsLog(folder, name, step, "train")
      # Without the first update, which compiles.
      self._progress = Progress(
        "training", run.task.plan.updates, "updates", step + 1, seconds=10.0
      )
      self._loss, self._losses = 0.0, 0  # their mean and number

  def _begin(self) -> None:
    """Times and speeds are those since here."""
    self._parts = dict.fromkeys(_PARTS, 0.0)
    self._now: collections.Counter = collections.Counter()

  @contextlib.contextmanager
  def timing(self, part: str):
    began = time.monotonic()
    try:
      yield
    finally:
      self._parts[part] += time.monotonic() - began

  def count(self, update: dict) -> None:
    """Adds an update's times, and what it has worked on."""
    task, sums = self._task, {"records": update["records"], **update["sums"]}
    waited, seconds = update["input_seconds"], update["seconds"]
    reduced = float(update["all_reduce_seconds"])
    # NaN if it cannot be measured: then it is part of the step.
    known = 0.0 if math.isnan(reduced) else reduced
    self._parts["input"] += waited
    self._parts["all_reduce"] += reduced
    self._parts["step"] += max(0.0, seconds - waited - known)
    counts: dict = {
      "updates": 1,
      "flops": sum(n * float(sums[name]) for name, n in task.flops.items()),
      "seconds": seconds,
      "examples": float(sums["examples"]),
      "tokens": float(sums["tokens"]),
    }
    if not update["dropped_micro_batches"]:  # else its padding is unknown
      counts["positions"] = update["records"] * task.positions
      counts["tokens_in_positions"] = counts["tokens"]
    self._now.update(counts)
    self._all.update(counts)
    self._last = counts

  def _rates(self) -> dict:
    """Speeds since the last report; None if all micro-batches were dropped."""
    seconds, examples = self._now["seconds"], self._now["examples"]
    rates = examples / seconds, self._now["tokens"] / seconds
    return dict(zip(_SPEEDS, rates if examples else (None, None), strict=True))

  def report(self, step: int, update: dict) -> dict:
    """The report of update `step`; docs/training.md has a table of its keys.

    None stands for a loss that is not finite, and for all numbers of an update
    that lost all its micro-batches. Speeds and `..._seconds` are rank 0's since
    the previous report, after `count` of this update. The seconds add up to
    that time, except for about a millisecond an update.
    """
    task, sums, last = self._task, update["sums"], self._last
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
    tflops = self._now["flops"] / task.plan.ranks / self._now["seconds"] / 1e12
    arithmetic = {"model_tflops_per_second": tflops}
    if self._config.peak_tflops:
      arithmetic["mfu"] = tflops / self._config.peak_tflops
    known = {}
    for part, seconds in self._parts.items():
      if not math.isnan(seconds):
        known[f"{part}_seconds"] = seconds
    return {
      "global_step": step,
      **task.summarize(sums),
      "learning_rate": float(update["learning_rate"]),
      "grad_norm": float(update["grad_norm"]) if sums["examples"] else None,
      "loss_scale": float(update["loss_scale"]),
      "skipped": bool(update["skipped"]),
      "skipped_updates": int(update["skipped_updates"]),
      "dropped_micro_batches": int(update["dropped_micro_batches"]),
      **trust_ratios,
      "examples": task.plan.examples_before(step),
      "padding": padding(last["tokens"], last.get("positions", 0)),
      **self._rates(),
      **arithmetic,
      **known,
      **peak_memory(),
    }

  def after_update(
    self, step: int, update: dict, is_last: bool = False
  ) -> None:
    """Counts an update on all ranks; rank 0 shows and writes it."""
    task, config = self._task, self._config
    self.count(update)
    if not self._log:
      return
    numbers = self.report(step, update)
    tell_trouble(step, update, task.ops.variables)
    loss = numbers["loss"]
    if loss is not None and math.isfinite(loss):
      # The exponential mean of about the last 50 losses; at first, of all.
      self._losses += 1
      self._loss += (loss - self._loss) / min(self._losses, 50)
    smoothed = shown(self._loss if self._losses else None, ".3f")
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
      f"smoothed loss {smoothed}",
      f"{shown(numbers['examples_per_second'], ',.0f')} ex/s",
      task.headline(numbers),
      now=is_last or is_first,
      # Evaluations and saves do not change when the rest will be done.
      seconds=0.0 if is_first else update["seconds"],
    )
    if is_last or step % config.log_every_steps == 0:
      self._log.write(numbers)
      self.next_report()

  def next_report(self) -> None:
    """The next report begins here."""
    if self._now["examples"]:
      self._speeds.append(self._rates())
    self._begin()

  def close(self) -> dict:
    """Speeds of the whole training, and the medians of the reports' speeds."""
    if self._log:
      self._progress.close()
      self._log.close()
    if not self._all["updates"]:
      return {"updates": 0}
    seconds = time.monotonic() - self._started
    closing: dict = {"updates": self._all["updates"], "seconds": seconds}
    for name in _SPEEDS:
      # End to end: with saving, evaluation and compilation.
      closing[name] = self._all[name.removesuffix("_per_second")] / seconds
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


def tell_trouble(step: int, update: dict, variables) -> None:
  """Says on stderr if an update or a micro-batch was not finite."""
  skipped, dropped = update["skipped"], update["dropped_micro_batches"]
  # `divergence` tells of a spike, with its records.
  if update["spike"].any() or not (skipped or dropped):
    return
  what = "skipped" if skipped else f"{dropped:.0f} micro-batches dropped"
  which = divergence.variable_named(update, variables)
  tell(
    f"update {step}: {what}, the gradient of {which} is not finite (loss "
    f"scale {update['loss_scale']:g})"
  )


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
