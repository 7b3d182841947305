"""Learning rate schedules, pure functions of the update: no TensorFlow."""

import math
from typing import NamedTuple

import numpy as np

from common import tensorflow_v1 as later
from common.errors import UserError

LR_SCALINGS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}

# Name -> (exponent of the warm-up, form of the decay). The last three are in
# https://github.com/microsoft/DeepSpeedExamples, bing_bert.
SCHEDULES = {
  "linear": (1.0, "poly"),  # google/bert's
  "poly": (1.0, "poly"),
  "constant": (1.0, "constant"),
  "cosine": (1.0, "cosine"),
  "wsd": (1.0, "sqrt"),  # https://arxiv.org/abs/2405.18392
  "wsd_linear": (1.0, "line"),
  "warmup_exp_decay_exp": (2.0, "exp"),
  "warmup_exp_decay_poly": (1.5, "poly"),
  "warmup_linear_decay_exp": (1.0, "exp"),
}
# Exponents of the decay without `power`; poly's is of NVIDIA's LAMB recipe.
POWERS = {"linear": 1.0, "poly": 0.5, "warmup_exp_decay_poly": 2.0}


class Schedule(NamedTuple):
  """A learning rate for each update. With w = warmup and n = total:

    step < w:  peak (step / w)^k + offset, k as in `SCHEDULES`
    poly:      peak (1 - step / n)^power + offset
    constant:  peak + offset
    cosine:    peak (1 + cos(pi (step - w) / (n - w))) / 2 + offset
    exp:       peak decay_rate^((step - w) / decay_steps) + offset
    line:      peak (1 - x) + offset, x = max(0, 1 - (n - step) / cooldown)
    sqrt:      peak (1 - x^(1/2)) + offset

  Polynomials are measured from update 0, as in google/bert's
  `create_optimizer`: where its warm-up ends, the rate drops to peak (1 - w /
  n). After update n, all but exp stay as they are.
  """

  peak: float
  total: int  # updates of the whole run
  warmup: int = 0  # updates of the warm-up
  name: str = "linear"  # one of `SCHEDULES`
  power: float | None = None  # None: the name's own, see `POWERS`
  decay_rate: float = 0.9
  decay_steps: int = 1000
  offset: float = 0.0
  cooldown: int = 1  # updates of the decay at the end, of wsd

  def __call__(self, step):
    """The rate of update `step`, from 0: float32 for a Tensor, else float64."""
    if isinstance(step, (int, float, np.generic, np.ndarray)):
      math_of, step = np, np.asarray(step, np.float64)
    else:
      math_of, step = later.tf, later.tf.cast(step, later.tf.float32)
    # Both branches are computed, so none may divide by 0.
    exponent, form = SCHEDULES[self.name]
    total, warmup = float(self.total), float(self.warmup)
    warming = (math_of.minimum(step, warmup) / max(1.0, warmup)) ** exponent
    after = lambda: math_of.maximum(step - warmup, 0.0)
    if form == "poly":
      power = POWERS[self.name] if self.power is None else self.power
      decayed = (1.0 - math_of.minimum(step, total) / total) ** power
    elif form == "cosine":
      rest = max(1.0, total - warmup)
      angle = math.pi * math_of.minimum(after(), rest) / rest
      decayed = 0.5 + 0.5 * math_of.cos(angle)
    elif form in ("line", "sqrt"):
      left = (total - math_of.minimum(step, total)) / max(1.0, self.cooldown)
      x = math_of.maximum(1.0 - left, 0.0)
      decayed = 1.0 - (math_of.sqrt(x) if form == "sqrt" else x)
    elif form == "exp":
      decayed = self.decay_rate ** (after() / self.decay_steps)
    else:
      decayed = math_of.ones_like(step)
    rate = math_of.where(step < warmup, warming, decayed)
    return self.peak * rate + self.offset

  def highest(self, first: int, last: int) -> float:
    """The highest rate of updates `first` to `last`."""
    # Rates only fall after the warm-up.
    top = np.clip([self.warmup - 1, self.warmup], first, last)
    return float(np.max(self(top)))

  def check_trains(self, first: int, before: int = 0) -> None:
    """Raises `UserError` if the rate is 0 for all updates from `first` on.

    `before` is how many updates the schedule counts before this run's own.
    """
    last = self.total - 1
    if first > last or self.highest(first + before, last + before) > 0.0:
      return
    counts = f", counted on from --init_checkpoint's update {before:,}"
    raise UserError(
      f"updates {first + 1:,} to {self.total:,} would train nothing, their "
      f"learning rate is 0: --lr_schedule={self.name}, a peak of "
      f"{self.peak:g}, --lr_offset={self.offset:g}, {self.warmup:,} updates of "
      f"warm-up{counts + ': leave out --norewarmup' if before else ''}"
    )

  def zero_from(self, before: int = 0) -> int | None:
    """From which of the run's updates, from 1, the rate stays 0; maybe None."""
    ends = before > 0 and float(self(self.total)) == 0.0
    return max(0, self.total - before) + 1 if ends else None


def scale_peak(peak: float, scaling: str, ranks: int) -> float:
  """The peak times ranks^(0, 1/2 or 1) for scaling none, sqrt or linear."""
  return peak * ranks ** LR_SCALINGS[scaling]
