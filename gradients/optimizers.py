"""The optimizers by name, and their settings."""

import dataclasses

from common.errors import UserError
from common.settings import check, setting
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
  """How gradients become an update; fields are named like their flags."""

  # fmt: off
  optimizer: str = setting("adamw",
    "Optimizer that turns gradients into updates.", choices=OPTIMIZERS)
  weight_decay_rate: float = setting(WEIGHT_DECAY_RATE,
    "Share of each weight that an update takes away, times the learning rate "
    "(decoupled weight decay). Biases and layer norms are not decayed.",
    low=0, json="optimizer.params.weight_decay")
  beta_1: float = setting(0.9,
    "Factor by which the first moment, the running mean of gradients, decays "
    "at each update.", low=0, below=1)
  beta_2: float = setting(0.999,
    "Factor by which the second moment, the running mean of squared gradients, "
    "decays at each update.", low=0, below=1)
  epsilon: float = setting(1e-6,
    "Number added to the square root of the second moment.",
    above=0, json="optimizer.params.eps")
  bias_correction: bool = setting(False,
    "Correct the moments for their start at zero, as the Adam paper does and "
    "google/bert does not.", json="optimizer.params.bias_correction")
  min_trust_ratio: float = setting(0.01,
    "LAMB: lowest trust ratio, the norm of a variable over that of its update.",
    low=0, json="optimizer.params.min_coeff")
  max_trust_ratio: float = setting(0.3,
    "LAMB: highest trust ratio, the norm of a variable over that of its "
    "update.", json="optimizer.params.max_coeff")
  clip_norm: float = setting(1.0,
    "Highest global norm of the mean gradient; a larger one is scaled down to "
    "it. 0 sets no limit.",
    low=0, json=("gradient_clipping", "optimizer.params.max_grad_norm"))
  # https://developer.nvidia.com/blog/pretraining-bert-with-layer-wise-adaptive-learning-rates/
  prenormalize: bool = setting(False,
    "Divide the mean gradient by its global norm (NVLAMB) instead of clipping "
    "it.")
  # fmt: on

  def __post_init__(self):
    check(self)
    if not self.min_trust_ratio <= self.max_trust_ratio:
      raise UserError(
        f"--min_trust_ratio={self.min_trust_ratio} and --max_trust_ratio="
        f"{self.max_trust_ratio}: want 0 <= min <= max"
      )

  @property
  def kind(self) -> type[moments.MomentOptimizer]:
    return OPTIMIZERS[self.optimizer]

  def make(self, learning_rate) -> moments.MomentOptimizer:
    """The optimizer; `learning_rate` is a scalar Tensor."""
    return self.kind(
      learning_rate=learning_rate,
      exclude_from_weight_decay=EXCLUDE_FROM_WEIGHT_DECAY,
      **{name: getattr(self, name) for name in self.kind.settings},
    )
