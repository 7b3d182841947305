"""--sampled_softmax: its estimates, and what must not change them."""

import itertools
import types

import numpy as np
import pytest
import runs

import mixed_precision
import modeling
from common.errors import UserError
from common.tensorflow_v1 import tf
from model import sampled_softmax
from model.sampled_softmax import SampledLogits
from training import training_run
from xla_patches import jit

V, H, N = 40, 6, 9


def arrays(seed=0):
  """hidden [N, H], table [V, H], bias [V], labels [N]; a rare word is one."""
  rng = np.random.default_rng(seed)
  bias = np.linspace(0.0, -6.0, V)
  labels = np.append(rng.integers(0, V, N - 1), V - 1)
  return (
    rng.normal(0, 0.7, [N, H]).astype(np.float32),
    rng.normal(0, 0.7, [V, H]).astype(np.float32),
    bias.astype(np.float32),
    labels.astype(np.int32),
  )


def test_sums_of_a_sample_are_without_bias():
  """Over many draws the mean weight of each class is 1."""
  draws, bias = 4000, tf.constant(arrays()[2])
  seeds = tf.stack([tf.fill([draws], 7), tf.range(draws)], axis=1)
  draw = lambda seed: sampled_softmax.sample(
    bias, sampled_softmax.sampling(10, V, seed)
  )
  with tf.Session() as session:
    classes, log_weights = session.run(
      tf.map_fn(draw, seeds, (tf.int32, tf.float32))
    )
  assert all(len(np.unique(row)) == 10 for row in classes)
  assert log_weights.min() >= 0.0
  total = np.bincount(classes.ravel(), np.exp(log_weights).ravel())
  often = np.bincount(classes.ravel())
  # A class with a chance of p stands for 1 / p: a deviation of p^-1/2 a draw.
  error = np.abs(total / draws - 1.0) * np.sqrt(often)
  assert error.max() < 4.5
  assert often[0] > 2.5 * often[-1]


