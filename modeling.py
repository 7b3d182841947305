"""BERT: configuration, encoder, pre-training heads and their losses.

Public names, variable names and meaning are google/bert's
(https://github.com/google-research/bert, modeling.py and run_pretraining.py),
so that its checkpoints load and scripts written for it run. Shape legend:

  B  batch size                        N  attention heads
  S  sequence length                   D  size of a head; N * D = H
  F  sequence length attended from     H  hidden size
  T  sequence length attended to       I  intermediate (feed-forward) size
  P  masked positions of a sequence    V  vocabulary size
  E  examples in a sequence, 1 unless packed
"""

from typing import NamedTuple

import numpy as np

import mixed_precision
from common.tensorflow_v1 import tf
from config.bert_config import BertConfig
from model import attention, kernels
from model.encoder import (
  LayerConfig,
  attention_layer,
  create_attention_mask_from_input_mask,
  embedding_lookup,
  embedding_postprocessor,
  encoder_layers,
  transformer_model,
)
from model.kernels import gelu
from model.layers import (
  Norm,
  assert_rank,
  create_initializer,
  dense,
  dropout,
  gather_indexes,
  get_activation,
  get_shape_list,
  hashed_seed,
  layer_norm,
  layer_norm_and_dropout,
  means_of,
  reshape_from_matrix,
  reshape_to_matrix,
)
from model.sampled_softmax import SampledLogits
from model.tensor_parallel import WHOLE, Slices
from xla_patches import jit

# GPUs multiply matrices in 16 bits fastest if all sizes are multiples of it;
# google/bert's vocabulary of 30,522 is not.
_ALIGNED = 64

# Rows of a matmul on a CPU are best in multiples of it.
_ROWS = 16


