"""The model against references, and what its parts promise."""

import json
import math
import types
from pathlib import Path

import numpy as np
import pytest
import reference_modern
import reference_numpy
from tiny_models import (
  KEYS,
  TINY,
  B,
  P,
  S,
  V,
  as_tensors,
  ragged_batch,
  randomise,
  tiny_config,
)

import modeling
from common.tensorflow_v1 import tf
from config import bert_config
from model import attention, kernels, layers, weights
from xla_patches import jit


@pytest.fixture(autouse=True)
def graph():
  with tf.Graph().as_default() as graph:
    yield graph


@pytest.fixture(params=[False, True], ids=["ref", "resource"])
def variable_kind(request, graph):
  """Runs a test with reference and with resource variables."""
  tf.get_variable_scope().set_use_resource(request.param)


def slow(*case):
  return pytest.param(*case, marks=pytest.mark.slow)


def reusing():
  """The variables that there are, and new ones."""
  return tf.variable_scope("", reuse=tf.AUTO_REUSE)


# Against the NumPy reference --------------------------------------------------


def reference_outputs(weights, batch, row):
  """float [3, S, H]: the embeddings of a row, and every layer's output."""
  inputs = batch.input_ids[row], batch.input_mask[row], batch.segment_ids[row]
  return reference_numpy.encoder(weights, *inputs, 2, 2)


def test_two_layer_encoder_and_google_berts_heads_equal_numpy(variable_kind):
  rng = np.random.default_rng(1)
  batch, config = ragged_batch(rng), tiny_config(dropout=0.5)
  tensors = as_tensors(batch)
  model = modeling.BertModel(config, False, *tensors[:3])
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
  layers_out = [model.get_embedding_output(), *model.get_all_encoder_layers()]
  with tf.Session() as session:
    weights = randomise(session, rng)
    outputs, pooled, sequence, masked_lm, next_sentence = session.run(
      [layers_out, model.get_pooled_output(), model.get_sequence_output(),
       masked_lm, next_sentence]
    )  # fmt: skip
  np.testing.assert_array_equal(outputs[-1], sequence)
  words, pairs = [], []
  for i in range(B):
    expected = reference_outputs(weights, batch, i)
    actual = np.stack([output[i] for output in outputs])
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=0)
    first = reference_numpy.pooler(weights, expected[-1])
    np.testing.assert_allclose(pooled[i], first, atol=1e-5)
    words.append(
      reference_numpy.masked_lm_log_probs(
        weights, expected[-1], batch.masked_lm_positions[i]
      )
    )
    pairs.append(reference_numpy.next_sentence_log_probs(weights, first))
  words, pairs = np.concatenate(words), np.stack(pairs)
  losses = -words[np.arange(B * P), batch.masked_lm_ids.reshape(-1)]
  used = batch.masked_lm_weights.reshape(-1)
  loss = (losses * used).sum() / (used.sum() + 1e-5)
  pair_losses = -pairs[np.arange(B), batch.next_sentence_labels[:, 0]]
  for actual, expected in (
    (masked_lm, (loss, losses, words)),
    (next_sentence, (pair_losses.mean(), pair_losses, pairs)),
  ):
    for a, e in zip(actual, expected, strict=True):
      np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


