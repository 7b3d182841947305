"""PowerSGD against NumPy, and its state in checkpoints."""

import numpy as np
import pytest
import runs

import mixed_precision
import optimization
from common.errors import UserError
from common.tensorflow_v1 import tf
from config.exchange_config import AllreduceConfig
from config.optimizers import OptimizerConfig
from gradients import power_sgd
from gradients.distributed import Comm

SHAPES = {"wide": [12, 40], "tall": [50, 16], "square": [8, 8], "bias": [16]}


def reference(gradients, basis, rank):
  """Algorithm 1 and 2 of arXiv:1905.13727 in float64, on one rank.

  Returns the gradients that are used, and the last error and basis.
  """
  error, used = 0.0, []
  for gradient in gradients:
    whole = gradient.astype(np.float64) + error
    left = np.linalg.qr(whole @ np.linalg.qr(basis)[0])[0][:, :rank]
    basis = whole.T @ left
    used.append(left @ basis.T)
    error = whole - used[-1]
  return used, error, basis


class Descent(tf.train.GradientDescentOptimizer):
  """w <- w - g, as `build_train_ops` wants it."""

  learning_rate, trust_ratios, has_trust_ratios = 1.0, [], False

  def __init__(self):
    super().__init__(1.0)

  def create_slots(self, variables):
    """None."""

  def is_one_program(self, layout):
    return True

  def apply_gradients(self, pairs, layout):
    return super().apply_gradients(pairs)


class Sums:
  """The gradient path with PowerSGD, whose gradients are fed, in a session."""

  def __init__(self, rank, shapes=SHAPES, scale=1.0, micro_batches=1):
    tf.enable_resource_variables()
    self.fed = {k: tf.placeholder(tf.float32, s) for k, s in shapes.items()}
    self.variables = [
      tf.get_variable(k, initializer=tf.zeros(s)) for k, s in shapes.items()
    ]
    pairs = zip(self.variables, self.fed.values(), strict=True)
    loss = sum(tf.reduce_sum(v * gradient) for v, gradient in pairs)
    loss_scale = mixed_precision.StaticLossScale(scale)
    exchange = optimization.make_exchange(
      AllreduceConfig(powersgd_rank=rank), Comm(), loss_scale.value, Descent()
    )
    self.ops = optimization.build_train_ops(
      tf.gradients(loss * loss_scale.value, self.variables),
      {"n": tf.constant(1.0)},
      exchange,
      loss_scale,
      OptimizerConfig(clip_norm=0.0),
      micro_batches,
    )
    self.variables_of_rank = {
      v.op.name: v for v in tf.global_variables() if "powersgd" in v.op.name
    }
    self.run = tf.get_default_session().run
    self.run(
      [tf.global_variables_initializer(), tf.local_variables_initializer()]
    )

  def state(self):
    """Name -> value of all that PowerSGD keeps."""
    return self.run(self.variables_of_rank)

  def update(self, *micro_batches):
    """An update of micro-batches' gradients; returns those that it used."""
    before = self.run(self.variables)
    for number, gradients in enumerate(micro_batches, 1):
      ops = self.ops.accumulate
      if number == len(micro_batches):
        ops = self.ops.fetches()
      self.run(ops, {self.fed[k]: value for k, value in gradients.items()})
    after = self.run(self.variables)
    used = (b - a for b, a in zip(before, after, strict=True))
    return dict(zip(self.fed, used, strict=True))


@pytest.fixture(autouse=True)
def graph():
  with tf.Graph().as_default(), tf.Session():
    yield


