"""Each number of a report against one that was found in another way."""

import itertools
import math
import resource
import time
import types

import numpy as np
import pytest
import runs
import samples
from samples import TINY, fake_records, write_config, write_records

import input_pipeline
import mixed_precision
import modeling
import run_pretraining
from checkpoints import checkpointing, metrics
from common import json_files
from common.tensorflow_v1 import tf
from finetuning import classification, packed, squad
from gradients import distributed
from model import model_flops, sampled_softmax, tasks
from records import record_shape, tfrecord
from training import evaluation, reporting
from xla_patches import jit


def reports_of(folder):
  return metrics.read_jsonl(f"{folder}/metrics.jsonl")


def column(folder, key):
  return np.array(runs.metrics(folder, key))


@pytest.fixture(scope="module")
def lamb_run(tmp_path_factory):
  """An epoch's 5 updates and 5 more; (folder, result, MB before and after)."""
  folder = tmp_path_factory.mktemp("lamb")
  for i in range(2):
    write_records(folder / f"data-{i}.tfrecord", 60, seed=i)
  tiny = write_config(folder / "config.json"), str(folder / "data-*.tfrecord")
  rss = lambda: reporting.peak_memory()["peak_memory_mb"]
  before = rss()
  result = runs.pretrain(
    tiny, folder / "run", optimizer=dict(optimizer="lamb"), num_train_steps=10,
    peak_tflops=0.25,
  )  # fmt: skip
  return folder / "run", result, (before, rss())


def test_flops_and_mfu_are_of_the_examples_per_second(lamb_run):
  """6 x weights x tokens and 12 S^2 H a layer, for an example of 32 tokens.

  The last layer has keys and values of all, but the rest of 5 + 1 places, and
  only masked tokens have logits.
  """
  folder, _, _ = lamb_run
  h, layers = TINY["hidden_size"], TINY["num_hidden_layers"]
  dense = 4 * h * h + 2 * h * TINY["intermediate_size"]
  flops = 6 * 32 * (layers - 1) * dense + 12 * (layers - 1) * 32 * 32 * h
  flops += 6 * (32 * 2 * h * h + 6 * (dense - 2 * h * h)) + 12 * 6 * 32 * h
  flops += 6 * 5 * h * h + 6 * (h * h + 2 * h)
  tflops = column(folder, "model_tflops_per_second")
  of_example = 1e12 * tflops / column(folder, "examples_per_second")
  masked = 24 * (of_example - flops) / (6 * h * TINY["vocab_size"])
  np.testing.assert_allclose(masked, np.round(masked), rtol=1e-6)
  # Each of two epochs has all masked tokens.
  records = [record for part in range(2) for record in fake_records(60, part)]
  total = sum(record["masked_lm_weights"].sum() for record in records)
  assert masked.sum() == pytest.approx(2 * total)
  assert total < 5 * len(records)
  np.testing.assert_allclose(column(folder, "mfu"), tflops / 0.25, rtol=1e-9)


def test_padding_is_that_of_the_records(lamb_run):
  folder, result, _ = lamb_run
  masks = [r["input_mask"] for i in range(2) for r in fake_records(60, seed=i)]
  shares = column(folder, "padding")
  for counted in (shares[:5].mean(), result["training"]["padding"]):
    assert counted == pytest.approx(1.0 - np.mean(masks), rel=1e-6)
  np.testing.assert_allclose(
    column(folder, "tokens_per_second") / column(folder, "examples_per_second"),
    (1.0 - shares) * 32,
    rtol=1e-6,
  )


def test_memory_is_that_of_the_process(lamb_run):
  folder, _, (before, after) = lamb_run
  peaks = column(folder, "peak_memory_mb")
  # Linux counts pages of each core apart: within a MB.
  assert before - 1 <= peaks[0] and np.all(np.diff(peaks) > -1)
  assert peaks[-1] <= after + 1
  with open("/proc/self/statm") as f:
    now = int(f.read().split()[1]) * resource.getpagesize() / 2**20
  assert now - 1 <= reporting.peak_memory()["peak_memory_mb"] < now + 10_000


