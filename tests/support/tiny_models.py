"""A tiny model of each architecture, with batches and weights for it."""

import numpy as np
from reference_modern import ARCHITECTURES

import modeling
from common.tensorflow_v1 import tf
from xla_patches import jit

B, S, P, V = 3, 9, 4, 31  # see modeling's shape legend
TINY = {
  "vocab_size": V,
  "hidden_size": 8,
  "num_hidden_layers": 2,
  "num_attention_heads": 2,
  "intermediate_size": 12,
  "max_position_embeddings": 16,
  "type_vocab_size": 2,
}
# Of later encoders the first has rotary positions, blocks and gates.
KEYS = {
  "BERT": {},
  "BERT, pre": dict(pre_layer_norm=True),
  "BERT, erf": dict(hidden_act="gelu_erf"),
  "BERT, pre, erf": dict(pre_layer_norm=True, hidden_act="gelu_erf"),
  **{n: {"num_hidden_layers": 3, **ARCHITECTURES[n]} for n in ARCHITECTURES},
}


def tiny_config(dropout=0.0, **keys):
  names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
  return modeling.BertConfig.from_dict(
    {**TINY, **dict.fromkeys(names, dropout), **keys}
  )


def ragged_batch(rng, lengths=(S, 5, 7), used=(4, 2, 3), weights=(1, 1, 0)):
  """NumPy arrays: unequal lengths, unused masked positions, a padding row."""
  rows, places = len(lengths), np.arange(S)
  lengths, used = np.array([lengths]).T, np.array([used]).T
  return modeling.PretrainingBatch(
    input_ids=rng.integers(0, V, [rows, S]),
    input_mask=(places < lengths).astype(np.int32),
    segment_ids=(places >= lengths // 2).astype(np.int32),
    masked_lm_positions=rng.integers(0, S, [rows, P]) % lengths,
    masked_lm_ids=rng.integers(0, V, [rows, P]),
    masked_lm_weights=(np.arange(P) < used).astype(np.float32),
    next_sentence_labels=np.arange(rows)[:, np.newaxis] % 2,
    example_weights=np.array(weights, np.float32),
  )


def as_tensors(batch):
  types = {"i": tf.int32, "f": tf.float32}
  return modeling.PretrainingBatch(
    *(tf.constant(values, types[values.dtype.kind]) for values in batch)
  )


def randomise(session, rng):
  """Gives all variables random values, far from 0 and 1; {name: value}."""
  weights, feeds = {}, {}
  for variable in tf.trainable_variables():
    value = rng.normal(0.0, 0.4, variable.shape.as_list())
    value += 1.0 if variable.op.name.endswith("gamma") else 0.0
    value = value.astype(np.float32)
    feeds[variable.initializer.inputs[1]] = value
    weights[variable.op.name] = value.astype(np.float64)
  session.run([v.initializer for v in tf.trainable_variables()], feeds)
  return weights


def loss_and_gradients(config, mode="off", **options):
  """{name: value} with dropout, of the same weights always; and the graph."""
  rng = np.random.default_rng(9)
  with tf.Graph().as_default() as graph, jit.mode(mode):
    tf.enable_resource_variables()
    seed = tf.constant([1, 2])
    sums = modeling.pretraining_model(
      as_tensors(ragged_batch(rng)), config, True, seed, **options
    )
    loss = sums.masked_lm_loss + sums.next_sentence_loss
    variables = tf.trainable_variables()
    values = [loss, *tf.gradients(loss, variables)]
    with tf.Session() as session:
      randomise(session, rng)
      values = session.run(values)
  names = ["loss", *(v.op.name for v in variables)]
  return dict(zip(names, values, strict=True)), graph
