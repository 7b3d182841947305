"""The optimizer, and the one order in which gradients become an update.

`build_train_ops` is that order; everything else here serves it. google/bert's
public names (`create_optimizer`, `AdamWeightDecayOptimizer`) work as there.
"""

import re
from typing import NamedTuple

import lr_schedule
from tensorflow_v1 import tf

# google/bert's settings of AdamW.
WEIGHT_DECAY_RATE = 0.01
EXCLUDE_FROM_WEIGHT_DECAY = ("LayerNorm", "layer_norm", "bias")


class AdamWeightDecayOptimizer(tf.train.Optimizer):
  """Adam with decoupled weight decay and without bias correction.

    m <- b1 m + (1 - b1) g
    v <- b2 v + (1 - b2) g^2
    w <- w - lr (m / (sqrt(v) + eps) + decay w)

  (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101, as google/bert
  has it.) Slots are the variables NAME/adam_m and NAME/adam_v, float32, as in
  google/bert's checkpoints.
  """

  def __init__(
    self,
    learning_rate,
    weight_decay_rate=0.0,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-6,
    exclude_from_weight_decay=None,
    name="AdamWeightDecayOptimizer",
  ):
    """`learning_rate` is a float or scalar Tensor; the rest are floats.

    Args:
      exclude_from_weight_decay: regular expressions; a variable whose name one
        of them matches anywhere is not decayed.
    """
    super().__init__(use_locking=False, name=name)
    self.learning_rate = learning_rate
    self.weight_decay_rate = weight_decay_rate
    self.beta_1 = beta_1
    self.beta_2 = beta_2
    self.epsilon = epsilon
    self.exclude_from_weight_decay = exclude_from_weight_decay

  def create_slots(self, variables) -> list:
    """The slots [(m, v), ...] of `variables`, made on the first call.

    Callers that apply inside `tf.cond` make them before it: a variable made in
    a branch could not be initialised from outside.
    """
    with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
      return [
        tuple(
          tf.get_variable(
            name=f"{variable.op.name}/{slot}",
            shape=variable.shape.as_list(),
            dtype=tf.float32,
            trainable=False,
            initializer=tf.zeros_initializer(),
          )
          for slot in ("adam_m", "adam_v")
        )
        for variable in variables
      ]

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    """Applies one update; as in google/bert, `global_step` is not advanced."""
    del global_step
    pairs = [(g, v) for g, v in grads_and_vars if g is not None]
    slots = self.create_slots([v for _, v in pairs])
    updates = [
      self._update(tf.convert_to_tensor(gradient), variable, m, v)
      for (gradient, variable), (m, v) in zip(pairs, slots, strict=True)
    ]
    return tf.group(*updates, name=name)

  def _update(self, gradient, variable, m, v):
    """One variable's update: decay, then TensorFlow's fused Adam kernel.

    The kernel's bias correction, sqrt(1 - beta2_power) / (1 - beta1_power), is
    1 when both powers are given as 0. It is one pass over memory; the composed
    formula takes about ten.
    """
    learning_rate = tf.convert_to_tensor(self.learning_rate, tf.float32)
    decay = []
    if self._do_use_weight_decay(variable.op.name):
      # The decay uses the weights from before the update.
      decay = [
        variable.assign(
          variable * (1.0 - learning_rate * self.weight_decay_rate),
          read_value=False,
        )
      ]
    settings = dict(
      beta1_power=0.0,
      beta2_power=0.0,
      lr=learning_rate,
      beta1=self.beta_1,
      beta2=self.beta_2,
      epsilon=self.epsilon,
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

  def _do_use_weight_decay(self, name: str) -> bool:
    excluded = self.exclude_from_weight_decay or ()
    return bool(self.weight_decay_rate) and not any(
      re.search(pattern, name) for pattern in excluded
    )


def create_optimizer(
  loss, init_lr, num_train_steps, num_warmup_steps, use_tpu=False
):
  """google/bert's training op for one process, for scripts written for it.

  AdamW with linear warm-up and decay, clipping by global norm 1, and a global
  step that counts the updates. Training over ranks needs `build_train_ops`.

  Args:
    loss: float scalar Tensor.
    init_lr: peak learning rate.
    num_train_steps: updates of the whole run.
    num_warmup_steps: updates of the warm-up.
    use_tpu: must be false.

  Raises:
    ValueError: `use_tpu` is true.
  """
  if use_tpu:
    raise ValueError("use_tpu=True: this project trains on GPUs and CPUs")
  global_step = tf.train.get_or_create_global_step()
  step = tf.convert_to_tensor(global_step)
  optimizer = AdamWeightDecayOptimizer(
    learning_rate=lr_schedule.linear(
      step, init_lr, num_train_steps, num_warmup_steps
    ),
    weight_decay_rate=WEIGHT_DECAY_RATE,
    exclude_from_weight_decay=EXCLUDE_FROM_WEIGHT_DECAY,
  )
  variables = tf.trainable_variables()
  gradients, _ = tf.clip_by_global_norm(
    tf.gradients(loss, variables), clip_norm=1.0
  )
  applied = optimizer.apply_gradients(zip(gradients, variables, strict=True))
  with tf.control_dependencies([applied]):
    return tf.group(tf.assign(global_step, step + 1))


def first_nonfinite(scalars) -> tf.Tensor:
  """The index of the first scalar that is not finite, or -1; int32."""
  bad = tf.logical_not(tf.is_finite(tf.stack(scalars)))
  first = tf.argmax(tf.cast(bad, tf.int32), output_type=tf.int32)
  return tf.where(tf.reduce_any(bad), first, -1)


class LocalAccumulation(tf.train.Optimizer):
  """Sums the gradients of a rank's micro-batches before they are all-reduced.

  Wrap an optimizer with it and wrap that with Horovod's: `compute_gradients`
  gives this micro-batch's gradients plus those stored by earlier runs of
  `accumulate_op`, so there is one all-reduce per update. A micro-batch with a
  gradient that is not finite adds nothing and is counted as dropped: the other
  micro-batches of the update keep their work.

  With one micro-batch per update it passes gradients through: nothing is
  stored, and each gradient can leave as soon as it is computed.
  """

  def __init__(self, optimizer: tf.train.Optimizer, micro_batches: int):
    super().__init__(use_locking=False, name="LocalAccumulation")
    self._optimizer = optimizer
    self._micro_batches = micro_batches
    self._stores = []

  def compute_gradients(self, loss, var_list, extra=(), **kwargs):
    """See the class; `extra` are [n] Tensors summed alongside the gradients.

    Sets `self.accumulate_op`, `self.reset_op`, `self.kept` (micro-batches that
    the sums hold, float scalar), `self.extra` (the sums of `extra`) and
    `self.nonfinite` (index of the first gradient of this micro-batch that is
    not finite, or -1).
    """
    pairs = self._optimizer.compute_gradients(loss, var_list, **kwargs)
    gradients = [tf.convert_to_tensor(g) for g, _ in pairs]
    if self._micro_batches == 1:
      self.accumulate_op = self.reset_op = tf.no_op(name="accumulate_nothing")
      self.kept, self.extra = tf.constant(1.0), list(extra)
      self.nonfinite = tf.constant(-1)
      return pairs
    with tf.variable_scope("accumulation"):
      sums = self._add([*gradients, tf.constant(1.0), *extra], gradients)
    n = len(gradients)
    self.kept, self.extra = sums[n], sums[n + 1 :]
    return list(zip(sums[:n], [v for _, v in pairs], strict=True))

  def _add(self, values, gradients):
    """The stored sums plus `values`, where all `gradients` are finite."""
    stores = [
      tf.get_local_variable(
        f"sum_{i}",
        shape=value.shape.as_list(),
        initializer=tf.zeros_initializer(),
        use_resource=True,
      )
      for i, value in enumerate(values)
    ]
    self.nonfinite = first_nonfinite([tf.nn.l2_loss(g) for g in gradients])
    finite = self.nonfinite < 0
    stored = [tf.convert_to_tensor(s) for s in stores]
    self.accumulate_op = tf.cond(
      finite,
      lambda: tf.group(
        *[
          s.assign_add(v, read_value=False)
          for s, v in zip(stores, values, strict=True)
        ]
      ),
      tf.no_op,
      name="keep_or_drop",
    ).op
    sums = tf.cond(
      finite,
      lambda: [s + v for s, v in zip(stored, values, strict=True)],
      lambda: [tf.identity(s) for s in stored],
      name="with_this_micro_batch",
    )
    with tf.control_dependencies(sums):
      self.reset_op = tf.group(
        *[s.assign(tf.zeros(s.shape), read_value=False) for s in stores]
      )
    return sums

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    """Applies with the wrapped optimizer."""
    return self._optimizer.apply_gradients(grads_and_vars, global_step, name)


class TrainOps(NamedTuple):
  """What a training loop runs: for each update `accumulate` once per
  micro-batch but the last, then `update`, whose values are then valid.
  """

  accumulate: tf.Operation
  update: tf.Operation
  sums: dict  # name -> float scalar, summed over the global batch
  grad_norm: tf.Tensor  # of the averaged gradient, before clipping
  learning_rate: tf.Tensor
  loss_scale: tf.Tensor
  dropped_micro_batches: tf.Tensor  # of this update, over all ranks
  skipped: tf.Tensor  # whether the update was skipped
  nonfinite_variable: tf.Tensor  # index into `variables`, or -1
  variables: list  # the trainable variables


def build_train_ops(
  loss: tf.Tensor,
  sums: dict,
  optimizer: AdamWeightDecayOptimizer,
  comm,
  micro_batches: int,
  clip_norm: float = 1.0,
  loss_scale: float = 1.0,
  samples: tuple | None = None,
) -> TrainOps:
  """The one gradient order.

  Args:
    loss: float scalar: this micro-batch's share of the global batch's loss.
      Shares add up over micro-batches and ranks, so gradients are summed.
    sums: name -> float scalar of this micro-batch, to be summed over the
      global batch for reporting.
    optimizer: applies the update; its `learning_rate` is a scalar Tensor.
    comm: a `distributed.Comm`.
    micro_batches: micro-batches of one rank's update.
    clip_norm: highest global norm of the averaged gradient; 0 is no limit.
    loss_scale: factor on the loss, so that 16-bit gradients do not underflow.
    samples: (variable, n): a counter that each update advances by n.
  """
  variables = tf.trainable_variables()
  loss_scale = tf.constant(loss_scale, tf.float32, name="loss_scale")
  names, values = list(sums), tf.stack(list(sums.values()), name="sums")

  # Scale the loss; add up micro-batches locally; one all-reduce per update.
  local = LocalAccumulation(optimizer, micro_batches)
  scaled_loss = tf.multiply(loss, loss_scale, name="scaled_loss")
  grads_and_vars = comm.distributed_optimizer(local).compute_gradients(
    scaled_loss, variables, extra=[values]
  )
  kept_and_sums = comm.allreduce(
    tf.concat([local.kept[None], *local.extra], axis=0), name="kept_and_sums"
  )
  kept, totals = kept_and_sums[0], tf.unstack(kept_and_sums[1:])

  # Unscale. A dropped micro-batch leaves the mean of the others.
  whole = float(micro_batches * comm.size)
  unscale = whole / tf.maximum(kept, 1.0) / loss_scale

  # Finite? Every rank sees the same all-reduced gradients, so all agree.
  squares = [tf.nn.l2_loss(g) for g, _ in grads_and_vars]
  grad_norm = tf.sqrt(2.0 * tf.add_n(squares)) * unscale
  finite = tf.is_finite(grad_norm) & (kept > 0.0)

  # Clip by the norm of the averaged gradient, in the same pass as unscaling.
  clip = tf.minimum(1.0, clip_norm / grad_norm) if clip_norm else 1.0
  factor = unscale * clip

  # Apply or skip.
  optimizer.create_slots(variables)  # here, not inside of the condition

  def apply():
    return local.apply_gradients([(g * factor, v) for g, v in grads_and_vars])

  applied = tf.cond(finite, apply, tf.no_op, name="apply_or_skip").op
  with tf.control_dependencies([applied, local.reset_op]):
    counters = [(tf.train.get_or_create_global_step(), 1)]
    counters += [samples] if samples else []
    update = tf.group(*[v.assign_add(n, read_value=False) for v, n in counters])

  # With every micro-batch dropped the sums are finite: blame this rank's last.
  nonfinite = tf.maximum(first_nonfinite(squares), local.nonfinite)
  return TrainOps(
    accumulate=local.accumulate_op,
    update=update,
    sums=dict(zip(names, totals, strict=True)),
    grad_norm=grad_norm,
    learning_rate=tf.convert_to_tensor(optimizer.learning_rate, tf.float32),
    loss_scale=loss_scale,
    dropped_micro_batches=whole - kept,
    skipped=tf.logical_not(finite),
    nonfinite_variable=nonfinite,
    variables=variables,
  )
