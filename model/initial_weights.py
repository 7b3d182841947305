"""Initial weights that know what a model of text learns first.

A model with random weights (`layers.create_initializer`) first learns how
frequent words are, then that neighbours matter, and for long which words are
alike. With `informed` it knows that:

- The masked LM's output bias is the log of each token's frequency
  (https://arxiv.org/abs/2212.09686). With a bias of 0 all rare words get the
  same small gradient, and Adam moves their embeddings at the full rate until
  all point the same way (https://arxiv.org/abs/2502.08441).
- Word embeddings are factors of how often words and their neighbours stand
  together, so that words with like neighbours are close together
  (https://aclanthology.org/P15-1124/).
- Position embeddings are sinusoids, so that one rotation moves all of them by
  the same number of tokens (https://arxiv.org/abs/1706.03762, section 3.5).
- Each head of the first layer attends to the token at its own distance: its key
  weights are its query weights, rotated (compare the products of weights in
  https://arxiv.org/abs/2305.09828). Values and outputs keep the variance.

The model is an ordinary BERT, and training may change all of its weights.
"""

import math

import numpy as np
from scipy import sparse

from config.bert_config import BertConfig
from model.weights import embedding_tables

# docs/results.md, "Initial weights", has the search behind these numbers.
_SHORTEST, _LONGEST = 2.0, 256.0  # wavelengths of the sinusoids, in tokens
# Root mean square of the words' embeddings over `initializer_range`.
_WORD_SCALE = 1.76
# A word with so many neighbours counted gets half of its variance at random.
_FEW_NEIGHBOURS = 20.0
# Root mean square of the positions over `initializer_range`.
_POSITION_SCALE = 8.0 / 3.0
# Attention score of the token that a head looks for, if the layer's input were
# positions alone. About two thirds of its variance is.
_SCORE = 17.5
# The same with rotary positions, by the pairs that rotate at least so fast.
_ROTARY_SCORE, _SLOWEST = 12.0, 0.2  # radians a token


def informed(
  config: BertConfig,
  log_frequencies: np.ndarray,
  neighbours: sparse.csr_array,
  seed: int,
) -> dict[str, np.ndarray]:
  """float32 values by the variable's name, of a part of the variables.

  `log_frequencies` is [V], in nats; `neighbours` [V, ...], how often a word
  stood with each context. The hidden size must be even.
  """
  hidden = config.hidden_size
  words = word_embeddings(neighbours, hidden, seed)
  words = words * (_WORD_SCALE * config.initializer_range)
  values = {"bert/embeddings/word_embeddings": words}
  if config.decoder_bias:
    values["cls/predictions/output_bias"] = log_frequencies
  is_global = config.global_attn_every_n_layers == 1
  has_own_keys = config.num_key_value_heads is None and config.attention_bias
  if has_own_keys and (is_global or config.position_type == "rotary"):
    values |= _looking_at_neighbours(config, seed)
  return {name: array.astype(np.float32) for name, array in values.items()}


def _looking_at_neighbours(config: BertConfig, seed: int) -> dict:
  """The first layer's attention, and the positions that it reads."""
  hidden, heads = config.hidden_size, config.num_attention_heads
  rng = np.random.default_rng([seed, hidden, heads])
  attention = "bert/encoder/layer_0/attention"
  values = {}
  if config.position_type == "rotary":
    query, key = biases_to_neighbours(
      config.head_size, heads, config.global_rope_theta
    )
    values[f"{attention}/self/query/bias"] = query
    values[f"{attention}/self/key/bias"] = key
  else:
    query, key = attention_to_neighbours(hidden, heads, rng)
    values[f"{attention}/self/query/kernel"] = query
    values[f"{attention}/self/key/kernel"] = key
    rows = dict(embedding_tables(config))["position"]
    scale = math.sqrt(2.0) * _POSITION_SCALE * config.initializer_range
    positions = scale * sinusoids(rows, hidden)
    values["bert/embeddings/position_embeddings"] = positions
  # They keep the variance of what they multiply.
  value, output = rng.normal(size=[2, hidden, hidden]) / math.sqrt(hidden)
  values[f"{attention}/self/value/kernel"] = value
  values[f"{attention}/output/dense/kernel"] = output
  return values


