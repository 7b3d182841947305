"""Checkpoints: initialise from one with a strict report, save, resume.

A checkpoint holds all global variables: weights and optimizer slots under
google/bert's names, `global_step`, and what `TrainingState` adds. Only rank 0
reads and writes files (the other hosts may not see them); the others get its
values by broadcast.
"""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from common.tensorflow_v1 import tf
from data import record_order
from gradients import moments, power_sgd
from training import checkpoint_files, training_hooks
from training.checkpoint_files import CheckpointError

# What earlier checkpoints lack, and the value that they stand for.
_ADDED = {"training_state/data_block": 0, "skipped_updates": 0}


def _may_begin(name: str) -> bool:
  """Whether a run may begin to have this variable: with --powersgd_rank."""
  return name.endswith((f"/{power_sgd.ERROR}", f"/{power_sgd.BASIS}"))


# The graph's collection of `SharedOut`s.
SHARED_OUT = "shared_out"


class SharedOut(NamedTuple):
  """Tensors of a checkpoint of which each rank has a part, as a variable.

  All ranks run `whole` or `load` together.
  """

  part: tf.Variable
  whole: dict  # name -> tensor, as checkpoints have them; of all parts
  fed: dict  # name -> placeholder of such a tensor; rank 0's count
  load: tf.Operation  # gives `part` its part of what is fed


class Commit:
  """The values of all variables at one update, in memory that is there already.

  To get memory from the system takes ten times as long as to copy into it, so
  it is taken once, beside the first updates. In an elastic run each rank has
  one, to which all go back when a rank is lost.

  Attributes:
    step: updates up to it.
    values: of all variables by name; None before there is one. Not to be used
      across the next `begin` with one copy, the one after it with two.
  """

  def __init__(self, copies: int = 2):
    """With 2 copies `values` stay whole while the next ones are taken."""
    self.step, self.values = 0, None
    self._copies, self._sets = copies, []
    self._thread: threading.Thread | None = None

  def prepare(self, tensors: dict) -> None:
    """Begins to get the memory for `tensors`, by name, if not done yet."""
    if self._thread is None:
      shapes = {
        name: (tensor.shape.as_list(), tensor.dtype.as_numpy_dtype)
        for name, tensor in tensors.items()
      }
      self._thread = threading.Thread(
        target=self._allocate, args=(shapes,), daemon=True
      )
      self._thread.start()

  def _allocate(self, shapes: dict) -> None:
    for _ in range(self._copies):
      arrays = {name: _aligned(*shape) for name, shape in shapes.items()}
      self._sets.append(arrays)

  def begin(self) -> dict:
    """The arrays, by name, to put the next values into; then `finish` it."""
    self._thread.join()
    return self._sets[0]

  def finish(self, step: int) -> None:
    """What `begin` gave holds the values after this update."""
    self.step, self.values = step, self._sets[0]
    self._sets.append(self._sets.pop(0))


def _aligned(shape: list, dtype) -> np.ndarray:
  """An array of zeros that TensorFlow reads where it is, without a copy."""
  size = int(np.prod(shape)) * np.dtype(dtype).itemsize
  memory = np.empty(size + _ALIGNMENT, np.uint8)
  memory.fill(0)  # only now there is memory behind it
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + size].view(dtype).reshape(shape)


_ALIGNMENT = 64  # bytes
_READY_SECONDS = 5.0
_TELL_SECONDS = 30.0

_NO_ORDER = record_order.Order(count=0, seed=0)  # of batches from elsewhere


