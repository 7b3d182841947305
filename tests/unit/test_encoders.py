"""Later encoders: each key of the config alone, and published architectures."""

import functools
import itertools
import json
import math
import types

import numpy as np
import pytest
import reference_modern
from reference_modern import ARCHITECTURES
from test_modeling import (
  TINY,
  B,
  P,
  S,
  V,
  as_tensors,
  loss_and_gradients,
  packed,
  ragged_batch,
  randomise,
)

import mixed_precision
import modeling
from common.tensorflow_v1 import tf
from finetuning import heads
from finetuning.packed import FinetuningBatch
from model import attention, encoder, weights

ALONE = [
  dict(position_type="rotary"),
  dict(position_type="rotary", global_rope_theta=50.0),
  dict(position_offset=2),
  dict(global_attn_every_n_layers=2, local_attention=4),
  dict(global_attn_every_n_layers=2, local_attention=1),
  dict(global_attn_every_n_layers=2, local_attention=6),
  dict(num_key_value_heads=1),
  dict(attention_bias=False),
  dict(norm="rms"),
  dict(norm_bias=False),
  dict(norm_eps=0.1),
  dict(embedding_norm=False),
  dict(pre_layer_norm=True, embedding_norm=False),
  dict(gated=True),
  dict(gated=True, hidden_act="silu"),
  dict(mlp_bias=False),
  dict(type_vocab_size=0),
  dict(mlm_head=False),
  dict(classifier_bias=False),
  dict(tie_word_embeddings=False),
  dict(decoder_bias=False),
  dict(classifier_pooling="cls"),
  dict(classifier_pooling="mean"),
]
# What a head reads of a text: each pooling, through the masked LM head's layer,
# which all but the first share, or without it.
POOLINGS = [
  dict(classifier_pooling="pooler"),
  dict(classifier_pooling="cls"),
  dict(classifier_pooling="mean"),
  dict(classifier_pooling="mean", mlm_head=False),
]
MODELS = {**ARCHITECTURES, **{json.dumps(keys): keys for keys in ALONE}}
# The first has rotary positions, blocks and gates; all are tried by slow tests.
EACH = [
  name if name == "ModernBERT" else pytest.param(name, marks=pytest.mark.slow)
  for name in ARCHITECTURES
]
# Each example's number at each place of a packed row: 4 tokens, 4, and padding.
PACKED = np.array([1] * 4 + [2] * 4 + [0])


@pytest.fixture(autouse=True)
def graph():
  with tf.Graph().as_default() as graph:
    yield graph


def keys_of(name):
  return {**TINY, "num_hidden_layers": 3, **MODELS[name]}


