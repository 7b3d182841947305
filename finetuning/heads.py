"""Heads for fine-tuning, with google/bert's variable names.

Shapes as in `modeling`: B rows of S tokens and up to E examples, hidden size H.
"""

from typing import NamedTuple

import mixed_precision
import modeling
from common.tensorflow_v1 import tf
from model import encoder, kernels, layers, tasks
from model.tasks import Head

NO_LABEL = -1  # a target of a token
_OUTSIDE = -1e30  # a score whose softmax is 0


class HeadOutput(NamedTuple):
  """A head's results for a batch."""

  losses: tf.Tensor  # float32 [B, E], nats or squared differences
  # float32 [B, E], 1 where the prediction is right; None of a regression.
  correct: tf.Tensor | None
  outputs: dict  # name -> float32 [B, ...], for predictions


def encode(batch, config, is_training: bool, dropout_seed=None, **parts):
  """The `modeling.BertModel` of a `packed.FinetuningBatch`."""
  return modeling.BertModel(
    config.bert,
    is_training,
    batch.input_ids,
    batch.input_mask,
    batch.segment_ids,
    scope="bert",
    dropout_seed=dropout_seed,
    policy=mixed_precision.policy_of(config),
    recompute=config.recompute if is_training else (),
    examples_per_sequence=batch.weights.shape[1],
    **parts,
  )


def _logits(head: Head, output, labels: int, config, is_training, dropout_seed):
  """`label_logits` of an output [..., H], after the head's dropout."""
  policy = mixed_precision.policy_of(config)
  features = modeling.head_features(output, config.bert, policy)
  rate = config.bert.hidden_dropout_prob if is_training else 0.0
  seed = encoder.head_dropout_seed(dropout_seed)
  features = layers.dropout(features, rate, seed)
  return label_logits(head, features, labels, config.bert, policy)


def _variables(head: Head, outputs: int, bert_config):
  initializer = layers.create_initializer(
    bert_config.initializer_range, tf.random.normal
  )
  shape, zeros = [outputs, bert_config.hidden_size], tf.zeros_initializer()
  return (
    tf.get_variable(head.weights, shape, initializer=initializer),
    tf.get_variable(head.bias, [outputs], initializer=zeros),
  )


def label_logits(
  head: Head, features, labels: int, bert_config, policy=mixed_precision.FP32
):
  """policy.heads [n, labels] and the float32 bias [labels], from [..., H]."""
  weights, bias = _variables(head, labels, bert_config)
  matrix = tf.cast(layers.reshape_to_matrix(features), policy.heads)
  weights = tf.cast(weights, policy.heads)
  return tf.matmul(matrix, weights, transpose_b=True), bias


def classification(
  batch, labels: int, config, is_training: bool, dropout_seed=None
) -> HeadOutput:
  """Outputs "logits", float32 [B, E, labels]; a regression has one label."""
  rows = layers.get_shape_list(batch.input_ids)[0]
  nowhere = tf.zeros([rows, 0], tf.int32)  # but where the pooler reads
  model = encode(batch, config, is_training, dropout_seed, places=nowhere)
  pooled = model.get_pooled_output()
  settings = config, is_training, dropout_seed
  matmul, bias = _logits(tasks.LABELS, pooled, labels, *settings)
  shape = layers.get_shape_list(batch.weights)
  logits = tf.cast(matmul, tf.float32) + bias
  targets = tf.reshape(batch.targets, [-1])
  if labels == 1:
    losses = tf.square(logits[:, 0] - targets)
    correct = None
  else:
    dtype = mixed_precision.policy_of(config).losses
    losses, correct = tf.unstack(
      kernels.cross_entropy(matmul, bias, targets, dtype=dtype)
    )
    correct = tf.reshape(correct, shape)
  return HeadOutput(
    tf.reshape(losses, shape),
    correct,
    {"logits": tf.reshape(logits, [*shape, labels])},
  )