def test_pretraining_sums_equal_numpy_reference(variable_kind):
  rng = np.random.default_rng(2)
  batch = ragged_batch(rng)
  tensors = as_tensors(batch)
  ids = tf.placeholder(tf.int32, [B, P])
  tensors = tensors._replace(masked_lm_ids=ids)
  with reusing():
    sums = modeling.pretraining_model(tensors, tiny_config(), True)
    # Masked LM alone is the same, without what the other head needs.
    alone = modeling.pretraining_model(
      tensors, tiny_config(), True, next_sentence=False, z_loss=0.01
    )
  loss = modeling.pretraining_loss(alone, [alone.masked_lm_weight, 0.0])
  with tf.Session() as session:
    weights = randomise(session, rng)
    # A right prediction, which random labels hardly give.
    output = reference_outputs(weights, batch, 0)[-1]
    log_probs = reference_numpy.masked_lm_log_probs(
      weights, output, batch.masked_lm_positions[0]
    )
    batch.masked_lm_ids[0] = log_probs.argmax(axis=1)
    sums, alone, loss = session.run(
      [modeling.by_name(sums), modeling.by_name(alone), loss],
      {ids: batch.masked_lm_ids},
    )
  expected = reference_numpy.pretraining_sums(weights, batch, 2, 2)
  assert expected["masked_lm_correct"] >= P
  assert expected["masked_lm_weight"] == 6 and expected["tokens"] == S + 5
  assert sums == pytest.approx(expected, rel=1e-5)
  for name in ("next_sentence_loss", "next_sentence_correct"):
    del expected[name]
  z_loss = alone.pop("z_loss")
  assert z_loss > 0.1
  assert alone == pytest.approx(expected, rel=1e-5)
  total = alone["masked_lm_loss"] + z_loss
  assert loss == pytest.approx(total / 6, rel=1e-6)


def test_a_model_of_one_segment_type_takes_any_segment_ids():
  batch = ragged_batch(np.random.default_rng(4))
  assert batch.segment_ids.any()
  config, sums = tiny_config(type_vocab_size=1), []
  for segments in (batch.segment_ids, np.zeros_like(batch.segment_ids)):
    tensors = as_tensors(batch._replace(segment_ids=segments))
    with reusing():
      made = modeling.pretraining_model(tensors, config, False)
      sums.append(modeling.by_name(made))
  with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    assert session.run(sums[0]) == session.run(sums[1])


@pytest.mark.parametrize("mode", ["off", "layers"])
def test_cross_entropy_equals_tensorflows(mode):
  """Also where the table has rows, and so logits, that are no class."""
  rng = np.random.default_rng(0)
  hidden = tf.constant(rng.normal(0, 1, [6, 3]).astype(np.float32))
  table = tf.constant(rng.normal(0, 2, [5, 3]).astype(np.float32))
  bias = tf.constant(rng.normal(0, 1, 5).astype(np.float32))
  labels = tf.constant([0, 4, 2, 2, 1, 3])
  weights = tf.constant([0.5, 1.0, 2.0, 0.0, 0.3, 1.0])

  def with_gradients(losses, correct):
    total = tf.reduce_sum(weights * losses)
    return [losses, correct, *tf.gradients(total, [hidden, table, bias])]

  results = []
  for rows in (5, 8):
    with jit.mode(mode):
      matrix = kernels.aligned_rows(table, rows=rows, dtype=tf.float32)
      logits = tf.matmul(hidden, matrix, transpose_b=True)
      both = kernels.cross_entropy(logits, bias, labels, dtype=tf.float32)
    assert logits.shape[-1] == rows
    results.append(with_gradients(*tf.unstack(both)))
  logits = tf.matmul(hidden, table, transpose_b=True) + bias
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
  right = tf.equal(tf.argmax(logits, axis=1, output_type=tf.int32), labels)
  results.append(with_gradients(losses, tf.cast(right, tf.float32)))
  with tf.Session() as session:
    *results, want = session.run(results)
  assert 0 < want[1].sum() < 6
  for got in results:
    for a, b in zip(got, want, strict=True):
      np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("mode", ["off", slow("layers")])
