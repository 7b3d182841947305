"""ZeRO-1: shards against whole variables, alone and over simulated ranks."""

import types

import numpy as np
import pytest
import resuming
import runs

from common.tensorflow_v1 import tf
from config import optimizers
from config.exchange_config import AllreduceConfig
from gradients import adamw, zero

SHARED = {"allreduce": AllreduceConfig(zero=1)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40])
def test_shards_put_together_are_the_variables(ranks):
  """Also where a rank has nothing but padding."""
  shapes = [[3, 4], [5], [], [2, 1, 3]]
  rng = np.random.default_rng(0)
  values = [rng.normal(size=s).astype(np.float32) for s in shapes]
  group = [3, 2, 0]
  with tf.Graph().as_default(), tf.Session() as session:
    variables = [tf.get_variable(f"v{i}", s) for i, s in enumerate(shapes)]
    tensors = [tf.constant(values[i]) for i in group]
    of_rank = lambda r: zero.Shard(
      [variables[i] for i in group], types.SimpleNamespace(rank=r, size=ranks)
    )
    shards = [of_rank(r) for r in range(ranks)]
    flat = session.run(shards[0].flat(tensors))
    own = [session.run(s.own(tensors)) for s in shards]
    np.testing.assert_array_equal(np.concatenate(own), flat)
    whole = session.run(shards[-1].whole(tf.constant(flat)))
    for number, value in zip(group, whole, strict=True):
      np.testing.assert_array_equal(value, values[number])
    sums = sum(
      session.run(s.sums(tf.constant(o)))
      for s, o in zip(shards, own, strict=True)
    )
    want = [values[i].sum() for i in group]
    np.testing.assert_allclose(sums, want, atol=1e-6)
    spread = np.concatenate(
      [session.run(s.spread([4.0, 3.0, 1.0])) for s in shards]
    )
    np.testing.assert_array_equal(
      spread, [4] * 6 + [3] + [1] * 12 + [0] * (len(flat) - 19)
    )


class MatrixMomentum(adamw.AdamWeightDecayOptimizer):
  """One momentum for matrices, Adam for the rest: slots per variable.

  m <- b1 m + g and w <- w - lr (m + decay w), for matrices.
  """

  def slots_of(self, variable):
    if len(variable.shape) == 2:
      return {"momentum": "beta_1"}
    return super().slots_of(variable)

  def _update(self, gradient, variable, slots, decay, layout):
    if "momentum" not in slots:
      return super()._update(gradient, variable, slots, decay, layout)
    m = slots["momentum"]
    weights = tf.convert_to_tensor(variable)
    new_m = self.beta_1 * m.variable + gradient
    rate = tf.convert_to_tensor(self.learning_rate, tf.float32)
    new = weights - rate * (new_m / m.correction + decay * weights)
    with tf.control_dependencies([new, new_m]):
      return tf.group(m.variable.assign(new_m), variable.assign(new))


@pytest.fixture
def matrix_momentum(monkeypatch):
  """Enters the optimizer; returns its settings of a run."""
  settings = ("weight_decay_rate", "beta_1", "beta_2", "bias_correction")
  row = optimizers.Optimizer(__name__, "MatrixMomentum", settings)
  monkeypatch.setitem(optimizers.OPTIMIZERS, "matrix", row)
  return {"optimizer": "matrix", "bias_correction": True}