def test_trust_ratios_are_reported(lamb_run):
  """At first biases are 0, so their ratio is 1; the clamp is 0.01 to 0.3.

  The variable is that of the smallest of them.
  """
  folder, _, _ = lamb_run
  assert runs.metrics(folder, "trust_ratio_max")[0] == 1.0
  assert np.all(column(folder, "trust_ratio_min") >= np.float32(0.01))
  names = set(runs.metrics(folder, "trust_ratio_min_variable"))
  assert names <= runs.weights(folder).keys()
  named = types.SimpleNamespace
  task = pretraining_task()
  task.ops.variables = [named(op=named(name=name)) for name in "abc"]
  ratios = {
    "trust_ratio_min": 0.125, "trust_ratio_median": 0.25,
    "trust_ratio_max": 1.0, "trust_ratio_min_variable": "b",
  }  # fmt: skip
  for skipped, want in ((False, ratios), (True, {})):
    update = {**update_of(0.0), "skipped": skipped}
    update["trust_ratios"] = np.float32([0.25, 0.125, 1.0])
    reporter = reporter_of(task)
    reporter.count(update)
    report = reporter.report(1, update)
    assert {k: v for k, v in report.items() if "trust_ratio" in k} == want


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


@pytest.mark.slow
def test_shares_of_time_are_those_of_what_was_slow(
  tiny_run, tmp_path, monkeypatch
):
  """Reading, evaluating and saving are slowed down by known sleeps."""

  def slowed(owner, name, seconds, once_after=None):
    original, slept = getattr(owner, name), []

    def slow(*arguments, **more):
      if once_after is None or (
        not slept and len(runs.metrics(tmp_path)) >= once_after
      ):
        slept.append(name)
        time.sleep(seconds)
      return original(*arguments, **more)

    monkeypatch.setattr(owner, name, slow)

  # Each update's records are read apart from the others'.
  monkeypatch.setattr(input_pipeline, "_RECORDS_AT_ONCE", 24)
  slowed(tfrecord.RecordSet, "read_many", 3.0, once_after=1)
  slowed(evaluation.EvaluationBatches, "totals", 0.7)
  slowed(checkpointing.Checkpointer, "save", 0.4)
  result = runs.pretrain(
    tiny_run, tmp_path, num_train_steps=13, do_eval=True, eval_batch_size=60,
    eval_every_steps=12, save_checkpoints_steps=11,
  )  # fmt: skip
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


def test_batches_that_are_ready_are_not_waited_for(lamb_run):
  """All are read at once, before the first update."""
  folder, _, _ = lamb_run
  waited, computed = (column(folder, f"{n}_seconds") for n in ("input", "step"))
  assert np.median(waited) < 0.1 * np.median(computed)


def matmul_flops(graph, session=None):
  """FLOPs of the graph's own products, by their shapes: static, or in a run.

  Without sums (MatVec) and the two token types' one-hot lookup.
  """
  products = [
    op
    for op in graph.get_operations()
    if op.type in ("MatMul", "BatchMatMulV2")
    and not ("MatVec" in op.name or "embeddings" in op.name)
  ]
  factors = [(op.inputs[0], op.outputs[0]) for op in products]
  if session:
    shapes = session.run([(tf.shape(a), tf.shape(out)) for a, out in factors])
  else:
    shapes = [(a.shape.as_list(), out.shape.as_list()) for a, out in factors]
  total = 0
  for op, (a, out) in zip(products, shapes, strict=True):
    transposed = op.get_attr("transpose_a" if len(a) == 2 else "adj_x")
    total += 2 * a[-2 if transposed else -1] * math.prod(map(int, out))
  return total


# The gradient of a mean's mask: in the graph, but no run asks for it.
UNREAD = {"mean": 2 * 4 * 3 * TINY["hidden_size"] * 32}


