"""Checkpoint files: whole or not there, whatever happens meanwhile."""

import contextlib
import json
import os
import re
import threading

import numpy as np
import pytest
import runs

from checkpoints import checkpoint_files, checkpoint_weights, checkpointing
from checkpoints import snapshot as snapshots
from checkpoints.checkpoint_files import CheckpointError, CheckpointFiles
from checkpoints.snapshot import Snapshot
from common.errors import UserError
from common.tensorflow_v1 import tf
from gradients import distributed
from interop import model_source
from training import evaluation

VALUES = {
  "a/kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
  "global_step": np.int64(7),
}


def write(files, step):
  files.write(step, {**VALUES, "global_step": np.int64(step)})
  files.wait()


@contextlib.contextmanager
def run_in(folder, comm=None, snapshot=None, weight=1.0, **more):
  """(session, Checkpointer) of a graph with the variable `weight`."""
  with tf.Graph().as_default(), tf.Session() as session:
    tf.get_variable("weight", initializer=weight)
    checkpointer = checkpointing.Checkpointer(
      str(folder), comm or distributed.Comm(), snapshot=snapshot, **more
    )
    checkpointer.restore.initialise(session, None)
    yield session, checkpointer


def test_what_is_written_is_a_tensorflow_checkpoint(tmp_path):
  files = CheckpointFiles(str(tmp_path), keep=2)
  write(files, 7)
  assert files.steps() == [7] and files.failure() is None
  files.check(7)
  assert tf.train.latest_checkpoint(str(tmp_path)) == files.prefix(7)
  reader = tf.train.load_checkpoint(str(tmp_path))
  shapes = {"a/kernel": [3, 4], "global_step": []}
  assert reader.get_variable_to_shape_map() == shapes
  np.testing.assert_array_equal(
    reader.get_tensor("a/kernel"), VALUES["a/kernel"]
  )
  endings = (".data-00000-of-00001", ".index", ".json")
  names = ["checkpoint", *(f"model.ckpt-7{ending}" for ending in endings)]
  assert sorted(os.listdir(tmp_path)) == names
  assert runs.read_json(tmp_path, "model.ckpt-7.json")["global_step"] == 7


def test_the_newest_and_the_protected_are_kept(tmp_path):
  files = CheckpointFiles(str(tmp_path), keep=2)
  write(files, 1)
  files.protected = 1
  for step in (2, 3, 4):
    write(files, step)
  assert files.steps() == [4, 3, 1]
  files.protected = 3
  write(files, 5)
  assert files.steps() == [5, 4, 3]
  assert len(os.listdir(tmp_path)) == 1 + 3 * 3


@pytest.mark.parametrize("name", [".", "model.ckpt-1"])
def test_a_chosen_checkpoint_is_read_after_its_run_removed_it(tmp_path, name):
  files = CheckpointFiles(str(tmp_path), keep=1)
  write(files, 1)
  chosen = model_source.locate(os.path.normpath(tmp_path / name)).path
  assert checkpoint_files.hold(chosen)
  write(files, 2)
  assert files.steps() == [2] and chosen == files.prefix(1)
  checkpoint = checkpoint_weights.open_checkpoint(chosen)
  assert checkpoint["global_step"] == 1
  np.testing.assert_array_equal(checkpoint["a/kernel"], VALUES["a/kernel"])
  with pytest.raises(CheckpointError, match="no readable checkpoint"):
    checkpoint_weights.open_checkpoint(chosen)
  # What is written there later is what is chosen then.
  for step in (2, 3):
    files.write(2, {**VALUES, "global_step": np.int64(step)})
    files.wait()
    assert checkpoint_files.hold(files.prefix(2))
  assert checkpoint_weights.open_checkpoint(files.prefix(2))["global_step"] == 3


def test_at_every_moment_there_is_a_whole_one(tmp_path, monkeypatch):
  """Stopped at each rename and removal of the second and third save."""
  calls = 0
  originals = {name: getattr(os, name) for name in ("replace", "unlink")}

  def stepping(name):
    def call(*arguments):
      nonlocal calls
      seen = CheckpointFiles(str(tmp_path), 1)
      seen.check(seen.steps()[0])
      calls += 1
      return originals[name](*arguments)

    return call

  files = CheckpointFiles(str(tmp_path), keep=1)
  write(files, 1)
  for name in originals:
    monkeypatch.setattr(checkpoint_files.os, name, stepping(name))
  write(files, 2)
  write(files, 3)
  assert files.failure() is None
  assert calls >= 12  # three renames and three removals each
  assert files.steps() == [3]


FULL = OSError(28, "No space left on device")


def raising(error):
  """A function that raises the error, for any arguments."""

  def call(*_, **__):
    raise error

  return call


