"""XLA on = off: the same training in every mode and precision."""

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import runs
from tiny_models import tiny_config

import modeling
import run_pretraining
from common.tensorflow_v1 import tf
from gradients import distributed
from gradients.distributed import Comm
from model import encoder, layer_programs
from training import elastic, training_run
from xla_patches import jit

SETTINGS = dict(
  dropout=0.1, train_batch_size=12, num_train_steps=8, do_eval=True
)
# Programs sum in another order. In 16 bits a value may be rounded the other
# way, which training then carries on.
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-3, "fp16": 1e-3}


@pytest.mark.parametrize(
  "precision, modes",
  [
    # tests/ranks/lockstep has fp32 with "step", test_encoders.py the gradients
    # of "whole_layers".
    ("fp32", ["layers"]),
    pytest.param(
      "fp32", ["whole_layers", "auto", "step"], marks=pytest.mark.slow
    ),
    pytest.param("bf16", ["auto", *jit.UPDATE], marks=pytest.mark.slow),
    pytest.param("fp16", ["auto", *jit.UPDATE], marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_every_mode_trains_as_none(
  packed_run, tmp_path, precision, modes, capsys
):
  """On packed records; unpacked ones are the simple case."""
  tiny_run, global_batch = packed_run
  settings = dict(SETTINGS, global_batch_size=global_batch)
  for mode in ("off", *modes):
    runs.pretrain(
      tiny_run, tmp_path / mode, precision=precision, xla=mode, **settings
    )
    told = capsys.readouterr().err
    for what in ("training step", "evaluation"):
      assert told.count(f"compiling the {what} ...\n") == (mode != "off")
  rtol = TOLERANCE[precision]
  for mode in modes:
    folders = tmp_path / mode, tmp_path / "off"
    for key in ("masked_lm_loss", "next_sentence_loss", "grad_norm"):
      got, want = (runs.metrics(folder, key) for folder in folders)
      bound = rtol * (10 if key == "grad_norm" else 1)
      np.testing.assert_allclose(got, want, bound, err_msg=f"{key}, {mode}")
    compiled, alone = (
      runs.read_json(folder, "eval_results.json")["masked_lm_loss"]
      for folder in folders
    )
    assert compiled == pytest.approx(alone, rel=rtol)


def test_auto_compiles_on_cpus_too():
  """TensorFlow makes clusters of a graph only if it is told to in time."""
  for mode in ("off", "auto"):
    with tf.Graph().as_default():
      x = tf.placeholder(tf.float32, [64, 64])
      y = x
      for _ in range(8):
        y = tf.tanh(y * 2.0 + x)
      config = jit.session_config(tf.ConfigProto(), mode)
      options = tf.RunOptions(output_partition_graphs=True)
      ran = tf.RunMetadata()
      with tf.Session(config=config) as session:
        session.run(y, {x: np.ones([64, 64])}, options, ran)
    ops = {node.op for graph in ran.partition_graphs for node in graph.node}
    assert any("Xla" in op for op in ops) == (mode == "auto"), (mode, ops)


@pytest.mark.parametrize("mode", ["layers", "step"])
@pytest.mark.slow
def test_lamb_is_compiled_too(tiny_run, tmp_path, mode):
  settings = dict(SETTINGS, learning_rate=1e-2)
  for name in ("off", mode):
    optimizer = dict(optimizer="lamb", bias_correction=True)
    runs.pretrain(
      tiny_run, tmp_path / name, optimizer=optimizer, xla=name, **settings
    )
  want = runs.weights(tmp_path / "off")
  for name, value in runs.weights(tmp_path / mode).items():
    np.testing.assert_allclose(
      value, want[name], rtol=1e-3, atol=1e-5, err_msg=name
    )


def test_a_skipped_update_changes_nothing(tiny_run, tmp_path):
  """A compiled update must not run because its arguments are there."""
  runs.pretrain(
    tiny_run, tmp_path, precision="fp16", xla="layers", num_train_steps=3,
    num_warmup_steps=1, loss_scale=dict(initial_loss_scale=2.0**100),
  )  # fmt: skip
  assert runs.metrics(tmp_path, "skipped") == [True] * 3
  for name, value in runs.weights(tmp_path).items():
    assert np.isfinite(value).all(), name
    if "adam_m" in name:
      assert not value.any(), name


def programs_of(graph):
  """The calls of what XLA compiles."""
  calls = graph.get_operations()
  return [op for op in calls if op.type.endswith("PartitionedCall")]


@pytest.mark.parametrize("mode", jit.LAYERS)
def test_layers_share_their_programs(mode):
  """So that a deep model compiles no longer than a shallow one."""
  config = tiny_config(0.1, num_hidden_layers=3)
  with tf.Graph().as_default() as graph, jit.mode(mode):
    tf.enable_resource_variables()
    ids = tf.placeholder(tf.int32, [2, 5])
    model = modeling.BertModel(
      config, True, ids, dropout_seed=tf.constant([1, 2])
    )
    tf.gradients(model.get_sequence_output(), tf.trainable_variables())
  # Of each layer: heads of queries, keys and values, attention probabilities,
  # GELU, two ends of a sub-layer, of which the first alone has two readers.
  programs = [
    op.get_attr("f").name
    for op in programs_of(graph)
    if "encoder/layer_" in op.name
  ]
  of_a_layer, kinds = (1, 2) if mode == "whole_layers" else (7, 4 + 5)
  assert len(programs) == 2 * of_a_layer * config.num_hidden_layers
  assert len(set(programs)) == kinds


def test_between_a_layers_programs_each_tensor_is_once():
  """The forward program returns results and what the gradient reads of it.

  That is no argument and no constant. All values are those of the mode off.
  """

  def layer(x, weights, count):
    heads = tf.transpose(tf.matmul(x, weights), [1, 0])  # of a constant
    product, aside = tf.identity_n([heads, x])
    result = tf.identity(product) * tf.exp(product)
    return result, result, tf.stop_gradient(aside), count + 1

  values = np.arange(6.0, dtype=np.float32).reshape(2, 3) / 6, np.eye(3)
  found = {}
  for mode in ("off", "whole_layers"):
    with tf.Graph().as_default() as graph, jit.mode(mode):
      x, weights = (tf.constant(value, tf.float32) for value in values)
      first, again, aside, count = layer_programs.whole_layer(
        layer, x, weights, tf.constant(3), trains=True
      )
      loss = tf.reduce_sum(first + 2.0 * again) + tf.reduce_sum(aside)
      d_x, d_weights = tf.gradients(loss, [x, weights])
      with tf.Session() as session:
        fetches = first, aside, count, d_x, d_weights
        found[mode] = session.run(fetches)
  for got, want in zip(found["whole_layers"], found["off"], strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-6)
  forward, backward = programs_of(graph)
  # The result, what is aside, the count, the product and its exponential.
  assert [t.shape.as_list() for t in forward.outputs] == [
    [3, 2], [2, 3], [], [3, 2], [3, 2]
  ]  # fmt: skip
  read = {t.ref() for t in backward.inputs}
  assert {x.ref(), weights.ref()} < read and len(read) == len(backward.inputs)


def test_an_evaluation_keeps_nothing():
  with tf.Graph().as_default() as graph, jit.mode("whole_layers"):
    modeling.BertModel(tiny_config(), False, tf.ones([2, 5], tf.int32))
  layers = [op for op in programs_of(graph) if "encoder/layer_" in op.name]
  # What the next layer reads, and as it is its residual.
  assert layers and {len(layer.outputs) for layer in layers} == {1}


def test_layers_of_other_types_and_shapes_have_programs_of_their_own():
  found = []
  with tf.Graph().as_default(), jit.mode("whole_layers"):
    for shape, dtype in (([2], "float32"), ([2], "float16"), ([], "float32")):
      x = tf.ones(shape, dtype)
      found.append(layer_programs.whole_layer(tf.exp, x, trains=True))
    with tf.Session() as session:
      values = session.run(found)
  for value, tensor in zip(values, found, strict=True):
    assert value.dtype == tensor.dtype.as_numpy_dtype
    np.testing.assert_allclose(value, np.full(value.shape, np.e), rtol=1e-3)


def graphs():
  """Those that are used, functions' too."""
  gc.collect()
  return weakref.WeakSet(
    o for o in gc.get_objects() if issubclass(type(o), tf.Graph)
  )


@pytest.mark.parametrize(
  "mode",
  [pytest.param("off", marks=pytest.mark.slow), *jit.LAYERS, "step"],
)
def test_a_graph_that_is_not_used_any_more_is_gone(tiny_run, tmp_path, mode):
  """With all that is in it: an elastic run makes one after another."""
  recompute = () if mode == "step" else ("layer",)
  config = runs.config(
    tiny_run, tmp_path, dropout=0.1, xla=mode, recompute=recompute
  )
  before = graphs()
  with training_run.graph(config):
    run_pretraining.training_task(config, Comm())
    made = len(graphs() - before)
  assert made and not graphs() - before


def test_the_next_world_begins_when_the_last_ones_graph_is_gone(monkeypatch):
  """Though that ended by an error, whose traceback has it."""
  worlds, before = [], graphs()

  def job(comm, commit, signals):
    worlds.append(weakref.WeakSet())
    if len(worlds) == 3:
      return "done"
    with tf.Graph().as_default() as graph, jit.mode("layers"):
      worlds[-1].add(graph)
      x = tf.get_variable("x", [3])
      gradient = tf.gradients(encoder.kernels.gelu(x, dtype=tf.float32), x)
      with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(gradient)
        lost = distributed.RankLost("lost")
        raise lost if len(worlds) == 1 else distributed.WorldChange("hosts")

  def rejoin(comm):
    assert worlds and not any(worlds)
    return comm

  monkeypatch.setattr(distributed, "rejoin", rejoin)
  assert elastic.run(job, Comm()) == "done"
  assert not graphs() - before


ONE_THREAD = """
import os
from xla_patches import jit
from common.tensorflow_v1 import tf
from gradients import distributed

def ticks():
  found = {}
  for thread in os.listdir("/proc/self/task"):
    with open(f"/proc/self/task/{thread}/stat") as f:
      found[thread] = int(f.read().rsplit(")", 1)[1].split()[11])
  return found

comm = distributed.init(num_threads=1)
with jit.mode("layers"):
  x = tf.random.normal([1500, 1500], seed=1)
  for _ in range(20):
    x = jit.compiled(tf.sigmoid)(tf.matmul(x, x))
  with tf.Session(config=distributed.session_config(comm)) as session:
    session.run(x.op)
    before = ticks()
    for _ in range(5):
      session.run(x.op)
    spent = [n - before.get(thread, 0) for thread, n in ticks().items()]
print("largest share:", max(spent) / sum(spent))
"""


@pytest.mark.slow
def test_compiling_does_not_take_the_other_ranks_cores():
  """Tracing makes TensorFlow's threads, before a session asks for fewer."""
  done = subprocess.run(
    [sys.executable, "-c", ONE_THREAD],
    capture_output=True,
    text=True,
    timeout=runs.HANG_SECONDS,
  )
  assert done.returncode == 0, done.stderr
  assert float(done.stdout.split("largest share:")[1]) > 0.85
