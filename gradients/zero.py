"""ZeRO-1: each rank keeps and updates its share of the optimizer's state.

Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, P_os: gradients are
reduce-scattered, a rank updates its shard of the weights with its shard of the
moments, and the weights are all-gathered. That moves as much as an all-reduce.
Checkpoints hold the moments whole, under the names that they always have.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.tensorflow_v1 import tf
from gradients import all_reduce, moments, sharded_variables
from model.tensor_parallel import Slices, cut_of


class Piece(NamedTuple):
  """The part of a variable that is in a shard: elements begin to end of it."""

  variable: int  # its index in the group
  begin: int
  end: int


class Shard:
  """One rank's share of a group of variables.

  The variables' elements, one variable after another and zeros up to a multiple
  of the ranks, are cut into equal parts: rank r's is the r-th.

  Attributes:
    variables: those of the group.
    size: of each rank's part.
    pieces: list of `Piece`, what of this rank's part is in variables.
    padding: zeros at the end of this rank's part.
  """

  def __init__(self, variables, comm):
    self.variables = list(variables)
    self._sizes = [v.shape.num_elements() for v in self.variables]
    self._ranks = comm.size
    total = sum(self._sizes)
    self.size = -(-total // comm.size)
    first, last = comm.rank * self.size, (comm.rank + 1) * self.size
    self.pieces, start = [], 0
    for index, size in enumerate(self._sizes):
      begin, end = max(first - start, 0), min(last - start, size)
      if begin < end:
        self.pieces.append(Piece(index, begin, end))
      start += size
    self._owned = np.array([p.variable for p in self.pieces], np.int32)
    self._lengths = [p.end - p.begin for p in self.pieces]
    self.padding = self.size - sum(self._lengths)

  def flat(self, tensors) -> tf.Tensor:
    """float [ranks x size]: whole tensors of the group in a row."""
    rows = [tf.reshape(t, [-1]) for t in tensors]
    padding = self._ranks * self.size - sum(self._sizes)
    return tf.concat([*rows, tf.zeros([padding], rows[0].dtype)], axis=0)

  def whole(self, flat) -> list[tf.Tensor]:
    """The tensors of the group from [ranks x size], as `flat` made it."""
    padding = self._ranks * self.size - sum(self._sizes)
    rows = tf.split(flat, [*self._sizes, padding])[:-1]
    return [
      tf.reshape(row, v.shape)
      for row, v in zip(rows, self.variables, strict=True)
    ]

  def own(self, tensors: Sequence) -> tf.Tensor:
    """float [size]: this rank's part of whole tensors of the group."""
    rows = [
      tf.reshape(tensors[p.variable], [-1])[p.begin : p.end]
      for p in self.pieces
    ]
    return tf.concat([*rows, tf.zeros([self.padding])], axis=0)

  def spread(self, values) -> tf.Tensor:
    """float [size]: of each element its variable's of `values`, float [n]."""
    own = tf.concat([tf.gather(values, self._owned), [0.0]], axis=0)
    return tf.repeat(own, [*self._lengths, self.padding])

  def sums(self, flat) -> tf.Tensor:
    """float [variables]: what `flat`, [size], adds up to here of each."""
    rows = tf.split(flat, [*self._lengths, self.padding])[:-1]
    return tf.scatter_nd(
      self._owned[:, None],
      tf.stack([tf.reduce_sum(row) for row in rows]) if rows else tf.zeros([0]),
      [len(self.variables)],
    )


