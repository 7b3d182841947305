"""BERT's forward pass and losses in NumPy float64, written from the papers.

Independent of modeling.py: it shares no code with it and knows the model only
by the names of its variables. Slow and plain on purpose: one example and one
head at a time.
"""

import math

import numpy as np


def layer_norm(x, gamma, beta):
  """https://arxiv.org/abs/1607.06450, of one vector [H]."""
  return gamma * (x - x.mean()) / math.sqrt(x.var() + 1e-12) + beta


def gelu(x):
  """https://arxiv.org/abs/1606.08415, the tanh approximation."""
  inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
  return 0.5 * x * (1.0 + np.tanh(inner))


def log_softmax(x):
  """Of one vector."""
  shifted = x - x.max()
  return shifted - math.log(np.exp(shifted).sum())


def _dense(weights, scope, x):
  return x @ weights[scope + "/kernel"] + weights[scope + "/bias"]


def _norm(weights, scope, rows):
  gamma = weights[scope + "/LayerNorm/gamma"]
  beta = weights[scope + "/LayerNorm/beta"]
  return np.stack([layer_norm(row, gamma, beta) for row in rows])


def attention(weights, scope, x, mask, heads):
  """Self-attention of one example.

  Args:
    weights: {variable name: float64 array}.
    scope: where the query, key and value layers are.
    x: [S, H].
    mask: [S] or [S, S], who may be attended to (by whom).
    heads: int.

  Returns:
    [S, H], before the output layer.
  """
  query, key, value = (
    _dense(weights, f"{scope}/{name}", x) for name in ("query", "key", "value")
  )
  length, width = x.shape
  size = width // heads
  mask = np.broadcast_to(mask, [length, length])
  context = np.zeros_like(query)
  for head in range(heads):
    part = slice(head * size, (head + 1) * size)
    for i in range(length):
      scores = key[:, part] @ query[i, part] / math.sqrt(size)
      probs = np.zeros(length)
      seen = mask[i] > 0
      probs[seen] = np.exp(log_softmax(scores[seen]))
      context[i, part] = probs @ value[:, part]
  return context


def encoder(weights, input_ids, mask, segment_ids, layers, heads):
  """One example through embeddings and all layers.

  Args:
    weights: {variable name: float64 array}, names without ":0".
    input_ids: int [S].
    mask: [S] or [S, S].
    segment_ids: int [S].
    layers: int.
    heads: int.

  Returns:
    [layers + 1, S, H]: the embedding output, then each layer's.
  """
  scope = "bert/embeddings"
  x = (
    weights[scope + "/word_embeddings"][input_ids]
    + weights[scope + "/position_embeddings"][: len(input_ids)]
    + weights[scope + "/token_type_embeddings"][segment_ids]
  )
  outputs = [_norm(weights, scope, x)]
  for layer in range(layers):
    scope = f"bert/encoder/layer_{layer}"
    x = outputs[-1]
    context = attention(weights, scope + "/attention/self", x, mask, heads)
    attended = _dense(weights, scope + "/attention/output/dense", context)
    attended = _norm(weights, scope + "/attention/output", attended + x)
    wide = gelu(_dense(weights, scope + "/intermediate/dense", attended))
    output = _dense(weights, scope + "/output/dense", wide)
    outputs.append(_norm(weights, scope + "/output", output + attended))
  return np.stack(outputs)


def pooler(weights, sequence_output):
  """[S, H] -> [H]."""
  return np.tanh(_dense(weights, "bert/pooler/dense", sequence_output[0]))


def masked_lm_log_probs(weights, sequence_output, positions):
  """[S, H] and int [P] -> [P, V]."""
  scope = "cls/predictions"
  hidden = gelu(
    _dense(weights, scope + "/transform/dense", sequence_output[positions])
  )
  hidden = _norm(weights, scope + "/transform", hidden)
  logits = hidden @ weights["bert/embeddings/word_embeddings"].T
  logits = logits + weights[scope + "/output_bias"]
  return np.stack([log_softmax(row) for row in logits])


def next_sentence_log_probs(weights, pooled):
  """[H] -> [2]."""
  scope = "cls/seq_relationship"
  logits = weights[scope + "/output_weights"] @ pooled
  return log_softmax(logits + weights[scope + "/output_bias"])


def pretraining_sums(weights, batch, layers, heads):
  """What modeling.pretraining_model returns, without dropout.

  Args:
    weights: {variable name: float64 array}.
    batch: object with modeling.PretrainingBatch's fields as arrays.
    layers: int.
    heads: int.

  Returns:
    dict with modeling.PretrainingSums' fields as floats.
  """
  sums = dict.fromkeys(
    (
      "masked_lm_loss",
      "masked_lm_correct",
      "masked_lm_weight",
      "next_sentence_loss",
      "next_sentence_correct",
      "examples",
      "tokens",
    ),
    0.0,
  )
  for i, example_weight in enumerate(batch.example_weights):
    output = encoder(
      weights,
      batch.input_ids[i],
      batch.input_mask[i],
      batch.segment_ids[i],
      layers,
      heads,
    )[-1]
    sums["tokens"] += example_weight * batch.input_mask[i].sum()
    log_probs = masked_lm_log_probs(
      weights, output, batch.masked_lm_positions[i]
    )
    for row, label, weight in zip(
      log_probs,
      batch.masked_lm_ids[i],
      batch.masked_lm_weights[i] * example_weight,
      strict=True,
    ):
      sums["masked_lm_loss"] -= weight * row[label]
      sums["masked_lm_correct"] += weight * (row.argmax() == label)
      sums["masked_lm_weight"] += weight
    row = next_sentence_log_probs(weights, pooler(weights, output))
    label = int(batch.next_sentence_labels[i, 0])
    sums["next_sentence_loss"] -= example_weight * row[label]
    sums["next_sentence_correct"] += example_weight * (row.argmax() == label)
    sums["examples"] += example_weight
  return sums
