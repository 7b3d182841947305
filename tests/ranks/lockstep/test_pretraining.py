"""Two ranks train as one rank does, and decide together."""

import threading
import time

import numpy as np
import pytest
import resuming
import runs
from samples import TINY, write_packed

import input_pipeline
import mixed_precision
import optimization
import run_pretraining
from common.errors import UserError
from common.tensorflow_v1 import tf
from config import stages
from config.bert_config import BertConfig
from config.exchange_config import AllreduceConfig
from config.optimizers import OptimizerConfig
from config.precision import LossScaleConfig
from config.pretraining import PretrainingConfig
from records import masking
from training import reporting
from training.signals import Budget


def pretrain(tiny, folder, comm, **changes):
  """A run of both ranks; returns its folder."""
  runs.pretrain(tiny, folder, comm, **{"num_train_steps": 6, **changes})
  comm.gather(np.zeros(1))  # rank 0 has written all
  return folder


def compare_stages(
  ranks, at_root, tiny, tmp_path, items, killed, changes=None, **settings
):
  """Stages of 7 updates on one rank; `ranks` make those after `killed` again.

  `changes` are settings of theirs alone.
  """
  settings = dict(
    num_warmup_steps=2, num_train_steps=PretrainingConfig.num_train_steps,
    stages=tuple(stages.read_item(item, "a stage") for item in items),
    save_checkpoints_steps=1, keep_checkpoints=9, **settings,
  )  # fmt: skip
  one, run = tmp_path / "one", tmp_path / "run"

  def alone():
    runs.pretrain(tiny, one, **settings)
    resuming.go_back(one, run, killed)

  at_root(alone)
  pretrain(tiny, run, ranks, **settings, **(changes or {}))
  runs.assert_same_updates(run, one, 7)


@pytest.mark.parametrize(
  "micro_batch, changes",
  [
    (6, dict(xla="layers", allreduce=AllreduceConfig(allreduce_groups=0))),
    pytest.param(12, dict(xla="step"), marks=pytest.mark.slow),
  ],
  ids=["accumulated", "grouped"],
)
def test_ranks_and_micro_batches_equal_one_big_batch(
  comm, packed_run, tmp_path, micro_batch, changes
):
  """The records hold one to three examples: ranks have other numbers of them.

  XLA and how gradients are grouped change nothing: the one rank compiled
  nothing.
  """
  tiny, one, global_batch = packed_run
  two = pretrain(
    tiny, tmp_path / "run", comm, do_eval=True, train_batch_size=micro_batch,
    global_batch_size=global_batch, **changes,
  )  # fmt: skip
  runs.assert_alike(two, one)
  # A rank alone has nobody to wait for.
  assert set(runs.metrics(one, "all_reduce_seconds")) == {0.0}
  assert min(runs.metrics(two, "all_reduce_seconds")) > 0.0


@pytest.mark.slow
def test_gradients_sent_as_float16_train_as_well(
  comm, at_root, plain, tmp_path
):
  """Moments differ by the rounding to 11 bits, and not by more."""
  one = tmp_path / "one"
  at_root(lambda: runs.pretrain(plain, one, num_train_steps=6))
  whole, half = (
    pretrain(
      plain, tmp_path / name, comm, train_batch_size=12,
      allreduce=AllreduceConfig(fp16_allreduce=name == "half"),
    )
    for name in ("whole", "half")
  )  # fmt: skip

  def moments(folder):
    found = sorted(runs.weights(folder).items())
    return np.concatenate([v.ravel() for n, v in found if n.endswith("adam_m")])

  want = moments(whole)
  error = lambda made: np.linalg.norm(made - want) / np.linalg.norm(want)
  assert error(moments(one)) < 1e-5  # another order of sums, in float32
  assert 3e-5 < error(moments(half)) < 1e-3
  np.testing.assert_allclose(runs.metrics(half), runs.metrics(whole), rtol=1e-4)
  assert set(runs.metrics(half, "loss_scale")) == {2.0**16}
  assert set(runs.metrics(whole, "loss_scale")) == {1.0}


def test_zero_shares_the_moments_out(comm, plain, whole_sizes, tmp_path):
  """Over both ranks they are whole, with zeros that fill up a group."""
  allreduce = AllreduceConfig(zero=1)
  here = runs.graph_sizes(plain, tmp_path, comm, allreduce=allreduce)
  for slot in ("/adam_m", "/adam_v"):
    held, total = (
      sum(n for name, n in sizes.items() if name.endswith(slot))
      for sizes in (here, whole_sizes)
    )
    held = comm.gather(np.array([held]))
    assert held.min() == held.max()
    zeros = held.sum() - total
    assert 0 <= zeros < comm.size * allreduce.allreduce_groups


