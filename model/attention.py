"""Whom the tokens of a layer attend to, and how they know each other's places.

A layer is of one of two kinds, and has a `Span` of its kind: its tokens attend
to all tokens of their example, or to those near by. Letters of shapes are
`modeling`'s.
"""

import math
from typing import NamedTuple

import numpy as np

from common.tensorflow_v1 import tf
from model import kernels
from model.layers import dropout_arguments, get_shape_list

# Added to the scores of tokens that are not attended to, as google/bert does.
MASKED_SCORE = -10000.0

# A sequence of at least so many blocks is cut into them: each token's scores
# are of three blocks.
_LEAST_BLOCKS = 4


class Span(NamedTuple):
  """Whom tokens attend to.

  Without `block`, `bias` is [B or 1, 1, F or 1, T]. With it a token attends to
  its own block of so many tokens and to both beside it, and `bias` is
  [B or 1, 1, blocks, block, 3 * block].
  """

  bias: tf.Tensor  # added to scores, policy.softmax
  turns: tuple | None = None  # of `rotary`, float32 [B or 1, 1, S, D / 2] each
  block: int | None = None


def mask_bias(attention_mask, policy):
  """The bias of a mask [B, F or 1, T], 1 to attend; None attends to all."""
  if attention_mask is None:
    return tf.zeros([1, 1, 1, 1], policy.softmax)
  # [B, 1, F or 1, T]
  mask = tf.expand_dims(tf.cast(attention_mask, policy.softmax), 1)
  return (1.0 - mask) * MASKED_SCORE


def example_numbers(input_mask, shape, packed: bool) -> tuple:
  """int32 [B, S] of queries and of keys: equal numbers attend to each other.

  `input_mask` is `modeling.BertModel`'s, or None; `shape` is (B, S).
  """
  ones = tf.ones(shape, tf.int32)
  if input_mask is None:
    return ones, ones
  keys = tf.cast(input_mask, tf.int32)
  return (keys if packed else ones), keys


def spans(bert, attention_mask, groups, positions, seq_length, policy) -> tuple:
  """A `Span` of the layers that attend to all tokens, and one of the others.

  `groups` are `example_numbers`; `positions` int [B, S], or None if each
  row has 0 to S - 1. The second is None if there is no such layer.
  """
  turned = bert.position_type == "rotary"
  near = bert.local_attention // 2
  turns = [None, None]
  if turned:
    thetas = bert.global_rope_theta, bert.local_rope_theta
    turns = [rotary(bert, theta, positions, seq_length) for theta in thetas]
  everywhere = Span(mask_bias(attention_mask, policy), turns[0])
  if bert.global_attn_every_n_layers == 1:
    return everywhere, None
  block = block_of(bert, seq_length)
  if block:
    bias = _near_in_blocks(groups, near, block, policy)
    return everywhere, Span(bias, turns[1], block)
  place = tf.range(seq_length)
  is_near = tf.abs(place[:, tf.newaxis] - place) <= near
  queries, keys = groups
  together = tf.equal(queries[:, :, tf.newaxis], keys[:, tf.newaxis])
  return everywhere, Span(mask_bias(together & is_near, policy), turns[1])