def draw(count, shapes=SHAPES, seed=0):
  rng = np.random.default_rng(seed)
  return [
    {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    for _ in range(count)
  ]


@pytest.mark.parametrize("scale", [1.0, 2.0**14])
def test_equals_numpy_at_rank_2(scale):
  updates, sums = draw(5), Sums(2, scale=scale)
  begun = sums.state()
  assert sorted(begun) == [
    f"{name}/powersgd_{what}"
    for name in ("square", "tall", "wide")
    for what in ("basis", "error")
  ]
  used = [sums.update(gradients) for gradients in updates]
  state = sums.state()
  close = np.testing.assert_allclose
  for name in ("square", "tall", "wide"):
    want, error, basis = reference(
      [g[name] for g in updates], begun[f"{name}/powersgd_basis"], 2
    )
    got = [u[name] for u in used]
    close(got, want, rtol=1e-4, atol=1e-4)
    assert np.linalg.matrix_rank(got[0], tol=1e-4) == 2
    close(state[f"{name}/powersgd_error"], error, rtol=1e-4, atol=1e-4)
    # Columns may have either sign.
    kept = np.abs(state[f"{name}/powersgd_basis"])
    close(kept, np.abs(basis), rtol=1e-3, atol=1e-3)
  close([u["bias"] for u in used], [g["bias"] for g in updates], rtol=1e-6)


def test_at_full_rank_it_is_exact(monkeypatch):
  """Also after gradients of low rank, whose bases have zeros."""
  monkeypatch.setattr(power_sgd, "_LEAST_GAIN", 0)
  shapes = {"tall": [50, 16], "wide": [16, 40], "square": [16, 16]}
  updates = draw(4, shapes)
  for name in shapes:
    updates[0][name][:] = 0.0
    updates[1][name][3:] = 0.0
    updates[2][name][:] = updates[2][name][:1]
  sums = Sums(16, shapes)
  assert len(sums.state()) == 6
  for update in updates:
    used = sums.update(update)
    for name, want in update.items():
      np.testing.assert_allclose(used[name], want, rtol=1e-5, atol=1e-5)


def test_what_is_not_sent_is_sent_later():
  """A constant gradient of rank 12 at rank 2: the errors stay bounded."""
  (gradient,) = draw(1, {"wide": [12, 40]})
  sums = Sums(2, {"wide": [12, 40]})
  used = [sums.update(gradient)["wide"] for _ in range(120)]
  total = np.sum(used, axis=0) / 120
  np.testing.assert_allclose(total, gradient["wide"], atol=0.3)
  first = np.linalg.norm(used[0] - gradient["wide"])
  assert np.linalg.norm(total - gradient["wide"]) < 0.1 * first


def test_what_was_not_sent_counts_once_when_micro_batches_are_dropped():
  """Of 4 one is kept: its gradient counts 4 times, the error once."""
  shapes = {"wide": [12, 40]}
  first, kept = draw(2, shapes)
  bad = {"wide": np.full([12, 40], np.nan, np.float32)}
  none = {"wide": np.zeros([12, 40], np.float32)}
  sums = Sums(2, shapes, micro_batches=4)
  basis = sums.state()["wide/powersgd_basis"]
  used = [
    sums.update(first, none, none, none)["wide"],
    sums.update(bad, kept, bad, bad)["wide"],
  ]
  want, error, _ = reference([first["wide"], 4 * kept["wide"]], basis, 2)
  np.testing.assert_allclose(used, want, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(
    sums.state()["wide/powersgd_error"], error, rtol=1e-4, atol=1e-4
  )


def test_a_skipped_update_leaves_no_trace():
  first, bad, last = draw(3)
  bad["tall"][7, 3] = np.nan
  sums = Sums(2)
  sums.update(first)
  before = sums.state(), sums.run(sums.variables)
  sums.update(bad)
  after = sums.state(), sums.run(sums.variables)
  used = sums.update(last)
  np.testing.assert_equal(after, before)
  assert all(np.isfinite(value).all() for value in used.values())


LOW = {"allreduce": AllreduceConfig(powersgd_rank=2)}


@pytest.mark.slow
def test_it_may_begin_and_end_in_the_middle_of_a_run(tiny_run, tmp_path):
  runs.pretrain(tiny_run, tmp_path, save_checkpoints_steps=7)
  exact = runs.metrics(tmp_path)
  for name in tmp_path.glob("model.ckpt-20*"):
    name.unlink()
  runs.pretrain(tiny_run, tmp_path, **LOW)
  low = runs.metrics(tmp_path)
  assert low[:14] == exact[:14] and low[15] != exact[15]
  np.testing.assert_allclose(low, exact, rtol=0.02)
  for name in tmp_path.glob("model.ckpt-20*"):
    name.unlink()
  runs.pretrain(tiny_run, tmp_path)
  assert runs.metrics(tmp_path) == exact


@pytest.mark.slow
def test_another_rank_in_the_same_folder_is_said(tiny_run, tmp_path):
  """Its weights start a run of any rank; what it kept besides is counted."""
  settings = dict(num_train_steps=4, num_warmup_steps=1)
  rank = lambda r: {"allreduce": AllreduceConfig(powersgd_rank=r)}
  runs.pretrain(tiny_run, tmp_path / "run", **settings, **rank(2))
  with pytest.raises(
    UserError, match="made with another .* --powersgd_rank: .*"
  ):
    runs.pretrain(tiny_run, tmp_path / "run", **settings, **rank(3))
  report = runs.pretrain(
    tiny_run,
    tmp_path / "new",
    **settings,
    **rank(3),
    init_checkpoint=str(tmp_path / "run" / "model.ckpt-4"),
  )
  assert report["training"]["global_step"] == 4