def config_of(name, dropout=0.0):
  dropouts = dict.fromkeys(
    ("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout
  )
  return modeling.BertConfig.from_dict({**keys_of(name), **dropouts})


def batch_of(rng, is_packed):
  batch = ragged_batch(rng)
  if is_packed:
    batch = batch._replace(
      input_mask=np.tile(PACKED, [B, 1]), next_sentence_labels=np.zeros([B, 2])
    )
  return batch


@pytest.mark.parametrize(
  "name, is_packed",
  [*((name, True) for name in MODELS), *((n, False) for n in ARCHITECTURES)],
)
def test_it_equals_numpy(name, is_packed):
  rng = np.random.default_rng(1)
  batch, config = batch_of(rng, is_packed), config_of(name)
  tensors = as_tensors(batch)
  model = modeling.BertModel(
    config, False, *tensors[:3], scope="bert",
    examples_per_sequence=2 if is_packed else 1,
  )  # fmt: skip
  logits = modeling.masked_lm_logits(
    config, model.get_sequence_output(), model.get_embedding_table(),
    tensors.masked_lm_positions,
  )  # fmt: skip
  wanted = [model.get_embedding_output(), *model.get_all_encoder_layers()]
  with tf.Session() as session:
    values = randomise(session, rng)
    outputs, log_probs = session.run([wanted, logits.log_probs()])
  parts = weights.PARTS[:4]
  shapes = {w.name: w.shape for w in weights.weights(config) if w.part in parts}
  assert {name: value.shape for name, value in values.items()} == shapes
  positions, log_probs = np.arange(S), log_probs.reshape(B, P, V)
  for row in range(B):
    mask = batch.input_mask[row]
    seen = np.broadcast_to(mask > 0, [S, S])
    if is_packed:
      seen = mask[:, np.newaxis] == mask
      positions = np.array([*range(4), *range(4), 0])
    expected = reference_modern.encoder(
      keys_of(name), values, batch.input_ids[row], seen,
      batch.segment_ids[row], positions,
    )  # fmt: skip
    real = mask > 0
    got = np.stack([output[row] for output in outputs])
    np.testing.assert_allclose(got[:, real], expected[:, real], atol=2e-5)
    places = batch.masked_lm_positions[row]
    expected = reference_modern.masked_lm_logits(
      keys_of(name), values, expected[-1, places]
    )
    expected = expected - np.logaddexp.reduce(expected, axis=1, keepdims=True)
    known = real[places]
    np.testing.assert_allclose(
      log_probs[row][known], expected[known], atol=5e-5
    )


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("keys", POOLINGS, ids=str)
def test_heads_read_what_the_config_pools(keys, is_packed):
  """A classifier's logits and an answer's, in NumPy of the encoder's output."""
  rng = np.random.default_rng(7)
  bert = {**TINY, **reference_modern.MODERN_BERT, **keys}
  bert = modeling.BertConfig.from_dict(bert)
  batch = batch_of(rng, is_packed)
  examples = 2 if is_packed else 1
  tensors = as_tensors(batch)
  rows = FinetuningBatch(
    *tensors[:3], tf.zeros([B, examples, 2], tf.int32), tf.ones([B, examples])
  )
  config = types.SimpleNamespace(
    bert=bert, policy=mixed_precision.FP32, recompute=(), triton=False
  )
  model = heads.encode(rows, config, False)
  with tf.variable_scope("", reuse=tf.AUTO_REUSE):
    classified = heads.classification(
      rows._replace(targets=rows.targets[:, :, 0]), 3, config, False
    )
    answered = heads.span(rows, config, False)
  with tf.Session() as session:
    values = randomise(session, rng)
    sequence, logits, ends = session.run(
      [model.get_sequence_output(), classified.outputs["logits"],
       answered.outputs["logits"]]
    )  # fmt: skip
  has_pooler = keys["classifier_pooling"] == "pooler"
  assert ("bert/pooler/dense/kernel" in values) == has_pooler

  def transformed(row):
    if has_pooler or not keys.get("mlm_head", True):
      return row
    scope = "cls/predictions/transform"
    row = row @ values[f"{scope}/dense/kernel"]
    row = row * 0.5 * (1.0 + np.vectorize(math.erf)(row / math.sqrt(2.0)))
    deviation = row - row.mean()
    size = math.sqrt((deviation**2).mean() + bert.norm_eps)
    return values[f"{scope}/LayerNorm/gamma"] * deviation / size

  for row, number in itertools.product(range(B), range(examples)):
    own = sequence[row][batch.input_mask[row] == number + 1]
    if keys["classifier_pooling"] == "mean":
      pooled = transformed(own.mean(axis=0))
    elif has_pooler:
      scope = "bert/pooler/dense"
      pooled = own[0] @ values[f"{scope}/kernel"] + values[f"{scope}/bias"]
      pooled = np.tanh(pooled)
    else:
      pooled = transformed(own[0])
    expected = values["output_weights"] @ pooled + values["output_bias"]
    np.testing.assert_allclose(logits[row, number], expected, atol=3e-5)
  expected = [transformed(token) for token in sequence[0]]
  expected = expected @ values["cls/squad/output_weights"].T
  expected += values["cls/squad/output_bias"]
  np.testing.assert_allclose(ends[0], expected, atol=3e-5)


def assert_alike(got, want, names):
  """Losses and gradients, but for rounding."""
  for a, b, name in zip(got, want, ["loss", *names], strict=True):
    scale = np.abs(b).max() + 0.01
    np.testing.assert_allclose(a / scale, b / scale, atol=1e-4, err_msg=name)


@functools.cache
def plain(name):
  """Loss and gradients with dropout, op by op, all results kept."""
  return loss_and_gradients(config_of(name, dropout=0.3))


@pytest.mark.parametrize(
  "name, mode, gpus",
  [
    ("ModernBERT", "layers", []),
    ("ModernBERT", "whole_layers", []),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in itertools.product(
        ARCHITECTURES, ["layers", "whole_layers", "step"], [[], ["GPU"]]
      )
    ),
  ],
)
def test_programs_give_what_operations_give(monkeypatch, name, gpus, mode):
  want, names, _ = plain(name)
  monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: gpus)
  got, again, _ = loss_and_gradients(config_of(name, dropout=0.3), mode=mode)
  assert again == names
  assert_alike(got, want, names)


@pytest.mark.parametrize(
  "name, recompute",
  [
    ("ModernBERT", encoder.RECOMPUTE),
    ("ModernBERT", ["attention"]),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in itertools.product(
        ARCHITECTURES, [[part] for part in encoder.RECOMPUTE]
      )
    ),
  ],
  ids=str,
)
def test_recomputing_changes_nothing(name, recompute):
  want, names, _ = plain(name)
  got, again, _ = loss_and_gradients(config_of(name, dropout=0.3), recompute)
  assert again == names
  assert_alike(got, want, names)


@pytest.mark.parametrize("name", EACH)
def test_the_gradient_equals_differences(name):
  """Central differences along each gradient, dropout's mask held fixed."""
  rng = np.random.default_rng(5)
  sums = modeling.pretraining_model(
    as_tensors(ragged_batch(rng)), config_of(name, dropout=0.2), True,
    dropout_seed=tf.constant([1, 2]),
  )  # fmt: skip
  loss = sums.masked_lm_loss + sums.next_sentence_loss
  variables = tf.trainable_variables()
  gradients = tf.gradients(loss, variables)
  with tf.Session() as session:
    values = randomise(session, rng)
    for variable, gradient in zip(
      variables, session.run(gradients), strict=True
    ):
      value, norm = values[variable.op.name], np.linalg.norm(gradient)
      assert norm > 1e-3, variable.op.name
      step = 3e-3 * gradient / norm
      ends = []
      for sign in (1.0, -1.0):
        variable.load((value + sign * step).astype(np.float32), session)
        ends.append(session.run(loss))
      variable.load(value.astype(np.float32), session)
      slope = (ends[0] - ends[1]) / 6e-3
      assert slope == pytest.approx(norm, rel=0.03, abs=0.03), variable.op.name


