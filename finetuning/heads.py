"""What heads share in a graph: the encoder that they read, and their weights.

Variables have google/bert's names. Shapes as in `modeling`: B rows of S tokens
and up to E examples, hidden size H.
"""

from collections.abc import Mapping
from typing import NamedTuple

import mixed_precision
import modeling
from common.tensorflow_v1 import tf
from config.bert_config import BertConfig
from finetuning.packed import FinetuningBatch
from finetuning.task import FinetuningTask
from model import encoder, layers
from model.tasks import BY_KIND, Head
from model.tensor_parallel import WHOLE


class HeadOutput(NamedTuple):
  """A head's results for a batch."""

  # float32 [B, E], nats or squared differences; None without targets.
  losses: tf.Tensor | None
  # float32 [B, E], 1 where the prediction is right; None of a regression.
  correct: tf.Tensor | None
  outputs: dict[str, tf.Tensor]  # float32 [B, ...], for predictions


class HeadInput(NamedTuple):
  """An encoder in a graph, as a head reads it."""

  model: modeling.BertModel
  bert: BertConfig
  policy: mixed_precision.Policy
  labels: int  # rows of a head whose rows are labels
  positions: tf.Tensor | None = None  # int32 [B, P], where a masked LM predicts
  dropout: tuple = (0.0, None)  # rate and seed, of a head of labels
  task: Mapping = {}  # as task.json has it, of a head without weights
  pooled: tf.Tensor | None = None  # int32 [B, S], 1 for what its vector is of

  def features(self, head: Head) -> tf.Tensor:
    """float [B, H] or [B, S, H]: what a head reads."""
    output = self.model.get_sequence_output()
    if head.reads_pooled:
      output = self.model.get_pooled_output()
    return modeling.head_features(output, self.bert, self.policy)

  def label_logits(self, head: Head) -> modeling.Logits:
    """policy.heads [n, labels] of all texts or tokens."""
    features = layers.dropout(self.features(head), *self.dropout)
    weights, bias = variables(head, self.labels, self.bert)
    matrix = tf.cast(layers.reshape_to_matrix(features), self.policy.heads)
    weights = tf.cast(weights, self.policy.heads)
    return modeling.Logits(tf.matmul(matrix, weights, transpose_b=True), bias)

  def label_outputs(self, head: Head) -> dict[str, tf.Tensor]:
    """Logits and probabilities by name, float32 [B, labels] or [B, S, labels].

    A regression has no probabilities.
    """
    matmul, bias, *_ = self.label_logits(head)
    logits = tf.cast(matmul, tf.float32) + bias
    if not head.reads_pooled:
      shape = tf.shape(self.model.get_sequence_output())[:2]
      logits = tf.reshape(logits, tf.concat([shape, [self.labels]], 0))
    if head.reads_pooled and self.labels == 1:
      return {"logits": logits}
    shares = tf.sigmoid if self.task.get("multi_label") else tf.nn.softmax
    return {"logits": logits, "probabilities": shares(logits)}


def bert_model(
  task: FinetuningTask, is_training: bool, ids, mask, segments=None, **parts
) -> modeling.BertModel:
  """The encoder of a task's run; `parts` are as of `BertModel`."""
  config = task.config
  return modeling.BertModel(
    config.bert,
    is_training,
    ids,
    mask,
    segments,
    scope="bert",
    policy=mixed_precision.policy_of(config),
    recompute=config.recompute if is_training else (),
    with_pooler=BY_KIND[config.kind].reads_pooled,
    slices=task.slices or WHOLE,
    **parts,
  )


def encode(
  batch: FinetuningBatch,
  task: FinetuningTask,
  is_training: bool,
  dropout_seed=None,
  **parts,
) -> HeadInput:
  """The encoder on a batch; `parts` are further arguments of `BertModel`."""
  config, policy = task.config, mixed_precision.policy_of(task.config)
  model = bert_model(
    task,
    is_training,
    batch.input_ids,
    batch.input_mask,
    batch.segment_ids,
    dropout_seed=dropout_seed,
    examples_per_sequence=batch.weights.shape[1],
    **parts,
  )
  rate = config.bert.hidden_dropout_prob if is_training else 0.0
  dropout = (rate, layers.dropout_site_seed(dropout_seed, encoder.HEAD_SITE))
  return HeadInput(model, config.bert, policy, task.outputs, dropout=dropout)


def variables(head: Head, outputs: int, bert: BertConfig):
  """The head's matrix [outputs, H] and bias [outputs], float32."""
  normal = layers.create_initializer(bert.initializer_range, tf.random.normal)
  shape, zeros = [outputs, bert.hidden_size], tf.zeros_initializer()
  return (
    tf.get_variable(head.weights, shape, initializer=normal),
    tf.get_variable(head.bias, [outputs], initializer=zeros),
  )
