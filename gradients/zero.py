"""ZeRO-1: each rank keeps and updates its share of the optimizer's state.

Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, P_os: gradients are
reduce-scattered, a rank updates its shard of the weights with its shard of the
moments, and the weights are all-gathered. That moves as much as an all-reduce.
"""

from collections.abc import Sequence

import numpy as np

from common.tensorflow_v1 import tf
from gradients import all_reduce, layout, moments, sharded_variables
from model.tensor_parallel import cut_of


class Shard:
  """One rank's share of a group of variables.

  The variables' elements in a row, with zeros up to a multiple of the ranks,
  are cut into equal parts of `size`: rank r's is the r-th. Of `matrices` each
  rank has whole ones, and then zeros; of others, elements wherever it is cut.
  """

  # Which `ZeRO` makes: a local variable, and a Tensor; float [size].
  weights: tf.Variable
  decay: tf.Tensor

  def __init__(self, variables, comm, matrices=False):
    self.variables = list(variables)
    sizes = [v.shape.num_elements() for v in self.variables]
    # All ranks' elements in a row: (index of a variable, how many), and
    # (None, how many) for zeros.
    self._row: list[tuple[int | None, int]] = []
    if matrices:
      owners = np.array(layout.deal(sizes, comm.size))
      loads = np.bincount(owners, sizes, comm.size).astype(int).tolist()
      self.size = max(loads)
      for rank, load in enumerate(loads):
        for index in np.flatnonzero(owners == rank).tolist():
          self._row.append((index, sizes[index]))
        self._row.append((None, self.size - load))
    else:
      self.size = -(-sum(sizes) // comm.size)
      self._row += enumerate(sizes)
      self._row.append((None, comm.size * self.size - sum(sizes)))
    first, last = comm.rank * self.size, (comm.rank + 1) * self.size
    self._pieces, start = [], 0  # (index of a variable, its elements here)
    self._lengths = []  # of this rank's pieces, then of the zeros
    for piece, size in self._row:
      begin, end = max(first - start, 0), min(last - start, size)
      if begin < end and piece is not None:
        self._pieces.append((piece, slice(begin, end)))
        self._lengths.append(end - begin)
      start += size
    self._lengths.append(self.size - sum(self._lengths))
    self._owned = np.array([index for index, _ in self._pieces], np.int32)

  def flat(self, tensors) -> tf.Tensor:
    """float [ranks x size]: whole tensors of the group in a row."""
    rows = []
    for index, size in self._row:
      rows.append(
        tf.zeros([size]) if index is None else tf.reshape(tensors[index], [-1])
      )
    return tf.concat(rows, axis=0)

  def whole(self, flat) -> list[tf.Tensor]:
    """The tensors of the group from [ranks x size], as `flat` made it."""
    rows = tf.split(flat, [size for _, size in self._row])
    whole = {}
    for row, (index, _) in zip(rows, self._row, strict=True):
      if index is not None:
        whole[index] = tf.reshape(row, self.variables[index].shape)
    return [whole[index] for index in range(len(self.variables))]

  def own(self, tensors: Sequence) -> tf.Tensor:
    """float [size]: this rank's part of whole tensors."""
    rows = [tf.reshape(tensors[i], [-1])[piece] for i, piece in self._pieces]
    return self.own_row(rows)

  def own_row(self, rows: list) -> tf.Tensor:
    """float [size]: rows, one for each of this rank's pieces, and zeros."""
    return tf.concat([*rows, tf.zeros([self._lengths[-1]])], axis=0)

  def own_matrices(self, flat) -> list[tuple]:
    """[(matrix, variable), ...] of this rank's matrices in `flat`, [size]."""
    pairs = []
    for row, index in zip(self._own_rows(flat), self._owned, strict=True):
      variable = self.variables[index]
      pairs.append((tf.reshape(row, variable.shape), variable))
    return pairs

  def spread(self, values) -> tf.Tensor:
    """float [size]: for each element its variable's one of `values`, [n]."""
    # tf.repeat would make a mask of [variables, elements of the largest].
    numbers, rows = tf.unstack(values, num=len(self.variables)), []
    for index, length in zip(self._owned, self._lengths[:-1], strict=True):
      rows.append(tf.fill([length], numbers[index]))
    return self.own_row(rows)

  def sums(self, flat) -> tf.Tensor:
    """float [variables]: the sum of each one's elements in `flat`, [size]."""
    totals = [tf.reduce_sum(row) for row in self._own_rows(flat)]
    sums = tf.stack(totals) if totals else tf.zeros([0])
    # A variable without an element in this shard gets 0.
    return tf.scatter_nd(self._owned[:, None], sums, [len(self.variables)])

  def _own_rows(self, flat) -> list[tf.Tensor]:
    return tf.split(flat, self._lengths)[:-1]


class ShardLayout(layout.VariableLayout):
  """A rank holds parts of several variables in a row, a shard's weights.

  `shards` are by the name of their weights; `comm` has the ranks of a shard.
  """

  norm_communicates = True

  def __init__(self, shards: dict[str, Shard], comm, slices):
    super().__init__(slices, comm)
    self._shards = shards

  def norm(self, tensor, variable):
    shard = self._shards[variable.name]
    squares = shard.sums(tf.square(tensor))
    squares = self.comm.allreduce(squares, "zero/norm_squares")
    return tf.sqrt(self.slices.totals(squares, shard.variables))

  def spread(self, values, variable):
    return self._shards[variable.name].spread(values)

  def decay(self, rate_of, variable):
    return self._shards[variable.name].decay

  def by_matrix(self, function, tensors, variables):
    results = []
    for tensor, variable in zip(tensors, variables, strict=True):
      shard = self._shards[variable.name]
      own = self.of_wholes(function, shard.own_matrices(tensor))
      results.append(shard.own_row([tf.reshape(each, [-1]) for each in own]))
    return results


class ZeRO(all_reduce.AllReduce):
  """Each rank gets its part of the sums and updates its part of the weights.

  An optimizer is applied to a shard's weights, the local variable
  zero/weights_N, as to any variable. Its slots are zero/weights_N/SLOT;
  checkpoints have VARIABLE/SLOT instead, whole.
  """

  def __init__(self, config, world, scale, optimizer):
    super().__init__(config, world, scale, optimizer)
    self._variables = tf.trainable_variables()
    groups: list[list[int]] = []  # indices of variables
    matrices: list[int] = []
    for sent_together in self._groups(len(self._variables)):
      # One rule updates all of a shard: its variables have equal slots.
      parts: dict[tuple, list[int]] = {}
      for index in sent_together:
        variable = self._variables[index]
        if optimizer.is_matrix(variable):
          matrices.append(index)
        else:
          slots = tuple(optimizer.slots_of(variable).items())
          parts.setdefault(slots, []).append(index)
      groups += parts.values()
    of_elements = len(groups)
    groups += layout.batches_to_deal(matrices, self.comm.size)
    # Sorts what is in the order of groups by variable.
    self._order = np.argsort(np.concatenate(groups))
    self._shards = {}  # name of the shard's weights -> Shard
    for n, group in enumerate(groups):
      members = [self._variables[i] for i in group]
      shard = Shard(members, self.comm, n >= of_elements)
      shard.weights = all_reduce.local_zeros(f"zero/weights_{n}", [shard.size])
      self._shards[shard.weights.name] = shard
    self.layout = ShardLayout(self._shards, self.comm, self.slices)

  def sum_over_ranks(self, local) -> list:
    """[(this rank's part of a group's sum, the shard's weights), ...]."""
    gradients = {variable.name: gradient for gradient, variable in local.pairs}
    reduced = []
    for n, shard in enumerate(self._shards.values()):
      flat = shard.flat([gradients[v.name] for v in shard.variables])
      name, fp16 = f"zero/gradients_{n}", self._config.fp16_allreduce
      part = self.comm.reducescatter(flat, name, fp16)
      reduced.append((part, shard.weights))
    return reduced

  def half_squares(self, pairs):
    parts = []
    for gradient, weights in pairs:
      parts.append(self._shards[weights.name].sums(0.5 * tf.square(gradient)))
    squares = self.comm.allreduce(tf.concat(parts, axis=0), "zero/half_squares")
    return self.slices.totals(tf.gather(squares, self._order), self._variables)

  def apply_or_skip(self, factor, pairs, finite):
    """Updates the shards; then all ranks get all weights."""
    shards = list(self._shards.values())
    self._create_slots(shards)
    # A shard's weights hold nothing between two updates: the variables do.
    own = [(shard.weights, shard.own(shard.variables)) for shard in shards]
    copied = moments.assign_all(own)
    with tf.control_dependencies(copied):  # all in the condition depends on it
      factor, finite = tf.identity(factor), tf.identity(finite)
    applied, ratios = super().apply_or_skip(factor, pairs, finite)
    # All ranks get what each has updated.
    done = []
    for n, shard in enumerate(shards):
      with tf.control_dependencies([applied]):
        updated = tf.identity(shard.weights)
      every = self.comm.allgather(updated, f"zero/weights_{n}")
      whole = zip(shard.variables, shard.whole(every), strict=True)
      done += moments.assign_all(whole)
    if self.optimizer.has_trust_ratios:
      ratios = tf.gather(ratios, self._order)
    return tf.group(*done), ratios

  def _create_slots(self, shards: list[Shard]) -> None:
    """Makes the shards' slots, and whole ones of each variable of them."""
    created = self.optimizer.create_slots(
      [shard.weights for shard in shards],
      [self.optimizer.slots_of(shard.variables[0]) for shard in shards],
    )
    for shard, slots in zip(shards, created, strict=True):
      names = [moments.variable_name(v) for v in shard.variables]
      rates = [self.optimizer.decay_rate(v) for v in shard.variables]
      cuts = [cut_of(variable) for variable in shard.variables]
      # Not in the condition: XLA would keep them as constants of its program.
      shard.decay = shard.spread(np.array(rates, np.float32))
      # Checkpoints have each variable's slots whole, under google/bert's names.
      for slot, kept in slots.items():
        part = kept.variable
        every = self.comm.allgather(part, f"whole/{part.op.name}")
        tensors = zip(names, shard.whole(every), strict=True)
        by_name = {f"{name}/{slot}": tensor for name, tensor in tensors}
        sharded_variables.add(part, by_name, cuts, shard.own, self._world)
