"""AdamW and the gradient order against independent references."""

import collections
import functools
import time

import numpy as np
import pytest

import mixed_precision
import optimization
from common.errors import UserError
from common.tensorflow_v1 import tf
from config.exchange_config import AllreduceConfig
from config.optimizers import OptimizerConfig
from config.precision import LossScaleConfig
from gradients import all_reduce
from gradients.distributed import Comm
from xla_patches import jit

SHAPES = {
  "dense/kernel": (3, 4),
  "dense/bias": (4,),
  "LayerNorm/gamma": (4,),
}


def reference(weights, gradients, rates, decayed, rule, corrected):
  """AdamW, LAMB or StableAdamW in float64.

  As in arXiv:1711.05101, arXiv:1904.00962 and arXiv:2304.13013. The betas are
  float32's: 1 - float32(0.999) is 1.3e-5 off 0.001.
  """
  beta_1, beta_2 = float(np.float32(0.9)), float(np.float32(0.999))
  w = {k: v.astype(np.float64) for k, v in weights.items()}
  m = {k: np.zeros_like(v) for k, v in w.items()}
  v = {k: np.zeros_like(x) for k, x in w.items()}
  for t, (step, rate) in enumerate(zip(gradients, rates, strict=True), 1):
    for k, g in step.items():
      m[k] = beta_1 * m[k] + (1 - beta_1) * g
      v[k] = beta_2 * v[k] + (1 - beta_2) * g**2
      m_hat = m[k] / (1 - 0.9**t) if corrected else m[k]
      v_hat = v[k] / (1 - 0.999**t) if corrected else v[k]
      update = m_hat / (np.sqrt(v_hat) + 1e-6)
      if k in decayed:
        update = update + 0.01 * w[k]
      ratio = 1.0
      if rule == "lamb":
        norms = np.linalg.norm(w[k]), np.linalg.norm(update)
        ratio = min(max(norms[0] / norms[1], 0.01), 0.3) if all(norms) else 1.0
      if rule == "stable_adamw":
        rms = np.sqrt(np.mean(g**2 / np.maximum(v_hat, 1e-12)))
        ratio = 1.0 / max(1.0, rms)
      w[k] = w[k] - rate * ratio * update
  return w, m, v


@pytest.mark.parametrize("epsilon", [1e-8, 1e-24])
def test_words_without_a_gradient_stay(epsilon):
  """The square of 1e-24 is no float32."""
  config = OptimizerConfig(optimizer="stable_adamw", epsilon=epsilon)
  with tf.Graph().as_default(), tf.Session() as session:
    words = tf.get_variable("words", initializer=[1.0, 2.0, 3.0])
    gradient = tf.constant([0.5, 0.0, -0.5])
    train = config.make(0.1).apply_gradients([(gradient, words)])
    session.run(tf.global_variables_initializer())
    session.run(train)
    got = session.run(words)
  np.testing.assert_allclose(got, [0.9877, 2.0, 3.0121], atol=2e-4)


