"""From gradients to new weights: `train_ops`, `build_train_ops` has the order.

google/bert's `create_optimizer` and `AdamWeightDecayOptimizer` work as there.
"""

from typing import NamedTuple

import mixed_precision
from common.tensorflow_v1 import tf
from config import execution, lr_schedule
from config.optimizers import EXCLUDE_FROM_WEIGHT_DECAY, WEIGHT_DECAY_RATE
from gradients import all_reduce, moments, power_sgd, zero
from gradients.adamw import AdamWeightDecayOptimizer
from model import tensor_parallel
from xla_patches import jit

_TINY = 1e-30  # instead of a norm of 0: that gradient changes nothing anyway


def create_optimizer(
  loss, init_lr, num_train_steps, num_warmup_steps, use_tpu=False
):
  """google/bert's training op for one process, for scripts written for it.

  AdamW with warm-up and decay, gradients clipped by global norm 1; it advances
  the global step. Training over ranks needs `build_train_ops`. ValueError if
  `use_tpu`.
  """
  if use_tpu:
    raise ValueError("use_tpu=True: this project trains on GPUs and CPUs")
  global_step = tf.train.get_or_create_global_step()
  step = tf.convert_to_tensor(global_step)
  schedule = lr_schedule.Schedule(init_lr, num_train_steps, num_warmup_steps)
  optimizer = AdamWeightDecayOptimizer(
    learning_rate=schedule(step),
    weight_decay_rate=WEIGHT_DECAY_RATE,
    exclude_from_weight_decay=EXCLUDE_FROM_WEIGHT_DECAY,
  )
  variables = tf.trainable_variables()
  gradients = tf.gradients(loss, variables)
  gradients, _ = tf.clip_by_global_norm(gradients, clip_norm=1.0)
  applied = optimizer.apply_gradients(zip(gradients, variables, strict=True))
  with tf.control_dependencies([applied]):
    return tf.group(tf.assign(global_step, step + 1))


class LocalAccumulation(tf.train.Optimizer):
  """Sums the gradients of a rank's micro-batches before they are all-reduced.

  An optimizer that sums over ranks wraps it: `compute_gradients` adds those
  that earlier runs of `accumulate_op` stored, so there is one all-reduce per
  update. A micro-batch with a gradient that is not finite adds nothing and
  counts as dropped. A single micro-batch per update is not stored, and each
  gradient can leave as soon as it is computed.

  Attributes, which `compute_gradients` sets:
    gradients, sums: of all micro-batches up to this one.
    accumulate_op, reset_op: to run for each but the last, and after the last.
    filled: float scalar, the micro-batches that have an example; where a batch
      does not divide, some have none.
    kept: float scalar, those of them that were not dropped.
    nonfinite: float [variables], the micro-batches dropped because of each.
  """

  def __init__(self, micro_batches: int, slices: tensor_parallel.Slices):
    super().__init__(use_locking=False, name="LocalAccumulation")
    self.micro_batches, self._slices = micro_batches, slices

  def compute_gradients(self, gradients, sums: dict):
    """[(gradient, variable), ...]; adds up `sums`, float scalars, too."""
    variables, self._names = tf.trainable_variables(), list(sums)
    sums = tf.stack(list(sums.values()), name="sums")
    self.gradients = gradients
    if self.micro_batches == 1:
      self.accumulate_op = self.reset_op = tf.no_op(name="accumulate_nothing")
      self.kept = self.filled = tf.constant(1.0)
      self.sums = sums
      self.nonfinite = tf.zeros([len(gradients)])
    else:
      filled = tf.cast(tf.reduce_any(tf.not_equal(sums, 0.0)), tf.float32)
      with tf.variable_scope("accumulation"):
        added = self._add(gradients, filled, sums)
      *self.gradients, self.kept, self.sums = added
    return list(zip(self.gradients, variables, strict=True))

  def totals(self, comm):
    """Sums over ranks: all in a row; [kept, filled]; nonfinite; `sums`."""
    parts = [[self.kept, self.filled], self.nonfinite, self.sums]
    row = tf.concat(parts, axis=0)
    reduced = comm.allreduce(row, name="kept_nonfinite_sums")
    sizes = [2, len(self.gradients), self.sums.shape.num_elements()]
    counts, nonfinite, sums = tf.split(reduced, sizes)
    counts, sums = tf.unstack(counts), tf.unstack(sums)
    by_name = dict(zip(self._names, sums, strict=True))
    return reduced, counts, nonfinite, by_name

  def _add(self, gradients, filled, sums):
    """The stored gradients, kept and sums, plus these if all are finite."""
    values, stores = [*gradients, filled, sums], []
    for i, value in enumerate(values):
      shape = value.shape.as_list()
      stores.append(all_reduce.local_zeros(f"sum_{i}", shape))
    # One number a variable: 1 if its gradient is not finite, in any slice.
    is_finite = tf.is_finite(all_reduce.half_squares(gradients))
    bad = self._slices.agree(1.0 - tf.cast(is_finite, tf.float32))
    counts = tf.concat([bad, filled[None]], axis=0)
    count_store = all_reduce.local_zeros("counts", counts.shape.as_list())
    finite = tf.equal(tf.reduce_sum(bad), 0.0)
    self.nonfinite, filled = tf.split(count_store + counts, [len(gradients), 1])
    self.filled = filled[0]
    # Not a product with 0 or 1: 0 times infinity is not 0.
    stored = [tf.convert_to_tensor(s) for s in stores]
    pairs = list(zip(stores, values, strict=True))
    keep_or_drop = tf.cond(
      finite,
      lambda: tf.group(*[s.assign_add(v, read_value=False) for s, v in pairs]),
      tf.no_op,
      name="keep_or_drop",
    ).op
    counted = count_store.assign_add(counts, read_value=False)
    self.accumulate_op = tf.group(keep_or_drop, counted)
    sums = tf.cond(
      finite,
      lambda: [s + v for s, v in zip(stored, values, strict=True)],
      lambda: [tf.identity(s) for s in stored],
      name="with_this_micro_batch",
    )
    # For the next update, once all has been read.
    with tf.control_dependencies([*sums, self.nonfinite, self.filled]):
      self.reset_op = all_reduce.clear([*stores, count_store])
    return sums


