"""What heads for fine-tuning have in common in the graph.

Variables have google/bert's names. Shapes as in `modeling`: B rows of S tokens
and up to E examples, hidden size H.
"""

from typing import NamedTuple

import mixed_precision
import modeling
from common.tensorflow_v1 import tf
from config.bert_config import BertConfig
from finetuning.packed import FinetuningBatch
from finetuning.task import FinetuningConfig
from model import encoder, kernels, layers
from model.tasks import Head


class HeadOutput(NamedTuple):
  """A head's results for a batch."""

  losses: tf.Tensor  # float32 [B, E], nats or squared differences
  # float32 [B, E], 1 where the prediction is right; None of a regression.
  correct: tf.Tensor | None
  outputs: dict[str, tf.Tensor]  # float32 [B, ...], for predictions


class ServedEncoder(NamedTuple):
  """An encoder in the graph of an open model, as a served head reads it."""

  model: modeling.BertModel
  bert: BertConfig
  policy: mixed_precision.Policy
  labels: int  # rows of a head whose rows are labels
  positions: tf.Tensor  # int32 [B, P], where a masked LM head predicts

  def features(self, head: Head) -> tf.Tensor:
    """float [B, H] or [B, S, H]: what a head reads."""
    output = self.model.get_sequence_output()
    if head.reads_pooled:
      output = self.model.get_pooled_output()
    return modeling.head_features(output, self.bert, self.policy)

  def label_logits(self, head: Head) -> tf.Tensor:
    """float32 [B, labels] or [B, S, labels]."""
    features = self.features(head)
    matmul, bias = label_logits(
      head, features, self.labels, self.bert, self.policy
    )
    shape = tf.concat([tf.shape(features)[:-1], [self.labels]], 0)
    return tf.reshape(tf.cast(matmul, tf.float32) + bias, shape)


def encode(
  batch: FinetuningBatch,
  config: FinetuningConfig,
  is_training: bool,
  dropout_seed=None,
  **parts,
) -> modeling.BertModel:
  """The encoder on a batch; `parts` are further arguments of `BertModel`."""
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


def variables(head: Head, outputs: int, bert: BertConfig):
  """The head's matrix [outputs, H] and bias [outputs], float32."""
  initializer = layers.create_initializer(
    bert.initializer_range, tf.random.normal
  )
  shape, zeros = [outputs, bert.hidden_size], tf.zeros_initializer()
  return (
    tf.get_variable(head.weights, shape, initializer=initializer),
    tf.get_variable(head.bias, [outputs], initializer=zeros),
  )


def label_logits(
  head: Head,
  features,
  labels: int,
  bert: BertConfig,
  policy=mixed_precision.FP32,
):
  """policy.heads [n, labels] and the float32 bias [labels], from [..., H]."""
  weights, bias = variables(head, labels, bert)
  matrix = tf.cast(layers.reshape_to_matrix(features), policy.heads)
  weights = tf.cast(weights, policy.heads)
  return tf.matmul(matrix, weights, transpose_b=True), bias


def trained_label_logits(
  head: Head,
  output,
  labels: int,
  config: FinetuningConfig,
  is_training: bool,
  dropout_seed,
):
  """`label_logits` of an output [..., H], after the head's dropout."""
  policy = mixed_precision.policy_of(config)
  features = modeling.head_features(output, config.bert, policy)
  rate = config.bert.hidden_dropout_prob if is_training else 0.0
  seed = encoder.head_dropout_seed(dropout_seed)
  features = layers.dropout(features, rate, seed)
  return label_logits(head, features, labels, config.bert, policy)


def losses_and_correct(matmul, bias, targets, config: FinetuningConfig):
  """float32 [2, n]: nats, and 1 where the target is the most likely label."""
  losses = mixed_precision.policy_of(config).losses
  return kernels.cross_entropy(matmul, bias, targets, dtype=losses)
