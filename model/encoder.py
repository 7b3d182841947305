"""Embeddings, attention and the stack of layers, named as google/bert's.

`modeling` exports them and explains the letters of shapes.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import mixed_precision
from common.tensorflow_v1 import tf
from config.bert_config import BertConfig
from model import kernels, layers, weights
from model.attention import Mask, attention, mask_bias
from model.layers import LayerConfig, Norm, Weights, get_shape_list, layer_norm
from model.tensor_parallel import WHOLE
from xla_patches import jit

# The numbers of the model's dropout call sites, see `dropout_site_seed`.
_EMBEDDING_SITE = 0
HEAD_SITE = -1  # a fine-tuning head's, for any number of layers
_SITES_PER_LAYER = 3  # attention probabilities, its output, the layer's output


def embedding_lookup(
  input_ids, vocab_size, embedding_size=128, initializer_range=0.02,
  word_embedding_name="word_embeddings", use_one_hot_embeddings=False,
  slices=WHOLE,
):  # fmt: skip
  """(float [B, S, K * H], the table) for int ids [B, S, K], or [B, S].

  The table, [V, H], has this slice's rows only.
  """
  if input_ids.shape.ndims == 2:
    input_ids = tf.expand_dims(input_ids, -1)
  table = slices.get_variable(
    word_embedding_name, [vocab_size, embedding_size],
    layers.create_initializer(initializer_range), axis=0,
  )  # fmt: skip
  flat_ids = tf.reshape(input_ids, [-1])
  rows = table.shape[0]
  # A slice has zeros for the ids of others, and the group's sum is the lookup.
  if slices.size > 1:
    flat_ids -= slices.bounds(vocab_size)[0]
  if use_one_hot_embeddings:
    output = tf.matmul(tf.one_hot(flat_ids, rows), table)
  elif slices.size > 1:
    is_own = (flat_ids >= 0) & (flat_ids < rows)
    output = kernels.gather_rows(
      table, tf.where(is_own, flat_ids, tf.zeros_like(flat_ids))
    )
    output *= tf.cast(is_own, output.dtype)[:, tf.newaxis]
  else:
    output = kernels.gather_rows(table, flat_ids)
  output = slices.reduce_from_group(output)
  *outer, ids_per_position = get_shape_list(input_ids)
  output = tf.reshape(output, [*outer, ids_per_position * embedding_size])
  return output, table


def embedding_postprocessor(
  input_tensor, use_token_type=False, token_type_ids=None,
  token_type_vocab_size=16, token_type_embedding_name="token_type_embeddings",
  use_position_embeddings=True, position_embedding_name="position_embeddings",
  initializer_range=0.02, max_position_embeddings=512, dropout_prob=0.1,
  dropout_seed=None, policy=mixed_precision.FP32, position_ids=None,
  norm=layers.BERTS_NORM, position_offset=0,
):  # fmt: skip
  """Adds segment and position embeddings, then layer norm and dropout.

  The input is float [B, S, H], the result policy.attention [B, S, H]. Without
  `position_ids`, int [B, S], every row has 0 to S - 1. Position 0 has row
  `position_offset` of the table. `norm` may be None.
  ValueError if token_type_ids are missing, or S > max_position_embeddings
  without `position_ids`, whose examples are not longer.
  """
  batch_size, seq_length, width = get_shape_list(input_tensor, expected_rank=3)
  initializer = layers.create_initializer(initializer_range)
  table = functools.partial(tf.get_variable, initializer=initializer)
  output = tf.cast(input_tensor, policy.embeddings)
  if use_token_type:
    if token_type_ids is None:
      raise ValueError("use_token_type needs token_type_ids, which are None")
    type_table = table(
      token_type_embedding_name, [token_type_vocab_size, width]
    )
    # A table of few rows: the matmul's gradient beats a scatter's.
    one_hot = tf.one_hot(
      tf.reshape(token_type_ids, [-1]), token_type_vocab_size
    )
    type_output = tf.cast(tf.matmul(one_hot, type_table), policy.embeddings)
    output += tf.reshape(type_output, [batch_size, seq_length, width])
  if use_position_embeddings:
    # A length known only when the graph runs is checked by the slice itself.
    most = max_position_embeddings
    is_long = isinstance(seq_length, int) and seq_length > most
    if is_long and position_ids is None:
      raise ValueError(
        f"The sequence length {seq_length} is greater than "
        f"max_position_embeddings {most}"
      )
    if is_long:  # a row of several examples; what fills it up has no position
      position_ids = tf.minimum(position_ids, most - 1)
    rows = position_offset + max_position_embeddings
    position_table = table(position_embedding_name, [rows, width])
    if position_ids is None:  # [S, H], the same for all B
      positions = tf.slice(
        position_table, [position_offset, 0], [seq_length, width]
      )
    else:
      flat_ids = tf.reshape(position_ids + position_offset, [-1])
      positions = kernels.gather_rows(position_table, flat_ids)
      positions = tf.reshape(positions, [-1, seq_length, width])
    output += tf.cast(positions, policy.embeddings)
  if norm is not None:
    output = layer_norm(output, None, policy.embeddings, policy.attention, norm)
  seed = layers.dropout_site_seed(dropout_seed, _EMBEDDING_SITE)
  return layers.dropout(output, dropout_prob, seed)


class LayerWeights(NamedTuple):
  """A layer's weights as its matmuls read them: of their types."""

  groups: list[list[str]]  # scopes whose matrices stand side by side
  dense: dict[str, Weights]  # by the scope, or the first one of a group
  norms: list[tuple]  # gamma and beta, float32 [H], of both blocks


