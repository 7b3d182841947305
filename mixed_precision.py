"""Precision by part of the network: the one place that decides on casts.

Variables are float32, and so are gradients from the all-reduce on: unscaling,
the finite check, clipping, the optimizer; Muon's products have the type of the
feed-forward part. In between, a `Policy` names the type in which each part of
the network computes. --precision sets that of the matrix multiplications; the
other parts stay float32 unless --precision_policy says so.
"""

import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from common.tensorflow_v1 import OPTIONAL_VARIABLES, tf
from config.precision import PARTS, LossScaleConfig, types_of_parts
from config.pretraining import RunConfig

_DTYPES = {"fp32": tf.float32, "fp16": tf.float16, "bf16": tf.bfloat16}


class Policy(NamedTuple):
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
    """The parts of each type, in a line."""
    texts = []
    for name, dtype in _DTYPES.items():
      parts = [part for part in PARTS if getattr(self, part) == dtype]
      if parts:
        texts.append(f"{name}: {', '.join(parts)}")
    return "; ".join(texts)


FP32 = Policy()


def make_policy(precision: str, changes: Iterable[str] = ()) -> Policy:
  """A policy from --precision and --precision_policy, "part=type" each."""
  names = types_of_parts(precision, changes)
  return Policy(**{part: _DTYPES[name] for part, name in names.items()})


def policy_of(config: RunConfig) -> Policy:
  """The policy of a run."""
  return make_policy(config.precision, config.precision_policy)


_ROWS, _COLUMNS = 512, 1024  # of the matrices that `faster_type` multiplies
_TRIES = 5
# bf16 must gain this much: casts, which are not measured, cost time, too.
_GAIN = 1.2


def faster_type(session_config: tf.ConfigProto) -> tuple[str, float]:
  """bf16 or fp32, and how many times as fast bf16 multiplies matrices here."""
  rng, best = np.random.default_rng(0), dict.fromkeys(("fp32", "bf16"), np.inf)
  # A GPU takes longer to launch a small product than to compute it.
  times = 4 if tf.config.list_physical_devices("GPU") else 1
  with tf.Graph().as_default(), tf.Session(config=session_config) as session:
    products = {}
    for name in best:
      factors = []
      for rows in (_ROWS, _COLUMNS):
        shape = [times * rows, times * _COLUMNS]
        values = rng.standard_normal(shape, np.float32)
        factors.append(tf.Variable(tf.cast(values, _DTYPES[name])))
      products[name] = tf.matmul(*factors).op
    session.run(tf.global_variables_initializer())
    # In turns, so that other load of the machine meets both.
    for _ in range(1 + _TRIES):
      for name, product in products.items():
        start = time.perf_counter()
        session.run(product)
        best[name] = min(best[name], time.perf_counter() - start)
  ratio = best["fp32"] / best["bf16"]
  return "bf16" if ratio >= _GAIN else "fp32", ratio


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
      variable = tf.get_variable(name, initializer=initial, trainable=False)
      # Older checkpoints, and those of other precisions, do not have it.
      tf.add_to_collection(OPTIONAL_VARIABLES, variable)
      return variable

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
    # Earlier overflows are only counted (hysteresis).
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


def make_loss_scale(config) -> LossScale:
  """A dynamic loss scale for float16 gradients, unless a run's has a value."""
  settings = config.loss_scale
  if config.uses_fp16 and not settings.loss_scale:
    return DynamicLossScale(settings)
  return StaticLossScale(settings.loss_scale or 1.0)
