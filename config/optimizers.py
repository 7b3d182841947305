"""The optimizers by name, and their settings; needs no TensorFlow."""

import dataclasses
import importlib
from typing import Any

from common.errors import UserError
from common.settings import check, setting

# google/bert's settings of AdamW.
WEIGHT_DECAY_RATE = 0.01
EXCLUDE_FROM_WEIGHT_DECAY = ("LayerNorm", "layer_norm", "bias")

_ADAM_SETTINGS = (
  "weight_decay_rate", "beta_1", "beta_2", "epsilon", "bias_correction",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """A row of `OPTIMIZERS`: what can be known of one before it is made."""

  module: str  # it loads TensorFlow, so it is imported when a run needs it
  name: str  # of the class, a `moments.MomentOptimizer`
  settings: tuple[str, ...]  # fields of `OptimizerConfig` that it takes
  # Flag that it does not go with -> why; refusals derive from it.
  excludes: dict[str, str] = dataclasses.field(default_factory=dict)


# An update that needs whole matrices would exclude "zero" and
# "tensor_parallel": ranks hold parts of variables then.
OPTIMIZERS = {
  "adamw": Optimizer(
    "gradients.adamw", "AdamWeightDecayOptimizer", _ADAM_SETTINGS
  ),
  "lamb": Optimizer(
    "gradients.lamb",
    "LAMBOptimizer",
    (*_ADAM_SETTINGS, "min_trust_ratio", "max_trust_ratio"),
  ),
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

  def check_with(self, **used: bool) -> None:
    """Raises `UserError` if a flag that is `used` excludes the optimizer."""
    excludes = OPTIMIZERS[self.optimizer].excludes
    for flag, is_used in used.items():
      if is_used and flag in excludes:
        raise UserError(
          f"--optimizer={self.optimizer} does not go with --{flag}: "
          f"{excludes[flag]}. Leave one of them out"
        )

  def make(self, learning_rate) -> Any:
    """The optimizer; `learning_rate` is a scalar Tensor."""
    row = OPTIMIZERS[self.optimizer]
    make = getattr(importlib.import_module(row.module), row.name)
    return make(
      learning_rate=learning_rate,
      exclude_from_weight_decay=EXCLUDE_FROM_WEIGHT_DECAY,
      **{name: getattr(self, name) for name in row.settings},
    )