class BertModel:
  """The encoder of https://arxiv.org/abs/1810.04805 with its pooler.

  Args:
    is_training: False switches all dropout off.
    input_ids: int [B, S].
    input_mask: int or float [B, S], 1 to attend to a token, 0 for padding; None
      is 1 everywhere.
    token_type_ids: int [B, S], segment ids; None is 0 everywhere, and so is
      any value if type_vocab_size is 1.
    use_one_hot_embeddings: look words up by a matmul with one-hot rows.
    dropout_seed: int32 or int64 [2]. Dropout is a pure function of it and of
      the call site (see `kernels.keep_mask`), or random without it.
    recompute: see `execution.RECOMPUTE`.
    examples_per_sequence: E. More than 1: input_mask numbers each token's
      example, from 1. A token attends to its own example only, and positions
      start at 0 in each.
    positions: int [B, P]. Only there, and where the pooler reads, the last
      layer is computed, for heads that read nothing else: the sequence output
      is [B, P, H].
  """

  def __init__(
    self, config: BertConfig, is_training, input_ids, input_mask=None,
    token_type_ids=None, use_one_hot_embeddings=False, scope=None,
    dropout_seed=None, policy=mixed_precision.FP32, recompute=(),
    examples_per_sequence=1, with_pooler=True, slices=WHOLE, positions=None,
  ):  # fmt: skip
    # The config is the caller's, so dropout is switched off in a copy.
    prob = None if is_training else 0.0
    config = config.with_dropout(prob, prob)
    config.validate()
    batch_size, seq_length = get_shape_list(input_ids, expected_rank=2)
    if token_type_ids is None or config.type_vocab_size <= 1:
      token_type_ids = tf.zeros([batch_size, seq_length], tf.int32)
    layout = _layout(input_mask, seq_length, examples_per_sequence)
    masks = attention.masks(
      config, layout.attention_mask, input_mask, layout.position_ids,
      [batch_size, seq_length], policy,
    )  # fmt: skip
    if is_training and dropout_seed is None:  # one, which recomputing has, too
      dropout_seed = tf.random.uniform([2], 0, tf.int32.max, tf.int32)
    seed = hashed_seed(dropout_seed)
    layer = LayerConfig(config, policy, tuple(recompute), slices)
    self.positions = positions
    with tf.variable_scope(scope, default_name="bert"):
      with tf.variable_scope("embeddings"):
        hidden, residual = self._embed(
          input_ids, token_type_ids, layout, layer, use_one_hot_embeddings, seed
        )
      # What the pooler reads is computed in the last layer, too: all tokens for
      # a mean, or each example's first token, after the positions.
      if with_pooler and config.pools_all_tokens:
        positions = None
      elif with_pooler and positions is not None:
        firsts = tf.zeros([batch_size, 1], positions.dtype)
        if layout.starts is not None:
          firsts = tf.cast(layout.starts, positions.dtype)
        positions = tf.concat([positions, firsts], axis=1)
      with tf.variable_scope("encoder"):
        self.all_encoder_layers = encoder_layers(
          hidden, residual, masks, layer, positions, seed
        )
      self.sequence_output = self.all_encoder_layers[-1]
      self.pooled_output = self._pool(layout, layer) if with_pooler else None

  def _embed(self, input_ids, token_type_ids, layout, layer, use_one_hot, seed):
    """What the first layer reads, and its residual, None if it is the same."""
    config, norm = layer.bert, Norm.of(layer.bert)
    words, self.embedding_table = embedding_lookup(
      input_ids, config.vocab_size, config.hidden_size,
      config.initializer_range, use_one_hot_embeddings=use_one_hot,
      slices=layer.slices,
    )  # fmt: skip
    self.embedding_output = embedding_postprocessor(
      words, config.type_vocab_size > 0, token_type_ids, config.type_vocab_size,
      use_position_embeddings=config.position_type == "absolute",
      initializer_range=config.initializer_range,
      max_position_embeddings=config.max_position_embeddings,
      dropout_prob=config.dropout_after("embedding"), dropout_seed=seed,
      policy=layer.policy, position_ids=layout.position_ids,
      norm=norm if config.embedding_norm else None,
      position_offset=config.position_offset,
    )  # fmt: skip
    # A pre-layer-norm encoder without a norm of embeddings reads normalized
    # ones, but its residual is not normalized.
    if config.embedding_norm or not config.pre_layer_norm:
      return self.embedding_output, None
    policy, residual = layer.policy, self.embedding_output
    types = policy.layer_norm, policy.attention
    return layer_norm(residual, None, *types, norm), residual

  def _pool(self, layout, layer):
    """float [B * E, H]; what it alone reads is taken off `sequence_output`."""
    last = self.sequence_output
    if layer.bert.pools_all_tokens:
      if self.positions is not None:
        shape = [*get_shape_list(self.positions), layer.bert.hidden_size]
        rows = gather_indexes(last, self.positions)
        self.sequence_output = reshape_from_matrix(rows, shape)
      return layout.means(last, layer.policy)
    if self.positions is not None:
      # The last layer has the pooler's tokens after those at the positions.
      count = get_shape_list(self.positions)[1]
      self.sequence_output = last[:, :count]
      first = reshape_to_matrix(last[:, count:])
    elif layout.starts is None:
      first = last[:, 0]
    else:
      first = gather_indexes(last, layout.starts)
    if not layer.bert.has_pooler:
      return first
    initializer = create_initializer(layer.bert.initializer_range)
    with tf.variable_scope("pooler"):
      return dense(
        first, layer.bert.hidden_size, tf.tanh, initializer,
        dtype=layer.policy.heads, activation_dtype=layer.policy.tanh,
      )  # fmt: skip

  def get_pooled_output(self):
    """float [B * E, H], by the config's classifier_pooling; or None.

    A missing example gets the sequence's first token, or a mean of 0.
    """
    return self.pooled_output

  def get_sequence_output(self):
    """float [B, S, H], or [B, P, H] at `positions`: the last layer's."""
    return self.sequence_output

  def get_all_encoder_layers(self):
    """[B, S, H] each; the last at `positions`, and where the pooler reads."""
    return self.all_encoder_layers

  def get_embedding_output(self):
    """float [B, S, H]: the input of the first layer."""
    return self.embedding_output

  def get_embedding_table(self):
    """The word embeddings, a variable [V, H], or this slice's rows."""
    return self.embedding_table


class _Layout(NamedTuple):
  """Where the examples of rows are; None where a plain model needs none."""

  attention_mask: tf.Tensor | None = None  # [B, 1, T] or [B, F, T]
  # int32 [B, E], where each example begins, 0 for a missing one.
  starts: tf.Tensor | None = None
  position_ids: tf.Tensor | None = None  # int [B, S], in the token's example
  # [B, E, S], 1 for the tokens of each example, 0 for others.
  members: tf.Tensor | None = None

  def means(self, outputs, policy):
    """policy.losses [B * E, H]: the mean of [B, S, H] in each example."""
    outputs = tf.cast(outputs, policy.losses)
    if self.members is None:
      return tf.reduce_mean(outputs, axis=1)
    members = tf.cast(self.members, policy.losses)
    return reshape_to_matrix(means_of(members, outputs))


