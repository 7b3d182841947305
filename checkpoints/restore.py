"""Where variables get their values: new, from a checkpoint, or from memory."""

import itertools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from checkpoints import agreement, checkpoint_files, description
from checkpoints.checkpoint_files import Checkpoint, CheckpointError
from checkpoints.checkpoint_weights import STATE, no_average, open_checkpoint
from checkpoints.run_start import STAGE
from checkpoints.snapshot import SavedVariables, Snapshot
from common.console import indented, say
from common.tensorflow_v1 import OPTIONAL_VARIABLES, tf
from config.optimizers import AVERAGE
from gradients import averages, sharded_variables
from model import growth
from model.tasks import LABELLED, MASKED_LM

# Counters of a training's place in its data and schedule.
_PLACE = re.compile(
  r"global_step|skipped_updates|training_state/.*|spike_guard/in_a_row"
)
_OF_ENCODER = re.compile("bert/(?!pooler/)")
# A session prepares each set of variables; all in one set would need memory for
# the whole checkpoint.
_LOADED_AT_ONCE = 100


def _check_shapes(source: Checkpoint, wanted: dict) -> None:
  """Raises `CheckpointError` if what both have has other shapes there."""
  differing = []
  for name, here in wanted.items():
    there = source.shapes.get(name, here)
    if there != here:
      differing.append(f"{name} is {there} there, {here} here")
  if differing:
    if len(differing) > 3:
      differing[3:] = [f"and {len(differing) - 3} more"]
    raise CheckpointError(
      f"{source.path}: made with another BERT config or --powersgd_rank: "
      f"{'; '.join(differing)}"
    )


def _load(session: tf.Session, variables, values) -> None:
  # Feeding an initializer's own input adds no op to the graph.
  for first in range(0, len(variables), _LOADED_AT_ONCE):
    initializers, feed = [], {}
    for variable in variables[first : first + _LOADED_AT_ONCE]:
      initializers.append(variable.initializer)
      feed[variable.initializer.inputs[1]] = values[variable.op.name]
    assert len(feed) == len(initializers), "variables with one initial value"
    session.run(initializers, feed)


def _names(variables) -> set[str]:
  return {variable.op.name for variable in variables}


class InitReport(NamedTuple):
  """What `--init_checkpoint` gave: lists of variable names."""

  path: str
  loaded: list
  missing: list  # trained variables that the checkpoint lacks
  unused: list  # the checkpoint's other variables
  notes: list  # lines about the heads

  def lines(self) -> list[str]:
    # Slots, such as WEIGHT/adam_m, are counted only: there are many. Counters
    # are never read.
    weights = {*self.loaded, *self.unused}
    others, slots = list[str](), 0
    for name in self.unused:
      if name.rpartition("/")[0] in weights:
        slots += 1
      elif not STATE.fullmatch(name):
        others.append(name)
    lines = [
      f"initialised from {self.path}",
      *self.notes,
      f"  loaded: {len(self.loaded)}",
      f"  missing there, so initial weights: {len(self.missing)}",
      *indented(self.missing),
      f"  unused: {len(others)}",
      *indented(others),
    ]
    if slots:
      lines.append(f"  and {slots} slots of an optimizer")
    for has, names in (("lacks", self.missing), ("alone has", others)):
      half = of_encoder(names)
      if half:
        lines.append(
          f"WARNING: half a model: the checkpoint {has} {len(half)} weights of "
          f"the encoder, such as {half[0]}"
        )
    return lines


def of_encoder(names: Iterable[str]) -> list[str]:
  """The encoder's weights among variables' names."""
  return list(filter(_OF_ENCODER.match, names))


def _schedule_position(source: Checkpoint) -> int:
  """The update of a checkpoint's learning rate schedule."""
  # That run may itself have continued another one's schedule.
  step, start = "global_step", "training_state/schedule_start"
  counts = [source[name] for name in (step, start) if name in source.shapes]
  if step not in source.shapes:
    why = "has no global_step from which the schedule could continue"
  elif "training_state/seconds" in source.shapes:
    why = "its learning rate followed --max_train_minutes, not the updates"
  elif any(n.shape or n.dtype.kind != "i" for n in counts) or sum(counts) < 0:
    why = f"its global_step is {counts[0]}, not a number of updates"
  else:
    return int(sum(counts))
  raise CheckpointError(f"{source.path}: {why}: leave out --norewarmup")


