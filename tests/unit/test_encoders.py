"""Each key of the config alone, published architectures, and invariances."""

import collections
import functools
import itertools
import math
import types

import numpy as np
import pytest
import reference_modern
from tiny_models import (
  KEYS,
  TINY,
  B,
  P,
  S,
  V,
  as_tensors,
  loss_and_gradients,
  ragged_batch,
  randomise,
  tiny_config,
)

import mixed_precision
import modeling
from common.tensorflow_v1 import tf
from config import execution
from finetuning import classification, heads, squad
from finetuning.packed import FinetuningBatch
from model import attention, weights

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
MEAN = "classifier_pooling=mean"
MODELS = {
  **KEYS,
  **{", ".join(f"{k}={v}" for k, v in keys.items()): keys for keys in ALONE},
}
ARCHITECTURES = [*reference_modern.ARCHITECTURES]
BERTS = ("BERT", "BERT, pre")
# Each example's number at each place of a packed row: 4 tokens, 4, and padding.
PACKED = np.array([1] * 4 + [2] * 4 + [0])


def slow(*cases):
  """Each combination of `cases`, as parameters of a slow test."""
  return [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in itertools.product(*cases)
  ]


# The first stands for all, which slow tests try.
EACH = ["ModernBERT", *slow(ARCHITECTURES[1:])]


@pytest.fixture(autouse=True)
def graph():
  with tf.Graph().as_default() as graph:
    yield graph


def config_of(name, dropout=0.0):
  return tiny_config(dropout, **MODELS[name])


def batch_of(rng, is_packed):
  batch = ragged_batch(rng)
  if is_packed:
    batch = batch._replace(
      input_mask=np.tile(PACKED, [B, 1]), next_sentence_labels=np.zeros([B, 2])
    )
  return batch


def model_of(config, tensors, examples=1, **options):
  """The encoder, of the variables that there are or new ones."""
  with tf.variable_scope("", reuse=tf.AUTO_REUSE):
    return modeling.BertModel(
      config, False, *tensors[:3], scope="bert",
      examples_per_sequence=examples, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
  "name, is_packed",
  [
    *((name, True) for name in MODELS if name not in BERTS[:1]),
    *((name, False) for name in ARCHITECTURES),
  ],
)
def test_it_equals_numpy(name, is_packed):
  rng = np.random.default_rng(1)
  batch, config = batch_of(rng, is_packed), config_of(name)
  keys, tensors = TINY | MODELS[name], as_tensors(batch)
  model = model_of(config, tensors, 1 + is_packed)
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
      keys, values, batch.input_ids[row], seen, batch.segment_ids[row],
      positions,
    )  # fmt: skip
    real = mask > 0
    got = np.stack([output[row] for output in outputs])
    np.testing.assert_allclose(got[:, real], expected[:, real], atol=2e-5)
    places = batch.masked_lm_positions[row]
    expected = reference_modern.masked_lm_logits(
      keys, values, expected[-1, places]
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
  bert = modeling.BertConfig.from_dict(
    {**TINY, **reference_modern.MODERN_BERT, **keys}
  )
  batch = batch_of(rng, is_packed)
  examples = 1 + is_packed
  rows = FinetuningBatch(
    *as_tensors(batch)[:3],
    tf.zeros([B, examples, 2], tf.int32),
    tf.ones([B, examples]),
  )
  config = types.SimpleNamespace(
    bert=bert, precision="fp32", precision_policy=(), recompute=(),
    kind="classifier",
  )  # fmt: skip
  task = types.SimpleNamespace(config=config, outputs=3, slices=None)
  task.losses_and_correct = types.MethodType(
    classification.Classification.losses_and_correct, task
  )
  model = heads.encode(rows, task, False).model
  with tf.variable_scope("", reuse=tf.AUTO_REUSE):
    classified = classification.Classification.head(
      task, rows._replace(targets=rows.targets[:, :, 0]), False
    )
    answered = squad.Squad.head(task, rows, False)
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


# What changes nothing ---------------------------------------------------------


@functools.cache
def plain(name, mode="off"):
  """`loss_and_gradients` with dropout, all results kept."""
  return loss_and_gradients(config_of(name, dropout=0.3), mode=mode)


def operations_more(name, rtol, atol, against="off", **changes):
  """Operations by type, beside those of `plain` in the mode `against`.

  Loss and gradients are checked to be the same, but for `rtol`, and `atol` of
  the largest number.
  """
  want, before = plain(name, against)
  got, graph = loss_and_gradients(config_of(name, dropout=0.3), **changes)
  assert list(got) == list(want)
  for part, b in want.items():
    # Softmax does not feel the key's bias: its gradient is rounding alone.
    noise = 1e-6 if part.endswith("key/bias") else atol / 100
    bound = atol * np.abs(b).max() + noise
    np.testing.assert_allclose(got[part], b, rtol, bound, err_msg=part)
  more = collections.Counter(op.type for op in graph.get_operations())
  more.subtract(op.type for op in before.get_operations())
  return more


@pytest.mark.parametrize(
  "name, mode, gpus",
  [
    ("BERT", "layers", ["GPU"]),
    ("BERT, pre, erf", "layers", []),
    *slow(["BERT"], ["layers"], [[]]),
    *slow(["BERT, pre, erf"], ["layers"], [["GPU"]]),
    ("ModernBERT", "layers", []),
    *slow(ARCHITECTURES, ["layers", "step"], [[], ["GPU"]]),
  ],
)
def test_programs_give_what_operations_give(monkeypatch, name, mode, gpus):
  """For a GPU queries, keys and values are one matmul."""
  plain(name)
  monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: gpus)
  more = operations_more(name, 0.0, 1e-4, mode=mode)
  # One instead of three, one instead of two, and their two gradients each. Both
  # of the losses' are in programs.
  if name.startswith("BERT"):
    assert more["MatMul"] == -2 - len(gpus) * 3 * (2 + 1)


