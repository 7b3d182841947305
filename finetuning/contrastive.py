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
  # float32 [n] each: "loss", nats, and but for scores "correct", 1 where no
  # text is nearer to the anchor than its positive.
  by_group: dict[str, tf.Tensor]


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
  total = tf.maximum(tf.reduce_sum(groups.weights), 1.0)
  # int32 [n, T]: numbers from 0 that equal texts share; -1: no text.
  identities = groups.identities
  with tf.device("/cpu:0"):  # a GPU has no kernel for it
    _, kinds = tf.unique(tf.reshape(identities, [-1]))
  kinds = tf.reshape(kinds, identities.shape)
  kinds = tf.where(identities < 0, identities, kinds)

  def add_block(first, gradient, losses, correct):
    # The last block begins earlier, and its first anchors do not count again.
    rows = tf.minimum(first, count - block) + tf.range(block)
    fresh = tf.cast(rows >= first, tf.float32)
    vectors, of_rows = tf.identity(groups.vectors), 0.0
    for size in sorted({*dims, width}):
      units = tf.nn.l2_normalize(vectors[:, :, :size], axis=2)
      of_size, right = _of_anchors(
        units, kinds, rows, temperature, both_directions
      )
      of_rows += of_size
    weights = tf.gather(groups.weights, rows) * fresh
    loss = tf.reduce_sum(of_rows * weights) / total
    gradient += tf.gradients(loss, vectors)[0]
    losses += tf.scatter_nd(rows[:, None], of_rows * fresh, [count])
    correct += tf.scatter_nd(rows[:, None], right * fresh, [count])
    return first + block, gradient, losses, correct

  nothing = tf.zeros([count])
  _, gradient, losses, correct = tf.while_loop(
    lambda first, *_: first < count,
    add_block,
    (tf.constant(0), tf.zeros_like(groups.vectors), nothing, nothing),
    parallel_iterations=1,
    back_prop=False,
  )
  return Losses(gradient, {"loss": losses, "correct": correct})


def _of_anchors(units, kinds, rows, temperature, both_directions):
  """Losses of the anchors `rows`, int [r], and whether they are right."""
  count, texts, width = units.shape.as_list()
  # [n x (T - 1)]: all positives, then all first negatives and so on.
  documents = tf.reshape(
    tf.transpose(units[:, 1:], [1, 0, 2]), [count * (texts - 1), width]
  )
  of_documents = tf.reshape(tf.transpose(kinds[:, 1:]), [-1])
  anchors, positives = kinds[:, 0], kinds[:, 1]
  skip = _belong(rows, anchors, positives, of_documents, count * texts)
  losses, right = _cross_entropy(
    tf.gather(units[:, 0], rows), documents, rows, skip, temperature
  )
  if both_directions:
    skip = _belong(rows, positives, anchors, anchors, count * texts)
    backward, _ = _cross_entropy(
      tf.gather(units[:, 1], rows), units[:, 0], rows, skip, temperature
    )
    losses = (losses + backward) / 2.0
  return losses, right


def _belong(rows, queries, targets, texts, count):
  """bool [r, m]: which of `texts` are no negatives of the `queries` at `rows`.

  A text is none if it equals the query or the target of any equal query, or is
  missing. All are kinds of texts, of `count` ones; `targets` are by query.
  """
  kind = tf.gather(queries, rows)[:, None]
  is_query = tf.transpose(tf.cast(tf.equal(kind, queries[None]), tf.float32))
  # [count, r], of [n, r]: above 0 for the kinds that a query belongs to.
  targets_of = tf.math.unsorted_segment_max(is_query, targets, count)
  is_target = tf.gather(targets_of, tf.maximum(texts, 0)) > 0
  return tf.equal(kind, texts[None]) | tf.transpose(is_target) | (texts < 0)


def _cross_entropy(queries, texts, targets, skip, temperature):
  """float32 [r] each: losses of [r, H] queries, and 1 where they are right."""
  scores = tf.matmul(queries, texts, transpose_b=True) / temperature
  own = tf.one_hot(
    targets, tf.shape(texts)[0], dtype=tf.bool, on_value=True, off_value=False
  )
  scores = tf.where(skip & ~own, tf.fill(tf.shape(scores), _FAR), scores)
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
    for size in sorted({*dims, groups.vectors.shape.as_list()[2]}):
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
  return Losses(gradient, {"loss": tf.fill(tf.shape(groups.weights), loss)})


def gather(groups: Groups, comm) -> Groups:
  """The groups of all ranks, [N x m, ...], in the order of ranks."""
  count, rows, gathered = groups.weights.shape[0], [], []
  # One all-gather: whole numbers travel as the bits of floats.
  for tensor in groups:
    rows.append(tf.reshape(tf.bitcast(tensor, tf.float32), [count, -1]))
  sizes = [row.shape.as_list()[1] for row in rows]
  everyone = comm.allgather(tf.concat(rows, axis=1), "vectors_of_all_ranks")
  parts = tf.split(everyone, sizes, axis=1)
  for like, part in zip(groups, parts, strict=True):
    shape = [comm.size * count, *like.shape[1:]]
    gathered.append(tf.reshape(tf.bitcast(part, like.dtype), shape))
  return Groups(*gathered)


