"""The schedule, hand-worked and against google/bert's formula."""

import numpy as np
import pytest

import lr_schedule
from tensorflow_v1 import tf


def test_linear_hand_worked():
  rate = lambda step: float(lr_schedule.linear(step, 1.0, 100, 10))
  assert rate(0) == 0.0
  assert rate(5) == 0.5
  assert rate(9) == pytest.approx(0.9)
  assert rate(10) == pytest.approx(0.9)  # 1 - 10/100: the decay starts at 0
  assert rate(50) == 0.5
  assert rate(100) == 0.0
  assert rate(150) == 0.0


def test_no_warmup_starts_at_the_peak():
  assert float(lr_schedule.linear(0, 0.3, 10, 0)) == 0.3


def test_tensor_and_numpy_agree():
  steps = np.arange(0, 120)
  with tf.Graph().as_default(), tf.Session() as session:
    step = tf.placeholder(tf.int64, [None])
    graph = session.run(lr_schedule.linear(step, 1e-3, 100, 7), {step: steps})
  np.testing.assert_allclose(
    graph, lr_schedule.linear(steps, 1e-3, 100, 7), rtol=1e-5, atol=1e-9
  )


def test_scaling_is_explicit():
  assert lr_schedule.scale_peak(0.1, "none", 16) == 0.1
  assert lr_schedule.scale_peak(0.1, "sqrt", 16) == pytest.approx(0.4)
  assert lr_schedule.scale_peak(0.1, "linear", 16) == pytest.approx(1.6)