def _layout(input_mask, seq_length, examples_per_sequence) -> _Layout:
  """What `input_mask`, as `BertModel` has it, says of rows."""
  if input_mask is None:
    if examples_per_sequence > 1:
      raise ValueError("input_mask numbers examples of packed rows: give it")
    return _Layout()
  get_shape_list(input_mask, expected_rank=2)
  if examples_per_sequence == 1:
    # Broadcast over F, which a mask of padding does not depend on.
    mask = tf.expand_dims(input_mask, 1)
    return _Layout(mask, members=mask)
  # Padding is an example too, so that it attends to something.
  mask = tf.equal(tf.expand_dims(input_mask, 1), input_mask[:, :, tf.newaxis])
  # An example begins where its number first occurs. Positions count from there.
  numbers = tf.range(1, examples_per_sequence + 1, dtype=input_mask.dtype)
  is_own = tf.equal(input_mask[:, tf.newaxis], numbers[:, tf.newaxis])
  starts = tf.argmax(tf.cast(is_own, tf.int32), axis=-1, output_type=tf.int32)
  own = tf.gather(starts, tf.maximum(input_mask - 1, 0), batch_dims=1)
  position_ids = tf.maximum(tf.range(seq_length) - own, 0)
  return _Layout(mask, starts, position_ids, is_own)


