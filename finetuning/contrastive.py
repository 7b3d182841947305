"""Losses between all texts of an update, and their gradients over two passes.

What a text is compared with is the update's whole batch, of all ranks and
micro-batches: N ranks x A micro-batches x B groups have the loss of one rank
with N * A * B. An update of several micro-batches embeds each one, then gathers
the vectors of all ranks and computes the loss's gradient by each vector, then
embeds each micro-batch again, with the same dropout, and sends the gradient of
its vectors on to the weights (GradCache, https://arxiv.org/abs/2101.06983).
An update of one micro-batch needs one pass.

Shapes: n groups of all ranks, of which m are this rank's; T texts a group, the
anchor, its positive and negatives; vectors of H numbers.
"""

from typing import NamedTuple

import mixed_precision
import modeling
import optimization
from common.tensorflow_v1 import tf
from finetuning import heads
from finetuning.groups import GroupBatch
from finetuning.task import FinetuningTask
from model import layers
from training import training_run
from xla_patches import jit

_FAR = -1e9  # in the place of a score that does not count
# Scores of a block of anchors with all texts, at once: float32 numbers.
_BLOCK_SCORES = 1 << 22


class Groups(NamedTuple):
  """Groups of texts as a loss reads them."""

  vectors: tf.Tensor  # float32 [n, T, H]
  identities: tf.Tensor  # int32 [n, T], equal for equal texts; -1: no text
  weights: tf.Tensor  # float32 [n], 0: no group
  scores: tf.Tensor  # float32 [n], how alike anchor and positive are


class Losses(NamedTuple):
  """A loss of groups, whose mean by `weights` is the update's."""

  gradient: tf.Tensor  # float32 [n, T, H], of that mean by `vectors`
  losses: tf.Tensor  # float32 [n], nats
  # float32 [n], 1 where no text is nearer to the anchor than its positive;
  # None for scores.
  correct: tf.Tensor | None


