"""Gradients whose norm is far above that of recent updates."""

from common.tensorflow_v1 import OPTIONAL_VARIABLES, tf
from gradients import moments

# Updates of which mean and deviation are known; the first ones are not judged.
_RECENT = 100
# Of log(norm): norms that hardly vary would make each a spike.
_LEAST_DEVIATION = 0.05
_TINY = 1e-30  # instead of a norm of 0


class SpikeGuard:
  """Judges a norm by mean and variance of log(norm) over recent updates.

  They are in checkpoints, and the same on all ranks, as the norm is. Updates
  that were skipped do not count. A stage has statistics of its own, because
  other batches have other norms; `began` is the update before its first one.
  """

  def __init__(self, deviations: float, began: int = 0):
    """`deviations` above the mean make a spike."""
    self._limit = deviations
    self._recent = moments.state("spike_guard/recent", [3])
    self._row = moments.state("spike_guard/in_a_row")
    for variable in (self._recent, self._row):
      tf.add_to_collection(OPTIONAL_VARIABLES, variable)
    step = tf.convert_to_tensor(tf.train.get_or_create_global_step())
    state = tf.convert_to_tensor(self._recent)
    state = tf.where(tf.equal(step, began), tf.zeros([3]), state)
    self._mean, self._variance, self._count = tf.unstack(state)

  def height(self, norm: tf.Tensor) -> tf.Tensor:
    """How many deviations a spike's norm is above the mean; 0 for no spike."""
    deviation = tf.maximum(tf.sqrt(self._variance), _LEAST_DEVIATION)
    height = (_log(norm) - self._mean) / deviation
    is_spike = (self._count >= _RECENT) & (height > self._limit)
    return tf.where(is_spike, height, tf.zeros_like(height))

  def count(self, norm, height, applied) -> tuple[tf.Operation, tf.Tensor]:
    """Counts an update's norm, if it was `applied`; spikes in a row, float."""
    row = tf.convert_to_tensor(self._row)
    row = tf.where(height > 0.0, row + 1.0, row)
    row = tf.where(applied, tf.zeros_like(row), row)
    count = tf.minimum(self._count + 1.0, float(_RECENT))
    change = _log(norm) - self._mean
    mean = self._mean + change / count
    variance = (1.0 - 1.0 / count) * (self._variance + change**2 / count)
    old = tf.stack([self._mean, self._variance, self._count])
    new = tf.stack([mean, variance, count])
    new = tf.where(applied, new, old)
    counted = [(self._recent, new), (self._row, row)]
    return tf.group(*moments.assign_all(counted)), row


def _log(norm) -> tf.Tensor:
  return tf.math.log(tf.maximum(norm, _TINY))
