"""Embeddings, attention and the stack of layers, named as google/bert's.

`modeling` exports them and explains the letters of shapes.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import mixed_precision
from common.tensorflow_v1 import tf
from config.bert_config import BertConfig
from model import kernels, weights
from model.attention import Span, attention, mask_bias
from model.layers import (
  BERTS_NORM,
  Norm,
  Weights,
  activated,
  create_initializer,
  dense,
  dense_weights,
  dropout,
  dropout_arguments,
  dropout_site_seed,
  gather_indexes,
  get_shape_list,
  layer_norm,
  norm_weights,
  normalized,
  recomputed,
  reshape_from_matrix,
  reshape_to_matrix,
  site_seeds,
)
from model.tensor_parallel import WHOLE, Slices
from xla_patches import jit

# What the backward pass can compute again instead of keeping it: the
# activation's result (I numbers for each token), the scores and probabilities
# of attention (2 N S), a post layer norm's arguments (2 H), or a whole layer.

# The numbers of the model's dropout call sites, see `dropout_site_seed`.
_EMBEDDING_SITE = 0
_HEAD_SITE = -1  # a fine-tuning head's, for any number of layers
_SITES_PER_LAYER = 3  # attention probabilities, its output, the layer's output


def head_dropout_seed(dropout_seed):
  """The seed of a fine-tuning head's dropout, of the model's."""
  return dropout_site_seed(dropout_seed, _HEAD_SITE)


def embedding_lookup(
  input_ids,
  vocab_size,
  embedding_size=128,
  initializer_range=0.02,
  word_embedding_name="word_embeddings",
  use_one_hot_embeddings=False,
  slices=WHOLE,
):
  """(float [B, S, K * H], the table) for int ids [B, S, K], or [B, S].

  The table, [V, H], has this slice's rows only.
  """
  if input_ids.shape.ndims == 2:
    input_ids = tf.expand_dims(input_ids, -1)
  table = slices.get_variable(
    word_embedding_name,
    [vocab_size, embedding_size],
    create_initializer(initializer_range),
    axis=0,
  )
  flat_ids = tf.reshape(input_ids, [-1])
  rows = table.shape[0]
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


def _positions(table, position_ids, seq_length, offset: int):
  """[B, S, H] of `position_ids`, [B, S]; of None [S, H], the same for all B."""
  width = table.shape[1]
  if position_ids is None:
    return tf.slice(table, [offset, 0], [seq_length, width])
  flat_ids = tf.reshape(position_ids + offset, [-1])
  positions = kernels.gather_rows(table, flat_ids)
  return tf.reshape(positions, [-1, seq_length, width])


def embedding_postprocessor(
  input_tensor,
  use_token_type=False,
  token_type_ids=None,
  token_type_vocab_size=16,
  token_type_embedding_name="token_type_embeddings",
  use_position_embeddings=True,
  position_embedding_name="position_embeddings",
  initializer_range=0.02,
  max_position_embeddings=512,
  dropout_prob=0.1,
  dropout_seed=None,
  policy=mixed_precision.FP32,
  position_ids=None,
  norm=BERTS_NORM,
  position_offset=0,
):
  """Adds segment and position embeddings, then layer norm and dropout.

  The input is float [B, S, H], the result policy.attention [B, S, H]. Without
  `position_ids`, int [B, S], every row has 0 to S - 1. Position 0 has row
  `position_offset` of the table. `norm` may be None.
  ValueError if token_type_ids are missing or S > max_position_embeddings.
  """
  batch_size, seq_length, width = get_shape_list(input_tensor, expected_rank=3)
  initializer = create_initializer(initializer_range)
  table = lambda name, rows: tf.get_variable(
    name, [rows, width], initializer=initializer
  )
  output = tf.cast(input_tensor, policy.embeddings)
  if use_token_type:
    if token_type_ids is None:
      raise ValueError("use_token_type needs token_type_ids, which are None")
    type_table = table(token_type_embedding_name, token_type_vocab_size)
    # A table of few rows: the matmul's gradient beats a scatter's.
    one_hot = tf.one_hot(
      tf.reshape(token_type_ids, [-1]), token_type_vocab_size
    )
    type_output = tf.cast(tf.matmul(one_hot, type_table), policy.embeddings)
    output += tf.reshape(type_output, [batch_size, seq_length, width])
  if use_position_embeddings:
    # A length known only when the graph runs is checked by the slice itself.
    if isinstance(seq_length, int) and seq_length > max_position_embeddings:
      raise ValueError(
        f"The sequence length {seq_length} is greater than "
        f"max_position_embeddings {max_position_embeddings}"
      )
    rows = position_offset + max_position_embeddings
    position_table = table(position_embedding_name, rows)
    positions = _positions(
      position_table, position_ids, seq_length, position_offset
    )
    output += tf.cast(positions, policy.embeddings)
  if norm is not None:
    output = layer_norm(output, None, policy.embeddings, policy.attention, norm)
  seed = dropout_site_seed(dropout_seed, _EMBEDDING_SITE)
  return dropout(output, dropout_prob, seed)


@dataclasses.dataclass(frozen=True)
class LayerConfig:
  """A layer, and how this run computes it; a slice has N / slices heads."""

  bert: BertConfig
  policy: mixed_precision.Policy = mixed_precision.FP32
  recompute: tuple = ()  # names of `execution.RECOMPUTE`
  slices: Slices = WHOLE

  @property
  def own_heads(self):
    """(first, all) of a slice's heads, None where it has all."""
    count = self.bert.num_attention_heads
    whole = self.slices.size == 1
    return None if whole else (self.slices.bounds(count)[0], count)

  def run(self, name, function, *tensors):
    """function(*tensors), which may be None, recomputed if `recompute` says."""
    again = name in self.recompute
    return recomputed(function, *tensors) if again else function(*tensors)


