"""From gradients to new weights: `train_ops`, `build_train_ops` has the order.

google/bert's `create_optimizer` and `AdamWeightDecayOptimizer` work as there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mixed_precision
import modeling
from common.tensorflow_v1 import tf
from config import execution, lr_schedule, optimizers, training_plan
from config.exchange_config import AllreduceConfig
from config.pretraining import RunConfig
from gradients import all_reduce, averages, moments, power_sgd, spikes, zero
from gradients.adamw import AdamWeightDecayOptimizer
from gradients.distributed import Comm
from model import tensor_parallel
from xla_patches import jit

_TINY = 1e-30  # instead of a norm of 0: that gradient changes nothing anyway


def create_optimizer(
  loss, init_lr, num_train_steps, num_warmup_steps, use_tpu=False
):
  """google/bert's training op for one process, for scripts written for it.

  AdamW with warm-up and decay, gradients clipped by global norm 1; it advances
  the global step. Training over ranks needs `build_train_ops`.
  """
  if use_tpu:
    raise ValueError("use_tpu=True: this project trains on GPUs and CPUs")
  global_step = tf.train.get_or_create_global_step()
  step = tf.convert_to_tensor(global_step)
  schedule = lr_schedule.Schedule(init_lr, num_train_steps, num_warmup_steps)
  optimizer = AdamWeightDecayOptimizer(
    learning_rate=schedule(step),
    weight_decay_rate=optimizers.WEIGHT_DECAY_RATE,
    exclude_from_weight_decay=optimizers.EXCLUDE_FROM_WEIGHT_DECAY,
  )
  variables = tf.trainable_variables()
  gradients = tf.gradients(loss, variables)
  gradients, _ = tf.clip_by_global_norm(gradients, clip_norm=1.0)
  applied = optimizer.apply_gradients(zip(gradients, variables, strict=True))
  with tf.control_dependencies([applied]):
    return tf.group(tf.assign(global_step, step + 1))


class LocalSums(NamedTuple):
  """Sums of a rank's micro-batches, before they are summed over ranks."""

  pairs: list  # [(gradient, variable), ...]
  sums: tf.Tensor  # float [names], of what is reported
  # To run for each micro-batch but the last, and after the last.
  accumulate_op: tf.Operation
  reset_op: tf.Operation
  # float scalars: the micro-batches that have an example (where a batch does
  # not divide, some have none), and those of them that were not dropped.
  filled: tf.Tensor
  kept: tf.Tensor
  nonfinite: tf.Tensor  # float [variables], micro-batches dropped by each

  def totals(self, comm, names):
    """Sums over ranks: all in a row; [kept, filled]; nonfinite; by name."""
    parts = [[self.kept, self.filled], self.nonfinite, self.sums]
    row = tf.concat(parts, axis=0)
    reduced = comm.allreduce(row, name="kept_nonfinite_sums")
    sizes = [2, len(self.pairs), self.sums.shape.num_elements()]
    counts, nonfinite, sums = tf.split(reduced, sizes)
    counts, sums = tf.unstack(counts), tf.unstack(sums)
    return reduced, counts, nonfinite, dict(zip(names, sums, strict=True))


def accumulate(
  gradients, sums: dict, micro_batches: int, slices: tensor_parallel.Slices
) -> LocalSums:
  """Adds a micro-batch's gradients and `sums` to those of the ones before.

  So there is one all-reduce for each update. A micro-batch with a gradient that
  is not finite adds nothing and counts as dropped.
  """
  row = tf.stack(list(sums.values()), name="sums")
  if micro_batches > 1:
    # Some sum of an example is above 0, but a loss may be NaN.
    filled = tf.cast(tf.reduce_any(tf.greater(row, 0.0)), tf.float32)
    with tf.variable_scope("accumulation"):
      return _add_to_stored(gradients, filled, row, slices)
  # A single micro-batch is not stored, and none is dropped: each gradient can
  # leave as soon as it is computed.
  nothing = tf.no_op(name="accumulate_nothing")
  one = tf.constant(1.0)
  return LocalSums(
    pairs=list(zip(gradients, tf.trainable_variables(), strict=True)),
    sums=row,
    accumulate_op=nothing,
    reset_op=nothing,
    filled=one,
    kept=one,
    nonfinite=tf.zeros([len(gradients)]),
  )