@pytest.mark.parametrize("error", [FULL, MemoryError("No space left")])
@pytest.mark.parametrize("name", ["replace", "fsync", "makedirs", "writer"])
def test_a_failure_is_told_and_the_one_before_stays(
  tmp_path, monkeypatch, name, error
):
  """Any error, not only the disk's: the run goes on and tries again."""
  target = (checkpoint_files.os, name)
  if name == "writer":
    target = (checkpoint_files._Writer, "__call__")
  files = CheckpointFiles(str(tmp_path), keep=1)
  write(files, 1)
  with monkeypatch.context() as patch:
    patch.setattr(*target, raising(error))
    write(files, 2)
  assert "model.ckpt-2 could not be written" in (failure := files.failure())
  assert "No space left" in failure
  assert files.failure() is None and not files.retry_is_due()
  assert files.steps() == [1] and not (tmp_path / ".saving").exists()
  files.check(1)
  monkeypatch.setattr(checkpoint_files, "RETRY_SECONDS", -1)
  with monkeypatch.context() as patch:
    patch.setattr(*target, raising(error))
    write(files, 3)
  assert files.retry_is_due()
  write(files, 4)
  assert files.steps() == [4] and not files.retry_is_due()


def test_a_full_disk(tmp_path):
  """TensorFlow's own writing fails: files may not grow beyond 100 kB."""
  files = CheckpointFiles(str(tmp_path), keep=1)
  files.write(1, {"a": np.zeros(10, np.float32)})
  files.wait()
  large = {"a": np.zeros(100_000, np.float32)}
  with runs.small_files(100_000):
    files.write(2, large)
    files.wait()
  failure = files.failure()
  assert "model.ckpt-2 could not be written (" in failure
  assert "File too large" in failure and "the one before stays" in failure
  assert files.steps() == [1]
  files.write(3, large)
  files.wait()
  assert files.steps() == [3] and files.failure() is None


@pytest.fixture
def disk(monkeypatch):
  """An event that lets checkpoints be written."""
  ready, write_files = threading.Event(), checkpoint_files._Writer.__call__

  def slow(*arguments):
    assert ready.wait(runs.HANG_SECONDS), "something waits for the disk"
    write_files(*arguments)

  monkeypatch.setattr(checkpoint_files._Writer, "__call__", slow)
  return ready


def test_a_slow_disk_is_no_rank_that_hangs(tmp_path, monkeypatch, capfd, disk):
  """A write that outlasts the watchdog's patience, before each next save."""

  class Two(distributed.Comm):
    size = 2

    def gather(self, values):
      return np.stack([values, np.ones_like(values)])

  beats = []

  def heartbeat():
    beats.append(1)
    if len(beats) % 3 == 0:
      disk.set()

  slow = checkpoint_files._Writer.__call__

  def once(*arguments):
    slow(*arguments)
    disk.clear()

  monkeypatch.setattr(checkpoint_files._Writer, "__call__", once)
  monkeypatch.setattr(checkpointing, "_READY_SECONDS", 0.01)
  monkeypatch.setattr(checkpointing, "_TELL_SECONDS", 0.0)
  with run_in(tmp_path, Two(), heartbeat=heartbeat) as (session, checkpointer):
    checkpointer.save(session, 1)
    assert not checkpointer.is_ready()
    checkpointer.save(session, 2)
    checkpointer.finish()
  assert len(beats) >= 6
  assert CheckpointFiles(str(tmp_path), 5).steps() == [2, 1]
  told = capfd.readouterr().err
  assert f"waiting for the disk: {tmp_path} takes a checkpoint" in told


class Elastic(distributed.Comm):
  elastic = True


def test_an_elastic_commit_does_not_wait_for_a_slow_disk(tmp_path, disk):
  """The second one after a save needs the memory that is being written."""
  snapshot = Snapshot()
  with run_in(tmp_path, Elastic(), snapshot) as (session, checkpointer):
    checkpointer.save(session, 1)
    for step in (2, 3, 4):
      checkpointer.commit(session, step, if_idle=True)
    assert snapshot.step == 2
    disk.set()
    checkpointer.wait()
    checkpointer.commit(session, 5, if_idle=True)
    assert snapshot.step == 5


def test_an_elastic_world_ends_while_the_disk_is_slow(
  tmp_path, disk, monkeypatch
):
  """The next one neither disturbs the write nor the memory it is made from."""
  monkeypatch.setattr(checkpointing, "_LEAVE_SECONDS", 0.01)
  snapshot = Snapshot()
  with run_in(tmp_path, Elastic(), snapshot, 1.0) as (session, checkpointer):
    checkpointer.save(session, 1)
    checkpointer.close()
  with run_in(tmp_path, Elastic(), snapshot, 2.0) as (session, checkpointer):
    for step in (2, 3):
      checkpointer.commit(session, step, if_idle=True)
    assert snapshot.step == 2
    disk.set()
    checkpointer.save(session, 4)
    checkpointer.finish()
  for step, weight in ((1, 1.0), (4, 2.0)):
    saved = checkpoint_files.Checkpoint(f"{tmp_path}/model.ckpt-{step}")
    assert saved["weight"] == weight


