"""The encoder's parts: embeddings, attention, the stack of layers.

Names, variable names and meaning are google/bert's
(https://github.com/google-research/bert); scripts find them in `modeling`,
whose shape legend holds here too.
"""

import functools
import math

import mixed_precision
from common.tensorflow_v1 import tf
from model import kernels
from model.layers import (
  add_and_norm,
  create_initializer,
  dense,
  dropout,
  dropout_and_add,
  dropout_arguments,
  dropout_site_seed,
  gelu,
  gelu_erf,
  get_shape_list,
  layer_norm,
  recomputed,
  reshape_from_matrix,
  reshape_to_matrix,
)
from model.tensor_parallel import WHOLE

# Added to the scores of masked positions: exp(-10000) is 0 in float32.
_MASKED_SCORE = -10000.0

# What need not stay in memory for the backward pass, because it is computed
# again there: the activation's result (I of each token), the scores and
# probabilities of attention (2 N S), the arguments of the layer norms (2 H; of
# post layer norms, from their results), or all that is inside a layer.
RECOMPUTE = ("gelu", "attention", "layer_norm", "layer")

# The numbers of the model's dropout call sites, see `dropout_site_seed`.
_EMBEDDING_SITE = 0
_HEAD_SITE = -1  # of a fine-tuning head, whatever the number of layers
_SITES_PER_LAYER = 3  # attention probabilities, its output, the layer's output


def head_dropout_seed(dropout_seed):
  """The seed of a fine-tuning head's dropout; see `dropout_site_seed`."""
  return dropout_site_seed(dropout_seed, _HEAD_SITE)


# -----------------------------------------------------------------------------
# Embeddings
# -----------------------------------------------------------------------------


