"""How many updates of what batch: the arithmetic of ranks and steps.

Two modes, never mixed:
  per-rank (google/bert's flags): `train_batch_size` is per rank, and steps are
    stated for ONE rank without accumulation. They are divided by ranks x
    accumulation, so any number of ranks sees the same number of examples;
  global: `global_batch_size` is given and steps count global batches. Ranks
    share each in as few micro-batches of at most `train_batch_size` as
    possible; surplus rows stay empty.

A run keeps its global batch, on any number of ranks: checkpoints and the
learning rate's schedule count updates.

The global batch, or one rank's steps, are stated in examples, a micro-batch in
records: one example each, or several if packed. So a recipe is the same then.

A stage of a staged run has a plan that begins where the last one ended. Its
global batch may grow; the micro-batch stays, so there are more and more.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from common.console import counted
from common.errors import UserError


@dataclasses.dataclass(frozen=True)
class Stage:
  """A part of a run with data, lengths and batches of its own."""

  number: int = 0
  first_update: int = 0
  first_record: int = 0  # position in the data's stream
  first_example: int = 0  # seen by earlier stages
  # Smaller batches that come first: (updates, records of each of them).
  ramp: tuple[tuple[int, int], ...] = ()
  total_updates: int = 0  # of the whole run; 0: the plan's
  count: int = 1  # of the run's stages

  @property
  def is_last(self) -> bool:
    return self.number + 1 == self.count


# What checkpoints have of a `Stage`.
SAVED_OF_STAGE = ("number", "first_update", "first_record", "first_example")


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
  """The resolved numbers, the same on all ranks."""

  mode: str  # "per-rank" or "global"
  ranks: int
  micro_batch: int  # records of one rank's forward pass
  accumulation: int  # micro-batches of one rank's update, at most
  records_per_update: int  # at most
  updates: int  # those before this plan included
  warmup_updates: int
  decay_updates: int  # at the end, of --lr_schedule=wsd
  records: int | None  # in the training set; None: unknown
  divisor: float  # steps as stated that make an update
  packing_factor: float = 1.0  # examples in a record on average
  steps: int = 0  # as stated; 0 of a cooldown
  cooldown_start: int = 0  # the update of --cooldown_from
  stage: Stage = Stage()  # of a run without stages: all of it

  def records_before(self, update: int) -> int:
    """The position in the data's stream where `update`, from 0, begins."""
    left, position = update - self.stage.first_update, self.stage.first_record
    for updates, records in self.stage.ramp:
      done = min(updates, left)
      position += done * records
      left -= done
    return position + left * self.records_per_update

  def records_of(self, update: int) -> int:
    """Records of `update`, from 0, over all ranks."""
    return self.records_before(update + 1) - self.records_before(update)

  def micro_batches_of(self, update: int) -> int:
    """Micro-batches of one rank."""
    return self.micro_batches(self.records_of(update))

  def micro_batches(self, records: int) -> int:
    """Micro-batches of one rank in an update of so many records."""
    share = -(-records // self.ranks)
    return -(-share // self.micro_batch)

  def sizes(self) -> Iterator[tuple[int, int]]:
    """The updates of this plan: (updates, records of each), in order."""
    left = self.updates - self.stage.first_update
    for updates, records in (*self.stage.ramp, (left, self.records_per_update)):
      updates = min(updates, left)
      yield updates, records
      left -= updates

  def examples_before(self, update: int) -> int:
    """Seen since the run began; approximate for packed records."""
    own = self.records_before(update) - self.stage.first_record
    return self.stage.first_example + self.examples(own)

  def other_batch(
    self, before: Mapping, update: int, records_seen: int
  ) -> tuple[str, int] | None:
    """How the updates that a run has made differ from this plan's; or None.

    With the records of each, or 0 for several sizes. `before` is the run's last
    plan as run.json has it, {} if it is not known. The checkpoint of `update`
    has `records_seen`.
    """
    # The checkpoint counts: files in its folder may be older.
    if records_seen != self.records_before(update):
      updates = update - self.stage.first_update
      seen = records_seen - self.stage.first_record
      batch, rest = divmod(seen, updates) if updates else (0, 1)
      mean = f"{seen / max(1, updates):g}"
      return (
        f"records of an update {mean} -> {self.records_per_update}",
        0 if rest or self.stage.ramp else batch,
      )
    # The same records of an update, but steps that came to other updates: the
    # run had other ranks. A cooldown has no steps of its own.
    states_same = self.mode == "per-rank" and self.steps
    if states_same and before.get("steps") == self.steps:
      if before["updates"] != self.updates:
        return (
          f"updates of the same steps {before['updates']} -> {self.updates}",
          before.get("records_per_update", self.records_per_update),
        )
    return None

  def progress(self, update):
    """How far `update`, from 0, is in this run, stage or cooldown: 0 to 1."""
    first = self.first_update
    return (update - first) / max(1, self.updates - first - 1)

  @property
  def first_update(self) -> int:
    """With which this run, stage or cooldown begins, from 0."""
    return max(self.stage.first_update, self.cooldown_start)

  @property
  def total_examples(self) -> int:
    return self.examples_before(self.updates) - self.stage.first_example

  @property
  def empty_rows(self) -> int:
    """Rows of an update without a record."""
    rows = self.ranks * self.accumulation * self.micro_batch
    return rows - self.records_per_update

  @property
  def epochs(self) -> float | None:
    seen = self.records_before(self.updates) - self.stage.first_record
    return seen / self.records if self.records else None

  def examples(self, records: int) -> int:
    """Approximate for packed records."""
    return round(records * self.packing_factor)

  def lines(self) -> list[str]:
    records = self.records_per_update
    batch = f"{self.micro_batch} examples = global batch {records}"
    if self.packing_factor != 1.0:
      batch = (
        f"{self.micro_batch} records of {self.packing_factor:.2f} examples = "
        f"global batch {self.examples(records)} in {records} records"
      )
    # A global batch that does not divide leaves rows without a record.
    if self.empty_rows:
      batch += f" and {counted(self.empty_rows, 'empty row')}"
    total = f"{self.updates:,} updates ({self.warmup_updates:,} of warm-up)"
    if self.stage.count > 1:
      total = (
        f"stage {self.stage.number + 1} of {self.stage.count}: updates "
        f"{self.stage.first_update + 1:,} to {self.updates:,}"
      )
    total += f" = {self.total_examples:,} examples"
    if self.records:
      total += f" = {self.epochs:.2f} epochs of {self.records:,} records"
    ranks = counted(self.ranks, "rank")
    shared = f"{ranks} x {counted(self.accumulation, 'micro-batch', 'es')}"
    lines = [f"{self.mode} mode: {shared} x {batch}", total]
    divided = self.mode == "per-rank" and self.ranks * self.accumulation > 1
    if divided and self.steps:
      lines.append(
        f"--num_train_steps={self.steps} on {shared} are {self.updates:,} "
        "updates"
      )
    return lines


def resolve(
  *, ranks: int, records: int | None, train_batch_size: int,
  num_train_steps: int, num_warmup_steps: int,
  num_decay_steps: int | None = None,
  num_accumulation_steps: int | None = None,
  global_batch_size: int | None = None, packing_factor: float = 1.0,
  of_epochs: bool = False,  # the steps come to whole epochs of examples
) -> TrainingPlan:  # fmt: skip
  """Resolves these flags; raises `UserError` if they do not fit together."""
  decay = num_decay_steps or 0
  if num_warmup_steps < 0 or num_warmup_steps + decay > num_train_steps:
    parts = (
      f"--num_warmup_steps={num_warmup_steps}",
      f"--num_decay_steps={decay}",
    )
    total = f"--num_train_steps={num_train_steps}"
    if of_epochs:  # what fine-tuning's flags come to
      parts = parts[1], f"{num_warmup_steps} steps of --warmup_proportion"
      total = f"the {num_train_steps} steps of --num_train_epochs"
    raise UserError(f"{' and '.join(parts)} do not fit in {total}")
  if global_batch_size is None:
    mode, stated = "per-rank", train_batch_size
    micro_batch, accumulation = train_batch_size, num_accumulation_steps or 1
    global_batch = micro_batch * ranks * accumulation
  else:
    mode, stated = "global", global_batch_size
    global_batch = max(1, round(global_batch_size / packing_factor))
    micro_batch, accumulation = spread(global_batch, train_batch_size, ranks)
    if global_batch < ranks:
      raise UserError(
        f"a global batch of {global_batch} records leaves some of {ranks} "
        "ranks with nothing to do: start fewer, or raise --global_batch_size"
      )
    if num_accumulation_steps not in (None, accumulation):
      raise UserError(
        f"--num_accumulation_steps={num_accumulation_steps} disagrees with "
        f"--global_batch_size={global_batch_size}: on {ranks} ranks that is "
        f"{accumulation} micro-batches of {micro_batch} records; leave it out"
      )
  restated = mode == "per-rank" or of_epochs
  divisor = global_batch * packing_factor / stated if restated else 1.0
  if records is not None and records < global_batch:
    raise UserError(
      f"{records} records are fewer than one global batch of {global_batch}: "
      "make more records (a larger --dupe_factor) or lower the batch size"
    )
  # Rounded up: no run sees fewer examples than one rank alone would.
  updates = rounded_up(num_train_steps / divisor)
  warmup_updates = rounded_up(num_warmup_steps / divisor)
  decay_updates = math.ceil(updates / 10)
  if num_decay_steps:
    decay_updates = rounded_up(num_decay_steps / divisor)
    decay_updates = min(decay_updates, updates - warmup_updates)
  return TrainingPlan(
    mode, ranks, micro_batch, accumulation, records_per_update=global_batch,
    updates=updates, warmup_updates=warmup_updates, decay_updates=decay_updates,
    records=records, divisor=divisor, packing_factor=packing_factor,
    steps=num_train_steps,
  )  # fmt: skip


def rounded_up(updates: float) -> int:
  """Rounds up, except for a rounding error of the division."""
  return math.ceil(updates * (1.0 - 1e-12))


def spread(global_batch: int, most: int, ranks: int) -> tuple[int, int]:
  """Micro-batch and accumulation of `ranks` that share a batch."""
  share = math.ceil(global_batch / ranks)
  accumulation = math.ceil(share / most)
  return math.ceil(share / accumulation), accumulation