@pytest.mark.parametrize("mode", ["off", "layers"])
def test_a_sample_of_all_words_but_one_is_the_softmax(mode):
  """With its gradients; the word left out weighs next to nothing."""
  hidden, table, bias, labels = arrays()
  bias[3] = -60.0
  labels[labels == 3] = 4
  weights = np.linspace(0.1, 1.0, N).astype(np.float32)
  hidden, table, bias = map(tf.constant, (hidden, table, bias))
  sampling = sampled_softmax.sampling(V - 1, V, tf.constant([1, 2]))
  full = modeling.Logits(tf.matmul(hidden, table, transpose_b=True), bias)
  results = []
  with jit.mode(mode):
    for logits in (SampledLogits(hidden, table, bias, sampling), full):
      losses, correct = logits.losses_and_correct(tf.constant(labels))
      log_z = losses + logits.at(labels)
      gradients = tf.gradients(losses * weights, [hidden, table, bias])
      gradients += tf.gradients(log_z**2, [hidden, table, bias])
      results.append([losses, correct, log_z, *gradients])
  log_z = tf.reduce_logsumexp(full.matmul + bias, axis=1)
  wanted = [log_z, *tf.gradients(log_z**2, [hidden, table, bias])]
  with tf.Session() as session:
    some, all_words, wanted = session.run([*results, wanted])
  for a, b in zip(wanted, [all_words[2], *all_words[-3:]], strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
  for a, b in zip(some, all_words, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_sample_in_16_bits():
  hidden, table, bias, labels = map(tf.constant, arrays())
  sampling = sampled_softmax.sampling(20, V, tf.constant([1, 2]))
  policies = [mixed_precision.FP32]
  for precision, loss_type in itertools.product(
    ("bf16", "fp16"), ("fp32", "fp16")
  ):
    changes = [f"losses={loss_type}"]
    policies.append(mixed_precision.make_policy(precision, changes))
  results, labels_apart = [], []
  for policy in policies:
    x = tf.cast(hidden, policy.heads)
    logits = SampledLogits(x, table, bias, sampling)
    losses, _ = logits.losses_and_correct(labels, policy)
    results.append([losses, *tf.gradients(losses, [hidden, table, bias])])
    # The label's logit, by which a z-loss knows Z, is that of the loss.
    rows = tf.cast(tf.gather(tf.cast(table, policy.heads), labels), tf.float32)
    own = tf.reduce_sum(tf.cast(x, tf.float32) * rows, axis=1)
    labels_apart.append(logits.at(labels) - own - tf.gather(bias, labels))
  assert {tensor.dtype for row in results for tensor in row} == {tf.float32}
  with tf.Session() as session:
    wide, *others = session.run(results)
    assert np.abs(session.run(labels_apart)).max() < 1e-6
  for narrow, policy in zip(others, policies[1:], strict=True):
    for a, b in zip(wide, narrow, strict=True):
      np.testing.assert_allclose(a, b, 0.05, 0.02, err_msg=policy.describe())


def test_gradients_of_many_samples_are_those_of_the_softmax():
  """But for the bias of a logarithm, which falls with the sample."""
  hidden, table, bias, labels = arrays(1)
  seed = tf.placeholder(tf.int32, [2])
  hidden, table, bias = map(tf.constant, (hidden, table, bias))
  full = modeling.Logits(tf.matmul(hidden, table, transpose_b=True), bias)

  def gradient(logits):
    losses, _ = logits.losses_and_correct(tf.constant(labels))
    return [tf.reduce_mean(losses), *tf.gradients(losses, [hidden, table])]

  of_sample = gradient(
    SampledLogits(hidden, table, bias, sampled_softmax.sampling(20, V, seed))
  )
  with tf.Session() as session:
    want = session.run(gradient(full))
    each = [session.run(of_sample, {seed: [1, n]}) for n in range(1000)]
  for values in zip(*each, want, strict=True):
    mean, expected = np.mean(values[:-1], axis=0), values[-1]
    apart = np.linalg.norm(mean - expected) / np.linalg.norm(expected)
    assert 1e-4 < apart < 0.03
    alone = np.linalg.norm(values[0] - expected) / np.linalg.norm(expected)
    assert alone > 3 * apart


GIVEN = dict(
  sampled_softmax=30, global_batch_size=12, num_train_steps=5,
  num_warmup_steps=1, save_checkpoints_steps=1, dropout=0.0, do_eval=True,
)  # fmt: skip


def test_an_update_has_a_sample_of_its_own(tiny_run, tmp_path):
  """Which its micro-batches share."""
  config = runs.config(tiny_run, tmp_path, sampled_softmax=30)
  plan = types.SimpleNamespace(accumulation=2)
  with tf.Graph().as_default(), tf.Session() as session:
    micros = (types.SimpleNamespace(number=tf.constant(n)) for n in range(4))
    drawn = session.run(
      [training_run.sampling(config, plan, m).uniform for m in micros]
    )
  np.testing.assert_array_equal(drawn[0], drawn[1])
  np.testing.assert_array_equal(drawn[2], drawn[3])
  assert (drawn[0] != drawn[2]).mean() > 0.9


def test_an_evaluation_uses_all_words(tiny_run, tmp_path):
  """And training does not: its losses are others than those of all words."""
  settings = GIVEN | dict(train_batch_size=12, learning_rate=1e-12)
  folders = tmp_path / "some", tmp_path / "all"
  runs.pretrain(tiny_run, folders[0], **settings)
  runs.pretrain(tiny_run, folders[1], **settings | {"sampled_softmax": 0})
  some, every = (
    runs.read_json(folder, "eval_results.json")["masked_lm_loss"]
    for folder in folders
  )
  assert some == pytest.approx(every, rel=1e-6)
  some, every = map(runs.metrics, folders)
  assert some != pytest.approx(every, rel=1e-3)
  assert np.mean(some) == pytest.approx(np.mean(every), rel=0.05)
  for changes, words in (
    ({"sampled_softmax": 100}, "the vocabulary has 100 words"),
    ({"tensor_parallel": 2}, "--sampled_softmax does not go with"),
  ):
    with pytest.raises(UserError, match=words):
      runs.pretrain(tiny_run, tmp_path, **{"sampled_softmax": 9, **changes})