def differentiated(columns, bert, sampling=None):
  """The sums of a batch, in a graph with their gradients."""
  batch = input_pipeline.fixed_micro_batch(columns, 1).batch
  sums = modeling.pretraining_model(
    batch, bert, is_training=False, sampling=sampling
  )
  loss = sums.masked_lm_loss + sums.next_sentence_loss
  tf.gradients(loss, tf.trainable_variables())
  return sums


LOCAL = dict(global_attn_every_n_layers=2, local_attention=4)


@pytest.mark.parametrize(
  "examples_per_record, sampled, pooling, more",
  [
    (1, 0, "pooler", {}),
    (3, 40, "pooler", {}),
    (3, 0, "cls", {}),
    (3, 0, "mean", {}),
    (1, 0, "pooler", LOCAL),
  ],
)
def test_model_flops_are_those_of_the_graph(
  examples_per_record, sampled, pooling, more
):
  keys = {"hidden_act": "relu", "classifier_pooling": pooling, **more}
  bert = modeling.BertConfig(**TINY, **keys)
  shape = record_shape.RecordShape(32, 5, 100, examples_per_record)
  fixed = jit.mode("off", fixed_shapes=True)
  with tf.Graph().as_default() as graph, fixed:
    sampling = sampled and sampled_softmax.sampling(sampled, 100, [1, 2])
    columns = input_pipeline.fake_batch(shape, 4)
    differentiated(columns, bert, sampling or None)
    found = matmul_flops(graph)
  want = model_flops.of_run(samples.fp32_run(bert, sampled), 4, shape)
  assert found == model_flops.total(want) + UNREAD.get(pooling, 0)


@pytest.mark.parametrize("mode", ["off", "step"])
def test_model_flops_count_the_logits_that_are_computed(tmp_path, mode):
  """16 records with room for 20 predictions, of which 3 are made.

  48 is a multiple of the step of rows, so no others are computed.
  """
  path = write_config(tmp_path / "config.json", hidden_act="relu")
  shape = record_shape.RecordShape(32, 20, 100)
  config = runs.config(
    (path, ""), tmp_path, do_train=False, dry_run=True, xla=mode
  )
  # A graph of the mode's shapes, without its programs.
  shapes = jit.mode("off", fixed_shapes=mode == "step")
  with tf.Graph().as_default() as graph, shapes:
    columns = input_pipeline.fake_batch(shape, 16)
    columns["masked_lm_weights"][:, 3:] = 0.0
    sums = differentiated(columns, config.bert)
    with tf.Session() as session:
      session.run(tf.global_variables_initializer())
      found = matmul_flops(graph, session)
      masked = session.run(sums.masked_lm_weight)
  assert masked == 48
  assert found == model_flops.total(
    model_flops.of_run(config, 16, shape, int(masked))
  )
  if mode == "off":
    assert found < model_flops.total(model_flops.of_run(config, 16, shape))


@pytest.mark.parametrize("pooling", ["pooler", "cls", "mean"])
@pytest.mark.parametrize("kind", ["classification", "squad"])
def test_model_flops_of_finetuning_are_those_of_the_graph(kind, pooling):
  """No vocabulary; rows with room for several examples."""
  keys = {"hidden_act": "relu", "classifier_pooling": pooling}
  bert = modeling.BertConfig(**TINY, **keys)
  config = types.SimpleNamespace(
    bert=bert, precision="fp32", precision_policy=(), recompute=()
  )
  source = types.SimpleNamespace(tokens=32, slots=3, reads_first_tokens=False)
  config.kind, head, outputs, targets = {
    "classification": (
      tasks.CLASSIFIER, classification.Classification.head, 3, 1,
    ),
    "squad": (tasks.SQUAD, squad.Squad.head, 2, 2),
  }[kind]  # fmt: skip
  task = types.SimpleNamespace(config=config, outputs=outputs, slices=None)
  task.losses_and_correct = types.MethodType(
    classification.Classification.losses_and_correct, task
  )
  with tf.Graph().as_default() as graph:
    integers = lambda *shape: tf.placeholder(tf.int32, [4, *shape])
    batch = packed.FinetuningBatch(
      *(integers(32) for _ in range(3)),
      integers(3, targets),
      tf.placeholder(tf.float32, [4, 3]),
    )
    losses = head(task, batch, is_training=False).losses
    tf.gradients(tf.reduce_sum(losses), tf.trainable_variables())
    found = matmul_flops(graph)
  want = model_flops.total(
    model_flops.finetuning(
      bert, mixed_precision.FP32, config.kind, outputs, 4, source
    )
  )
  is_pooled = kind == "classification"
  assert found == want + UNREAD.get(pooling, 0) * is_pooled