def test_places_without_a_prediction_have_no_logits(mode, monkeypatch):
  """What is predicted has the sums and gradients that it has with all places.

  `step` and `auto` compile large programs, whose shapes are fixed: there all
  places have logits.
  """
  monkeypatch.setattr(modeling, "_ROWS", 1)
  batch = ragged_batch(np.random.default_rng(5))
  used = int((batch.masked_lm_weights * batch.example_weights[:, None]).sum())
  results, logits = [], []
  build = modeling.masked_lm_logits
  keep = lambda *args: logits.append(build(*args)) or logits[-1]
  monkeypatch.setattr(modeling, "masked_lm_logits", keep)
  for name in (mode, "step"):
    with jit.mode(name), reusing():
      sums = modeling.pretraining_model(as_tensors(batch), tiny_config(), True)
      loss = modeling.pretraining_loss(sums, tf.constant([2.0, 3.0]))
    gradients = tf.gradients(loss, tf.trainable_variables())
    results.append([*modeling.by_name(sums).values(), *gradients])
  with tf.Session() as session:
    randomise(session, np.random.default_rng(6))
    some, every, rows = session.run([*results, [x.matmul for x in logits]])
  assert [len(x) for x in rows] == [used, B * P] == [6, 12]
  for a, b in zip(some, every, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# Packed = unpacked ------------------------------------------------------------


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


@pytest.mark.parametrize(
  "name, mode",
  [
    *(("BERT", "off"), ("BERT", "step"), ("ModernBERT", "off")),
    *(slow("BERT", "layers"), slow("NeoBERT", "off"), slow("EuroBERT", "off")),
  ],
)
def test_packed_equals_unpacked(name, mode):
  """Every head's sums, and the gradient of each head's loss."""
  rng = np.random.default_rng(5)
  examples = ragged_batch(rng, (S, 4, 3, 5, 2), (4, 1, 2, 2, 1), np.ones(5))
  config, results = tiny_config(**KEYS[name]), []
  with jit.mode(mode):
    for batch in (examples, packed(examples, [[1, 2, 4], [0], [3]], 3)):
      with tf.variable_scope("", reuse=bool(results), use_resource=True):
        sums = modeling.pretraining_model(as_tensors(batch), config, False)
      gradients = []
      for loss in (sums.masked_lm_loss, sums.next_sentence_loss):
        gradients += tf.gradients(
          loss, tf.trainable_variables(), unconnected_gradients="zero"
        )
      results.append([modeling.by_name(sums), gradients])
    with tf.Session() as session:
      randomise(session, rng)
      (sums, gradients), (packed_sums, packed_gradients) = session.run(results)
  assert sums["examples"] == 5.0
  assert packed_sums == pytest.approx(sums, rel=1e-5)
  for a, b in zip(packed_gradients, gradients, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
  assert sum(np.abs(g).max() > 0.1 for g in gradients) > 40


# Hand-written gradients against composed operations ---------------------------

# Of 5 places, 3 pairs.
ANGLES = np.arange(15.0).reshape(5, 3)
SEED = [3, 4]
# Settings that kernels share.
DTYPE = dict(dtype=tf.float32)
NORM = dict(epsilon=1e-12, centred=True, dtype=tf.float32, store=tf.float32)
RMS_NORM = NORM | {"centred": False}
TYPES = dict(types=(tf.float32, tf.float32))


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


def drop(x, keep_prob=0.6):
  mask = kernels.keep_mask(x.shape.as_list(), keep_prob, tf.constant(SEED))
  return tf.where(mask, x / keep_prob, tf.zeros_like(x))


def composed_sum(norm):
  """The sum of `added_twice`'s results."""
  return lambda x, r, g, b, bias: 3.0 * norm(drop(x + bias) + r, g, b)


def added_twice(kernel, **static):
  """Both results of `kernel` for two readers, who have other gradients.

  Of its tensors the last is x's bias.
  """

  def of(*tensors):
    *tensors, bias = tensors
    first, second = kernel(
      *tensors, SEED, bias, keep_prob=0.6, twice=True, **static
    )
    return first + 2.0 * second

  return of


def side_by_side(a, b, c):
  """[a, b, 2 c]: a and b in one group, c alone in another type."""
  tensors = [tf.convert_to_tensor(t) for t in (a, b, c)]
  ab, wide = kernels.side_by_side(
    (tensors[:2], tf.float32), (tensors[2:], tf.float64)
  )
  return tf.concat([ab, tf.cast(2.0 * wide, tf.float32)], axis=1)


MASK_BIAS = [[0.0, -10000.0, 0.3, -0.2]]


def attention_probs(keep_prob):
  static = dict(scale=0.5, keep_prob=keep_prob, dtype=tf.float32)
  return lambda x: kernels.attention_probs(
    x, tf.constant(MASK_BIAS), SEED, **static
  )


def composed_attention_probs(scores):
  return tf.nn.softmax(scores * 0.5 + tf.constant(MASK_BIAS))


def heads(x, b=None):
  return tf.stack(kernels.split_heads(x, b, parts=3, shape=(2, 5, 2)))


def composed_heads(x):
  return tf.transpose(tf.reshape(x, [2, 5, 3, 2, 4]), [2, 0, 3, 1, 4])


CUBE, WIDE, ROW = [2, 3, 7], [5, 7], [7]
# Name -> ours, of operations, the shapes of their inputs.
KERNELS = {
  "gelu": (kernels.gelu, composed_gelu, [CUBE]),
  "gelu of a sum": (
    kernels.gelu, lambda x, b: composed_gelu(x + b), [WIDE, ROW]
  ),
  "gelu_erf of a sum": (
    kernels.gelu_erf, lambda x, b: composed_gelu_erf(x + b), [WIDE, ROW]
  ),
  "silu of a sum": (
    kernels.silu, lambda x, b: (x + b) * tf.sigmoid(x + b), [WIDE, ROW]
  ),
  "layer norm": (
    lambda *t: kernels.layer_norm(*t, **NORM),
    composed_layer_norm,
    [CUBE, ROW, ROW],
  ),
  "rms norm": (
    lambda *t: kernels.layer_norm(*t, **RMS_NORM),
    composed_rms_norm,
    [CUBE, ROW, ROW],
  ),
  "add and norm": (
    lambda *t: kernels.add_and_norm(*t, SEED, keep_prob=0.6, **NORM),
    lambda x, r, g, b: composed_layer_norm(drop(x) + r, g, b),
    [WIDE, WIDE, ROW, ROW],
  ),
  "add and norm, two readers": (
    added_twice(kernels.add_and_norm, **NORM),
    composed_sum(composed_layer_norm),
    [WIDE, WIDE, ROW, ROW, ROW],
  ),
  "invertible, two readers": (
    added_twice(kernels.invertible_add_and_norm, **NORM, **TYPES),
    composed_sum(composed_layer_norm),
    [WIDE, WIDE, ROW, ROW, ROW],
  ),
  "invertible rms norm": (
    added_twice(kernels.invertible_add_and_norm, **RMS_NORM, **TYPES),
    composed_sum(composed_rms_norm),
    [WIDE, WIDE, ROW, ROW, ROW],
  ),
  "dropout and add, two readers": (
    added_twice(kernels.dropout_and_add, **DTYPE, **TYPES),
    lambda x, r, bias: 3.0 * (drop(x + bias) + r),
    [WIDE, WIDE, ROW],
  ),
  "dropout": (lambda x: kernels.dropout(x, SEED, keep_prob=0.6), drop, [CUBE]),
  "attention": (
    attention_probs(1.0), composed_attention_probs, [[2, 3, 5, 4]]
  ),
  "attention, dropout": (
    attention_probs(0.6),
    lambda x: drop(composed_attention_probs(x)),
    [[2, 3, 5, 4]],
  ),
  "turn": (
    lambda x: kernels.rotate(
      x, np.cos(ANGLES).astype("f"), np.sin(ANGLES).astype("f")
    ),
    composed_turn,
    [[2, 3, 5, 6]],
  ),
  "heads": (heads, lambda x, b: composed_heads(x + b), [[10, 24], [24]]),
  "heads without bias": (heads, composed_heads, [[10, 24]]),
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
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_equal_composed_operations(name):
  """Op by op and compiled, of reference and of resource variables."""
  ours, composed, shapes = KERNELS[name]
  rng = np.random.default_rng(4)
  values = [rng.normal(0.3, 1.5, s).astype(np.float32) for s in shapes]

  def with_gradients(function, inputs):
    y = function(*inputs)
    dy = np.sin(np.arange(y.shape.num_elements())).reshape(y.shape)
    return [y, *tf.gradients(y, inputs, tf.constant(dy, tf.float32))]

  results = {}
  for mode in ("off", "layers"):
    with jit.mode(mode):
      for resource in (False, True):
        kind = f"{mode}, {'resource' if resource else 'ref'}"
        with tf.variable_scope(kind[:2] + kind[-3:], use_resource=resource):
          inputs = [
            tf.get_variable(f"x{i}", initializer=value)
            for i, value in enumerate(values)
          ]
        results[kind] = with_gradients(ours, inputs)
        assert all(isinstance(tensor, tf.Tensor) for tensor in results[kind])
  want = with_gradients(composed, [tf.constant(value) for value in values])
  want = [tf.convert_to_tensor(tensor) for tensor in want]
  with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    results, want = session.run([results, want])
  assert all(np.abs(e).max() > 0.1 for e in want)
  for kind, tensors in results.items():
    for a, e in zip(tensors, want, strict=True):
      np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5, err_msg=kind)


@pytest.mark.parametrize("mode", ["off", "layers"])
def test_gelu_erf_equals_pythons_erf(mode):
  """Value and slope at numbers that every type knows, tails included."""
  x = np.concatenate([np.linspace(-6, 6, 49), [-100.0, 100.0]])
  cdf = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])
  slope = cdf + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
  results = []
  # float32: in the tail 1 + erf(x) is of few digits, times x. The last, all of
  # bfloat16, rounds each step, not the result.
  types = (
    (tf.float32, tf.float32, 2.0**-20),
    (tf.bfloat16, tf.float32, 2.0**-7),
    (tf.float16, tf.float32, 2.0**-10),
    (tf.bfloat16, tf.bfloat16, 2.0**-5),
  )
  for store, dtype, _ in types:
    given = tf.constant(x, store)
    with jit.mode(mode):
      y = kernels.gelu_erf(given, dtype=dtype)
      (gradient,) = tf.gradients(y, given)
    assert y.dtype == gradient.dtype == store
    results.append([tf.cast(t, tf.float32) for t in (y, gradient)])
  with tf.Session() as session:
    results = session.run(results)
  for got, (*_, rounding) in zip(results, types, strict=True):
    np.testing.assert_allclose(got, (x * cdf, slope), rounding, rounding)


