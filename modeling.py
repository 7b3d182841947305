"""BERT: configuration, encoder, pre-training heads and their losses.

Public names, variable names and meaning are google/bert's
(https://github.com/google-research/bert, modeling.py and run_pretraining.py),
so that its checkpoints load and scripts written for it run. Shape legend:

  B  batch size                        N  attention heads
  S  sequence length                   D  size of a head; N * D = H
  F  sequence length attended from     H  hidden size
  T  sequence length attended to       I  intermediate (feed-forward) size
  P  masked positions of an example    V  vocabulary size
"""

import collections
import copy
import math
import re
from typing import NamedTuple

from bert_config import BertConfig
from layers import (
  assert_rank,
  create_initializer,
  dense,
  dropout,
  dropout_site_seed,
  gather_rows,
  gelu,
  get_activation,
  get_shape_list,
  layer_norm,
  layer_norm_and_dropout,
  reshape_from_matrix,
  reshape_to_matrix,
)
from tensorflow_v1 import tf

__all__ = [
  "BertConfig",
  "BertModel",
  "PretrainingBatch",
  "PretrainingSums",
  "assert_rank",
  "attention_layer",
  "create_attention_mask_from_input_mask",
  "create_initializer",
  "dropout",
  "embedding_lookup",
  "embedding_postprocessor",
  "gather_indexes",
  "gelu",
  "get_activation",
  "get_assignment_map_from_checkpoint",
  "get_masked_lm_output",
  "get_next_sentence_output",
  "get_shape_list",
  "layer_norm",
  "layer_norm_and_dropout",
  "pretraining_model",
  "reshape_from_matrix",
  "reshape_to_matrix",
  "transformer_model",
]

# Added to the scores of masked positions: exp(-10000) is 0 in float32.
_MASKED_SCORE = -10000.0


class BertModel:
  """The encoder of https://arxiv.org/abs/1810.04805 with its pooler."""

  def __init__(
    self,
    config,
    is_training,
    input_ids,
    input_mask=None,
    token_type_ids=None,
    use_one_hot_embeddings=False,
    scope=None,
    dropout_seed=None,
  ):
    """Builds the graph.

    Args:
      config: BertConfig.
      is_training: bool; False switches all dropout off.
      input_ids: int [B, S].
      input_mask: (optional) int or float [B, S], 1 for tokens to attend to, 0
        for padding; all are attended to without it.
      token_type_ids: (optional) int [B, S], segment ids, 0 without it.
      use_one_hot_embeddings: bool; look words up by a matmul with one-hot rows.
      scope: (optional) variable scope, "bert" without it.
      dropout_seed: (optional) int32 or int64 [2]. Given, all dropout is a pure
        function of it and of the call site (see `layers.keep_mask`);
        otherwise it draws from TensorFlow's stateful generators.

    Raises:
      ValueError: the configuration is impossible, a tensor has another rank, or
        the sequence is longer than max_position_embeddings.
    """
    config = copy.deepcopy(config)
    config.validate()
    if not is_training:
      config.hidden_dropout_prob = 0.0
      config.attention_probs_dropout_prob = 0.0
    batch_size, seq_length = get_shape_list(input_ids, expected_rank=2)
    if token_type_ids is None:
      token_type_ids = tf.zeros([batch_size, seq_length], tf.int32)
    attention_mask = None
    if input_mask is not None:
      get_shape_list(input_mask, expected_rank=2)
      # [B, 1, T]: broadcast over F, which a mask of padding does not depend on.
      attention_mask = tf.expand_dims(input_mask, 1)

    with tf.variable_scope(scope, default_name="bert"):
      with tf.variable_scope("embeddings"):
        embedding_output, self.embedding_table = embedding_lookup(
          input_ids,
          config.vocab_size,
          config.hidden_size,
          config.initializer_range,
          use_one_hot_embeddings=use_one_hot_embeddings,
        )
        # [B, S, H]
        self.embedding_output = embedding_postprocessor(
          embedding_output,
          use_token_type=True,
          token_type_ids=token_type_ids,
          token_type_vocab_size=config.type_vocab_size,
          initializer_range=config.initializer_range,
          max_position_embeddings=config.max_position_embeddings,
          dropout_prob=config.hidden_dropout_prob,
          dropout_seed=_site_seed(dropout_seed, 0),
        )
      with tf.variable_scope("encoder"):
        self.all_encoder_layers = transformer_model(
          self.embedding_output,
          attention_mask,
          config.hidden_size,
          config.num_hidden_layers,
          config.num_attention_heads,
          config.intermediate_size,
          get_activation(config.hidden_act),
          config.hidden_dropout_prob,
          config.attention_probs_dropout_prob,
          config.initializer_range,
          do_return_all_layers=True,
          dropout_seed=dropout_seed,
        )
      # [B, S, H]
      self.sequence_output = self.all_encoder_layers[-1]
      with tf.variable_scope("pooler"):
        # The first token is [CLS]. pooled_output = [B, H]
        self.pooled_output = dense(
          self.sequence_output[:, 0, :],
          config.hidden_size,
          tf.tanh,
          create_initializer(config.initializer_range),
        )

  def get_pooled_output(self):
    """float [B, H]: the first token's output through a dense layer, tanh."""
    return self.pooled_output

  def get_sequence_output(self):
    """float [B, S, H]: the last layer's output."""
    return self.sequence_output

  def get_all_encoder_layers(self):
    """List of float [B, S, H]: every layer's output, the first layer first."""
    return self.all_encoder_layers

  def get_embedding_output(self):
    """float [B, S, H]: the input of the first layer."""
    return self.embedding_output

  def get_embedding_table(self):
    """The word embeddings, a variable [V, H]."""
    return self.embedding_table


