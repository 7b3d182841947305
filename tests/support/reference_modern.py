"""BERT's and later encoders' forward pass in NumPy float64, from the papers.

Independent of modeling.py: it shares no code with it and knows the model only
by the names of its variables. Slow and plain on purpose: one example and one
head at a time. `config` is a dictionary of the model's keys, with those of
BERT's values left out; `weights` has {variable name: float64 array}.
"""

import math

import numpy as np

# Published architectures by the model's keys, with blocks of two tokens.
MODERN_BERT = dict(
  position_type="rotary", global_rope_theta=160000.0, local_attention=4,
  global_attn_every_n_layers=3, attention_bias=False, mlp_bias=False,
  norm_bias=False, norm_eps=1e-5, pre_layer_norm=True, gated=True,
  hidden_act="gelu_erf", type_vocab_size=0, classifier_bias=False,
)  # fmt: skip
NEO_BERT = dict(
  position_type="rotary", attention_bias=False, mlp_bias=False,
  norm="rms", norm_bias=False, norm_eps=1e-5, pre_layer_norm=True,
  embedding_norm=False, gated=True, hidden_act="silu", type_vocab_size=0,
  mlm_head=False, tie_word_embeddings=False,
)  # fmt: skip
EURO_BERT = NEO_BERT | dict(num_key_value_heads=1, decoder_bias=False)
ARCHITECTURES = {
  "ModernBERT": MODERN_BERT, "NeoBERT": NEO_BERT, "EuroBERT": EURO_BERT,
}  # fmt: skip


def log_softmax(x):
  """Of one vector."""
  shifted = x - x.max()
  return shifted - math.log(np.exp(shifted).sum())


def normalized(weights, scope, rows, config):
  """Rows [S, H] by the norm whose variables are in `scope`.

  https://arxiv.org/abs/1607.06450, or the root mean square's.
  """
  gamma = weights[f"{scope}/LayerNorm/gamma"]
  outputs = []
  for row in rows:
    deviation = row
    if config.get("norm", "layer") == "layer":
      deviation = row - row.mean()
    mean_square = (deviation**2).mean()
    epsilon = config.get("norm_eps", 1e-12)
    outputs.append(gamma * deviation / math.sqrt(mean_square + epsilon))
    if config.get("norm_bias", True):
      outputs[-1] = outputs[-1] + weights[f"{scope}/LayerNorm/beta"]
  return np.stack(outputs)


def dense(weights, scope, x, has_bias):
  product = x @ weights[f"{scope}/kernel"]
  return product + weights[f"{scope}/bias"] if has_bias else product


def activated(x, config):
  name = config.get("hidden_act", "gelu")
  if name == "silu":
    return x / (1.0 + np.exp(-x))
  if name == "gelu_erf":
    return x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))
  # https://arxiv.org/abs/1606.08415, the tanh approximation.
  inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
  return 0.5 * x * (1.0 + np.tanh(inner))


def turned(vector, position, theta):
  """A head's [D], whose halves are the parts of D / 2 complex numbers."""
  half = len(vector) // 2
  output = np.empty_like(vector)
  for j in range(half):
    angle = position * theta ** (-j / half)
    real, imaginary = vector[j], vector[j + half]
    output[j] = real * math.cos(angle) - imaginary * math.sin(angle)
    output[j + half] = imaginary * math.cos(angle) + real * math.sin(angle)
  return output


def attention(weights, scope, x, seen, positions, config, local):
  """[S, N * D] of one example, before the output layer.

  `seen` is bool [S, S], whom each token may attend to but for the distance.
  """
  heads = config["num_attention_heads"]
  size = config["hidden_size"] // heads
  key_heads = config.get("num_key_value_heads") or heads
  has_bias = config.get("attention_bias", True)
  query, key, value = (
    dense(weights, f"{scope}/{name}", x, has_bias)
    for name in ("query", "key", "value")
  )
  theta = config.get("global_rope_theta", 10000.0)
  if local:
    theta = config.get("local_rope_theta", 10000.0)
  length = len(x)
  context = np.zeros([length, heads * size])
  for head in range(heads):
    own = slice(head * size, (head + 1) * size)
    first = head * key_heads // heads * size
    theirs = slice(first, first + size)
    queries, keys = query[:, own], key[:, theirs]
    if config.get("position_type") == "rotary":
      pairs = zip(queries, positions, strict=True)
      queries = np.stack([turned(row, p, theta) for row, p in pairs])
      pairs = zip(keys, positions, strict=True)
      keys = np.stack([turned(row, p, theta) for row, p in pairs])
    for i in range(length):
      among = []
      for j in range(length):
        far = abs(i - j) > config.get("local_attention", 128) // 2
        if seen[i, j] and not (local and far):
          among.append(j)
      if among:
        scores = keys[among] @ queries[i] / math.sqrt(size)
        probs = np.exp(log_softmax(scores))
        context[i, own] = probs @ value[among][:, theirs]
  return context


def encoder(config, weights, input_ids, seen, segment_ids, positions):
  """[layers + 1, S, H]: the embeddings, then each layer's output."""
  scope = "bert/embeddings"
  x = weights[f"{scope}/word_embeddings"][input_ids]
  if config["type_vocab_size"]:
    x = x + weights[f"{scope}/token_type_embeddings"][segment_ids]
  if config.get("position_type", "absolute") == "absolute":
    rows = positions + config.get("position_offset", 0)
    x = x + weights[f"{scope}/position_embeddings"][rows]
  before = config.get("pre_layer_norm", False)
  mlp_bias = config.get("mlp_bias", True)
  if config.get("embedding_norm", True):
    x = normalized(weights, scope, x, config)
  outputs, residual, reads = [x], x, x
  if before and not config.get("embedding_norm", True):
    reads = normalized(weights, scope, x, config)
  for number in range(config["num_hidden_layers"]):
    scope = f"bert/encoder/layer_{number}"
    local = number % config.get("global_attn_every_n_layers", 1) > 0
    context = attention(
      weights, f"{scope}/attention/self", reads, seen, positions, config, local
    )
    has_bias = config.get("attention_bias", True)
    output = dense(
      weights, f"{scope}/attention/output/dense", context, has_bias
    )
    residual = residual + output
    reads = normalized(weights, f"{scope}/attention/output", residual, config)
    if not before:
      residual = reads
    wide = dense(weights, f"{scope}/intermediate/dense", reads, mlp_bias)
    wide = activated(wide, config)
    if config.get("gated"):
      wide = wide * dense(
        weights, f"{scope}/intermediate/gate", reads, mlp_bias
      )
    output = dense(weights, f"{scope}/output/dense", wide, mlp_bias)
    residual = residual + output
    reads = normalized(weights, f"{scope}/output", residual, config)
    if not before:
      residual = reads
    outputs.append(reads)
  return np.stack(outputs)


def masked_lm_logits(config, weights, rows):
  """[n, H] -> [n, V]"""
  scope = "cls/predictions"
  if config.get("mlm_head", True):
    has_bias = config.get("classifier_bias", True)
    rows = dense(weights, f"{scope}/transform/dense", rows, has_bias)
    rows = activated(rows, config)
    rows = normalized(weights, f"{scope}/transform", rows, config)
  words = weights["bert/embeddings/word_embeddings"]
  if not config.get("tie_word_embeddings", True):
    words = weights[f"{scope}/output_weights"]
  logits = rows @ words.T
  if config.get("decoder_bias", True):
    logits = logits + weights[f"{scope}/output_bias"]
  return logits
