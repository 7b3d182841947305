"""Muon against NumPy, and how ranks share its matrices."""

import numpy as np
import pytest
import runs

from common.tensorflow_v1 import tf
from config.optimizers import OptimizerConfig, polynomials_of
from gradients import layout, muon

HIDDEN = "bert/encoder/layer_0/"
SHAPES = {
  f"{HIDDEN}attention/self/query/kernel": (6, 6),
  f"{HIDDEN}attention/self/key/kernel": (6, 6),
  f"{HIDDEN}intermediate/dense/kernel": (6, 15),
  f"{HIDDEN}output/dense/kernel": (15, 6),
  f"{HIDDEN}output/dense/bias": (6,),
  "bert/embeddings/word_embeddings": (9, 6),
  "cls/predictions/transform/dense/kernel": (6, 6),
}


def orthogonal(matrix, polynomials):
  """By the singular values, in float64."""
  u, s, v = np.linalg.svd(matrix, full_matrices=False)
  s = s / np.linalg.norm(s)
  for a, b, c in polynomials:
    s = a * s + b * s**3 + c * s**5
  return (u * s) @ v


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16], ids=str)
@pytest.mark.parametrize("steps", [1, 4, 5])
@pytest.mark.parametrize("coefficients", ["jordan", "polar_express"])
@pytest.mark.parametrize("shape", [(40, 40), (40, 60), (40, 170)], ids=str)
def test_steps_act_on_singular_values(shape, coefficients, steps, dtype):
  """Also those that share a Gram matrix, for a spectrum that falls by 100."""
  rng = np.random.default_rng(0)
  u = np.linalg.qr(rng.normal(size=(3, 40, 40)))[0]
  v = np.linalg.qr(rng.normal(size=(3, shape[1], 40)))[0]
  matrices = 7.0 * u * np.logspace(0, -2, 40) @ v.swapaxes(1, 2)
  polynomials = polynomials_of(coefficients, steps)
  with tf.Graph().as_default(), tf.Session() as session:
    fed = tf.constant(matrices, tf.float32)
    got = session.run(muon.orthogonalized(fed, polynomials, dtype))
  for matrix, result in zip(matrices, got, strict=True):
    want = orthogonal(matrix, polynomials)
    error = np.linalg.norm(result - want) / np.linalg.norm(want)
    assert error < (0.2 if dtype == tf.bfloat16 else 1e-4)


def test_what_does_not_move_stays():
  """The gradients of weights that nothing reads are 0."""
  with tf.Graph().as_default(), tf.Session() as session:
    zeros = tf.zeros([2, 3, 4])
    got = session.run(muon.orthogonalized(zeros, polynomials_of("jordan", 5)))
  np.testing.assert_array_equal(got, np.zeros([2, 3, 4]))


def test_equals_numpy():
  """Three updates: Muon for the hidden matrices, AdamW for all else."""
  rng = np.random.default_rng(0)
  w = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
  m = {name: np.zeros(shape) for name, shape in SHAPES.items()}
  v = {name: np.zeros(shape) for name, shape in SHAPES.items()}
  config = OptimizerConfig(optimizer="muon", muon_coefficients="polar_express")
  with tf.Graph().as_default(), tf.Session() as session:
    fed, pairs = {}, []
    for name, value in w.items():
      fed[name] = tf.placeholder(tf.float32, value.shape)
      start = tf.constant(value, tf.float32)
      pairs.append((fed[name], tf.get_variable(name, initializer=start)))
    train = config.make(0.01).apply_gradients(pairs)
    session.run(tf.global_variables_initializer())
    for _ in range(3):
      gradients = {n: rng.normal(size=shape) for n, shape in SHAPES.items()}
      session.run(train, {fed[name]: g for name, g in gradients.items()})
      for name, g in gradients.items():
        decay = 0.0 if name.endswith("bias") else 0.01
        if name.startswith(HIDDEN) and name.endswith("kernel"):
          m[name] = 0.95 * m[name] + 0.05 * g
          u = orthogonal(
            0.95 * m[name] + 0.05 * g, polynomials_of("polar_express", 5)
          )
          step = 0.2 * np.sqrt(max(g.shape)) * u
        else:
          m[name] = 0.9 * m[name] + 0.1 * g
          v[name] = 0.999 * v[name] + 0.001 * g**2
          step = m[name] / (np.sqrt(v[name]) + 1e-6)
        w[name] = w[name] - 0.01 * (step + decay * w[name])
    got = session.run({x.op.name: x for x in tf.global_variables()})
  for name in SHAPES:
    np.testing.assert_allclose(got[name], w[name], rtol=1e-4, atol=1e-5)
    slots = {n.rpartition("/")[2] for n in got if n.startswith(f"{name}/")}
    is_hidden = name.startswith(HIDDEN) and name.endswith("kernel")
    assert slots == ({"muon_m"} if is_hidden else {"adam_m", "adam_v"})


def test_compiled_with_the_update_it_is_the_same(
  tiny_run, tmp_path, monkeypatch
):
  """As on one GPU, where all of the update is one program."""
  settings = dict(num_train_steps=4, optimizer={"optimizer": "muon"})
  runs.pretrain(tiny_run, tmp_path / "plain", **settings)
  always = lambda self, layout: True
  monkeypatch.setattr(muon.MuonOptimizer, "is_one_program", always)
  runs.pretrain(tiny_run, tmp_path / "compiled", xla="layers", **settings)
  for key in ("loss", "grad_norm"):
    pair = [runs.metrics(tmp_path / f, key) for f in ("compiled", "plain")]
    np.testing.assert_allclose(*pair, rtol=1e-4, err_msg=key)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 50])
def test_ranks_share_matrices_evenly(ranks):
  """BERT-Base's: no rank has more than its share and the half of a matrix."""
  sizes = [1, 1, 1, 1, 4, 4] * 12
  batches = layout.batches_to_deal(sizes, ranks)
  assert sum(batches, []) == sizes
  for batch in batches:
    loads = np.bincount(layout.deal(batch, ranks), batch, ranks)
    assert loads.sum() == sum(batch)
    assert loads.max() <= max(4, sum(batch) / ranks + 2)