def _site_seed(dropout_seed, site):
  """`dropout_site_seed`, or None without a seed.

  Sites: 0 the embeddings; 1 + 3 l, 2 + 3 l and 3 + 3 l the attention
  probabilities, the attention output and the layer output of layer l.
  """
  if dropout_seed is None:
    return None
  return dropout_site_seed(dropout_seed, site)


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
):
  """Word embeddings of ids.

  Args:
    input_ids: int [B, S], or [B, S, K] for K ids at a position.
    vocab_size: int, V.
    embedding_size: int, H.
    initializer_range: float, stddev of the table's initializer.
    word_embedding_name: name of the table's variable.
    use_one_hot_embeddings: bool; by a matmul with one-hot rows, not a gather.

  Returns:
    output: float [B, S, K * H], K = 1 for ids of rank 2.
    table: the variable [V, H].
  """
  if input_ids.shape.ndims == 2:
    input_ids = tf.expand_dims(input_ids, -1)
  table = tf.get_variable(
    word_embedding_name,
    [vocab_size, embedding_size],
    initializer=create_initializer(initializer_range),
  )
  flat_ids = tf.reshape(input_ids, [-1])
  if use_one_hot_embeddings:
    output = tf.matmul(tf.one_hot(flat_ids, vocab_size), table)
  else:
    output = gather_rows(table, flat_ids)
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
    dropout_seed: (optional) see `dropout`.

  Returns:
    float [B, S, H].

  Raises:
    ValueError: token_type_ids is missing, or S > max_position_embeddings.
  """
  batch_size, seq_length, width = get_shape_list(input_tensor, expected_rank=3)
  output = input_tensor
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
    type_output = tf.matmul(one_hot, type_table)
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
    # [S, H], broadcast over B
    output += tf.slice(position_table, [0, 0], [seq_length, width])
  return layer_norm_and_dropout(output, dropout_prob, seed=dropout_seed)


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

  Returns:
    float [B, F, N * D], or [B * F, N * D] with do_return_2d_tensor.

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

  def heads(tensor, length, activation, name):
    """[B * length, width] -> [B, N, length, D]"""
    width = num_attention_heads * size_per_head
    initializer = create_initializer(initializer_range)
    tensor = dense(tensor, width, activation, initializer, name)
    tensor = tf.reshape(
      tensor, [batch_size, length, num_attention_heads, size_per_head]
    )
    return tf.transpose(tensor, [0, 2, 1, 3])

  from_matrix = reshape_to_matrix(from_tensor)
  to_matrix = reshape_to_matrix(to_tensor)
  query = heads(from_matrix, from_seq_length, query_act, "query")
  key = heads(to_matrix, to_seq_length, key_act, "key")
  value = heads(to_matrix, to_seq_length, value_act, "value")
  # scores, probs = [B, N, F, T]
  scores = tf.matmul(query, key, transpose_b=True)
  scores = tf.cast(scores, tf.float32) * (1.0 / math.sqrt(size_per_head))
  if attention_mask is not None:
    # [B, 1, F or 1, T], broadcast over N
    mask = tf.expand_dims(tf.cast(attention_mask, tf.float32), 1)
    scores += (1.0 - mask) * _MASKED_SCORE
  probs = tf.cast(tf.nn.softmax(scores), value.dtype)
  probs = dropout(probs, attention_probs_dropout_prob, dropout_seed)
  # context = [B, N, F, D] -> [B, F, N, D]
  context = tf.transpose(tf.matmul(probs, value), [0, 2, 1, 3])
  width = num_attention_heads * size_per_head
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

  Returns:
    float [B, S, H], or with do_return_all_layers the list of all layers'.

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
  initializer = create_initializer(initializer_range)

  def add_and_norm(output, residual, site):
    """LayerNorm(dropout(output) + residual), all [B * S, H]"""
    seed = _site_seed(dropout_seed, site)
    return layer_norm(dropout(output, hidden_dropout_prob, seed) + residual)

  # Every layer's output is reshaped and the next layer takes it from there, so
  # that no reshape is without use when only the last layer's output is wanted.
  layers = [input_tensor]
  for layer in range(num_hidden_layers):
    hidden = reshape_to_matrix(layers[-1])  # [B * S, H]
    with tf.variable_scope("layer_%d" % layer):
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
            dropout_seed=_site_seed(dropout_seed, 1 + 3 * layer),
          )
        with tf.variable_scope("output"):
          attended = dense(context, hidden_size, None, initializer)
          attended = add_and_norm(attended, hidden, 2 + 3 * layer)
      with tf.variable_scope("intermediate"):
        # [B * S, I]
        intermediate = dense(
          attended, intermediate_size, intermediate_act_fn, initializer
        )
      with tf.variable_scope("output"):
        hidden = dense(intermediate, hidden_size, None, initializer)
        hidden = add_and_norm(hidden, attended, 3 + 3 * layer)
      layers.append(reshape_from_matrix(hidden, input_shape))
  return layers[1:] if do_return_all_layers else layers[-1]


# -----------------------------------------------------------------------------
# Pre-training heads and losses
# -----------------------------------------------------------------------------


def gather_indexes(sequence_tensor, positions):
  """The vectors at some positions of each sequence.

  Args:
    sequence_tensor: float [B, S, H].
    positions: int [B, P].

  Returns:
    float [B * P, H].
  """
  batch_size, seq_length, width = get_shape_list(sequence_tensor, 3)
  starts = tf.range(batch_size, dtype=positions.dtype) * seq_length
  rows = tf.reshape(positions + starts[:, tf.newaxis], [-1])
  return gather_rows(tf.reshape(sequence_tensor, [-1, width]), rows)


def _masked_lm_logits(bert_config, input_tensor, output_weights, positions):
  """float32 [B * P, V]; arguments as of `get_masked_lm_output`."""
  hidden = gather_indexes(input_tensor, positions)
  with tf.variable_scope("cls/predictions"):
    with tf.variable_scope("transform"):
      hidden = dense(
        hidden,
        bert_config.hidden_size,
        get_activation(bert_config.hidden_act),
        create_initializer(bert_config.initializer_range),
      )
      hidden = layer_norm(hidden)
    bias = tf.get_variable(
      "output_bias",
      [bert_config.vocab_size],
      initializer=tf.zeros_initializer(),
    )
    logits = tf.matmul(hidden, output_weights, transpose_b=True)
    return tf.nn.bias_add(tf.cast(logits, tf.float32), bias)


def _next_sentence_logits(bert_config, input_tensor):
  """float32 [B, 2]; arguments as of `get_next_sentence_output`."""
  with tf.variable_scope("cls/seq_relationship"):
    weights = tf.get_variable(
      "output_weights",
      [2, bert_config.hidden_size],
      initializer=create_initializer(bert_config.initializer_range),
    )
    bias = tf.get_variable(
      "output_bias", [2], initializer=tf.zeros_initializer()
    )
    logits = tf.matmul(input_tensor, weights, transpose_b=True)
    return tf.nn.bias_add(tf.cast(logits, tf.float32), bias)


def _cross_entropy(logits, labels):
  """float32 [n]: -log softmax(logits)[label], of [n, classes] and int [n]."""
  # The fused kernel itself: tf.nn's wrapper adds a Shape that nothing uses.
  return tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(
    features=logits, labels=labels
  ).loss


def get_masked_lm_output(
  bert_config, input_tensor, output_weights, positions, label_ids, label_weights
):
  """The masked LM head and its loss.

  Args:
    bert_config: BertConfig.
    input_tensor: float [B, S, H], the sequence output.
    output_weights: [V, H], the embedding table.
    positions: int [B, P], the masked positions.
    label_ids: int [B, P], the tokens that stood there.
    label_weights: float [B, P], 1 for masked positions, 0 for padding.

  Returns:
    loss: float32 scalar, the weighted mean over the masked positions.
    per_example_loss: float32 [B * P], without the weights.
    log_probs: float32 [B * P, V].
  """
  logits = _masked_lm_logits(
    bert_config, input_tensor, output_weights, positions
  )
  per_example_loss = _cross_entropy(logits, tf.reshape(label_ids, [-1]))
  weights = tf.reshape(label_weights, [-1])
  # google/bert's guard against a batch without masked positions.
  loss = tf.reduce_sum(weights * per_example_loss) / (
    tf.reduce_sum(weights) + 1e-5
  )
  return loss, per_example_loss, tf.nn.log_softmax(logits)


def get_next_sentence_output(bert_config, input_tensor, labels):
  """The next-sentence head and its loss.

  Args:
    bert_config: BertConfig.
    input_tensor: float [B, H], the pooled output.
    labels: int [B] or [B, 1], 0 for the true next segment, 1 for another.

  Returns:
    loss: float32 scalar, the mean.
    per_example_loss: float32 [B].
    log_probs: float32 [B, 2].
  """
  logits = _next_sentence_logits(bert_config, input_tensor)
  per_example_loss = _cross_entropy(logits, tf.reshape(labels, [-1]))
  loss = tf.reduce_mean(per_example_loss)
  return loss, per_example_loss, tf.nn.log_softmax(logits)


class PretrainingBatch(NamedTuple):
  """One rank's micro-batch; int32 or int64 where not said otherwise."""

  input_ids: tf.Tensor  # [B, S]
  input_mask: tf.Tensor  # [B, S], 1 for tokens, 0 for padding
  segment_ids: tf.Tensor  # [B, S]
  masked_lm_positions: tf.Tensor  # [B, P]
  masked_lm_ids: tf.Tensor  # [B, P]
  masked_lm_weights: tf.Tensor  # float32 [B, P], 0 for padding
  next_sentence_labels: tf.Tensor  # [B, 1]
  example_weights: tf.Tensor  # float32 [B], 0 for a row that only fills up