# The update -------------------------------------------------------------------


def embed(
  batch: GroupBatch, task: FinetuningTask, is_training, dropout_seed=None
) -> tf.Tensor:
  """float32 [m, T, H]: the mean of the outputs of each text's pooled tokens."""
  records, rows, tokens = layers.get_shape_list(batch.input_ids)
  _, groups, texts = layers.get_shape_list(batch.identities)
  shape = [records * rows, tokens]
  pooled, positions = tf.reshape(batch.pooled_mask, shape), None
  if task.describe()["pooling"] == "cls":  # the last layer is needed there only
    is_pooled = tf.cast(pooled > 0, tf.float32)
    _, positions = tf.math.top_k(is_pooled, min(tokens, groups * texts))
    pooled = tf.gather(pooled, positions, batch_dims=1)
  # The second pass reads the variables that the first one made.
  with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
    model = heads.bert_model(
      task,
      is_training,
      tf.reshape(batch.input_ids, shape),
      tf.reshape(batch.input_mask, shape),
      dropout_seed=dropout_seed,
      examples_per_sequence=groups * texts,
      positions=positions,
    )
  outputs = tf.cast(model.get_sequence_output(), tf.float32)
  width = outputs.shape[2]
  # [B, G * T, tokens of a record]: 1 for the text of a token.
  numbers = tf.reshape(pooled, [records, -1])
  members = tf.one_hot(numbers - 1, groups * texts, axis=1)
  means = layers.means_of(members, tf.reshape(outputs, [*numbers.shape, width]))
  return tf.reshape(means, [records * groups, texts, width])


def _queue(one, count: int):
  """Room for `count` micro-batches of tensors like those nested in `one`.

  One pass over an update's micro-batches keeps them there for the next. It is
  this rank's, and never saved: a stopped update is made again.
  """
  types, shapes = [], []
  for tensor in tf.nest.flatten(one):
    types.append(tensor.dtype)
    shapes.append(tensor.shape)
  with tf.device("/cpu:0"):  # batches come from there
    return tf.queue.FIFOQueue(count, types, shapes)


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
  everyone = task.losses(gather(own, comm))
  count = own.vectors.shape.as_list()[0]
  part = slice(comm.rank * count, (comm.rank + 1) * count)
  return tf.nest.map_structure(lambda values: values[part], everyone)


def training_step(
  task: FinetuningTask, config, micro, state, plan, comm
) -> optimization.TrainOps:
  """Builds an update; see `training_step` of run_pretraining.py."""
  loss_scale = mixed_precision.make_loss_scale(config)
  ranks, count = comm.data_parallel, plan.accumulation

  def vectors_of(one):
    seed = training_run.dropout_seed(config, plan, comm, one)
    return embed(one.batch, task, True, seed)

  def backward(one, vectors, own: Losses):
    gradient = own.gradient * loss_scale.value
    gradients = tf.gradients(vectors, tf.trainable_variables(), gradient)
    return gradients, _sums(one.batch, own)

  def ops(one, gradients, sums):
    return optimization.train_ops(
      config, plan, comm, gradients, sums, loss_scale, state, one
    )

  vectors = jit.compiled(lambda: vectors_of(micro), ("step",))()
  # Between a program's forward and backward pass nothing can be gathered.
  if count == 1 and config.xla != "step":
    own = losses_of_rank(groups_of(micro.batch, vectors), task, ranks)
    return ops(micro, *backward(micro, vectors, own))
  flat, packed = tf.nest.flatten, tf.nest.pack_sequence_as
  kept = micro, vectors
  first = _queue(kept, count)
  passes, all_vectors = packed(kept, first.dequeue_many(count))
  own = losses_of_rank(groups_of(passes.batch, all_vectors), task, ranks)
  by_pass = tf.nest.map_structure(
    lambda values: tf.reshape(values, [count, -1, *values.shape[1:]]), own
  )
  one = micro, tf.nest.map_structure(lambda values: values[0], by_pass)
  second = _queue(one, count)
  again, own = packed(one, second.dequeue())

  def forward_and_backward():
    return backward(again, vectors_of(again), own)

  both = jit.compiled(forward_and_backward, ("step",))()
  return ops(again, *both)._replace(
    first_pass=first.enqueue(flat(kept)),
    between=second.enqueue_many(flat((passes, by_pass))),
  )


def _sums(batch: GroupBatch, own: Losses) -> dict:
  shape = layers.get_shape_list(batch.weights)
  tokens = tf.reshape(batch.input_mask, [shape[0], -1])
  by_slot = {"correct": None}
  for name, values in own.by_group.items():
    by_slot[name] = tf.reshape(values, shape)
  batch = batch._replace(input_mask=tokens)
  return modeling.by_name(
    modeling.finetuning_sums(by_slot["loss"], by_slot["correct"], batch)
  )
