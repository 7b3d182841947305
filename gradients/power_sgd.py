"""PowerSGD: gradients cross the wire as products of two thin matrices.

Vogels et al. 2019, https://arxiv.org/abs/1905.13727, algorithms 1 and 2: one
step of power iteration from where the last update's ended (warm start), and
what it did not catch is added to the next update's gradient (error feedback).
"""

import zlib
from collections.abc import Sequence

from common.tensorflow_v1 import tf
from gradients import all_reduce

# Compress a matrix only if its factors are at least this many times smaller.
_LEAST_GAIN = 2
# Variables' names after their weight's, as optimizer slots have them.
ERROR, BASIS = "powersgd_error", "powersgd_basis"
# The graph's collection of the errors. Their sum over ranks is what counts.
ERRORS = "powersgd_errors"


def is_worth(shape: Sequence[int], rank: int) -> bool:
  """Whether a gradient of `shape` is sent as factors of `rank` columns.

  Matrices are of which the factors have at most half as many numbers; vectors
  and small matrices go as they are.
  """
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
  dropped. The caller divides what is used by it, so that gradients stay the
  mean of the kept ones; errors are of whole updates already.

  All that is sent and used depends on sum_i A_i only. So neither the number of
  ranks nor how errors are spread over them changes a result, and the errors'
  sum is all of them that a checkpoint needs. orth is Householder's QR, which
  has as many columns for a matrix of lower rank, so with r = m the gradient is
  exact. (The paper does without orth(Q): a column that became zero would
  stay so.)

  E_i and Q are the variables NAME/powersgd_error and NAME/powersgd_basis, of
  gradients without a loss scale; they change with `after_update`.
  """

  def __init__(self, config, world, scale):
    super().__init__(config, world, scale)
    self._rank = config.powersgd_rank
    self._kept: tf.Tensor | float = 1.0  # k
    self._sent = []  # (A_i, orth(P), new Q, E_i's variable, Q's variable)

  def compute_gradients(self, local, gradients, sums):
    pairs = local.compute_gradients(gradients, sums)
    if local.micro_batches > 1:  # else there is none to be dropped
      kept, filled = tf.unstack(
        self.comm.allreduce(
          tf.stack([local.kept, local.filled]), "powersgd/kept"
        )
      )
      self._kept = kept / filled
    summed = {}
    for number, group in enumerate(self._groups(len(pairs))):
      own = [pairs[i] for i in group]
      values = self._sum(own, f"powersgd/{number}")
      summed.update(zip(group, values, strict=True))
    return [(summed[i], variable) for i, (_, variable) in enumerate(pairs)]

  def _sum(self, pairs, name: str) -> list[tf.Tensor]:
    """The sums of a group of gradients."""
    is_low = [is_worth(v.shape.as_list(), self._rank) for _, v in pairs]
    states = [
      self._state(v) if low else None
      for (_, v), low in zip(pairs, is_low, strict=True)
    ]
    whole = [
      gradient / self._scale + self._kept * state[0] if state else gradient
      for (gradient, _), state in zip(pairs, states, strict=True)
    ]
    left = self.comm.grouped_allreduce(
      [
        tf.matmul(a, _orthonormal(state[1])) if state else a
        for a, state in zip(whole, states, strict=True)
      ],
      f"{name}/left",
    )
    left = [
      _orthonormal(p) if state else p
      for p, state in zip(left, states, strict=True)
    ]
    low = [i for i, state in enumerate(states) if state]
    right = self.comm.grouped_allreduce(
      [tf.matmul(whole[i], left[i], transpose_a=True) for i in low],
      f"{name}/right",
    )
    sums = left
    for i, q in zip(low, right, strict=True):
      self._sent.append((whole[i], left[i], q, *states[i]))
      sums[i] = tf.matmul(left[i], q * self._scale, transpose_b=True)
    return sums

  def _state(self, variable) -> tuple[tf.Variable, tf.Variable]:
    """E_i [n, m] and Q [m, rank] of a gradient."""
    name = variable.op.name
    n, m = variable.shape.as_list()

    def make(suffix, shape, initializer):
      return tf.get_variable(
        f"{name}/{suffix}",
        shape=shape,
        dtype=tf.float32,
        trainable=False,
        initializer=initializer,
        use_resource=True,
      )

    error = make(ERROR, [n, m], tf.zeros_initializer())
    tf.add_to_collection(ERRORS, error)
    seed = zlib.crc32(name.encode()) & 0x7FFFFFFF
    start = tf.random_normal_initializer(seed=seed)
    return error, make(BASIS, [m, self._rank], start)

  def after_update(self, finite):
    """Keeps this update's errors and bases, if it was `finite`."""
    share = 1.0 / self.comm.size

    def keep():
      changes = []
      for whole, left, right, error, basis in self._sent:
        used = tf.matmul(left, right * share, transpose_b=True)
        changes += [
          error.assign((whole - used) / self._kept, read_value=False),
          basis.assign(right, read_value=False),
        ]
      return tf.group(*changes)

    return tf.cond(finite, keep, tf.no_op, name="keep_powersgd_or_not").op


def _orthonormal(matrix: tf.Tensor) -> tf.Tensor:
  """float32 [n, r], n >= r: an orthonormal basis of the columns' span."""
  return tf.linalg.qr(matrix)[0]


def broadcast_op(variables, comm) -> tf.Operation:
  """Gives all ranks rank 0's values of `variables`, which may be errors.

  Rank 0 then has the sum of all errors, and the others none.
  """
  errors = [] if comm.is_root else tf.get_collection(ERRORS)
  with tf.control_dependencies([comm.broadcast_op(variables)]):
    return tf.group(*[_clear(e) for e in errors], tf.no_op())


def add_up(errors, comm) -> list[tf.Operation]:
  """Ops that give rank 0 the sum of all ranks' `errors`, and others none.

  So that rank 0 saves all of them, and goes on as one that resumes would.
  Run all that is returned: TensorFlow leaves out a sum that nothing reads.
  """
  done, ran = [], []
  if comm.size > 1:
    for error in errors:  # one after another, for the sake of memory
      with tf.control_dependencies(done):
        own = tf.convert_to_tensor(error)
      total = comm.allreduce(own, f"sum_of/{error.op.name}")
      with tf.control_dependencies([total]):
        done = [
          error.assign(total, read_value=False)
          if comm.is_root
          else _clear(error)
        ]
      ran += [total.op, *done]
  return ran


def _clear(variable) -> tf.Operation:
  return variable.assign(tf.zeros(variable.shape), read_value=False)
