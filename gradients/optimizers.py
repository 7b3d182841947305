"""The optimizers by name, and their settings."""

import dataclasses
import math

from common.errors import UserError
from gradients import adamw, lamb, moments

# google/bert's settings of AdamW.
WEIGHT_DECAY_RATE = 0.01
EXCLUDE_FROM_WEIGHT_DECAY = ("LayerNorm", "layer_norm", "bias")

OPTIMIZERS = {
  "adamw": adamw.AdamWeightDecayOptimizer,
  "lamb": lamb.LAMBOptimizer,
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """How gradients become an update; fields are named like their flags.

  Attributes:
    optimizer: one of `OPTIMIZERS`.
    weight_decay_rate: not applied to biases and layer norms.
    beta_1: decay of the first moment.
    beta_2: decay of the second moment.
    epsilon: added to the root of the second moment.
    bias_correction: of the moments, see the optimizers.
    min_trust_ratio: LAMB's lower clamp.
    max_trust_ratio: LAMB's upper clamp.
    clip_norm: highest global norm of the averaged gradient; 0 is no limit.
    prenormalize: divide the gradient by its global norm instead (NVLAMB,
      https://developer.nvidia.com/blog/pretraining-bert-with-layer-wise-adaptive-learning-rates/).
  """

  optimizer: str = "adamw"
  weight_decay_rate: float = WEIGHT_DECAY_RATE
  beta_1: float = 0.9
  beta_2: float = 0.999
  epsilon: float = 1e-6
  bias_correction: bool = False
  min_trust_ratio: float = 0.01
  max_trust_ratio: float = 0.3
  clip_norm: float = 1.0
  prenormalize: bool = False

  def __post_init__(self):
    """Raises `UserError` for a number out of its range."""
    if self.optimizer not in OPTIMIZERS:
      raise UserError(
        f"--optimizer={self.optimizer}: not one of {', '.join(OPTIMIZERS)}"
      )
    for name in ("beta_1", "beta_2"):
      if not 0.0 <= getattr(self, name) < 1.0:
        raise UserError(f"--{name}={getattr(self, name)}: must be in [0, 1)")
    for name in ("weight_decay_rate", "epsilon", "clip_norm"):
      value = getattr(self, name)
      if not (math.isfinite(value) and value >= 0.0):
        raise UserError(f"--{name}={value}: must be finite and not negative")
    if not 0.0 <= self.min_trust_ratio <= self.max_trust_ratio:
      raise UserError(
        f"--min_trust_ratio={self.min_trust_ratio} and --max_trust_ratio="
        f"{self.max_trust_ratio}: want 0 <= min <= max"
      )

  def make(self, learning_rate) -> moments.MomentOptimizer:
    """The optimizer; `learning_rate` is a scalar Tensor."""
    kind = OPTIMIZERS[self.optimizer]
    return kind(
      learning_rate=learning_rate,
      exclude_from_weight_decay=EXCLUDE_FROM_WEIGHT_DECAY,
      **{name: getattr(self, name) for name in kind.settings},
    )