def layer_weights(config: LayerConfig, groups: list[list[str]]) -> LayerWeights:
  """Makes a layer's variables; `groups` are `_head_groups`."""
  bert, variables = config.bert, {}
  for layer in weights.dense_layers(bert):
    deviation = bert.initializer_range
    if bert.scaled_initializer and layer.cut == "inputs":  # it ends a block
      deviation /= math.sqrt(2 * bert.num_hidden_layers)
    kernel, bias = layers.dense_weights(
      layer.name, layer.inputs, layer.units,
      layers.create_initializer(deviation), config.slices, layer.cut,
      layer.has_bias,
    )  # fmt: skip
    if bias is not None:
      bias = tf.convert_to_tensor(bias)
    dtype = getattr(config.policy, layer.part)
    variables[layer.name] = tf.convert_to_tensor(kernel), bias, dtype
  norms = []
  for scope in ("attention/output", "output"):
    with tf.variable_scope(scope):
      norms.append(layers.norm_weights(bert.hidden_size, Norm.of(bert)))

  # For a GPU one program casts and joins all of them.
  rest = [[name] for name in variables if name not in sum(groups, [])]
  matrices, biases = [], []
  for group in [*groups, *rest]:
    kernel, bias, dtypes = zip(*map(variables.get, group), strict=True)
    matrices.append((kernel, dtypes[0]))
    if bias[0] is not None:
      biases.append((bias, tf.float32))
  joined = iter(kernels.side_by_side(*matrices, *biases))
  matrix_of = {name: next(joined) for name, *_ in [*groups, *rest]}
  read = {}
  for name, matrix in matrix_of.items():
    has_bias = variables[name][1] is not None
    read[name] = Weights(matrix, next(joined) if has_bias else None)
  return LayerWeights(groups, read, norms)


class Queries(NamedTuple):
  """The tokens that a layer computes; all tokens are their keys."""

  batch: int | tf.Tensor
  length: int | tf.Tensor  # of all tokens of a row
  positions: tf.Tensor | None  # int [B, P], of the queries; None: all tokens

  def rows(self, rows: tf.Tensor) -> tf.Tensor:
    """[B * P, H] of [B * S, H]."""
    if self.positions is None:
      return rows
    by_row = [self.batch, self.length, rows.shape.as_list()[-1]]
    return layers.gather_indexes(tf.reshape(rows, by_row), self.positions)

  def values(self, values: tf.Tensor) -> tf.Tensor:
    """[B, 1, P, ...] of [B or 1, 1, F, ...]; F = 1 stands for all tokens."""
    if self.positions is None or values.shape[2] == 1:
      return values
    if values.shape[0] == 1:
      return tf.gather(values[0, 0], self.positions)[:, tf.newaxis]
    return tf.gather(values, self.positions, axis=2, batch_dims=1)


