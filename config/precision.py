"""The types in which parts of the network compute, and the loss scale's flags.

Nothing here loads TensorFlow: `mixed_precision` has its types.
"""

import dataclasses
from collections.abc import Iterable

from common.errors import UserError
from common.settings import check, setting

TYPES = ("fp32", "fp16", "bf16")
AUTO = "auto"  # of --precision: bf16 where it is measured to be faster
# Matrix multiplications: --precision is theirs.
MATMUL_PARTS = ("attention", "feed_forward", "heads")
PARTS = (
  "embeddings", *MATMUL_PARTS, "softmax", "gelu", "layer_norm", "tanh",
  "losses",
)  # fmt: skip


def types_of_parts(precision: str, changes: Iterable[str]) -> dict[str, str]:
  """The type of each part, by --precision and --precision_policy.

  `changes` are "part=type" each; `UserError` for one of another form.
  """
  types = dict.fromkeys(PARTS, "fp32")
  if precision != AUTO:  # it is not measured yet
    types |= dict.fromkeys(MATMUL_PARTS, precision)
  changed = set()
  for change in changes:
    part, _, name = change.partition("=")
    if part not in PARTS or part in changed or name not in TYPES:
      raise UserError(
        f"--precision_policy={change}: want part=type, the part one of "
        f"{', '.join(PARTS)}, given once, and the type one of "
        f"{', '.join(TYPES)}"
      )
    changed.add(part)
    types[part] = name
  return types


@dataclasses.dataclass(frozen=True)
class LossScaleConfig:
  """How the loss scale behaves; fields are named like their flags."""

  # fmt: off
  loss_scale: float | None = setting(None,
    "Constant factor on the loss, for fp16. Default: 0, a dynamic loss scale.",
    low=0, json="fp16.loss_scale")
  initial_loss_scale: float = setting(2.0**16,
    "Factor on the loss that a dynamic loss scale begins with.", above=0)
  loss_scale_window: int = setting(1000,
    "Updates in a row without an overflow after which a dynamic loss scale "
    "doubles.", low=1, json="fp16.loss_scale_window")
  loss_scale_hysteresis: int = setting(1,
    "Overflows until a dynamic loss scale halves. Earlier ones are only "
    "counted, and the count restarts when the scale doubles (DeepSpeed's "
    "delayed shift).",
    low=1, json="fp16.hysteresis")
  min_loss_scale: float = setting(1.0,
    "Factor on the loss below which a dynamic loss scale does not fall. An "
    "overflow leaves a scale that is not above it unchanged.",
    above=0, json="fp16.min_loss_scale")
  # fmt: on

  def __post_init__(self):
    check(self)
    if not self.loss_scale and self.min_loss_scale > self.initial_loss_scale:
      raise UserError(
        f"--min_loss_scale={self.min_loss_scale} is above --initial_loss_scale="
        f"{self.initial_loss_scale}: lower the one or raise the other"
      )

  def check(self, uses_fp16: bool) -> None:
    if not uses_fp16 and self.loss_scale not in (None, 1.0):
      raise UserError(
        f"--loss_scale={self.loss_scale} is for fp16; bf16 and fp32 have the "
        "range to do without"
      )

  def floor(self, uses_fp16: bool) -> float:
    """A scale up to this one cannot fall; a static one never does."""
    dynamic = uses_fp16 and not self.loss_scale
    return self.min_loss_scale if dynamic else float("inf")
