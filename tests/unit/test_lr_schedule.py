"""Schedules: hand-worked, against published formulas, NumPy against graph."""

import numpy as np
import pytest

from common.errors import UserError
from common.tensorflow_v1 import tf
from config.lr_schedule import SCHEDULES, Schedule, scale_peak

# What the published functions return, as one multiplies a rate with it: see
# google/bert's optimization.py and DeepSpeed's bing_bert. n = 100, w = 10.
REFERENCES = {
  "linear": lambda x: x / 10 if x < 10 else 1 - x / 100,
  "poly": lambda x: x / 10 if x < 10 else (1 - x / 100) ** 0.5,
  "constant": lambda x: x / 10 if x < 10 else 1.0,
  "cosine": lambda x: (
    x / 10 if x < 10 else (1 + np.cos(np.pi * (x - 10) / 90)) / 2
  ),
  # https://arxiv.org/abs/2405.18392, with a cooldown of 20.
  "wsd": lambda x: min(x / 10, 1) - (max(x - 80, 0) / 20) ** 0.5,
  "wsd_linear": lambda x: min(x / 10, 1) - max(x - 80, 0) / 20,
  "warmup_exp_decay_exp": lambda x: (
    (x / 10) ** 2 if x < 10 else 0.9 ** ((x - 10) / 25)
  ),
  "warmup_exp_decay_poly": lambda x: (
    (x / 10) ** 1.5 if x < 10 else (1 - x / 100) ** 2
  ),
  "warmup_linear_decay_exp": lambda x: (
    x / 10 if x < 10 else 0.9 ** ((x - 10) / 25)
  ),
}


def schedule(name, **changes):
  settings = dict(peak=1.0, total=100, warmup=10, decay_steps=25, cooldown=20)
  return Schedule(name=name, **{**settings, **changes})


@pytest.mark.parametrize("name", SCHEDULES)
def test_equals_the_published_formula_at_every_update(name):
  steps = np.arange(101)
  np.testing.assert_allclose(
    schedule(name, peak=3.0, offset=0.25)(steps),
    [3.0 * REFERENCES[name](x) + 0.25 for x in steps],
    rtol=1e-12,
    atol=1e-12,
  )


def test_the_large_batch_recipe_hand_worked():
  """Phase 1: the offset is added, the decay is 0.9 every 250."""
  rate = Schedule(
    11e-3, 7500, 150, "warmup_exp_decay_exp", None, 0.9, 250, 10e-4
  )
  assert float(rate(0)) == 10e-4
  assert float(rate(75)) == pytest.approx(11e-3 / 4 + 10e-4)
  assert float(rate(150)) == pytest.approx(12e-3)
  assert float(rate(400)) == pytest.approx(0.9 * 11e-3 + 10e-4)


def test_no_warmup_starts_at_the_peak():
  for name in SCHEDULES:
    assert float(schedule(name, peak=0.3, warmup=0)(0)) == 0.3


@pytest.mark.parametrize("name", SCHEDULES)
def test_after_the_end_nothing_rises(name):
  ends = schedule(name)(np.array([100, 101, 150, 1000]))
  assert np.all(np.isfinite(ends)) and np.all(np.diff(ends) <= 0.0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_tensor_and_numpy_agree(name):
  steps = np.arange(0, 120)
  rate = schedule(name, peak=1e-3)
  with tf.Graph().as_default(), tf.Session() as session:
    step = tf.placeholder(tf.int64, [None])
    graph = session.run(rate(step), {step: steps})
  np.testing.assert_allclose(graph, rate(steps), rtol=1e-5, atol=1e-9)


def test_scaling_is_explicit():
  assert scale_peak(0.1, "none", 16) == 0.1
  assert scale_peak(0.1, "sqrt", 16) == pytest.approx(0.4)
  assert scale_peak(0.1, "linear", 16) == pytest.approx(1.6)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 10, 100])
def test_the_highest_rate_is_that_of_all_updates(name, warmup):
  rate = schedule(name, warmup=warmup)
  for first, last in ((0, 99), (0, 0), (3, 9), (9, 10), (40, 99), (90, 130)):
    assert rate.highest(first, last) == max(rate(np.arange(first, last + 1)))


@pytest.mark.parametrize(
  "changes, first, before, words",
  [
    ({"peak": 0.0}, 0, 0, "updates 1 to 100 .* peak of 0, --lr_offset=0,"),
    ({}, 0, 250, "counted on from --init_.* update 250: .* --norewarmup"),
    ({}, 60, 40, "updates 61 to 100 .* is 0"),  # what is left of a run
    ({"total": 1, "warmup": 1}, 0, 0, "updates 1 to 1 .* 1 updates of warm"),
  ],
)
def test_a_rate_of_0_throughout_is_refused(changes, first, before, words):
  with pytest.raises(UserError, match=words):
    schedule(**{"name": "linear", **changes}).check_trains(first, before)


def test_a_rate_above_0_at_some_update_is_none():
  schedule("linear").check_trains(first=0)
  schedule("linear").check_trains(first=99)  # its last update
  schedule("linear").check_trains(first=100)  # nothing left to train
  schedule("linear").check_trains(first=0, before=99)
  schedule("linear", peak=0.0, offset=0.1).check_trains(first=0, before=200)
  schedule("warmup_exp_decay_exp").check_trains(first=0, before=200)
  schedule("linear", power=20.0, total=10**6).check_trains(first=10**6 - 1)


def test_where_a_rate_of_0_begins():
  assert schedule("linear").zero_from() is None
  assert schedule("linear").zero_from(before=60) == 41
  rates = schedule("linear")(np.arange(60, 160))
  assert rates[39] > 0.0 and not rates[40:].any()
  assert schedule("constant").zero_from(before=60) is None
  assert schedule("linear", offset=0.1).zero_from(before=60) is None