def restore_all(session: tf.Session, source: Checkpoint, variables) -> None:
  """Gives all `variables` their values in a checkpoint."""
  wanted = {v.op.name: v.shape.as_list() for v in variables}
  _check_shapes(source, wanted)
  missing = sorted(wanted.keys() - source.shapes.keys())
  if missing:
    raise CheckpointError(
      f"{source.path}: lacks {missing[0]} (of {len(missing)} variables): made "
      "with another BERT config, or not whole"
    )
  _load(session, variables, source)


class Restore:
  """Gives one run's variables their values, the same on all ranks."""

  def __init__(
    self,
    files: checkpoint_files.CheckpointFiles,
    variables: SavedVariables,
    comm,
    snapshot: Snapshot | None = None,
  ):
    """The graph must be complete; an elastic `snapshot` is newer than files."""
    self._files, self._variables = files, variables
    self._comm, self._snapshot = comm, snapshot
    self._initializer = tf.group(
      tf.global_variables_initializer(), tf.local_variables_initializer()
    )
    self._summed = tf.get_collection(sharded_variables.SUMMED)
    self._broadcast = sharded_variables.broadcast_op(variables.whole, comm)
    self._averages = tf.get_collection(averages.AVERAGES)
    self._begin = [each.begin_op() for each in self._averages]

  def committed(self) -> Snapshot | None:
    """The snapshot of an elastic run, once it has values."""
    snapshot = self._snapshot
    return snapshot if snapshot and snapshot.values is not None else None

  def has_checkpoint(self) -> bool:
    """Whether rank 0 has a state to resume from; on all ranks."""
    return self._comm.from_root(
      self._comm.is_root and bool(self.committed() or self._files.has_any())
    )

  def initialise(
    self,
    session: tf.Session,
    init_checkpoint: str | None,
    schedule_start: tf.Variable | None = None,
    initial: Callable[[], dict] | None = None,
    labels: list[str] | None = None,
  ) -> InitReport | None:
    """Gives new weights, from `init_checkpoint` where it has them.

    Else from what `initial` makes on rank 0, by name; else they are random. So
    is a classifier whose rows are of other `labels` there. Sets
    `schedule_start` to that checkpoint's update. Rank 0 gets a report.
    """
    report, source, weights = None, None, {}
    if init_checkpoint and self._comm.is_root:
      source = open_checkpoint(init_checkpoint)
      report = self._plan(source, labels)
    if initial and self._comm.is_root and (not report or report.missing):
      weights = initial()
    elif report and MASKED_LM.bias in report.missing:
      (words,) = self._variables.shapes[MASKED_LM.bias]
      report.notes.append(
        "  the checkpoint lacks the masked LM head, which starts random: the "
        f"first loss is about ln({words:,}) = {math.log(words):.1f}"
      )
    # Random weights first, then the made ones, then those of the checkpoint.
    session.run(self._initializer)
    self._load_trained(session, weights, weights)
    self._load_trained(session, source, report.loaded if report else ())
    if source and schedule_start is not None:
      schedule_start.load(_schedule_position(source), session)
    session.run(self._broadcast)
    session.run(self._begin)
    return report

  def _plan(self, source: Checkpoint, labels: list | None) -> InitReport:
    trained = _names(tf.trainable_variables())
    shapes, wanted = source.shapes, self._variables.shapes
    loaded, rows = trained & shapes.keys(), set()
    # A classifier's rows mean labels: they fit only the same ones.
    for labelled in LABELLED:
      rows |= {labelled.weights, labelled.bias}
    head, notes = loaded & rows, []
    if head:
      about = description.read(description.folder_of(source.path))
      there = about.task.get("labels")
      are_others = None not in (labels, there) and labels != there
      if are_others or any(shapes[name] != wanted[name] for name in head):
        loaded -= head
      if labels and labels != there:
        notes.append(
          f"  the classifier's labels are {agreement.shown(labels)} here, "
          f"{agreement.shown(there)} there: it is "
          f"{'taken in this order' if head <= loaded else 'new'}"
        )
    _check_shapes(source, {name: wanted[name] for name in loaded})
    return InitReport(
      path=source.path,
      loaded=sorted(loaded),
      missing=sorted(trained - loaded),
      unused=sorted(shapes.keys() - loaded),
      notes=notes,
    )

  def resume(self, session, path: str = "", grow=None) -> str | None:
    """Gives all variables the newest state, or that of the checkpoint `path`.

    `grow`: the number of a state's stage -> how its model becomes this one, a
    `stages.Growth`. Returns what the state is, on rank 0.
    """
    session.run(self._initializer)
    # What is in memory is newer than any checkpoint, or the run would go back.
    name, committed = None, self.committed()
    here: Any = self._grown(grow, committed.values) if committed else None
    values: Any = None
    absent = set[str]()
    if self._comm.is_root:
      if committed:
        name = f"what update {committed.step:,} left in memory"
        values = here
      else:
        name = path or self._files.newest_whole() or ""
        values = self._grown(grow, Checkpoint(name))
        _check_shapes(values, self._variables.shapes)
      optional = _names(tf.get_collection(OPTIONAL_VARIABLES))
      names = getattr(values, "shapes", values).keys()
      absent = self._variables.shapes.keys() - names
      missing = absent - optional
      if missing and all(lacking.endswith(AVERAGE) for lacking in missing):
        raise no_average(name)
      if missing:
        raise CheckpointError(
          f"{name}: cannot be resumed, it lacks {min(missing)} and "
          f"{len(missing) - 1} more variables of these flags (--optimizer, "
          "--bias_correction, ...): give those of before, or start a new run "
          "by it as --init_checkpoint with a new --output_dir"
        )
      self._load_whole(session, values, names)
    self._load_sharded(session, values, self._variables.parts.keys() - absent)
    session.run(self._broadcast)
    session.run(self._begin)
    if committed:
      known = getattr(here, "shapes", here)  # this rank's
      _load(session, [v for v in self._summed if v.op.name in known], here)
    return name

  def _grown(self, grow: Callable | None, values: Any) -> Any:
    """The values of an earlier stage as those of this one's model."""
    how = grow(int(values[STAGE][0])) if grow else None
    if not (how and how.changes()):
      return values
    say(self._comm, f"the model grows by {how.method}: {how.changes()}")
    return growth.Grown(values, self._variables.shapes, how)

  def rewind(self, session: tf.Session, step: int) -> None:
    """Gives all ranks the state of `step`'s checkpoint, without its place.

    So a training goes on with the records that follow, at the rate of now.
    """
    source, names, parts = None, set[str](), {*self._variables.parts}
    # Averages that the checkpoint lacks begin with its weights.
    states = self._summed + tf.get_collection(OPTIONAL_VARIABLES)
    fresh = [v for v in states if not _PLACE.fullmatch(v.op.name)]
    session.run([variable.initializer for variable in fresh])
    if self._comm.is_root:
      self._files.wait()
      self._files.check(step)
      source = Checkpoint(self._files.prefix(step))
      names = set(itertools.filterfalse(_PLACE.fullmatch, source.shapes))
      parts -= self._variables.shapes.keys() - names
    self._load_whole(session, source, names)
    self._load_sharded(session, source, parts)
    session.run(self._broadcast)
    session.run(self._begin)

  def _load_trained(
    self, session, source: Checkpoint | dict | None, names
  ) -> None:
    """Loads `names` from rank 0's `source`; other ranks give no names."""
    self._load_whole(session, source, names)
    self._load_sharded(session, source, self._variables.parts.keys() & {*names})

  def _load_whole(self, session, values, names) -> None:
    """Loads those of `names` that each rank holds whole."""
    named = [v for v in self._variables.whole if v.op.name in names]
    _load(session, named, values)

  def _load_sharded(self, session, values, parts: set[str]) -> None:
    """Distributes rank 0's `values` of its `parts`; other ranks have none."""
    # Each load is a collective: all ranks must make the same ones.
    parts = self._comm.from_root(parts) if self._variables.sharded else parts
    for variable in self._variables.sharded:
      if variable.part.op.name not in parts:
        continue
      feed = {}
      for name, fed in variable.fed.items():
        feed[fed] = values[name] if values else np.zeros(fed.shape, np.float32)
      session.run(variable.load, feed)