def _layer_variables(config) -> dict:
  """Scope -> float32 `Weights` of a layer's matmuls."""
  bert, variables = config.bert, {}
  for layer in weights.dense_layers(bert):
    deviation = bert.initializer_range
    if bert.scaled_initializer and layer.cut == "inputs":  # it ends a block
      deviation /= math.sqrt(2 * bert.num_hidden_layers)
    kernel, bias = dense_weights(
      layer.name, layer.inputs, layer.units, create_initializer(deviation),
      config.slices, layer.cut, layer.has_bias,
    )  # fmt: skip
    if bias is not None:
      bias = tf.convert_to_tensor(bias)
    variables[layer.name] = Weights(tf.convert_to_tensor(kernel), bias)
  return variables


def _layer_weights(variables, config, groups) -> dict:
  """Scope -> `Weights` as a layer's matmuls read them: of their types.

  `groups` are lists of scopes whose matrices stand side by side, because one
  matmul reads them; they are under the name of the first.
  """
  alone = {
    layer.name: (*variables[layer.name], getattr(config.policy, layer.part))
    for layer in weights.dense_layers(config.bert)
  }
  grouped = {name for group in groups for name in group}
  groups = [*groups, *([name] for name in alone if name not in grouped)]
  matrices, biases, biased = [], [], []
  for group in groups:
    kernel, bias, dtypes = zip(*(alone[name] for name in group), strict=True)
    matrices.append((kernel, dtypes[0]))
    if bias[0] is not None:
      biases.append((bias, tf.float32))
      biased.append(group[0])
  joined = kernels.side_by_side(*matrices, *biases)
  count = len(groups)
  bias_of = dict(zip(biased, joined[count:], strict=True))
  layer = {}
  for (first, *_), kernel in zip(groups, joined[:count], strict=True):
    layer[first] = Weights(kernel, bias_of.get(first))
  return layer


class _Tokens(NamedTuple):
  """The tokens of a layer: all are attended to, some are asked for."""

  batch: int | tf.Tensor
  length: int | tf.Tensor
  places: tf.Tensor | None  # int [B, P], of those asked for; None: all

  def asked(self, rows):
    """[B * P, H] of [B * S, H]."""
    if self.places is None:
      return rows
    by_row = [self.batch, self.length, rows.shape.as_list()[-1]]
    return gather_indexes(tf.reshape(rows, by_row), self.places)

  def asked_of(self, values):
    """[B, 1, P, ...] of [B or 1, 1, F, ...]; of F = 1 all tokens', as it is."""
    if self.places is None or values.shape[2] == 1:
      return values
    if values.shape[0] == 1:
      return tf.gather(values[0, 0], self.places)[:, tf.newaxis]
    return tf.gather(values, self.places, axis=2, batch_dims=1)


def _head_groups(config, tokens) -> list:
  """What one matmul makes of queries, keys and values.

  Each matmul more is a launch for a GPU, and a smaller one for a CPU's caches.
  """
  query, key, value = weights.QUERY, weights.KEY, weights.VALUE
  if not jit.saves_launches():
    return [[query], [key], [value]]
  bert = config.bert
  if tokens.places is None and bert.key_value_heads == bert.num_attention_heads:
    return [[query, key, value]]
  return [[query], [key, value]]  # of other rows, or of fewer heads