class TrainingState:
  """What a checkpoint must hold to go on with exactly the next batch.

  int64 variables: `samples_seen`, the position in the stream of records;
  `data_seed`, `data_records` and `data_block`, which decide the stream's order;
  `schedule_start`, the updates that the learning rate's schedule counts beside
  this run's own.

  Attributes:
    order: the `record_order.Order` of this run.
  """

  def __init__(self, order: record_order.Order = _NO_ORDER):
    """Makes the variables; a new run's stream is in `order`."""

    def make(name, value):
      return tf.get_variable(
        name,
        shape=[],
        dtype=tf.int64,
        trainable=False,
        initializer=tf.constant_initializer(value, dtype=tf.int64),
      )

    with tf.variable_scope("training_state"):
      self.samples_seen = make("samples_seen", 0)
      self.schedule_start = make("schedule_start", 0)
      self._data = [
        make("data_records", order.count),
        make("data_seed", order.seed),
        make("data_block", order.block),
      ]
    self.order = order

  def orders(self, session: tf.Session) -> tuple:
    """The `record_order.Order` of the checkpoint, and that of this run."""
    return record_order.Order(*session.run(self._data)), self.order


def _shapes(variables) -> dict:
  return {v.op.name: v.shape.as_list() for v in variables}


def _check_shapes(path: str, wanted: dict, shapes: dict) -> None:
  wrong = [
    f"{name} is {shapes[name]} there, {shape} here"
    for name, shape in wanted.items()
    if name in shapes and shape != shapes[name]
  ]
  if wrong:
    why = "another BERT config"
    if all(item.split(" ", 1)[0].endswith(power_sgd.BASIS) for item in wrong):
      why = "another --powersgd_rank"
    raise CheckpointError(
      f"{path}: made with {why}: {'; '.join(wrong[:3])}"
      + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    )


def _restore(saver: tf.train.Saver, session: tf.Session, path: str) -> None:
  try:
    saver.restore(session, path)
  except tf.errors.OpError as e:
    reason = e.message.splitlines()[0]
    raise CheckpointError(
      f"{path}: damaged ({reason}). Delete its files to use the one before"
    ) from e


def _check_finite(session: tf.Session, path: str, variables) -> None:
  """Raises `CheckpointError` for weights that no training could go on from."""
  finite = session.run(
    {
      v.op.name: tf.reduce_all(tf.math.is_finite(v))
      for v in variables
      if v.dtype.is_floating
    }
  )
  wrong = [name for name, is_finite in finite.items() if not is_finite]
  if wrong:
    raise CheckpointError(
      f"{path}: {wrong[0]} holds values that are not finite (of "
      f"{len(wrong)} variables): use an earlier checkpoint"
    )


def _read_finite(reader, path: str, name: str) -> np.ndarray:
  """A tensor of a checkpoint, with _check_finite's error."""
  try:
    value = reader.get_tensor(name)
  except (tf.errors.OpError, ValueError) as e:
    raise CheckpointError(
      f"{path}: damaged ({name}: {str(e).splitlines()[0]}). Delete its files "
      "to use the one before"
    ) from e
  if not np.isfinite(value).all():
    raise CheckpointError(
      f"{path}: {name} holds values that are not finite: use an earlier "
      "checkpoint"
    )
  return value


@dataclasses.dataclass(frozen=True)
class InitReport:
  """What `--init_checkpoint` gave; lists of variable names."""

  path: str
  loaded: list
  missing: list  # trained variables that the checkpoint lacks
  unused: list  # the checkpoint's other variables

  def lines(self) -> list[str]:
    """The report as a person reads it; nothing is left out silently."""

    def listed(names):
      return f"{len(names)}" + ("".join(f"\n    {n}" for n in names))

    # A training's checkpoint has two slots for each weight, used or not.
    kinds = (*moments.SLOTS, power_sgd.ERROR, power_sgd.BASIS)
    slots = [n for n in self.unused if n.endswith(kinds)]
    others = [n for n in self.unused if n not in slots]
    return [
      f"initialised from {self.path}",
      f"  loaded: {len(self.loaded)}",
      f"  missing there, so initialised at random: {listed(self.missing)}",
      f"  unused: {listed(others)}",
      *([f"  and {len(slots)} slots of an optimizer"] if slots else []),
    ]