def test_an_activations_slope_in_float16_is_finite():
  """Its square would not be, from 256 on."""
  x = tf.constant([-60_000.0, -300.0, 0.0, 300.0, 60_000.0], tf.float16)
  slopes = [
    tf.gradients(function(x, dtype=tf.float16), x)[0]
    for function in (kernels.gelu, kernels.gelu_erf, kernels.silu)
  ]
  with tf.Session() as session:
    assert np.all(session.run(slopes) == np.array([0.0, 0.0, 0.5, 1.0, 1.0]))


# Dropout ----------------------------------------------------------------------


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


@pytest.mark.parametrize("shape", [[2**15, 2, 1, 2**17], [3, 2**15, 2**16 + 1]])
def test_more_elements_than_32_bits_number_have_numbers_of_their_own(shape):
  """Also where the shape is not known before."""
  assert math.prod(shape) > 2**32
  sizes = tf.placeholder_with_default(np.array(shape, np.int32), [len(shape)])
  numbers = [kernels.row_numbers(s) for s in (shape, tf.unstack(sizes))]
  with tf.Session() as session:
    for low, high in session.run(numbers):
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


def test_every_dropout_site_of_the_model_has_its_own_seed(graph, monkeypatch):
  sites, original = [], layers.dropout_site_seed
  keep = lambda seed, site: sites.append(site) or original(seed, site)
  monkeypatch.setattr(layers, "dropout_site_seed", keep)
  tensors = as_tensors(ragged_batch(np.random.default_rng(6)))
  seed = tf.constant([1, 2])
  modeling.pretraining_model(tensors, tiny_config(0.1), True, seed)
  assert sites == list(range(1 + 3 * TINY["num_hidden_layers"]))
  random = {op.type for op in graph.get_operations() if "Random" in op.type}
  stateful = {kind for kind in random if not kind.startswith("Stateless")}
  assert stateful <= {"TruncatedNormal"}