def _self_attention(hidden, queries, span, tokens, layer, config, seed):
  """The context, [rows of queries, N * D / slices], of `hidden`, [B * S, H].

  Projects to heads, of which each slice has its part, and attends; `layer` is
  `_layer_weights`' dictionary.
  """
  bert = config.bert
  first, end = config.slices.bounds(bert.num_attention_heads)
  copied = config.slices.copy_to_group(hidden)
  readers = bert.num_attention_heads // bert.key_value_heads
  heads = []  # queries [B, N, F, D], keys and values [B, N / readers, S, D]
  for group in _head_groups(config, tokens):
    rows, length, count = copied, tokens.length, end - first
    if group[0] != weights.QUERY:
      count //= readers
    elif tokens.places is not None:
      rows = config.slices.copy_to_group(queries)
      length = get_shape_list(tokens.places)[1]
    heads += kernels.split_heads(
      tf.matmul(rows, layer[group[0]].kernel),
      layer[group[0]].bias,
      parts=len(group),
      shape=(tokens.batch, length, count),
    )
  if span.turns:
    query, key, value = heads
    query = kernels.turn(query, *map(tokens.asked_of, span.turns))
    heads = [query, kernels.turn(key, *span.turns), value]
  span = span._replace(bias=tokens.asked_of(span.bias))
  return attention(*heads, span, config, seed)


def _feed_forward(hidden, layer, config):
  """The product of the second matmul, [rows, H], without its bias."""
  copied = config.slices.copy_to_group(hidden)
  inner, outer = layer[weights.WIDE], layer[weights.NARROW]
  gate, gate_bias = None, None
  with tf.name_scope("intermediate"):
    # [rows, I / slices]
    wide = tf.matmul(copied, inner.kernel)
    if config.bert.gated:
      gate_kernel, gate_bias = layer[weights.GATE]
      gate = tf.matmul(copied, gate_kernel)

  def product(wide, bias, gate, gate_bias, kernel):
    active = activated(wide, bias, config.bert.hidden_act, config.policy.gelu)
    if gate_bias is not None:
      gate = kernels.add_bias(gate, gate_bias)
    return tf.matmul(active if gate is None else active * gate, kernel)

  with tf.name_scope("output"):
    return config.run(
      "gelu", product, wide, inner.bias, gate, gate_bias, outer.kernel
    )


def _end_of_block(
  product, bias, residual, variables, dropout_prob, seed, reader, config,
  twice=False,
):  # fmt: skip
  """What is read next, as `reader`, and the next residual, both [B * S, H].

  `product` is a slice's part of a matmul without its `bias`. The results are
  one tensor, of which a gradient can be asked; with `twice` they are two, and
  no op adds up their gradients.
  """
  output = config.slices.reduce_from_group(product)
  seed, keep_prob = dropout_arguments(dropout_prob, seed)
  dtype, norm = config.policy.layer_norm, Norm.of(config.bert)
  static = dict(keep_prob=keep_prob, dtype=dtype)
  types = dict(types=(output.dtype, residual.dtype))
  if config.bert.pre_layer_norm:
    total, residual = kernels.dropout_and_add(
      output, residual, seed, bias, twice=True, **static, **types
    )
    types = dict(dtype=dtype, store_dtype=reader)
    kernel = kernels.layer_norm
    return normalized(kernel, [total], variables, norm=norm, **types), residual
  kernel = kernels.add_and_norm
  if "layer_norm" in config.recompute:
    kernel, static = kernels.invertible_add_and_norm, static | types
  result = normalized(
    kernel,
    [output, residual],
    variables,
    seed,
    bias,
    norm=norm,
    store_dtype=reader,
    twice=twice,
    **static,
  )
  return result if twice else (result, result)


def transformer_layer(hidden, residual, span, tokens, config, seeds):
  """A layer's output, and the next layer's residual, of the tokens asked for.

  All are [B * S, H], or [B * P, H] with places; the output is policy.attention.
  `seeds` are those of the layer's dropout sites.
  """
  # Blocks are of all tokens, and each has few scores.
  attending = tokens._replace(places=None) if span.block else tokens
  variables, norms = _layer_variables(config), []
  for scope in ("attention/output", "output"):
    with tf.variable_scope(scope):
      norm = norm_weights(config.bert.hidden_size, Norm.of(config.bert))
      norms.append(norm)
  groups = _head_groups(config, attending)
  layer = _layer_weights(variables, config, groups)
  policy = config.policy
  queries = tokens.asked(hidden)
  residual = queries if residual is hidden else tokens.asked(residual)
  with tf.name_scope("attention"):
    context = _self_attention(
      hidden, queries, span, attending, layer, config, seeds[0]
    )
  if span.block:
    context = tokens.asked(context)
  with tf.variable_scope("attention/output"):
    output = layer[weights.ATTENDED]
    attended, residual = _end_of_block(
      tf.matmul(context, output.kernel),
      output.bias,
      residual,
      norms[0],
      config.bert.dropout_after("attention_output"),
      seeds[1],
      policy.feed_forward,
      config,
      twice=True,
    )
  product = _feed_forward(attended, layer, config)
  with tf.variable_scope("output"):
    return _end_of_block(
      product,
      layer[weights.NARROW].bias,
      residual,
      norms[1],
      config.bert.hidden_dropout_prob,
      seeds[2],
      policy.attention,
      config,
    )


