"""Precision by part of the network: the one place that decides on casts.

Variables are float32, and so are gradients from the all-reduce on: unscaling,
the finite check, clipping, the optimizer. In between, a `Policy` names the type
in which each part of the network computes. --precision sets that of the matrix
multiplications; the other parts stay float32 unless --precision_policy says so.
"""

import dataclasses
from collections.abc import Iterable

from common import settings
from common.errors import UserError
from common.settings import setting
from common.tensorflow_v1 import OPTIONAL_VARIABLES, tf

TYPES = {"fp32": tf.float32, "fp16": tf.float16, "bf16": tf.bfloat16}


@dataclasses.dataclass(frozen=True)
class Policy:
  """The type in which each part computes."""

  embeddings: tf.DType = tf.float32  # lookup, sum, norm
  # Matrix multiplications.
  attention: tf.DType = tf.float32  # Q, K, V, scores, context, output
  feed_forward: tf.DType = tf.float32  # both
  heads: tf.DType = tf.float32  # pooler, masked LM, next sentence
  # Islands: results are stored in the type of the matmul that reads them.
  softmax: tf.DType = tf.float32  # of the attention scores
  gelu: tf.DType = tf.float32  # or the config's other activation
  layer_norm: tf.DType = tf.float32  # with the residual sum before it
  tanh: tf.DType = tf.float32  # the pooler's
  losses: tf.DType = tf.float32  # log softmax, sums

  def describe(self) -> str:
    told = []
    for name, dtype in TYPES.items():
      parts = [part for part in PARTS if getattr(self, part) == dtype]
      if parts:
        told.append(f"{name}: {', '.join(parts)}")
    return "; ".join(told)

  @property
  def uses_fp16(self) -> bool:
    return tf.float16 in dataclasses.astuple(self)


FP32 = Policy()
PARTS = tuple(field.name for field in dataclasses.fields(Policy))
_MATMUL_PARTS = ("attention", "feed_forward", "heads")


def make_policy(precision: str, changes: Iterable[str] = ()) -> Policy:
  """A policy from --precision and --precision_policy, "part=type" each."""
  changed: dict[str, tf.DType] = {}
  for change in changes:
    part, _, name = change.partition("=")
    if part not in PARTS or part in changed or name not in TYPES:
      raise UserError(
        f"--precision_policy={change}: want part=type, the part one of "
        f"{', '.join(PARTS)}, given once, and the type one of "
        f"{', '.join(TYPES)}"
      )
    changed[part] = TYPES[name]
  return Policy(**dict.fromkeys(_MATMUL_PARTS, TYPES[precision]) | changed)


def island(function, dtype: tf.DType):
  """`function`, computed in `dtype`, its result stored in its input's type."""
  return lambda x: tf.cast(function(tf.cast(x, dtype)), x.dtype)


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
    settings.check(self)
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

  def make(self, uses_fp16: bool) -> "LossScale":
    self.check(uses_fp16)
    if uses_fp16 and not self.loss_scale:
      return DynamicLossScale(self)
    return StaticLossScale(self.loss_scale or 1.0)


class StaticLossScale:
  """A constant factor on the loss: `value`, a float32 scalar."""

  def __init__(self, value: float):
    self.value = tf.constant(value, tf.float32, name="loss_scale")

  def update_op(self, finite, dropped) -> tf.Operation:
    del finite, dropped
    return tf.no_op(name="keep_loss_scale")


class DynamicLossScale:
  """Halves on overflow and doubles after a window of good updates.

  It keeps 16-bit gradients from underflowing (https://arxiv.org/abs/1710.03740
  section 3.2.1). Its state is in variables, so checkpoints have it.
  """

  def __init__(self, config: LossScaleConfig):
    def make(name, value):
      initial = tf.constant(value, tf.float32)
      made = tf.get_variable(name, initializer=initial, trainable=False)
      tf.add_to_collection(OPTIONAL_VARIABLES, made)
      return made

    self._config = config
    with tf.variable_scope("loss_scale"):
      self._scale = make("value", config.initial_loss_scale)
      self._good = make("good_updates", 0.0)
      self._left = make("overflows_left", config.loss_scale_hysteresis)
    self.value = tf.convert_to_tensor(self._scale)

  def update_op(self, finite: tf.Tensor, dropped: tf.Tensor) -> tf.Operation:
    """`finite`: bool, it was applied; `dropped`: float, micro-batches lost."""
    overflow = tf.logical_not(finite) | (dropped > 0.0)
    config, scale = self._config, self.value
    left, good = tf.convert_to_tensor(self._left), self._good + 1.0
    lower = overflow & (left <= 1.0)
    grow = tf.logical_not(overflow) & (good >= config.loss_scale_window)
    # A scale beyond float32's own range could not be undone.
    grown = tf.maximum(scale, tf.minimum(scale * 2.0, 2.0**126))
    # A resumed run's scale may be below a new floor: then it stays.
    lowered = tf.minimum(scale, tf.maximum(scale * 0.5, config.min_loss_scale))
    left = tf.where(overflow, tf.maximum(left - 1, 1), left)
    full = float(config.loss_scale_hysteresis)
    new = (
      (self._scale, tf.where(lower, lowered, tf.where(grow, grown, scale))),
      (self._good, tf.where(overflow | grow, 0.0, good)),
      (self._left, tf.where(grow, full, left)),
    )
    with tf.control_dependencies([value for _, value in new]):
      return tf.group(*[v.assign(value, read_value=False) for v, value in new])


LossScale = StaticLossScale | DynamicLossScale
