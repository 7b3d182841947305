"""Updates whose gradients are far above the recent ones are left out."""

import errno
import json
import os

import numpy as np
import pytest
import resuming
import runs

import run_pretraining
from checkpoints import metrics, restore
from checkpoints.checkpoint_files import CheckpointFiles
from checkpoints.snapshot import Snapshot
from common.tensorflow_v1 import tf
from config.exchange_config import AllreduceConfig
from gradients import all_reduce, spikes
from gradients.distributed import Comm
from training import divergence, signals


def judged(norms, losses, deviations=6.0, began=0):
  """Heights, [updates, 2], of norms and losses, by a guard of its own."""
  with tf.Graph().as_default(), tf.Session() as session:
    norm, loss = tf.placeholder(tf.float32, []), tf.placeholder(tf.float32, [])
    guard = spikes.SpikeGuard(deviations, began)
    heights = guard.heights(norm, loss)
    spike = tf.reduce_any(heights > 0.0)
    counted, _ = guard.count(norm, loss, spike, tf.logical_not(spike))
    step = tf.train.get_or_create_global_step()
    with tf.control_dependencies([counted, heights]):
      advanced = step.assign_add(1)
    session.run(tf.global_variables_initializer())
    pairs = zip(norms, losses, strict=True)
    fed = [dict(zip((norm, loss), pair, strict=True)) for pair in pairs]
    return np.array([session.run([heights, advanced], f)[0] for f in fed])


def test_a_norm_far_above_recent_ones_is_a_spike():
  """By numpy's mean and deviation; it does not raise what is recent."""
  usual = np.exp(np.random.default_rng(0).normal(0.0, 0.2, 100))
  logs = np.log(usual)
  want = (np.log(20.0) - logs.mean()) / logs.std()
  assert want > 10
  heights = judged([*usual, 20.0, 20.0, 1.0, 0.001], [4.0] * 104)
  np.testing.assert_allclose(heights[100:102, 0], want, rtol=1e-4)
  heights[100:102, 0] = 0.0
  assert not heights.any()


def test_a_loss_far_above_recent_ones_is_a_spike():
  """By numpy's mean and deviation; what is not a number does not count."""
  usual = np.exp(np.random.default_rng(0).normal(1.4, 0.08, 100))
  logs = np.log(usual)
  want = (np.log(12.0) - logs.mean()) / logs.std()
  assert want > 10
  losses = [*usual, 12.0, np.nan, 12.0, 4.0, 1.0]
  heights = judged([1.0] * 105, losses)
  np.testing.assert_allclose(heights[[100, 102], 1], want, rtol=1e-4)
  heights[[100, 102], 1] = 0.0
  assert not heights.any()
  both = judged([*[1.0] * 100, 50.0, 1.0], [*usual, 12.0, 4.0])
  assert (both[100] > 10).all() and not both[101].any()


def test_an_update_that_teaches_nothing_does_not_count():
  """0 has no logarithm."""
  norms, losses = [1.0] * 99 + [0.0, 1.0, 50.0], [2.0] * 50 + [0.0] + [2.0] * 51
  heights = judged(norms, losses)
  assert heights[101, 0] > 10 and not heights[:101].any()
  assert judged([1.0] * 102, [*losses[:101], 50.0])[101, 1] > 10


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
  assert not judged(norms, [4.0] * len(norms), deviations, began).any()


def test_a_stage_begins_a_row_of_its_own():
  """Else its first update could name records of the stage before."""
  with tf.Graph().as_default(), tf.Session() as session:
    guard = spikes.SpikeGuard(6.0, began=3)
    is_spike, never = tf.constant(True), tf.constant(False)
    counted, row = guard.count(tf.constant(9.0), 9.0, is_spike, never)
    step = tf.train.get_or_create_global_step()
    with tf.control_dependencies([counted, row]):
      advanced = step.assign_add(1)
    session.run(tf.global_variables_initializer())
    rows = [session.run([row, advanced])[0] for _ in range(5)]
  assert rows == [1, 2, 3, 1, 2]


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
  lines = (whole / metrics.SPIKES_FILE).read_text().splitlines()
  named = [json.loads(line) for line in lines]
  assert [n["global_step"] for n in named] == (
    1 + np.flatnonzero(skipped)
  ).tolist()
  assert len(named[0]["records"]) == 24
  reports, err = runs.metrics(whole, "loss"), capfd.readouterr().err
  for spike in named:
    assert spike["loss"] == reports[spike["global_step"] - 1]
    # Losses fall.
    assert spike["norm_deviations"] > 0.01 and not spike["loss_deviations"]
    assert f"update {spike['global_step']}: skipped, the gradient's norm" in err


def test_a_note_on_a_full_disk_ends_no_training(capfd):
  with divergence._noting("run/spikes.jsonl"):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  message = "run/spikes.jsonl could not be written: No space left on device"
  assert message in capfd.readouterr().err