def encoder_layers(
  input_tensor, residual, spans, config, places=None, dropout_seed=None
):
  """Every layer's output, https://arxiv.org/abs/1706.03762 section 3.1.

  The input is float [B, S, H], and so is the first `residual`, if it is not the
  same tensor but None; `spans` are of layers that attend to all tokens, and of
  the others. The outputs are policy.attention [B, S, H]; of the last layer
  [B, P, H] with `places`, int [B, P], where alone it is wanted. `dropout_seed`
  is of `hashed_seed`.
  """
  bert = config.bert
  input_shape = get_shape_list(input_tensor, expected_rank=3)
  # The next layer reads what was reshaped, so every reshape is used, also when
  # only the last layer's output is wanted.
  layers = [tf.cast(input_tensor, config.policy.attention)]
  if residual is not None:
    residual = reshape_to_matrix(residual)
  everywhere, near = spans
  count = _SITES_PER_LAYER
  seeds = site_seeds(
    dropout_seed, _EMBEDDING_SITE + 1, count * bert.num_hidden_layers
  )
  for number in range(bert.num_hidden_layers):
    is_last = number == bert.num_hidden_layers - 1
    layer = functools.partial(
      transformer_layer,
      span=near if bert.is_local(number) else everywhere,
      tokens=_Tokens(*input_shape[:2], places if is_last else None),
      config=config,
      seeds=seeds[count * number : count * (number + 1)],
    )
    hidden = reshape_to_matrix(layers[-1])  # [B * S, H]
    if residual is None or not bert.pre_layer_norm:
      residual = hidden
    with tf.variable_scope("layer_%d" % number):
      hidden, residual = config.run("layer", layer, hidden, residual)
      shape = input_shape
      if is_last and places is not None:
        shape = [*get_shape_list(places), bert.hidden_size]
      layers.append(reshape_from_matrix(hidden, shape))
  return layers[1:]


# What follows has google/bert's names and arguments.


def create_attention_mask_from_input_mask(from_tensor, to_mask):
  """float32 [B, F, T]: int `to_mask`, [B, T], for each of from_tensor's F."""
  from_shape = get_shape_list(from_tensor, expected_rank=[2, 3])
  batch_size, to_length = get_shape_list(to_mask, expected_rank=2)
  to_mask = tf.cast(tf.expand_dims(to_mask, 1), tf.float32)
  return tf.broadcast_to(to_mask, [batch_size, from_shape[1], to_length])


def attention_layer(
  from_tensor,
  to_tensor,
  attention_mask=None,
  num_attention_heads=1,
  size_per_head=512,
  query_act=None,
  key_act=None,
  value_act=None,
  attention_probs_dropout_prob=0.0,
  initializer_range=0.02,
  do_return_2d_tensor=False,
  batch_size=None,
  from_seq_length=None,
  to_seq_length=None,
):
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
    initializer = create_initializer(initializer_range)
    rows = reshape_to_matrix(tensor)
    rows = dense(rows, width, activation, initializer, name, tf.float32)
    shape = [batch_size, length, num_attention_heads, size_per_head]
    return tf.transpose(tf.reshape(rows, shape), [0, 2, 1, 3])

  context = attention(
    heads(from_tensor, from_seq_length, query_act, "query"),
    heads(to_tensor, to_seq_length, key_act, "key"),
    heads(to_tensor, to_seq_length, value_act, "value"),
    Span(mask_bias(attention_mask, mixed_precision.FP32)),
    LayerConfig(bert),
  )
  if do_return_2d_tensor:
    return context
  return tf.reshape(context, [batch_size, from_seq_length, width])


def transformer_model(
  input_tensor,
  attention_mask=None,
  hidden_size=768,
  num_hidden_layers=12,
  num_attention_heads=12,
  intermediate_size=3072,
  intermediate_act_fn=kernels.gelu,
  hidden_dropout_prob=0.1,
  attention_probs_dropout_prob=0.1,
  initializer_range=0.02,
  do_return_all_layers=False,
):
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
  span = Span(mask_bias(attention_mask, mixed_precision.FP32))
  layers = encoder_layers(input_tensor, None, (span, None), LayerConfig(bert))
  return layers if do_return_all_layers else layers[-1]