def block_of(bert, seq_length) -> int | None:
  """Tokens of a block, in layers of near tokens; None: they have no blocks."""
  block = max(1, bert.local_attention // 2)
  is_long = isinstance(seq_length, int) and seq_length >= _LEAST_BLOCKS * block
  return block if is_long else None


def score_shape(bert, layer: int, seq_length: int, asked: int) -> tuple:
  """(matrices of scores for each head of a row, their rows, their columns).

  `asked` of the tokens of a row of layer number `layer` are read.
  """
  block = block_of(bert, seq_length) if bert.is_local(layer) else None
  if block:
    return -(-seq_length // block), block, 3 * block
  return 1, asked, seq_length


def rotary(bert, theta: float, positions, seq_length) -> tuple:
  """Cosines and sines for `kernels.turn`, float32 [B or 1, 1, S, D / 2].

  Position p turns pair j of a head's numbers by p / theta^(2 j / D)
  (https://arxiv.org/abs/2104.09864, equation 15), which is rounded as
  transformers' is: an angle of thousands has few digits after the point.
  """
  rows = bert.max_position_embeddings
  if isinstance(seq_length, int):
    rows = seq_length
  exponents = np.arange(0, bert.head_size, 2) / bert.head_size
  frequencies = np.float32(1.0) / np.float32(theta**exponents)
  angles = np.arange(rows, dtype=np.float32)[:, np.newaxis] * frequencies
  tables = np.cos(angles, dtype=np.float64), np.sin(angles, dtype=np.float64)
  turns = []
  for table in tables:
    values = tf.constant(table, tf.float32)
    if positions is None:
      values = values[tf.newaxis, :seq_length]
    else:
      values = tf.gather(values, positions)
    turns.append(values[:, tf.newaxis])
  return tuple(turns)


def _near_in_blocks(groups, near: int, block: int, policy):
  """The bias of a `Span` of blocks: equal groups, at most `near` away."""
  queries, keys = groups
  # From 1 on, so that 0, which stands where no token is, is no query's.
  queries = _in_blocks(queries, block, axis=1) + 1
  keys = _in_blocks(keys + 1, block, axis=1)
  keys = kernels.with_neighbours(keys[:, tf.newaxis, ..., tf.newaxis])
  keys = tf.squeeze(keys, [1, 4])
  together = tf.equal(queries[..., tf.newaxis], keys[:, :, tf.newaxis])
  query, key = np.arange(block)[:, np.newaxis], np.arange(3 * block)
  is_near = np.abs(query + block - key) <= near
  return mask_bias(together & is_near, policy)


def _in_blocks(tensor, block: int, axis: int):
  """[..., S, ...] as [..., blocks, block, ...], the last filled up with 0."""
  shape = get_shape_list(tensor)
  blocks = -(-shape[axis] // block)
  paddings = [[0, 0]] * len(shape)
  paddings[axis] = [0, blocks * block - shape[axis]]
  tensor = tf.pad(tensor, paddings)
  return tf.reshape(tensor, [*shape[:axis], blocks, block, *shape[axis + 1 :]])


def attention(query, key, value, span, config, seed=None):
  """Multi-head attention, https://arxiv.org/abs/1706.03762 section 3.2.

  Heads are [B, N, F, D] of queries, [B, N or fewer, T, D] of keys and values,
  each for as many heads of queries. Returns [B * F, N * D].
  """
  policy = config.policy
  _, own_heads, length, size_per_head = query.shape.as_list()
  seed, keep_prob = dropout_arguments(
    config.bert.attention_probs_dropout_prob, seed
  )

  def attend(query, key, value):
    readers = own_heads // key.shape.as_list()[1]
    if readers > 1:
      key, value = tf.repeat(key, readers, 1), tf.repeat(value, readers, 1)
    if span.block:
      query, key, value = (
        _in_blocks(heads, span.block, axis=2) for heads in (query, key, value)
      )
      key, value = map(kernels.with_neighbours, (key, value))
    # scores, probs = [B, N, F, T], or [B, N, blocks, block, 3 * block]
    scores = tf.matmul(query, key, transpose_b=True)
    probs = kernels.attention_probs(
      scores,
      span.bias,
      seed,
      scale=1.0 / math.sqrt(size_per_head),
      keep_prob=keep_prob,
      dtype=policy.softmax,
      heads=config.own_heads,
    )
    context = tf.matmul(probs, value)
    if span.block:
      rows = [context.shape[0], own_heads, -1, size_per_head]
      context = tf.reshape(context, rows)[:, :, :length]
    return context

  # context = [B, N, F, D] -> [B, F, N, D]
  context = config.run("attention", attend, query, key, value)
  context = tf.transpose(context, [0, 2, 1, 3])
  return tf.reshape(context, [-1, own_heads * size_per_head])
