"""An average of the weights over updates, beside them in variables of its own.

It is a function of the weights alone, which all ranks have after each update,
so it is the same over any number of ranks, however they share an update's work.
"""

from common.tensorflow_v1 import tf
from config import execution
from config.optimizers import AVERAGE
from gradients import moments
from model.tensor_parallel import SLICED, cut_of
from xla_patches import jit

# The graph's collection of its `Averages`, if it has them.
AVERAGES = "averages"
# Of the weights, in the span of an average. Each is a pass over memory, which
# one in every update would make visible.
_SAMPLES = 10


class Averages:
  """The averages of a complete model's weights, NAME/average each, in float32.

  With samples of the weights so far that stand for n updates, the last for k,

    average <- average + k / min(n, span) (weights - average)

  is their mean until `span` updates are over, and from then on an exponential
  average that forgets as fast. A run may resume from a checkpoint without it.
  """

  def __init__(self, span: int, most: int):
    """With a sample for each `most` updates, so that no evaluation lacks it."""
    self._span, self._usual = span, max(1, span // _SAMPLES)
    self._every = min(self._usual, max(1, most))
    # In samples of the usual distance; one after fewer updates counts less.
    self._count = moments.optional_state("averages/samples")
    self._pairs = []
    for weights in tf.trainable_variables():
      name = f"{moments.variable_name(weights)}/{AVERAGE}"
      average = moments.optional_state(name, weights.shape.as_list())
      self._pairs.append((average, weights))
      cut = cut_of(weights)
      if cut:
        tf.add_to_collection(SLICED, cut._replace(variable=average))
    tf.add_to_collection(AVERAGES, self)

  def begin_op(self) -> tf.Operation:
    """Makes averages without a sample the weights; run it on restored ones."""
    is_new = tf.equal(tf.convert_to_tensor(self._count), 0.0)
    return tf.cond(is_new, self._follow, tf.no_op).op

  def update_op(self, applied: tf.Tensor) -> tf.Operation:
    """Samples the weights of an update that was `applied`, if it is due."""
    with tf.control_dependencies([applied]):
      update = tf.convert_to_tensor(tf.train.get_or_create_global_step())
      count = tf.convert_to_tensor(self._count)
    is_due = applied & tf.equal(update % self._every, 0)
    # Until there is a sample the average is the weights.
    is_new = applied & tf.equal(count, 0.0)
    otherwise = lambda: tf.cond(is_new, self._follow, tf.no_op).op
    return tf.cond(is_due, self._sample, otherwise, name="average").op

  def _follow(self) -> tf.Operation:
    return tf.group(*moments.assign_all(self._pairs))

  def _sample(self) -> tf.Operation:
    count = tf.convert_to_tensor(self._count) + self._every / self._usual
    rate = self._every / tf.minimum(count * self._usual, float(self._span))

    def move(rate):
      moved = []
      for average, weights in self._pairs:
        change = rate * (weights - average)
        moved.append(average.assign_add(change, read_value=False))
      with tf.control_dependencies(moved):
        return tf.identity(rate)

    with tf.control_dependencies([jit.compiled(move, execution.UPDATE)(rate)]):
      return self._count.assign(count, read_value=False)


def evaluated_scope(of_average: bool, reuse):
  """The variables' scope of an evaluation, of weights or of their averages."""

  # So no weights are exchanged before an evaluation and given back after it.
  def average_of(getter, name, *arguments, **named):
    return getter(f"{name}/{AVERAGE}", *arguments, **named)

  getter = average_of if of_average else None
  scope = tf.get_variable_scope()
  return tf.variable_scope(scope, reuse=reuse, custom_getter=getter)
