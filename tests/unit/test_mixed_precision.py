"""Precision by part: near float32 wherever a part is moved, and loss scales."""

import functools
import types

import numpy as np
import pytest
import runs
import tiny_models
from tiny_models import B, S, as_tensors, ragged_batch, tiny_config

import mixed_precision
import modeling
from common.errors import UserError
from common.tensorflow_v1 import tf
from config.precision import PARTS, LossScaleConfig
from finetuning.squad import span_logits
from gradients import distributed
from mixed_precision import DynamicLossScale
from model import kernels
from training import training_run
from xla_patches import jit


def slow(*case):
  return pytest.param(*case, marks=pytest.mark.slow)


@functools.cache
def loss_and_gradients(precision, *changes):
  """{variable: gradient} of a batch, with the loss, and the graph."""
  policy = mixed_precision.make_policy(precision, changes)
  values, graph = tiny_models.loss_and_gradients(tiny_config(), policy=policy)
  assert all(value.dtype == np.float32 for value in values.values())
  return values, graph


def assert_near(got, loss_rtol, cosine):
  """The loss is float32's, and all variables' gradients point the same way."""
  want, _ = loss_and_gradients("fp32")
  np.testing.assert_allclose(got["loss"], want["loss"], rtol=loss_rtol)
  for name, gradient in want.items():
    if name.endswith("key/bias"):
      continue  # zero but for rounding
    a, b = got[name].ravel(), gradient.ravel()
    similarity = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert similarity > cosine, f"{name}: {similarity}"
    ratio = np.linalg.norm(a) / np.linalg.norm(b)
    assert abs(ratio - 1.0) < 0.1, f"{name}: {ratio}"


@pytest.mark.parametrize(
  "precision, rtol, cosine", [("bf16", 1e-2, 0.99), ("fp16", 2e-3, 0.9995)]
)
def test_the_default_policy_is_near_float32(precision, rtol, cosine):
  got, _ = loss_and_gradients(precision)
  assert got["loss"] != loss_and_gradients("fp32")[0]["loss"]
  assert_near(got, rtol, cosine)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["bf16", *map(slow, ("fp32", "fp16"))])
def test_any_part_can_be_moved(part, name):
  precision = "bf16" if name == "fp32" else "fp32"
  got, _ = loss_and_gradients(precision, f"{part}={name}")
  assert_near(got, 2e-2, 0.98)


def pretraining(precision, **changes):
  policy, bert = mixed_precision.make_policy(precision), tiny_config(**changes)
  batch = as_tensors(ragged_batch(np.random.default_rng(0)))
  sums = modeling.pretraining_model(batch, bert, True, None, policy)
  return sums.masked_lm_loss + sums.next_sentence_loss


def squad(precision):
  policy = mixed_precision.make_policy(precision, [f"losses={precision}"])
  return span_logits(tf.ones([B, S, 8]), tiny_config(), policy)


@pytest.mark.parametrize(
  "precision, mode",
  [
    ("bf16", "layers"),
    ("fp16", "off"),
    slow("bf16", "off"),
    slow("fp16", "layers"),
  ],
)
@pytest.mark.parametrize(
  "build",
  [
    pretraining,
    functools.partial(pretraining, hidden_act="relu"),
    functools.partial(pretraining, gated=True),
    squad,
  ],
  ids=["gelu", "relu", "gated", "squad"],
)
def test_no_gradient_is_a_sum_in_16_bits(build, precision, mode):
  """GPUs add 16 bits up slowly, and wrong if they are many."""
  with tf.Graph().as_default() as graph, jit.mode(mode):
    tf.enable_resource_variables()
    result = build(precision)
    assert None not in tf.gradients(result, tf.trainable_variables())
    definition = graph.as_graph_def()
  nodes = [*definition.node]
  for function in definition.library.function:
    nodes += function.node_def
  types = {
    tf.as_dtype(node.attr["T"].type)
    for node in nodes
    if node.op in ("Sum", "BiasAddGrad")
  }
  assert tf.float32 in types and not types & {tf.bfloat16, tf.float16}


