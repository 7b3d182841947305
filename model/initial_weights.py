"""Initial weights that know what a model of text learns first.

Random weights (`layers.create_initializer`) first learn how frequent words are,
then that neighbours matter. `informed` begins there:

- the masked LM's output bias is the log of each token's frequency
  (https://arxiv.org/abs/2212.09686). Otherwise all rows of rare words must move
  alike, and Adam, which divides by their small gradients, goes on with it until
  the word embeddings have one direction (https://arxiv.org/abs/2502.08441);
- position embeddings are sinusoids, so that a rotation moves them by any number
  of places (https://arxiv.org/abs/1706.03762, section 3.5);
- each head of the first layer attends to one place beside the token: its keys
  are its queries' weights, rotated (compare the products of weights in
  https://arxiv.org/abs/2305.09828). Its values and outputs keep the variance.

They are an ordinary BERT's weights, and training may move all of them.
"""

import math

import numpy as np

from model.bert_config import BertConfig

# The sinusoids' wavelengths, in tokens: those of a sentence or two.
_SHORTEST, _LONGEST = 2.0, 256.0
# The positions' root mean square over `initializer_range`: words have 0.88.
_POSITION_SCALE = 4.0 / 3.0
# The attention score of the place that a head looks for, if the layer's input
# were its position alone. About half of it is.
_SCORE = 17.5


def informed(
  config: BertConfig, log_frequencies: np.ndarray, seed: int
) -> dict[str, np.ndarray]:
  """float32 values by the variable's name, of a part of the variables.

  `log_frequencies` is [V], in nats. ValueError if the hidden size is odd.
  """
  hidden, heads = config.hidden_size, config.num_attention_heads
  if hidden % 2:
    raise ValueError(f"hidden_size {hidden} is odd: sinusoids come in pairs")
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
  """The place that a head looks for: -1, 1, -2, 2, ... from the token."""
  return (head // 2 + 1) * (1 if head % 2 else -1)


def attention_to_neighbours(hidden: int, heads: int, rng) -> tuple:
  """Kernels of queries and keys, float64 [H, H].

  With p_i of `sinusoids`, p_{i+o} is R p_i for a rotation R. A head's query
  kernel A is random, so that A A' is about the identity; its key kernel is R A.
  So its score of the places i and j is about p_{i+o} p_j, largest at j = i + o.
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