def _schedule_position(path: str) -> int:
  """The update that a checkpoint's schedule was at.

  Raises:
    CheckpointError: the checkpoint does not count updates.
  """
  reader = tf.train.load_checkpoint(path)
  if not reader.has_tensor("global_step"):
    raise CheckpointError(
      f"{path}: has no global_step from which the learning rate's schedule "
      "could go on: leave out --norewarmup"
    )
  start = "training_state/schedule_start"
  try:
    before = reader.get_tensor(start) if reader.has_tensor(start) else 0
    position = np.asarray(reader.get_tensor("global_step") + before)
  except (tf.errors.OpError, ValueError) as e:  # ValueError: of other shapes
    raise CheckpointError(
      f"{path}: damaged ({str(e).splitlines()[0]}): leave out --norewarmup"
    ) from e
  if position.shape or position.dtype.kind != "i" or position < 0:
    raise CheckpointError(
      f"{path}: its global_step is {position}, no number of updates: leave out "
      "--norewarmup"
    )
  return int(position)


def restore_all(session: tf.Session, path: str, variables) -> None:
  """Gives all of `variables` their values in a checkpoint.

  Raises:
    CheckpointError: it cannot be read, lacks one, has other shapes, or values
      that are not finite.
  """
  shapes = checkpoint_files.open_reader(path).get_variable_to_shape_map()
  _check_shapes(path, _shapes(variables), shapes)
  missing = sorted({v.op.name for v in variables} - shapes.keys())
  if missing:
    raise CheckpointError(
      f"{path}: lacks {missing[0]} (of {len(missing)} variables): made with "
      "another BERT config, or not whole"
    )
  _restore(tf.train.Saver(variables), session, path)
  _check_finite(session, path, variables)


