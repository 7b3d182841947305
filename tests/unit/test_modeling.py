"""The model against references, and what its parts promise."""

import collections
import functools
import json
import math
from pathlib import Path

import attention_in_blocks
import numpy as np
import pytest
import reference_numpy

import mixed_precision
import modeling
from common.tensorflow_v1 import tf
from model import bert_config, encoder, kernels, layers, weights
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


@pytest.fixture(autouse=True)
def graph():
  with tf.Graph().as_default() as graph:
    yield graph


@pytest.fixture(params=[False, True], ids=["ref", "resource"])
def variable_kind(request, graph):
  """Runs a test with reference and with resource variables."""
  scope = tf.get_variable_scope()
  scope.set_use_resource(request.param)
  return request.param


def tiny_config(dropout=0.0):
  return modeling.BertConfig.from_dict(
    TINY
    | {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
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
  def constant(values):
    dtype = tf.int32 if values.dtype.kind == "i" else tf.float32
    return tf.constant(values, dtype)

  return modeling.PretrainingBatch(*map(constant, batch))


def randomise(session, rng):
  """Gives all variables random values, far from 0 and 1; {name: value}."""
  weights = {}
  for variable in tf.trainable_variables():
    value = rng.normal(0.0, 0.4, variable.shape.as_list())
    value += 1.0 if variable.op.name.endswith("gamma") else 0.0
    value = value.astype(np.float32)
    variable.load(value, session)
    weights[variable.op.name] = value.astype(np.float64)
  return weights


# -----------------------------------------------------------------------------
# Against the NumPy reference
# -----------------------------------------------------------------------------


def reference_outputs(weights, batch, row):
  """float [3, S, H]: the embeddings of a row, and every layer's output."""
  inputs = batch.input_ids[row], batch.input_mask[row], batch.segment_ids[row]
  return reference_numpy.encoder(weights, *inputs, 2, 2)


def model_of(batch, config, is_training=False):
  """The encoder of a batch of tensors."""
  return modeling.BertModel(config, is_training, *batch[:3])


def test_two_layer_encoder_equals_numpy_reference(variable_kind):
  rng = np.random.default_rng(1)
  batch = ragged_batch(rng)
  model = model_of(as_tensors(batch), tiny_config(dropout=0.5))
  layers_out = [model.get_embedding_output(), *model.get_all_encoder_layers()]
  with tf.Session() as session:
    weights = randomise(session, rng)
    outputs, pooled, sequence = session.run(
      [layers_out, model.get_pooled_output(), model.get_sequence_output()]
    )
  np.testing.assert_array_equal(outputs[-1], sequence)
  for i in range(B):
    expected = reference_outputs(weights, batch, i)
    actual = np.stack([output[i] for output in outputs])
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(
      pooled[i], reference_numpy.pooler(weights, expected[-1]), atol=1e-5
    )


def test_pretraining_sums_equal_numpy_reference(variable_kind):
  rng = np.random.default_rng(2)
  batch = ragged_batch(rng)
  modeling.pretraining_model(as_tensors(batch), tiny_config(), True)
  with tf.Session() as session:
    weights = randomise(session, rng)
    # A right prediction, which random labels hardly give.
    output = reference_outputs(weights, batch, 0)[-1]
    log_probs = reference_numpy.masked_lm_log_probs(
      weights, output, batch.masked_lm_positions[0]
    )
    batch.masked_lm_ids[0] = log_probs.argmax(axis=1)
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      sums = modeling.pretraining_model(as_tensors(batch), tiny_config(), True)
    actual = session.run(sums)
  expected = reference_numpy.pretraining_sums(weights, batch, 2, 2)
  assert expected["masked_lm_correct"] >= P
  assert expected["masked_lm_weight"] == 6 and expected["tokens"] == S + 5
  for name, value in expected.items():
    assert getattr(actual, name) == pytest.approx(value, rel=1e-5), name
  # Masked LM alone is the same, without what the other head needs.
  with tf.variable_scope(tf.get_variable_scope(), reuse=True):
    sums = modeling.pretraining_model(
      as_tensors(batch), tiny_config(), True, next_sentence=False
    )
    weight = sums.masked_lm_weight
    loss = modeling.pretraining_loss(sums, tf.stack([weight, 0.0]))
  with tf.Session() as session:
    for variable in tf.trainable_variables():
      variable.load(weights[variable.op.name], session)
    alone, loss = session.run([sums.by_name(), loss])
  assert alone.keys() == expected.keys() - {
    "next_sentence_loss", "next_sentence_correct"
  }  # fmt: skip
  for name, value in alone.items():
    assert value == pytest.approx(expected[name], rel=1e-5), name
  assert loss == pytest.approx(alone["masked_lm_loss"] / 6, rel=1e-6)


def test_a_model_of_one_segment_type_takes_any_segment_ids():
  batch = ragged_batch(np.random.default_rng(4))
  assert batch.segment_ids.any()
  config = tiny_config()
  config.type_vocab_size = 1
  sums = []
  for segments in (batch.segment_ids, np.zeros_like(batch.segment_ids)):
    with tf.variable_scope(tf.get_variable_scope(), reuse=bool(sums)):
      tensors = as_tensors(batch._replace(segment_ids=segments))
      sums.append(modeling.pretraining_model(tensors, config, False))
  with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    assert session.run(sums[0]) == session.run(sums[1])


def test_heads_of_google_bert_equal_numpy_reference():
  rng = np.random.default_rng(3)
  batch = ragged_batch(rng)
  config = tiny_config()
  tensors = as_tensors(batch)
  model = model_of(tensors, config, True)
  masked_lm = modeling.get_masked_lm_output(
    config,
    model.get_sequence_output(),
    model.get_embedding_table(),
    tensors.masked_lm_positions,
    tensors.masked_lm_ids,
    tensors.masked_lm_weights,
  )
  next_sentence = modeling.get_next_sentence_output(
    config, model.get_pooled_output(), tensors.next_sentence_labels
  )
  with tf.Session() as session:
    weights = randomise(session, rng)
    masked_lm, next_sentence = session.run([masked_lm, next_sentence])
  log_probs, pair_log_probs = [], []
  for i in range(B):
    output = reference_outputs(weights, batch, i)[-1]
    positions = batch.masked_lm_positions[i]
    log_probs.append(
      reference_numpy.masked_lm_log_probs(weights, output, positions)
    )
    pooled = reference_numpy.pooler(weights, output)
    pair_log_probs.append(
      reference_numpy.next_sentence_log_probs(weights, pooled)
    )
  log_probs = np.concatenate(log_probs)
  losses = -log_probs[np.arange(B * P), batch.masked_lm_ids.reshape(-1)]
  label_weights = batch.masked_lm_weights.reshape(-1)
  loss = (losses * label_weights).sum() / (label_weights.sum() + 1e-5)
  pairs = np.stack(pair_log_probs)
  pair_losses = -pairs[np.arange(B), batch.next_sentence_labels[:, 0]]
  for actual, expected in (
    (masked_lm, (loss, losses, log_probs)),
    (next_sentence, (pair_losses.mean(), pair_losses, pairs)),
  ):
    for a, e in zip(actual, expected, strict=True):
      np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [5, 8])
@pytest.mark.parametrize("mode", ["off", "layers", "step"])
def test_cross_entropy_equals_tensorflows(mode, rows):
  """Also where the table has rows, and so logits, that are no class."""
  rng = np.random.default_rng(0)
  hidden = tf.constant(rng.normal(0, 1, [6, 3]).astype(np.float32))
  table = tf.constant(rng.normal(0, 2, [5, 3]).astype(np.float32))
  bias = tf.constant(rng.normal(0, 1, 5).astype(np.float32))
  labels = tf.constant([0, 4, 2, 2, 1, 3])
  weights = tf.constant([0.5, 1.0, 2.0, 0.0, 0.3, 1.0])
  with jit.mode(mode):
    matrix = kernels.aligned_rows(table, rows=rows, dtype=tf.float32)
    logits = tf.matmul(hidden, matrix, transpose_b=True)
    losses, correct = tf.unstack(
      kernels.cross_entropy(logits, bias, labels, dtype=tf.float32)
    )
  assert logits.shape[-1] == rows
  logits = tf.matmul(hidden, table, transpose_b=True) + bias
  want = tf.nn.sparse_softmax_cross_entropy_with_logits(
    labels=labels, logits=logits
  )
  right = tf.equal(tf.argmax(logits, axis=1, output_type=tf.int32), labels)
  gradients = []
  for losses_of in (losses, want):
    total = tf.reduce_sum(weights * losses_of)
    gradients.append(tf.gradients(total, [hidden, table, bias]))
  with tf.Session() as session:
    got = session.run([losses, correct, *gradients[0]])
    expected = session.run([want, tf.cast(right, tf.float32), *gradients[1]])
  assert 0 < got[1].sum() < 6
  for a, b in zip(got, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
  "used, total, made",
  [
    (0, 1024, 128), (1, 1024, 128), (128, 1024, 128), (129, 1024, 256),
    (1000, 1024, 1024), (1024, 1024, 1024),
    (2, 3, 3), (0, 16, 16), (1, 33, 16), (17, 33, 32), (33, 33, 33),
    (130, 900, 256), (890, 900, 896), (897, 900, 900),
  ],
)  # fmt: skip
def test_rows_to_predict_come_first_in_eighths(used, total, made):
  places = np.sort(np.random.default_rng(used).permutation(total)[:used])
  weights = np.zeros(total, np.float32)
  weights[places] = 0.5
  with tf.Session() as session:
    rows = session.run(modeling._rows_to_predict(tf.constant(weights)))
  assert len(rows) == made
  np.testing.assert_array_equal(rows[:used], places)
  assert len(np.unique(rows)) == len(rows)


@pytest.mark.parametrize("mode", ["off", "layers"])
def test_places_without_a_prediction_have_no_logits(mode, monkeypatch):
  """What is predicted has the sums and gradients that it has with all places.

  `step` and `auto` compile large programs, whose shapes are fixed: there all
  places have logits.
  """
  monkeypatch.setattr(modeling, "_ROWS", 1)
  batch = ragged_batch(np.random.default_rng(5))
  used = int((batch.masked_lm_weights * batch.example_weights[:, None]).sum())
  made, logits = [], []
  build = modeling.masked_lm_logits
  keep = lambda *args: logits.append(build(*args)) or logits[-1]
  monkeypatch.setattr(modeling, "masked_lm_logits", keep)
  for name in (mode, "step"):
    with jit.mode(name), tf.variable_scope("", reuse=tf.AUTO_REUSE):
      sums = modeling.pretraining_model(as_tensors(batch), tiny_config(), True)
      loss = modeling.pretraining_loss(sums, tf.constant([2.0, 3.0]))
      gradients = tf.gradients(loss, tf.trainable_variables())
    made.append([sums, gradients])
  with tf.Session() as session:
    randomise(session, np.random.default_rng(6))
    some, all_places, rows = session.run([*made, [x.matmul for x in logits]])
  assert [len(x) for x in rows] == [used, B * P] == [6, 12]
  for a, b in zip(*map(tf.nest.flatten, (some, all_places)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# -----------------------------------------------------------------------------
# Packed = unpacked
# -----------------------------------------------------------------------------


def packed(batch, packs, examples_per_record):
  """`batch` with its examples put together, written out place by place."""
  rows, predictions = len(packs), P + 2
  lengths = batch.input_mask.sum(axis=1)
  out = modeling.PretrainingBatch(
    *(np.zeros([rows, S], np.int32) for _ in range(3)),
    *(np.zeros([rows, predictions], np.int32) for _ in range(2)),
    np.zeros([rows, predictions], np.float32),
    np.zeros([rows, examples_per_record], np.int32),
    np.ones(rows, np.float32),
  )
  for row, pack in enumerate(packs):
    start = masked = 0
    for place, i in enumerate(pack):
      for j in range(lengths[i]):
        out.input_ids[row, start + j] = batch.input_ids[i, j]
        out.input_mask[row, start + j] = place + 1
        out.segment_ids[row, start + j] = batch.segment_ids[i, j]
      for j in range(int(batch.masked_lm_weights[i].sum())):
        position = batch.masked_lm_positions[i, j] + start
        out.masked_lm_positions[row, masked] = position
        out.masked_lm_ids[row, masked] = batch.masked_lm_ids[i, j]
        out.masked_lm_weights[row, masked] = 1.0
        masked += 1
      out.next_sentence_labels[row, place] = batch.next_sentence_labels[i, 0]
      start += lengths[i]
  return out


@pytest.mark.parametrize("mode", ["off", "layers", "step"])
def test_packed_equals_unpacked(mode):
  """Every head's sums, and the gradient of each head's loss."""
  rng = np.random.default_rng(5)
  examples = ragged_batch(rng, (S, 4, 3, 5, 2), (4, 1, 2, 2, 1), np.ones(5))
  batches = [examples, packed(examples, [[1, 2, 4], [0], [3]], 3)]
  results = []
  with jit.mode(mode):
    for batch in batches:
      scope = tf.variable_scope("", reuse=bool(results), use_resource=True)
      with scope:
        sums = modeling.pretraining_model(
          as_tensors(batch), tiny_config(), False
        )
      gradients = []
      for loss in (sums.masked_lm_loss, sums.next_sentence_loss):
        gradients += tf.gradients(
          loss,
          tf.trainable_variables(),
          unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
      results.append([sums.by_name(), gradients])
    with tf.Session() as session:
      randomise(session, rng)
      unpacked_got, packed_got = session.run(results)
  assert unpacked_got[0]["examples"] == packed_got[0]["examples"] == 5.0
  for name, value in unpacked_got[0].items():
    np.testing.assert_allclose(packed_got[0][name], value, 1e-5, err_msg=name)
  for a, b in zip(packed_got[1], unpacked_got[1], strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
  assert sum(np.abs(g).max() > 0.1 for g in unpacked_got[1]) > 40


# -----------------------------------------------------------------------------
# Hand-written gradients against composed operations
# -----------------------------------------------------------------------------


def composed_gelu(x):
  return 0.5 * x * (1 + tf.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def composed_gelu_erf(x):
  return x * 0.5 * tf.math.erfc(-x / np.sqrt(2))


def composed_layer_norm(x, gamma, beta):
  mean, variance = tf.nn.moments(x, [-1], keep_dims=True)
  return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-12)


def composed_rms_norm(x, gamma, beta):
  mean_square = tf.reduce_mean(tf.square(x), axis=-1, keepdims=True)
  return gamma * x / tf.sqrt(mean_square + 1e-12) + beta


def composed_turn(x):
  """By the angles of `ANGLES`, as products of complex numbers."""
  numbers = tf.complex(*tf.split(x, 2, axis=-1))
  angles = tf.constant(ANGLES, tf.float32)
  turned = numbers * tf.complex(tf.cos(angles), tf.sin(angles))
  return tf.concat([tf.math.real(turned), tf.math.imag(turned)], axis=-1)


# Of 5 places, 3 pairs.
ANGLES = np.arange(15.0).reshape(5, 3)

# Settings that kernels share.
DTYPE = dict(dtype=tf.float32)
NORM = dict(epsilon=1e-12, centred=True, dtype=tf.float32, store=tf.float32)
RMS_NORM = NORM | {"centred": False}
TYPES = dict(types=(tf.float32, tf.float32))


SEED = [3, 4]


def drop(x, keep_prob):
  mask = kernels.keep_mask(x.shape.as_list(), keep_prob, tf.constant(SEED))
  return tf.where(mask, x / keep_prob, tf.zeros_like(x))


def composed_add_and_norm(x, residual, gamma, beta):
  return composed_layer_norm(drop(x, 0.6) + residual, gamma, beta)


def added_twice(kernel, *tensors, **static):
  """Both results of `kernel` for tensors of which the last is x's bias."""
  *tensors, bias = tensors
  return weighted(
    kernel(*tensors, SEED, bias, keep_prob=0.6, twice=True, **static)
  )


def weighted(results):
  """Of two readers, who have other gradients."""
  first, second = results
  return first + 2.0 * second


def side_by_side(a, b, c):
  """[a, b, 2 c]: a and b in one group, c alone in another type."""
  tensors = [tf.convert_to_tensor(t) for t in (a, b, c)]
  ab, wide = kernels.side_by_side(
    (tensors[:2], tf.float32), (tensors[2:], tf.float64)
  )
  return tf.concat([ab, tf.cast(2.0 * wide, tf.float32)], axis=1)


def ours_attention_probs(scores, keep_prob):
  return kernels.attention_probs(
    scores,
    tf.constant([[0.0, -10000.0, 0.3, -0.2]]),
    SEED,
    scale=0.5,
    keep_prob=keep_prob,
    dtype=tf.float32,
  )


def composed_attention_probs(scores):
  scores = scores * 0.5 + tf.constant([[0.0, -10000.0, 0.3, -0.2]])
  return tf.nn.softmax(scores)


# Name -> ours, of operations, the shapes of their inputs.
KERNELS = {
  "gelu": (kernels.gelu, composed_gelu, [[2, 3, 7]]),
  "gelu_erf": (kernels.gelu_erf, composed_gelu_erf, [[2, 3, 7]]),
  "gelu of a sum": (
    lambda x, b: kernels.gelu(x, b, **DTYPE),
    lambda x, b: composed_gelu(x + b),
    [[5, 7], [7]],
  ),
  "gelu_erf of a sum": (
    lambda x, b: kernels.gelu_erf(x, b, **DTYPE),
    lambda x, b: composed_gelu_erf(x + b),
    [[5, 7], [7]],
  ),
  "silu": (kernels.silu, lambda x: x * tf.sigmoid(x), [[2, 3, 7]]),
  "silu of a sum": (
    lambda x, b: kernels.silu(x, b, **DTYPE),
    lambda x, b: (x + b) * tf.sigmoid(x + b),
    [[5, 7], [7]],
  ),
  "rms norm": (
    lambda *t: kernels.layer_norm(*t, **RMS_NORM),
    composed_rms_norm,
    [[2, 3, 7], [7], [7]],
  ),
  "invertible rms norm": (
    lambda *t: added_twice(
      kernels.invertible_add_and_norm, *t, **RMS_NORM, **TYPES
    ),
    lambda x, r, g, b, bias: (
      3.0 * composed_rms_norm(drop(x + bias, 0.6) + r, g, b)
    ),
    [[5, 7], [5, 7], [7], [7], [7]],
  ),
  "turn": (
    lambda x: kernels.turn(
      x, np.cos(ANGLES).astype("f"), np.sin(ANGLES).astype("f")
    ),
    composed_turn,
    [[2, 3, 5, 6]],
  ),
  "heads without bias": (
    lambda x: tf.stack(kernels.split_heads(x, None, parts=3, shape=(2, 5, 2))),
    lambda x: tf.transpose(tf.reshape(x, [2, 5, 3, 2, 4]), [2, 0, 3, 1, 4]),
    [[10, 24]],
  ),
  "layer norm": (
    lambda *t: kernels.layer_norm(*t, **NORM),
    composed_layer_norm,
    [[2, 3, 7], [7], [7]],
  ),
  "add and norm": (
    lambda *t: kernels.add_and_norm(*t, SEED, keep_prob=0.6, **NORM),
    composed_add_and_norm,
    [[5, 7], [5, 7], [7], [7]],
  ),
  "add and norm, two readers": (
    lambda *t: added_twice(kernels.add_and_norm, *t, **NORM),
    lambda x, r, g, b, bias: 3.0 * composed_add_and_norm(x + bias, r, g, b),
    [[5, 7], [5, 7], [7], [7], [7]],
  ),
  "invertible, two readers": (
    lambda *t: added_twice(
      kernels.invertible_add_and_norm, *t, **NORM, **TYPES
    ),
    lambda x, r, g, b, bias: 3.0 * composed_add_and_norm(x + bias, r, g, b),
    [[5, 7], [5, 7], [7], [7], [7]],
  ),
  "dropout and add, two readers": (
    lambda *t: added_twice(kernels.dropout_and_add, *t, **DTYPE, **TYPES),
    lambda x, r, bias: 3.0 * (drop(x + bias, 0.6) + r),
    [[5, 7], [5, 7], [7]],
  ),
  "dropout": (
    lambda x: kernels.dropout(x, SEED, keep_prob=0.6),
    lambda x: drop(x, 0.6),
    [[2, 3, 7]],
  ),
  "attention, dropout": (
    lambda x: ours_attention_probs(x, 0.6),
    lambda x: drop(composed_attention_probs(x), 0.6),
    [[2, 3, 5, 4]],
  ),
  "attention": (
    lambda x: ours_attention_probs(x, 1.0),
    lambda x: composed_attention_probs(x),
    [[2, 3, 5, 4]],
  ),
  "heads": (
    lambda x, b: tf.stack(kernels.split_heads(x, b, parts=3, shape=(2, 5, 2))),
    lambda x, b: tf.transpose(
      tf.reshape(x + b, [2, 5, 3, 2, 4]), [2, 0, 3, 1, 4]
    ),
    [[10, 24], [24]],
  ),
  "side by side": (
    side_by_side,
    lambda a, b, c: tf.concat([a, b, 2.0 * c], axis=1),
    [[5, 7], [5, 3], [5, 2]],
  ),
  "embedding": (
    lambda table: kernels.gather_rows(table, [3, 0, 3, 1]),
    lambda table: tf.gather(table, [3, 0, 3, 1]),
    [[5, 7]],
  ),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("mode", ["off", "layers"])
def test_kernels_equal_composed_operations(variable_kind, mode, name):
  ours, composed, shapes = KERNELS[name]
  rng = np.random.default_rng(4)
  inputs = []
  for i, shape in enumerate(shapes):
    value = rng.normal(0.3, 1.5, shape).astype(np.float32)
    inputs.append(tf.get_variable(f"x{i}", initializer=value))
  results = []
  for function in (ours, composed):
    with jit.mode(mode if function is ours else "off"):
      y = function(*inputs)
      dy = np.sin(np.arange(y.shape.num_elements())).reshape(y.shape)
      gradients = tf.gradients(y, inputs, grad_ys=tf.constant(dy, tf.float32))
    results.append([y, *map(tf.convert_to_tensor, gradients)])
    if function is ours:
      assert all(isinstance(gradient, tf.Tensor) for gradient in gradients)
  with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    actual, expected = session.run(results)
  for a, e in zip(actual, expected, strict=True):
    assert np.abs(e).max() > 0.1
    np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mode", ["off", "layers", "step"])
@pytest.mark.parametrize(
  "store, dtype",
  [
    (tf.float32, tf.float32),
    (tf.bfloat16, tf.float32),
    (tf.float16, tf.float32),
    (tf.bfloat16, tf.bfloat16),
  ],
  ids=["fp32", "bf16", "fp16", "all bf16"],
)
def test_gelu_erf_equals_pythons_erf(mode, store, dtype):
  """Value and slope at numbers that every type knows, tails included."""
  x = np.concatenate([np.linspace(-6, 6, 49), [-100.0, 100.0]])
  cdf = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])
  slope = cdf + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
  given = tf.constant(x, store)
  with jit.mode(mode):
    y = kernels.gelu_erf(given, dtype=dtype)
    (gradient,) = tf.gradients(y, given)
  assert y.dtype == gradient.dtype == store
  with tf.Session() as session:
    got = session.run([tf.cast(t, tf.float32) for t in (y, gradient)])
  # float32: in the tail 1 + erf(x) is of few digits, times x.
  rounding = 2.0 ** {tf.float32: -20, tf.float16: -10, tf.bfloat16: -7}[store]
  if dtype == tf.bfloat16:
    rounding *= 4  # of each step, not of the result
  for actual, expected in zip(got, (x * cdf, slope), strict=True):
    np.testing.assert_allclose(actual, expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize(
  "function", [kernels.gelu, kernels.gelu_erf, kernels.silu]
)
def test_gelus_slope_in_float16_is_finite(function):
  """Its square would not be, from 256 on."""
  x = tf.constant([-60_000.0, -300.0, 0.0, 300.0, 60_000.0], tf.float16)
  (gradient,) = tf.gradients(function(x, dtype=tf.float16), x)
  with tf.Session() as session:
    got = session.run(gradient)
  assert got.tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_an_activation_is_computed_in_the_policys_type():
  """Also in the head of masked LM."""
  x = tf.constant([0.7], tf.bfloat16)
  found = []
  for dtype in (tf.bfloat16, tf.float32):
    y = layers.activated(x, None, "gelu", dtype)
    assert y.dtype == x.dtype
    found.append({op.type: op.outputs[0].dtype for op in ancestors(y)})
  assert found[0]["Sigmoid"] == tf.bfloat16
  assert found[1]["Sigmoid"] == tf.float32


def ancestors(tensor):
  """The operations that `tensor` depends on."""
  waiting, found = [tensor.op], set()
  while waiting:
    op = waiting.pop()
    if op not in found:
      found.add(op)
      waiting += [given.op for given in op.inputs]
  return found


def test_gradient_of_the_whole_model_equals_differences(variable_kind):
  """Central differences along random directions, dropout mask held fixed."""
  rng = np.random.default_rng(5)
  sums = modeling.pretraining_model(
    as_tensors(ragged_batch(rng)),
    tiny_config(dropout=0.2),
    True,
    dropout_seed=tf.constant([1, 2]),
  )
  loss = sums.masked_lm_loss + sums.next_sentence_loss
  variables = tf.trainable_variables()
  gradients = tf.gradients(loss, variables)
  assert all(isinstance(gradient, tf.Tensor) for gradient in gradients)
  with tf.Session() as session:
    weights = randomise(session, rng)
    gradients = session.run(gradients)
    for variable, gradient in zip(variables, gradients, strict=True):
      value = weights[variable.op.name]
      # Along the gradient, where the difference is largest against rounding.
      norm = np.linalg.norm(gradient)
      if norm < 1e-3:  # softmax does not feel the key's bias
        assert variable.op.name.endswith("key/bias")
        continue
      step = 3e-3 * gradient / norm
      ends = []
      for sign in (1.0, -1.0):
        variable.load((value + sign * step).astype(np.float32), session)
        ends.append(session.run(loss))
      variable.load(value.astype(np.float32), session)
      slope = (ends[0] - ends[1]) / 6e-3
      assert slope == pytest.approx(norm, rel=0.02, abs=0.02), variable.op.name


# -----------------------------------------------------------------------------
# Pre-layer-norm, and what is computed again in the backward pass
# -----------------------------------------------------------------------------


def loss_and_gradients(config, recompute=(), mode="off", triton=False):
  """Loss and gradients with dropout, of weights that are always the same."""
  rng = np.random.default_rng(9)
  with tf.Graph().as_default() as graph, jit.mode(mode):
    tf.enable_resource_variables()
    sums = modeling.pretraining_model(
      as_tensors(ragged_batch(rng)),
      config,
      True,
      dropout_seed=tf.constant([1, 2]),
      recompute=recompute,
      triton=triton,
    )
    loss = sums.masked_lm_loss + sums.next_sentence_loss
    variables = tf.trainable_variables()
    gradients = tf.gradients(loss, variables)
    with tf.Session() as session:
      randomise(session, rng)
      values = session.run([loss, *gradients])
  return values, [v.op.name for v in variables], graph


@pytest.mark.parametrize(
  "activation, pre_layer_norm", [("gelu", False), ("gelu_erf", True)]
)
@pytest.mark.parametrize("gpus", [[], ["GPU"]])
def test_programs_give_what_operations_give(
  monkeypatch, activation, pre_layer_norm, gpus
):
  """For a GPU queries, keys and values are one matmul."""
  config = tiny_config(0.3)
  config.hidden_act, config.pre_layer_norm = activation, pre_layer_norm
  want, names, plain = loss_and_gradients(config)
  monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: gpus)
  got, again, graph = loss_and_gradients(config, mode="layers")
  assert again == names
  for a, b, name in zip(got, want, ["loss", *names], strict=True):
    scale = np.abs(b).max() + 0.01
    np.testing.assert_allclose(a / scale, b / scale, atol=1e-4, err_msg=name)
  count = lambda graph: sum(
    op.type == "MatMul" for op in graph.get_operations()
  )
  # One instead of three, one instead of two, and their two gradients each. Both
  # of the losses' are in programs.
  assert count(plain) - count(graph) == 2 + len(gpus) * 3 * (2 + 1)


@pytest.mark.parametrize(
  "mode", ["off", pytest.param("layers", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
  "pre_layer_norm, activation, recompute",
  [
    *[(False, "gelu", [name]) for name in encoder.RECOMPUTE],
    *[(True, "gelu", [name]) for name in encoder.RECOMPUTE],
    (False, "gelu", encoder.RECOMPUTE),
    (True, "gelu", encoder.RECOMPUTE),
    (False, "gelu_erf", ["gelu"]),
  ],
)
def test_recomputing_changes_nothing(
  pre_layer_norm, activation, recompute, mode
):
  config = tiny_config(0.3)
  config.pre_layer_norm, config.hidden_act = pre_layer_norm, activation
  more = operations_more(config, recompute, mode)
  if recompute == ["attention"]:
    assert more["BatchMatMulV2"] == 2 * TINY["num_hidden_layers"]
  if recompute == ["gelu"] and mode == "off":
    arithmetic = {"gelu": "Sigmoid", "gelu_erf": "Erf"}[activation]
    assert more[arithmetic] == TINY["num_hidden_layers"]
  if recompute == ["layer"]:
    # Six dense layers each, in every layer.
    assert more["MatMul"] == 6 * TINY["num_hidden_layers"]


@functools.cache
def keeping_all(config, mode):
  """`loss_and_gradients` without recomputing."""
  bert = modeling.BertConfig.from_dict(json.loads(config))
  return loss_and_gradients(bert, mode=mode)


def operations_more(config, recompute, mode, triton=False):
  """Operations by type, beside those of `keeping_all`.

  Loss and gradients are checked to be the same.
  """
  want, names, plain = keeping_all(json.dumps(config.to_dict()), mode)
  got, again, graph = loss_and_gradients(config, recompute, mode, triton)
  assert again == names
  for a, b, name in zip(got, want, ["loss", *names], strict=True):
    # Softmax does not feel the key's bias: its gradient is rounding alone.
    noise = 1e-6 if name.endswith("key/bias") else 1e-7
    np.testing.assert_allclose(
      a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max() + noise, err_msg=name
    )
  more = collections.Counter(op.type for op in graph.get_operations())
  more.subtract(op.type for op in plain.get_operations())
  return more


@pytest.mark.parametrize("mode", ["off", "layers"])
@pytest.mark.parametrize(
  "recompute, pre_layer_norm", [((), False), ((), True), (("layer",), False)]
)
def test_blocks_of_attention_change_nothing(
  mode, recompute, pre_layer_norm, monkeypatch
):
  attention_in_blocks.use(monkeypatch)
  config = tiny_config(0.3)
  config.pre_layer_norm = pre_layer_norm
  more = operations_more(config, recompute, mode, triton=True)
  # One matmul instead of three in the first layer, and its two gradients.
  if not recompute:
    assert more["MatMul"] == -3 * 2


def test_pre_layer_norm_is_another_model_of_the_same_variables():
  config = tiny_config(0.0)
  post, names, _ = loss_and_gradients(config)
  config.pre_layer_norm = True
  pre, same, _ = loss_and_gradients(config)
  assert names == same and abs(pre[0] - post[0]) > 1e-3


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pre_layer_norm", [False, True])
def test_the_last_layer_at_some_places_is_the_whole_one_there(
  pre_layer_norm, packed
):
  """Also for the pooler, which reads each example's first token."""
  config = tiny_config()
  config.pre_layer_norm = pre_layer_norm
  batch = ragged_batch(np.random.default_rng(4))
  mask = np.array([[1] * 3 + [2] * 5 + [0]] * B) if packed else batch[1]
  places = tf.constant([[0, 2], [4, 4], [6, 1]])
  build = functools.partial(
    modeling.BertModel,
    *(config, False, tf.constant(batch[0]), tf.constant(mask)),
    tf.constant(batch[2]),
    scope="bert",
    examples_per_sequence=2 if packed else 1,
  )
  with tf.variable_scope("", reuse=tf.AUTO_REUSE):
    whole, some = build(), build(places=places)
    without = build(places=places, with_pooler=False)
  assert without.get_pooled_output() is None
  want = tf.gather(whole.get_sequence_output(), places, batch_dims=1)
  pairs = [
    (some.get_sequence_output(), want),
    (without.get_sequence_output(), want),
    (some.get_pooled_output(), whole.get_pooled_output()),
  ]
  with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for got, expected in session.run(pairs):
      assert got.shape == expected.shape
      np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_pre_layer_norm_passes_the_residual_unchanged(variable_kind):
  """With sub-layers that give 0, the output is the input's, normalized."""
  x = tf.constant(np.random.default_rng(3).normal(size=[2, 3, 8]), tf.float32)
  bert = modeling.BertConfig(
    vocab_size=1,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    pre_layer_norm=True,
  )
  everywhere = encoder.Span(encoder.mask_bias(None, mixed_precision.FP32))
  layer = encoder.LayerConfig(bert)
  output = encoder.encoder_layers(x, None, (everywhere, None), layer)[-1]
  with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for variable in tf.trainable_variables():
      scale = 5.0 if "gamma" in variable.op.name else 0.0
      value = np.full(variable.shape.as_list(), scale, np.float32)
      variable.load(value, session)
    got, given = session.run([output, x])
  centred = given - given.mean(-1, keepdims=True)
  want = 5.0 * centred / centred.std(-1, keepdims=True)
  # A post layer norm would have normalized what it had scaled before.
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# -----------------------------------------------------------------------------
# Dropout
# -----------------------------------------------------------------------------


def test_seeded_dropout_is_a_function_of_seed_and_site():
  ones = tf.ones([37, 41])
  seed = tf.placeholder(tf.int64, [2])
  sites = [
    layers.dropout(
      ones, 0.3, layers.dropout_site_seed(layers.hashed_seed(seed), site)
    )
    for site in (0, 0, 1)
  ]

  def draw(values):
    with tf.Session() as session:
      return session.run(sites, {seed: values})

  first, same, other_site = draw([3, 4])
  np.testing.assert_array_equal(first, same)
  np.testing.assert_array_equal(first, draw([3, 4])[0])
  # Neighbouring seeds and sites do not share masks, shifted ones neither.
  for other in (other_site, draw([3, 5])[0], draw([4, 4])[0], draw([3, 3])[2]):
    agreement = np.mean((first > 0) == (other > 0))
    assert agreement == pytest.approx(0.7**2 + 0.3**2, abs=0.06)


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("shape", [[1000, 1000], [999, 1001]])
def test_dropout_keeps_its_rate_and_the_mean(rate, shape):
  x = tf.placeholder(tf.float32, [None, shape[1]])
  y = layers.dropout(x, rate, tf.constant([1, 2]))
  with tf.Session() as session:
    y = session.run(y, {x: np.ones(shape)})
  kept = y > 0
  assert np.unique(y[kept]).size == 1
  # 5 standard deviations of a mean of 1e6 Bernoulli draws
  bound = 5 * np.sqrt(rate * (1 - rate) / y.size)
  assert kept.mean() == pytest.approx(1 - rate, abs=bound)
  assert y.mean(dtype=np.float64) == pytest.approx(1, abs=bound / (1 - rate))
  # Both halves of a 32-bit draw, and neighbours, are independent.
  flat = kept.reshape(-1)
  for step in (1, 2, 4):
    both = np.mean(flat[step:] & flat[:-step])
    assert both == pytest.approx((1 - rate) ** 2, abs=3 * bound)
  assert y.max() == pytest.approx(1 / (1 - rate), rel=1e-6)


def test_a_dropout_mask_is_the_hash_of_the_elements_numbers():
  """To the last bit, or a resumed run would draw other masks."""
  seed = np.array([-5, 2**31 - 1], np.int32)

  def mix(x, multiplier, shift):
    x = x * np.uint32(multiplier)
    return x ^ (x >> np.uint32(shift))

  x = np.arange(3 * 4 * 6 * 5, dtype=np.uint32) ^ seed.view(np.uint32)[0]
  x = mix(mix(x, 0x7FEB352D, 15), 0x846CA68B, 16) + seed.view(np.uint32)[1]
  x = mix(mix(x, 0x9E3779B1, 15), 0x846CA68B, 16)
  shape = [3, 4, 6, 5]
  want = (x < round(0.7 * 2**32)).reshape(shape)
  unknown = tf.placeholder_with_default(np.array(shape, np.int32), [4])
  masks = [
    kernels.keep_mask(sizes, 0.7, tf.constant(seed))
    for sizes in (shape, tf.unstack(unknown), [12, 30], [360])
  ]
  with tf.Session() as session:
    for mask in session.run(masks):
      np.testing.assert_array_equal(mask.reshape(shape), want)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("shape", [[2**15, 2, 1, 2**17], [3, 2**15, 2**16 + 1]])
def test_more_elements_than_32_bits_number_have_numbers_of_their_own(
  shape, known
):
  sizes = shape
  if not known:
    sizes = tf.placeholder_with_default(np.array(shape, np.int32), [len(shape)])
    sizes = tf.unstack(sizes)
  assert math.prod(shape) > 2**32
  with tf.Session() as session:
    low, high = session.run(kernels.row_numbers(sizes))
  first = low.astype(np.int64) + (high.astype(np.int64) << 32)
  last = low.astype(np.int64) + shape[-1] - 1
  assert last.max() < 2**32  # the high word holds for the whole row
  assert (np.diff(first, axis=0) >= shape[-1]).all()


def test_heads_of_a_slice_have_numbers_of_their_own_beyond_32_bits():
  """Examples that are 2^32 elements of all heads apart."""
  seed = tf.constant(SEED)
  masks = kernels.keep_mask([5, 1, 8, 8], 0.5, seed, (0, 2**25))
  with tf.Session() as session:
    masks = session.run(masks).reshape(5, -1)
  assert len(np.unique(masks, axis=0)) == 5


def test_every_dropout_site_of_the_model_has_its_own_seed(graph):
  seed = tf.constant([1, 2])
  tensors = as_tensors(ragged_batch(np.random.default_rng(6)))
  seeds = []
  original = layers.dropout_site_seed
  layers.dropout_site_seed = encoder.dropout_site_seed = lambda seed, site: (
    seeds.append(site) or original(seed, site)
  )
  try:
    modeling.pretraining_model(tensors, tiny_config(0.1), True, seed)
  finally:
    layers.dropout_site_seed = encoder.dropout_site_seed = original
  assert seeds == list(range(1 + 3 * TINY["num_hidden_layers"]))
  stateful = [op.type for op in graph.get_operations() if "Random" in op.type]
  assert {kind for kind in stateful if not kind.startswith("Stateless")} <= {
    "TruncatedNormal"
  }


def test_model_with_dropout_repeats_itself_and_evaluation_has_none():
  rng = np.random.default_rng(7)
  tensors = as_tensors(ragged_batch(rng))
  seed = tf.placeholder(tf.int32, [2])
  train = modeling.pretraining_model(tensors, tiny_config(0.3), True, seed)
  with tf.variable_scope(tf.get_variable_scope(), reuse=True):
    plain = modeling.pretraining_model(tensors, tiny_config(0.0), True)
    evaluate = modeling.pretraining_model(tensors, tiny_config(0.3), False)
    stateful = modeling.pretraining_model(tensors, tiny_config(0.3), True)
  losses = []
  for values in ([1, 2], [1, 2], [1, 3]):
    with tf.Session() as session:
      randomise(session, np.random.default_rng(8))
      losses.append(session.run(train.masked_lm_loss, {seed: values}))
      others = session.run(
        [s.masked_lm_loss for s in (plain, evaluate, stateful, stateful)]
      )
  assert losses[0] == losses[1] != losses[2]
  assert others[0] == others[1] != others[2]


# -----------------------------------------------------------------------------
# Variables, masks, the graph
# -----------------------------------------------------------------------------


def published_variables(config):
  """Names and shapes of google/bert's pre-training checkpoints."""
  width, wide = config.hidden_size, config.intermediate_size

  def dense(scope, rows, columns):
    return {f"{scope}/kernel": [rows, columns], f"{scope}/bias": [columns]}

  def norm(scope):
    return {f"{scope}/LayerNorm/{k}": [width] for k in ("beta", "gamma")}

  tables = {
    "word": config.vocab_size,
    "token_type": config.type_vocab_size,
    "position": config.max_position_embeddings,
  }
  shapes = {
    f"bert/embeddings/{name}_embeddings": [rows, width]
    for name, rows in tables.items()
  }
  shapes |= norm("bert/embeddings")
  for layer in range(config.num_hidden_layers):
    scope = f"bert/encoder/layer_{layer}"
    for name in ("query", "key", "value"):
      shapes |= dense(f"{scope}/attention/self/{name}", width, width)
    shapes |= dense(f"{scope}/attention/output/dense", width, width)
    shapes |= norm(f"{scope}/attention/output")
    shapes |= dense(f"{scope}/intermediate/dense", width, wide)
    shapes |= dense(f"{scope}/output/dense", wide, width)
    shapes |= norm(f"{scope}/output")
  shapes |= dense("bert/pooler/dense", width, width)
  shapes |= dense("cls/predictions/transform/dense", width, width)
  shapes |= norm("cls/predictions/transform")
  shapes["cls/predictions/output_bias"] = [config.vocab_size]
  shapes["cls/seq_relationship/output_weights"] = [2, width]
  shapes["cls/seq_relationship/output_bias"] = [2]
  return shapes


def test_variables_are_those_of_published_checkpoints(tmp_path):
  tensors = as_tensors(ragged_batch(np.random.default_rng(9)))
  config = tiny_config()
  modeling.pretraining_model(tensors, config, True)
  variables = tf.global_variables()
  actual = {v.op.name: v.shape.as_list() for v in variables}
  assert actual == published_variables(config)
  assert variables == tf.trainable_variables()

  with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    path = tf.train.Saver(variables[:3]).save(session, str(tmp_path / "model"))
  names = [v.op.name for v in variables[:3]]
  loaded, initialized = modeling.get_assignment_map_from_checkpoint(
    variables[1:], path
  )
  assert dict(loaded) == {name: name for name in names[1:]}
  assert set(initialized) == {n + end for n in names[1:] for end in ("", ":0")}


def test_padding_is_not_attended_to():
  rng = np.random.default_rng(10)
  ids, mask = tf.placeholder(tf.int32, [B, S]), tf.placeholder(tf.int32, [B, S])
  model = modeling.BertModel(tiny_config(), False, ids, mask)
  batch = ragged_batch(rng)
  with tf.Session() as session:
    randomise(session, rng)

    def run(values):
      feeds = {ids: values, mask: batch.input_mask}
      return session.run(model.get_sequence_output(), feeds)

    before = run(batch.input_ids)
    # The last token of row 1 is padding; that of row 0 is not.
    changed = batch.input_ids.copy()
    changed[:2, -1] = (changed[:2, -1] + 1) % V
    after = run(changed)
  real = batch.input_mask[1] > 0
  np.testing.assert_array_equal(before[1, real], after[1, real])
  assert np.abs(before[0] - after[0]).max(axis=-1).min() > 1e-4


def test_attention_takes_a_mask_for_each_query():
  """[B, F, T]: two examples packed into one row do not see each other."""
  rng = np.random.default_rng(11)
  owner = np.array([0] * 4 + [1] * 5)
  mask = (owner[:, None] == owner[None, :]).astype(np.int32)
  x = rng.normal(size=[1, S, 8]).astype(np.float32)
  output = modeling.attention_layer(
    tf.constant(x), tf.constant(x), tf.constant(mask[None]), 2, 4
  )
  with tf.Session() as session:
    weights = randomise(session, rng)
    output = session.run(output)
  weights = {f"scope/{name}": value for name, value in weights.items()}
  expected = reference_numpy.attention(weights, "scope", x[0], mask, 2)
  np.testing.assert_allclose(output[0], expected, atol=1e-5)


def test_every_operation_is_needed_by_the_sums(graph):
  tensors = as_tensors(ragged_batch(np.random.default_rng(12)))
  seed = tf.constant([1, 2])
  sums = modeling.pretraining_model(tensors, tiny_config(0.1), True, seed)
  wanted = [tensor.op for tensor in sums]
  # Initial values are needed by the assignments, not by the sums.
  wanted += [variable.initializer for variable in tf.global_variables()]
  reached = set()
  while wanted:
    op = wanted.pop()
    if op not in reached:
      reached.add(op)
      wanted += [tensor.op for tensor in op.inputs] + op.control_inputs
  stray = [o.name for o in graph.get_operations() if o not in reached]
  assert not stray, "\n".join(stray)


def test_shapes_may_be_unknown_until_the_graph_runs():
  ids = tf.placeholder(tf.int32, [None, None])
  seed = tf.constant([1, 2])
  model = modeling.BertModel(
    tiny_config(0.1), True, ids, tf.ones_like(ids), dropout_seed=seed
  )
  with tf.Session() as session:
    randomise(session, np.random.default_rng(13))
    for shape in ([2, 5], [1, 7]):
      output = session.run(model.get_sequence_output(), {ids: np.ones(shape)})
      assert output.shape == (*shape, 8) and np.isfinite(output).all()
    with pytest.raises(tf.errors.InvalidArgumentError, match="[Ss]lice|size"):
      session.run(model.get_sequence_output(), {ids: np.ones([1, 17])})


def test_one_hot_embeddings_equal_gathered_ones():
  ids = tf.constant([[1, 2, 2], [0, 4, 1]])
  outputs = []
  for one_hot in (False, True):
    with tf.variable_scope("table", reuse=one_hot):
      output, _ = modeling.embedding_lookup(
        ids, 5, 3, use_one_hot_embeddings=one_hot
      )
      outputs.append(output)
  with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    gathered, multiplied = session.run(outputs)
  assert gathered.shape == (2, 3, 3)
  np.testing.assert_allclose(gathered, multiplied, atol=1e-7)


# -----------------------------------------------------------------------------
# Configuration and errors
# -----------------------------------------------------------------------------


@pytest.mark.parametrize(
  "text, words",
  [
    (json.dumps(TINY | {"hiden_size": 8}), "hiden_size; known keys .*hidden_"),
    (json.dumps(TINY | {"hidden_size": 9}), "hidden_size 9 .*_heads 2"),
    (json.dumps(TINY | {"num_hidden_layers": 0}), "num_hidden_layers is 0"),
    (json.dumps(TINY | {"intermediate_size": 1.5}), "intermediate_size is 1.5"),
    (json.dumps(TINY | {"hidden_dropout_prob": 1.0}), "dropout_prob is 1.0"),
    (json.dumps(TINY | {"initializer_range": 0}), "initializer_range is 0"),
    (
      json.dumps(TINY | {"hidden_act": "swish"}),
      "hidden_act is .swish., not .*gelu",
    ),
    (json.dumps({"hidden_size": 8}), "vocab_size is None"),
    ("{", "not readable as JSON"),
    ("[1]", "it is .1., not an object"),
  ],
)
def test_config_errors_name_the_file_and_the_numbers(tmp_path, text, words):
  path = tmp_path / "config.json"
  path.write_text(text)
  with pytest.raises(ValueError, match=f"config.json: .*{words}"):
    modeling.BertConfig.from_json_file(str(path))


def test_config_round_trip_keeps_keys_of_published_chinese_model():
  extra = {
    "directionality": "bidi",
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
  }
  config = modeling.BertConfig.from_dict(TINY | extra)
  text = config.to_json_string()
  again = modeling.BertConfig.from_dict(json.loads(text))
  assert again.to_dict() == config.to_dict()
  assert again.to_dict().items() >= (TINY | extra).items()


@pytest.mark.parametrize("name", sorted(bert_config.PRESETS))
def test_shipped_configs_are_valid(name):
  path = Path(bert_config.PRESETS[name])
  config = modeling.BertConfig.from_json_file(str(path))
  read = json.loads(path.read_text())
  assert bert_config.complete(config.to_dict()) == bert_config.complete(read)
  assert config.hidden_size == 64 * config.num_attention_heads
  if "modern" not in name:
    assert config.intermediate_size == 4 * config.hidden_size
  else:  # the last layer attends to all tokens
    assert not config.is_local(config.num_hidden_layers - 1)


def test_the_sizes_of_published_models():
  """arXiv:2412.13663 and arXiv:2507.11412 state them in millions."""
  for name, millions in (("17m", 16.9), ("base", 149.7), ("large", 395.9)):
    path = bert_config.PRESETS[f"modern_{name}"]
    config = modeling.BertConfig.from_json_file(path)
    parts = weights.ENCODER, weights.TRANSFORM, weights.MASKED_LM
    own = [w for w in weights.weights(config) if w.part in parts]
    assert round(sum(math.prod(w.shape) for w in own) / 1e6, 1) == millions


def test_a_training_without_dropout_has_none():
  path = bert_config.PRESETS["modern_tiny"]
  published = modeling.BertConfig.from_json_file(path)
  assert published.dropout_after("attention_output") == 0.1
  assert published.dropout_after("embedding") == 0.0
  off = published.with_dropout(0.0, None)
  assert off.dropout_after("attention_output") == 0.0
  assert published.with_dropout(None, None).to_dict() == published.to_dict()


def test_model_checks_its_arguments():
  ids = tf.zeros([2, 4], tf.int32)
  with pytest.raises(ValueError, match="hidden_size 37"):
    modeling.BertModel(modeling.BertConfig(9, hidden_size=37), True, ids)
  with pytest.raises(ValueError, match="length 17 .*16"):
    modeling.BertModel(tiny_config(), True, tf.zeros([1, 17], tf.int32))
  with pytest.raises(ValueError, match="rank 1"):
    modeling.BertModel(tiny_config(), True, ids[0])
  with pytest.raises(ValueError, match="rank 2 need"):
    modeling.attention_layer(tf.zeros([6, 8]), tf.zeros([6, 8]))
  with pytest.raises(ValueError, match="Unsupported activation: 'swish'"):
    modeling.get_activation("swish")
  assert modeling.get_activation("linear") is None
  assert modeling.get_activation(tf.tanh) is tf.tanh
