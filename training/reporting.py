"""What is said of updates: the reports of metrics.jsonl and TensorBoard.

`report` says what is in them. Speeds and shares of time are those of rank 0
since the report before.
"""

import contextlib
import dataclasses
import math
import resource
import statistics
import time

import numpy as np

from common.tensorflow_v1 import tf

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


def _no_seconds() -> dict:
  return dict.fromkeys(_PARTS, 0.0)


@dataclasses.dataclass
class Clock:
  """Where the time goes since the last report; speeds over the whole run."""

  started: float = dataclasses.field(default_factory=time.monotonic)
  parts: dict = dataclasses.field(default_factory=_no_seconds)
  seconds: float = 0.0  # of updates since the last report
  updates: int = 0
  examples: float = 0.0
  tokens: float = 0.0
  all_tokens: float = 0.0
  all_examples: float = 0.0
  # Of updates of which no micro-batch was dropped, whose padding is known.
  whole_tokens: float = 0.0
  whole_capacity: int = 0
  speeds: list = dataclasses.field(default_factory=list)

  def add(self, seconds: float, got: dict, task) -> None:
    """Counts an update.

    Args:
      seconds: that it took.
      got: what `train_loop` fetched of it.
      task: a `train_loop.Task`.
    """
    waited, reduced = got["input_seconds"], float(got["all_reduce_seconds"])
    # Not a number where it cannot be measured: then it is part of the step.
    known = 0.0 if math.isnan(reduced) else reduced
    self.parts["input"] += waited
    self.parts["all_reduce"] += reduced
    self.parts["step"] += max(0.0, seconds - waited - known)
    examples, tokens = (
      float(got["sums"][name]) for name in (task.examples, task.tokens)
    )
    self.seconds += seconds
    self.updates += 1
    self.examples += examples
    self.tokens += tokens
    self.all_examples += examples
    self.all_tokens += tokens
    if not got["dropped_micro_batches"]:
      self.whole_tokens += tokens
      self.whole_capacity += task.capacity

  @contextlib.contextmanager
  def timing(self, part: str):
    """Counts the block's time as "save" or "evaluation"."""
    began = time.monotonic()
    try:
      yield
    finally:
      self.parts[part] += time.monotonic() - began

  def rates(self, task, peak_tflops: float | None) -> dict:
    """Speeds since the last report; arguments as of `report`."""
    flops = task.flops / task.plan.ranks * self.updates / self.seconds
    found = {
      **self.speeds_now(),
      "model_tflops_per_second": flops / 1e12,
    }
    if peak_tflops:
      found["mfu"] = flops / 1e12 / peak_tflops
    return found

  def speeds_now(self) -> dict:
    """Of examples and tokens since the last report; None if all were dropped.

    What is dropped trains nothing and is not counted.
    """
    speed = lambda n: n / self.seconds if n else None
    return {
      "examples_per_second": speed(self.examples),
      "tokens_per_second": speed(self.tokens),
    }

  def shares(self) -> dict:
    """Seconds of each part since the last report."""
    return {
      f"{part}_seconds": seconds
      for part, seconds in self.parts.items()
      if not math.isnan(seconds)
    }

  def lap(self) -> None:
    """Begins the time until the next report."""
    if self.examples:
      self.speeds.append(self.speeds_now())
    self.parts = _no_seconds()
    self.seconds, self.updates, self.examples, self.tokens = 0.0, 0, 0.0, 0.0


