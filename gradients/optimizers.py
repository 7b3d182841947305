"""The update rules: AdamW and LAMB on one base, and their settings."""

import dataclasses
import math
import re

import numpy as np

from common.errors import UserError
from common.settings import check, setting
from common.tensorflow_v1 import tf

# google/bert's settings of AdamW.
WEIGHT_DECAY_RATE = 0.01
EXCLUDE_FROM_WEIGHT_DECAY = ("LayerNorm", "layer_norm", "bias")
# The moments' names after their variable's, for LAMB too, as in google/bert.
SLOTS = ("adam_m", "adam_v")


def variable_name(variable) -> str:
  """A variable's name without ":0", also of one that is outside of graphs."""
  return variable.name.rpartition(":")[0]


class _MomentOptimizer(tf.train.Optimizer):
  """What AdamW and LAMB share: moments, decoupled decay, bias correction.

  Slots are the variables NAME/adam_m and NAME/adam_v, float32, as in
  google/bert's checkpoints. With bias correction `applied_updates` counts the
  updates, those that were skipped not included.

  Attributes:
    has_trust_ratios: whether each variable has a rate of its own.
    trust_ratios: float scalars by which the rate of each variable is
      multiplied, in the order of the last `apply_gradients`; or none.
    norm: (tensor, variable) -> the norm of all of it, where ranks have but a
      slice of the variable; None where they have it whole.
  """

  has_trust_ratios = False
  norm = None

  def __init__(
    self,
    learning_rate,
    weight_decay_rate=0.0,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-6,
    exclude_from_weight_decay=None,
    name=None,
    bias_correction=False,
  ):
    """`learning_rate` is a float or scalar Tensor; the rest are floats.

    Args:
      exclude_from_weight_decay: regular expressions; a variable whose name one
        of them matches anywhere is not decayed.
      name: (optional) str, the class' name without it.
      bias_correction: bool.
    """
    super().__init__(use_locking=False, name=name or type(self).__name__)
    self.learning_rate = learning_rate
    self.weight_decay_rate = weight_decay_rate
    self.beta_1 = beta_1
    self.beta_2 = beta_2
    self.epsilon = epsilon
    self.exclude_from_weight_decay = exclude_from_weight_decay
    self.bias_correction = bias_correction
    self.trust_ratios = []
    self._moments = {}  # variable's name -> (m, v)
    self._applied_updates = None

  def create_slots(self, variables) -> list:
    """The slots [(m, v), ...] of `variables`, made on the first call.

    Callers that apply inside `tf.cond` or a function make them before it: a
    variable made in there could not be initialised from outside.
    """
    new = [v for v in variables if variable_name(v) not in self._moments]
    self.create_counter()
    with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
      for variable in new:
        self._moments[variable_name(variable)] = tuple(
          tf.get_variable(
            name=f"{variable_name(variable)}/{slot}",
            shape=variable.shape.as_list(),
            dtype=tf.float32,
            trainable=False,
            initializer=tf.zeros_initializer(),
          )
          for slot in SLOTS
        )
    return [self._moments[variable_name(variable)] for variable in variables]

  def create_counter(self) -> None:
    """Makes `applied_updates`, where it is needed and not there yet."""
    if self.bias_correction and self._applied_updates is None:
      with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
        self._applied_updates = tf.get_variable(
          "applied_updates",
          shape=[],
          dtype=tf.int64,
          trainable=False,
          initializer=tf.zeros_initializer(),
        )

  def count_op(self) -> tf.Operation:
    """Counts an update that was applied, where that is needed."""
    if not self.bias_correction:
      return tf.no_op()
    return self._applied_updates.assign_add(1, read_value=False)

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    """Applies one update; as in google/bert, `global_step` is not advanced."""
    del global_step
    pairs = [(g, v) for g, v in grads_and_vars if g is not None]
    slots = self.create_slots([v for _, v in pairs])
    corrections = self.corrections()
    self.trust_ratios = []
    updates = [
      self._update(
        tf.convert_to_tensor(gradient), variable, *moments, *corrections
      )
      for (gradient, variable), moments in zip(pairs, slots, strict=True)
    ]
    with tf.control_dependencies(updates):
      counted = self.count_op()
    return tf.group(*updates, counted, name=name)

  def corrections(self) -> tuple:
    """1 - b1^t and 1 - b2^t for update t = 1, 2, ...; 1 without correction."""
    if not self.bias_correction:
      return 1.0, 1.0
    t = tf.cast(tf.convert_to_tensor(self._applied_updates) + 1, tf.float32)
    # -expm1(t log b) is 1 - b^t without the cancellation at b near 1.
    return tuple(
      -tf.math.expm1(t * math.log(beta)) for beta in (self.beta_1, self.beta_2)
    )

  def decay_rate(self, name: str) -> float:
    """The weight decay of a variable."""
    excluded = self.exclude_from_weight_decay or ()
    if any(re.search(pattern, name) for pattern in excluded):
      return 0.0
    return self.weight_decay_rate

  def follow(self, gradient, weights, m, v, correction_1, correction_2, decay):
    """(u, m, v): what the weights are to be moved against, and the moments.

      m <- b1 m + (1 - b1) g
      v <- b2 v + (1 - b2) g^2
      u <- m / (sqrt(v) + eps) + decay w

    Args:
      gradient, weights, m, v: float tensors of one shape.
      correction_1, correction_2: of `corrections`.
      decay: float, or a tensor of their shape.
    """
    beta_1 = tf.constant(self.beta_1, tf.float32)
    beta_2 = tf.constant(self.beta_2, tf.float32)
    new_m = beta_1 * m + (1.0 - beta_1) * gradient
    new_v = beta_2 * v + (1.0 - beta_2) * tf.square(gradient)
    root = tf.sqrt(new_v / correction_2)
    update = (new_m / correction_1) / (root + self.epsilon)
    if not (isinstance(decay, float) and decay == 0.0):
      update += decay * weights
    return update, new_m, new_v


