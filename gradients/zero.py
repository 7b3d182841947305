"""ZeRO-1: each rank keeps and updates its share of the optimizer's state.

Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, P_os: gradients are
reduce-scattered, a rank updates its shard of the weights with its shard of the
moments, and the weights are all-gathered. That moves as much as an all-reduce.
Checkpoints hold the moments whole, under the names that they always have.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.tensorflow_v1 import tf
from gradients import optimizers, sharded_variables
from model import tensor_parallel
from xla_patches import jit


class Piece(NamedTuple):
  """The part of a variable that is in a shard: numbers begin to end of it."""

  variable: int  # its index among all trainable variables
  begin: int
  end: int


class Shard:
  """One rank's share of a group of variables, all numbers in a row.

  The variables, one after another and zeros up to a multiple of the ranks, are
  cut into equal parts: rank r's is the r-th.

  Attributes:
    numbers: indices of the group's variables, among all.
    variables: these variables.
    size: of each rank's part.
    pieces: list of `Piece`, what of this rank's part is in variables.
    padding: zeros at the end of this rank's part.
  """

  def __init__(self, numbers: Sequence[int], variables, comm):
    self.numbers = list(numbers)
    self.variables = [variables[i] for i in self.numbers]
    self._sizes = [v.shape.num_elements() for v in self.variables]
    self._ranks = comm.size
    total = sum(self._sizes)
    self.size = -(-total // comm.size)
    first, last = comm.rank * self.size, (comm.rank + 1) * self.size
    self.pieces, start = [], 0
    for number, size in zip(self.numbers, self._sizes, strict=True):
      begin, end = max(first - start, 0), min(last - start, size)
      if begin < end:
        self.pieces.append(Piece(number, begin, end))
      start += size
    self._owned = np.array([p.variable for p in self.pieces], np.int32)
    self.padding = self.size - sum(p.end - p.begin for p in self.pieces)

  def lengths(self) -> list[int]:
    """Of the pieces, and of the padding."""
    return [p.end - p.begin for p in self.pieces] + [self.padding]

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

  def own(self, values: Sequence) -> tf.Tensor:
    """float [size]: this rank's part of what `values`, by variable, hold."""
    rows = [
      tf.reshape(values[p.variable], [-1])[p.begin : p.end] for p in self.pieces
    ]
    return tf.concat([*rows, tf.zeros([self.padding])], axis=0)

  def spread(self, values) -> tf.Tensor:
    """float [size]: a number for each variable, float [variables], repeated."""
    own = tf.concat([tf.gather(values, self._owned), [0.0]], axis=0)
    return tf.repeat(own, self.lengths())

  def sums(self, flat, count: int) -> tf.Tensor:
    """float [count]: of each variable what `flat`, [size], adds up to here."""
    rows = tf.split(flat, self.lengths())[:-1]
    return tf.scatter_nd(
      self._owned[:, None],
      tf.stack([tf.reduce_sum(row) for row in rows]) if rows else tf.zeros([0]),
      [count],
    )