def _add_to_stored(gradients, filled, row, slices) -> LocalSums:
  """Adds a micro-batch to the stores, if all its gradients are finite."""
  values, stores = [*gradients, filled, row], []
  for i, value in enumerate(values):
    stores.append(all_reduce.local_zeros(f"sum_{i}", value.shape.as_list()))
  # One number a variable: 1 if its gradient is not finite, in any slice.
  is_finite = tf.is_finite(all_reduce.half_squares(gradients))
  bad = slices.agree(1.0 - tf.cast(is_finite, tf.float32))
  counts = tf.concat([bad, filled[None]], axis=0)
  count_store = all_reduce.local_zeros("counts", counts.shape.as_list())
  finite = tf.equal(tf.reduce_sum(bad), 0.0)
  nonfinite, all_filled = tf.split(count_store + counts, [len(gradients), 1])
  all_filled = all_filled[0]
  stored = [tf.convert_to_tensor(store) for store in stores]

  def keep():
    added = []
    for store, value in zip(stores, values, strict=True):
      added.append(store.assign_add(value, read_value=False))
    return tf.group(*added)

  # Not a product with 0 or 1: 0 times infinity is not 0.
  keep_or_drop = tf.cond(finite, keep, tf.no_op, name="keep_or_drop").op
  counted = count_store.assign_add(counts, read_value=False)
  accumulate_op = tf.group(keep_or_drop, counted)
  totals = tf.cond(
    finite,
    lambda: [s + v for s, v in zip(stored, values, strict=True)],
    lambda: [tf.identity(s) for s in stored],
    name="with_this_micro_batch",
  )
  # For the next update, once all has been read.
  with tf.control_dependencies([*totals, nonfinite, all_filled]):
    reset_op = all_reduce.clear([*stores, count_store])
  *gradients, kept, row = totals
  return LocalSums(
    pairs=list(zip(gradients, tf.trainable_variables(), strict=True)),
    sums=row,
    accumulate_op=accumulate_op,
    reset_op=reset_op,
    filled=all_filled,
    kept=kept,
    nonfinite=nonfinite,
  )


class TrainOps(NamedTuple):
  """Run `accumulate` for each micro-batch but the last, then `fetches()`.

  Before, `first_pass` for each micro-batch and `between` once, if they are
  there: then only the first pass reads batches.
  """

  accumulate: tf.Operation
  update: tf.Operation
  sums: dict  # name -> float scalar, summed over the global batch
  grad_norm: tf.Tensor  # of the averaged gradient, before clipping
  learning_rate: tf.Tensor
  loss_scale: tf.Tensor
  dropped_micro_batches: tf.Tensor  # of this update, over all ranks
  skipped: tf.Tensor  # whether the update was skipped
  # float [2]: deviations of norm and loss above recent ones', if it was skipped
  # for that.
  spike: tf.Tensor
  spikes_in_a_row: tf.Tensor  # float, up to this update
  skipped_updates: tf.Tensor  # int64, skipped so far, this one included
  nonfinite_variable: tf.Tensor  # index into `variables`, or -1
  # float [variables], factors of the learning rate, 0 if skipped; [0] of an
  # optimizer that has none.
  trust_ratios: tf.Tensor
  # Communication that did not overlap with the backward pass, and waiting for
  # ranks that end it later (`Comm.seconds_between`). For a rank that begins an
  # update late the others wait in the forward pass, which is not included.
  all_reduce_seconds: tf.Tensor
  variables: list  # the trainable variables
  first_pass: tf.Operation | None = None
  between: tf.Operation | None = None

  def fetches(self) -> dict:
    """`update` and the tensors that have its values, by name."""
    fetches = self._asdict()
    for name in ("accumulate", "variables", "first_pass", "between"):
      del fetches[name]
    return fetches

  def calls(self, micro_batches: int) -> list:
    """What to run for an update, in order."""
    calls = [self.accumulate] * (micro_batches - 1) + [self.fetches()]
    if self.first_pass is None:
      return calls
    return [self.first_pass] * micro_batches + [self.between] + calls