class AdamWeightDecayOptimizer(_MomentOptimizer):
  """Adam with decoupled weight decay, without bias correction by default.

    m <- b1 m + (1 - b1) g
    v <- b2 v + (1 - b2) g^2
    w <- w - lr (m / (sqrt(v) + eps) + decay w)

  (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101, as google/bert
  has it.) With bias correction m / (1 - b1^t) and v / (1 - b2^t) stand for m
  and v in the last line.
  """

  def _update(self, gradient, variable, m, v, correction_1, correction_2):
    """One variable's update: decay, then TensorFlow's fused Adam kernel.

    The kernel's own bias correction, sqrt(1 - beta2_power) / (1 - beta1_power),
    is 1 when both powers are given as 0; ours is in the rate and in epsilon,
    which it would else not reach. It is one pass over memory; the composed
    formula takes about ten.
    """
    learning_rate = tf.convert_to_tensor(self.learning_rate, tf.float32)
    decay = []
    if self.decay_rate(variable_name(variable)):
      # The decay uses the weights from before the update, and the gradient
      # must have been computed from them.
      with tf.control_dependencies([gradient]):
        kept = 1.0 - learning_rate * self.weight_decay_rate
        decay = [variable.assign(variable * kept, read_value=False)]
    root = correction_2**0.5
    settings = dict(
      beta1_power=0.0,
      beta2_power=0.0,
      lr=learning_rate * (root / correction_1),
      beta1=self.beta_1,
      beta2=self.beta_2,
      epsilon=self.epsilon * root,
      grad=gradient,
    )
    with tf.control_dependencies(decay):
      if hasattr(variable, "handle"):
        return tf.raw_ops.ResourceApplyAdam(
          var=variable.handle, m=m.handle, v=v.handle, **settings
        )
      return tf.raw_ops.ApplyAdam(
        var=variable._ref(), m=m._ref(), v=v._ref(), **settings
      ).op


class LAMBOptimizer(_MomentOptimizer):
  """Layer-wise adaptive rates for large batches.

    m, v as in AdamW
    u <- m / (sqrt(v) + eps) + decay w
    r <- |w| / |u|, between min and max; 1 where |w| or |u| is 0
    w <- w - lr r u

  (You et al. 2020, https://arxiv.org/abs/1904.00962, algorithm 2, with the
  clamp of DeepSpeed's.) Bias correction as in AdamW.
  """

  has_trust_ratios = True

  def __init__(
    self, *args, min_trust_ratio=0.01, max_trust_ratio=0.3, **kwargs
  ):
    """As `AdamWeightDecayOptimizer`; the trust ratio r is clamped to [min, max]
    (DeepSpeed's bing_bert: 0.01 and 0.3)."""
    super().__init__(*args, **kwargs)
    self.min_trust_ratio = min_trust_ratio
    self.max_trust_ratio = max_trust_ratio

  def _update(self, gradient, variable, m, v, correction_1, correction_2):
    """One variable's update; everything is read before anything is written."""
    weights = tf.convert_to_tensor(variable)
    update, new_m, new_v = self.follow(
      gradient,
      weights,
      m,
      v,
      correction_1,
      correction_2,
      self.decay_rate(variable_name(variable)),
    )
    norm = self.norm or (lambda tensor, _: tf.norm(tensor))
    ratio = self.trust_ratio(norm(weights, variable), norm(update, variable))
    self.trust_ratios.append(ratio)
    rate = ratio * tf.convert_to_tensor(self.learning_rate, tf.float32)
    new_weights = weights - rate * update
    with tf.control_dependencies([new_weights, new_m, new_v]):
      return tf.group(
        variable.assign(new_weights, read_value=False),
        m.assign(new_m, read_value=False),
        v.assign(new_v, read_value=False),
      )

  def trust_ratio(self, weights_norm, update_norm) -> tf.Tensor:
    """r of variables with these norms, float tensors of one shape."""
    ratio = weights_norm / tf.maximum(update_norm, np.finfo(np.float32).tiny)
    return tf.where(
      (weights_norm > 0.0) & (update_norm > 0.0),
      tf.clip_by_value(ratio, self.min_trust_ratio, self.max_trust_ratio),
      tf.ones_like(ratio),
    )


OPTIMIZERS = {"adamw": AdamWeightDecayOptimizer, "lamb": LAMBOptimizer}


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
    low=0, json="optimizer.params.eps")
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

  def make(self, learning_rate) -> _MomentOptimizer:
    """The optimizer; `learning_rate` is a scalar Tensor."""
    settings = dict(
      learning_rate=learning_rate,
      weight_decay_rate=self.weight_decay_rate,
      beta_1=self.beta_1,
      beta_2=self.beta_2,
      epsilon=self.epsilon,
      exclude_from_weight_decay=EXCLUDE_FROM_WEIGHT_DECAY,
      bias_correction=self.bias_correction,
    )
    if self.optimizer == "lamb":
      settings["min_trust_ratio"] = self.min_trust_ratio
      settings["max_trust_ratio"] = self.max_trust_ratio
    return OPTIMIZERS[self.optimizer](**settings)
