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
  https://arxiv.org/abs/2305.09828). It predicts a word from that neighbour, by
  the factors of those counts; the masked LM head passes predictions on.
- With rotary positions, where none are added to words, the second layer's heads
  attend to tokens that have the same neighbours, and copy them: induction heads
  (https://arxiv.org/abs/2209.11895) of both sides.

The model is an ordinary BERT, and training may change all of its weights.
"""

import math

import numpy as np
from scipy import sparse

from config.bert_config import BertConfig
from model.attention import rotary_frequencies
from model.weights import ATTENDED, KEY, QUERY, VALUE, embedding_tables

# research/quality_for_the_time.md has the searches behind these numbers.
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
# What copies reads neighbours by an inverse with this ridge, in columns of this
# norm. Pairs that rotate faster do not read: they would prefer near tokens.
_READING_RIDGE, _READING_NORM, _FASTEST = 0.1, 1.2, 0.05  # radians a token

_FIRST, _SECOND = (f"bert/encoder/layer_{n}/%s/kernel" for n in (0, 1))


def informed(
  config: BertConfig,
  log_frequencies: np.ndarray,
  context_words: np.ndarray,
  neighbours: dict[int, sparse.csr_array],
  seed: int,
) -> dict[str, np.ndarray]:
  """float32 values by the variable's name, of a part of the variables.

  `log_frequencies` is [V], in nats; `neighbours` has [V, N] by the offset: how
  often each of the N `context_words`, ids, stood so far from each word. The
  hidden size must be even.
  """
  hidden, heads = config.hidden_size, config.num_attention_heads
  rng = np.random.default_rng([seed, hidden, heads])
  words, contexts = factors(neighbours, hidden, seed)
  table = words * (_WORD_SCALE * config.initializer_range)
  values = {"bert/embeddings/word_embeddings": table}
  if config.decoder_bias:
    values["cls/predictions/output_bias"] = log_frequencies
  if not config.tie_word_embeddings:
    values["cls/predictions/output_weights"] = table
  is_rotary = config.position_type == "rotary"
  has_own_keys = config.key_value_heads == heads and config.attention_bias
  if has_own_keys and (config.global_attn_every_n_layers == 1 or is_rotary):
    values |= _looking_at_neighbours(config, rng)
    value, output = values[_FIRST % VALUE], values[_FIRST % ATTENDED]
    for head, offset in enumerate(offsets(heads)):
      if offset in contexts and contexts[offset].any():
        own = slice(head * config.head_size, (head + 1) * config.head_size)
        counts = neighbours[offset].sum(axis=0)
        value[:, own], output[own] = predicting_kernels(
          words[context_words], contexts[offset], counts, heads
        )
    if config.mlm_head:
      noise = rng.normal(size=[hidden, hidden]) * config.initializer_range
      values["cls/predictions/transform/dense/kernel"] = np.eye(hidden) + noise
    if is_rotary and config.num_hidden_layers > 1:
      values |= _copying(config, output, rng)
  return {name: array.astype(np.float32) for name, array in values.items()}


def _looking_at_neighbours(config: BertConfig, rng) -> dict:
  """The first layer's attention, and the positions that it reads."""
  hidden, heads = config.hidden_size, config.num_attention_heads
  values = {}
  if config.position_type == "rotary":
    size, theta = config.head_size, config.global_rope_theta
    query, key = biases_to_neighbours(size, heads, theta)
    values[f"bert/encoder/layer_0/{QUERY}/bias"] = query
    values[f"bert/encoder/layer_0/{KEY}/bias"] = key
  else:
    query, key = attention_to_neighbours(hidden, heads, rng)
    values[_FIRST % QUERY], values[_FIRST % KEY] = query, key
    rows = dict(embedding_tables(config))["position"]
    scale = math.sqrt(2.0) * _POSITION_SCALE * config.initializer_range
    positions = scale * sinusoids(rows, hidden)
    values["bert/embeddings/position_embeddings"] = positions
  # They keep the variance of what they multiply.
  value, output = rng.normal(size=[2, hidden, hidden]) / math.sqrt(hidden)
  values[_FIRST % VALUE], values[_FIRST % ATTENDED] = value, output
  return values


def predicting_kernels(
  words: np.ndarray, contexts: np.ndarray, counts: np.ndarray, heads: int
) -> tuple:
  """Kernels of a head's values and output, [H, D] and [D, H].

  Together they map context words, `words` [N, H], to their factors, `contexts`
  [N, H], whose products with embeddings say which words stand beside: by least
  squares, weighted by roots of `counts` [N], cut to D singular values.
  """
  weighted = words * np.sqrt(counts, dtype=np.float64)[:, np.newaxis]
  # Normal equations, [H, H] in place of [N, H]; they square float32's errors.
  matrix = np.linalg.lstsq(weighted.T @ words, weighted.T @ contexts)[0]
  left, sizes, right = np.linalg.svd(matrix)
  kept = len(sizes) // heads
  roots = np.sqrt(sizes[:kept])
  value, output = left[:, :kept] * roots, roots[:, np.newaxis] * right[:kept]
  value /= np.std(words @ value)
  # All heads together keep the variance.
  output /= np.std(words @ value @ output) * math.sqrt(heads)
  return value, output


def _copying(config: BertConfig, output: np.ndarray, rng) -> dict:
  """The second layer's attention.

  The first two heads' rows of `output`, the first layer's output kernel, write
  what stands beside a token. Queries and keys read that by the same weights,
  but for pairs that rotate fast: the score of two tokens is how similar
  neighbours they have. Values are rotated and outputs rotate back: a copy.
  """
  hidden, size = config.hidden_size, config.head_size
  query, key = rng.normal(size=[2, hidden, hidden]) * config.initializer_range
  square = output @ output.T + _READING_RIDGE * np.eye(hidden)
  reading = np.linalg.solve(square, output).T[:, : 2 * size]
  thetas = config.global_rope_theta, config.local_rope_theta
  frequencies = rotary_frequencies(size, thetas[config.is_local(1)])
  is_slow = frequencies <= max(_FASTEST, frequencies[-1])
  slow = np.flatnonzero(np.tile(is_slow, 2))
  for first in range(0, hidden, size):
    mixed = reading @ rng.normal(size=[reading.shape[1], len(slow)])
    mixed *= _READING_NORM / np.linalg.norm(mixed, axis=0)
    query[:, first + slow] = key[:, first + slow] = mixed
  value = np.linalg.qr(rng.normal(size=[hidden, hidden]))[0]
  return {
    _SECOND % QUERY: query, _SECOND % KEY: key, _SECOND % VALUE: value,
    _SECOND % ATTENDED: value.T,
  }  # fmt: skip


def factors(
  neighbours: dict[int, sparse.csr_array], hidden: int, seed: int
) -> tuple:
  """Factors of counts: (words, float32 [V, H], contexts, {offset: [N, H]}).

  Rows have a root mean square of 1, those of contexts without counts are 0.
  With R the square roots of all counts, r and c the sums of R's rows and
  columns, and U S V' the singular values of R / sqrt(r c'), words are rows of
  U sqrt(S), at random as far as counts are few, contexts those of V sqrt(S), in
  one random basis. The largest of these singular vectors is sqrt(r), how
  frequent words are, and left out. (So it is correspondence analysis of roots.
  The paper's r and c are roots of the counts' sums.)
  """
  from sklearn.utils.extmath import randomized_svd  # slow to import

  rng = np.random.default_rng([seed, hidden])
  counts = sparse.hstack(list(neighbours.values()), format="csr")
  roots = counts.sqrt()
  r, c = roots.sum(axis=1), roots.sum(axis=0)
  over_rows = sparse.diags_array(1.0 / np.sqrt(np.where(r > 0, r, 1.0)))
  over_columns = sparse.diags_array(1.0 / np.sqrt(np.where(c > 0, c, 1.0)))
  scaled = over_rows @ roots @ over_columns
  words, contexts = (np.zeros([len(x), hidden], np.float32) for x in (r, c))
  wanted = min(hidden + 1, *scaled.shape)
  if scaled.nnz:
    u, s, v = randomized_svd(
      scaled, wanted, n_iter=4, random_state=int(rng.integers(1 << 31))
    )
    frequency = np.sqrt(r / r.sum())
    # Projected out: text in parts without a common word has more vectors of
    # its size, and any mixture of them may come first.
    scores = u * np.sqrt(s)
    scores -= np.outer(frequency, frequency @ scores)
    _, axes = np.linalg.eigh(scores.T @ scores)
    axes = axes[:, 1:]  # the first has none left
    words[:, : wanted - 1] = scores @ axes
    contexts[:, : wanted - 1] = (v.T * np.sqrt(s)) @ axes
  # In the singular vectors' own basis the first numbers of all words would
  # be the largest; in a random one all numbers are alike.
  basis = np.linalg.qr(rng.normal(size=[hidden, hidden]))[0].astype(np.float32)
  words, contexts = _normalized(words @ basis), _normalized(contexts @ basis)
  contexts *= (c > 0)[:, np.newaxis]
  number = counts.sum(axis=1)[:, np.newaxis]
  # Rare words have few counts, of which much is chance: noise replaces it.
  weight = number / (number + _FEW_NEIGHBOURS)
  weight *= words.any(axis=1, keepdims=True)
  noise = _normalized(rng.standard_normal(words.shape, np.float32))
  words = np.sqrt(weight) * words + np.sqrt(1.0 - weight) * noise
  by_offset = zip(neighbours, np.split(contexts, len(neighbours)), strict=True)
  return _normalized(words).astype(np.float32), dict(by_offset)


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
  rotation = np.exp(1j * _frequencies(hidden)[:, None] * offsets(heads))
  pairs = (query[:, 1] + 1j * query[:, 0]) * rotation[..., None]
  key = np.stack([pairs.imag, pairs.real], axis=1)
  return query.reshape(hidden, hidden), key.reshape(hidden, hidden)


def biases_to_neighbours(size: int, heads: int, theta: float) -> tuple:
  """Biases of queries and keys, float64 [H], that rotary positions rotate.

  All tokens have a head's query u, and its key, u rotated back by the head's
  offset o. Positions i and j rotate them, so that the score is the sum of
  u_k^2 cos((i + o - j) f_k) over pairs k of the head's `size` numbers, largest
  at j = i + o.
  """
  frequencies = rotary_frequencies(size, theta)
  is_fast = frequencies >= _SLOWEST
  query = np.sqrt(_ROTARY_SCORE * math.sqrt(size) / is_fast.sum()) * is_fast
  angles = frequencies * offsets(heads)[:, None]
  key = np.append(query * np.cos(angles), -query * np.sin(angles), axis=1)
  return np.tile(np.append(query, 0 * query), heads), key.ravel()