def ratio(total, count) -> float | None:
  """The mean of so many that sum up to `total`; None of none."""
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
  step: int, samples: int, got: dict, task, clock: Clock, peak_tflops=None
) -> dict:
  """The report of one update, as metrics.jsonl has it.

  A number that does not exist is None, null in the file: a loss that is not
  finite, or all of an update whose micro-batches were all dropped.

  Of this update:

    global_step            its number, from 1
    loss, ...              `Task.summarize`: losses of the heads in nats,
                           accuracies from 0 to 1, means over the global batch
    learning_rate          that it was made with
    grad_norm              global norm of the averaged gradient, not clipped
    loss_scale             that it was made with; 1 without fp16
    skipped                whether it was not applied, not being finite
    dropped_micro_batches  that were left out of it, not being finite
    padding                share of the token positions, 0 to 1; None if
                           micro-batches were dropped
    trust_ratio_min, _median, _max   LAMB, if applied: |w| / |u| over the
                           variables, clamped as --min_trust_ratio says
    trust_ratio_min_variable   the first one with the smallest

  Since the run began, a stop and resume included:

    examples               seen; about, if records are packed
    skipped_updates        how many were skipped

  Since the report before, in this process; rates are over the time of updates:

    examples_per_second, tokens_per_second   of all ranks; real tokens, without
                           padding
    model_tflops_per_second   10^12 FLOP/s of a rank: `Task.flops`
    mfu                    that over --peak_tflops, 0 to 1; only with the flag
    input_seconds          until batches were there that were not ready when
                           rank 0 asked for them; in the first report with what
                           TensorFlow prepares before it reads any
    all_reduce_seconds     see `TrainOps.all_reduce_seconds`; not with a GPU
    step_seconds           the rest of the updates' time
    save_seconds           held up by commits and checkpoints
    evaluation_seconds     evaluating
                           (What follows an update is in the next report. The
                           five add up to the time since the report before,
                           but for about a millisecond an update.)

  Of the process of rank 0, the most so far:

    peak_memory_mb         resident, MB of 2^20 bytes
    gpu_peak_memory_mb     TensorFlow's on the GPU; only with one

  Args:
    step: the update's number.
    samples: records seen up to it.
    got: what `train_loop` fetched of it.
    task: a `train_loop.Task`.
    clock: with the update added.
    peak_tflops: (optional) 10^12 FLOP/s that a rank could reach.
  """
  kept = float(got["sums"][task.examples])
  return {
    "global_step": step,
    **task.summarize(got["sums"]),
    "learning_rate": float(got["learning_rate"]),
    "grad_norm": float(got["grad_norm"]) if kept else None,
    "loss_scale": float(got["loss_scale"]),
    "skipped": bool(got["skipped"]),
    "skipped_updates": int(got["skipped_updates"]),
    "dropped_micro_batches": int(got["dropped_micro_batches"]),
    **_trust_ratios(got, task.ops.variables),
    "examples": task.plan.examples(samples),
    "padding": None
    if got["dropped_micro_batches"]
    else padding(float(got["sums"][task.tokens]), task.capacity),
    **clock.rates(task, peak_tflops),
    **clock.shares(),
    **peak_memory(),
  }


def _trust_ratios(got: dict, variables) -> dict:
  ratios = got["trust_ratios"]
  if got["skipped"] or not len(ratios):
    return {}
  return {
    "trust_ratio_min": float(ratios.min()),
    "trust_ratio_median": float(np.median(ratios)),
    "trust_ratio_max": float(ratios.max()),
    "trust_ratio_min_variable": variables[int(ratios.argmin())].op.name,
  }


def closing(clock: Clock, updates: int, task) -> dict:
  """What the whole call did, and how fast.

  Args:
    clock: of all updates.
    updates: how many.
    task: a `train_loop.Task`.
  """
  seconds = time.monotonic() - clock.started
  if not updates:
    return {"updates": 0}
  return {
    "updates": updates,
    "seconds": seconds,
    # End to end: saving, evaluation and warming up included. Steady: the
    # median report interval.
    "examples_per_second": clock.all_examples / seconds,
    "tokens_per_second": clock.all_tokens / seconds,
    "steady_examples_per_second": _median(clock, "examples_per_second"),
    "steady_tokens_per_second": _median(clock, "tokens_per_second"),
    "padding": padding(clock.whole_tokens, clock.whole_capacity),
  }


def _median(clock: Clock, key: str) -> float | None:
  """Of the speeds between reports; None without one."""
  speeds = [speeds[key] for speeds in clock.speeds if speeds[key] is not None]
  return statistics.median(speeds) if speeds else None