def update_of(dropped, **changes):
  """What was fetched of an update of 4 micro-batches, of which some dropped."""
  kept = 4.0 - dropped
  sums = dict.fromkeys(
    (
      "masked_lm_loss", "masked_lm_correct", "masked_lm_weight",
      "next_sentence_loss", "next_sentence_correct", "examples",
    ),
    6.0 * kept,
  )  # fmt: skip
  return {
    "sums": {**sums, "tokens": 120.0 * kept}, "learning_rate": 0.5,
    "grad_norm": 2.0 if kept else 0.0, "loss_scale": 8.0, "skipped": not kept,
    "skipped_updates": int(not kept), "dropped_micro_batches": dropped,
    "trust_ratios": np.zeros(0), "records": 10, "spike": np.zeros(2),
    "seconds": 2.0, "input_seconds": 0.0, "all_reduce_seconds": 0.0, **changes,
  }  # fmt: skip


def pretraining_task():
  """What a report asks of a task of 100,000 updates."""
  named = types.SimpleNamespace
  examples_before = lambda update: 24 * update
  return named(
    summarize=run_pretraining.losses,
    headline=lambda report: "5.0% right",
    ops=named(variables=[]),
    plan=named(ranks=1, updates=100_000, examples_before=examples_before),
    positions=64,
    flops={"records": 1e8},
    budget=None,
  )


def reporter_of(task):
  """On a rank that writes nothing."""
  named = types.SimpleNamespace
  comm, config = named(is_root=False), named(peak_tflops=None)
  return reporting.Reporter(named(task=task, comm=comm, config=config), 0)


def told_of(*updates):
  """The last one's report, and what is said of all at the end."""
  reporter = reporter_of(pretraining_task())
  for step, got in enumerate(updates, 1):
    reporter.count(got)
    found = reporter.report(step, got)
    reporter.next_report()
  return found, reporter.close()


def test_an_update_without_a_micro_batch_left_has_no_numbers():
  report, closing = told_of(update_of(0.0), update_of(4.0))
  assert report["skipped"] and report["dropped_micro_batches"] == 4
  for key in (
    "loss", "masked_lm_loss", "masked_lm_accuracy", "next_sentence_loss",
    "next_sentence_accuracy", "grad_norm", "padding", "examples_per_second",
    "tokens_per_second",
  ):  # fmt: skip
    assert report[key] is None, key
  assert report["examples"] == 48 and report["learning_rate"] == 0.5
  # What is said of the run is of the other update.
  assert closing["steady_examples_per_second"] == 12.0
  assert closing["padding"] == 0.25
  reporting.speed_lines({**closing, "seconds": 1.0})
  # A part that is dropped says nothing of padding.
  report, closing = told_of(update_of(1.0))
  assert report["padding"] is closing["padding"] is None
  assert (report["loss"], report["examples_per_second"]) == (2.0, 9.0)
  # Nor has a run without a report a steady speed.
  closing = told_of(update_of(4.0))[1]
  assert closing["steady_tokens_per_second"] is closing["padding"] is None
  lines = reporting.speed_lines(closing)
  assert ", - padding\n" in lines
  assert lines.endswith(" - examples/s, - tokens/s steady")