def test_model_with_dropout_repeats_itself_and_evaluation_has_none():
  tensors = as_tensors(ragged_batch(np.random.default_rng(7)))
  seed = tf.placeholder(tf.int32, [2])
  with reusing():
    train, plain, evaluate, stateful = (
      modeling.pretraining_model(tensors, *arguments).masked_lm_loss
      for arguments in (
        (tiny_config(0.3), True, seed),
        (tiny_config(0.0), True),
        (tiny_config(0.3), False),
        (tiny_config(0.3), True),
      )
    )
  losses = []
  for seeds in ([[1, 2], [1, 3]], [[1, 2]]):
    with tf.Session() as session:
      randomise(session, np.random.default_rng(8))
      losses += [session.run(train, {seed: values}) for values in seeds]
  with tf.Session() as session:
    randomise(session, np.random.default_rng(8))
    first, second = session.run([plain, evaluate])
    drawn = session.run(stateful), session.run(stateful)
  assert losses[0] == losses[2] != losses[1]
  assert first == second
  assert drawn[0] != drawn[1] != first


# Variables, masks, the graph --------------------------------------------------


def published_variables():
  """Names and shapes of google/bert's pre-training checkpoints, of `TINY`."""
  width, wide = TINY["hidden_size"], TINY["intermediate_size"]
  shapes = {
    "bert/embeddings/word_embeddings": [V, width],
    "bert/embeddings/token_type_embeddings": [2, width],
    "bert/embeddings/position_embeddings": [16, width],
    "cls/predictions/output_bias": [V],
    "cls/seq_relationship/output_weights": [2, width],
    "cls/seq_relationship/output_bias": [2],
  }
  norms = ["bert/embeddings", "cls/predictions/transform"]
  dense = {f"{scope}/dense": [width, width] for scope in
           ("bert/pooler", "cls/predictions/transform")}  # fmt: skip
  for layer in range(TINY["num_hidden_layers"]):
    scope = f"bert/encoder/layer_{layer}"
    norms += [f"{scope}/attention/output", f"{scope}/output"]
    for name in ("self/query", "self/key", "self/value", "output/dense"):
      dense[f"{scope}/attention/{name}"] = [width, width]
    dense[f"{scope}/intermediate/dense"] = [width, wide]
    dense[f"{scope}/output/dense"] = [wide, width]
  for scope in norms:
    for name in ("beta", "gamma"):
      shapes[f"{scope}/LayerNorm/{name}"] = [width]
  for name, shape in dense.items():
    shapes |= {f"{name}/kernel": shape, f"{name}/bias": shape[1:]}
  return shapes


