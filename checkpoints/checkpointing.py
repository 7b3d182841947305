"""Checkpoints of a run: their content, and saving and keeping them.

A checkpoint holds all global variables: weights and optimizer slots under
google/bert's names, `global_step`, and the `TrainingState`. Other hosts may not
see the files: rank 0 reads and writes them, and broadcasts their values.
"""

import time
from collections.abc import Callable

import numpy as np

from checkpoints.checkpoint_files import CheckpointError, CheckpointFiles
from checkpoints.restore import Restore
from checkpoints.snapshot import SavedVariables, Snapshot
from common.console import tell
from common.tensorflow_v1 import OPTIONAL_VARIABLES, tf
from config.training_plan import SAVED_OF_STAGE
from gradients import sharded_variables
from records import record_order

_READY_SECONDS = 5.0
# Of an elastic world's end: horovodrun ends ranks that others await for 30 s.
_LEAVE_SECONDS = 10.0
_TELL_SECONDS = 30.0

_NO_ORDER = record_order.Order(count=0, seed=0)  # of batches from elsewhere


class TrainingState:
  """Variables from which a run resumes with exactly the next batch."""

  def __init__(
    self,
    order: record_order.Order = _NO_ORDER,
    has_budget: bool = False,
    has_stages: bool = False,
  ):

    def make(name, value, dtype=tf.int64):
      initial = tf.constant(value, dtype)
      return tf.get_variable(name, initializer=initial, trainable=False)

    with tf.variable_scope("training_state"):
      self.records_seen = make("samples_seen", 0)
      # Updates of --init_checkpoint: the schedule counts them, too.
      self.schedule_start = make("schedule_start", 0)
      self._data = [  # decide the order of records
        make("data_records", order.count),
        make("data_seed", order.seed),
        make("data_block", order.block),
      ]
      # With --stages: what `training_plan.Stage` has of the same names.
      zeros = [0] * len(SAVED_OF_STAGE)
      self.stage = make("stage", zeros) if has_stages else None
      # With --max_train_minutes: how long the run has trained.
      self.seconds = make("seconds", 0.0, tf.float64) if has_budget else None
      if has_budget:
        tf.add_to_collection(OPTIONAL_VARIABLES, self.seconds)
    self.order = order

  def begin_stage(self, session: tf.Session, stage) -> bool:
    """Whether `stage`, a `training_plan.Stage`, is new; then it begins."""
    here = [getattr(stage, name) for name in SAVED_OF_STAGE]
    if self.stage is None or session.run(self.stage)[0] == here[0]:
      return False
    self.stage.load(here, session)
    self.records_seen.load(stage.first_record, session)
    order = (self.order.count, self.order.seed, self.order.block)
    for variable, value in zip(self._data, order, strict=True):
      variable.load(value, session)
    return True

  def orders(self, session: tf.Session) -> tuple:
    """The checkpoint's `record_order.Order`, and this run's."""
    return record_order.Order(*session.run(self._data)), self.order


