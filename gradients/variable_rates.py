"""A learning rate for each variable: LAMB, and AdamW with stable updates."""

import functools

import numpy as np

from common.tensorflow_v1 import tf
from config import execution
from gradients import moments
from xla_patches import jit


class VariableRateOptimizer(moments.MomentOptimizer):
  """A factor r of the learning rate for each variable; m and v as in AdamW.

    u <- m / (sqrt(v) + eps) + decay w
    w <- w - lr r u

  A subclass has r, the trust ratio. Bias correction as in AdamW.
  """

  has_trust_ratios = True

  def is_one_program(self, layout):
    return not layout.norm_communicates

  def _update(self, gradient, variable, slots, decay, layout):
    weights = tf.convert_to_tensor(variable)
    m, v = slots["adam_m"], slots["adam_v"]
    direction = self._direction
    # Else all of the update is one program already. Norms over ranks are not in
    # a program, so only what comes before them can be.
    if not self.is_one_program(layout):
      direction = jit.compiled(direction, execution.UPDATE)
    corrections = m.correction, v.correction
    update, *new_moments = direction(
      gradient, weights, m.variable, v.variable, *corrections, decay
    )
    new_v = new_moments[1] / v.correction
    norm = functools.partial(layout.norm, variable=variable)
    ratio = self._ratio(norm, weights, update, gradient, new_v)
    self.trust_ratios.append(ratio)
    learning_rate = tf.convert_to_tensor(self.learning_rate, tf.float32)
    rate = layout.spread(ratio, variable) * learning_rate
    new_values = [weights - rate * update, *new_moments]
    pairs = zip((variable, m.variable, v.variable), new_values, strict=True)
    # Everything is read before anything is written.
    with tf.control_dependencies(new_values):
      return tf.group(*moments.assign_all(pairs))

  def _ratio(self, norm, weights, update, gradient, v) -> tf.Tensor:
    """r, of the shape of `norm`'s results; `update` is u, v is corrected."""
    raise NotImplementedError

  def _direction(
    self, gradient, weights, m, v, correction_1, correction_2, decay
  ):
    """(u, new m, new v), as a function that XLA can compile."""
    beta_1 = tf.constant(self.beta_1, tf.float32)
    beta_2 = tf.constant(self.beta_2, tf.float32)
    new_m = beta_1 * m + (1.0 - beta_1) * gradient
    new_v = beta_2 * v + (1.0 - beta_2) * tf.square(gradient)
    root = tf.sqrt(new_v / correction_2)
    update = (new_m / correction_1) / (root + self.epsilon)
    if not moments.is_zero(decay):
      update += decay * weights
    return update, new_m, new_v


class LAMBOptimizer(VariableRateOptimizer):
  """Layer-wise adaptive rates for large batches.

    r <- |w| / |u|, between min and max; 1 where |w| or |u| is 0

  (You et al. 2020, https://arxiv.org/abs/1904.00962, algorithm 2; the clamp and
  its defaults are those of DeepSpeed's bing_bert.)
  """

  def __init__(
    self, *args, min_trust_ratio=0.01, max_trust_ratio=0.3, **kwargs
  ):
    super().__init__(*args, **kwargs)
    self.min_trust_ratio = min_trust_ratio
    self.max_trust_ratio = max_trust_ratio

  def _ratio(self, norm, weights, update, gradient, v):
    weights_norm, update_norm = norm(weights), norm(update)
    ratio = weights_norm / tf.maximum(update_norm, np.finfo(np.float32).tiny)
    return tf.where(
      (weights_norm > 0.0) & (update_norm > 0.0),
      tf.clip_by_value(ratio, self.min_trust_ratio, self.max_trust_ratio),
      tf.ones_like(ratio),
    )


class StableAdamWOptimizer(VariableRateOptimizer):
  """AdamW whose step is smaller while its second moment lags behind.

    r <- 1 / max(1, rms), rms^2 = mean(g^2 / max(v, eps^2)) of a variable

  (Wortsman et al. 2023, https://arxiv.org/abs/2304.13013, algorithm 2, with the
  update clipping of AdaFactor.)
  """

  def _ratio(self, norm, weights, update, gradient, v):
    surprise = gradient / tf.maximum(tf.sqrt(v), self.epsilon)
    # A mean over all of a variable, of which a rank may have a part.
    rms = norm(surprise) / norm(tf.ones_like(surprise))
    return 1.0 / tf.maximum(1.0, rms)