def span_logits(features, bert_config, policy=mixed_precision.FP32):
  """float32 [B, S, 2]: start and end scores of each token, from [B, S, H]."""
  weights, bias = _variables(tasks.QUESTIONS, 2, bert_config)
  shape = layers.get_shape_list(features, 3)
  # Not in policy.heads: this matmul is cheap, and in 16 bits neighbours in a
  # long paragraph would have equal scores.
  matrix = tf.cast(layers.reshape_to_matrix(features), policy.losses)
  weights = tf.cast(weights, policy.losses)
  scores = tf.matmul(matrix, weights, transpose_b=True)
  scores = kernels.add_bias(scores, bias)
  return tf.cast(tf.reshape(scores, [*shape[:2], 2]), tf.float32)


def span(batch, config, is_training: bool, dropout_seed=None) -> HeadOutput:
  """The first and the last token of an answer in each example.

  The loss is the mean of two cross entropies over the example's own tokens. In
  https://arxiv.org/abs/1810.04805 (section 4.2) and google/bert, padding counts
  too. `targets`, [B, E, 2], count from the row's first token. Outputs "logits",
  float32 [B, S, 2].
  """
  model = encode(batch, config, is_training, dropout_seed, with_pooler=False)
  sequence = model.get_sequence_output()
  policy = mixed_precision.policy_of(config)
  features = modeling.head_features(sequence, config.bert, policy)
  logits = span_logits(features, config.bert, policy)
  _, slots = layers.get_shape_list(batch.weights)
  numbers = tf.range(1, slots + 1, dtype=batch.input_mask.dtype)
  own = tf.equal(batch.input_mask[:, None, :], numbers[:, None])  # [B, E, S]
  scores = tf.where_v2(  # [B, E, 2, S]
    own[:, :, None, :], tf.transpose(logits, [0, 2, 1])[:, None], _OUTSIDE
  )
  log_probs = tf.nn.log_softmax(scores)
  of_targets = tf.gather(log_probs, batch.targets, batch_dims=3)
  found = tf.argmax(scores, axis=-1, output_type=tf.int32)
  return HeadOutput(
    -tf.reduce_mean(of_targets, axis=-1),
    tf.cast(tf.reduce_all(tf.equal(found, batch.targets), -1), tf.float32),
    {"logits": logits},
  )


def tokens(
  batch, labels: int, config, is_training: bool, dropout_seed=None
) -> HeadOutput:
  """The label of each token whose target, of int32 [B, S], is not `NO_LABEL`.

  The loss is the mean over an example's targets. Their number is its weight, so
  the loss of an update is the mean over all targets. Outputs "labels", float32
  [B, S], the most likely ones.
  """
  model = encode(batch, config, is_training, dropout_seed, with_pooler=False)
  sequence = model.get_sequence_output()
  settings = config, is_training, dropout_seed
  matmul, bias = _logits(tasks.TOKENS, sequence, labels, *settings)
  rows, length = layers.get_shape_list(batch.targets)
  targets = tf.reshape(batch.targets, [-1])
  dtype = mixed_precision.policy_of(config).losses
  both = kernels.cross_entropy(  # [2, B * S]: losses, and what is right
    matmul, bias, tf.maximum(targets, 0), dtype=dtype
  )
  both *= tf.cast(targets > NO_LABEL, tf.float32)
  of_rows = tf.transpose(tf.reshape(both, [2, rows, length]), [1, 0, 2])
  # [B, S, E]: 1 for the example of a token; padding, 0, is of none.
  slots = layers.get_shape_list(batch.weights)[1]
  owners = tf.one_hot(batch.input_mask - 1, slots)
  means = tf.matmul(of_rows, owners) / tf.maximum(batch.weights, 1.0)[:, None]
  found = tf.argmax(tf.cast(matmul, tf.float32) + bias, axis=-1)
  found = tf.reshape(tf.cast(found, tf.float32), [rows, length])
  return HeadOutput(*tf.unstack(means, axis=1), {"labels": found})
