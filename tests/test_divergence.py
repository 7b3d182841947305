"""A run that is beyond repair stops, says where, and leaves what was good."""

import json

import pytest
import runs

from pretraining_data import record_order
from tensorflow_v1 import tf
from training import checkpointing, distributed, divergence, train_loop
from training.training_hooks import read_jsonl


def diverge(tiny_run, folder, **changes):
  with pytest.raises(divergence.DivergedError) as error:
    runs.pretrain(
      tiny_run,
      folder,
      **{"learning_rate": 1e38, "num_train_steps": 60, **changes},
    )
  return str(error.value)


def test_it_stops_and_names_variable_update_records_and_command(
  tiny_run, tmp_path, monkeypatch
):
  folder = tmp_path / "run"
  runs.pretrain(tiny_run, folder, num_train_steps=4)
  monkeypatch.setattr(
    "sys.argv", ["run_pretraining.py", "--learning_rate=1e38", "--a=b c"]
  )
  message = diverge(
    tiny_run, folder, lr_schedule="constant", save_checkpoints_steps=3
  )
  # Update 5 still had a gradient; its weights have none.
  assert message.startswith(
    "update 15: gradients are not finite for 10 updates"
  )
  assert "update 6 that of bert/embeddings/word_embeddings" in message
  assert f"{folder}/model.ckpt-4 is of before" in message
  assert message.endswith(
    "\n  python run_pretraining.py '--a=b c' --learning_rate=5e+37"
  )
  assert not list(folder.glob("model.ckpt-6*")), "saved while it was bad"

  with open(folder / divergence.FILE, encoding="utf-8") as f:
    found = json.load(f)
  assert found["update"] == 6 and found["samples_seen_before"] == 5 * 24
  assert next(iter(found["largest_weights"].values())) > 1e37
  numbers = record_order.Order(120, 12345).records(range(120, 144))
  assert [(r["file"][-14:], r["record"]) for r in found["records"]] == [
    (f"data-{n // 60}.tfrecord"[-14:], n % 60) for n in numbers.tolist()
  ]
  assert f"{found['records'][0]['file']}:{found['records'][0]['record']}" in (
    message
  )

  # And the advice is right: a lower rate goes on from there.
  result = runs.pretrain(tiny_run, folder, num_train_steps=8)
  assert result["training"]["updates"] == 4
  assert runs.metrics(folder, "global_step") == list(range(1, 9))


def test_a_falling_loss_scale_is_no_reason_but_its_floor_is(tiny_run, tmp_path):
  """30 halvings are waited for; at the floor ten more updates."""
  runs.pretrain(
    tiny_run,
    tmp_path / "falls",
    precision="fp16",
    loss_scale=dict(initial_loss_scale=2.0**40),
  )
  skipped = runs.metrics(tmp_path / "falls", "skipped")
  assert sum(skipped) > divergence.PATIENCE

  message = diverge(
    tiny_run,
    tmp_path / "floor",
    learning_rate=1e-3,
    precision="fp16",
    loss_scale=dict(initial_loss_scale=2.0**41, min_loss_scale=2.0**40),
  )
  assert message.startswith("update 11: ") and "first at update 2 " in message
  assert "loss scale 1.09951e+12" in message


def test_ten_bad_updates_that_are_not_in_a_row_are_none():
  class Comm:
    is_root, size = False, 1
    gather = staticmethod(lambda values: values)

  class Task:
    loss_scale_floor = 1.0

    class ops:
      variables = []

  guard = divergence.Guard(Task, None, None, Comm)
  report = lambda bad: {
    "skipped": bad,
    "dropped_micro_batches": 0.0,
    "loss_scale": 1.0,
    "nonfinite_variable": -1,
  }
  for step in range(1, 41):
    guard.see(None, step, 0, report(step % divergence.PATIENCE != 0))
    assert guard.bad == (step % divergence.PATIENCE != 0)
  with pytest.raises(divergence.DivergedError, match="rank 0 says more"):
    for step in range(41, 60):
      guard.see(None, step, 0, report(True))
  assert step == 50


def test_the_best_checkpoint_by_evaluation_stays(tiny_run, tmp_path):
  """Also where no checkpoint was due, and over a resume."""
  settings = dict(
    do_eval=True,
    eval_every_steps=2,
    save_checkpoints_steps=5,
    keep_checkpoints=1,
    lr_schedule="constant",
  )
  # It learns, and then is made worse by a rate that is far too high.
  runs.pretrain(tiny_run, tmp_path, num_train_steps=7, **settings)
  losses = {
    e["global_step"]: e["masked_lm_loss"] + e["next_sentence_loss"]
    for e in read_jsonl(str(tmp_path / "eval_metrics.jsonl"))
  }
  assert sorted(losses) == [0, 2, 4, 6, 7]
  runs.pretrain(
    tiny_run, tmp_path, num_train_steps=17, learning_rate=0.5, **settings
  )
  losses = {
    e["global_step"]: e["masked_lm_loss"] + e["next_sentence_loss"]
    for e in read_jsonl(str(tmp_path / "eval_metrics.jsonl"))
  }
  best = min(losses, key=losses.get)
  assert 0 < best <= 8 and losses[17] > losses[best]
  kept = sorted(p.stem for p in tmp_path.glob("model.ckpt-*.json"))
  assert kept == sorted({f"model.ckpt-{best}", "model.ckpt-17"})


def test_a_world_changes_only_when_ranks_are_elastic():
  class Comm:
    size, elastic = 4, False

    def allreduce(self, tensor, name):
      return tensor

    def hosts_changed(self):
      return False

  comm = Comm()
  verdict = train_loop.Wishes(comm).verdict
  assert verdict([0, 0, 0]) is None
  assert verdict([1, 0, 0]) == verdict([4, 4, 0]) == "stop"
  comm.elastic = True
  assert verdict([0, 0, 0]) is None
  assert verdict([1, 0, 0]) is None  # the others may be asked in a moment
  assert verdict([1, 1, 0]) == verdict([0, 0, 1]) == "change"
  assert verdict([4, 0, 0]) == verdict([4, 4, 1]) == "stop"


def test_a_rank_commits_only_with_all_others(tmp_path):
  """Else it could go on from an update that a lost rank 0 never reported."""

  class Comm(distributed.Comm):
    elastic, there = True, True

    def gather(self, values):
      if not self.there:
        raise distributed.RankLost("rank 0 was killed")
      return super().gather(values)

  comm, commit = Comm(), checkpointing.Commit()
  with tf.Graph().as_default(), tf.Session() as session:
    weight = tf.get_variable("weight", initializer=1.0)
    checkpointer = checkpointing.Checkpointer(
      str(tmp_path), comm, commit=commit
    )
    checkpointer.initialise(session, None)
    checkpointer.commit(session, 14)
    weight.load(2.0, session)
    comm.there = False
    with pytest.raises(distributed.RankLost):
      checkpointer.commit(session, 21)
  assert commit.step == 14 and commit.values["weight"] == 1.0
