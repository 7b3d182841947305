"""Initial weights that know what a model of text learns first.

A model with random weights (`layers.create_initializer`) first learns how
frequent words are, then that neighbours matter. With `informed` it knows both:

- The masked LM's output bias is the log of each token's frequency
  (https://arxiv.org/abs/2212.09686). With a bias of 0 the embeddings of all
  rare words get the same small gradient. Adam divides it by its size and moves
  them at the full rate, until all embeddings point the same way
  (https://arxiv.org/abs/2502.08441).
- Position embeddings are sinusoids, so that one rotation moves all of them by
  the same number of tokens (https://arxiv.org/abs/1706.03762, section 3.5).
- Each head of the first layer attends to the token at its own distance: its key
  weights are its query weights, rotated (compare the products of weights in
  https://arxiv.org/abs/2305.09828). Values and outputs keep the variance.

The model is an ordinary BERT, and training may change all of its weights.
"""

import math

import numpy as np

from model.bert_config import BertConfig

# docs/results.md, "Initial weights", has the search behind these numbers.
_SHORTEST, _LONGEST = 2.0, 256.0  # wavelengths of the sinusoids, in tokens
# Root mean square of the positions over `initializer_range`; of words it is
# 0.88, that of a normal distribution cut at two standard deviations.
_POSITION_SCALE = 4.0 / 3.0
# Attention score of the token that a head looks for, if the layer's input were
# positions alone. About half of its variance is.
_SCORE = 17.5


def informed(
  config: BertConfig, log_frequencies: np.ndarray, seed: int
) -> dict[str, np.ndarray]:
  """float32 values by the variable's name, of a part of the variables.

  `log_frequencies` is [V], in nats. The hidden size must be even.
  """
  hidden, heads = config.hidden_size, config.num_attention_heads
  rng = np.random.default_rng([seed, hidden, heads])
  query, key = attention_to_neighbours(hidden, heads, rng)
  keeping = lambda: rng.normal(size=[hidden, hidden]) / math.sqrt(hidden)
  attention = "bert/encoder/layer_0/attention"
  values = {
    "bert/embeddings/position_embeddings": sinusoids(
      config.max_position_embeddings, hidden
    )
    * (math.sqrt(2.0) * _POSITION_SCALE * config.initializer_range),
    f"{attention}/self/query/kernel": query,
    f"{attention}/self/key/kernel": key,
    f"{attention}/self/value/kernel": keeping(),
    f"{attention}/output/dense/kernel": keeping(),
    "cls/predictions/output_bias": log_frequencies,
  }
  return {name: value.astype(np.float32) for name, value in values.items()}


def _frequencies(hidden: int) -> np.ndarray:
  """Radians a token, float64 [H / 2], from the highest to the lowest."""
  return 2.0 * math.pi / np.geomspace(_SHORTEST, _LONGEST, hidden // 2)


def sinusoids(rows: int, hidden: int) -> np.ndarray:
  """float64 [rows, H]: pairs of a sine and a cosine of the row's number."""
  angles = np.arange(rows)[:, None] * _frequencies(hidden)
  return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(rows, hidden)


def offset(head: int) -> int:
  """How far from a token its head looks: -1, 1, -2, 2, ... tokens."""
  return (head // 2 + 1) * (1 if head % 2 else -1)


def attention_to_neighbours(hidden: int, heads: int, rng) -> tuple:
  """Kernels of queries and keys, float64 [H, H].

  With p_i of `sinusoids`, p_{i+o} is R p_i for a rotation R. A head's query
  kernel A is random, so that A A' is about the identity; its key kernel is R A.
  So its score of the tokens i and j is about p_{i+o} p_j, largest at j = i + o.
  """
  size = hidden // heads
  std = math.sqrt(_SCORE / (hidden * math.sqrt(size)))
  query = rng.normal(size=[hidden // 2, 2, heads, size]) * std
  offsets = np.array([offset(head) for head in range(heads)])
  angles = _frequencies(hidden)[:, None] * offsets
  sin, cos = np.sin(angles)[..., None], np.cos(angles)[..., None]
  of_sine, of_cosine = query[:, 0], query[:, 1]
  key = np.stack(
    [of_sine * cos + of_cosine * sin, of_cosine * cos - of_sine * sin], axis=1
  )
  return query.reshape(hidden, hidden), key.reshape(hidden, hidden)
