"""The model of an update's time: hand-worked cases, fits, recorded results."""

import dataclasses
import json
import math
import os

import numpy as np
import pytest
import runs
import samples

import modeling
from benchmarks.network import slow_network
from common.tensorflow_v1 import tf
from config.bert_config import BertConfig
from research import published_scaling, scaling_model

RESULTS = os.path.join(runs.ROOT, "research", "results")
TINY = BertConfig.from_dict(samples.TINY)
MINI = scaling_model.read_config("bert_mini.json")
FREE = scaling_model.Machine(flops=1e12)


def mini(**changes):
  return scaling_model.Setting(MINI, 128, 4, **changes)


def trained_variables():
  """(name, shape) of the graph's trainable variables."""
  with tf.Graph().as_default():
    ints = tf.zeros([2, 8], tf.int32)
    places = tf.zeros([2, 3], tf.int32)
    model = modeling.BertModel(TINY, True, ints, ints, ints)
    modeling.get_masked_lm_output(
      TINY, model.get_sequence_output(), model.get_embedding_table(),
      places, places, tf.ones([2, 3]),
    )  # fmt: skip
    modeling.get_next_sentence_output(
      TINY, model.get_pooled_output(), tf.zeros([2], tf.int32)
    )
    return [
      (v.op.name, tuple(v.shape.as_list())) for v in tf.trainable_variables()
    ]


def test_shapes_are_those_of_the_graph():
  ours, graph = scaling_model.shapes(TINY), trained_variables()
  assert dict(ours) == dict(graph) and len(ours) == len(graph)
  # In its order, but for the embeddings, which come together.
  assert [s for _, s in ours[5:]] == [s for _, s in graph[5:]]
  heads = 768 * 768 + 3 * 768 + 30522 + 2 * 768 + 2
  base = scaling_model.read_config("bert_base.json")
  # google/bert's 109.5M and these.
  assert scaling_model.numbers(base) == 109482240 + heads


def test_embeddings_come_last_and_the_head_first():
  shapes, there = scaling_model.gradients(mini())
  assert shapes[-1] == (30522, 256) and there[-1] == pytest.approx(1.0)
  assert shapes[:2] == [(2,), (2, 256)] and there[0] == 0.0
  assert (np.diff(there) >= 0).all()
  # Layers have the same part of the pass each.
  inner = [n for n, s in enumerate(shapes) if s == (256, 1024)]
  steps = np.diff(there[inner])
  assert len(inner) == 4 and steps == pytest.approx(steps[0])


@pytest.mark.parametrize(
  ("core", "fuse", "seconds"),
  [
    (0.0, None, 7.0),  # 1 to 3, 3 to 5, 5 to 7
    (2.0, None, 9.0),  # all of the core: nothing is gained by overlap
    (1.0, None, 7.0),  # the pass at half its speed is still there in time
    (0.0, lambda first, last: True, 5.0),  # 1 to 3, then the two others at once
    (0.0, lambda first, last: False, 7.0),
  ],
)
def test_one_channel_sends_while_the_backward_pass_goes_on(core, fuse, seconds):
  costs = lambda first, last: (2.0, core)
  found = scaling_model.exchange([1.0, 2.0, 3.0], costs, fuse)
  assert found == pytest.approx(seconds)
  # A slow backward pass is waited for.
  late = scaling_model.exchange([1.0, 10.0], lambda first, last: (2.0, 0.0))
  assert late == pytest.approx(12.0)


def test_a_ring_moves_what_it_must_over_the_slower_wire():
  def seconds(machine, bytes=1e9, **where):
    return scaling_model.reduce_scatter_seconds(machine, mini(**where), bytes)

  machine = dataclasses.replace(FREE, network=1e9, latency=1e-3)
  wanted = 3 * 1e-3 + 8.0 * 3 / 4
  assert seconds(machine, 8e9, hosts=4) == pytest.approx(wanted)
  tree = dataclasses.replace(machine, trees=True)
  assert seconds(tree, 0.0, hosts=64) == pytest.approx(6e-3)
  machine = dataclasses.replace(FREE, network=1e9, inside=1e8)
  assert seconds(machine, hosts=4) == pytest.approx(0.75)
  assert seconds(machine) == 0.0
  both = dict(hosts=2, ranks_per_host=2)
  assert seconds(machine, **both) == pytest.approx(7.5)
  # Halves inside, then each host's two halves on its one wire.
  apart = seconds(machine, **both, hierarchical=True)
  assert apart == pytest.approx(5.0 + 0.5)


def test_one_rank_computes_and_updates():
  machine = dataclasses.replace(FREE, update=1e-9, network=1.0)
  wanted = mini().flops / 1e12 + 1e-9 * scaling_model.numbers(MINI)
  assert scaling_model.step_seconds(machine, mini()) == pytest.approx(wanted)
  assert scaling_model.step_seconds(FREE, mini(hosts=8)) == pytest.approx(
    mini().flops / 1e12
  )