def test_the_gradient_of_a_bias_has_float32s_sum():
  """In bfloat16 256 + 1 is 256."""
  with tf.Graph().as_default(), tf.Session() as session:
    x = tf.zeros([1000, 2], tf.bfloat16)
    bias = tf.constant([0.5, -0.5])
    y = kernels.add_bias(x, bias)
    gradients = tf.gradients(y, [x, bias])
    got, (dx, d_bias) = session.run([y, gradients])
  assert got.dtype == dx.dtype == tf.bfloat16.as_numpy_dtype
  assert (got == [0.5, -0.5]).all() and (dx == 1).all()
  assert d_bias.tolist() == [1000.0, 1000.0]


def test_casts_are_where_the_policy_says():
  """Types of the ops by their place in the graph, forward pass."""

  def types(graph, scope, *kinds):
    return {
      o.outputs[0].dtype
      for o in graph.get_operations()
      if scope in o.name and o.type in kinds
      if not ("gradients" in o.name or "Initializer" in o.name)
    }

  _, graph = loss_and_gradients("bf16")
  matmuls = ("MatMul", "BatchMatMulV2")
  for scope in ("/attention/", "/intermediate/", "/pooler/", "/predictions/"):
    assert types(graph, scope, *matmuls) == {tf.bfloat16}, scope
  for scope, *kinds in (
    ("/encoder/", "Softmax"),
    ("", "Rsqrt"),
    ("/encoder/", "Sigmoid"),
    ("/pooler/", "Tanh"),
    ("", "Exp", "Log"),
    ("/embeddings/", *matmuls),
  ):
    assert types(graph, scope, *kinds) == {tf.float32}, (scope, kinds)
  # An activation is one in the head of masked LM, too.
  _, graph = loss_and_gradients("fp32", "gelu=bf16")
  for scope in ("/encoder/", "/predictions/"):
    assert types(graph, scope, "Sigmoid") == {tf.bfloat16}, scope


@pytest.mark.parametrize(
  "changes",
  [["softmx=fp32"], ["softmax=fp64"], ["softmax"], ["gelu=bf16", "gelu=fp32"]],
)
def test_a_policy_that_cannot_be_is_named(changes):
  words = f"--precision_policy={changes[-1]}: want part=type"
  with pytest.raises(UserError, match=words):
    mixed_precision.make_policy("bf16", changes)


def test_a_policy_describes_itself():
  policy = mixed_precision.make_policy("bf16", ["gelu=bf16"])
  assert policy.describe() == (
    "fp32: embeddings, softmax, layer_norm, tanh, losses; "
    "bf16: attention, feed_forward, heads, gelu"
  )


def test_only_a_run_with_fp16_takes_a_loss_scale(tiny_run, tmp_path):
  fields = dict(precision="bf16", loss_scale={"loss_scale": 8.0})
  runs.config(tiny_run, tmp_path, **fields, precision_policy=["gelu=fp16"])
  with pytest.raises(UserError, match="--loss_scale=8.0 is for fp16"):
    runs.config(tiny_run, tmp_path, **fields, precision_policy=["gelu=bf16"])


def scale_reference(config, overflows):
  """Scales after each update, in plain Python."""
  scale, good = config.initial_loss_scale, 0
  left, scales = config.loss_scale_hysteresis, []
  for overflow in overflows:
    if overflow:
      good = 0
      if left > 1:
        left -= 1
      else:
        scale = max(scale / 2, config.min_loss_scale)
    else:
      good += 1
      if good == config.loss_scale_window:
        scale, good, left = scale * 2, 0, config.loss_scale_hysteresis
    scales.append(scale)
  return scales


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_dynamic_loss_scale_equals_plain_python(hysteresis):
  config = LossScaleConfig(
    initial_loss_scale=16.0,
    loss_scale_window=3,
    loss_scale_hysteresis=hysteresis,
    min_loss_scale=2.0,
  )
  overflows = np.random.default_rng(0).random(60) < 0.4
  overflows[20:32] = False
  overflows[40:50] = True
  got = []
  with tf.Graph().as_default(), tf.Session() as session:
    tf.enable_resource_variables()
    scale = DynamicLossScale(config)
    overflow = tf.placeholder(tf.bool, [])
    update = scale.update_op(tf.logical_not(overflow), tf.constant(0.0))
    session.run(tf.global_variables_initializer())
    for value in overflows:
      session.run(update, {overflow: value})
      got.append(float(session.run(scale.value)))
  assert got == scale_reference(config, overflows)
  assert min(got) == 2.0 and max(got) > 16.0