@pytest.mark.parametrize("name", EACH)
def test_packed_equals_unpacked(name):
  """Sums of the heads, and the gradient of the masked LM's loss."""
  rng = np.random.default_rng(5)
  examples = ragged_batch(rng, (S, 4, 3, 5, 2), (4, 1, 2, 2, 1), np.ones(5))
  results = []
  for batch in (examples, packed(examples, [[1, 2, 4], [0], [3]], 3)):
    with tf.variable_scope("", reuse=bool(results)):
      sums = modeling.pretraining_model(
        as_tensors(batch), config_of(name), False
      )
    variables = tf.trainable_variables()
    loss = sums.masked_lm_loss + sums.next_sentence_loss
    results.append([loss, *tf.gradients(loss, variables)])
  with tf.Session() as session:
    randomise(session, rng)
    unpacked_got, packed_got = session.run(results)
  assert_alike(packed_got, unpacked_got, [v.op.name for v in variables])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", [*EACH, '{"classifier_pooling": "mean"}'])
def test_the_last_layer_at_some_places_is_the_whole_one_there(name, is_packed):
  batch = batch_of(np.random.default_rng(4), is_packed)
  tensors, places = as_tensors(batch), tf.constant([[0, 2], [4, 4], [3, 1]])
  build = functools.partial(
    modeling.BertModel, config_of(name), False, *tensors[:3], scope="bert",
    examples_per_sequence=2 if is_packed else 1,
  )  # fmt: skip
  with tf.variable_scope("", reuse=tf.AUTO_REUSE):
    whole, some = build(), build(places=places)
  want = tf.gather(whole.get_sequence_output(), places, batch_dims=1)
  with tf.Session() as session:
    randomise(session, np.random.default_rng(1))
    got, want, firsts, pooled = session.run(
      [some.get_sequence_output(), want, some.get_pooled_output(),
       whole.get_pooled_output()]
    )  # fmt: skip
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(firsts, pooled, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision, error", [("bf16", 0.05), ("fp16", 0.006)])
@pytest.mark.parametrize("name", EACH)
def test_16_bits_are_near(name, precision, error):
  batch = as_tensors(ragged_batch(np.random.default_rng(3)))
  outputs = []
  for policy in map(mixed_precision.make_policy, ("fp32", precision)):
    with tf.variable_scope("", reuse=bool(outputs)):
      model = modeling.BertModel(
        config_of(name), False, *batch[:3], scope="bert", policy=policy
      )
    outputs.append(tf.cast(model.get_sequence_output(), tf.float32))
  with tf.Session() as session:
    randomise(session, np.random.default_rng(3))
    wide, narrow = session.run(outputs)
  real = ragged_batch(np.random.default_rng(3)).input_mask > 0
  difference = np.sqrt(np.mean(np.square(narrow - wide)[real]))
  assert 0.0 < difference < error * np.sqrt(np.mean(np.square(wide[real])))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
  "length", [8, 15, *(pytest.param(n, marks=pytest.mark.slow) for n in (9, 16))]
)
def test_blocks_of_near_tokens_are_the_masked_form(
  monkeypatch, length, is_packed
):
  """Lengths that fill the last block and that do not; examples of all sizes."""
  rng = np.random.default_rng(length)
  config = config_of("ModernBERT", dropout=0.0)
  ids = tf.constant(rng.integers(0, V, [2, length]))
  sizes = ((1, 3, length - 5), (length - 2, 2)) if is_packed else (
    (length - 2,), (length,)
  )  # fmt: skip
  mask = np.zeros([2, length], np.int32)
  for row, examples in enumerate(sizes):
    numbers = np.repeat(np.arange(len(examples)) + 1, examples)
    mask[row, : len(numbers)] = numbers
  results = []
  for least in (attention._LEAST_BLOCKS, 10**6):
    monkeypatch.setattr(attention, "_LEAST_BLOCKS", least)
    with tf.variable_scope("", reuse=bool(results)):
      model = modeling.BertModel(
        config, False, ids, tf.constant(mask), scope="bert",
        examples_per_sequence=3 if is_packed else 1,
      )  # fmt: skip
    real = tf.boolean_mask(model.get_sequence_output(), mask > 0)
    weighted = tf.reduce_sum(real * np.arange(1.0, 9.0, dtype=np.float32))
    variables = tf.trainable_variables("bert/e")
    results.append([real, *tf.gradients(weighted, variables)])
  with tf.Session() as session:
    randomise(session, rng)
    blocks, masked = session.run(results)
  for a, b in zip(blocks, masked, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())
