"""Attention: masks (global or local), rotary positions, the weighted sum.

A layer is of one of two kinds: its tokens attend globally, to all tokens of
their example, or locally, to a sliding window of them. Each kind has a `Mask`.
The letters of shapes are `modeling`'s.
"""

import math
from typing import NamedTuple

import numpy as np

from common.tensorflow_v1 import tf
from config.bert_config import BertConfig
from mixed_precision import Policy
from model import kernels
from model.layers import LayerConfig, dropout_arguments, get_shape_list

# Added to the scores of tokens that are not attended to, as in google/bert.
MASKED_SCORE = -10000.0

# A sequence of at least so many blocks is cut into them: then each token has
# the scores of three blocks instead of all.
_LEAST_BLOCKS = 4


class Mask(NamedTuple):
  """Which tokens a layer's tokens attend to, and their rotary positions.

  Without `block`, `bias` is [B or 1, 1, F or 1, T]. With it a token attends to
  its own block of so many tokens and to both beside it, and `bias` is
  [B or 1, 1, blocks, block, 3 * block].
  """

  bias: tf.Tensor  # added to scores, policy.softmax
  rotary: tuple | None = None  # cosines and sines, see `rotary_tables`
  block: int | None = None


def mask_bias(attention_mask: tf.Tensor | None, policy: Policy) -> tf.Tensor:
  """The bias of a mask [B, F or 1, T], 1 to attend; None attends to all."""
  if attention_mask is None:
    return tf.zeros([1, 1, 1, 1], policy.softmax)
  # [B, 1, F or 1, T]
  mask = tf.expand_dims(tf.cast(attention_mask, policy.softmax), 1)
  return (1.0 - mask) * MASKED_SCORE


def masks(
  bert: BertConfig, attention_mask, input_mask, position_ids, shape, policy
) -> tuple:
  """(the `Mask` of global layers, that of local ones or None).

  `input_mask` is `modeling.BertModel`'s; `position_ids` are int [B, S], or None
  if each row has 0 to S - 1, and one example; `shape` is [B, S].
  """
  seq_length = shape[1]
  rotary: list = [None, None]
  if bert.position_type == "rotary":
    thetas = bert.global_rope_theta, bert.local_rope_theta
    rotary = [rotary_tables(bert, t, position_ids, seq_length) for t in thetas]
  global_mask = Mask(mask_bias(attention_mask, policy), rotary[0])
  if bert.global_attn_every_n_layers == 1:
    return global_mask, None
  # Of long rows local layers need no [B, S, S] mask: a token attends to those
  # of its own number.
  queries = keys = tf.ones(shape, tf.int32)
  if input_mask is not None:
    keys = tf.cast(input_mask, tf.int32)
    queries = queries if position_ids is None else keys
  reach = bert.local_attention // 2  # tokens on each side of a token
  block = block_of(bert, seq_length)
  if block:
    # Numbers begin with 1 here. What fills up the last block, and what stands
    # beside the outermost blocks, has 0 as a key, which no query has.
    queries = _in_blocks(queries, block, axis=1) + 1
    keys = _in_blocks(keys + 1, block, axis=1)
    keys = kernels.with_neighbours(keys[:, tf.newaxis, ..., tf.newaxis])
    keys = tf.squeeze(keys, [1, 4])
    is_together = tf.equal(queries[..., tf.newaxis], keys[:, :, tf.newaxis])
    # Keys begin one block before the queries' own.
    query, key = np.arange(block)[:, np.newaxis], np.arange(3 * block)
    is_local = np.abs(query + block - key) <= reach
  else:
    index = tf.range(seq_length)
    is_local = tf.abs(index[:, tf.newaxis] - index) <= reach
    is_together = tf.equal(queries[:, :, tf.newaxis], keys[:, tf.newaxis])
  bias = mask_bias(is_together & is_local, policy)
  return global_mask, Mask(bias, rotary[1], block)


