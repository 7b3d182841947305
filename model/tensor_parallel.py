"""Tensor slicing: ranks that hold one model together, a slice of each layer.

Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3: between
`Slices.copy_to_group` and `reduce_from_group`, attention heads, the inside of
feed-forward layers and the vocabulary are cut over a group's ranks. Each rank
computes all else alike, up to rounding: a GPU may add up in no fixed order, so
ranks may drift apart, and checkpoints have rank 0's values.
"""

from typing import NamedTuple

from common.tensorflow_v1 import tf
from model import kernels

# The graph's collection of `SlicedVariable`s.
SLICED = "sliced_variables"


class SlicedVariable(NamedTuple):
  """A variable of which this rank has a part, cut along `axis` of `shape`."""

  variable: tf.Variable
  shape: list
  axis: int


def cut_of(variable) -> SlicedVariable | None:
  """How a variable is sliced; None if this rank has it whole."""
  for sliced in tf.get_collection(SLICED):
    if sliced.variable.name == variable.name:
      return sliced
  return None


class Slices:
  """Slice `rank` of `size`; the whole model, size 1, communicates nothing."""

  def __init__(self, comm=None):  # the group's `distributed.Comm`
    self._comm = comm
    self.rank: int = comm.rank if comm else 0
    self.size: int = comm.size if comm else 1

  def bounds(self, size: int) -> tuple[int, int]:
    """Begin and end of this rank's part of `size`."""
    return size * self.rank // self.size, size * (self.rank + 1) // self.size

  def get_variable(self, name, shape, initializer, axis=None):
    """This rank's part, cut along `axis`, of a variable of `shape`."""
    if axis is None or self.size == 1:
      return tf.get_variable(name, shape, initializer=initializer)
    begin, end = self.bounds(shape[axis])
    own_shape = [*shape[:axis], end - begin, *shape[axis + 1 :]]

    # A part of the whole initial value, so that T slices start as one rank.
    def own(_, dtype=tf.float32, partition_info=None):
      return self.own(initializer(shape, dtype), axis)

    variable = tf.get_variable(name, own_shape, initializer=own)
    if cut_of(variable) is None:
      tf.add_to_collection(SLICED, SlicedVariable(variable, list(shape), axis))
    return variable

  def own(self, whole: tf.Tensor, axis: int) -> tf.Tensor:
    """This rank's part of a tensor."""
    begin, end = self.bounds(whole.shape.as_list()[axis])
    return tf.gather(whole, tf.range(begin, end), axis=axis)

  def whole(self, part: tf.Tensor, cut: SlicedVariable, name: str) -> tf.Tensor:
    """The whole tensor from each slice's `part`; `name` is Horovod's."""
    # Ranks are gathered along the first axis.
    to_rows = tf.transpose if cut.axis else tf.identity
    rows = cut.shape[cut.axis]
    whole = to_rows(self._comm.allgather(to_rows(part), name, rows))
    whole.set_shape(cut.shape)
    return whole

  def copy_to_group(self, x: tf.Tensor) -> tf.Tensor:
    """x, the same on all slices; its gradient is the sum of theirs."""
    if self.size == 1:
      return x
    return kernels.with_gradient([x], lambda op, dy: self._sum(dy, "enter"))[0]

  def reduce_from_group(self, x: tf.Tensor) -> tf.Tensor:
    """The sum of the slices' x; its gradient is the gradient of each."""
    if self.size == 1:
      return x
    total = self._sum(x, "leave")
    return kernels.with_gradient([total, x], lambda op, dy, _: [None, dy])[0]

  def _sum(self, x, name):
    # Horovod knows no bfloat16.
    wire = tf.float32 if x.dtype == tf.bfloat16 else x.dtype
    total = self._comm.allreduce(tf.cast(x, wire), name=f"slices_{name}")
    return tf.cast(total, x.dtype)

  def totals(self, values: tf.Tensor, variables) -> tf.Tensor:
    """float [variables]: `values`, added up for those that are sliced."""
    if self.size == 1:
      return values
    is_sliced = [cut_of(variable) is not None for variable in variables]
    total = self._comm.allreduce(values, name="slices_totals")
    # The same on all slices to the last bit, for they decide by it.
    return tf.where(is_sliced, total, total / self.size)

  def agree(self, flags: tf.Tensor) -> tf.Tensor:
    """float of `flags`' shape: 1 where any slice has 1, else 0."""
    if self.size == 1:
      return flags
    return tf.minimum(self._comm.allreduce(flags, name="slices_agree"), 1.0)

  def mean(self, value: tf.Tensor) -> tf.Tensor:
    """The mean of what each slice has computed for itself."""
    if self.size == 1:
      return value
    return self._comm.allreduce(value, name="slices_mean") / self.size

  def norm(self, tensor: tf.Tensor, variable) -> tf.Tensor:
    """The norm of the whole of a tensor that is sliced as `variable` is."""
    if self.size == 1 or cut_of(variable) is None:
      return tf.norm(tensor)
    # Norms do not add up over slices; their squares do.
    squares = tf.reduce_sum(tf.square(tensor))
    return tf.sqrt(self._comm.allreduce(squares, name="slices_norm"))

  def stack(self, x: tf.Tensor) -> tf.Tensor:
    """[slices, ...]: all slices' x."""
    return self._comm.allgather(x[tf.newaxis], name="slices_stack")


WHOLE = Slices()
