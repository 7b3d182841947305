"""Resumed equals never stopped: ways in which a run ends, and the comparison.

A way is a function (tiny_run, folder, settings, comm) that starts a training in
`folder` which ends before its last update.
"""

import os
import signal

import numpy as np
import pytest
import runs

from common.tensorflow_v1 import tf
from config.exchange_config import AllreduceConfig

WHOLE = "whole"  # the folder of the run without a stop


def killed_after(update, **changes):
  """Ends without a word after `update`, perhaps with other settings."""

  def train(tiny_run, folder, settings, comm):
    with runs.ended_after(update):
      runs.pretrain(tiny_run, folder, comm, **settings | changes)

  return train


def signalled_at(number, vote="own_stop_vote"):
  """Gets SIGTERM when it feeds its `vote` for the `number`-th time."""

  def train(tiny_run, folder, settings, comm):
    result = run_with_signal(number, vote, tiny_run, folder, comm, **settings)
    assert result["training"]["stopped"]

  return train


def ended_at(update, **changes):
  """Was to make only so many updates, perhaps with other settings."""

  def train(tiny_run, folder, settings, comm):
    shorter = settings | {"num_train_steps": update} | changes
    runs.pretrain(tiny_run, folder, comm, **shorter)

  return train


def lost_after(update):
  """Ended well, as the `compare`d run did, then lost later checkpoints."""

  def train(tiny_run, folder, settings, comm):
    del tiny_run, settings, comm
    go_back(folder.parent / WHOLE, folder, update)

  return train


def go_back(whole, folder, update):
  """Makes `folder` of a complete run as if later checkpoints had been lost."""
  runs.copy_run(whole, folder)
  for path in folder.glob("model.ckpt-*"):
    if int(path.name.partition("-")[2].partition(".")[0]) > update:
      path.unlink()


def run_with_signal(number, vote, tiny_run, folder, comm=None, **settings):
  """The result of a run that gets SIGTERM as in `signalled_at`."""
  fed = []
  original = tf.Session.run

  def run(session, fetches, feeds=None, *more):
    if feeds and any(vote in str(key) for key in feeds):
      fed.append(session)
      if len(fed) == number:
        os.kill(os.getpid(), signal.SIGTERM)
    return original(session, fetches, feeds, *more)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tf.Session, "run", run)
    return runs.pretrain(tiny_run, folder, comm, **settings)


def compare(
  tiny_run, tmp_path, ways, last=None, comm=None, keys=("loss",), **settings
):
  """Trains without a stop, and in `ways` one after the other; compares.

  All reports' `keys` and all of the newest checkpoint are equal to the bit. The
  start that ends the run has the other settings `last`, if any: then they are
  equal but for rounding. Returns both folders.
  """
  whole, parts = tmp_path / WHOLE, tmp_path / "parts"
  runs.pretrain(tiny_run, whole, comm, **settings)
  for way in ways:
    way(tiny_run, parts, settings, comm)
  runs.pretrain(tiny_run, parts, comm, **settings | (last or {}))
  reports = [
    {key: runs.metrics(folder, key) for key in ("global_step", *keys)}
    for folder in (parts, whole)
  ]
  weights = [runs.weights(folder) for folder in (parts, whole)]
  if last is None:
    assert reports[0] == reports[1]
    runs.assert_equal(*weights)
  else:
    close = dict(rtol=1e-4, atol=1e-6)
    for got, want in (reports, weights):
      assert got.keys() == want.keys()
      for name, value in want.items():
        np.testing.assert_allclose(got[name], value, **close, err_msg=name)
  return whole, parts


def compare_ranks(comm, at_root, tiny_run, tmp_path, allreduce, **changes):
  """Resumed on 1, all and 1 ranks in turn: the batches of one, in its order.

  Also with what each rank has of its own: PowerSGD's errors, ZeRO's moments.
  A sampled softmax has the same sample everywhere. The last evaluation has
  three batches of a record: one rank of two has two of them.
  """
  settings = dict(
    lr_schedule="constant",
    num_warmup_steps=2,
    global_batch_size=19,  # ranks have equally many rows, some of them empty
    sampled_softmax=40,
    allreduce=AllreduceConfig(**allreduce),
    save_checkpoints_steps=3,
    **changes,
  )
  one, run = tmp_path / "one", tmp_path / "run"

  def alone(folder):
    runs.pretrain(tiny_run, folder, num_train_steps=9, **settings)

  at_root(lambda: (alone(one), go_back(one, run, 3)))
  runs.pretrain(
    tiny_run, run, comm, num_train_steps=6, do_eval=True, max_eval_steps=3,
    eval_batch_size=1, train_batch_size=-(-19 // comm.size), **settings,
  )  # fmt: skip
  comm.gather(np.zeros(1))  # rank 0 has written all
  assert runs.read_json(run, "eval_results.json")["examples"] == 3
  at_root(lambda: alone(run))
  starts = runs.read_json(run, "run.json")["runs"]
  assert [start["plan"]["ranks"] for start in starts] == [1, comm.size, 1]
  runs.assert_same_updates(run, one, 9)
