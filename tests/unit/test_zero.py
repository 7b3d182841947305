"""ZeRO-1: shards against whole variables, alone and over simulated ranks."""

import types

import numpy as np
import pytest
import runs

from common.tensorflow_v1 import tf
from config import optimizers
from config.exchange_config import AllreduceConfig
from gradients import moments, zero

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


class Lion(moments.MomentOptimizer):
  """One slot, and nothing but this class: https://arxiv.org/abs/2302.06675."""

  slots = ("lion_m",)

  def _update(self, gradient, variable, slots, corrections, decay, layout):
    (momentum,) = slots
    m, weights = map(tf.convert_to_tensor, (momentum, variable))
    direction = tf.sign(self.beta_1 * m + (1.0 - self.beta_1) * gradient)
    new_m = self.beta_2 * m + (1.0 - self.beta_2) * gradient
    rate = tf.convert_to_tensor(self.learning_rate, tf.float32)
    new = weights - rate * (direction + decay * weights)
    with tf.control_dependencies([new, new_m]):
      return tf.group(momentum.assign(new_m), variable.assign(new))


def test_an_optimizer_of_one_slot_needs_no_other_file(
  tiny_run, tmp_path, monkeypatch
):
  """ZeRO, checkpoints and resuming follow from what it declares."""
  settings = ("weight_decay_rate", "beta_1", "beta_2")
  row = optimizers.Optimizer(__name__, "Lion", settings)
  monkeypatch.setitem(optimizers.OPTIMIZERS, "lion", row)
  settings = dict(optimizer={"optimizer": "lion"}, save_checkpoints_steps=4)
  settings |= dict(num_train_steps=8, learning_rate=1e-4)
  whole, shared = tmp_path / "whole", tmp_path / "shared"
  runs.pretrain(tiny_run, whole, **settings)
  runs.pretrain(tiny_run, shared, **settings, **SHARED)
  want, losses = runs.weights(whole), runs.metrics(shared)
  slots = [name for name in want if name.endswith("/lion_m")]
  assert len(slots) > 10 and not any("adam" in name for name in want)
  assert runs.weights(shared).keys() == want.keys()
  np.testing.assert_allclose(losses, runs.metrics(whole), 1e-4)
  forget(shared, 8)
  before = runs.weights(shared / "model.ckpt-4")
  assert any(before[name].any() for name in slots)
  runs.pretrain(tiny_run, shared, **settings, **SHARED)
  assert runs.metrics(shared) == losses


def forget(folder, *steps):
  """Removes the checkpoints of these updates."""
  for step in steps:
    for path in folder.glob(f"model.ckpt-{step}*"):
      path.unlink()


@pytest.mark.parametrize(
  "optimizer",
  [
    pytest.param({"optimizer": "adamw"}, marks=pytest.mark.slow),
    pytest.param(
      {"optimizer": "adamw", "bias_correction": True}, marks=pytest.mark.slow
    ),
    {"optimizer": "lamb", "bias_correction": True},
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
  if optimizer["optimizer"] == "lamb":
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