def test_what_each_choice_sends_without_overlap():
  """On a slow network seconds are bytes."""
  machine = dataclasses.replace(FREE, flops=1e30, network=1.0)
  weights = scaling_model.numbers(MINI)

  def sent(**changes):
    return scaling_model.step_seconds(machine, mini(hosts=2, **changes))

  assert sent() == pytest.approx(4 * weights)
  assert sent(groups=0) == pytest.approx(4 * weights)
  assert sent(wire_bytes=2) == pytest.approx(2 * weights)
  assert sent(zero=True) == pytest.approx(4 * weights)
  assert sent(zero=True, wire_bytes=2) == pytest.approx(3 * weights)
  assert sent(accumulation=8) == pytest.approx(4 * weights)
  matrices = {(30522, 256): 1, (512, 256): 1, (256, 256): 18,
      (256, 1024): 4, (1024, 256): 4,}  # fmt: skip
  whole = sum(count * math.prod(shape) for shape, count in matrices.items())
  thin = sum(16 * sum(shape) * count for shape, count in matrices.items())
  assert sent(powersgd_rank=16) == pytest.approx(4 * (weights - whole + thin))


def test_overlap_hides_all_but_the_last_group():
  setting = mini(hosts=2)
  backward = setting.flops / 1e12 * 2 / 3
  fast = dataclasses.replace(FREE, network=1e15)
  hidden = scaling_model.backward_seconds(fast, setting, backward)
  assert hidden == pytest.approx(backward, rel=1e-3)
  slow = dataclasses.replace(FREE, network=1e9)
  seconds = {
    name: scaling_model.backward_seconds(slow, changed, backward)
    for name, changed in (
      ("groups", setting),
      ("late", dataclasses.replace(setting, overlaps=False)),
      ("several", dataclasses.replace(setting, accumulation=2)),
    )
  }
  whole = 4 * scaling_model.numbers(MINI) / 1e9
  assert seconds["late"] == pytest.approx(backward + whole)
  assert seconds["several"] == seconds["late"]
  assert whole < seconds["groups"] < seconds["late"]


def test_ranks_that_share_cores_wait_for_each_other():
  machine = dataclasses.replace(FREE, shared_cores=2)
  seconds = [
    scaling_model.step_seconds(machine, mini(hosts=hosts))
    for hosts in (1, 2, 4)
  ]
  assert seconds[1] == pytest.approx(seconds[0])
  assert seconds[2] == pytest.approx(2 * seconds[0])
  machine = dataclasses.replace(machine, network=1e9, byte=3e-10)
  sent = {2: 4e6, 4: 6e6}  # of a million numbers
  found = {n: scaling_model.transfer(machine, mini(hosts=n), 1e6) for n in sent}
  assert found[2] == pytest.approx((4e-3, 1.2e-3))
  assert found[4] == pytest.approx((6e-3 + 3.6e-3, 3.6e-3))


def test_waiting_to_leave_overlaps_too():
  machine = dataclasses.replace(FREE, start=0.1)
  setting = mini(hosts=2)
  assert scaling_model.backward_seconds(machine, setting, 1.0) == (
    pytest.approx(1.1)
  )
  twice = dataclasses.replace(setting, powersgd_rank=16, groups=1)
  assert scaling_model.backward_seconds(machine, twice, 1.0) == (
    pytest.approx(1.2)
  )


# -----------------------------------------------------------------------------
# Fits
# -----------------------------------------------------------------------------

KNOWN = scaling_model.Machine(
  flops=60e9,
  start=3e-3,
  byte=9e-10,
  byte_half=2e-9,
  cast=3e-9,
  update=2e-9,
  accumulate=5e-10,
  factor=3e-9,
  shared_cores=2,
)


def made_line(case, ranks=1, gbit=0.0, micro_batch=4):
  """What slow_network.py would print of `KNOWN`."""
  words = " ".join(slow_network.CASES[case].flags)
  line = {
    "case": case, "ranks": ranks, "gbit": gbit, "gbit_measured": gbit or 20.0,
    "bert_config": "bert_mini.json", "precision": "fp32", "xla": "layers",
    "seq_length": 128, "predictions": 20, "micro_batch": micro_batch,
    "accumulation": 8 if "accumulation_steps=8" in words else 1,
    "matmul_gflop_per_second": 80.0 / max(1, ranks / 2),
  }  # fmt: skip
  machine = dataclasses.replace(KNOWN, network=line["gbit_measured"] * 1e9 / 8)
  setting = scaling_model.setting_of(line)
  return line | {"seconds_median": scaling_model.step_seconds(machine, setting)}


def made_reduction(case, megabytes, ranks=2, gbit=0.0):
  """What network/allreduce.py would."""
  sent = megabytes * 2**20 * 2 * (ranks - 1) / ranks
  byte = KNOWN.byte
  if "fp16" in case:
    sent, byte = sent / 2, KNOWN.byte_half
  core = sent * byte * max(1, ranks / 2)
  wire = sent / ((gbit or 20.0) * 1e9 / 8)
  return {
    "case": case, "ranks": ranks, "gbit": gbit, "gbit_measured": gbit or 20.0,
    "megabytes": megabytes, "tensors": 50,
    "seconds_median": KNOWN.start
    + (max(core, wire) if ranks < 3 else core + wire),
  }  # fmt: skip