def test_a_last_save_that_fails_at_once_is_an_error(tmp_path, monkeypatch):
  """Also where the failure was reported as one that is tried again."""
  with run_in(tmp_path) as (session, checkpointer):
    checkpointer.save(session, 1)
    checkpointer.finish()
    monkeypatch.setattr(checkpoint_files._Writer, "__call__", raising(FULL))
    checkpointer.save(session, 2)
    checkpointer.wait()
    checkpointer.report_failed_save(2)
    words = "ckpt-2 could not be written. Th"
    with pytest.raises(CheckpointError, match=words):
      checkpointer.finish()
    checkpointer.save(session, 2)
    checkpointer.wait()
    monkeypatch.undo()
    checkpointer.save(session, 3)
    checkpointer.finish()  # a later one is whole


def test_a_host_without_memory_for_the_copy_is_one_line(tmp_path, monkeypatch):
  full = raising(MemoryError("Unable to allocate"))
  monkeypatch.setattr(snapshots, "_aligned", full)
  with run_in(tmp_path) as (session, checkpointer):
    with pytest.raises((tf.errors.OpError, MemoryError)) as raised:
      checkpointer.save(session, 1)
  said = str(evaluation.clear_error(raised.value))
  assert re.fullmatch(
    r"out of memory \(.*the copy of all variables that a save writes: Unable "
    r"to allocate\): lower --train_batch_size.*",
    said,
  )


def test_what_another_world_left_in_memory_is_not_on_the_disk(tmp_path):
  """So it is saved at the end, and where a run falls back to it."""
  snapshot = Snapshot()
  with run_in(tmp_path, Elastic(), snapshot) as (session, first):
    first.start(0)
    first.save(session, 1)
    first.commit(session, 2)
    first.wait()
    second = checkpointing.Checkpointer(
      str(tmp_path), Elastic(), snapshot=snapshot
    )
    second.start(2)
    assert second.saved == 1
    assert second.save_commit() == 2
    second.finish()
    assert CheckpointFiles(str(tmp_path), 5).steps() == [2, 1]


def test_markers_that_are_none(tmp_path):
  files = CheckpointFiles(str(tmp_path), keep=1)
  write(files, 1)
  marker = tmp_path / "model.ckpt-1.json"
  for content in ("", "[]", "{}", '{"files": 3}', '{"files": {"x": 1}}'):
    marker.write_text(content)
    with pytest.raises(UserError, match="model.ckpt-1.json: damaged: "):
      files.check(1)


# (labels there by task.json, rows there, labels here, taken, words said)
HEADS = [
  (["a", "b"], 2, ["a", "b"], True, None),
  (["b", "a"], 2, ["a", "b"], False, "are a,b here, b,a there: it is new"),
  (["no", "yes"], 2, ["0", "1"], False, "are 0,1 here, no,yes there: it is"),
  (["a", "b"], 2, ["a", "c"], False, "are a,c here, a,b there: it is new"),
  (["a", "b", "c"], 3, ["a", "b"], False, "here, a,b,c there: it is new"),
  (None, 2, ["a", "b"], True, "are a,b here, .* there: it is taken in this"),
  (None, 3, ["a", "b"], False, r"\(not given\) there: it is new"),
  ([], 1, ["a", "b"], False, r"are a,b here, \(empty\) there: it is new"),
  (None, 1, [], True, None),  # a regression
  ([], 1, [], True, None),
  (["a", "b"], 2, [], False, None),  # of other shapes
  (["a", "b"], 2, None, True, None),  # a task that names no labels
]


@pytest.mark.parametrize("there, rows, labels, taken, words", HEADS)
def test_a_classifiers_rows_are_taken_by_their_labels(
  tmp_path, there, rows, labels, taken, words
):
  sevens = lambda *shape: np.full(shape, 7.0, np.float32)
  prefix = str(tmp_path / "x.ckpt")
  checkpoint_files.write_weights(
    prefix,
    {
      "bert/kernel": sevens(2),
      "output_weights": sevens(rows, 3),
      "output_bias": sevens(rows),
    },
  )
  if there is not None:
    (tmp_path / "task.json").write_text(json.dumps({"labels": there}))
  here = 2 if labels is None else len(labels) or 1
  with tf.Graph().as_default(), tf.Session() as session:
    zeros = tf.zeros_initializer()
    kernel = tf.get_variable("bert/kernel", [2], initializer=zeros)
    head = [
      tf.get_variable("output_weights", [here, 3], initializer=zeros),
      tf.get_variable("output_bias", [here], initializer=zeros),
    ]
    made = checkpointing.Checkpointer(str(tmp_path / "new"), distributed.Comm())
    report = made.restore.initialise(session, prefix, labels=labels)
    assert (session.run(kernel) == 7.0).all()
    for value in session.run(head):
      assert (value == (7.0 if taken else 0.0)).all()
  said = [line for line in report.lines() if "the classifier" in line]
  assert len(said) == (words is not None)
  assert words is None or re.search(words, said[0])
