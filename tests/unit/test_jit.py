"""XLA on = off: the same training in every mode and precision."""

import gc
import types
import weakref

import numpy as np
import pytest
import runs
from tiny_models import tiny_config

import modeling
import run_pretraining
from common.tensorflow_v1 import tf
from config import execution
from gradients import distributed
from gradients.distributed import Comm
from model import encoder
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
    # tests/ranks/lockstep has fp32 with "step".
    ("fp32", ["layers"]),
    pytest.param("fp32", ["auto", "step"], marks=pytest.mark.slow),
    pytest.param("bf16", ["auto", *execution.UPDATE], marks=pytest.mark.slow),
    pytest.param("fp16", ["auto", *execution.UPDATE], marks=pytest.mark.slow),
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
      config = types.SimpleNamespace(xla=mode)
      config = training_run.session_config(config, Comm())
      options = tf.RunOptions(output_partition_graphs=True)
      ran = tf.RunMetadata()
      with tf.Session(config=config) as session:
        session.run(y, {x: np.ones([64, 64])}, options, ran)
    ops = {node.op for graph in ran.partition_graphs for node in graph.node}
    assert any("Xla" in op for op in ops) == (mode == "auto"), (mode, ops)


@pytest.mark.parametrize("mode", ["layers", "step"])
@pytest.mark.slow
def test_lamb_is_compiled_too(tiny_run, tmp_path, mode):
  given = dict(SETTINGS, learning_rate=1e-2)
  given["optimizer"] = dict(optimizer="lamb", bias_correction=True)
  for name in ("off", mode):
    runs.pretrain(tiny_run, tmp_path / name, xla=name, **given)
  want = runs.weights(tmp_path / "off")
  for name, value in runs.weights(tmp_path / mode).items():
    np.testing.assert_allclose(value, want[name], 1e-3, 1e-5, err_msg=name)


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


def test_layers_share_their_programs():
  """So that a deep model compiles no longer than a shallow one."""
  config = tiny_config(0.1, num_hidden_layers=3)
  with tf.Graph().as_default() as graph, jit.mode("layers"):
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
  assert len(programs) == 2 * 7 * config.num_hidden_layers
  assert len(set(programs)) == 4 + 5


def graphs():
  """Those that are used, functions' too."""
  gc.collect()
  return weakref.WeakSet(
    o for o in gc.get_objects() if issubclass(type(o), tf.Graph)
  )


@pytest.mark.parametrize(
  "mode", [pytest.param("off", marks=pytest.mark.slow), "layers", "step"]
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
  done = runs.launch(["-c", ONE_THREAD])
  assert done.returncode == 0, done.stderr
  assert float(done.stdout.split("largest share:")[1]) > 0.85