def test_slots_of_each_variable_equal_numpy(matrix_momentum):
  """Three updates: each slot is corrected by its own beta."""
  gradients = np.random.default_rng(0).normal(size=(3, 2, 2))
  with tf.Graph().as_default(), tf.Session() as session:
    fed = tf.placeholder(tf.float32, [2, 2])
    matrix = tf.get_variable("matrix", initializer=tf.ones([2, 2]))
    bias = tf.get_variable("bias", initializer=tf.ones([2]))
    optimizer = optimizers.OptimizerConfig(**matrix_momentum).make(0.1)
    train = optimizer.apply_gradients([(fed, matrix), (fed[0], bias)])
    session.run(tf.global_variables_initializer())
    for gradient in gradients:
      session.run(train, {fed: gradient})
    got = session.run({v.op.name: v for v in tf.global_variables()})
  assert got.keys() == {
    "matrix", "matrix/momentum", "bias", "bias/adam_m", "bias/adam_v",
    "applied_updates",
  }  # fmt: skip
  w, momentum, b, m, v = 1.0, 0.0, 1.0, 0.0, 0.0
  for t, gradient in enumerate(gradients, 1):
    momentum = 0.9 * momentum + gradient
    w = w - 0.1 * (momentum / (1 - 0.9**t) + 0.01 * w)
    m, v = 0.9 * m + 0.1 * gradient[0], 0.999 * v + 0.001 * gradient[0] ** 2
    b = b - 0.1 * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6)
  for name, want in (
    ("matrix", w), ("matrix/momentum", momentum), ("bias", b),
    ("bias/adam_m", m), ("bias/adam_v", v),
  ):  # fmt: skip
    np.testing.assert_allclose(got[name], want, rtol=1e-4, err_msg=name)


def test_zero_and_resuming_follow_from_what_is_declared(
  tiny_run, tmp_path, matrix_momentum
):
  """A shard has variables of equal slots; checkpoints have the slots whole."""
  settings = dict(
    optimizer=matrix_momentum, num_train_steps=5, learning_rate=1e-4,
    save_checkpoints_steps=3,
  )  # fmt: skip
  runs.pretrain(tiny_run, tmp_path / "one", **settings)
  want = runs.weights(tmp_path / "one")
  whole, _ = resuming.compare(
    tiny_run, tmp_path, [resuming.lost_after(3)], **settings, **SHARED
  )
  np.testing.assert_allclose(
    runs.metrics(whole), runs.metrics(tmp_path / "one"), 1e-5
  )
  got = runs.weights(whole)
  assert got.keys() == want.keys()
  for name in want:
    weight, _, slot = name.rpartition("/")
    if slot in ("momentum", "adam_m", "adam_v"):
      assert (slot == "momentum") == (want[weight].ndim == 2)
      assert got[name].shape == want[weight].shape
      np.testing.assert_allclose(got[name], want[name], rtol=1e-3, atol=1e-6)
  assert sum(name.endswith("/momentum") for name in want) > 5


@pytest.mark.parametrize(
  "optimizer",
  [
    pytest.param({"optimizer": "adamw"}, marks=pytest.mark.slow),
    pytest.param(
      {"optimizer": "adamw", "bias_correction": True}, marks=pytest.mark.slow
    ),
    {"optimizer": "lamb", "bias_correction": True},
    {"optimizer": "stable_adamw", "bias_correction": True},
    {"optimizer": "muon"},
  ],
  ids=lambda o: "-".join(map(str, o.values())),
)
@pytest.mark.parametrize(
  "xla", ["off", pytest.param("layers", marks=pytest.mark.slow)]
)
def test_equals_the_whole_update(tiny_run, tmp_path, optimizer, xla):
  """12 updates; names, shapes and values of checkpoints are the same."""
  settings = dict(optimizer=optimizer, num_train_steps=12, xla=xla)
  whole, shared = tmp_path / "whole", tmp_path / "shared"
  runs.pretrain(tiny_run, whole, **settings)
  runs.pretrain(tiny_run, shared, **settings, **SHARED)
  np.testing.assert_allclose(runs.metrics(shared), runs.metrics(whole), 1e-6)
  if optimizer["optimizer"] in ("lamb", "stable_adamw"):
    for key in ("trust_ratio_min", "trust_ratio_max"):
      got, want = (runs.metrics(folder, key)[1:] for folder in (shared, whole))
      np.testing.assert_allclose(got, want, rtol=1e-4)
  want, got = runs.weights(whole), runs.weights(shared)
  assert got.keys() == want.keys()
  for name, value in want.items():
    error = np.linalg.norm(got[name] - value)
    # Moments are sums in which much cancels. The gradient of the keys' biases
    # is 0: all of it is rounding.
    bound = 1e-5 if "/adam_" in name else 1e-6
    size = 1.0 if "/key/bias" in name else np.linalg.norm(value)
    assert error <= bound * size, name
