"""Where variables get their values: new, from a checkpoint, or from memory."""

import dataclasses
import functools

import numpy as np

from common.console import tell
from common.tensorflow_v1 import tf
from gradients import optimizers, power_sgd
from training import checkpoint_files
from training.checkpoint_files import CheckpointError
from training.snapshot import SavedVariables, Snapshot

# What earlier checkpoints lack, and the value that they stand for.
_ADDED = {"training_state/data_block": 0, "skipped_updates": 0}
# What only runs with --powersgd_rank have, and may start to have.
_POWER_SGD = (f"/{power_sgd.ERROR}", f"/{power_sgd.BASIS}")


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


def _restore(session: tf.Session, path: str, variables) -> None:
  """Gives `variables` their values in a file; they must be finite."""
  if not variables:
    return
  try:
    tf.train.Saver(variables).restore(session, path)
  except tf.errors.OpError as e:
    raise _damaged(path, e.message) from e
  floats = [v for v in variables if v.dtype.is_floating]
  finite = session.run([tf.reduce_all(tf.math.is_finite(v)) for v in floats])
  wrong = [v.op.name for v, ok in zip(floats, finite, strict=True) if not ok]
  if wrong:
    raise CheckpointError(
      f"{path}: {wrong[0]} holds values that are not finite (of "
      f"{len(wrong)} variables): use an earlier checkpoint"
    )


def _damaged(path: str, why: str) -> CheckpointError:
  return CheckpointError(
    f"{path}: damaged ({why.splitlines()[0]}). Delete its files to use the one "
    "before"
  )


def _read_finite(reader, path: str, name: str) -> np.ndarray:
  """A tensor of a checkpoint, with `_restore`'s errors."""
  try:
    value = reader.get_tensor(name)
  except (tf.errors.OpError, ValueError) as e:
    raise _damaged(path, f"{name}: {e}") from e
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
    kinds = (*optimizers.SLOTS, power_sgd.ERROR, power_sgd.BASIS)
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
      "could continue: leave out --norewarmup"
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
  wanted = {v.op.name: v.shape.as_list() for v in variables}
  _check_shapes(path, wanted, shapes)
  missing = sorted(wanted.keys() - shapes.keys())
  if missing:
    raise CheckpointError(
      f"{path}: lacks {missing[0]} (of {len(missing)} variables): made with "
      "another BERT config, or not whole"
    )
  _restore(session, path, variables)