class ShardedOptimizer(tf.train.Optimizer):
  """An optimizer over ranks, each of which has a part of its state.

  The moments are the variables zero/m_0, zero/v_0, ..., of which checkpoints
  know nothing: there they are VARIABLE/adam_m and VARIABLE/adam_v, whole.
  """

  def __init__(self, optimizer, comm, config):
    """Wraps `optimizer`, whose `compute_gradients` gives this rank's shares.

    Args:
      optimizer: a `tf.train.Optimizer`.
      comm: a `distributed.Comm` of all ranks. The state is shared out over
        `comm.data`, that of each slice of the model apart.
      config: a `distributed.AllreduceConfig`; its groups are reduce-scatters.
    """
    super().__init__(use_locking=False, name="Sharded")
    self._optimizer, self._config = optimizer, config
    self._world, self._comm = comm, comm.data
    self._slices = tensor_parallel.Slices(comm.slices)
    self._shards, self._variables = [], []

  def compute_gradients(self, *args, **kwargs):
    """[(this rank's part of the sum, `Shard`), ...]; float [shard.size]."""
    gradients, self._variables = zip(
      *self._optimizer.compute_gradients(*args, **kwargs), strict=True
    )
    count = len(gradients)
    groups = np.array_split(
      np.arange(count)[::-1],  # as they are computed
      min(self._config.allreduce_groups or count, count),
    )
    self._shards = [
      Shard(numbers.tolist(), self._variables, self._comm) for numbers in groups
    ]
    return [
      (
        self._comm.reducescatter(
          shard.flat([gradients[i] for i in shard.numbers]),
          f"zero/gradients_{n}",
          self._config.fp16_allreduce,
        ),
        shard,
      )
      for n, shard in enumerate(self._shards)
    ]

  def half_squares(self, gradients) -> tf.Tensor:
    """float [variables]: half the sum of squares of each gradient.

    Args:
      gradients: of `compute_gradients`.
    """
    return self._sums([0.5 * tf.square(g) for g in gradients], "half_squares")

  def _sums(self, parts, name: str) -> tf.Tensor:
    """float [variables]: what each variable's numbers here add up to."""
    count = len(self._variables)
    own = [
      shard.sums(part, count)
      for shard, part in zip(self._shards, parts, strict=True)
    ]
    return self._comm.allreduce(functools.reduce(tf.add, own), f"zero/{name}")

  def _make_moments(self) -> list:
    """This rank's [(m, v), ...]; tells checkpoints of the whole ones."""
    made = []
    for n, shard in enumerate(self._shards):
      moments = [
        tf.get_variable(
          f"zero/{slot}_{n}",
          shape=[shard.size],
          dtype=tf.float32,
          trainable=False,
          initializer=tf.zeros_initializer(),
          use_resource=True,
        )
        for slot in optimizers.SLOTS
      ]
      made.append(moments)
      for slot, part in zip(optimizers.SLOTS, moments, strict=True):
        tf.add_to_collection(
          sharded_variables.SHARDED_VARIABLES,
          _sharded(shard, slot, part, self._world),
        )
    return made

  def apply_or_skip(self, optimizer, factor, pairs, finite) -> tuple:
    """Updates the shards where the update is `finite`; gathers the weights.

    Args:
      optimizer: one of `optimizers`.
      factor: float scalar that gradients are multiplied by.
      pairs: of `compute_gradients`.
      finite: bool scalar, the same on all ranks.

    Returns:
      The op, and float [variables] trust ratios, 0 if skipped; [0] for an
      optimizer without.
    """
    shards = self._shards
    optimizer.create_counter()
    moments = self._make_moments()
    corrections = optimizer.corrections()
    decays = np.array(
      [
        optimizer.decay_rate(optimizers.variable_name(v))
        for v in self._variables
      ],
      np.float32,
    )
    weights = [shard.own(self._variables) for shard in shards]
    follow = jit.compiled(optimizer.follow, ("layers", "step"))
    new = [
      follow(gradient * factor, own, *slots, *corrections, shard.spread(decays))
      for (gradient, shard), own, slots in zip(
        pairs, weights, moments, strict=True
      )
    ]
    updates = [update for update, _, _ in new]
    ratios = tf.zeros([0])
    rates = [optimizer.learning_rate] * len(shards)
    if optimizer.has_trust_ratios:
      norms = lambda parts, name: tf.sqrt(
        self._slices.totals(
          self._sums(map(tf.square, parts), name), self._variables
        )
      )
      ratios = optimizer.trust_ratio(
        norms(weights, "weights_squares"), norms(updates, "update_squares")
      )
      rates = [
        r * shard.spread(ratios) for r, shard in zip(rates, shards, strict=True)
      ]

    def keep():
      changes = [
        slot.assign(value, read_value=False)
        for slots, (_, *values) in zip(moments, new, strict=True)
        for slot, value in zip(slots, values, strict=True)
      ]
      return tf.group(*changes, optimizer.count_op())

    done = [tf.cond(finite, keep, tf.no_op, name="keep_or_not").op]
    for n, (shard, own) in enumerate(zip(shards, weights, strict=True)):
      stepped = tf.where(finite, own - rates[n] * updates[n], own)
      every = self._comm.allgather(stepped, f"zero/weights_{n}")
      done += [
        self._variables[i].assign(value, read_value=False)
        for i, value in zip(shard.numbers, shard.whole(every), strict=True)
      ]
    return tf.group(*done), tf.where(finite, ratios, tf.zeros_like(ratios))


def _sharded(shard: Shard, slot: str, part, comm):
  """The `ShardedVariable` of `part`, this rank's share of a slot."""
  slices, data = tensor_parallel.Slices(comm.slices), comm.data
  cuts = [tensor_parallel.cut_of(v) for v in shard.variables]
  names = [f"{optimizers.variable_name(v)}/{slot}" for v in shard.variables]
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
