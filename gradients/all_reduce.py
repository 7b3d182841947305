"""Gradients over ranks: their sum by one all-reduce, which all ranks apply.

`AllReduce` is also the face that `optimization.build_train_ops` knows of every
exchange; `exchange.make` chooses one.
"""

import numpy as np

from common.tensorflow_v1 import tf
from gradients import moments
from model import tensor_parallel
from xla_patches import jit


def half_squares(gradients) -> tf.Tensor:
  """float [n]: half the sum of squares of each gradient."""
  return tf.stack([tf.nn.l2_loss(gradient) for gradient in gradients])


class AllReduce(moments.Whole):
  """Every rank gets the sum of all gradients and updates all weights.

  Attributes:
    comm: the `distributed.Comm` over which gradients are summed.
    slices: the `tensor_parallel.Slices` of this rank's model.
  """

  def __init__(self, config, world, scale):
    """`scale`: float scalar Tensor that gradients were multiplied by.

    Args:
      config: a `distributed.AllreduceConfig`.
      world: the `distributed.Comm` of all ranks.
    """
    self._config, self._world, self._scale = config, world, scale
    self.comm = world.data_parallel
    self.slices = tensor_parallel.Slices(world.tensor_parallel)

  def _groups(self, count: int) -> list[np.ndarray]:
    """Indices of `count` gradients by group, backwards as they are computed."""
    groups = min(self._config.allreduce_groups or count, count)
    return np.array_split(np.arange(count)[::-1], groups)

  def compute_gradients(self, local, gradients, sums) -> list:
    """[(gradient, variable), ...], summed over micro-batches and ranks.

    Args:
      local: an `optimization.LocalAccumulation`, which gets the other two.
    """
    over_ranks = self.comm.distributed_optimizer(
      local, self._config.allreduce_groups, self._config.fp16_allreduce
    )
    return over_ranks.compute_gradients(gradients, sums)

  def half_squares(self, pairs) -> tf.Tensor:
    """float [variables]: half the sum of squares of each gradient."""
    variables = tf.trainable_variables()
    squares = half_squares([gradient for gradient, _ in pairs])
    return self.slices.totals(squares, variables)

  def norm(self, tensor, variable):
    return self.slices.norm(tensor, variable)

  @property
  def norm_communicates(self):
    return self.slices.size > 1

  def apply_or_skip(self, optimizer, factor, pairs, finite) -> tuple:
    """Applies the gradients times `factor` where they are `finite`.

    Args:
      optimizer: a `moments.MomentOptimizer`.
      factor: float scalar Tensor.
      pairs: of `compute_gradients`.
      finite: bool scalar Tensor, the same on all ranks.

    Returns:
      The op, and float [variables] trust ratios, 0 if skipped; [0] for an
      optimizer without.
    """
    gradients, variables = zip(*pairs, strict=True)
    optimizer.create_slots(variables)  # here, not inside of the condition

    def apply(factor, *gradients):
      scaled = [gradient * factor for gradient in gradients]
      pairs = list(zip(scaled, variables, strict=True))
      with tf.control_dependencies([optimizer.apply_gradients(pairs, of=self)]):
        rows = [factor[None], *map(_row, optimizer.trust_ratios)]
        return tf.concat(rows, axis=0) if rows[1:] else rows[0]

    ratios, modes = 0, ("layers", "step")
    if optimizer.has_trust_ratios:
      ratios = len(tf.trainable_variables())
      if self.norm_communicates:
        modes = ()
    # A compiled function heeds the condition around it in its arguments only:
    # what tf.identity gives inside of a condition that does not hold is dead.
    applied = tf.cond(
      finite,
      lambda: jit.compiled(apply, modes)(tf.identity(factor), *gradients),
      lambda: tf.pad(factor[None], [[0, ratios]]),
      name="apply_or_skip",
    )
    return applied.op, applied[1:]

  def after_update(self, finite) -> tf.Operation:
    """What else changes with an update, or does not if it was not `finite`."""
    del finite
    return tf.no_op()


def _row(tensor) -> tf.Tensor:
  return tf.reshape(tensor, [-1])
