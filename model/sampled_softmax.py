"""A softmax over some of the classes, for a loss that costs less.

The vocabulary takes much of a small model's time. Here each right class is
compared with a sample of the others, new in each update, as in Jean et al. 2015
(https://arxiv.org/abs/1412.2007), drawn by priority sampling
(https://arxiv.org/abs/cs/0509026). With terms x_c = exp(logit_c), their sum
over all other classes is estimated without bias; its logarithm, the loss, is
too low by half of the estimate's relative variance.
"""

from typing import NamedTuple

import mixed_precision
from common.tensorflow_v1 import tf
from model import kernels


class Sampling(NamedTuple):
  """How many classes a sample has, and what is random about it."""

  number: int
  uniform: tf.Tensor  # float32 [V], in (0, 1]


def sampling(number: int, classes: int, seed) -> Sampling:
  """`number` of `classes`, by a `seed`, int [2], of the update.

  For outside of XLA's programs, in which a seed has other random numbers.
  """
  return Sampling(number, 1.0 - tf.random.stateless_uniform([classes], seed))


def sample(bias, sampling: Sampling) -> tuple:
  """int32 [number], classes in no order, and float32 [number]: log weights.

  With q_c = exp(bias_c / 2), so that frequent classes are hardly ever left out,
  and u_c = `sampling.uniform`, those with the highest q_c / u_c are taken; with
  t the highest of those that are not, a class stands for max(1, t / q_c).
  """
  # The bias is close to the log of a class's frequency.
  log_q = 0.5 * tf.stop_gradient(tf.convert_to_tensor(bias))
  priority = log_q - tf.math.log(sampling.uniform)
  highest, classes = tf.math.top_k(priority, sampling.number + 1)
  classes, left_out = classes[: sampling.number], highest[sampling.number]
  return classes, tf.maximum(left_out - tf.gather(log_q, classes), 0.0)


class SampledLogits(NamedTuple):
  """In place of `modeling.Logits`: the right class's, and a sample's."""

  hidden: tf.Tensor  # policy.heads [n, H]
  table: tf.Tensor  # float32 [V, H]
  bias: tf.Variable  # float32 [V]
  sampling: Sampling

  def losses_and_correct(self, labels, policy=mixed_precision.FP32):
    """Two float32 [n]: see `kernels.sampled_cross_entropy`."""
    labels = tf.cast(tf.reshape(labels, [-1]), tf.int32)
    classes, log_weights = sample(self.bias, self.sampling)
    # One gather, because its gradient is as large as the table.
    ids = tf.concat([classes, labels], axis=0)
    rows = tf.cast(kernels.gather_rows(self.table, ids), self.hidden.dtype)
    bias = kernels.gather_rows(self.bias, ids)
    number = self.sampling.number
    others = tf.matmul(self.hidden, rows[:number], transpose_b=True)
    own = self._logits(rows[number:], bias[number:], policy.losses)
    weighted = bias[:number] + log_weights
    result = kernels.sampled_cross_entropy(
      others, weighted, own, classes, labels, dtype=policy.losses
    )
    return tf.unstack(result, num=2)

  def at(self, labels):
    """float32 [n]: the logits of n int labels, with the bias."""
    labels = tf.cast(tf.reshape(labels, [-1]), tf.int32)
    rows = kernels.gather_rows(self.table, labels)
    bias = kernels.gather_rows(self.bias, labels)
    return self._logits(rows, bias, tf.float32)

  def _logits(self, rows, bias, dtype):
    """`dtype` [n]: of each row of `hidden` with its row of the table."""
    rows = tf.cast(tf.cast(rows, self.hidden.dtype), dtype)
    products = tf.cast(self.hidden, dtype) * rows
    return tf.reduce_sum(products, axis=1) + tf.cast(bias, dtype)