def test_the_guard_sees_the_losses_that_are_reported(tiny_run, tmp_path):
  runs.pretrain(
    tiny_run, tmp_path, num_train_steps=4, optimizer={"spike_deviations": 6.0}
  )
  state = runs.weights(tmp_path / "model.ckpt-4")["spike_guard/recent_losses"]
  logs = np.log(runs.metrics(tmp_path, "loss"))
  want = [logs.mean(), logs.var(), 4.0]
  np.testing.assert_allclose(state, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("first, stops", [(1, 3), (9, 14)])
def test_only_spikes_stop_a_run(tiny_run, tmp_path, monkeypatch, first, stops):
  """At once without a checkpoint of before, else if going back did not help."""
  runs.spikes_at(monkeypatch, first, 20)
  with pytest.raises(divergence.DivergedError) as error:
    runs.pretrain(
      tiny_run, tmp_path, num_train_steps=20, save_checkpoints_steps=4,
      optimizer={"spike_deviations": 6.0},
    )  # fmt: skip
  message, count = str(error.value), stops - first + 1
  words = f"update {stops}: gradients or losses are far above those before for"
  assert message.startswith(f"{words} {count} updates in a row")
  # The same command resumes from before the first of them.
  saved = CheckpointFiles(str(tmp_path), keep=1).steps()
  assert saved == ([4] if first == 9 else [])
  assert "--spike_deviations=0 trains on them" in message


def test_a_run_does_not_go_back_to_what_it_has_left(
  tiny_run, tmp_path, monkeypatch, capfd
):
  """After 12 to 14 it is update 5's, after 17 to 19 not that of update 10."""
  runs.spikes_at(monkeypatch, 12, 14)
  first = spikes.SpikeGuard.heights
  runs.spikes_at(monkeypatch, 17, 19)
  second = spikes.SpikeGuard.heights
  both = lambda *norm_and_loss: first(*norm_and_loss) + second(*norm_and_loss)
  monkeypatch.setattr(spikes.SpikeGuard, "heights", both)
  runs.pretrain(
    tiny_run, tmp_path, num_train_steps=20, save_checkpoints_steps=5,
    optimizer={"spike_deviations": 6.0},
  )  # fmt: skip
  assert capfd.readouterr().err.count("are those of update 5 again") == 2
  assert CheckpointFiles(str(tmp_path), keep=1).steps() == [20, 5]


def test_a_run_that_repeats_updates_names_a_spike_once(
  tiny_run, tmp_path, monkeypatch
):
  runs.spikes_at(monkeypatch, 3, 3)
  settings = dict(
    num_train_steps=5, save_checkpoints_steps=2,
    optimizer={"spike_deviations": 6.0},
  )  # fmt: skip
  with runs.ended_after(3):
    runs.pretrain(tiny_run, tmp_path, **settings)
  runs.pretrain(tiny_run, tmp_path, **settings)
  lines = (tmp_path / metrics.SPIKES_FILE).read_text().splitlines()
  assert [json.loads(line)["global_step"] for line in lines] == [3]


@pytest.mark.parametrize("zero", [0, 1])
def test_many_in_a_row_go_back_to_weights_of_before(
  tiny_run, tmp_path, monkeypatch, capfd, zero
):
  """Not to those that were saved just before; counters stay."""
  runs.spikes_at(monkeypatch, 9, 11)
  settings = dict(
    optimizer={"spike_deviations": 6.0, "bias_correction": True},
    save_checkpoints_steps=4, num_warmup_steps=0,
    allreduce=AllreduceConfig(zero=zero),
  )  # fmt: skip
  runs.pretrain(tiny_run, tmp_path, num_train_steps=11, **settings)
  line = "3 updates in a row were far above those before, so weights and"
  err = capfd.readouterr().err
  assert line in err and " above those before and the loss " in err
  before, after = (
    runs.weights(tmp_path / f"model.ckpt-{step}") for step in (4, 11)
  )
  places = {"global_step": 11, "skipped_updates": 3, "spike_guard/in_a_row": 3}
  for name, value in after.items():
    if not name.startswith("training_state/"):
      want = places.get(name, before[name])
      np.testing.assert_array_equal(value, want, err_msg=name)
  assert (
    after["training_state/samples_seen"] > before["training_state/samples_seen"]
  )


def test_it_goes_back_past_a_damaged_checkpoint(
  tiny_run, tmp_path, monkeypatch, capfd
):
  runs.spikes_at(monkeypatch, 9, 11)
  settings = dict(
    optimizer={"spike_deviations": 6.0}, save_checkpoints_steps=2,
    keep_checkpoints=9, num_warmup_steps=0,
  )  # fmt: skip
  runs.pretrain(tiny_run, tmp_path, num_train_steps=8, **settings)
  damaged = tmp_path / "model.ckpt-4.index"
  damaged.write_bytes(damaged.read_bytes()[:-1])
  runs.pretrain(tiny_run, tmp_path, num_train_steps=11, **settings)
  err = capfd.readouterr().err
  assert "are those of update 2 again" in err and f"damaged: {damaged}" in err


def test_evaluations_of_weights_that_were_left_do_not_count(
  tiny_run, tmp_path, monkeypatch
):
  runs.spikes_at(monkeypatch, 9, 11)
  runs.pretrain(
    tiny_run, tmp_path, num_train_steps=12, save_checkpoints_steps=4,
    do_eval=True, eval_every_steps=2, optimizer={"spike_deviations": 6.0},
  )  # fmt: skip
  steps = {one["global_step"] for one in metrics.evaluations(str(tmp_path))}
  assert {2, 4, 12} <= steps and not {6, 8, 10} & steps
  begun = []  # from there on TensorBoard drops what it has
  for path in sorted((tmp_path / "eval").iterdir()):
    for event in tf.train.summary_iterator(str(path)):
      if event.session_log.status == tf.SessionLog.START:
        begun.append(event.step)
  assert begun == [0, 5]


def test_what_is_not_finite_counts_in_a_row_of_spikes(
  tiny_run, tmp_path, monkeypatch, capfd
):
  """No save comes between, and the run goes back to before the first."""
  runs.spikes_at(monkeypatch, 9, 11)
  half_squares = all_reduce.AllReduce.half_squares

  def infinite_in_10(exchange, pairs):
    squares = half_squares(exchange, pairs)
    step = tf.convert_to_tensor(tf.train.get_or_create_global_step())
    return tf.where(tf.equal(step, 9), squares + np.inf, squares)

  monkeypatch.setattr(all_reduce.AllReduce, "half_squares", infinite_in_10)
  runs.pretrain(
    tiny_run, tmp_path, num_train_steps=11, save_checkpoints_steps=2,
    optimizer={"spike_deviations": 6.0},
  )  # fmt: skip
  assert "are those of update 4 again" in capfd.readouterr().err
  assert CheckpointFiles(str(tmp_path), keep=9).steps() == [11, 4, 2]
  lines = (tmp_path / metrics.SPIKES_FILE).read_text().splitlines()
  assert [json.loads(line)["global_step"] for line in lines] == [9, 11]


def test_memory_goes_back_with_the_weights(tiny_run, tmp_path, monkeypatch):
  """Else a world that loses a rank would have what the run has left."""
  runs.spikes_at(monkeypatch, 9, 11)
  comm, kept = Comm(), Snapshot()
  comm.elastic = True
  config = runs.config(
    tiny_run, tmp_path, num_train_steps=14, save_checkpoints_steps=4,
    commit_every_steps=100, optimizer={"spike_deviations": 6.0},
  )  # fmt: skip
  with runs.ended_after(11):
    run_pretraining.pretrain(config, comm, kept)
  before = runs.weights(tmp_path / "model.ckpt-4")
  word = "bert/embeddings/word_embeddings"
  assert kept.step == 11
  np.testing.assert_array_equal(kept.values[word], before[word])


def test_the_best_that_is_left_is_kept(tiny_run, tmp_path, monkeypatch):
  """Not the one that was evaluated last before the run went back."""
  runs.spikes_at(monkeypatch, 9, 11)
  runs.pretrain(
    tiny_run, tmp_path, num_train_steps=11, save_checkpoints_steps=4,
    keep_checkpoints=1, do_eval=True, eval_every_steps=4,
    optimizer={"spike_deviations": 6.0},
  )  # fmt: skip
  assert CheckpointFiles(str(tmp_path), keep=1).steps() == [11, 4]


def noted(calls, function):
  def called(*arguments):
    calls.append(function.__name__)
    return function(*arguments)

  return called


def test_averages_go_back_with_the_weights(tiny_run, tmp_path, monkeypatch):
  """Also to a checkpoint of before --average_updates; no watchdog times it."""
  calls = []
  for owner, name in (
    (signals.Watchdog, "pause"), (signals.Watchdog, "resume"),
    (restore.Restore, "rewind"),
  ):  # fmt: skip
    monkeypatch.setattr(owner, name, noted(calls, getattr(owner, name)))
  settings = dict(
    optimizer={"spike_deviations": 6.0}, save_checkpoints_steps=4,
    num_warmup_steps=0,
  )  # fmt: skip
  runs.pretrain(tiny_run, tmp_path, num_train_steps=8, **settings)
  runs.spikes_at(monkeypatch, 10, 12)
  settings["average_updates"] = 10
  runs.pretrain(tiny_run, tmp_path, num_train_steps=12, **settings)
  before, after = (
    runs.weights(tmp_path / f"model.ckpt-{step}") for step in (4, 12)
  )
  averages = [name for name in after if name.endswith("/average")]
  assert len(averages) > 20 and after["averages/samples"] == 0
  for name in averages:
    weight = before[name.removesuffix("/average")]
    np.testing.assert_array_equal(after[name], weight, err_msg=name)
  assert calls[calls.index("rewind") - 1] == "pause"


@pytest.mark.parametrize("stop", [8, 10, 13])
def test_it_goes_back_after_a_kill_as_without(
  tiny_run, tmp_path, monkeypatch, stop
):
  runs.spikes_at(monkeypatch, 9, 11)
  whole, _ = resuming.compare(
    tiny_run, tmp_path, [resuming.killed_after(stop)], num_train_steps=16,
    save_checkpoints_steps=4, optimizer={"spike_deviations": 6.0},
  )  # fmt: skip
  assert sum(runs.metrics(whole, "skipped")) == 3