def block_of(bert: BertConfig, seq_length) -> int | None:
  """Tokens of a block of local layers; None if the sequence is not cut."""
  block = max(1, bert.local_attention // 2)
  is_long = isinstance(seq_length, int) and seq_length >= _LEAST_BLOCKS * block
  return block if is_long else None


def rotary_frequencies(size: int, theta: float) -> np.ndarray:
  """Radians a token of each pair of a head's `size` numbers, float32 [D / 2].

  https://arxiv.org/abs/2104.09864, equation 15. Rounded as transformers
  rounds: an angle of thousands of radians has few digits after the point, so
  another order of roundings is another model.
  """
  exponents = np.arange(0, size, 2) / size
  return np.float32(1.0) / (theta**exponents).astype(np.float32)


def rotary_tables(
  bert: BertConfig, theta: float, position_ids, seq_length
) -> tuple:
  """Cosines and sines for `kernels.rotate`, float32 [B or 1, 1, S, D / 2]."""
  rows = bert.max_position_embeddings
  if isinstance(seq_length, int):
    rows = seq_length
  frequencies = rotary_frequencies(bert.head_size, theta)
  angles = np.arange(rows, dtype=np.float32)[:, np.newaxis] * frequencies
  tables = []
  for function in (np.cos, np.sin):
    values = tf.constant(function(angles, dtype=np.float64), tf.float32)
    if position_ids is None:
      values = values[tf.newaxis, :seq_length]
    else:
      values = tf.gather(values, position_ids)
    tables.append(values[:, tf.newaxis])
  return tuple(tables)


def _in_blocks(tensor: tf.Tensor, block: int, axis: int) -> tf.Tensor:
  """[..., S, ...] as [..., blocks, block, ...], the last filled up with 0."""
  shape = get_shape_list(tensor)
  blocks = -(-shape[axis] // block)
  paddings = [[0, 0]] * len(shape)
  paddings[axis] = [0, blocks * block - shape[axis]]
  tensor = tf.pad(tensor, paddings)
  return tf.reshape(tensor, [*shape[:axis], blocks, block, *shape[axis + 1 :]])


def attention(
  query: tf.Tensor,
  key: tf.Tensor,
  value: tf.Tensor,
  mask: Mask,
  config: LayerConfig,
  seed: tf.Tensor | None = None,
) -> tf.Tensor:
  """Multi-head attention, https://arxiv.org/abs/1706.03762 section 3.2.

  Heads are [B, N, F, D] of queries, [B, N or fewer, T, D] of keys and values,
  each for as many heads of queries. Returns [B * F, N * D].
  """
  bert, slices = config.bert, config.slices
  _, own_heads, length, size_per_head = query.shape.as_list()
  seed, keep_prob = dropout_arguments(bert.attention_probs_dropout_prob, seed)
  scale, dtype = 1.0 / math.sqrt(size_per_head), config.policy.softmax
  part = None  # (first, all) of a slice's heads
  if slices.size > 1:
    count = bert.num_attention_heads
    part = slices.bounds(count)[0], count

  def attend(query, key, value):
    readers = own_heads // key.shape.as_list()[1]
    if readers > 1:
      key, value = tf.repeat(key, readers, 1), tf.repeat(value, readers, 1)
    if mask.block:
      query = _in_blocks(query, mask.block, axis=2)
      key = _in_blocks(key, mask.block, axis=2)
      value = _in_blocks(value, mask.block, axis=2)
      key = kernels.with_neighbours(key)
      value = kernels.with_neighbours(value)
    # scores, probs = [B, N, F, T], or [B, N, blocks, block, 3 * block]
    scores = tf.matmul(query, key, transpose_b=True)
    probs = kernels.attention_probs(
      scores, mask.bias, seed, scale, keep_prob, dtype, heads=part
    )
    context = tf.matmul(probs, value)
    if mask.block:
      # Without what filled up the last block.
      filled = -(-length // mask.block) * mask.block
      rows = [-1, own_heads, filled, size_per_head]
      context = tf.reshape(context, rows)[:, :, :length]
    return context

  # context = [B, N, F, D] -> [B, F, N, D]
  context = config.recomputing("attention", attend)(query, key, value)
  context = tf.transpose(context, [0, 2, 1, 3])
  return tf.reshape(context, [-1, own_heads * size_per_head])