class Restore:
  """Gives one run's variables their values, the same on all ranks."""

  def __init__(
    self,
    files: checkpoint_files.CheckpointFiles,
    variables: SavedVariables,
    comm,
    snapshot: Snapshot | None = None,
  ):
    """Make it when the graph is complete.

    Args:
      files: of the run.
      variables: what is restored.
      comm: a `distributed.Comm`.
      snapshot: that of an elastic run, which is newer than the files.
    """
    self._files, self._variables = files, variables
    self._comm, self._snapshot = comm, snapshot
    self._initializer = tf.group(
      tf.global_variables_initializer(), tf.local_variables_initializer()
    )
    self._errors = tf.get_collection(power_sgd.ERRORS)
    self._broadcast = power_sgd.broadcast_op(variables.own, comm)

  def committed(self) -> Snapshot | None:
    """The snapshot of an elastic run, once it has values."""
    taken = self._snapshot is not None and self._snapshot.values is not None
    return self._snapshot if taken else None

  def has_checkpoint(self) -> bool:
    """Whether rank 0 has a state to resume from; on all ranks."""
    files = self._files
    return self._comm.from_root(
      self._comm.is_root
      and bool(self.committed() or files.steps() or files.without_marker())
    )

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
    own = self._variables.shapes
    _check_shapes(path, {name: own[name] for name in trained}, shapes)
    loaded = {name for name in trained if name in shapes}
    if not loaded:
      raise CheckpointError(
        f"{path}: none of its {len(shapes)} variables is one of this model's; "
        f"it has, for example, {sorted(shapes)[0]}; the model has {trained[0]}"
      )
    return InitReport(
      path=path,
      loaded=sorted(loaded),
      missing=sorted(set(trained) - loaded),
      unused=sorted(set(shapes) - loaded),
    )

  def resume(self, session: tf.Session) -> str | None:
    """Restores everything, from the snapshot or the newest checkpoint.

    Returns:
      Its name on rank 0, None on others.

    Raises:
      CheckpointError: it is damaged, lacks variables or has other shapes.
    """
    session.run(self._initializer)
    source, read, committed = None, None, self.committed()
    if self._comm.is_root and committed:
      source = f"what update {committed.step:,} left in memory"
      read = committed.values.__getitem__
      _load(session, self._variables.own, committed.values)
    elif self._comm.is_root:
      source = self._newest_whole()
      reader = checkpoint_files.open_reader(source)
      read = functools.partial(_read_finite, reader, source)
      self._load_all(session, source, reader.get_variable_to_shape_map())
    self._load_sharded(session, read)
    session.run(self._broadcast)
    if committed:
      _load(session, self._errors, committed.values)  # a rank's own
    return source

  def _newest_whole(self) -> str:
    """The newest checkpoint that is not damaged; reports those that are."""
    damaged = []
    for step in self._files.steps():
      try:
        self._files.check(step)
      except CheckpointError as e:
        damaged.append(str(e))
        continue
      for line in damaged:
        tell(f"damaged: {line}")
      return self._files.prefix(step)
    if damaged:
      raise CheckpointError(
        f"{self._files.folder}: no checkpoint is whole ({'; '.join(damaged)}). "
        "Bring one back, or start a new run in another --output_dir"
      )
    return self._files.without_marker()

  def _load_all(self, session, path: str, shapes: dict) -> None:
    """Gives this rank's own variables their values in a file of `shapes`."""
    own, wanted = self._variables.own, self._variables.shapes
    _check_shapes(path, wanted, shapes)
    missing = sorted(
      name
      for name in wanted.keys() - shapes.keys() - _ADDED.keys()
      if not name.endswith(_POWER_SGD)
    )
    if missing:
      raise CheckpointError(
        f"{path}: cannot be resumed, it lacks {missing[0]} and "
        f"{len(missing) - 1} more variables. To start a new run from its "
        "weights give it as --init_checkpoint with a new --output_dir"
      )
    _restore(session, path, [v for v in own if v.op.name in shapes])
    added = [v for v in own if v.op.name in _ADDED.keys() - shapes.keys()]
    _load(session, added, _ADDED)

  def weights(self, session: tf.Session, step: int) -> None:
    """Gives all ranks the trained variables of an update's checkpoint.

    Raises:
      CheckpointError: it is not there, or damaged.
    """
    names = ()
    if self._comm.is_root:
      self._files.wait()
      self._files.check(step)
      names = [v.op.name for v in tf.trainable_variables()]
    self._load_trained(session, self._files.prefix(step), names)
    session.run(self._broadcast)

  def _load_trained(self, session, path: str | None, names) -> None:
    """Loads trained variables: rank 0's own ones, and all ranks' parts.

    Args:
      session: of the graph.
      path: prefix of the checkpoint.
      names: those that rank 0 found there; () on other ranks.
    """
    names, sharded = set(names), self._variables.sharded
    own = {v.op.name for v in self._variables.own}
    _restore(
      session,
      path,
      [v for v in tf.trainable_variables() if v.op.name in names & own],
    )
    read = None
    if names - own:
      reader = checkpoint_files.open_reader(path)
      read = functools.partial(_read_finite, reader, path)
    if sharded:
      wanted = [s.part.op.name in names for s in sharded]
      self._load_sharded(session, read, self._comm.from_root(wanted))

  def _load_sharded(self, session, read, wanted=None) -> None:
    """Shares out what rank 0 gets by `read`, name -> array; on all ranks.

    `wanted`: (optional) bool for each; the others stay as they are.
    """
    for i, variable in enumerate(self._variables.sharded):
      if wanted is None or wanted[i]:
        feed = {
          fed: read(name) if read else np.zeros(fed.shape, np.float32)
          for name, fed in variable.fed.items()
        }
        session.run(variable.load, feed)


def _load(session: tf.Session, variables, values) -> None:
  for variable in variables:
    variable.load(values[variable.op.name], session)