class Checkpointer:
  """Initialises, resumes and saves one run's variables.

  Make it after the training graph is complete: it saves all global variables.
  """

  def __init__(
    self,
    output_dir: str,
    comm,
    keep: int = 5,
    commit: Commit | None = None,
    moved: Callable[[], None] = lambda: None,
  ):
    """Prepares to save the graph's variables.

    Args:
      output_dir: the run's folder.
      comm: a `distributed.Comm`.
      keep: how many of the newest checkpoints are kept.
      commit: that of an elastic run, which outlives this object.
      moved: is called again and again while all ranks wait for the disk.
    """
    self._moved, self._patience = moved, _READY_SECONDS
    self._files = checkpoint_files.CheckpointFiles(output_dir, keep)
    self._comm, self._elastic = comm, commit is not None
    self._commit = commit or Commit(copies=1)
    self._written = None  # what was last given to be written
    self._shared = tf.get_collection(SHARED_OUT)
    parts = {shared.part.op.name for shared in self._shared}
    self._variables = [
      v for v in tf.global_variables() if v.op.name not in parts
    ]
    self._values = {v.op.name: tf.convert_to_tensor(v) for v in self._variables}
    saved = [self._values, *(shared.whole for shared in self._shared)]
    self._keeps = comm.is_root or self._elastic
    self._copies = [self._copy(values) for values in saved]
    if self._keeps:
      self._commit.prepare(
        {n: t for values in saved for n, t in values.items()}
      )
    self._saver = tf.train.Saver(self._variables)
    self._initializer = tf.group(
      tf.global_variables_initializer(), tf.local_variables_initializer()
    )
    self._shapes = _shapes(self._variables) | {
      name: tensor.shape.as_list()
      for shared in self._shared
      for name, tensor in shared.whole.items()
    }
    self._errors = tf.get_collection(power_sgd.ERRORS)
    self._broadcast = power_sgd.broadcast_op(self._variables, comm)
    self._add_up_errors = power_sgd.add_up(self._errors, comm)
    self.saved = 0  # the last update that is saved, or being saved; 0: none
    self.stalls: list[float] = []  # seconds for which saving held the caller

  def start(self, step: int) -> None:
    """Takes note, on all ranks, that training starts after update `step`.

    It is on the disk, unless it was left in memory by another world.
    """
    saved = step
    if self._comm.is_root and self._committed():
      saved = next(iter(self._files.steps()), 0)
    self.saved = int(self._comm.gather(np.array([saved]))[0, 0])

  def _committed(self) -> bool:
    return self._elastic and self._commit.values is not None

  def has_checkpoint(self) -> bool:
    """Whether rank 0 has a state to resume from; on all ranks."""
    found = self._comm.is_root and bool(
      self._committed() or self._files.steps() or self._files.without_marker()
    )
    return bool(self._comm.gather(np.array([found]))[0, 0])

  def _newest_whole(self) -> str:
    """Of several the newest that is not damaged; tells of those that are."""
    damaged = []
    for step in self._files.steps():
      try:
        self._files.check(step)
      except CheckpointError as e:
        damaged.append(str(e))
        continue
      for line in damaged:
        training_hooks.tell(f"damaged: {line}")
      return self._files.prefix(step)
    if damaged:
      raise CheckpointError(
        f"{self._files.folder}: no checkpoint is whole ({'; '.join(damaged)}). "
        "Bring one back, or start anew in another --output_dir"
      )
    return self._files.without_marker()

  def initialise(
    self,
    session: tf.Session,
    init_checkpoint: str | None,
    schedule_start: tf.Variable | None = None,
  ) -> InitReport | None:
    """Gives new weights, from `init_checkpoint` where it has them.

    Runs on all ranks; rank 0's weights become everybody's.

    Args:
      session: of the graph.
      init_checkpoint: path prefix of a checkpoint, or None.
      schedule_start: is set to where that checkpoint's schedule was.

    Returns:
      What was loaded; None without `init_checkpoint` and on other ranks.

    Raises:
      CheckpointError: it cannot be read, has other shapes, or nothing of it is
        of use.
    """
    report = None
    if init_checkpoint and self._comm.is_root:
      report = self._plan(init_checkpoint)
    session.run(self._initializer)
    self._load_trained(
      session, init_checkpoint, report.loaded if report else ()
    )
    if report and schedule_start is not None:
      schedule_start.load(_schedule_position(init_checkpoint), session)
    session.run(self._broadcast)
    return report

  def _plan(self, path: str) -> InitReport:
    shapes = checkpoint_files.open_reader(path).get_variable_to_shape_map()
    trained = [v.op.name for v in tf.trainable_variables()]
    _check_shapes(path, {name: self._shapes[name] for name in trained}, shapes)
    loaded = {name for name in trained if name in shapes}
    if not loaded:
      raise CheckpointError(
        f"{path}: none of its {len(shapes)} variables is one of this model's; "
        f"it has, for example, {sorted(shapes)[0]}; the model has {trained[0]}"
      )
    return InitReport(
      path=path,
      loaded=sorted(loaded),
      missing=sorted(name for name in trained if name not in loaded),
      unused=sorted(set(shapes) - loaded),
    )

  def _load_trained(self, session, path: str | None, names) -> None:
    """Gives rank 0, or all that share one out, trained variables of a file.

    Args:
      session: of the graph.
      path: prefix of the checkpoint.
      names: rank 0's names of those that it has; () for none.
    """
    names, parts = set(names), {shared.part.op.name for shared in self._shared}
    loaded = [v for v in tf.trainable_variables() if v.op.name in names - parts]
    if loaded:
      _restore(tf.train.Saver(loaded), session, path)
      _check_finite(session, path, loaded)
    read = None
    if names & parts:
      reader = checkpoint_files.open_reader(path)
      read = functools.partial(_read_finite, reader, path)
    wanted = np.array([shared.part.op.name in names for shared in self._shared])
    if self._shared:
      wanted = self._comm.gather(wanted)[0]
    self._load_shared(session, read, wanted)

  def resume(self, session: tf.Session) -> str | None:
    """Restores everything on all ranks, from the commit or newest checkpoint.

    Returns:
      Its name on rank 0, None on others.

    Raises:
      CheckpointError: it is damaged, lacks variables or has other shapes.
    """
    session.run(self._initializer)
    source, read = None, None
    if self._comm.is_root and self._committed():
      source = f"what update {self._commit.step:,} left in memory"
      read = self._commit.values.__getitem__
      self._load_commit(session, self._variables)
    elif self._comm.is_root:
      source = self._newest_whole()
      reader = checkpoint_files.open_reader(source)
      read = functools.partial(_read_finite, reader, source)
      self._restore_all(session, source, reader.get_variable_to_shape_map())
    self._load_shared(session, read)
    session.run(self._broadcast)
    if self._committed():
      self._load_commit(session, self._errors)  # a rank's own
    return source

  def _restore_all(self, session, path: str, shapes: dict) -> None:
    """Gives this rank's variables their values in a file of `shapes`."""
    names = self._shapes
    _check_shapes(path, names, shapes)
    missing = sorted(
      n
      for n in names.keys() - shapes.keys() - _ADDED.keys()
      if not _may_begin(n)
    )
    if missing:
      raise CheckpointError(
        f"{path}: cannot be resumed, it lacks {missing[0]} and "
        f"{len(missing) - 1} more variables. To start a new run from its "
        "weights give it as --init_checkpoint with a new --output_dir"
      )
    saver = self._saver
    if names.keys() - shapes.keys():
      saver = tf.train.Saver(
        [v for v in self._variables if v.op.name in shapes]
      )
    _restore(saver, session, path)
    _check_finite(session, path, self._variables)
    for variable in self._variables:
      if variable.op.name not in shapes and variable.op.name in _ADDED:
        variable.load(_ADDED[variable.op.name], session)

  def _load_commit(self, session: tf.Session, variables) -> None:
    for variable in variables:
      variable.load(self._commit.values[variable.op.name], session)

  def _load_shared(self, session: tf.Session, read, wanted=None) -> None:
    """Shares out what rank 0 gets by `read`, name -> array; on all ranks.

    `wanted`: (optional) bool for each; the others stay as they are.
    """
    for i, shared in enumerate(self._shared):
      if wanted is not None and not wanted[i]:
        continue
      feed = {
        fed: read(name) if read else np.zeros(fed.shape, np.float32)
        for name, fed in shared.fed.items()
      }
      session.run(shared.load, feed)

  def load_weights(self, session: tf.Session, step: int) -> None:
    """Gives all ranks the trained variables of an update's checkpoint.

    Raises:
      CheckpointError: it is not there, or damaged.
    """
    names, path = (), self._files.prefix(step)
    if self._comm.is_root:
      self._files.wait()
      self._files.check(step)
      names = [v.op.name for v in tf.trainable_variables()]
    self._load_trained(session, path, names)
    session.run(self._broadcast)

  def newest(self, before: int | None = None) -> str | None:
    """The newest checkpoint that is written, of updates before this one."""
    steps = [s for s in self._files.steps() if before is None or s < before]
    return self._files.prefix(steps[0]) if steps else None

  def values(self, session: tf.Session) -> dict:
    """What this rank has of all variables, by name: of some a part."""
    parts = {shared.part.op.name: shared.part for shared in self._shared}
    return session.run({**self._values, **parts})

  def _copy(self, values: dict) -> tf.Operation:
    """Copies `values`, by name, to memory; where it is not kept, makes them."""

    def copy_to(*arrays) -> np.int32:
      kept = self._commit.begin()
      for name, array in zip(values, arrays, strict=True):
        np.copyto(kept[name], array)
      return np.int32(0)

    if self._keeps:
      return tf.numpy_function(copy_to, list(values.values()), tf.int32).op
    return [value.op for value in values.values()]

  def commit(self, session: tf.Session, step: int) -> None:
    """Keeps what all variables hold in memory; on all ranks.

    Not before all are there, rank 0 with its reports of the updates up to here
    written: the next world begins after this update, and makes none of them.
    """
    if self._elastic and not self._has_room():
      self.wait()
    self._keep(session, step)

  def try_commit(self, session: tf.Session, step: int) -> None:
    """`commit`, unless what is being written still needs the memory for it."""
    if self._has_room():
      self._keep(session, step)

  def _has_room(self) -> bool:
    """Whether `_keep` may begin; on all ranks, of which it waits for all."""
    own = self._keeps and self._commit.begin() is self._written
    room = not own or self._files.wait(0)
    return bool(self._comm.gather(np.array([room])).all())

  def _keep(self, session: tf.Session, step: int) -> None:
    for copy in self._copies if self._keeps else self._copies[1:]:
      session.run(copy)
      self._moved()  # the first time each of them is prepared, for a second
    if self._keeps:
      self._commit.finish(step)

  def _write_commit(self) -> None:
    self._written = self._commit.values
    self._files.write(self._commit.step, self._written)

  def save(self, session: tf.Session, step: int) -> None:
    """Begins to save on rank 0; the session may go on at once.

    Call it on all ranks. What is saved is committed too, so that no rank goes
    back behind it.
    """
    self.saved = step
    began = time.monotonic()
    self.wait()
    session.run(self._add_up_errors)
    self.commit(session, step)
    if self._comm.is_root:
      self._write_commit()
      self.stalls.append(time.monotonic() - began)
    self._patience = _READY_SECONDS

  def save_commit(self) -> None:
    """Begins to save what is committed, lest there be no next world."""
    if self._comm.is_root and self._committed():
      if self._commit.step not in self._files.steps()[:1]:
        self._write_commit()

  def fall_back(self) -> int:
    """The newest update that is saved or committed, then saved too, if so."""
    self.save_commit()
    return max(self.saved, self._commit.step if self._committed() else 0)

  def is_ready(self) -> bool:
    """Whether all ranks could save now; the same on all.

    The first call after a save waits a little for what is being written.
    """
    patience, self._patience = self._patience, 0.0
    return self._is_idle(patience)

  def _is_idle(self, seconds: float) -> bool:
    """Whether nothing is being written, now or within `seconds`; on all."""
    idle = self._comm.gather(np.array([self._files.wait(seconds)]))[0, 0]
    self._moved()
    return bool(idle)

  def wait(self) -> None:
    """Returns on all ranks when rank 0 has written what it is writing.

    A disk may take minutes for a large checkpoint: that is no rank that hangs.
    """
    began = told = time.monotonic()
    while not self._is_idle(_READY_SECONDS):
      now = time.monotonic()
      if self._comm.is_root and now - told >= _TELL_SECONDS:
        training_hooks.tell(
          f"waiting for the disk: {self._files.folder} takes a checkpoint, "
          f"{now - began:.0f} s so far"
        )
        told = now

  def keep_best(self, session: tf.Session, step: int, best: int | None) -> None:
    """Keeps the checkpoint of update `best`; makes it if that is now.

    Args:
      session: of the graph.
      step: updates up to now.
      best: rank 0's update with the best evaluation, if there is one.
    """
    new = False
    if best is not None:
      self._files.protect(best)
      new = step == best and step not in (self.saved, *self._files.steps())
    if self._comm.gather(np.array([new]))[0, 0]:
      self.save(session, step)

  def look_after(self, step: int) -> None:
    """Tells of a checkpoint that could not be written, and tries again."""
    if failure := self._files.failure():
      training_hooks.tell(
        f"update {step}: {failure}; training goes on and tries again"
      )
    if self._files.retry_is_due():
      self._write_commit()

  def close(self) -> None:
    """Waits for what this rank is saving, if it does."""
    self._files.wait()

  def finish(self) -> None:
    """Waits, on all ranks, for what is being saved.

    Raises:
      CheckpointError: it could not be.
    """
    self.wait()
    failure = self._files.failure()
    if not self._comm.gather(np.array([failure is not None]))[0, 0]:
      return
    if not self._comm.is_root:
      raise CheckpointError("rank 0 could not save, its last line says why")
    raise CheckpointError(
      f"{failure}. The newest checkpoint is {self.newest()}: make room, then "
      "the same command goes on from there"
    )