class PretrainingSums(NamedTuple):
  """float32 scalars, sums over a micro-batch with its weights applied.

  Losses are in nats. The mean over a global batch is the sum of these over all
  ranks and micro-batches, divided by the sum of the weights.
  """

  masked_lm_loss: tf.Tensor
  masked_lm_correct: tf.Tensor
  masked_lm_weight: tf.Tensor
  next_sentence_loss: tf.Tensor
  next_sentence_correct: tf.Tensor
  next_sentence_weight: tf.Tensor
  tokens: tf.Tensor  # input tokens that are not padding


def _loss_and_correct(logits, labels, weights):
  """Weighted sums of cross entropy and of right predictions.

  Args:
    logits: float32 [n, classes].
    labels: int [n].
    weights: float32 [n].

  Returns:
    Two float32 scalars.
  """
  loss = tf.reduce_sum(weights * _cross_entropy(logits, labels))
  # Stops at the first better class of a row, where an argmax reads them all.
  correct = tf.math.in_top_k(logits, labels, 1)
  return loss, tf.reduce_sum(weights * tf.cast(correct, tf.float32))


def pretraining_model(batch, config, is_training, dropout_seed=None):
  """BERT with both heads on one micro-batch.

  Args:
    batch: PretrainingBatch.
    config: BertConfig.
    is_training: bool; False switches dropout off.
    dropout_seed: (optional) int32 or int64 [2], see `BertModel`.

  Returns:
    PretrainingSums. The gradient of the global batch's loss is that of
    masked_lm_loss / (global masked_lm_weight) + next_sentence_loss / (global
    next_sentence_weight), added up over ranks and micro-batches.
  """
  model = BertModel(
    config,
    is_training,
    batch.input_ids,
    batch.input_mask,
    batch.segment_ids,
    scope="bert",  # by name, so that an evaluation graph can reuse it
    dropout_seed=dropout_seed,
  )
  example_weights = batch.example_weights
  masked_lm_weights = tf.reshape(
    batch.masked_lm_weights * example_weights[:, tf.newaxis], [-1]
  )
  masked_lm_loss, masked_lm_correct = _loss_and_correct(
    _masked_lm_logits(
      config,
      model.get_sequence_output(),
      model.get_embedding_table(),
      batch.masked_lm_positions,
    ),
    tf.reshape(batch.masked_lm_ids, [-1]),
    masked_lm_weights,
  )
  next_sentence_loss, next_sentence_correct = _loss_and_correct(
    _next_sentence_logits(config, model.get_pooled_output()),
    tf.reshape(batch.next_sentence_labels, [-1]),
    example_weights,
  )
  tokens = tf.reduce_sum(tf.cast(batch.input_mask, tf.float32), axis=1)
  return PretrainingSums(
    masked_lm_loss,
    masked_lm_correct,
    tf.reduce_sum(masked_lm_weights),
    next_sentence_loss,
    next_sentence_correct,
    tf.reduce_sum(example_weights),
    tf.reduce_sum(tokens * example_weights),
  )


# -----------------------------------------------------------------------------
# Checkpoints
# -----------------------------------------------------------------------------


def get_assignment_map_from_checkpoint(tvars, init_checkpoint):
  """Which variables a checkpoint has values for.

  Args:
    tvars: list of variables.
    init_checkpoint: str, path prefix of a checkpoint.

  Returns:
    assignment_map: ordered dict {name in the checkpoint: the same name}, as
      tf.train.init_from_checkpoint takes it.
    initialized_variable_names: dict whose keys are those names, each with and
      without ":0".
  """
  wanted = {re.sub(r":\d+$", "", variable.name) for variable in tvars}
  assignment_map = collections.OrderedDict(
    (name, name)
    for name, _ in tf.train.list_variables(init_checkpoint)
    if name in wanted
  )
  initialized = {}
  for name in assignment_map:
    initialized[name] = 1
    initialized[name + ":0"] = 1
  return assignment_map, initialized