def info_nce(
  groups: Groups, temperature: float, both_directions: bool, dims=()
) -> Losses:
  """InfoNCE of each anchor (https://arxiv.org/abs/1807.03748), by cosine.

  -log of the share of its positive in the softmax over the update's positives
  and negatives, of cosine / `temperature`. With `both_directions` the mean of
  that and of each positive's loss over all anchors. Equal texts are no
  negatives of each other, and neither are positives of equal anchors. `dims`:
  also of the first d numbers, for each d (https://arxiv.org/abs/2205.13147);
  the losses are added.
  """
  count, texts, width = groups.vectors.shape.as_list()
  block = min(count, max(1, _BLOCK_SCORES // (count * texts)))
  total = tf.reduce_sum(groups.weights)

  def of_first(size: int) -> Losses:
    units = tf.nn.l2_normalize(groups.vectors[:, :, :size], axis=2)

    def add_block(first, gradient, losses, correct):
      # The last block begins earlier, and its first anchors do not count again.
      start = tf.minimum(first, count - block)
      rows = start + tf.range(block)
      fresh = tf.cast(rows >= first, tf.float32)
      own_units = tf.identity(units)
      of_rows, right = _of_anchors(
        own_units, groups, rows, temperature, both_directions
      )
      weights = tf.gather(groups.weights, rows) * fresh
      loss = tf.reduce_sum(of_rows * weights) / tf.maximum(total, 1.0)
      gradient += tf.gradients(loss, own_units)[0]
      at, shape = rows[:, None], [count]
      losses += tf.scatter_nd(at, of_rows * fresh, shape)
      correct += tf.scatter_nd(at, right * fresh, shape)
      return first + block, gradient, losses, correct

    nothing = tf.zeros([count])
    state = tf.constant(0), tf.zeros_like(units), nothing, nothing
    if block == count:
      _, gradient, losses, correct = add_block(*state)
    else:
      _, gradient, losses, correct = tf.while_loop(
        lambda first, *_: first < count, add_block, state,
        parallel_iterations=1, back_prop=False,
      )  # fmt: skip
    gradient = tf.gradients(units, groups.vectors, gradient)[0]
    return Losses(gradient, losses, correct)

  gradient = losses = 0.0
  for size in dims or [width]:
    part = of_first(size)
    gradient += part.gradient
    losses += part.losses
  return Losses(gradient, losses, part.correct)


def _of_anchors(units, groups: Groups, rows, temperature, both_directions):
  """Losses of the anchors `rows`, int [r], and whether they are right."""
  count, texts, width = units.shape.as_list()
  texts_of = groups.identities
  anchors, positives = texts_of[:, 0], texts_of[:, 1]
  own = tf.one_hot(rows, count, dtype=tf.bool, on_value=True, off_value=False)

  def equal(one, others):
    return tf.equal(tf.gather(one, rows)[:, None], others[None])

  same = equal(anchors, anchors) | equal(positives, positives)
  # A positive of an equal anchor is a positive, too.
  skipped = [same | equal(anchors, positives)]
  for number in range(2, texts):
    negatives = texts_of[:, number]
    is_same = equal(anchors, negatives) | equal(positives, negatives)
    skipped.append(is_same | tf.less(negatives, 0)[None])
  missing = tf.less(anchors, 0)[None]
  skipped[0] |= missing
  # [r, n x (T - 1)]: all positives, then all first negatives and so on.
  documents = tf.reshape(
    tf.transpose(units[:, 1:], [1, 0, 2]), [count * (texts - 1), width]
  )
  skip = tf.concat([skipped[0] & ~own, *skipped[1:]], axis=1)
  losses, right = _cross_entropy(
    tf.gather(units[:, 0], rows), documents, rows, skip, temperature
  )
  if both_directions:
    skip = (same | equal(positives, anchors) | missing) & ~own
    backward, _ = _cross_entropy(
      tf.gather(units[:, 1], rows), units[:, 0], rows, skip, temperature
    )
    losses = (losses + backward) / 2.0
  return losses, right


def _cross_entropy(queries, texts, targets, skip, temperature):
  """float32 [r] each: losses of [r, H] queries, and 1 where they are right."""
  scores = tf.matmul(queries, texts, transpose_b=True) / temperature
  scores = tf.where(skip, tf.fill(tf.shape(scores), _FAR), scores)
  of_target = tf.gather(scores, targets, axis=1, batch_dims=1)
  losses = tf.reduce_logsumexp(scores, axis=1) - of_target
  is_right = of_target >= tf.reduce_max(scores, axis=1)
  return losses, tf.cast(is_right, tf.float32)


def cosent(groups: Groups, temperature: float, dims=()) -> Losses:
  """CoSENT of pairs with scores (https://kexue.fm/archives/8847).

  log(1 + sum exp((c_k - c_i) / temperature)) over all two pairs of which i has
  the higher score; c are the cosines of anchor and positive. It is one loss of
  the update, which each pair has. `dims` as in `info_nce`.
  """
  with tf.device("/cpu:0"):  # a few numbers, in float64
    weights = tf.cast(groups.weights, tf.float64)
    # From the lowest score on; the sum before a pair has no equal ones.
    order = tf.argsort(groups.scores, stable=True)
    in_order = tf.gather(groups.scores, order)
    before = tf.searchsorted(in_order, in_order, side="left")
    weights = tf.gather(weights, order)
    total = tf.zeros([], tf.float64)
    for size in dims or [groups.vectors.shape.as_list()[2]]:
      units = tf.nn.l2_normalize(groups.vectors[:, :2, :size], axis=2)
      cosines = tf.reduce_sum(units[:, 0] * units[:, 1], axis=1)
      logits = tf.cast(tf.gather(cosines, order), tf.float64) / temperature
      # Sums of exp(c_k) * exp(-c_i), of factors near 1.
      logits -= tf.stop_gradient(tf.reduce_mean(logits))
      sums = tf.cumsum(weights * tf.exp(logits))
      lower = tf.gather(tf.concat([[0.0], sums], axis=0), before)
      total += tf.math.log1p(tf.reduce_sum(weights * tf.exp(-logits) * lower))
    loss = tf.cast(total, tf.float32)
    gradient = tf.gradients(loss, groups.vectors)[0]
  return Losses(gradient, tf.fill(tf.shape(groups.weights), loss), None)


def gather(groups: Groups, comm) -> Groups:
  """The groups of all ranks, [N x m, ...], in the order of ranks."""
  count, texts, width = groups.vectors.shape.as_list()
  # One all-gather: whole numbers travel as the bits of floats.
  parts = [
    tf.reshape(groups.vectors, [count, texts * width]),
    tf.bitcast(groups.identities, tf.float32),
    groups.weights[:, None],
    groups.scores[:, None],
  ]
  row = tf.concat(parts, axis=1)
  everyone = comm.allgather(row, name="vectors_of_all_ranks")
  everyone.set_shape([comm.size * count, row.shape[1]])
  vectors, identities, weights, scores = tf.split(
    everyone, [texts * width, texts, 1, 1], axis=1
  )
  return Groups(
    tf.reshape(vectors, [comm.size * count, texts, width]),
    tf.bitcast(identities, tf.int32),
    weights[:, 0],
    scores[:, 0],
  )


# The update -------------------------------------------------------------------


def embed(
  batch: GroupBatch, task: FinetuningTask, is_training, dropout_seed=None
) -> tf.Tensor:
  """float32 [m, T, H]: the mean of the outputs of each text's pooled tokens."""
  records, rows, tokens = layers.get_shape_list(batch.input_ids)
  _, groups, texts = layers.get_shape_list(batch.identities)
  shape = [records * rows, tokens]
  # The second pass reads the variables that the first one made.
  with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
    model = heads.bert_model(
      task,
      is_training,
      tf.reshape(batch.input_ids, shape),
      tf.reshape(batch.input_mask, shape),
      dropout_seed=dropout_seed,
      examples_per_sequence=groups * texts,
      with_pooler=False,
    )
  numbers = tf.reshape(batch.pooled_mask, [records, rows * tokens])
  outputs = tf.cast(model.get_sequence_output(), tf.float32)
  outputs = tf.reshape(outputs, [*numbers.shape, outputs.shape[2]])
  # [B, R * S, G * T]: 1 for the text of a token. A missing text gets zeros.
  owners = tf.one_hot(numbers - 1, groups * texts)
  totals = tf.matmul(owners, outputs, transpose_a=True)
  counts = tf.reduce_sum(owners, axis=1)[:, :, None]
  means = totals / tf.maximum(counts, 1.0)
  return tf.reshape(means, [records * groups, texts, outputs.shape[2]])


class Pass(NamedTuple):
  """What a forward pass of a micro-batch reads; all are tensors."""

  batch: GroupBatch
  number: tf.Tensor  # int32, as in a `MicroBatch`


class Store:
  """What one pass over an update's micro-batches keeps for the next.

  Its variables are this rank's, and never saved: a stopped update is made
  again.
  """

  def __init__(self, one: Pass, vectors: tf.Tensor, count: int):
    """Room for `count` micro-batches like `one`, and their `vectors`."""
    self._count = count
    results = Losses(vectors, vectors[:, 0, 0], vectors[:, 0, 0])
    self._vectors = self._room("vectors", vectors)
    self._losses = []
    for name, like in results._asdict().items():
      self._losses.append(self._room(name, like))
    with tf.device("/cpu:0"):  # batches come from there
      self._passes = []
      for index, tensor in enumerate(tf.nest.flatten(one)):
        self._passes.append(self._room(f"pass_{index}", tensor))
      # How many micro-batches the second pass has read.
      self._read = tf.get_local_variable(
        "contrastive/read", [], tf.int32, tf.zeros_initializer(),
        use_resource=True,
      )  # fmt: skip
    self._like = one

  def _room(self, name: str, like: tf.Tensor) -> tf.Variable:
    return tf.get_local_variable(
      f"contrastive/{name}", [self._count, *like.shape.as_list()], like.dtype,
      tf.zeros_initializer(), use_resource=True,
    )  # fmt: skip

  def keep(self, one: Pass, vectors: tf.Tensor) -> tf.Operation:
    """An op that keeps a micro-batch and its vectors."""
    index, kept = one.number % self._count, []
    rooms = [self._vectors, *self._passes]
    values = [vectors, *tf.nest.flatten(one)]
    for room, value in zip(rooms, values, strict=True):
      kept.append(tf.scatter_update(room, index, value))
    return tf.group(*kept, self._read.assign(0, read_value=False))

  def all_groups(self) -> Groups:
    """All groups of this rank's update."""
    batches = tf.nest.pack_sequence_as(self._like, self._passes).batch
    return groups_of(batches, self._vectors)

  def keep_losses(self, losses: Losses) -> tf.Operation:
    """An op that keeps the losses of `all_groups`."""
    kept = []
    for room, value in zip(self._losses, losses, strict=True):
      if value is not None:
        kept.append(room.assign(tf.reshape(value, room.shape)))
    return tf.group(*kept)

  def next(self, has_correct: bool) -> tuple[Pass, Losses, tf.Operation]:
    """A micro-batch, its losses, and the op that moves on to the next one."""
    index = self._read.read_value()
    kept = []
    for room in (*self._passes, *self._losses):
      kept.append(tf.gather(room, index))
    *one, gradient, losses, correct = kept
    with tf.control_dependencies([index]):
      move = self._read.assign_add(1, read_value=False)
    return (
      tf.nest.pack_sequence_as(self._like, one),
      Losses(gradient, losses, correct if has_correct else None),
      move,
    )


def groups_of(batch: GroupBatch, vectors) -> Groups:
  """The groups of one batch, or of several along a first axis."""
  *_, texts, width = vectors.shape.as_list()
  return Groups(
    tf.reshape(vectors, [-1, texts, width]),
    tf.reshape(batch.identities, [-1, texts]),
    tf.reshape(batch.weights, [-1]),
    tf.reshape(batch.scores, [-1]),
  )


def losses_of_rank(own: Groups, task: FinetuningTask, comm) -> Losses:
  """The losses of a rank's groups, beside those of all ranks."""
  count = own.vectors.shape.as_list()[0]
  everyone = task.losses(gather(own, comm))
  first = comm.rank * count
  parts = []
  for values in everyone:
    is_there = values is not None
    parts.append(values[first : first + count] if is_there else None)
  return Losses(*parts)


def training_step(
  task: FinetuningTask, config, micro, state, plan, comm
) -> optimization.TrainOps:
  """Builds an update; see `training_step` of run_pretraining.py."""
  loss_scale = mixed_precision.make_loss_scale(
    config.loss_scale, config.uses_fp16
  )
  ranks = comm.data_parallel
  one = Pass(micro.batch, micro.number)

  def vectors_of(one: Pass):
    seed = training_run.dropout_seed(config, plan, comm, one)
    return embed(one.batch, task, True, seed)

  def backward(one: Pass, vectors, own: Losses):
    gradient = own.gradient * loss_scale.value
    gradients = tf.gradients(vectors, tf.trainable_variables(), gradient)
    return gradients, _sums(one.batch, own)

  def ops(one: Pass, gradients, sums):
    return optimization.train_ops(
      config, plan, comm, gradients, sums.by_name(), loss_scale, state, one
    )

  vectors = jit.compiled(lambda: vectors_of(one), ("step",))()
  # Between a program's forward and backward pass nothing can be gathered.
  if plan.accumulation == 1 and config.xla != "step":
    own = losses_of_rank(groups_of(one.batch, vectors), task, ranks)
    return ops(one, *backward(one, vectors, own))
  store = Store(one, vectors, plan.accumulation)
  own = losses_of_rank(store.all_groups(), task, ranks)
  second, kept, move = store.next(own.correct is not None)

  def forward_and_backward():
    return backward(second, vectors_of(second), kept)

  gradients, sums = jit.compiled(forward_and_backward, ("step",))()
  built = ops(second, gradients, sums)
  return built._replace(
    accumulate=tf.group(built.accumulate, move),
    first_pass=store.keep(one, vectors),
    between=store.keep_losses(own),
  )


def _sums(batch: GroupBatch, own: Losses) -> modeling.FinetuningSums:
  shape = layers.get_shape_list(batch.weights)
  tokens = tf.reshape(batch.input_mask, [shape[0], -1])
  correct = None if own.correct is None else tf.reshape(own.correct, shape)
  return modeling.finetuning_sums(
    tf.reshape(own.losses, shape), correct, batch._replace(input_mask=tokens)
  )