PARTS = [[part] for part in execution.RECOMPUTE]


@pytest.mark.parametrize(
  "name, recompute, mode",
  [
    *itertools.product(["BERT"], [*PARTS, execution.RECOMPUTE], ["off"]),
    ("BERT, pre", ["layer_norm"], "off"),
    ("BERT, pre", ["layer"], "off"),
    ("BERT, pre", execution.RECOMPUTE, "off"),
    ("BERT, erf", ["gelu"], "off"),
    ("ModernBERT", ["attention"], "off"),
    ("ModernBERT", execution.RECOMPUTE, "off"),
    *slow(BERTS, [*PARTS, execution.RECOMPUTE], ["layers"]),
    *slow(["BERT, pre"], [["gelu"], ["attention"]], ["off"]),
    *slow(["BERT, erf"], [["gelu"]], ["layers"]),
    *slow(ARCHITECTURES, PARTS, ["off"]),
  ],
  ids=str,
)
def test_recomputing_changes_nothing(name, recompute, mode):
  more = operations_more(name, 1e-4, 1e-5, mode, recompute=recompute, mode=mode)
  if not name.startswith("BERT"):
    return
  if recompute == ["attention"]:
    assert more["BatchMatMulV2"] == 2 * TINY["num_hidden_layers"]
  if recompute == ["gelu"] and mode == "off":
    arithmetic = "Erf" if "erf" in name else "Sigmoid"
    assert more[arithmetic] == TINY["num_hidden_layers"]
  if recompute == ["layer"]:
    # Six dense layers each, in every layer.
    assert more["MatMul"] == 6 * TINY["num_hidden_layers"]