@pytest.mark.parametrize(
  "allreduce, optimizer",
  [
    ({"zero": 1}, "adamw"),
    ({"powersgd_rank": 2}, "adamw"),
    pytest.param({}, "adamw", marks=pytest.mark.slow),
    ({}, "muon"),
    ({"zero": 1}, "muon"),
  ],
  ids=str,
)
def test_resumed_on_other_numbers_of_ranks(
  comm, at_root, plain, tmp_path, allreduce, optimizer
):
  """Averages of the weights, too."""
  optimizer = {"optimizer": optimizer}
  resuming.compare_ranks(
    comm, at_root, plain, tmp_path, allreduce, optimizer=optimizer,
    average_updates=3,
  )  # fmt: skip
  found = [runs.weights(tmp_path / folder) for folder in ("run", "one")]
  for name in found[1]:
    if name.endswith("/average"):
      pair = [values[name] for values in found]
      np.testing.assert_allclose(*pair, rtol=1e-3, atol=2e-5, err_msg=name)
  assert found[0]["averages/samples"] == found[1]["averages/samples"] == 9


@pytest.mark.parametrize(
  "sizes, killed",
  [pytest.param([10, 30], 2, marks=pytest.mark.slow), ([1, 4], 1)],
  ids=str,
)
def test_stages_with_a_batch_that_grows(
  comm, at_root, packed_run, tmp_path, sizes, killed
):
  """One rank, and two that begin in the middle of the growth.

  Of [1, 4] the second update has one record, so that a rank has none.
  """
  tiny, _, _ = packed_run
  items = (
    {"num_train_steps": 5, "global_batch_size": sizes},
    {"num_train_steps": 2, "global_batch_size": 24, "learning_rate": 2e-3},
  )
  compare_stages(
    comm, at_root, tiny, tmp_path, items, killed, objective="mlm",
    train_batch_size=6,
  )  # fmt: skip


@pytest.mark.parametrize(
  "changes",
  [{}, {"allreduce": AllreduceConfig(zero=1)}, {"tensor_parallel": 2}],
)
def test_a_model_that_grows(comm, slices, at_root, plain, tmp_path, changes):
  """Two ranks begin at the border, with the values that one rank saved."""
  keys = {**TINY, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0}
  large = dict(hidden_size=64, num_attention_heads=4, intermediate_size=128)
  small = {name: TINY[name] for name in large}
  items = (
    {**small, "num_hidden_layers": 1, "num_train_steps": 3},
    {"num_train_steps": 4},
  )
  ranks = slices if "tensor_parallel" in changes else comm
  bert = BertConfig.from_dict({**keys, **large})
  compare_stages(ranks, at_root, plain, tmp_path, items, 3, changes, bert=bert)


def test_the_time_is_rank_0s(comm, at_root, plain, tmp_path, monkeypatch):
  """Rates and masks of all ranks follow its clock alone.

  Half of the time passes in update 5, half in update 12. Rank 1 measures 7 s
  more in each.
  """

  class Clock(Budget):
    updates = 0

    def lap(self):
      if threading.current_thread() is not threading.main_thread():
        return 0.0  # masks are drawn while the update goes on
      return 7.0 * comm.rank + (30.0 if self.updates in (4, 11) else 0.0)

    def after_update(self, seconds):
      if seconds:
        time.sleep(0.5)  # what is read ahead has the time before the update
      super().after_update(seconds)
      self.updates += 1

  drawn, mask_records = [], masking.mask_records

  def draw(ids, mask, segments, keys, given, *continuation):
    drawn.append(given.masked_lm_prob[0])
    return mask_records(ids, mask, segments, keys, given, *continuation)

  monkeypatch.setattr(run_pretraining, "Budget", Clock)
  monkeypatch.setattr(masking, "mask_records", draw)
  # As many updates are read at once as by a rank alone, which has more rows.
  monkeypatch.setattr(input_pipeline, "_RECORDS_IN_TIME", 1)
  tiny = plain[0], f"{tmp_path}/data-*.tfrecord"
  settings = dict(
    max_train_minutes=1.0, num_train_steps=10_000, num_warmup_steps=0,
    global_batch_size=at_root(lambda: write_packed(tmp_path, dynamic=True)[1]),
    masks=masking.MaskConfig(masked_lm_prob=(0.4, 0.15)),
    max_predictions_per_seq=None,
  )  # fmt: skip
  one, two = tmp_path / "one", tmp_path / "two"
  at_root(lambda: runs.pretrain(tiny, one, **settings))
  drawn.clear()
  pretrain(tiny, two, comm, train_batch_size=12, **settings)
  halves = [2] * 4 + [1] * 7 + [0]
  np.testing.assert_allclose(
    runs.metrics(two, "learning_rate"),
    5e-4 * np.array(halves),
    rtol=1e-3,
    atol=1e-9,
  )
  assert drawn[0] == pytest.approx(0.4, abs=1e-3)  # of update 1
  assert drawn[-1] == pytest.approx(0.275, abs=1e-3)
  for key in ("learning_rate", "masked_lm_loss", "next_sentence_loss"):
    np.testing.assert_allclose(
      runs.metrics(two, key), runs.metrics(one, key), rtol=1e-5, err_msg=key
    )