def word_embeddings(
  neighbours: sparse.csr_array, hidden: int, seed: int
) -> np.ndarray:
  """float32 [V, H]; the root mean square of each row is 1.

  With R the square roots of `neighbours`, r and c the sums of R's rows and
  columns, and U S V' the singular values of R / sqrt(r c'), rows are those of
  U sqrt(S), in a random basis, and at random as far as counts are few. The
  largest of these singular vectors is sqrt(r), how frequent words are, and left
  out. (So it is correspondence analysis of roots. The paper's r and c are roots
  of the counts' sums.)
  """
  from sklearn.utils.extmath import randomized_svd  # slow to import

  rng = np.random.default_rng([seed, hidden])
  roots = neighbours.sqrt()
  r, c = roots.sum(axis=1), roots.sum(axis=0)
  over_rows = sparse.diags_array(1.0 / np.sqrt(np.where(r > 0, r, 1.0)))
  over_columns = sparse.diags_array(1.0 / np.sqrt(np.where(c > 0, c, 1.0)))
  scaled = over_rows @ roots @ over_columns
  factors = np.zeros([len(r), hidden], np.float32)
  wanted = min(hidden + 1, *scaled.shape)
  if scaled.nnz:
    u, s, _ = randomized_svd(
      scaled, wanted, n_iter=4, random_state=int(rng.integers(1 << 31))
    )
    frequency = np.sqrt(r / r.sum())
    # Projected out: text in parts without a common word has more vectors of
    # its size, and any mixture of them may come first.
    scores = u * np.sqrt(s)
    scores -= np.outer(frequency, frequency @ scores)
    _, axes = np.linalg.eigh(scores.T @ scores)
    factors[:, : wanted - 1] = scores @ axes[:, 1:]  # the first has none left
  # In the singular vectors' own basis the first numbers of all words would
  # be the largest; in a random one all numbers are alike.
  basis = np.linalg.qr(rng.normal(size=[hidden, hidden]))[0]
  rotated = _normalized(factors @ basis.astype(np.float32))
  number = neighbours.sum(axis=1)[:, None]
  # Rare words have few counts, of which much is chance: noise replaces it.
  weight = number / (number + _FEW_NEIGHBOURS)
  weight *= rotated.any(axis=1, keepdims=True)
  noise = _normalized(rng.standard_normal(factors.shape, np.float32))
  words = np.sqrt(weight) * rotated + np.sqrt(1.0 - weight) * noise
  return _normalized(words).astype(np.float32)


def _normalized(rows: np.ndarray) -> np.ndarray:
  """Rows with a root mean square of 1; rows of rounding errors become 0."""
  size = np.sqrt(np.mean(np.square(rows), axis=-1, keepdims=True))
  least = 1e-3 * np.median(size)
  return np.where(size > least, rows / np.maximum(size, 1e-30), 0.0)


def _frequencies(hidden: int) -> np.ndarray:
  """Radians a token, float64 [H / 2], from the highest to the lowest."""
  return 2.0 * math.pi / np.geomspace(_SHORTEST, _LONGEST, hidden // 2)


def sinusoids(rows: int, hidden: int) -> np.ndarray:
  """float64 [rows, H]: pairs of a sine and a cosine of the row's number."""
  angles = np.arange(rows)[:, None] * _frequencies(hidden)
  return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(rows, hidden)


def offsets(heads: int) -> np.ndarray:
  """How far from a token each head looks: -1, 1, -2, 2, ... tokens."""
  head = np.arange(heads)
  return (head // 2 + 1) * np.where(head % 2, 1, -1)


def attention_to_neighbours(hidden: int, heads: int, rng) -> tuple:
  """Kernels of queries and keys, float64 [H, H].

  With p_i of `sinusoids`, p_{i+o} is R p_i for a rotation R. A head's query
  kernel A is random, so that A A' is about the identity; its key kernel is R A.
  So its score of the tokens i and j is about p_{i+o} p_j, largest at j = i + o.
  """
  size = hidden // heads
  std = math.sqrt(_SCORE / (hidden * math.sqrt(size)))
  query = rng.normal(size=[hidden // 2, 2, heads, size]) * std
  angles = _frequencies(hidden)[:, None] * offsets(heads)
  sin, cos = np.sin(angles)[..., None], np.cos(angles)[..., None]
  of_sine, of_cosine = query[:, 0], query[:, 1]
  key = np.stack(
    [of_sine * cos + of_cosine * sin, of_cosine * cos - of_sine * sin], axis=1
  )
  return query.reshape(hidden, hidden), key.reshape(hidden, hidden)


def biases_to_neighbours(size: int, heads: int, theta: float) -> tuple:
  """Biases of queries and keys, float64 [H], that rotary positions rotate.

  All tokens have a head's query u, and its key, u rotated back by the head's
  offset o. Positions i and j rotate them, so that the score is the sum of
  u_k^2 cos((i + o - j) f_k) over pairs k of the head's `size` numbers, largest
  at j = i + o.
  """
  frequencies = theta ** (-np.arange(0, size, 2) / size)
  is_fast = frequencies >= _SLOWEST
  query = np.sqrt(_ROTARY_SCORE * math.sqrt(size) / is_fast.sum()) * is_fast
  angles = frequencies * offsets(heads)[:, None]
  key = np.append(query * np.cos(angles), -query * np.sin(angles), axis=1)
  return np.tile(np.append(query, 0 * query), heads), key.ravel()
