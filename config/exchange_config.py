"""The settings of the exchange of gradients; needs no TensorFlow."""

import dataclasses

from common.errors import UserError
from common.settings import check, setting


@dataclasses.dataclass(frozen=True)
class AllreduceConfig:
  """How gradients are reduced over ranks; fields are named like their flags."""

  # fmt: off
  allreduce_groups: int = setting(4,
    "All-reduces of one update. Each begins when the last of its gradients is "
    "ready, so all but the last overlap with the backward pass; 1 is one "
    "all-reduce after it. 0: each gradient is sent alone, when it is ready.",
    low=0)
  fp16_allreduce: bool = setting(False,
    "Send gradients as float16, with a loss scale against underflow.")
  powersgd_rank: int = setting(0,
    "Columns of the two matrices whose product is sent for a gradient "
    "(PowerSGD, for slow networks). It sums whole float32 factors on all "
    "ranks. 0 sends gradients as they are.",
    low=0, excludes=("fp16_allreduce", "zero"))
  zero: int = setting(0,
    "Stage of ZeRO. 1: each rank keeps and updates its share of the "
    "optimizer's state; checkpoints stay the same. 0: every rank keeps all.",
    low=0, high=1)
  # fmt: on

  def __post_init__(self):
    check(self)


def models_of(ranks: int, slices: int) -> int:
  """How many models ranks hold together by --tensor_parallel, `slices` each."""
  models, left_over = divmod(ranks, slices)
  if left_over:
    raise UserError(
      f"--tensor_parallel={slices}: {ranks} ranks are no multiple of it; start "
      "as many (horovodrun -np), or fewer slices"
    )
  return models