def test_a_wall_clock_that_is_set_changes_no_seconds(
  tiny_run, tmp_path, monkeypatch
):
  """It goes on by a day whenever it is asked: none is a wait for input."""
  days = itertools.count(step=86_400.0)
  monkeypatch.setattr(time, "time", lambda: next(days))
  runs.pretrain(tiny_run, tmp_path, num_train_steps=4, num_warmup_steps=1)
  assert max(runs.metrics(tmp_path, "input_seconds")) < runs.HANG_SECONDS
  with tf.Graph().as_default() as graph, tf.Session() as session:
    slow = tf.numpy_function(lambda: time.sleep(0.2) or 0.0, [], tf.float64)
    waited = distributed._HorovodComm.seconds_between(None, [], [slow])
    assert 0.2 <= session.run(waited) < runs.HANG_SECONDS
    # TensorFlow's own clock, which no test can set.
    assert "Timestamp" not in {op.type for op in graph.get_operations()}


def test_no_number_is_null_in_every_file(tmp_path, capsys):
  """And TensorBoard has the others; such a log is resumed."""
  report, _ = told_of(update_of(4.0))
  report["masked_lm_loss"] = np.nan
  report["norms"] = [np.inf, 1.0]
  for resume_step in (0, 1):
    log = metrics.MetricsLog(tmp_path, "m.jsonl", resume_step, "train")
    log.write({**report, "global_step": resume_step + 1})
    log.close()
  lines = (tmp_path / "m.jsonl").read_text().splitlines()
  first, second = [json_files.parse(line) for line in lines]
  assert first == {**second, "global_step": 1}
  assert first["loss"] is first["masked_lm_loss"] is None
  assert first["norms"] == [None, 1.0] and first["learning_rate"] == 0.5
  json_files.write(str(tmp_path / "a.json"), {"a": -np.inf, "b": (1, np.nan)})
  found = json_files.parse((tmp_path / "a.json").read_bytes())
  assert found == {"a": None, "b": [1, None]}


class Progress(list):
  """Notes what a Reporter shows."""

  def __init__(self, *_, **__):
    pass

  def at(self, done, *fields, **more):
    self.append((done, fields, more))


def test_progress_has_a_smoothed_loss_and_short_words(tmp_path, monkeypatch):
  """In a log's 80 columns, and without what is no update's time."""
  monkeypatch.setattr(reporting, "Progress", Progress)
  monkeypatch.setattr(reporting, "tell_trouble", lambda *_: None)
  config = types.SimpleNamespace(
    output_dir=str(tmp_path), peak_tflops=None, log_every_steps=10
  )
  comm = types.SimpleNamespace(is_root=True)
  run = types.SimpleNamespace(task=pretraining_task(), config=config, comm=comm)
  shown = reporting.Reporter(run, 99_997)
  sums = update_of(0.0)["sums"]
  low = {**sums, "masked_lm_loss": 0.0, "next_sentence_loss": 24.0}
  shown.after_update(99_998, update_of(0.0))
  shown.after_update(99_999, update_of(0.0, sums={**low, "tokens": 480.0}))
  shown.after_update(100_000, update_of(4.0))
  (_, first, how), (_, second, later), (_, lost, _) = shown._progress
  assert first == (
    "99,998/100,000", "smoothed loss 2.000", "12 ex/s", "5.0% right"
  )  # fmt: skip
  assert second[1] == "smoothed loss 1.500"
  assert lost == (
    "100,000/100,000", "smoothed loss 1.500", "8 ex/s", "5.0% right",
  )  # fmt: skip
  assert how == {"now": True, "seconds": 0.0}  # it compiled
  assert later == {"now": False, "seconds": 2.0}
  assert len("  ".join(["23:59:59", *first, "10:00 left"])) <= 80


def test_an_evaluation_without_a_loss_is_never_the_best(tmp_path):
  log = metrics.MetricsLog(tmp_path, "eval_metrics.jsonl", 0, "eval")
  for step, loss in ((1, 3.0), (2, None), (3, 2.0), (4, np.nan)):
    log.write({"global_step": step, "loss": loss})
  log.close()
  by = metrics.BestBy(("loss",), higher=False)
  assert metrics.best_evaluation(str(tmp_path), 4, by) == 3