def masked_lm_logits(
  bert_config, input_tensor, output_weights, positions,
  policy=mixed_precision.FP32, slices=WHOLE, rows=None, sampling=None,
):  # fmt: skip
  """`Logits` [B * P, V or this slice's classes]; see `get_masked_lm_output`.

  Without `positions` they are of all of the input, [B, P, H]. Of these B * P
  only `rows`, int [n], if given. With a `Sampling` they are `SampledLogits`.
  """
  if positions is None:
    hidden = reshape_to_matrix(input_tensor)
  else:
    hidden = gather_indexes(input_tensor, positions)
  if bert_config.mlm_head:
    hidden = _transformed(hidden, bert_config, policy)
  with tf.variable_scope("cls/predictions"):
    hidden = tf.cast(hidden, policy.heads)
    if rows is not None:
      hidden = kernels.gather_rows(hidden, rows)
    words, zeros = bert_config.vocab_size, tf.zeros_initializer()
    first, end = slices.bounds(words)
    if bert_config.decoder_bias:
      bias = slices.get_variable("output_bias", [words], zeros, axis=0)
    else:
      bias = tf.zeros([end - first])
    if not bert_config.tie_word_embeddings:
      output_weights = slices.get_variable(
        "output_weights", [words, bert_config.hidden_size],
        create_initializer(bert_config.initializer_range), axis=0,
      )  # fmt: skip
    weights = tf.convert_to_tensor(output_weights)
    # Sampled classes are gathered from the table when labels are known.
    if sampling is not None:
      return SampledLogits(hidden, weights, bias, sampling)
    if weights.dtype != policy.heads:  # a copy anyway
      aligned = -(-weights.shape.as_list()[0] // _ALIGNED) * _ALIGNED
      weights = kernels.aligned_rows(weights, rows=aligned, dtype=policy.heads)
    logits = tf.matmul(slices.copy_to_group(hidden), weights, transpose_b=True)
    return Logits(logits, bias, slices, first)


def head_features(hidden, bert_config, policy=mixed_precision.FP32):
  """What heads but the masked LM's read of an output [..., H]: as large.

  BERT's read the output itself. Those of a model without a pooler read it
  through the masked LM head's dense layer and norm, if it has them.
  """
  if not bert_config.shares_transform:
    return hidden
  return _transformed(hidden, bert_config, policy)


def _transformed(hidden, bert_config, policy):
  """policy.heads [..., H]: a dense layer and a norm, one for all heads."""
  with tf.variable_scope("cls/predictions/transform", reuse=tf.AUTO_REUSE):
    hidden = dense(
      hidden, bert_config.hidden_size, bert_config.hidden_act,
      create_initializer(bert_config.initializer_range), dtype=policy.heads,
      activation_dtype=policy.gelu, has_bias=bert_config.classifier_bias,
    )  # fmt: skip
    norm = Norm.of(bert_config)
    return layer_norm(hidden, None, policy.layer_norm, policy.heads, norm)


class Logits(NamedTuple):
  """A head's classes, before the bias, which its loss adds."""

  matmul: tf.Tensor  # policy.heads [n, classes, or more columns]
  bias: tf.Variable  # float32 [classes]
  slices: Slices = WHOLE  # all classes are cut over these
  first: int = 0  # the first class of this slice

  def log_probs(self):
    """float32 [n, classes]"""
    logits = tf.cast(self.matmul, tf.float32)[:, : self.bias.shape.as_list()[0]]
    return tf.nn.log_softmax(logits + self.bias)

  def losses_and_correct(self, labels, policy=mixed_precision.FP32):
    """Two float32 [n] for n int labels; see `kernels.cross_entropy`."""
    # Cast last: int32 that ops make are in the host's memory beside a GPU.
    labels = tf.cast(tf.reshape(labels, [-1]), tf.int32)
    kernel, static = kernels.cross_entropy, {"dtype": policy.losses}
    if self.slices.size > 1:
      kernel = kernels.sliced_cross_entropy
      static |= {"first": self.first, "stack": self.slices.stack}
    return tf.unstack(kernel(self.matmul, self.bias, labels, **static))

  def at(self, labels):
    """float32 [n]: the logits of n int labels, with the bias."""
    rows, columns = get_shape_list(self.matmul)
    own = tf.cast(tf.reshape(labels, [-1]), tf.int32) - self.first
    is_here = (own >= 0) & (own < self.bias.shape.as_list()[0])
    own = tf.where(is_here, own, tf.zeros_like(own))
    flat = tf.reshape(self.matmul, [-1, 1])
    # In int64: there may be more logits than int32 counts.
    first = tf.cast(tf.range(rows), tf.int64) * columns
    logits = kernels.gather_rows(flat, first + tf.cast(own, tf.int64))[:, 0]
    logits = tf.cast(logits, tf.float32) + kernels.gather_rows(self.bias, own)
    # The slice that has a label's class knows its logit.
    here = tf.where(is_here, logits, tf.zeros_like(logits))
    return self.slices.reduce_from_group(here)


def next_sentence_logits(
  bert_config, input_tensor, policy=mixed_precision.FP32
):
  """`Logits` [B, 2]; see `get_next_sentence_output`."""
  with tf.variable_scope("cls/seq_relationship"):
    shape, zeros = [2, bert_config.hidden_size], tf.zeros_initializer()
    initializer = create_initializer(bert_config.initializer_range)
    weights = tf.get_variable("output_weights", shape, initializer=initializer)
    bias = tf.get_variable("output_bias", [2], initializer=zeros)
    input_tensor = tf.cast(input_tensor, policy.heads)
    weights = tf.cast(weights, policy.heads)
    return Logits(tf.matmul(input_tensor, weights, transpose_b=True), bias)


def get_masked_lm_output(
  bert_config, input_tensor, output_weights, positions, label_ids, label_weights
):
  """The masked LM head on a sequence output, float [B, S, H], and its loss.

  `output_weights` is the embedding table. Positions and label_ids are int
  [B, P], label_weights float [B, P], 0 for padding. Returns the weighted mean
  loss, the losses without weights, [B * P], and log_probs, [B * P, V], all
  float32.
  """
  logits = masked_lm_logits(
    bert_config, input_tensor, output_weights, positions
  )
  per_example_loss, _ = logits.losses_and_correct(label_ids)
  weights = tf.reshape(label_weights, [-1])
  loss, _, total = weighted_sums(per_example_loss, None, weights)
  # google/bert's guard against a batch without masked positions.
  return loss / (total + 1e-5), per_example_loss, logits.log_probs()


def get_next_sentence_output(bert_config, input_tensor, labels):
  """As `get_masked_lm_output`, on a pooled output, float [B, H].

  Labels are int [B] or [B, 1], 0 for the true next segment, 1 for another.
  """
  logits = next_sentence_logits(bert_config, input_tensor)
  per_example_loss, _ = logits.losses_and_correct(labels)
  return tf.reduce_mean(per_example_loss), per_example_loss, logits.log_probs()


class PretrainingBatch(NamedTuple):
  """A rank's micro-batch of records: int32 or int64, except for the weights."""

  input_ids: tf.Tensor  # [B, S]
  input_mask: tf.Tensor  # [B, S], the token's example from 1, 0 for padding
  segment_ids: tf.Tensor  # [B, S]
  masked_lm_positions: tf.Tensor  # [B, P]
  masked_lm_ids: tf.Tensor  # [B, P]
  masked_lm_weights: tf.Tensor  # float32 [B, P], 0 for padding
  next_sentence_labels: tf.Tensor  # [B, E]
  example_weights: tf.Tensor  # float32 [B], 0 for a row that only fills up


def example_weights(batch):
  """float32 [B, E]: example_weights for the examples that a record has."""
  examples = batch.next_sentence_labels.shape.as_list()[1]
  # input_mask numbers a row's examples, so its maximum counts them.
  last = tf.reduce_max(batch.input_mask, axis=1, keepdims=True)
  exists = np.arange(1, examples + 1, dtype=last.dtype.as_numpy_dtype) <= last
  return tf.cast(exists, tf.float32) * batch.example_weights[:, tf.newaxis]


def by_name(sums) -> dict:
  """A micro-batch's sums: name -> value, without those that are None."""
  values = sums._asdict().items()
  return {name: value for name, value in values if value is not None}


# A head's sum of losses -> the sum of their weights. Mean losses add up.
LOSS_WEIGHTS = {
  "masked_lm_loss": "masked_lm_weight",
  "next_sentence_loss": "examples",
  "loss": "weights",
}


def mean_loss(sums: dict) -> tf.Tensor:
  """The loss of global sums by name, without z-loss; float scalar."""
  names = [name for name in LOSS_WEIGHTS if name in sums]
  return tf.add_n(
    [tf.div_no_nan(sums[name], sums[LOSS_WEIGHTS[name]]) for name in names]
  )


class PretrainingSums(NamedTuple):
  """float32 scalars, weighted sums over a micro-batch; losses in nats."""

  masked_lm_loss: tf.Tensor
  masked_lm_correct: tf.Tensor
  masked_lm_weight: tf.Tensor
  examples: tf.Tensor
  tokens: tf.Tensor  # input tokens that are not padding
  next_sentence_loss: tf.Tensor | None = None  # None without that head
  next_sentence_correct: tf.Tensor | None = None
  z_loss: tf.Tensor | None = None  # times its coefficient; None without one


def _predictions(batch):
  """Labels, weights, and which rows of B * P, [n], they are of; None: all.

  A record has room for the most predictions it may need, and the vocabulary is
  a large factor: rows with a weight come first, then a few without.
  """
  dynamic = jit.takes_dynamic_shapes()
  # Batches come from the CPU: a GPU does not wait for the number of rows.
  with tf.device("/cpu:0" if dynamic else ""):
    labels = batch.masked_lm_ids
    weights = batch.masked_lm_weights * batch.example_weights[:, tf.newaxis]
    if not dynamic:
      return labels, weights, None
    labels, weights = tf.reshape(labels, [-1]), tf.reshape(weights, [-1])
    rows = get_shape_list(weights)[0]
    # n has 8 values at most, multiples of _ROWS: kernels compile for each.
    step = -(-rows // (8 * _ROWS)) * _ROWS
    is_used = tf.cast(weights > 0, tf.int32)
    _, used_first = tf.math.top_k(is_used, rows)  # of equals the first first
    steps = tf.maximum(1, -(-tf.reduce_sum(is_used) // step))
    rows = used_first[: tf.minimum(rows, steps * step)]
    return tf.gather(labels, rows), tf.gather(weights, rows), rows


def weighted_sums(losses, correct, weights):
  """float32 scalars: the weighted losses and right predictions; the weights.

  All are of one shape, or `correct` is None, and so is its sum.
  """
  loss = tf.reduce_sum(weights * losses)
  right = None if correct is None else tf.reduce_sum(weights * correct)
  return loss, right, tf.reduce_sum(weights)


def pretraining_model(
  batch, config, is_training, dropout_seed=None, policy=mixed_precision.FP32,
  recompute=(), slices=WHOLE, next_sentence=True, sampling=None, z_loss=0.0,
):  # fmt: skip
  """The heads' sums; arguments as in `BertModel`, one batch for all slices.

  Without `next_sentence` the model has neither that head nor the pooler. With
  a `Sampling` the masked LM's loss and what is correct are estimates. `z_loss`
  is the coefficient of (log Z)^2 of each prediction, where Z is the sum of all
  words' exponentials (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311,
  section 5).
  """
  model = BertModel(
    config, is_training, batch.input_ids, batch.input_mask, batch.segment_ids,
    scope="bert",  # by name, so that an evaluation graph can reuse it
    dropout_seed=dropout_seed, policy=policy, recompute=recompute,
    examples_per_sequence=batch.next_sentence_labels.shape[1],
    with_pooler=next_sentence, slices=slices,
    positions=batch.masked_lm_positions,
  )  # fmt: skip
  labels, weights, rows = _predictions(batch)
  logits = masked_lm_logits(
    config, model.get_sequence_output(), model.get_embedding_table(),
    None,  # all of it: the model has these positions only
    policy, slices, rows, sampling,
  )  # fmt: skip
  losses, correct = logits.losses_and_correct(labels, policy)
  weights = tf.reshape(weights, [-1])
  masked_loss, right, weight = weighted_sums(losses, correct, weights)
  of_z = None
  if z_loss:
    log_z = losses + logits.at(labels)
    of_z = z_loss * tf.reduce_sum(weights * tf.square(log_z))
  tokens = tf.reduce_sum(tf.cast(batch.input_mask > 0, tf.float32), axis=1)
  tokens = tf.reduce_sum(tokens * batch.example_weights)
  exist = example_weights(batch)
  if not next_sentence:
    examples = tf.reduce_sum(exist)
    return PretrainingSums(
      masked_loss, right, weight, examples, tokens, z_loss=of_z
    )
  pooled = head_features(model.get_pooled_output(), config, policy)
  logits = next_sentence_logits(config, pooled, policy)
  labels = batch.next_sentence_labels
  losses, correct = logits.losses_and_correct(labels, policy)
  exist = tf.reshape(exist, [-1])
  loss, correct, examples = weighted_sums(losses, correct, exist)
  return PretrainingSums(
    masked_loss, right, weight, examples, tokens, loss, correct, of_z
  )


def pretraining_loss(sums: PretrainingSums, weights: tf.Tensor) -> tf.Tensor:
  """THE loss, float32 scalar: a micro-batch's share of the global batch's.

  That is the mean over the global batch's masked tokens, z-loss included, plus,
  with that head, the mean over its sentence pairs. Shares add up over
  micro-batches and ranks. `weights`, float32 [2], are the global batch's
  masked_lm_weight and examples.
  """
  with tf.name_scope("loss"):
    # A batch without masked tokens has a loss of 0, not 0 / 0.
    masked_lm_weight, examples = tf.unstack(tf.maximum(weights, 1.0))
    loss = sums.masked_lm_loss / masked_lm_weight
    if sums.z_loss is not None:
      loss += sums.z_loss / masked_lm_weight
    if sums.next_sentence_loss is not None:
      loss += sums.next_sentence_loss / examples
    return loss


class FinetuningSums(NamedTuple):
  """float32 scalars, weighted sums over a micro-batch of a task's examples."""

  loss: tf.Tensor
  weights: tf.Tensor
  examples: tf.Tensor
  tokens: tf.Tensor  # input tokens that are not padding
  correct: tf.Tensor | None = None  # None if predictions are numbers


def finetuning_sums(losses, correct, batch) -> FinetuningSums:
  """A head's sums: losses and correct are float32 [B, E], of a packed batch."""
  loss, right, weight = weighted_sums(losses, correct, batch.weights)
  # A row that only fills up the batch has no example, so no tokens.
  is_row = tf.reduce_any(batch.weights > 0, axis=1, keepdims=True)
  tokens = tf.cast((batch.input_mask > 0) & is_row, tf.float32)
  examples = tf.cast(batch.weights > 0, tf.float32)
  return FinetuningSums(
    loss, weight, tf.reduce_sum(examples), tf.reduce_sum(tokens), right
  )


def get_assignment_map_from_checkpoint(tvars, init_checkpoint):
  """(name of `tvars` there -> itself, those names with and without ":0").

  The first is for tf.train.init_from_checkpoint.
  """
  wanted = {variable.op.name for variable in tvars}
  assignment_map, initialized = {}, {}
  for name, _ in tf.train.list_variables(init_checkpoint):
    if name in wanted:
      assignment_map[name] = name
      initialized[name] = initialized[f"{name}:0"] = 1
  return assignment_map, initialized
