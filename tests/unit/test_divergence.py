"""A run that is beyond repair stops, says where, and leaves what was good."""

import os
import types

import numpy as np
import pytest
import runs

from checkpoints import checkpointing
from checkpoints.metrics import read_jsonl
from checkpoints.snapshot import Snapshot
from common.tensorflow_v1 import tf
from config.precision import LossScaleConfig
from gradients import distributed
from records import record_order
from training import divergence, signals


def diverge(tiny_run, folder, **changes):
  changes = {"learning_rate": 1e38, "num_train_steps": 60, **changes}
  with pytest.raises(divergence.DivergedError) as error:
    runs.pretrain(tiny_run, folder, **changes)
  return str(error.value)


def saved(folder):
  return sorted(path.stem for path in folder.glob("model*.json"))


def losses(folder):
  """Update -> the loss of its one evaluation."""
  reports = read_jsonl(str(folder / "eval_metrics.jsonl"))
  of_updates = {
    e["global_step"]: e["masked_lm_loss"] + e["next_sentence_loss"]
    for e in reports
  }
  assert len(of_updates) == len(reports)
  return of_updates


def test_it_stops_and_names_variable_update_records_and_remedy(
  tiny_run, tmp_path
):
  folder = tmp_path / "run"
  runs.trained(tiny_run, folder, num_train_steps=4)
  message = diverge(
    tiny_run, folder, lr_schedule="constant", save_checkpoints_steps=3
  )
  found = runs.read_json(folder, divergence.FILE)
  first = found["records"][0]
  # Update 5 still had a gradient; its weights have none.
  words = "update 15: gradients are not finite for 10 updates"
  assert message.startswith(words)
  assert "update 6 that of bert/embeddings/word_embeddings" in message
  assert f"{folder}/model.ckpt-4 is from before" in message
  assert f"{first['file']}:{first['record']}" in message
  assert message.endswith(
    "there with a lower learning rate: give the same command with "
    "--learning_rate=5e+37"
  )
  assert "model.ckpt-6" not in saved(folder), "saved while it was bad"

  assert found["update"] == 6 and found["samples_seen_before"] == 5 * 24
  largest = next(iter(found["largest_weights"].values()))
  assert largest is None or largest > 1e37  # null: infinite
  numbers = record_order.Order(120, 12345).records(range(120, 144)).tolist()
  assert [
    (os.path.basename(r["file"]), r["record"]) for r in found["records"]
  ] == [(f"data-{n // 60}.tfrecord", n % 60) for n in numbers]

  # And the advice is right: a lower rate goes on from there.
  result = runs.pretrain(tiny_run, folder, num_train_steps=8)
  assert result["training"]["updates"] == 4
  assert runs.metrics(folder, "global_step") == list(range(1, 9))


@pytest.mark.slow
def test_a_falling_loss_scale_is_no_reason_but_its_floor_is(tiny_run, tmp_path):
  """30 halvings are waited for; at the floor ten more updates."""
  falls, scale = tmp_path / "falls", dict(initial_loss_scale=2.0**40)
  runs.pretrain(tiny_run, falls, precision="fp16", loss_scale=scale)
  assert sum(runs.metrics(falls, "skipped")) > divergence.PATIENCE

  scale = dict(initial_loss_scale=2.0**41, min_loss_scale=2.0**40)
  message = diverge(
    tiny_run, tmp_path / "floor", learning_rate=1e-3, precision="fp16",
    loss_scale=scale,
  )  # fmt: skip
  assert message.startswith("update 11: ") and "first at update 2 " in message
  assert "loss scale 1.09951e+12" in message


def test_a_diverged_state_is_not_saved_at_the_end_or_at_a_stop(
  tiny_run, tmp_path, monkeypatch, capfd
):
  folder = tmp_path / "run"
  runs.trained(tiny_run, folder, num_train_steps=4)
  message = diverge(tiny_run, folder, lr_schedule="constant", num_train_steps=8)
  words = "update 8: gradients are not finite for 3 updates in a row, first at"
  assert message.startswith(f"{words} update 6 ")
  assert f"{folder}/model.ckpt-4 is from before" in message
  assert saved(folder) == ["model.ckpt-4"]

  asked = iter([None] * 3 + ["stop"])
  monkeypatch.setattr(signals.StopVote, "verdict", lambda *_: next(asked))
  result = runs.pretrain(
    tiny_run, folder, lr_schedule="constant", learning_rate=1e38
  )
  assert result["training"]["stopped"]
  assert result["training"]["global_step"] == 4
  assert saved(folder) == ["model.ckpt-4"]
  told = capfd.readouterr().err
  for words in (
    "updates 6 to 8 were not finite and are not saved: update 4",
    f"checkpoint  {folder}/model.ckpt-4\n",
    "stopped as asked after update 4, saved: the same command resumes",
  ):
    assert words in told