@pytest.mark.parametrize("resource", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("rule", ["adamw", "lamb", "stable_adamw"])
def test_equals_numpy_from_update_1(rule, corrected, resource):
  """After 1, 2 and 20 updates."""
  rng = np.random.default_rng(0)
  # Trust ratios below, inside and above the clamp, and of a zero norm.
  sizes = dict(zip(SHAPES, (1.0, 0.0, 0.003), strict=True))
  sizes["wide/kernel"] = 0.05
  shapes = {**SHAPES, "wide/kernel": (30, 20)}
  weights = {k: rng.normal(size=s) * sizes[k] for k, s in shapes.items()}
  draw = lambda shape: rng.normal(size=shape) * 10.0 ** rng.integers(-4, 3)
  gradients = [{k: draw(s) for k, s in shapes.items()} for _ in range(20)]
  rates = rng.uniform(0.001, 0.1, 20)
  decayed = {"dense/kernel", "wide/kernel"}
  config = OptimizerConfig(optimizer=rule, bias_correction=corrected)
  values = {}
  with tf.Graph().as_default(), tf.Session() as session:
    rate = tf.placeholder(tf.float32, [])
    feeds = {k: tf.placeholder(tf.float32, s) for k, s in shapes.items()}
    with tf.variable_scope("", use_resource=resource):
      variables = [
        tf.get_variable(k, initializer=tf.constant(value, tf.float32))
        for k, value in weights.items()
      ]
      pairs = zip(feeds.values(), variables, strict=True)
      train = config.make(rate).apply_gradients([*pairs])
    session.run(tf.global_variables_initializer())
    for number, (step, value) in enumerate(
      zip(gradients, rates, strict=True), 1
    ):
      feed = {feeds[k]: g for k, g in step.items()}
      session.run(train, {**feed, rate: value})
      if number in (1, 2, 20):
        tensors = {v.op.name: v for v in tf.global_variables()}
        values[number] = session.run(tensors)
  close = np.testing.assert_allclose
  for number, got in values.items():
    want, want_m, want_v = reference(
      weights, gradients[:number], rates[:number], decayed, rule, corrected
    )
    for k in shapes:
      close(got[k], want[k], rtol=5e-6, atol=2e-6, err_msg=k)
      # Gradients are up to 300: what cancels leaves float32's rounding.
      close(got[k + "/adam_m"], want_m[k], rtol=2e-6, atol=1e-5)
      close(got[k + "/adam_v"], want_v[k], rtol=2e-6)


@pytest.mark.parametrize(
  "kind, changes, words",
  [
    (OptimizerConfig, {"optimizer": "sgd"}, "--optimizer=sgd: not one of ada"),
    (OptimizerConfig, {"min_trust_ratio": 2.0}, "2.0 and --max_trust_ratio"),
    (AllreduceConfig, {"zero": 1, "powersgd_rank": 2}, "--powersgd.* --zero"),
    (
      AllreduceConfig,
      {"powersgd_rank": 4, "fp16_allreduce": True},
      "--powersgd_rank .* --fp16_allreduce",
    ),
    (
      LossScaleConfig,
      {"initial_loss_scale": 4.0, "min_loss_scale": 8.0},
      "min_loss_scale=8.0 is above .*=4.0",
    ),
  ],
)
def test_impossible_settings_are_named(kind, changes, words):
  with pytest.raises(UserError, match=words):
    kind(**changes)


def test_prenormalizing_makes_every_gradient_of_norm_1():
  for gradient in ([3.0, 4.0], [0.003, 0.004]):
    made = final([[gradient]], 1, prenormalize=True)
    np.testing.assert_allclose(made.moment, [0.06, 0.08], rtol=1e-5)


@pytest.mark.parametrize("mode", ["off", "layers"])
def test_trust_ratios_are_reported_in_the_variables_order(mode):
  """Against the formula: one clamped below, one free, one without a norm."""
  values = {"a": [0.001, 0.0], "b": [0.2, 0.1], "c": [0.0, 0.0]}
  gradients = {"a": [1.0, 2.0], "b": [0.5, -1.0], "c": [1.0, 1.0]}
  tf.enable_resource_variables()
  with tf.Graph().as_default(), tf.Session() as session, jit.mode(mode):
    feed = tf.placeholder_with_default(1.0, [])
    variables = {
      name: tf.get_variable(name, initializer=tf.constant(value))
      for name, value in values.items()
    }
    loss = feed * sum(
      tf.reduce_sum(v * gradients[name]) for name, v in variables.items()
    )
    optimizer = OptimizerConfig(optimizer="lamb", clip_norm=0.0)
    ops = update_ops(
      loss, {"loss": loss}, optimizer.make(tf.constant(0.1)), clip_norm=0.0
    )
    start(session)
    bad = session.run(ops.fetches(), {feed: np.nan})
    good = session.run(ops.fetches())
  want = []
  for name, value in values.items():
    w, g = np.array(value), np.array(gradients[name])
    update = 0.1 * g / (np.sqrt(0.001) * np.abs(g) + 1e-6) + 0.01 * w
    ratio = np.linalg.norm(w) / np.linalg.norm(update)
    want.append(min(max(ratio, 0.01), 0.3) if ratio else 1.0)
  assert want[0] == 0.01 < want[1] < 0.3 and want[2] == 1.0
  np.testing.assert_allclose(good["trust_ratios"], want, rtol=1e-4)
  assert (bad["skipped"], bad["skipped_updates"]) == (True, 1)
  assert bad["trust_ratios"].tolist() == [0.0] * 3
  assert (good["skipped"], good["skipped_updates"]) == (False, 1)


def update_ops(loss, sums, optimizer, micro_batches=1, scale=1.0, **settings):
  """`build_train_ops` of one rank, from the loss on."""
  loss_scale = mixed_precision.StaticLossScale(scale)
  gradients = tf.gradients(loss * loss_scale.value, tf.trainable_variables())
  exchange = optimization.make_exchange(
    AllreduceConfig(), Comm(), loss_scale.value, optimizer
  )
  config = OptimizerConfig(**settings)
  return optimization.build_train_ops(
    gradients, sums, exchange, loss_scale, config, micro_batches
  )


EMPTY = -99.0  # as a second element: without examples


def test_a_moment_that_keeps_nothing_needs_no_correction():
  made = dict(bias_correction=True, beta_1=0.0, beta_2=0.0)
  with tf.Graph().as_default(), tf.Session() as session:
    w = tf.get_variable("w", initializer=tf.constant([1.0, 2.0]))
    config = OptimizerConfig(**made, weight_decay_rate=0.0)
    gradient = tf.constant([4.0, -4.0])
    train = config.make(tf.constant(0.5)).apply_gradients([(gradient, w)])
    session.run(tf.global_variables_initializer())
    session.run(train)
    np.testing.assert_allclose(session.run(w), [0.5, 2.5], rtol=1e-5)


Problem = collections.namedtuple("Problem", "session x w moment ops step")
Final = collections.namedtuple("Final", "w moment step reports")


@functools.cache
def linear_problem(micro_batches, clip_norm=0.0, prenormalize=False, scale=1.0):
  """loss share = sum(w * x); so x is the gradient."""
  with tf.Graph().as_default() as graph:
    tf.enable_resource_variables()
    x = tf.placeholder(tf.float32, [2])
    w = tf.get_variable("w", initializer=tf.constant([1.0, 2.0]))
    b = tf.get_variable("bias", initializer=tf.constant([0.5]))
    filled = tf.cast(tf.not_equal(x[1], EMPTY), tf.float32)
    loss = (tf.reduce_sum(w * x) + tf.reduce_sum(b) * 0.0 * x[0]) * filled
    ops = update_ops(
      loss,
      {"loss": loss, "count": filled},
      optimization.AdamWeightDecayOptimizer(learning_rate=tf.constant(0.1)),
      micro_batches,
      scale,
      clip_norm=clip_norm,
      prenormalize=prenormalize,
    )
    (moment,) = (v for v in tf.global_variables() if v.op.name == "w/adam_m")
    step = tf.train.get_global_step()
    return Problem(tf.Session(graph=graph), x, w, moment, ops, step)


def run_update(session, x, ops, micro):
  """Feeds one update's micro-batches; returns what the update says."""
  for value in micro[:-1]:
    session.run(ops.accumulate, {x: value})
  return session.run(ops.fetches(), {x: micro[-1]})


def start(session):
  with session.graph.as_default():
    session.run(
      [tf.global_variables_initializer(), tf.local_variables_initializer()]
    )


def final(updates, micro_batches, *settings, **more) -> Final:
  """What there is after updates, each a list of micro-batches."""
  problem = linear_problem(micro_batches, *settings, **more)
  session, x, *variables, ops, step = problem
  start(session)
  reports = [run_update(session, x, ops, micro) for micro in updates]
  return Final(*session.run([*variables, step]), reports)


def test_micro_batches_add_up_and_are_forgotten_after_the_update():
  split = final([[[1, 2], [3, -5]], [[1, 1], [0, 2]]], 2)
  whole = final([[[4, -3]], [[1, 3]]], 1)
  np.testing.assert_array_equal(split.w, whole.w)
  assert split.step == 2
  assert split.reports[0]["sums"]["count"] == 2
  # The sum of both shares, with the weights from before the update.
  assert split.reports[0]["sums"]["loss"] == pytest.approx(1 * 4 + 2 * -3)


def test_clipping_uses_the_norm_of_the_whole_gradient():
  """[3, 4] has norm 5: clipped to 1 it acts as [0.6, 0.8]."""
  clipped = final([[[1, 0], [2, 4]]], 2, clip_norm=1.0)
  assert clipped.reports[0]["grad_norm"] == pytest.approx(5.0)
  want = final([[[0.6, 0.8]]], 1)
  np.testing.assert_allclose(clipped.w, want.w, rtol=1e-6)
  # A clip per micro-batch would act on [1, 0] + [2, 4] / sqrt(20): another
  # direction. A gradient within the norm is left as it is.
  free, want = final([[[0.3, 0.4]]], 1, clip_norm=1.0), final([[[0.3, 0.4]]], 1)
  np.testing.assert_allclose(free.w, want.w, rtol=1e-6)


def test_a_micro_batch_without_examples_is_none():
  """Where a batch does not divide: it neither counts nor keeps an update."""
  empty, bad = [0.0, EMPTY], [np.nan, 1.0]
  got, want = final([[[1.0, 2.0], bad, empty]], 3), final([[[2.0, 4.0]]], 1)
  np.testing.assert_allclose(got.w, want.w, rtol=1e-6)
  (report,) = got.reports
  assert report["dropped_micro_batches"] == 1 and not report["skipped"]

  # The record that stands in its rows may overflow.
  got = final([[[1.0, 2.0], bad, [np.nan, EMPTY]]], 3)
  np.testing.assert_allclose(got.w, want.w, rtol=1e-6)
  assert got.reports[0]["dropped_micro_batches"] == 1

  got = final([[bad, empty, bad]], 3)
  np.testing.assert_array_equal(got.w, [1.0, 2.0])
  (report,) = got.reports
  assert report["dropped_micro_batches"] == 2 and report["skipped"]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_micro_batch_is_dropped_alone(place, value):
  """The two others count: their sum is scaled to three micro-batches."""
  micro = [[1.0, 2.0], [3.0, -5.0]]
  micro.insert(place, [value, 0.0])
  got, want = final([micro], 3), final([[[4 * 1.5, -3 * 1.5]]], 1)
  np.testing.assert_allclose(got.w, want.w, rtol=1e-6)
  (report,) = got.reports
  assert report["dropped_micro_batches"] == 1 and not report["skipped"]
  assert report["sums"]["count"] == 2
  assert got.step == 1


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_update_without_a_finite_gradient_is_skipped(micro_batches):
  bad = [[0.0, np.nan]] * micro_batches
  good = [[1.0, 2.0]] * micro_batches
  got, want = final([bad, good], micro_batches), final([good], micro_batches)
  np.testing.assert_array_equal(got.w, want.w)  # slots are untouched, too
  skipped, after = got.reports
  assert skipped["skipped"] and not after["skipped"]
  assert [r["skipped_updates"] for r in got.reports] == [1, 1]
  assert skipped["trust_ratios"].shape == (0,)  # AdamW has none
  assert after["dropped_micro_batches"] == 0
  assert got.step == 2
  # The skip names the variable, if no micro-batch was dropped before.
  variables = linear_problem(micro_batches).ops.variables
  assert variables[skipped["nonfinite_variable"]].op.name == "w"
  assert after["nonfinite_variable"] == -1


def test_a_skipped_update_tells_the_rate_of_its_own_step():
  """However late the step is read."""
  with tf.Graph().as_default(), tf.Session() as session:
    tf.enable_resource_variables()
    w = tf.get_variable("w", initializer=tf.constant([1.0, 2.0]))
    global_step = tf.train.get_or_create_global_step()
    late = tf.numpy_function(lambda: time.sleep(0.2) or 0.0, [], tf.double)
    with tf.control_dependencies([late]):
      rate = 0.1 * tf.cast(global_step.read_value(), tf.float32)
    loss = tf.reduce_sum(w) * np.nan
    ops = update_ops(loss, {"loss": loss}, OptimizerConfig().make(rate))
    start(session)
    updates = [session.run(ops.fetches()) for _ in range(3)]
  assert all(update["skipped"] for update in updates)
  rates = [update["learning_rate"] for update in updates]
  np.testing.assert_allclose(rates, [0.0, 0.1, 0.2], rtol=1e-6)


def test_loss_scale_changes_nothing_but_the_range():
  updates = [[[3.0, 1.0]], [[-1.0, 2.0]]]
  results = []
  for made in (final(updates, 1), final(updates, 1, scale=1024.0)):
    norms = [report["grad_norm"] for report in made.reports]
    results.append([*made.w, *made.moment, *norms])
  np.testing.assert_array_equal(*results)


def test_create_optimizer_is_google_berts():
  """Warm-up, decay, clipping and the step, against the reference."""
  with tf.Graph().as_default(), tf.Session() as session:
    w = tf.get_variable("w", initializer=tf.constant([0.1, -0.2, -0.1]))
    target = tf.constant([40.0, 0.2, -0.5])
    loss = tf.reduce_mean(tf.square(target - w))
    train = optimization.create_optimizer(loss, 0.2, 10, 3, False)
    with pytest.raises(ValueError, match="use_tpu"):
      optimization.create_optimizer(loss, 0.2, 10, 3, use_tpu=True)
    session.run(tf.global_variables_initializer())
    seen = []
    for _ in range(5):
      session.run(train)
      seen.append(session.run(w))
    assert session.run(tf.train.get_global_step()) == 5
  w, gradients = np.array([0.1, -0.2, -0.1]), []
  rates = [0.2 * s / 3 if s < 3 else 0.2 * (1 - s / 10) for s in range(5)]
  for k in range(5):
    g = 2 * (w - np.array([40.0, 0.2, -0.5])) / 3
    gradients.append({"w": g / max(1.0, np.linalg.norm(g))})
    begun = {"w": np.array([0.1, -0.2, -0.1])}
    made = reference(begun, gradients, rates[: k + 1], {"w"}, "adamw", False)
    w = made[0]["w"]
    np.testing.assert_allclose(seen[k], w, rtol=1e-4)


def test_squares_for_a_gpu_are_those_for_a_cpu(monkeypatch):
  """In the gradients' order, though vectors of one length are added at once."""
  shapes = [3], [2, 2], [5], [3], [2, 2], [1], [3]
  draw = np.random.default_rng(1).standard_normal
  gradients = [draw(shape).astype(np.float32) for shape in shapes]
  want = [0.5 * np.sum(gradient**2) for gradient in gradients]
  for on_gpu in (False, True):
    monkeypatch.setattr(jit, "on_gpu", functools.partial(bool, on_gpu))
    with tf.Graph().as_default(), jit.mode("layers"), tf.Session() as session:
      got = session.run(all_reduce.half_squares([*map(tf.constant, gradients)]))
      functions = session.graph.as_graph_def().library.function
    np.testing.assert_allclose(got, want, rtol=1e-6)
  (program,) = functions
  # Of vectors of 3, 5 and 1 numbers, and of two matrices.
  assert [node.op for node in program.node_def].count("Sum") == 5
