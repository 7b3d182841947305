"""ZeRO-1: shards against whole variables, alone and over simulated ranks."""

import types

import numpy as np
import pytest
import runs

from common.errors import UserError
from common.tensorflow_v1 import tf
from gradients import distributed, zero
from gradients.distributed import AllreduceConfig

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
  runs.pretrain(tiny_run, tmp_path / "whole", **settings)
  runs.pretrain(tiny_run, tmp_path / "shared", **settings, **SHARED)
  np.testing.assert_allclose(
    runs.metrics(tmp_path / "shared"), runs.metrics(tmp_path / "whole"), 1e-6
  )
  if optimizer["optimizer"] == "lamb":
    for key in ("trust_ratio_min", "trust_ratio_max"):
      np.testing.assert_allclose(
        runs.metrics(tmp_path / "shared", key)[1:],
        runs.metrics(tmp_path / "whole", key)[1:],
        rtol=1e-4,
      )
  want = runs.weights(tmp_path / "whole")
  got = runs.weights(tmp_path / "shared")
  assert got.keys() == want.keys()
  for name, value in want.items():
    error = np.linalg.norm(got[name] - value)
    # Moments are sums in which much cancels. The gradient of the keys' biases
    # is 0: all of it is rounding.
    bound = 1e-5 if "/adam_" in name else 1e-6
    size = 1.0 if "/key/bias" in name else np.linalg.norm(value)
    assert error <= bound * size, name


@pytest.mark.slow
def test_resumed_with_and_without(tiny_run, tmp_path):
  """Bit for bit with it; and a run without goes on with its checkpoint."""
  settings = dict(optimizer={"bias_correction": True}, save_checkpoints_steps=7)

  def back_to_7():
    for path in tmp_path.iterdir():
      if path.name.startswith(("model.ckpt-14", "model.ckpt-20")):
        path.unlink()

  runs.pretrain(tiny_run, tmp_path, **settings, **SHARED)
  want = runs.weights(tmp_path)
  back_to_7()
  runs.pretrain(tiny_run, tmp_path, **settings, **SHARED)
  np.testing.assert_equal(runs.weights(tmp_path), want)
  back_to_7()
  runs.pretrain(tiny_run, tmp_path, **settings)
  for name, value in runs.weights(tmp_path).items():
    np.testing.assert_allclose(value, want[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("changes", [{"powersgd_rank": 2}, {"zero": 2}])
def test_impossible_settings_are_named(changes):
  with pytest.raises(UserError, match="--zero"):
    distributed.AllreduceConfig(**{"zero": 1, **changes})
