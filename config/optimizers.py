"""The optimizers by name, and their settings; needs no TensorFlow."""

import dataclasses
import importlib
from typing import Any, NamedTuple

from common.errors import UserError
from common.settings import check, setting

# google/bert's settings of AdamW.
WEIGHT_DECAY_RATE = 0.01
EXCLUDE_FROM_WEIGHT_DECAY = ("LayerNorm", "layer_norm", "bias")
# Checkpoints have the average of a weight NAME as NAME/average.
AVERAGE = "average"

_ADAM_SETTINGS = (
  "weight_decay_rate", "beta_1", "beta_2", "epsilon", "bias_correction",
)  # fmt: skip


class Optimizer(NamedTuple):
  """A row of `OPTIMIZERS`: what can be known of one before it is made."""

  module: str  # it loads TensorFlow, so it is imported when a run needs it
  name: str  # of the class, a `moments.MomentOptimizer`
  settings: tuple[str, ...]  # fields of `OptimizerConfig` that it takes
  multiplies: bool = False  # matrices; it takes the type of products, too


OPTIMIZERS = {
  "adamw": Optimizer(
    "gradients.adamw", "AdamWeightDecayOptimizer", _ADAM_SETTINGS
  ),
  "lamb": Optimizer(
    "gradients.variable_rates",
    "LAMBOptimizer",
    (*_ADAM_SETTINGS, "min_trust_ratio", "max_trust_ratio"),
  ),
  "stable_adamw": Optimizer(
    "gradients.variable_rates", "StableAdamWOptimizer", _ADAM_SETTINGS
  ),
  "muon": Optimizer(
    "gradients.muon",
    "MuonOptimizer",
    (*_ADAM_SETTINGS, "muon_momentum", "muon_steps", "muon_coefficients"),
    multiplies=True,
  ),
}

# By --muon_coefficients: a safety, and (a, b, c) of each step's
# a x + b x^3 + c x^5; the last ones are those of all later steps. Rounding may
# make a singular value larger than 1: with a safety of 1.01 the steps are those
# for values up to 1.01.
_COEFFICIENTS: dict[str, tuple[float, tuple]] = {
  # https://kellerjordan.github.io/posts/muon/
  "jordan": (1.0, ((3.4445, -4.7750, 2.0315),)),
  # Amsel et al. 2025, https://arxiv.org/abs/2505.16932, algorithm 1: the best
  # of each step for singular values from 0.001 on.
  "polar_express": (
    1.01,
    (
      (8.28721201814563, -23.595886519098837, 17.300387312530933),
      (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
      (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
      (3.3184196573706015, -2.488488024314874, 0.51004894012372),
      (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
      (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
      (1.875, -1.25, 0.375),
    ),
  ),
}


def polynomials_of(coefficients: str, steps: int) -> tuple:
  """(a, b, c) of each Newton-Schulz step, by --muon_coefficients."""
  safety, table = _COEFFICIENTS[coefficients]
  polynomials = []
  for a, b, c in [*table[:steps], *[table[-1]] * (steps - len(table))]:
    polynomials.append((a / safety, b / safety**3, c / safety**5))
  return tuple(polynomials)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """How gradients become an update; fields are named like their flags."""

  # fmt: off
  optimizer: str = setting("adamw",
    "Optimizer that turns gradients into updates. lamb: a rate for each "
    "variable, for large batches. stable_adamw: AdamW with a lower rate where "
    "gradients are above their second moment. muon: orthogonal updates of "
    "hidden matrices, AdamW for the rest.", choices=OPTIMIZERS)
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
  muon_momentum: float = setting(0.95,
    "Muon: factor by which the running mean of a hidden matrix' gradients "
    "decays at each update.", low=0, below=1)
  muon_steps: int = setting(5,
    "Muon: Newton-Schulz steps that make a hidden matrix' momentum "
    "orthogonal. Fewer are faster and less exact.", low=1, high=20)
  muon_coefficients: str = setting("jordan",
    "Muon: coefficients of the Newton-Schulz steps. jordan: Keller Jordan's, "
    "for singular values between 0.7 and 1.2. polar_express: those that come "
    "closest to 1 in as many steps.", choices=_COEFFICIENTS)
  clip_norm: float = setting(1.0,
    "Highest global norm of the mean gradient; a larger one is scaled down to "
    "it. 0 sets no limit.",
    low=0, json=("gradient_clipping", "optimizer.params.max_grad_norm"))
  spike_deviations: float = setting(0.0,
    "Skip an update whose loss or gradient norm (by logarithms) is so many "
    "standard deviations above those of the 100 before. After ten in a row the "
    "run goes back to an earlier checkpoint. 6 is cautious, 0 skips none.",
    low=0)
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

  def make(self, learning_rate, matmul_type=None) -> Any:
    """The optimizer.

    `learning_rate` is a scalar Tensor, `matmul_type` the DType of the model's
    products; None is float32.
    """
    row = OPTIMIZERS[self.optimizer]
    make = getattr(importlib.import_module(row.module), row.name)
    settings = {name: getattr(self, name) for name in row.settings}
    if row.multiplies and matmul_type:
      settings["matmul_type"] = matmul_type
    return make(
      learning_rate=learning_rate,
      exclude_from_weight_decay=EXCLUDE_FROM_WEIGHT_DECAY,
      **settings,
    )