class ZeRO(all_reduce.AllReduce):
  """Each rank gets its part of the sums and updates its part of the weights.

  A shard's weights are the local variable zero/weights_N, to which an optimizer
  is applied as to any variable. Its moments are zero/weights_N/adam_m and
  adam_v, of which checkpoints know nothing: there they are VARIABLE/adam_m and
  VARIABLE/adam_v, whole.
  """

  def __init__(self, config, world, scale):
    super().__init__(config, world, scale)
    self._variables = tf.trainable_variables()
    groups = self._groups(len(self._variables))
    # Of what is in the order of groups, by variable.
    self._order = np.argsort(np.concatenate(groups))
    self._shards = {}  # name of the shard's weights -> Shard
    self._weights, self._decays = [], {}
    for n, group in enumerate(groups):
      shard = Shard([self._variables[i] for i in group], self.comm)
      weights = tf.get_local_variable(
        f"zero/weights_{n}",
        shape=[shard.size],
        dtype=tf.float32,
        initializer=tf.zeros_initializer(),
        use_resource=True,
      )
      self._weights.append(weights)
      self._shards[weights.name] = shard

  def compute_gradients(self, local, gradients, sums):
    """[(this rank's part of a group's sum, the shard's weights), ...]."""
    pairs = local.compute_gradients(gradients, sums)
    of = {variable.name: gradient for gradient, variable in pairs}
    return [
      (
        self.comm.reducescatter(
          shard.flat([of[v.name] for v in shard.variables]),
          f"zero/gradients_{n}",
          self._config.fp16_allreduce,
        ),
        weights,
      )
      for n, (weights, shard) in enumerate(self._each())
    ]

  def _each(self):
    return zip(self._weights, self._shards.values(), strict=True)

  def half_squares(self, pairs):
    own = tf.concat(
      [
        self._shards[weights.name].sums(0.5 * tf.square(gradient))
        for gradient, weights in pairs
      ],
      axis=0,
    )
    squares = self.comm.allreduce(own, "zero/half_squares")
    return self.slices.totals(tf.gather(squares, self._order), self._variables)

  norm_communicates = True

  def norm(self, tensor, variable):
    shard = self._shards[variable.name]
    squares = self.comm.allreduce(
      shard.sums(tf.square(tensor)), "zero/norm_squares"
    )
    return tf.sqrt(self.slices.totals(squares, shard.variables))

  def spread(self, values, variable):
    return self._shards[variable.name].spread(values)

  def decay(self, rate_of, variable):
    return self._decays[variable.name]

  def apply_or_skip(self, optimizer, factor, pairs, finite):
    """Updates the shards; then all ranks get all weights."""
    slots = optimizer.create_slots(self._weights)
    # Not in the condition: XLA would keep them as constants of its program.
    for weights, shard in self._each():
      names = map(moments.variable_name, shard.variables)
      rates = np.array([*map(optimizer.decay_rate, names)], np.float32)
      self._decays[weights.name] = shard.spread(rates)
    for (_, shard), pair in zip(self._each(), slots, strict=True):
      for slot, part in zip(moments.SLOTS, pair, strict=True):
        tf.add_to_collection(
          sharded_variables.SHARDED_VARIABLES,
          _sharded(shard, slot, part, self._world),
        )
    own = [
      weights.assign(shard.own(shard.variables), read_value=False)
      for weights, shard in self._each()
    ]
    with tf.control_dependencies(own):  # on which all in the condition depends
      factor, finite = tf.identity(factor), tf.identity(finite)
    applied, ratios = super().apply_or_skip(optimizer, factor, pairs, finite)
    done = []
    for n, (weights, shard) in enumerate(self._each()):
      with tf.control_dependencies([applied]):
        updated = tf.identity(weights)
      every = self.comm.allgather(updated, f"zero/weights_{n}")
      done += [
        variable.assign(value, read_value=False)
        for variable, value in zip(
          shard.variables, shard.whole(every), strict=True
        )
      ]
    if optimizer.has_trust_ratios:
      ratios = tf.gather(ratios, self._order)
    return tf.group(*done), ratios


def _sharded(shard: Shard, slot: str, part, comm):
  """The `ShardedVariable` of `part`, this rank's share of a slot."""
  slices, data = Slices(comm.tensor_parallel), comm.data_parallel
  cuts = [cut_of(v) for v in shard.variables]
  names = [f"{moments.variable_name(v)}/{slot}" for v in shard.variables]
  here = shard.whole(data.allgather(part, f"whole/{part.op.name}"))
  whole = [
    slices.whole(tensor, cut, f"whole/{name}") if cut else tensor
    for tensor, cut, name in zip(here, cuts, names, strict=True)
  ]
  fed = [tf.placeholder(tf.float32, tensor.shape) for tensor in whole]
  read = [
    comm.broadcast(tensor, f"load/{name}")
    for tensor, name in zip(fed, names, strict=True)
  ]
  every = shard.flat(
    [
      slices.own(tensor, cut.axis) if cut else tensor
      for tensor, cut in zip(read, cuts, strict=True)
    ]
  )
  start = data.rank * shard.size
  return sharded_variables.ShardedVariable(
    part=part,
    whole=dict(zip(names, whole, strict=True)),
    fed=dict(zip(names, fed, strict=True)),
    load=part.assign(every[start : start + shard.size], read_value=False),
  )