def made_fit():
  steps = [
    made_line("groups", micro_batch=1),
    *(made_line(c) for c in ("groups", "8 micro-batches", "powersgd")),
    made_line("float16", 2),
    *(
      made_line(case, ranks, gbit)
      for case in ("groups", "float16", "zero", "8 micro-batches", "powersgd")
      for ranks, gbit in ((2, 1.0), (2, 10.0), (4, 1.0))
    ),
  ]
  reductions = [
    made_reduction(case, size)
    for case in ("one group", "one group, fp16")
    for size in (1.0, 64.0)
  ]
  reductions.append(made_reduction("four groups", 64.0, 4, 1.0))
  return scaling_model.Fit(steps, reductions, cores=2), steps, reductions


def test_a_fit_finds_what_measurements_were_made_with():
  fit, steps, reductions = made_fit()
  for name, value in fit.costs.items():
    assert value == pytest.approx(getattr(KNOWN, name), rel=1e-3), name
  (efficiency,) = fit.efficiencies.values()
  assert efficiency == pytest.approx(60 / 80, rel=1e-3)
  results = fit.results([*steps, *reductions])
  assert max(abs(line["error"]) for line in results) < 2e-3
  assert sum(line["fitted"] for line in results) == 9


def test_a_variant_without_a_run_of_one_rank_is_fitted_to_one_line():
  _, steps, reductions = made_fit()
  others = [
    line | {"bert_config": "bert_base.json", "seconds_median": seconds}
    for line, seconds in (
      (made_line("groups", 2, 10.0), 3.0), (made_line("zero", 2, 1.0), 5.0)
    )
  ]  # fmt: skip
  fit = scaling_model.Fit([*steps, *others], reductions, cores=2)
  exact, predicted = fit.results(others)
  assert exact["fitted"] and exact["error"] == pytest.approx(0, abs=1e-4)
  assert not predicted["fitted"]


# -----------------------------------------------------------------------------
# Published tables and recommendations
# -----------------------------------------------------------------------------


def test_predictions_know_nothing_of_the_rows(monkeypatch):
  """They change with a GPU's speed and not with what several had."""
  (table,) = published_scaling.TABLES[:1]
  monkeypatch.setattr(scaling_model, "deepspeed", lambda: [])

  def predicted(changed):
    monkeypatch.setattr(published_scaling, "TABLES", (changed,))
    return [
      x["examples_per_second_predicted"] for x in scaling_model.published()
    ]

  rows = tuple((h, a, 1.0) for h, a, _ in table.rows)
  assert predicted(table) == predicted(table._replace(rows=rows))
  twice = predicted(table._replace(single=2 * table.single))
  assert all(a < b for a, b in zip(predicted(table), twice, strict=True))


def test_recommendations_and_predictions_make_sense():
  """The plainest choice of those near the fastest; nothing above the ideal."""
  speeds = {"plain": 99.0, "groups": 100.0, "float16": 100.5}
  assert scaling_model.best(speeds, list(speeds)) == "plain"
  speeds["float16"] = 120.0
  assert scaling_model.best(speeds, list(speeds)) == "float16"
  for line in scaling_model.published():
    if "hours_ideal" in line:
      assert line["hours_predicted"] > line["hours_ideal"]
    else:
      name = "examples_per_second"
      assert line[f"{name}_predicted"] <= line[f"{name}_ideal"]
  lines = scaling_model.recommendations()
  assert len(lines) == 16
  for line in lines:
    assert line["groups"] >= line["plain"]
    assert line["float16"] > line["groups"]
    assert line["best_same_batch_efficiency"] <= 1
  rows = scaling_model.markdown(lines).splitlines()
  assert len(rows) == 18 and len({row.count("|") for row in rows}) == 1


def test_recorded_predictions_are_of_the_recorded_measurements():
  """And nine of ten that it was not fitted to are within about 15%."""
  read = lambda name: scaling_model.read_lines([os.path.join(RESULTS, name)])
  steps, reductions = read("scaling.jsonl")
  own = scaling_model.Fit(steps, reductions, 2).results([*steps, *reductions])
  with open(os.path.join(RESULTS, "scaling_model.jsonl")) as f:
    recorded = [json.loads(line) for line in f]
  wanted = [x for x in recorded if x["kind"] in ("step", "all-reduce")]
  for found, line in zip(own, wanted, strict=True):
    numbers = {k: v for k, v in line.items() if isinstance(v, (int, float))}
    for key, value in numbers.items():
      assert found[key] == pytest.approx(value, rel=1e-3, abs=1e-3), line
    assert found["case"] == line["case"] and found["what"] == line["what"]
  off = [abs(x["error"]) for x in own if not x["fitted"]]
  assert np.median(off) < 0.1 and np.mean(np.array(off) < 0.155) > 0.9