@pytest.mark.parametrize("zero", [0, 1])
def test_ranks_go_back_together(
  comm, at_root, plain, tmp_path, monkeypatch, zero
):
  """After too many spikes, to the weights and moments that one rank takes."""
  runs.spikes_at(monkeypatch, 9, 11)
  changes = dict(
    num_train_steps=14, save_checkpoints_steps=4,
    optimizer={"spike_deviations": 6.0},
  )  # fmt: skip
  one = tmp_path / "one"
  at_root(lambda: runs.pretrain(plain, one, **changes))
  two = pretrain(
    plain, tmp_path / "two", comm, train_batch_size=12,
    allreduce=AllreduceConfig(zero=zero), **changes,
  )  # fmt: skip
  assert sum(runs.metrics(two, "skipped")) == 3
  runs.assert_same_updates(two, one, 14)


def test_ranks_that_disagree_are_named(comm):
  """As on hosts that were given different files or flags."""
  comm.check_equal("the seed", "1")
  texts = "--seed=1\n--precision=bf16\n--zero=0", "--seed=1\n--precision=fp16"
  with pytest.raises(UserError) as error:
    comm.check_equal("a flag", texts[comm.rank])
  assert str(error.value) == (
    "a flag of rank [1] differs from rank 0's: rank 0 has --precision=bf16, "
    "rank 1 has --precision=fp16; rank 0 has --zero=0, rank 1 has nothing. "
    "Give all hosts the same files and flags"
  )


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_overflow_on_one_rank_is_one_decision(comm, capfd, micro_batches):
  """Both skip (or drop the one micro-batch), and both halve the scale."""
  with tf.Graph().as_default(), tf.Session() as session:
    tf.enable_resource_variables()
    x = tf.placeholder(tf.float32, [])
    w = tf.get_variable("w", initializer=tf.constant([1.0, 2.0]))
    half = tf.cast(w, tf.float16) * tf.cast(x, tf.float16)
    total = tf.reduce_sum(tf.cast(half, tf.float32))
    scale = mixed_precision.DynamicLossScale(
      LossScaleConfig(initial_loss_scale=2.0**10)
    )
    config = OptimizerConfig()
    exchange = optimization.make_exchange(
      AllreduceConfig(), comm, scale.value, config.make(tf.constant(0.1))
    )
    ops = optimization.build_train_ops(
      tf.gradients(total * scale.value, [w]),
      {"n": tf.reduce_sum(w)},
      exchange,
      scale,
      config,
      micro_batches,
    )
    fetches = ops.fetches()
    session.run(
      [tf.global_variables_initializer(), tf.local_variables_initializer()]
    )
    made, waited = [], []
    for update in range(4):
      if comm.rank == 1 and update == 3:
        time.sleep(1.0)
      # Times the scale 2^10 this is beyond float16's 65,504, on rank 1 only.
      bad = 100.0 if comm.rank == 1 and update == 1 else 1.0
      for _ in range(micro_batches - 1):
        session.run(ops.accumulate, {x: bad})
      got = session.run(fetches, {x: bad if micro_batches == 1 else 1.0})
      reporting.tell_trouble(update + 1, got, ops.variables)
      names = ("skipped", "loss_scale", "dropped_micro_batches")
      made.append([*(float(got[n]) for n in names), *session.run(w)])
      waited.append(float(got["all_reduce_seconds"]))
  both = comm.gather(np.array(made))
  np.testing.assert_array_equal(both[0], both[1])
  # Rank 0 waits for the other, which is late to the last update.
  late = comm.gather(np.array(waited))[:, 3]
  assert late[0] > 0.7 and late[0] - late[1] > 0.5
  skipped, scales, dropped, *weights = np.array(made).T.tolist()
  weights = list(zip(*weights, strict=True))
  assert scales == [1024, 1024, 512, 512]
  if micro_batches == 1:
    assert skipped == [0, 1, 0, 0] and dropped == [0] * 4
    assert weights[0] == weights[1] != weights[2]
    told = "update 2: skipped, the gradient of w is not finite"
  else:
    assert skipped == [0] * 4 and dropped == [0, 1, 0, 0]
    assert weights[0] != weights[1] != weights[2]
    told = "update 2: 1 micro-batches dropped, the gradient of w"
  assert told in capfd.readouterr().err
