"""`triton_kernels.attention` with TensorFlow's ops, on any machine.

`use` puts it in the place of a GPU's kernels.
"""

from unittest import mock

from common.tensorflow_v1 import tf
from model import kernels, triton_kernels
from xla_patches import jit

_BLOCK = 64  # keys


def use(monkeypatch):
  """Makes models with --triton attend by this, and normalize as always."""
  monkeypatch.setattr(jit, "on_gpu", lambda: True)
  monkeypatch.setattr(jit, "saves_launches", lambda modes=None: False)
  for name, kernel in (("_forward", forward), ("_backward", backward)):
    counted = mock.Mock(side_effect=kernel)
    monkeypatch.setattr(triton_kernels, name, counted)
  monkeypatch.setattr(triton_kernels, "norms", lambda config: False)


def _split(heads, shape):
  """[B, N, S, D] of queries, keys and values, which are side by side."""
  parts = heads.shape.as_list()[-1] // (shape.heads * shape.size)
  apart = [shape.batch, shape.length, parts, shape.heads, shape.size]
  return tf.unstack(tf.transpose(tf.reshape(heads, apart), [2, 0, 3, 1, 4]))


def _side_by_side(tensors, shape):
  """[B * S, ...] of `_split`'s."""
  joined = tf.transpose(tf.stack(tensors), [1, 3, 0, 2, 4])
  return tf.reshape(joined, [shape.batch * shape.length, -1])


def _blocks(shape):
  ends = [*range(0, shape.length, _BLOCK), shape.length]
  return [slice(*ends[i : i + 2]) for i in range(len(ends) - 1)]


def _scores(query, key, query_groups, key_groups, shape):
  """float32 [B, N, S, keys]"""
  product = tf.cast(tf.matmul(query, key, transpose_b=True), tf.float32)
  same = tf.equal(query_groups[:, :, tf.newaxis], key_groups[:, tf.newaxis])
  bias = (1.0 - tf.cast(same, tf.float32)) * triton_kernels.MASKED_SCORE
  return product * shape.scale + bias[:, tf.newaxis]


def _drops(seed, shape):
  """A function of [B, N, S, keys] and the block of keys."""
  if shape.keep_prob == 1.0:
    return lambda x, block: x
  kept = kernels.keep_mask(
    [*shape.rows, shape.length], shape.keep_prob, seed, shape.part
  )
  scale = 1.0 / shape.keep_prob
  return lambda x, block: tf.where(
    kept[..., block], x * scale, tf.zeros_like(x)
  )


def forward(product, bias, query_groups, key_groups, seed, shape):
  heads = product + bias
  query, keys, values = _split(heads, shape)
  drop = _drops(seed, shape)
  highest = tf.fill([*shape.rows, 1], tf.float32.min)
  total = tf.zeros_like(highest)
  output = tf.zeros([*shape.rows, shape.size])
  for block in _blocks(shape):
    scores = _scores(
      query, keys[:, :, block], query_groups, key_groups[:, block], shape
    )
    higher = tf.maximum(highest, tf.reduce_max(scores, -1, keepdims=True))
    probs, shrink = tf.exp(scores - higher), tf.exp(highest - higher)
    total = total * shrink + tf.reduce_sum(probs, -1, keepdims=True)
    probs = tf.cast(drop(probs, block), heads.dtype)
    more = tf.matmul(probs, values[:, :, block])
    output = output * shrink + tf.cast(more, tf.float32)
    highest = higher
  context = _side_by_side([tf.cast(output / total, heads.dtype)], shape)
  return context, tf.squeeze(highest + tf.math.log(total), -1)


def backward(
  product, bias, query_groups, key_groups, seed, log_totals, along, d_context,
  shape,
):  # fmt: skip
  heads = product + bias
  query, keys, values = _split(heads, shape)
  (dy,) = _split(d_context, shape)
  drop = _drops(seed, shape)
  d_query, d_keys, d_values = tf.zeros([*shape.rows, shape.size]), [], []
  for block in _blocks(shape):
    key, value = keys[:, :, block], values[:, :, block]
    scores = _scores(query, key, query_groups, key_groups[:, block], shape)
    probs = tf.exp(scores - log_totals[..., tf.newaxis])
    dropped = tf.cast(drop(probs, block), heads.dtype)
    d_values.append(tf.matmul(dropped, dy, transpose_a=True))
    d_probs = tf.cast(tf.matmul(dy, value, transpose_b=True), tf.float32)
    d_scores = probs * (drop(d_probs, block) - along[..., tf.newaxis])
    d_scores = tf.cast(d_scores * shape.scale, heads.dtype)
    d_keys.append(tf.matmul(d_scores, query, transpose_a=True))
    d_query += tf.cast(tf.matmul(d_scores, key), tf.float32)
  d_query = tf.cast(d_query, heads.dtype)
  d_keys, d_values = tf.concat(d_keys, axis=2), tf.concat(d_values, axis=2)
  return _side_by_side([d_query, d_keys, d_values], shape)