def test_a_save_due_at_a_bad_update_is_made_after_it(
  tiny_run, tmp_path, monkeypatch
):
  """And its evaluation, which could make it the best, is left out."""
  check = divergence.Guard.check

  def check_a_bad_one(guard, step, update):
    check(guard, step, {**update, "skipped": step == 4})

  monkeypatch.setattr(divergence.Guard, "check", check_a_bad_one)
  settings = dict(do_eval=True, eval_every_steps=4, save_checkpoints_steps=4)
  runs.pretrain(tiny_run, tmp_path, num_train_steps=6, **settings)
  assert saved(tmp_path) == ["model.ckpt-5", "model.ckpt-6"]
  assert [*losses(tmp_path)] == [0, 6]


def guard_and_report():
  """A guard alone, and what makes the facts of an update for it."""
  named = types.SimpleNamespace
  plan = named(records_before=lambda n: 24 * n, records_of=lambda n: 24)
  guard = divergence.Guard(
    named(
      comm=named(is_root=False, gather=lambda values: values),
      checkpointer=named(wait=lambda: None),
      config=named(uses_fp16=False, loss_scale=LossScaleConfig()),
      task=named(plan=plan, ops=named(variables=[])),
      watchdog=named(pause=lambda: None),
    )
  )
  report = lambda bad, dropped=0.0: {
    "skipped": bad, "dropped_micro_batches": dropped, "loss_scale": 1.0,
    "nonfinite_variable": -1, "spike": np.zeros(2), "spikes_in_a_row": 0,
  }  # fmt: skip
  return guard, report


def test_ten_bad_updates_that_are_not_in_a_row_are_none():
  guard, report = guard_and_report()
  for step in range(1, 41):
    guard.check(step, report(step % divergence.PATIENCE != 0))
    assert guard.bad == (step % divergence.PATIENCE != 0)
  # To lose some micro-batches once is no sign.
  for step, bad in ((41, False), (42, True), (43, True)):
    guard.check(step, report(False, dropped=1.0))
    assert guard.bad == bad
  guard.check(44, report(False))
  with pytest.raises(divergence.DivergedError, match="rank 0 says more"):
    for step in range(45, 60):
      guard.check(step, report(True))
  assert step == 54


def test_a_spike_ends_a_row_of_bad_updates(monkeypatch):
  """Its gradient is finite, so what is there at a stop is saved."""
  guard, report = guard_and_report()
  monkeypatch.setattr(guard, "_after_spike", lambda *_: None)
  guard.check(1, report(True))
  assert guard.bad
  spike = report(True) | {"spike": np.ones(2), "spikes_in_a_row": 1}
  guard.check(2, spike)
  assert not guard.bad and guard.spikes == 1
  for step in range(3, 12):
    guard.check(step, report(True))


@pytest.mark.slow
def test_the_best_checkpoint_by_evaluation_stays(tiny_run, tmp_path):
  """Also where no checkpoint was due, and over a resume."""
  settings = dict(
    do_eval=True, eval_every_steps=2, save_checkpoints_steps=5,
    keep_checkpoints=1, lr_schedule="constant",
  )  # fmt: skip
  # It learns, and then is made worse by a rate that is far too high.
  runs.pretrain(tiny_run, tmp_path, num_train_steps=7, **settings)
  assert [*losses(tmp_path)] == [0, 2, 4, 6, 7]
  runs.pretrain(
    tiny_run, tmp_path, num_train_steps=17, learning_rate=0.5, **settings
  )
  found = losses(tmp_path)
  best = min(found, key=found.get)
  assert 0 < best <= 8 and found[17] > found[best]
  assert saved(tmp_path) == sorted({f"model.ckpt-{best}", "model.ckpt-17"})


def test_a_rank_commits_only_with_all_others(tmp_path):
  """Else it could go on from an update that a lost rank 0 never reported."""

  class Comm(distributed.Comm):
    elastic, there = True, True

    def gather(self, values):
      if not self.there:
        raise distributed.RankLost("rank 0 was killed")
      return super().gather(values)

  comm, snapshot = Comm(), Snapshot()
  with tf.Graph().as_default(), tf.Session() as session:
    weight = tf.get_variable("weight", initializer=1.0)
    checkpointer = checkpointing.Checkpointer(
      str(tmp_path), comm, snapshot=snapshot
    )
    checkpointer.restore.initialise(session, None)
    checkpointer.commit(session, 14)
    weight.load(2.0, session)
    comm.there = False
    with pytest.raises(distributed.RankLost):
      checkpointer.commit(session, 21)
  assert snapshot.step == 14 and snapshot.values["weight"] == 1.0
