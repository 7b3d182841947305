"""BERT's heads and losses in NumPy float64, of `reference_modern`'s encoder."""

import collections

import numpy as np
import reference_modern
from reference_modern import dense, log_softmax


def encoder(weights, input_ids, mask, segment_ids, layers, heads):
  """[layers + 1, S, H] of an example: the embeddings, then each layer's output.

  The mask is [S] or [S, S], ids are int [S].
  """
  length, width = len(input_ids), len(weights["bert/pooler/dense/bias"])
  config = dict(
    hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
    type_vocab_size=2,
  )  # fmt: skip
  seen = np.broadcast_to(mask, [length, length]) > 0
  positions = np.arange(length)
  return reference_modern.encoder(
    config, weights, input_ids, seen, segment_ids, positions
  )


def pooler(weights, sequence_output):
  """[S, H] -> [H]."""
  return np.tanh(dense(weights, "bert/pooler/dense", sequence_output[0], True))


def masked_lm_log_probs(weights, sequence_output, positions):
  """[S, H] and int [P] -> [P, V]."""
  logits = reference_modern.masked_lm_logits(
    {}, weights, sequence_output[positions]
  )
  return np.stack([log_softmax(row) for row in logits])


def next_sentence_log_probs(weights, pooled):
  """[H] -> [2]."""
  scope = "cls/seq_relationship"
  logits = weights[scope + "/output_weights"] @ pooled
  return log_softmax(logits + weights[scope + "/output_bias"])


def pretraining_sums(weights, batch, layers, heads):
  """modeling.pretraining_model's sums by name, without dropout.

  `batch` is a `PretrainingBatch` of arrays.
  """
  sums = collections.defaultdict(float)
  for i, example_weight in enumerate(batch.example_weights):
    inputs = batch.input_ids[i], batch.input_mask[i], batch.segment_ids[i]
    output = encoder(weights, *inputs, layers, heads)[-1]
    sums["tokens"] += example_weight * batch.input_mask[i].sum()
    log_probs = masked_lm_log_probs(
      weights, output, batch.masked_lm_positions[i]
    )
    each = batch.masked_lm_weights[i] * example_weight
    labels = zip(log_probs, batch.masked_lm_ids[i], each, strict=True)
    for row, label, weight in labels:
      sums["masked_lm_loss"] -= weight * row[label]
      sums["masked_lm_correct"] += weight * (row.argmax() == label)
      sums["masked_lm_weight"] += weight
    row = next_sentence_log_probs(weights, pooler(weights, output))
    label = int(batch.next_sentence_labels[i, 0])
    sums["next_sentence_loss"] -= example_weight * row[label]
    sums["next_sentence_correct"] += example_weight * (row.argmax() == label)
    sums["examples"] += example_weight
  return dict(sums)