def test_variables_are_those_of_published_checkpoints(tmp_path):
  tensors = as_tensors(ragged_batch(np.random.default_rng(9)))
  modeling.pretraining_model(tensors, tiny_config(), True)
  variables = tf.global_variables()
  shapes = {v.op.name: v.shape.as_list() for v in variables}
  assert shapes == published_variables()
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
  expected = reference_modern.attention(
    weights, "scope", x[0], mask > 0, range(S), TINY, local=False
  )
  np.testing.assert_allclose(output[0], expected, atol=1e-5)


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


def test_local_attention_of_an_unknown_number_of_long_rows():
  """They are cut into blocks, of 9 tokens the last is not full."""
  config = tiny_config(0.0)
  config.global_attn_every_n_layers, config.local_attention = 2, 4
  ids = tf.placeholder(tf.int32, [None, 9])
  assert attention.block_of(config, 9)
  model = modeling.BertModel(config, False, ids, tf.ones_like(ids))
  with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    one, three = (
      session.run(model.get_sequence_output(), {ids: np.ones([rows, 9])})
      for rows in (1, 3)
    )
  np.testing.assert_allclose(three, np.repeat(one, 3, axis=0), rtol=1e-5)


def test_one_hot_embeddings_equal_gathered_ones():
  ids = tf.constant([[1, 2, 2], [0, 4, 1]])
  with reusing():
    outputs = [
      modeling.embedding_lookup(ids, 5, 3, use_one_hot_embeddings=one_hot)[0]
      for one_hot in (False, True)
    ]
  with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    gathered, multiplied = session.run(outputs)
  assert gathered.shape == (2, 3, 3)
  np.testing.assert_allclose(gathered, multiplied, atol=1e-7)


