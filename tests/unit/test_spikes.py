"""Updates whose gradients are far above the recent ones are left out."""

import json

import numpy as np
import pytest
import resuming
import runs

from common.tensorflow_v1 import tf
from gradients import spikes
from training import divergence


def judged(norms, deviations=6.0, began=0):
  """Heights of a sequence of norms, by a guard of its own."""
  with tf.Graph().as_default(), tf.Session() as session:
    norm = tf.placeholder(tf.float32, [])
    guard = spikes.SpikeGuard(deviations, began)
    height = guard.height(norm)
    counted = guard.update_op(norm, tf.equal(height, 0.0))
    step = tf.train.get_or_create_global_step()
    with tf.control_dependencies([counted, height]):
      advanced = step.assign_add(1)
    session.run(tf.global_variables_initializer())
    fetches = [height, advanced]
    return [float(session.run(fetches, {norm: n})[0]) for n in norms]


def test_a_norm_far_above_recent_ones_is_a_spike():
  """By numpy's mean and deviation; it does not raise what is recent."""
  usual = np.exp(np.random.default_rng(0).normal(0.0, 0.2, 100))
  logs = np.log(usual)
  want = (np.log(20.0) - logs.mean()) / logs.std()
  assert want > 10
  heights = judged([*usual, 20.0, 20.0, 1.0, 0.001])
  np.testing.assert_allclose(heights[100:102], want, rtol=1e-4)
  assert heights[:100] + heights[102:] == [0.0] * 102


@pytest.mark.parametrize(
  "norms, deviations, began",
  [
    ([1.0] * 99 + [50.0], 6.0, 0),  # too few are known
    ([1.0] * 100 + [1.3], 6.0, 0),  # norms that hardly vary
    ([1.0] * 100 + [50.0], 90.0, 0),
    ([1.0] * 100 + [50.0], 6.0, 100),  # a stage begins
    ([1.0] * 100 + [float("nan")], 6.0, 0),  # another guard's
    (1.02 ** np.arange(150), 6.0, 0),  # they grow slowly
  ],
  ids=str,
)
def test_others_are_none(norms, deviations, began):
  heights = judged(norms, deviations, began)
  assert np.nan_to_num(heights).tolist() == [0.0] * len(norms)


def test_a_run_names_spikes_and_resumes(tiny_run, tmp_path, monkeypatch, capfd):
  """Every norm above the mean is one here: a kill loses no statistics."""
  monkeypatch.setattr(spikes, "_RECENT", 3)
  monkeypatch.setattr(spikes, "_LEAST_DEVIATION", 1e-6)
  whole, _ = resuming.compare(
    tiny_run, tmp_path, [resuming.killed_after(7)], keys=("loss", "skipped"),
    num_train_steps=12, save_checkpoints_steps=5,
    optimizer={"spike_deviations": 0.01},
  )  # fmt: skip
  skipped = runs.metrics(whole, "skipped")
  assert not any(skipped[:3]) and any(skipped) and not all(skipped[3:])
  lines = (whole / divergence.SPIKES_FILE).read_text().splitlines()
  named = [json.loads(line) for line in lines]
  assert [n["update"] for n in named] == (1 + np.flatnonzero(skipped)).tolist()
  assert len(named[0]["records"]) == 24 and named[0]["spike"] > 0.01
  line = f"update {named[0]['update']}: skipped, the gradient's norm"
  assert line in capfd.readouterr().err


def test_only_spikes_stop_a_run(tiny_run, tmp_path, monkeypatch):
  """Ten in a row: the weights, or the level of norms, have changed for good."""
  monkeypatch.setattr(spikes.SpikeGuard, "height", lambda _, norm: 7.0 * norm)
  with pytest.raises(divergence.DivergedError) as error:
    runs.pretrain(
      tiny_run, tmp_path, num_train_steps=20,
      optimizer={"spike_deviations": 6.0},
    )  # fmt: skip
  message = str(error.value)
  words = "update 10: gradients are far above those before for 10 updates"
  assert message.startswith(words)
  assert "--spike_deviations=0 trains on them" in message
