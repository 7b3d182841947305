"""Each number of a report against one that was found in another way."""

import resource
import time
import types

import numpy as np
import pytest
import runs
from conftest import TINY, fake_records, write_config, write_records

import modeling
from errors import UserError
from finetuning import classification, heads, packed, squad
from model import mixed_precision, model_flops
from pretraining_data import tfrecord
from tensorflow_v1 import tf
from training import (
  checkpointing,
  input_pipeline,
  reporting,
  train_loop,
  training_hooks,
)


def reports_of(folder):
  return training_hooks.read_jsonl(f"{folder}/metrics.jsonl")


def column(folder, key):
  return np.array(runs.metrics(folder, key))


@pytest.fixture(scope="module")
def lamb_run(tmp_path_factory):
  """An epoch's 5 updates and 5 more; (folder, result, MB before and after)."""
  folder = tmp_path_factory.mktemp("lamb")
  for i in range(2):
    write_records(folder / f"data-{i}.tfrecord", 60, seed=i)
  tiny = write_config(folder / "config.json"), str(folder / "data-*.tfrecord")
  rss = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  before = rss()
  result = runs.pretrain(
    tiny,
    folder / "run",
    optimizer=dict(optimizer="lamb"),
    num_train_steps=10,
    peak_tflops=0.25,
  )
  return folder / "run", result, (before, rss())


def test_flops_and_mfu_are_of_the_examples_per_second(lamb_run):
  """6 x weights x tokens and 12 S^2 H a layer, for an example of 32 tokens."""
  folder, _, _ = lamb_run
  h, layers = TINY["hidden_size"], TINY["num_hidden_layers"]
  flops = 6 * 32 * layers * (4 * h * h + 2 * h * TINY["intermediate_size"])
  flops += 12 * layers * 32 * 32 * h
  flops += 6 * 5 * (h * h + h * TINY["vocab_size"])
  flops += 6 * (h * h + 2 * h)
  tflops = column(folder, "model_tflops_per_second")
  np.testing.assert_allclose(
    tflops, flops * column(folder, "examples_per_second") / 1e12, rtol=1e-9
  )
  np.testing.assert_allclose(column(folder, "mfu"), tflops / 0.25, rtol=1e-9)


def test_padding_is_that_of_the_records(lamb_run):
  folder, _, _ = lamb_run
  masks = [r["input_mask"] for i in range(2) for r in fake_records(60, seed=i)]
  epoch = column(folder, "padding")[:5]
  np.testing.assert_allclose(epoch.mean(), 1.0 - np.mean(masks), rtol=1e-9)
  tokens = (1.0 - column(folder, "padding")) * 24 * 32
  np.testing.assert_allclose(
    column(folder, "tokens_per_second") / column(folder, "examples_per_second"),
    tokens / 24,
    rtol=1e-6,
  )


def test_memory_is_that_of_the_process(lamb_run):
  folder, _, (before, after) = lamb_run
  peaks = column(folder, "peak_memory_mb")
  assert before <= peaks[0] and np.all(np.diff(peaks) >= 0)
  assert peaks[-1] <= after


def test_trust_ratios_name_the_variable_of_the_smallest():
  """Of three ratios by hand."""
  with tf.Graph().as_default():
    variables = [tf.get_variable(name, [1]) for name in "abc"]
  got = {"skipped": False, "trust_ratios": np.float32([0.25, 0.125, 1.0])}
  assert reporting._trust_ratios(got, variables) == {
    "trust_ratio_min": 0.125,
    "trust_ratio_median": 0.25,
    "trust_ratio_max": 1.0,
    "trust_ratio_min_variable": "b",
  }
  assert reporting._trust_ratios({**got, "skipped": True}, variables) == {}


def test_trust_ratios_are_reported(lamb_run):
  """At first biases are 0, so their ratio is 1; the clamp is 0.01 to 0.3."""
  folder, _, _ = lamb_run
  assert runs.metrics(folder, "trust_ratio_max")[0] == 1.0
  assert np.all(column(folder, "trust_ratio_min") >= np.float32(0.01))
  names = set(runs.metrics(folder, "trust_ratio_min_variable"))
  assert names <= runs.weights(folder).keys()


def test_tensorboard_has_every_number(lamb_run):
  folder, _, _ = lamb_run
  (events,) = (folder / "train").glob("events*")
  found = {}
  for event in tf.train.summary_iterator(str(events)):
    for value in event.summary.value:
      found[value.tag, event.step] = value.simple_value
  want = {
    (f"train/{key}", report["global_step"]): value
    for report in reports_of(folder)
    for key, value in report.items()
    if key not in ("global_step", "trust_ratio_min_variable")
  }
  assert found.keys() == want.keys() and len(want) > 200
  for key, value in want.items():
    assert found[key] == pytest.approx(float(value), rel=1e-5), key