def train_ops(
  config: RunConfig,
  plan: training_plan.TrainingPlan,
  comm: Comm,
  gradients: list,
  sums: dict,
  loss_scale: mixed_precision.LossScale,
  state,
  micro,
  lap=None,
) -> TrainOps:
  """`build_train_ops` with a run's settings; advances `state`.

  state: a `TrainingState`; micro: a `MicroBatch`; lap: the seconds since the
  last update, for --max_train_minutes: the schedule is then as far as the run
  is, by updates or by time.
  """
  step = tf.convert_to_tensor(tf.train.get_or_create_global_step())
  # A batch that does not grow needs no copy to a GPU.
  records = micro.records if plan.stage.ramp else plan.records_per_update
  counters = [(state.records_seen, records)]
  schedule = config.planned_schedule(plan)
  position = step + state.schedule_start
  if lap is not None:
    lap = tf.cast(lap, tf.float64)
    share = (state.seconds + lap) / (60.0 * config.max_train_minutes)
    by_time = tf.cast(tf.minimum(share, 1.0) * schedule.total, tf.float32)
    position = tf.maximum(tf.cast(position, tf.float32), by_time)
    counters.append((state.seconds, lap))
  products = mixed_precision.policy_of(config).feed_forward
  optimizer = config.optimizer.make(schedule(position), products)
  exchange = make_exchange(config.allreduce, comm, loss_scale.value, optimizer)
  ops = build_train_ops(
    gradients,
    sums,
    exchange,
    loss_scale,
    config.optimizer,
    plan.accumulation,
    counters,
    plan.stage.first_update,
  )
  if config.average_updates:
    own = plan.updates - plan.first_update
    most = min(config.eval_every_steps or plan.updates, own)
    average = averages.Averages(config.average_updates, most)
    with tf.control_dependencies([ops.update]):
      applied = tf.logical_not(ops.skipped)
    ops = ops._replace(update=average.update_op(applied))
  return ops


def make_exchange(
  config: AllreduceConfig, world, scale, optimizer
) -> all_reduce.AllReduce:
  """How a graph's gradients go over ranks and become an update."""
  kind = all_reduce.AllReduce
  if config.zero:
    kind = zero.ZeRO
  elif config.powersgd_rank:
    kind = power_sgd.PowerSGD
  return kind(config, world, scale, optimizer)


def build_train_ops(
  gradients: list,
  sums: dict,
  exchange: all_reduce.AllReduce,
  loss_scale: mixed_precision.LossScale,
  config: optimizers.OptimizerConfig,
  micro_batches: int = 1,
  counters: Sequence = (),
  began: int = 0,
) -> TrainOps:
  """The one gradient order, from a micro-batch's gradients to the update.

  `gradients`, times the loss scale, and `sums`, name -> float scalar to report,
  are this micro-batch's; they add up over micro-batches and ranks. Each update
  adds n to each of `counters`, [(variable, n), ...]; the stage follows `began`.
  """
  # Add up micro-batches locally; one exchange between ranks for each update.
  local = accumulate(gradients, sums, micro_batches, exchange.slices)
  pairs = exchange.sum_over_ranks(local)
  reduced, (kept, filled), nonfinite, totals = local.totals(exchange.comm, sums)
  own, summed = (next(zip(*p, strict=True)) for p in (local.pairs, pairs))
  waiting = exchange.comm.seconds_between(own, [*summed, reduced])

  # Unscale. A dropped micro-batch leaves the mean of the others.
  dropped = filled - kept
  unscale = filled / tf.maximum(kept, 1.0) / loss_scale.value

  # Finite, and like those before? All ranks agree, by the same sums.
  verdict = _verdict(exchange, pairs, totals, unscale, kept, config, began)

  # Clip by the norm of the averaged gradient, in the same pass as unscaling.
  factor = unscale * _clip(verdict.norm, config)

  # A skipped update does not wait for its rate, which the count would change.
  applied, ratios = exchange.apply_or_skip(factor, pairs, verdict.applies)
  rate = tf.convert_to_tensor(exchange.optimizer.learning_rate, tf.float32)
  with tf.control_dependencies([applied, local.reset_op, rate]):
    skips, counted = _count(verdict, counters)
    scaled = loss_scale.update_op(verdict.finite, dropped)
    update = tf.group(counted, scaled, exchange.after_update(verdict.applies))
  return TrainOps(
    accumulate=local.accumulate_op,
    update=update,
    trust_ratios=ratios,
    all_reduce_seconds=waiting,
    spike=verdict.spike,
    spikes_in_a_row=verdict.spikes_in_a_row,
    variables=tf.trainable_variables(),
    **_to_host(
      sums=totals,
      grad_norm=verdict.norm,
      learning_rate=rate,
      loss_scale=loss_scale.value,
      dropped_micro_batches=dropped,
      skipped=verdict.skipped,
      skipped_updates=skips,
      nonfinite_variable=_blamed_variable(verdict.squares, nonfinite),
    ),
  )