def _head_groups(config: LayerConfig, has_positions: bool) -> list[list[str]]:
  """The scopes of queries, keys and values that each matmul computes."""
  query, key, value = weights.QUERY, weights.KEY, weights.VALUE
  # One matmul more is a launch more for a GPU, but fits a CPU's caches better.
  if not jit.saves_launches():
    return [[query], [key], [value]]
  bert = config.bert
  if bert.key_value_heads == bert.num_attention_heads and not has_positions:
    return [[query, key, value]]
  return [[query], [key, value]]  # queries are other rows, or more heads


def attention_block(
  hidden: tf.Tensor,
  residual: tf.Tensor,
  layer: LayerWeights,
  mask: Mask,
  queries: Queries,
  config: LayerConfig,
  seeds: list,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Self-attention of `hidden`, [B * S, H]; see `_add_and_norm`.

  Projects to heads, of which each slice has its part, and attends.
  """
  bert, slices = config.bert, config.slices
  query_rows = queries.rows(hidden)
  residual = query_rows if residual is hidden else queries.rows(residual)
  # Blocks have all tokens as queries, each with few scores; then those that
  # are read are taken.
  attending = queries._replace(positions=None) if mask.block else queries
  first, end = slices.bounds(bert.num_attention_heads)
  readers = bert.num_attention_heads // bert.key_value_heads
  with tf.name_scope("attention"):
    copied = slices.copy_to_group(hidden)
    # queries [B, N, F, D], keys and values [B, N / readers, S, D]
    heads: list = []
    for group in layer.groups:
      projection = layer.dense[group[0]]
      rows, length, count = copied, queries.length, end - first
      if group[0] != weights.QUERY:
        count //= readers
      elif attending.positions is not None:
        rows = slices.copy_to_group(query_rows)
        length = get_shape_list(attending.positions)[1]
      heads += kernels.split_heads(
        tf.matmul(rows, projection.kernel),
        projection.bias,
        parts=len(group),
        shape=(queries.batch, length, count),
      )
    query, key, value = heads
    if mask.rotary:
      query = kernels.rotate(query, *map(attending.values, mask.rotary))
      key = kernels.rotate(key, *mask.rotary)
    mask = mask._replace(bias=attending.values(mask.bias))
    context = attention(query, key, value, mask, config, seeds[0])
  if mask.block:
    context = queries.rows(context)
  with tf.variable_scope("attention/output"):
    kernel, bias = layer.dense[weights.ATTENDED]
    return _add_and_norm(
      tf.matmul(context, kernel), bias, residual, layer.norms[0],
      bert.dropout_after("attention_output"), seeds[1],
      config.policy.feed_forward, config, twice=True,
    )  # fmt: skip


def feed_forward_block(
  hidden: tf.Tensor,
  residual: tf.Tensor,
  layer: LayerWeights,
  config: LayerConfig,
  seed: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Two dense layers on `hidden`, [rows, H]; see `_add_and_norm`."""
  bert, policy = config.bert, config.policy
  copied = config.slices.copy_to_group(hidden)
  gate, gate_bias = None, None
  with tf.name_scope("intermediate"):
    kernel, wide_bias = layer.dense[weights.WIDE]
    wide = tf.matmul(copied, kernel)  # [rows, I / slices]
    if bert.gated:
      kernel, gate_bias = layer.dense[weights.GATE]
      gate = tf.matmul(copied, kernel)

  def narrow(wide, bias, gate, gate_bias, kernel):
    active = layers.activated(wide, bias, bert.hidden_act, policy.gelu)
    if gate_bias is not None:
      gate = kernels.add_bias(gate, gate_bias)
    return tf.matmul(active if gate is None else active * gate, kernel)

  kernel, bias = layer.dense[weights.NARROW]
  with tf.name_scope("output"):
    product = config.recomputing("gelu", narrow)(
      wide, wide_bias, gate, gate_bias, kernel
    )
  with tf.variable_scope("output"):
    return _add_and_norm(
      product, bias, residual, layer.norms[1], bert.hidden_dropout_prob, seed,
      policy.attention, config,
    )  # fmt: skip


def _add_and_norm(
  product, bias, residual, norm_variables, dropout_prob, seed, reader,
  config: LayerConfig, twice=False,
):  # fmt: skip
  """(a block's output as `reader`, the next block's residual), [rows, H] each.

  `product` is a slice's part of the block's last matmul, without its `bias`.
  """
  output = config.slices.reduce_from_group(product)
  seed, keep_prob = layers.dropout_arguments(dropout_prob, seed)
  dtype, types = config.policy.layer_norm, (output.dtype, residual.dtype)
  norm = dict(**Norm.of(config.bert).computed_in(dtype), store=reader)
  if config.bert.pre_layer_norm:
    # The residual is the sum before the norm, not after it.
    total, residual = kernels.dropout_and_add(
      output, residual, seed, bias, twice=True, keep_prob=keep_prob,
      dtype=dtype, types=types,
    )  # fmt: skip
    return kernels.layer_norm(total, *norm_variables, **norm), residual
  kernel: Callable = kernels.add_and_norm
  if "layer_norm" in config.recompute:
    kernel = functools.partial(kernels.invertible_add_and_norm, types=types)
  result = kernel(
    output, residual, *norm_variables, seed, bias, keep_prob=keep_prob,
    twice=twice, **norm,
  )  # fmt: skip
  # With `twice` they are two tensors, so that no op adds up their gradients.
  # A layer gives one, which google/bert's users may differentiate by.
  return result if twice else (result, result)


def transformer_layer(
  hidden: tf.Tensor,
  residual: tf.Tensor,
  mask: Mask,
  queries: Queries,
  config: LayerConfig,
  seeds: list,
) -> tuple[tf.Tensor, tf.Tensor]:
  """A layer's output, policy.attention, and the next layer's residual.

  Inputs are [B * S, H], results too, or [B * P, H] if `queries` are some of the
  tokens. `seeds` are those of the layer's dropout sites.
  """
  has_positions = queries.positions is not None and not mask.block
  layer = layer_weights(config, _head_groups(config, has_positions))
  hidden, residual = attention_block(
    hidden, residual, layer, mask, queries, config, seeds[:2]
  )
  return feed_forward_block(hidden, residual, layer, config, seeds[2])


def encoder_layers(
  input_tensor: tf.Tensor,
  residual: tf.Tensor | None,
  masks: tuple,
  config: LayerConfig,
  positions: tf.Tensor | None = None,
  dropout_seed: tf.Tensor | None = None,
) -> list:
  """Every layer's output, https://arxiv.org/abs/1706.03762 section 3.1.

  The input is float [B, S, H]; `residual` too, or None if it is the input.
  `masks` are (global layers', local layers'), see `attention.masks`. Outputs
  are policy.attention [B, S, H], the last layer's [B, P, H] with `positions`,
  int [B, P], where alone it is computed. `dropout_seed` is `hashed_seed`'s.
  """
  bert = config.bert
  input_shape = get_shape_list(input_tensor, expected_rank=3)
  batch, length, _ = input_shape
  outputs = [tf.cast(input_tensor, config.policy.attention)]
  if residual is not None:
    residual = layers.reshape_to_matrix(residual)
  global_mask, local_mask = masks
  count = _SITES_PER_LAYER
  seeds = layers.site_seeds(
    dropout_seed, _EMBEDDING_SITE + 1, count * bert.num_hidden_layers
  )
  for number in range(bert.num_hidden_layers):
    is_last = number == bert.num_hidden_layers - 1
    layer = functools.partial(
      transformer_layer,
      mask=local_mask if bert.is_local(number) else global_mask,
      queries=Queries(batch, length, positions if is_last else None),
      config=config,
      seeds=seeds[count * number : count * (number + 1)],
    )
    # Of what was reshaped, so that every reshape is used, also when only the
    # last layer's output is wanted.
    hidden = layers.reshape_to_matrix(outputs[-1])  # [B * S, H]
    if residual is None or not bert.pre_layer_norm:
      residual = hidden
    with tf.variable_scope("layer_%d" % number):
      hidden, residual = config.recomputing("layer", layer)(hidden, residual)
      shape = input_shape
      if is_last and positions is not None:
        shape = [*get_shape_list(positions), bert.hidden_size]
      outputs.append(layers.reshape_from_matrix(hidden, shape))
  return outputs[1:]


# What follows has google/bert's names and arguments.


def create_attention_mask_from_input_mask(from_tensor, to_mask):
  """float32 [B, F, T]: int `to_mask`, [B, T], for each of from_tensor's F."""
  from_shape = get_shape_list(from_tensor, expected_rank=[2, 3])
  batch_size, to_length = get_shape_list(to_mask, expected_rank=2)
  to_mask = tf.cast(tf.expand_dims(to_mask, 1), tf.float32)
  return tf.broadcast_to(to_mask, [batch_size, from_shape[1], to_length])


def attention_layer(
  from_tensor, to_tensor, attention_mask=None, num_attention_heads=1,
  size_per_head=512, query_act=None, key_act=None, value_act=None,
  attention_probs_dropout_prob=0.0, initializer_range=0.02,
  do_return_2d_tensor=False, batch_size=None, from_seq_length=None,
  to_seq_length=None,
):  # fmt: skip
  """`attention` by google/bert's arguments: float32 [B, F, N * D].

  Tensors of rank 2, [B * F, from width] and [B * T, to width], need batch_size
  and both lengths. With do_return_2d_tensor the result is [B * F, N * D].
  """
  from_shape = get_shape_list(from_tensor, expected_rank=[2, 3])
  to_shape = get_shape_list(to_tensor, expected_rank=[2, 3])
  if len(from_shape) != len(to_shape):
    raise ValueError(
      f"from_tensor is of rank {len(from_shape)}, to_tensor {len(to_shape)}"
    )
  if len(from_shape) == 3:
    batch_size, from_seq_length, _ = from_shape
    to_seq_length = to_shape[1]
  elif None in (batch_size, from_seq_length, to_seq_length):
    raise ValueError(
      "Tensors of rank 2 need batch_size, from_seq_length and to_seq_length"
    )
  width = num_attention_heads * size_per_head
  bert = BertConfig(
    vocab_size=0,
    hidden_size=width,
    num_attention_heads=num_attention_heads,
    attention_probs_dropout_prob=attention_probs_dropout_prob,
  )

  def heads(tensor, length, activation, name):
    """[B * length, from or to width] -> [B, N, length, D]"""
    initializer = layers.create_initializer(initializer_range)
    rows = layers.reshape_to_matrix(tensor)
    rows = layers.dense(rows, width, activation, initializer, name, tf.float32)
    shape = [batch_size, length, num_attention_heads, size_per_head]
    return tf.transpose(tf.reshape(rows, shape), [0, 2, 1, 3])

  context = attention(
    heads(from_tensor, from_seq_length, query_act, "query"),
    heads(to_tensor, to_seq_length, key_act, "key"),
    heads(to_tensor, to_seq_length, value_act, "value"),
    Mask(mask_bias(attention_mask, mixed_precision.FP32)),
    LayerConfig(bert),
  )
  if do_return_2d_tensor:
    return context
  return tf.reshape(context, [batch_size, from_seq_length, width])


def transformer_model(
  input_tensor, attention_mask=None, hidden_size=768, num_hidden_layers=12,
  num_attention_heads=12, intermediate_size=3072,
  intermediate_act_fn=kernels.gelu, hidden_dropout_prob=0.1,
  attention_probs_dropout_prob=0.1, initializer_range=0.02,
  do_return_all_layers=False,
):  # fmt: skip
  """`encoder_layers` by google/bert's arguments: the last output, or all."""
  bert = BertConfig(
    vocab_size=1,
    hidden_size=hidden_size,
    num_hidden_layers=num_hidden_layers,
    num_attention_heads=num_attention_heads,
    intermediate_size=intermediate_size,
    hidden_act=intermediate_act_fn,
    hidden_dropout_prob=hidden_dropout_prob,
    attention_probs_dropout_prob=attention_probs_dropout_prob,
    initializer_range=initializer_range,
  )
  bert.validate()
  mask = Mask(mask_bias(attention_mask, mixed_precision.FP32))
  outputs = encoder_layers(input_tensor, None, (mask, None), LayerConfig(bert))
  return outputs if do_return_all_layers else outputs[-1]