def embedding_lookup(
  input_ids,
  vocab_size,
  embedding_size=128,
  initializer_range=0.02,
  word_embedding_name="word_embeddings",
  use_one_hot_embeddings=False,
  slices=WHOLE,
):
  """Word embeddings of ids.

  Args:
    input_ids: int [B, S], or [B, S, K] for K ids at a position.
    vocab_size: int, V.
    embedding_size: int, H.
    initializer_range: float, stddev of the table's initializer.
    word_embedding_name: name of the table's variable.
    use_one_hot_embeddings: bool; by a matmul with one-hot rows, not a gather.
    slices: a `tensor_parallel.Slices`.

  Returns:
    output: float [B, S, K * H], K = 1 for ids of rank 2.
    table: the variable [V, H], or this slice's rows of it.
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
  output = slices.leave(output)
  *outer, ids_per_position = get_shape_list(input_ids)
  output = tf.reshape(output, outer + [ids_per_position * embedding_size])
  return output, table


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
):
  """Adds segment and position embeddings; layer norm and dropout follow.

  Args:
    input_tensor: float [B, S, H], word embeddings.
    use_token_type: bool.
    token_type_ids: int [B, S]; needed with use_token_type.
    token_type_vocab_size: int, number of segment ids.
    token_type_embedding_name: name of the segment table's variable.
    use_position_embeddings: bool.
    position_embedding_name: name of the position table's variable.
    initializer_range: float, stddev of the tables' initializer.
    max_position_embeddings: int, rows of the position table.
    dropout_prob: float.
    dropout_seed: (optional) the model's seed, int32 or int64 [2].
    policy: a `mixed_precision.Policy`.
    position_ids: (optional) int [B, S], 0 to S - 1 in every row without it.

  Returns:
    policy.attention [B, S, H].

  Raises:
    ValueError: token_type_ids is missing, or S > max_position_embeddings.
  """
  batch_size, seq_length, width = get_shape_list(input_tensor, expected_rank=3)
  output = tf.cast(input_tensor, policy.embeddings)
  if use_token_type:
    if token_type_ids is None:
      raise ValueError("use_token_type needs token_type_ids, which are None")
    type_table = tf.get_variable(
      token_type_embedding_name,
      [token_type_vocab_size, width],
      initializer=create_initializer(initializer_range),
    )
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
    position_table = tf.get_variable(
      position_embedding_name,
      [max_position_embeddings, width],
      initializer=create_initializer(initializer_range),
    )
    if position_ids is None:
      # [S, H], broadcast over B
      positions = tf.slice(position_table, [0, 0], [seq_length, width])
    else:
      flat_ids = tf.reshape(position_ids, [-1])
      positions = kernels.gather_rows(position_table, flat_ids)
      positions = tf.reshape(positions, [batch_size, seq_length, width])
    output += tf.cast(positions, policy.embeddings)
  output = layer_norm(output, None, policy.embeddings, policy.attention)
  seed = dropout_site_seed(dropout_seed, _EMBEDDING_SITE)
  return dropout(output, dropout_prob, seed)


# -----------------------------------------------------------------------------
# Encoder
# -----------------------------------------------------------------------------


def create_attention_mask_from_input_mask(from_tensor, to_mask):
  """A mask that lets every position attend to those that `to_mask` marks.

  Args:
    from_tensor: [B, F, ...], only its shape is used.
    to_mask: int [B, T], 1 to attend to, 0 for padding.

  Returns:
    float32 [B, F, T].
  """
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
  dropout_seed=None,
  policy=mixed_precision.FP32,
  recompute=False,
  slices=WHOLE,
):
  """Multi-head attention, https://arxiv.org/abs/1706.03762 section 3.2.

  Args:
    from_tensor: float [B, F, from width], or [B * F, from width].
    to_tensor: float [B, T, to width], or [B * T, to width]; the same tensor for
      self-attention.
    attention_mask: (optional) [B, F, T], or [B, 1, T] to be the same for all F;
      1 to attend to a position, 0 not to.
    num_attention_heads: int, N.
    size_per_head: int, D.
    query_act: (optional) activation of the queries.
    key_act: (optional) activation of the keys.
    value_act: (optional) activation of the values.
    attention_probs_dropout_prob: float.
    initializer_range: float, stddev of the kernels' initializer.
    do_return_2d_tensor: bool.
    batch_size: B; needed with tensors of rank 2.
    from_seq_length: F; needed with tensors of rank 2.
    to_seq_length: T; needed with tensors of rank 2.
    dropout_seed: (optional) see `dropout`.
    policy: a `mixed_precision.Policy`.
    recompute: bool; compute scores and probabilities again in the backward pass
      instead of keeping them.
    slices: a `tensor_parallel.Slices`; each has N / slices of the heads, and
      below N is their number.

  Returns:
    policy.attention [B, F, N * D], or [B * F, N * D] with do_return_2d_tensor.

  Raises:
    ValueError: the tensors' ranks differ, or B, F or T is needed and missing.
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
      "Tensors of rank 2 need batch_size, from_seq_length and to_seq_length; "
      f"they are {batch_size}, {from_seq_length}, {to_seq_length}"
    )

  first_head, end_head = slices.bounds(num_attention_heads)
  own_heads = end_head - first_head

  def heads(tensor, length, activation, name):
    """[B * length, width] -> [B, N, length, D]"""
    tensor = dense(
      tensor,
      num_attention_heads * size_per_head,
      activation,
      create_initializer(initializer_range),
      name,
      policy.attention,
      slices,
      cut="units",
    )
    tensor = tf.reshape(tensor, [batch_size, length, own_heads, size_per_head])
    return tf.transpose(tensor, [0, 2, 1, 3])

  from_matrix = to_matrix = slices.enter(reshape_to_matrix(from_tensor))
  if to_tensor is not from_tensor:
    to_matrix = slices.enter(reshape_to_matrix(to_tensor))
  query = heads(from_matrix, from_seq_length, query_act, "query")
  key = heads(to_matrix, to_seq_length, key_act, "key")
  value = heads(to_matrix, to_seq_length, value_act, "value")
  if attention_mask is None:
    bias = tf.zeros([], policy.softmax)
  else:
    # [B, 1, F or 1, T], broadcast over N
    mask = tf.expand_dims(tf.cast(attention_mask, policy.softmax), 1)
    bias = (1.0 - mask) * _MASKED_SCORE
  seed, keep_prob = dropout_arguments(
    attention_probs_dropout_prob, dropout_seed
  )

  def attend(query, key, value):
    # scores, probs = [B, N, F, T]
    scores = tf.matmul(query, key, transpose_b=True)
    probs = kernels.attention_probs(
      scores,
      bias,
      seed,
      scale=1.0 / math.sqrt(size_per_head),
      keep_prob=keep_prob,
      dtype=policy.softmax,
      heads=(first_head, num_attention_heads) if slices.size > 1 else None,
    )
    return tf.matmul(probs, value)

  # context = [B, N, F, D] -> [B, F, N, D]
  context = _maybe_recomputed(recompute, attend, query, key, value)
  context = tf.transpose(context, [0, 2, 1, 3])
  width = own_heads * size_per_head
  if do_return_2d_tensor:
    return tf.reshape(context, [batch_size * from_seq_length, width])
  return tf.reshape(context, [batch_size, from_seq_length, width])