class Verdict(NamedTuple):
  """Whether a gradient is good, the same on all ranks."""

  squares: tf.Tensor  # float [variables], half of them
  norm: tf.Tensor  # of the averaged gradient
  finite: tf.Tensor
  spike: tf.Tensor  # see `TrainOps`
  spikes_in_a_row: tf.Tensor
  applies: tf.Tensor  # bool, to the weights
  skipped: tf.Tensor  # bool, the opposite
  counted: tf.Operation  # among recent norms and losses


def _verdict(exchange, pairs, sums, unscale, kept, config, began) -> Verdict:
  """Judges an all-reduced gradient; `unscale` makes it an average."""
  squares = exchange.half_squares(pairs)
  # Not tf.add_n: the order in which it adds, and so the norm's last bit, would
  # depend on which of its inputs other ops have finished with.
  norm = tf.sqrt(2.0 * tf.reduce_sum(squares)) * unscale
  finite = tf.is_finite(norm) & (kept > 0.0)
  if not config.spike_deviations:
    with tf.device("/cpu:0"):  # a GPU has nothing to launch for it
      none, row = tf.zeros([2]), tf.constant(0.0)
    bad = tf.logical_not(finite)
    return Verdict(squares, norm, finite, none, row, finite, bad, tf.no_op())
  guard = spikes.SpikeGuard(config.spike_deviations, began)
  loss = exchange.slices.mean(modeling.mean_loss(sums))
  heights = guard.heights(norm, loss)
  is_spike = finite & tf.reduce_any(heights > 0.0)
  heights = tf.where(is_spike, heights, tf.zeros([2]))
  applies = finite & tf.logical_not(is_spike)
  bad = tf.logical_not(applies)
  counted, row = guard.count(norm, loss, is_spike, applies)
  return Verdict(squares, norm, finite, heights, row, applies, bad, counted)


def _clip(grad_norm, config: optimizers.OptimizerConfig):
  """The factor of gradients by their global norm."""
  if config.prenormalize:
    return 1.0 / tf.maximum(grad_norm, _TINY)
  if config.clip_norm:
    return tf.minimum(1.0, config.clip_norm / grad_norm)
  return 1.0


def _count(verdict: Verdict, counters) -> tuple[tf.Tensor, tf.Operation]:
  """How many updates were skipped so far; an op that counts this one."""
  state = moments.state("skipped_updates", dtype=tf.int64)
  skips = tf.convert_to_tensor(state) + tf.cast(verdict.skipped, tf.int64)
  counted = [state.assign(skips, read_value=False), verdict.counted]
  step = tf.train.get_or_create_global_step()
  for variable, number in [(step, 1), *counters]:
    counted.append(variable.assign_add(number, read_value=False))
  return skips, tf.group(*counted)


def _blamed_variable(half_squares, nonfinite) -> tf.Tensor:
  """int64 index of the first variable with a gradient not finite, or -1."""
  # Of the update's sum, or of a micro-batch's that was dropped before.
  goodness = tf.cast(tf.is_finite(half_squares), tf.float32) - nonfinite
  bad = tf.cast(goodness < 1.0, tf.float32)  # GPUs have no int32 tf.argmax
  first = tf.argmax(bad, output_type=tf.int64)
  return tf.where(tf.reduce_max(bad) > 0.0, first, -tf.ones_like(first))


def _to_host(**nested) -> dict:
  """Scalars by name, as they are but in the host's memory."""
  # They leave a GPU together: each copy waits for the device.

  def pack(*scalars):
    # float64 is exact for float32, and for counts below 2^53.
    return tf.stack([tf.cast(scalar, tf.float64) for scalar in scalars])

  scalars = tf.nest.flatten(nested)
  packed = jit.compiled(pack, execution.UPDATE)(*scalars)
  values = []
  with tf.device("/cpu:0"):
    unpacked = tf.unstack(packed, num=len(scalars))
    for value, scalar in zip(unpacked, scalars, strict=True):
      values.append(tf.cast(value, scalar.dtype))
  return tf.nest.pack_sequence_as(nested, values)