class TrainOps(NamedTuple):
  """Run `accumulate` for each micro-batch but the last, then `fetches()`."""

  accumulate: tf.Operation
  update: tf.Operation
  sums: dict  # name -> float scalar, summed over the global batch
  grad_norm: tf.Tensor  # of the averaged gradient, before clipping
  learning_rate: tf.Tensor
  loss_scale: tf.Tensor
  dropped_micro_batches: tf.Tensor  # of this update, over all ranks
  skipped: tf.Tensor  # whether the update was skipped
  skipped_updates: tf.Tensor  # int64, skipped so far, this one included
  nonfinite_variable: tf.Tensor  # index into `variables`, or -1
  # float [variables], LAMB's factors of the learning rate, 0 if skipped; [0]
  # for other optimizers.
  trust_ratios: tf.Tensor
  # Communication that did not overlap with the backward pass, and waiting for
  # ranks that end it later (`Comm.seconds_between`). For a rank that begins an
  # update late the others wait in the forward pass, which is not included.
  all_reduce_seconds: tf.Tensor
  variables: list  # the trainable variables

  def fetches(self) -> dict:
    """`update` and the tensors that have its values, by name."""
    fetches = self._asdict()
    del fetches["accumulate"], fetches["variables"]
    return fetches


def _to_host(**nested) -> dict:
  """Scalars, which leave a GPU together: each copy waits for the device."""
  scalars = tf.nest.flatten(nested)
  packed = jit.compiled(_packed, execution.UPDATE)(*scalars)
  values = []
  with tf.device("/cpu:0"):
    unpacked = tf.unstack(packed, num=len(scalars))
    for value, scalar in zip(unpacked, scalars, strict=True):
      values.append(tf.cast(value, scalar.dtype))
  return tf.nest.pack_sequence_as(nested, values)


def _packed(*scalars):
  """float64 [n], which is exact for float32 and for counts below 2^53."""
  return tf.stack([tf.cast(scalar, tf.float64) for scalar in scalars])


def make_exchange(config, world, scale) -> all_reduce.AllReduce:
  """How a graph's gradients go over ranks, by an `AllreduceConfig`."""
  if config.zero:
    return zero.ZeRO(config, world, scale)
  if config.powersgd_rank:
    return power_sgd.PowerSGD(config, world, scale)
  return all_reduce.AllReduce(config, world, scale)


def train_ops(
  config, gradients, sums: dict, loss_scale, state, plan, micro, comm, lap=None
) -> TrainOps:
  """`build_train_ops` with a run's settings; it advances `state`.

  config: a `RunConfig`; state: a `TrainingState`; plan: a `TrainingPlan`;
  micro: a `MicroBatch`.
  `lap`, the seconds since the last update, is for --max_train_minutes: the
  schedule is then as far as the run is, by updates or by time.
  """
  schedule = config.planned_schedule(plan)
  step = tf.convert_to_tensor(tf.train.get_or_create_global_step())
  # A batch that does not grow needs no copy to a GPU.
  records = micro.records if plan.stage.ramp else plan.records_per_update
  counters = [(state.records_seen, records)]
  position = step + state.schedule_start
  if lap is not None:
    lap = tf.cast(lap, tf.float64)
    share = (state.seconds + lap) / (60.0 * config.max_train_minutes)
    by_time = tf.cast(tf.minimum(share, 1.0) * schedule.total, tf.float32)
    position = tf.maximum(tf.cast(position, tf.float32), by_time)
    counters.append((state.seconds, lap))
  return build_train_ops(
    gradients,
    sums,
    config.optimizer.make(schedule(position)),
    make_exchange(config.allreduce, comm, loss_scale.value),
    plan.accumulation,
    loss_scale,
    clip_norm=config.optimizer.clip_norm,
    prenormalize=config.optimizer.prenormalize,
    counters=counters,
  )


