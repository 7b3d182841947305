"""Gradients over ranks: their sum by all-reduces, which all ranks apply.

`AllReduce` is the base of the other exchanges, too; `optimization` chooses one.
"""

import collections
import itertools

import numpy as np

from common.tensorflow_v1 import tf
from config import execution
from gradients import layout, moments
from model import tensor_parallel
from xla_patches import jit


def half_squares(gradients) -> tf.Tensor:
  """float [n]: half the sum of squares of each gradient."""
  if jit.saves_launches(execution.UPDATE):
    # One program: `tf.nn.l2_loss` would be launched for each gradient.
    return jit.compiled(_half_squares, execution.UPDATE)(*gradients)
  return tf.stack([tf.nn.l2_loss(gradient) for gradient in gradients])


def _half_squares(*gradients):
  # Vectors of one length are summed by one kernel: most gradients are such.
  groups = collections.defaultdict(list)  # indices of `gradients`
  for index, gradient in enumerate(gradients):
    shape = tuple(gradient.shape.as_list())
    groups[shape if len(shape) == 1 else index].append(index)
  sums = []
  for indices in groups.values():
    squares = tf.square(tf.stack([gradients[index] for index in indices]))
    sums.append(tf.reduce_sum(squares, axis=[*range(1, squares.shape.ndims)]))
  # Back into the order of `gradients`.
  grouped = list(itertools.chain(*groups.values()))
  return 0.5 * tf.gather(tf.concat(sums, axis=0), np.argsort(grouped))


def local_zeros(name: str, shape: list) -> tf.Variable:
  """A float32 variable of this rank that starts at 0 and is never saved."""
  return tf.get_local_variable(
    name, shape, initializer=tf.zeros_initializer(), use_resource=True
  )


def clear(variables: list[tf.Variable]) -> tf.Operation:
  """An op that sets float32 variables to 0."""
  zeros = [(variable, tf.zeros(variable.shape)) for variable in variables]
  return tf.group(*moments.assign_all(zeros))


class AllReduce:
  """Every rank gets the sum of all gradients and updates all weights.

  The exchange between a rank's gradients and an `optimizer`. `world` has all
  ranks; `scale`, a float scalar Tensor, is a factor of gradients. `layout` is
  how a rank holds what its optimizer updates.
  """

  def __init__(self, config, world, scale, optimizer):
    self._config, self._world, self._scale = config, world, scale
    self.optimizer = optimizer
    self.comm = world.data_parallel
    self.slices = tensor_parallel.Slices(world.tensor_parallel)
    self.layout = layout.VariableLayout(self.slices, self.comm)

  def _groups(self, count: int) -> list[np.ndarray]:
    """Indices of `count` gradients by group, backwards as they are computed."""
    groups = min(self._config.allreduce_groups or count, count)
    return np.array_split(np.arange(count)[::-1], groups)

  def sum_over_ranks(self, local) -> list:
    """[(gradient, variable), ...]: the sums of all ranks' `LocalSums`."""
    return self.comm.sum_gradients(
      local.pairs, self._config.allreduce_groups, self._config.fp16_allreduce
    )

  def half_squares(self, pairs) -> tf.Tensor:
    """float [variables]: half the sum of squares of each summed gradient."""
    gradients, variables = zip(*pairs, strict=True)
    return self.slices.totals(half_squares(gradients), variables)

  def apply_or_skip(self, factor, pairs, finite) -> tuple:
    """Applies the `pairs` of `sum_over_ranks`, times `factor`, if `finite`.

    `finite` is the same on all ranks. Returns the op, and trust ratios, float
    [variables], 0 if skipped; [0] for an optimizer that has none.
    """
    optimizer = self.optimizer
    gradients, variables = zip(*pairs, strict=True)
    optimizer.create_slots(variables)  # here, not inside of the condition

    def apply(factor, *gradients):
      scaled = [gradient * factor for gradient in gradients]
      pairs = zip(scaled, variables, strict=True)
      applied = optimizer.apply_gradients(pairs, layout=self.layout)
      with tf.control_dependencies([applied]):
        rows = [factor[None]]
        rows += [tf.reshape(ratio, [-1]) for ratio in optimizer.trust_ratios]
        return tf.concat(rows, axis=0) if len(rows) > 1 else rows[0]

    modes = execution.UPDATE if optimizer.is_one_program(self.layout) else ()
    ratios = 0
    if optimizer.has_trust_ratios:
      ratios = len(tf.trainable_variables())
    # Only its arguments tell a compiled function of the condition around it:
    # where the condition does not hold, tf.identity gives a dead tensor.
    applied = tf.cond(
      finite,
      lambda: jit.compiled(apply, modes)(tf.identity(factor), *gradients),
      lambda: tf.pad(factor[None], [[0, ratios]]),
      name="apply_or_skip",
    )
    return applied.op, applied[1:]

  def after_update(self, finite) -> tf.Operation:
    """What else changes with an update that is `finite`."""
    return tf.no_op()