class Checkpointer:
  """One run's checkpoints in memory (`commit`) and on the disk (`save`).

  When to save is the caller's decision. All methods that take a session or
  `wait` are called on all ranks.
  """

  def __init__(
    self,
    output_dir: str,
    comm,
    keep: int = 5,
    snapshot: Snapshot | None = None,
    heartbeat: Callable[[], None] = lambda: None,
  ):
    """The graph must be complete; `snapshot` is an elastic run's."""
    self._comm, self._heartbeat = comm, heartbeat
    self._snapshot = snapshot or Snapshot(copies=1)
    # An earlier world's, which may still be writing.
    self.files = self._snapshot.files or CheckpointFiles(output_dir, keep)
    self._snapshot.files = self.files
    self._elastic = snapshot is not None
    self._keeps = comm.is_root or self._elastic
    sharded_variables.add_sliced(comm)
    self.variables = SavedVariables(self._snapshot, self._keeps)
    self.restore = Restore(self.files, self.variables, comm, snapshot)
    self._add_up = sharded_variables.add_up(comm)
    self._patience = _READY_SECONDS
    self.saved = 0  # the last update that is saved or being saved
    self.stalls: list[float] = []  # seconds that each save held the caller up

  def start(self, step: int) -> None:
    """Training starts after update `step`; on all ranks."""
    if self._comm.is_root and step not in self.files.steps():
      # Another world left `step` in memory, or another folder on the disk.
      step = next(iter(self.files.steps()), 0)
    self.saved = self._comm.from_root(step)

  def commit(
    self, session: tf.Session, step: int, if_idle: bool = False
  ) -> None:
    """Copies all variables; `if_idle`: not while their memory is written."""
    if self._elastic:
      # All ranks commit, or none. They wait for each other, so rank 0 has
      # reported all updates up to here: the next world does not repeat them.
      is_free = True
      if self._keeps and self._snapshot.next_values() is self.files.written:
        is_free = self.files.wait(0)
      if not self._comm.gather(np.array([is_free])).all():
        if if_idle:
          return
        self.wait()
    if not if_idle:  # as a resumed run has them; else each rank has its own
      session.run(self._add_up)
    for copy in self.variables.copies:
      session.run(copy)
      self._heartbeat()  # TensorFlow prepares each the first time, for a second
    if self._keeps:
      self._snapshot.finish(step)

  def save(self, session: tf.Session, step: int) -> None:
    """Commits, and begins to write that on rank 0."""
    self.saved, began = step, time.monotonic()
    self.wait()
    self.commit(session, step)
    if self._comm.is_root:
      self.files.write(step, self._snapshot.values)
      self.stalls.append(time.monotonic() - began)
    self._patience = _READY_SECONDS

  def save_commit(self) -> int:
    """Rank 0 begins to write what is committed; returns the newest update."""
    # There may be no next world, which would have it in memory.
    committed = self.restore.committed()
    if not committed:
      return self.saved
    if self._comm.is_root and committed.step not in self.files.steps()[:1]:
      self.files.write(committed.step, committed.values)
    return max(self.saved, committed.step)

  def is_ready(self) -> bool:
    """Whether all ranks could save now; the first call after a save waits."""
    patience, self._patience = self._patience, 0.0
    return self._is_idle(patience)

  def _is_idle(self, seconds: float) -> bool:
    """Whether nothing is being written within `seconds`; on all ranks."""
    idle = self._comm.from_root(self.files.wait(seconds))
    self._heartbeat()
    return idle

  def wait(self) -> None:
    """Waits until rank 0 has written; that may take minutes."""
    began = reported = time.monotonic()
    while not self._is_idle(_READY_SECONDS):
      now = time.monotonic()
      if self._comm.is_root and now - reported >= _TELL_SECONDS:
        tell(
          f"waiting for the disk: {self.files.folder} takes a checkpoint, "
          f"{now - began:.0f} s so far"
        )
        reported = now

  def report_failed_save(self, step: int) -> None:
    """Reports a checkpoint that could not be written, and tries again."""
    failure = self.files.failure()
    if failure:
      tell(f"update {step}: {failure}; training continues and tries again")
    if self.files.retry_is_due():
      self.files.write(self._snapshot.step, self._snapshot.values)

  def close(self) -> None:
    """Waits for the disk; where another world may follow, not for long."""
    self.files.wait(_LEAVE_SECONDS if self._elastic else None)

  def finish(self) -> None:
    """Waits, on all ranks; raises `CheckpointError` if the save failed."""
    self.wait()
    failure = self.files.failure()
    if not failure and self.saved and self.saved not in self.files.steps():
      failure = f"{self.files.prefix(self.saved)} could not be written"
    if self._comm.from_root(failure is not None):
      raise CheckpointError(
        f"{failure}. Then the same command goes on from what was saved before"
        if self._comm.is_root
        else "rank 0 could not save, its last line says why"
      )