@pytest.mark.parametrize(
  "name, resource",
  [
    ("BERT", False), ("BERT", True), ("ModernBERT", False),
    *slow(ARCHITECTURES[1:], [False]),
  ],
)  # fmt: skip
def test_the_gradient_equals_differences(name, resource):
  """Central differences along each gradient, dropout's mask held fixed."""
  rng = np.random.default_rng(5)
  tf.get_variable_scope().set_use_resource(resource)
  sums = modeling.pretraining_model(
    as_tensors(ragged_batch(rng)), config_of(name, dropout=0.2), True,
    dropout_seed=tf.constant([1, 2]),
  )  # fmt: skip
  loss = sums.masked_lm_loss + sums.next_sentence_loss
  variables = tf.trainable_variables()
  gradients = tf.gradients(loss, variables)
  assert all(isinstance(gradient, tf.Tensor) for gradient in gradients)
  tolerance = 0.02 if name == "BERT" else 0.03
  with tf.Session() as session:
    values = randomise(session, rng)
    for variable, gradient in zip(
      variables, session.run(gradients), strict=True
    ):
      # Along the gradient, where the difference is largest against rounding.
      part, norm = variable.op.name, np.linalg.norm(gradient)
      if norm < 1e-3:  # softmax does not feel the key's bias
        assert name == "BERT" and part.endswith("key/bias"), part
        continue
      step = 3e-3 * gradient / norm
      ends = []
      for sign in (1.0, -1.0):
        variable.load((values[part] + sign * step).astype("float32"), session)
        ends.append(session.run(loss))
      variable.load(values[part].astype("float32"), session)
      slope = (ends[0] - ends[1]) / 6e-3
      assert slope == pytest.approx(norm, rel=tolerance, abs=tolerance), part


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", [*BERTS, *EACH, MEAN])
def test_the_last_layer_at_some_positions_is_the_whole_one_there(
  name, is_packed
):
  """Also for the pooler, which reads each example's first token."""
  batch = batch_of(np.random.default_rng(4), is_packed)
  positions = tf.constant([[0, 2], [4, 4], [3, 1]])
  build = functools.partial(
    model_of, config_of(name), as_tensors(batch), 1 + is_packed
  )
  whole, some = build(), build(positions=positions)
  without = build(positions=positions, with_pooler=False)
  assert without.get_pooled_output() is None
  want = tf.gather(whole.get_sequence_output(), positions, batch_dims=1)
  pairs = [
    (some.get_sequence_output(), want),
    (without.get_sequence_output(), want),
    (some.get_pooled_output(), whole.get_pooled_output()),
  ]
  with tf.Session() as session:
    randomise(session, np.random.default_rng(1))
    for got, expected in session.run(pairs):
      assert got.shape == expected.shape
      np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", EACH)
def test_16_bits_are_near(name):
  batch = ragged_batch(np.random.default_rng(3))
  outputs = []
  for precision in ("fp32", "bf16", "fp16"):
    policy = mixed_precision.make_policy(precision)
    model = model_of(config_of(name), as_tensors(batch), policy=policy)
    outputs.append(tf.cast(model.get_sequence_output(), tf.float32))
  with tf.Session() as session:
    randomise(session, np.random.default_rng(3))
    outputs = np.array(session.run(outputs))[:, batch.input_mask > 0]
  size = lambda numbers: np.sqrt(np.mean(np.square(numbers)))
  for narrow, error in zip(outputs[1:], (0.05, 0.006), strict=True):
    assert 0.0 < size(narrow - outputs[0]) < error * size(outputs[0])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("length", [8, 15, *slow([9, 16])])
def test_blocks_of_near_tokens_are_the_masked_form(
  monkeypatch, length, is_packed
):
  """Lengths that fill the last block and that do not; examples of all sizes."""
  rng = np.random.default_rng(length)
  config = config_of("ModernBERT")
  sizes = ((length - 2,), (length,))
  if is_packed:
    sizes = ((1, 3, length - 5), (length - 2, 2))
  mask = np.zeros([2, length], np.int32)
  for row, examples in enumerate(sizes):
    numbers = np.repeat(np.arange(len(examples)) + 1, examples)
    mask[row, : len(numbers)] = numbers
  tensors = tf.constant(rng.integers(0, V, [2, length])), tf.constant(mask)
  results = []
  for least in (attention._LEAST_BLOCKS, 10**6):
    monkeypatch.setattr(attention, "_LEAST_BLOCKS", least)
    model = model_of(config, tensors, 3 if is_packed else 1)
    real = tf.boolean_mask(model.get_sequence_output(), mask > 0)
    weighted = tf.reduce_sum(real * np.arange(1.0, 9.0, dtype=np.float32))
    variables = tf.trainable_variables("bert/e")
    results.append([real, *tf.gradients(weighted, variables)])
  with tf.Session() as session:
    randomise(session, rng)
    blocks, masked = session.run(results)
  for a, b in zip(blocks, masked, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())