def test_shares_of_time_are_those_of_what_was_slow(
  tiny_run, tmp_path, monkeypatch
):
  """Reading, evaluating and saving are slowed down by known sleeps."""

  def slowed(owner, name, seconds, call=None):
    original, calls = getattr(owner, name), []

    def slow(*arguments, **more):
      calls.append(name)
      if call in (None, len(calls)):
        time.sleep(seconds)
      return original(*arguments, **more)

    monkeypatch.setattr(owner, name, slow)

  # Each update's records are read apart from the others'.
  monkeypatch.setattr(input_pipeline, "_RECORDS_AT_ONCE", 24)
  slowed(tfrecord.RecordSet, "read_many", 3.0, call=10)
  slowed(train_loop, "add_up", 0.7)
  slowed(checkpointing.Checkpointer, "save", 0.4)
  result = runs.pretrain(
    tiny_run,
    tmp_path,
    num_train_steps=13,
    do_eval=True,
    eval_batch_size=60,
    eval_every_steps=12,
    save_checkpoints_steps=11,
  )
  parts = {
    name: column(tmp_path, f"{name}_seconds")
    for name in ("input", "step", "all_reduce", "save", "evaluation")
  }
  # Of the slow reading a few updates' time was ahead.
  assert parts["input"].max() > max(1.0, parts["step"][1:].max())
  # What is before an update is in its report: evaluations before 1 and 13.
  assert np.all(parts["evaluation"][[0, 12]] > 0.7)
  assert set(parts["evaluation"][1:12]) == {0.0}
  # After update 11, and of the best after the evaluation.
  assert np.all(parts["save"][11:] > 0.4) and max(parts["save"][:11]) < 0.4
  assert set(parts["all_reduce"]) == {0.0}
  total = sum(seconds.sum() for seconds in parts.values())
  assert 1.0 + 1.4 + 0.8 < total < result["training"]["seconds"]


def test_batches_that_are_ready_are_not_waited_for(tiny_run, tmp_path):
  """All are read at once, before the first update."""
  runs.pretrain(tiny_run, tmp_path, num_train_steps=12, train_batch_size=8)
  waited, computed = (
    column(tmp_path, f"{name}_seconds") for name in ("input", "step")
  )
  assert np.median(waited) < 0.1 * np.median(computed)


def matmul_flops(graph):
  """FLOPs of the graph's own products, by their static shapes.

  Without sums (MatVec) and the two token types' one-hot lookup.
  """
  total = 0
  for op in graph.get_operations():
    if "MatVec" in op.name or "embeddings" in op.name:
      continue
    if op.type in ("MatMul", "BatchMatMulV2"):
      a = op.inputs[0].shape.as_list()
      transposed = op.get_attr("transpose_a" if len(a) == 2 else "adj_x")
      inner = a[-2] if transposed else a[-1]
      total += 2 * inner * op.outputs[0].shape.num_elements()
  return total


@pytest.mark.parametrize("examples_per_record", [1, 3])
def test_model_flops_are_those_of_the_graph(examples_per_record):
  bert = modeling.BertConfig(**TINY, hidden_act="relu")
  shape = input_pipeline.RecordShape(32, 5, 100, examples_per_record)
  with tf.Graph().as_default() as graph:
    batch = input_pipeline.fixed_micro_batch(
      input_pipeline.fake_batch(shape, 4), 1
    ).batch
    sums = modeling.pretraining_model(batch, bert, is_training=False)
    loss = sums.masked_lm_loss + sums.next_sentence_loss
    tf.gradients(loss, tf.trainable_variables())
    found = matmul_flops(graph)
  want = model_flops.pretraining(bert, mixed_precision.FP32, 4, shape)
  assert found == model_flops.total(want)


@pytest.mark.parametrize("kind", ["classification", "squad"])
def test_model_flops_of_finetuning_are_those_of_the_graph(kind):
  """No vocabulary; rows with room for several examples."""
  bert = modeling.BertConfig(**TINY, hidden_act="relu")
  config = types.SimpleNamespace(
    bert=bert, policy=mixed_precision.FP32, recompute=()
  )
  task = types.SimpleNamespace(config=config, labels=["a", "b", "c"])
  source = types.SimpleNamespace(tokens=32, slots=3)
  made, head, targets = {
    "classification": (classification.Classification, heads.classification, 1),
    "squad": (squad.Squad, heads.span, 2),
  }[kind]
  with tf.Graph().as_default() as graph:
    integers = lambda *shape: tf.placeholder(tf.int32, [4, *shape])
    batch = packed.FinetuningBatch(
      *(integers(32) for _ in range(3)),
      integers(3),
      integers(3, targets),
      tf.placeholder(tf.float32, [4, 3]),
    )
    labels = [len(task.labels)] if kind == "classification" else []
    losses = head(batch, *labels, config, is_training=False).losses
    tf.gradients(tf.reduce_sum(losses), tf.trainable_variables())
    found = matmul_flops(graph)
  want = model_flops.encoder(bert, config.policy, 4, source.tokens)
  want += made.head_matmuls(task, 4, source)
  assert found == model_flops.total(want)


def test_a_peak_that_is_none_is_refused(tiny_run, tmp_path):
  with pytest.raises(UserError, match=r"--peak_tflops=0.0: must be positive"):
    runs.config(tiny_run, tmp_path, peak_tflops=0.0)
