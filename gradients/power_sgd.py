"""PowerSGD: gradients cross the wire as products of two thin matrices.

Vogels et al. 2019, https://arxiv.org/abs/1905.13727, algorithms 1 and 2: one
step of power iteration from where the last update's ended (warm start). What
it missed is added to the next update's gradient (error feedback).
"""

import zlib
from collections.abc import Sequence

from common.tensorflow_v1 import tf
from gradients import all_reduce, moments, sharded_variables

# Compress a matrix only if its factors are at least this many times smaller.
_LEAST_GAIN = 2
# Variables' names after their weight's, as optimizer slots have them.
ERROR, BASIS = "powersgd_error", "powersgd_basis"


def is_worth(shape: Sequence[int], rank: int) -> bool:
  """Whether a gradient of `shape` is sent as factors of `rank` columns."""
  if len(shape) != 2 or min(shape) < rank:
    return False
  n, m = shape
  return _LEAST_GAIN * (n + m) * rank <= n * m


class PowerSGD(all_reduce.AllReduce):
  """Gradients are summed over ranks at low rank.

  For G_i [n, m], rank i's share of a gradient that is the sum of all shares:

    A_i = G_i + k E_i                  what there is to send
    P   = sum_i A_i orth(Q)            [n, r], one all-reduce
    Q  <- sum_i A_i^T orth(P)          [m, r], another one
    G   = orth(P) Q^T                  what is used
    E_i <- (A_i - G / ranks) / k       what was not sent

  k is the share of the micro-batches that were kept, 1 unless some were
  dropped. The caller divides G by it, so that gradients are the mean of the
  kept ones; errors are those of whole updates already.

  All that is sent and used depends on sum_i A_i only. So neither the number of
  ranks nor the distribution of errors over them changes a result, and a
  checkpoint needs only the errors' sum. orth is Householder's QR, which has r
  columns also for a matrix of lower rank, so with r = m the gradient is exact.

  E_i and Q are the variables NAME/powersgd_error and NAME/powersgd_basis,
  without a loss scale; they change with `after_update`.
  """

  def __init__(self, config, world, scale, optimizer):
    super().__init__(config, world, scale, optimizer)
    self._rank = config.powersgd_rank
    self._kept: tf.Tensor | float = 1.0  # k
    self._sent = []  # (A_i, orth(P), new Q, E_i's variable, Q's variable)

  def sum_over_ranks(self, local):
    pairs = local.pairs
    # A single micro-batch is never dropped: both are one tensor.
    if local.kept is not local.filled:
      counts = tf.stack([local.kept, local.filled])
      kept, filled = tf.unstack(self.comm.allreduce(counts, "powersgd/kept"))
      self._kept = kept / filled
    summed: dict[int, tf.Tensor] = {}
    for number, group in enumerate(self._groups(len(pairs))):
      values = self._sum([pairs[i] for i in group], f"powersgd/{number}")
      summed.update(zip(group, values, strict=True))
    return [(summed[i], variable) for i, (_, variable) in enumerate(pairs)]

  def _sum(self, pairs, name: str) -> list[tf.Tensor]:
    sent, low = [], {}  # A_i, E_i and Q of those at low rank, by index
    for i, (gradient, variable) in enumerate(pairs):
      if is_worth(variable.shape.as_list(), self._rank):
        error, basis = self._state(variable)
        whole = gradient / self._scale + self._kept * error
        low[i] = whole, error, basis
        # P. The paper multiplies by Q, not by orth(Q): then a column that
        # became zero would stay zero.
        gradient = tf.matmul(whole, tf.linalg.qr(basis)[0])
      sent.append(gradient)
    sums = list(self.comm.grouped_allreduce(sent, f"{name}/left"))
    right = []
    for i, (whole, _, _) in low.items():
      sums[i] = tf.linalg.qr(sums[i])[0]
      right.append(tf.matmul(whole, sums[i], transpose_a=True))
    right = self.comm.grouped_allreduce(right, f"{name}/right")
    # The new Q; its product with orth(P) is the gradient that is used.
    for (i, (whole, error, basis)), q in zip(low.items(), right, strict=True):
      left = sums[i]
      self._sent.append((whole, left, q, error, basis))
      sums[i] = tf.matmul(left, q * self._scale, transpose_b=True)
    return sums

  def _state(self, weight) -> tuple[tf.Variable, tf.Variable]:
    """E_i [n, m] and Q [m, rank] of a gradient."""
    name = weight.op.name
    n, m = weight.shape.as_list()
    seed = zlib.crc32(name.encode()) & 0x7FFFFFFF
    random = tf.random_normal_initializer(seed=seed)
    error = moments.optional_state(f"{name}/{ERROR}", [n, m])
    tf.add_to_collection(sharded_variables.SUMMED, error)
    shape = [m, self._rank]
    return error, moments.optional_state(f"{name}/{BASIS}", shape, random)

  def after_update(self, finite):
    share = 1.0 / self.comm.size

    def keep():
      changes = []
      for whole, left, right, error, basis in self._sent:
        used = tf.matmul(left, right * share, transpose_b=True)
        changes += [(error, (whole - used) / self._kept), (basis, right)]
      return tf.group(*moments.assign_all(changes))

    return tf.cond(finite, keep, tf.no_op, name="keep_powersgd_or_not").op
