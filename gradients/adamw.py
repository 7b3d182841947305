"""AdamW, as google/bert has it."""

from common.tensorflow_v1 import tf
from gradients import moments


class AdamWeightDecayOptimizer(moments.MomentOptimizer):
  """Adam with decoupled weight decay, without bias correction by default.

    m <- b1 m + (1 - b1) g
    v <- b2 v + (1 - b2) g^2
    w <- w - lr (m / (sqrt(v) + eps) + decay w)

  (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101.) With bias
  correction m / (1 - b1^t) and v / (1 - b2^t) replace m and v in the last line.
  """

  def _update(self, gradient, variable, slots, decay, layout):
    m, v = slots["adam_m"], slots["adam_v"]
    learning_rate = tf.convert_to_tensor(self.learning_rate, tf.float32)
    decayed = []
    if not moments.is_zero(decay):
      # The decay uses the weights from before the update, and the gradient
      # must have been computed from them.
      with tf.control_dependencies([gradient]):
        kept = 1.0 - learning_rate * decay
        decayed = [variable.assign(variable * kept, read_value=False)]
    # TensorFlow's fused kernel is one pass over memory; the composed formula
    # takes about ten. The kernel's own bias correction,
    # sqrt(1 - beta2_power) / (1 - beta1_power), does not reach epsilon. Powers
    # of 0 make it 1, and ours is in the rate and in epsilon.
    root = v.correction**0.5
    settings = dict(
      beta1_power=0.0,
      beta2_power=0.0,
      lr=learning_rate * (root / m.correction),
      beta1=self.beta_1,
      beta2=self.beta_2,
      epsilon=self.epsilon * root,
      grad=gradient,
    )
    written = {"var": variable, "m": m.variable, "v": v.variable}
    with tf.control_dependencies(decayed):
      if hasattr(variable, "handle"):
        handles = {name: each.handle for name, each in written.items()}
        return tf.raw_ops.ResourceApplyAdam(**handles, **settings)
      # Variables of google/bert's own scripts are references.
      references = {name: each._ref() for name, each in written.items()}
      return tf.raw_ops.ApplyAdam(**references, **settings).op