def transformer_model(
  input_tensor,
  attention_mask=None,
  hidden_size=768,
  num_hidden_layers=12,
  num_attention_heads=12,
  intermediate_size=3072,
  intermediate_act_fn=gelu,
  hidden_dropout_prob=0.1,
  attention_probs_dropout_prob=0.1,
  initializer_range=0.02,
  do_return_all_layers=False,
  dropout_seed=None,
  policy=mixed_precision.FP32,
  pre_layer_norm=False,
  recompute=(),
  slices=WHOLE,
):
  """The encoder's layers, https://arxiv.org/abs/1706.03762 section 3.1.

  Args:
    input_tensor: float [B, S, H].
    attention_mask: (optional) see `attention_layer`.
    hidden_size: int, H.
    num_hidden_layers: int.
    num_attention_heads: int, N.
    intermediate_size: int, I.
    intermediate_act_fn: function, the activation of the intermediate layer.
    hidden_dropout_prob: float, for the outputs of attention and of the layer.
    attention_probs_dropout_prob: float.
    initializer_range: float, stddev of the kernels' initializer.
    do_return_all_layers: bool.
    dropout_seed: (optional) the model's seed, int32 or int64 [2].
    policy: a `mixed_precision.Policy`.
    pre_layer_norm: bool; the residual is the sum before the layer norm, not the
      normalized one (https://arxiv.org/abs/2002.04745). The first residual is
      input_tensor, and the last layer norm is the final one, so that variables
      are the same.
    recompute: which of `RECOMPUTE` to compute again in the backward pass.
    slices: a `tensor_parallel.Slices`; each has I / slices of the intermediate
      layer and N / slices of the heads.

  Returns:
    policy.attention [B, S, H], or with do_return_all_layers the list of all
    layers'.

  Raises:
    ValueError: H is not a multiple of N, or input_tensor's width is not H.
  """
  if hidden_size % num_attention_heads:
    raise ValueError(
      f"The hidden size {hidden_size} is not a multiple of the number of "
      f"attention heads {num_attention_heads}"
    )
  input_shape = get_shape_list(input_tensor, expected_rank=3)
  batch_size, seq_length, width = input_shape
  if width != hidden_size:
    raise ValueError(
      f"The input is {width} wide, not the hidden size {hidden_size}"
    )
  sliced_dense = functools.partial(
    dense,
    kernel_initializer=create_initializer(initializer_range),
    slices=slices,
  )

  def end(output, residual, site, reader):
    """The end of a sub-layer: (what is read next, the next residual).

    All [B * S, H]: LayerNorm(dropout(output) + residual) as `reader`, and that
    itself, or the sum with pre_layer_norm.
    """
    seed = dropout_site_seed(dropout_seed, site)
    if pre_layer_norm:
      total = dropout_and_add(
        output, residual, hidden_dropout_prob, seed, policy.layer_norm
      )
      return layer_norm(total, None, policy.layer_norm, reader), total
    normalized = add_and_norm(
      output,
      residual,
      hidden_dropout_prob,
      seed,
      policy.layer_norm,
      reader,
      invertible="layer_norm" in recompute,
    )
    return normalized, normalized

  def activation(x):
    if intermediate_act_fn is None:
      return x
    if intermediate_act_fn in (gelu, gelu_erf):
      return intermediate_act_fn(x, policy.gelu)
    return mixed_precision.island(intermediate_act_fn, policy.gelu)(x)

  def transformer_layer(number, hidden, residual):
    """[B * S, H] and its residual, through one layer."""
    first_site = _EMBEDDING_SITE + 1 + _SITES_PER_LAYER * number
    with tf.variable_scope("attention"):
      with tf.variable_scope("self"):
        # [B * S, H]
        context = attention_layer(
          hidden,
          hidden,
          attention_mask,
          num_attention_heads,
          hidden_size // num_attention_heads,
          attention_probs_dropout_prob=attention_probs_dropout_prob,
          initializer_range=initializer_range,
          do_return_2d_tensor=True,
          batch_size=batch_size,
          from_seq_length=seq_length,
          to_seq_length=seq_length,
          dropout_seed=dropout_site_seed(dropout_seed, first_site),
          policy=policy,
          recompute="attention" in recompute,
          slices=slices,
        )
      with tf.variable_scope("output"):
        attended = sliced_dense(context, hidden_size, cut="inputs")
        attended, residual = end(
          attended, residual, first_site + 1, policy.feed_forward
        )
    with tf.variable_scope("intermediate"):
      # [B * S, I / slices]
      intermediate = sliced_dense(
        slices.enter(attended), intermediate_size, cut="units"
      )
    with tf.variable_scope("output"):
      output = lambda x: sliced_dense(activation(x), hidden_size, cut="inputs")
      hidden = _maybe_recomputed("gelu" in recompute, output, intermediate)
      return end(hidden, residual, first_site + 2, policy.attention)

  # Every layer's output is reshaped and the next layer takes it from there, so
  # that no reshape is without use when only the last layer's output is wanted.
  layers, residual = [input_tensor], None
  for number in range(num_hidden_layers):
    hidden = reshape_to_matrix(layers[-1])  # [B * S, H]
    if residual is None or not pre_layer_norm:
      residual = hidden
    with tf.variable_scope("layer_%d" % number):
      hidden, residual = _maybe_recomputed(
        "layer" in recompute,
        functools.partial(transformer_layer, number),
        hidden,
        residual,
      )
      layers.append(reshape_from_matrix(hidden, input_shape))
  return layers[1:] if do_return_all_layers else layers[-1]


def _maybe_recomputed(again: bool, function, *tensors):
  return recomputed(function, *tensors) if again else function(*tensors)
