"""Updates whose gradient's norm or loss is far above those of recent ones."""

from common.tensorflow_v1 import tf
from gradients import moments

# Updates of which mean and deviation are known; the first ones are not judged.
_RECENT = 100
# Of a logarithm: values that hardly vary would make each a spike.
_LEAST_DEVIATION = 0.05
_TINY = 1e-30  # instead of 0


class SpikeGuard:
  """Compares norm and loss with recent ones', all by their logarithms.

  Means and variances are in checkpoints, and the same on all ranks, as norm and
  loss are. Updates that were skipped do not count. A stage has statistics of
  its own, because other batches have other norms.
  """

  def __init__(self, deviations: float, began: int = 0):
    """`deviations` above a mean make a spike, in the stage after `began`."""
    self._limit = deviations
    step = tf.convert_to_tensor(tf.train.get_or_create_global_step())
    begins = tf.equal(step, began)
    self._norms = _Recent("recent", begins)
    self._losses = _Recent("recent_losses", begins)
    self._row = moments.optional_state("spike_guard/in_a_row")
    self._row_before = _of_stage(self._row, begins)

  def heights(self, norm, loss) -> tf.Tensor:
    """float [2]: deviations of a spike's norm and loss above the means.

    0 stands for what is no spike, and for what is not a number.
    """
    heights = tf.stack([self._norms.height(norm), self._losses.height(loss)])
    return tf.where(heights > self._limit, heights, tf.zeros([2]))

  def count(self, norm, loss, spike, applied) -> tuple[tf.Operation, tf.Tensor]:
    """Counts an update, if it was `applied`; spikes in a row, float.

    spike: bool, whether its norm or its loss is one. Updates that are not
    finite count in a row that a spike has begun: they change no weights either.
    """
    row = self._row_before
    row = tf.where(spike | (row > 0.0), row + 1.0, row)
    row = tf.where(applied, tf.zeros_like(row), row)
    counted = [
      self._norms.with_value(norm, applied),
      self._losses.with_value(loss, applied),
      (self._row, row),
    ]
    return tf.group(*moments.assign_all(counted)), row


class _Recent:
  """Mean and variance of a value's logarithm over recent updates."""

  def __init__(self, name: str, begins: tf.Tensor):
    self._state = moments.optional_state(f"spike_guard/{name}", [3])
    self._before = _of_stage(self._state, begins)
    self._mean, self._variance, self._count = tf.unstack(self._before)

  def height(self, value: tf.Tensor) -> tf.Tensor:
    """How many deviations `value` is above the mean; 0 if few are known."""
    deviation = tf.maximum(tf.sqrt(self._variance), _LEAST_DEVIATION)
    height = (_log(value) - self._mean) / deviation
    return tf.where(self._count >= _RECENT, height, tf.zeros_like(height))

  def with_value(self, value, applied) -> tuple[tf.Variable, tf.Tensor]:
    """The state, and what it becomes: the same if `value` does not count."""
    count = tf.minimum(self._count + 1.0, float(_RECENT))
    change = _log(value) - self._mean
    mean = self._mean + change / count
    variance = (1.0 - 1.0 / count) * (self._variance + change**2 / count)
    after = tf.stack([mean, variance, count])
    # 0 has no logarithm: an update of examples that teach nothing.
    is_known = tf.is_finite(value) & (value > 0.0)
    return self._state, tf.where(applied & is_known, after, self._before)


def _of_stage(state: tf.Variable, begins: tf.Tensor) -> tf.Tensor:
  """The state before an update; 0 where a stage `begins` with it."""
  before = tf.convert_to_tensor(state)
  return tf.where(begins, tf.zeros_like(before), before)


def _log(value) -> tf.Tensor:
  return tf.math.log(tf.maximum(value, _TINY))