def test_an_overflow_never_raises_the_loss_scale():
  """Nor does a floor that is new to the run, whose scale is below it."""
  with tf.Graph().as_default(), tf.Session() as session:
    made = mixed_precision.DynamicLossScale(LossScaleConfig())
    finite = tf.placeholder(tf.bool)
    update = made.update_op(finite, tf.constant(0.0))
    session.run(tf.global_variables_initializer())
    scale = tf.global_variables()[0]
    scale.load(0.25, session)  # the floor is 1
    session.run(update, {finite: False})
    assert session.run(made.value) == 0.25
  # A floor is of a dynamic scale.
  LossScaleConfig(loss_scale=2.0, initial_loss_scale=4.0, min_loss_scale=8.0)


def arithmetic(**given):
  return types.SimpleNamespace(
    precision="fp32", precision_policy=(), xla="off", seed=1,
    **{"tf32": True, "deterministic": False, **given},
  )  # fmt: skip


@pytest.mark.parametrize(
  "given, on_gpu, words",
  [
    ({}, False, None),
    ({}, True, "multiplied as TensorFloat-32 (--notf32: float32)"),
    ({"tf32": False}, True, "multiplied as float32"),
    ({"deterministic": True}, True, "float32); deterministic"),
  ],
)
def test_the_plan_says_how_a_gpu_computes(given, on_gpu, words):
  line = training_run.precision_line(arithmetic(**given), on_gpu)
  assert line.startswith("precision: fp32: ")
  assert (";" not in line) if words is None else (words in line)


@pytest.mark.parametrize("gpus", [[], ["GPU"]])
@pytest.mark.parametrize("on", [False, True])
def test_the_process_computes_as_asked(monkeypatch, on, gpus):
  """Determinism is asked of GPUs only: CPUs have it, and checks cost time."""
  asked = []
  config = tf.config.experimental
  monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: gpus)
  monkeypatch.setattr(config, "enable_tensor_float_32_execution", asked.append)
  monkeypatch.setattr(
    tf.compat.v2.config.experimental,
    "enable_op_determinism",
    lambda: asked.append("deterministic"),
  )
  with training_run.graph(arithmetic(tf32=on, deterministic=on)):
    pass
  assert asked == [on] + ["deterministic"] * (on and bool(gpus))


def test_auto_is_measured_once_and_kept_by_the_run(
  tiny_run, tmp_path, monkeypatch, capsys
):
  """All ranks take the root's answer; a resumed run takes its own."""
  comm = distributed.Comm()
  name, ratio = mixed_precision.faster_type(None)
  assert name == ("bf16" if ratio >= 1.2 else "fp32") and ratio > 0
  for best in ("bf16", "fp32"):
    monkeypatch.setattr(
      mixed_precision, "faster_type", lambda _, best=best: (best, 2.0)
    )
    config = runs.config(tiny_run, tmp_path / best, precision="auto")
    assert training_run.with_precision(config, comm).precision == best
    assert "multiplies 2.00 times" in capsys.readouterr().err
  run = tmp_path / "run"
  runs.pretrain(tiny_run, run, precision="bf16")
  config = runs.config(tiny_run, run, precision="auto")
  assert training_run.with_precision(config, comm).precision == "bf16"
  assert "as this run began" in capsys.readouterr().err
  for file in (run / "checkpoint", *run.glob("model.ckpt*")):
    file.unlink()
  # There is nothing left of the start in bf16.
  assert training_run.with_precision(config, comm).precision == "fp32"
