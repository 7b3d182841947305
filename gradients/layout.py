"""How ranks hold what an optimizer updates, and share work on matrices."""

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from common.tensorflow_v1 import tf
from gradients import distributed
from model.tensor_parallel import WHOLE, cut_of

# Of each rank in a batch: with fewer, one that is larger than its rank's share
# would keep the others waiting.
_MATRICES_OF_A_RANK = 4


def deal(sizes: Sequence[int], ranks: int) -> list[int]:
  """The rank that gets each item: the largest first, to who has least."""
  owners = [0] * len(sizes)
  loads = [(0, rank) for rank in range(ranks)]  # a heap
  for index in np.argsort(np.negative(sizes), kind="stable"):
    load, owners[index] = loads[0]
    heapq.heapreplace(loads, (load + sizes[index], owners[index]))
  return owners


def batches_to_deal(matrices: list, ranks: int) -> list[list]:
  """Matrices in order, in batches: a batch is computed while another travels.

  One for a lone rank, which sends none.
  """
  size = len(matrices) if ranks == 1 else _MATRICES_OF_A_RANK * ranks
  starts = range(0, len(matrices), max(1, size))
  return [matrices[start : start + size] for start in starts]


class VariableLayout:
  """How a rank holds a variable: here whole or sliced, in `zero` by shards.

  `comm` has the ranks that hold the same slices, `slices` those of one model.
  """

  def __init__(self, slices=WHOLE, comm=None):
    self.slices, self.comm = slices, comm or distributed.Comm()

  @property
  def norm_communicates(self) -> bool:
    """Whether `norm` runs collectives, which XLA cannot compile."""
    return self.slices.size > 1

  def norm(self, tensor, variable) -> tf.Tensor:
    """The norm of a tensor shaped as `variable`; a shard of n has n norms."""
    return self.slices.norm(tensor, variable)

  def spread(self, values, variable) -> tf.Tensor:
    """Factors of the variable's elements from `values` of `norm`'s shape."""
    return values

  def decay(self, rate_of, variable):
    """The weight decay of its elements; `rate_of`: variable -> float."""
    return rate_of(variable)

  def by_matrix(
    self, function: Callable, tensors: list, variables: list
  ) -> list[tf.Tensor]:
    """`function` of the whole matrices of which a rank has `tensors`.

    It gets and returns a list of matrices. The results are shaped as `tensors`,
    which are shaped as `variables`. One rank computes each matrix.
    """
    pairs = list(zip(tensors, variables, strict=True))
    results = []
    for number, batch in enumerate(batches_to_deal(pairs, self.comm.size)):
      results += self._dealt(function, batch, f"matrices/{number}")
    return results

  def _dealt(self, function, batch, name: str) -> list[tf.Tensor]:
    sizes = [tensor.shape.num_elements() for tensor, _ in batch]
    owners = deal(sizes, self.comm.size)
    order = np.argsort(owners, kind="stable")
    own = [batch[index] for index in order if owners[index] == self.comm.rank]
    results = self.of_wholes(function, own)
    if self.comm.size == 1:
      return results
    rows = [tf.reshape(result, [-1]) for result in results]
    rows.append(tf.zeros([0]))  # a rank may have none
    part = tf.concat(rows, axis=0)
    gathered = self.comm.allgather(part, name, rows=sum(sizes))
    by_rank = tf.split(gathered, [sizes[index] for index in order])
    results = [tf.zeros([0])] * len(batch)
    for row, index in zip(by_rank, order, strict=True):
      results[index] = tf.reshape(row, batch[index][0].shape)
    return results

  def of_wholes(self, function: Callable, pairs: Sequence) -> list[tf.Tensor]:
    """`function` of whole matrices from this slice's [(tensor, variable)]."""
    cuts = [cut_of(variable) for _, variable in pairs]
    wholes = []
    for (tensor, variable), cut in zip(pairs, cuts, strict=True):
      name = f"matrices/{variable.op.name}"
      wholes.append(self.slices.whole(tensor, cut, name) if cut else tensor)
    results = function(wholes)
    for number, cut in enumerate(cuts):
      if cut:
        results[number] = self.slices.own(results[number], cut.axis)
    return results