def _norm(half_squares) -> tf.Tensor:
  """The global norm of gradients, from `half_squares` of each."""
  # Not tf.add_n: the order in which it adds, and so the norm's last bit, would
  # depend on which of its inputs other ops have finished with.
  return tf.sqrt(2.0 * tf.reduce_sum(half_squares))


def _clip(grad_norm, clip_norm: float, prenormalize: bool):
  if prenormalize:
    return 1.0 / tf.maximum(grad_norm, _TINY)
  return tf.minimum(1.0, clip_norm / grad_norm) if clip_norm else 1.0


def _advance(
  done: list, finite, dropped, counters, loss_scale, exchange
) -> tuple[tf.Operation, tf.Tensor, tf.Tensor]:
  """The end of an update whose ops are `done`: counts it, and moves the scale.

  Returns an op; whether the update was skipped, and how many were so far.
  """
  skipped = tf.logical_not(finite)
  skips = moments.state("skipped_updates", dtype=tf.int64)
  skipped_updates = tf.convert_to_tensor(skips) + tf.cast(skipped, tf.int64)
  with tf.control_dependencies(done):
    counted = []
    step = tf.train.get_or_create_global_step()
    for variable, number in [(step, 1), *counters]:
      counted.append(variable.assign_add(number, read_value=False))
    update = tf.group(
      *counted,
      skips.assign(skipped_updates, read_value=False),
      loss_scale.update_op(finite, dropped),
      exchange.after_update(finite),
    )
  return update, skipped, skipped_updates


def _blamed_variable(half_squares, nonfinite) -> tf.Tensor:
  """int64 index of the first one whose gradient was not finite, or -1.

  That is one of the update's sum, or a micro-batch's that was dropped before.
  """
  goodness = tf.cast(tf.is_finite(half_squares), tf.float32) - nonfinite
  bad = tf.cast(goodness < 1.0, tf.float32)  # GPUs have no int32 tf.argmax
  first = tf.argmax(bad, output_type=tf.int64)
  return tf.where(tf.reduce_max(bad) > 0.0, first, -tf.ones_like(first))


def build_train_ops(
  gradients: list,
  sums: dict,
  optimizer: moments.MomentOptimizer,
  exchange: all_reduce.AllReduce,
  micro_batches: int,
  loss_scale: mixed_precision.LossScale,
  clip_norm: float = 1.0,
  prenormalize: bool = False,
  counters: tuple = (),
) -> TrainOps:
  """The one gradient order, from a micro-batch's gradients to the update.

  `gradients` are those of this micro-batch's share of the loss, times the loss
  scale. Shares add up over micro-batches and ranks, and so do gradients and the
  `sums` to report, name -> float scalar. `clip_norm` is the highest global norm
  of the averaged gradient, 0 no limit; `prenormalize` divides by the norm
  instead (NVLAMB). Each update advances `counters`, [(variable, n), ...], by n.
  """
  # Add up micro-batches locally; one exchange between ranks for each update.
  local = LocalAccumulation(micro_batches, exchange.slices)
  pairs = exchange.compute_gradients(local, gradients, sums)
  reduced, (kept, filled), nonfinite, totals = local.totals(exchange.comm)
  summed, _ = zip(*pairs, strict=True)
  waiting = exchange.comm.seconds_between(local.gradients, [*summed, reduced])

  # Unscale. A dropped micro-batch leaves the mean of the others.
  dropped = filled - kept
  unscale = filled / tf.maximum(kept, 1.0) / loss_scale.value

  # Finite? Every rank sees the same all-reduced gradients, so all agree.
  squares = exchange.half_squares(pairs)
  grad_norm = _norm(squares) * unscale
  finite = tf.is_finite(grad_norm) & (kept > 0.0)

  # Clip by the norm of the averaged gradient, in the same pass as unscaling.
  factor = unscale * _clip(grad_norm, clip_norm, prenormalize)

  # Apply or skip.
  applied, ratios = exchange.apply_or_skip(optimizer, factor, pairs, finite)
  update, skipped, skipped_updates = _advance(
    [applied, local.reset_op], finite, dropped, counters, loss_scale, exchange
  )
  return TrainOps(
    accumulate=local.accumulate_op,
    update=update,
    trust_ratios=ratios,
    all_reduce_seconds=waiting,
    variables=tf.trainable_variables(),
    **_to_host(
      sums=totals,
      grad_norm=grad_norm,
      learning_rate=tf.convert_to_tensor(optimizer.learning_rate, tf.float32),
      loss_scale=loss_scale.value,
      dropped_micro_batches=dropped,
      skipped=skipped,
      skipped_updates=skipped_updates,
      nonfinite_variable=_blamed_variable(squares, nonfinite),
    ),
  )