# Configuration and errors -----------------------------------------------------


@pytest.mark.parametrize(
  "text, words",
  [
    (TINY | {"hiden_size": 8}, "hiden_size; known keys .*hidden_"),
    (TINY | {"hidden_size": 9}, "hidden_size 9 .*_heads 2"),
    (TINY | {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    (TINY | {"hidden_dropout_prob": 1.0}, "dropout_prob is 1.0"),
    (TINY | {"hidden_act": "swish"}, "hidden_act is .swish., not .*gelu"),
    ({"hidden_size": 8}, "vocab_size is None"),
    ([1], "it is .1., not an object"),
  ],
)
def test_config_errors_name_the_file_and_the_numbers(tmp_path, text, words):
  path = tmp_path / "config.json"
  path.write_text(json.dumps(text))
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
  again = modeling.BertConfig.from_dict(json.loads(config.to_json_string()))
  assert again.to_dict() == config.to_dict()
  assert again.to_dict().items() >= (TINY | extra).items()


def test_configs_in_other_words_are_of_one_model():
  one = {"hidden_act": None, "local_attention": 10}
  other = {"hidden_act": "Linear", "local_attention": 11}
  other["num_key_value_heads"] = 12
  assert bert_config.complete(one) == bert_config.complete(other)


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


# google/bert's names: scripts import them from here, which ruff cannot see.
GOOGLE_BERTS_NAMES = """
  BertConfig BertModel assert_rank attention_layer
  create_attention_mask_from_input_mask create_initializer dropout
  embedding_lookup embedding_postprocessor gelu get_activation
  get_assignment_map_from_checkpoint get_shape_list layer_norm
  layer_norm_and_dropout reshape_from_matrix reshape_to_matrix
  transformer_model
"""


@pytest.mark.parametrize("name", GOOGLE_BERTS_NAMES.split())
def test_modeling_has_google_berts_names(name):
  assert callable(getattr(modeling, name))


def test_tokens_of_a_row_count_unless_it_only_fills_up_a_batch():
  """Also where its first example has no weight, as a window without words."""
  batch = types.SimpleNamespace(
    weights=tf.constant([[0.0, 2.0], [0.0, 0.0]]),
    input_mask=tf.constant([[1, 1, 2, 0], [1, 1, 0, 0]]),
  )
  sums = modeling.finetuning_sums(tf.zeros([2, 2]), tf.zeros([2, 2]), batch)
  with tf.Session() as session:
    assert session.run([sums.tokens, sums.examples]) == [3.0, 1.0]


def test_without_a_seed_one_is_drawn_which_recomputing_has_too():
  bert = modeling.BertConfig(**{**TINY, "hidden_dropout_prob": 0.1})
  with tf.Graph().as_default() as graph:
    ids = tf.zeros([2, 8], tf.int32)
    model = modeling.BertModel(bert, True, ids, recompute=("layer",))
    tf.gradients(model.get_sequence_output(), tf.trainable_variables())
    types = [op.type for op in graph.get_operations()]
    drawn = [kind for kind in types if kind.startswith("RandomUniform")]
  assert len(drawn) == 1
