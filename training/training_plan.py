"""How many updates of what batch: the arithmetic of ranks and steps.

Two ways to say it, never mixed:
  per-rank mode (google/bert's flags): `train_batch_size` is per rank, and steps
    are stated for ONE rank without accumulation, so they are divided by ranks x
    accumulation and the examples seen stay the same on any number of ranks;
  global mode: `global_batch_size` is given and steps count global batches, each
    spread over any number of ranks, in as few micro-batches of at most
    `train_batch_size` as it takes; rows that are left over stay empty.

An update is of one global batch from a run's start to its end: checkpoints
count updates, and so does the learning rate's schedule. So a run is resumed on
any ranks, but not with another global batch.

Steps and the global batch are stated in examples; a micro-batch has records,
which hold one example each unless they are packed. So a recipe is the same for
packed records: as many examples an update, and in all.
"""

import dataclasses
import math

from common.errors import UserError


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
  """The resolved numbers, the same on all ranks."""

  mode: str  # "per-rank" or "global"
  ranks: int
  micro_batch: int  # records of one rank's forward pass
  accumulation: int  # micro-batches of one rank's update
  records_per_update: int
  updates: int
  warmup_updates: int
  records: int | None  # in the training set; None: it is not known
  divisor: float  # examples of an update over those of a step as stated
  packing_factor: float = 1.0  # examples in a record on average

  @property
  def total_examples(self) -> int:
    """Examples seen by the whole run; about, if records are packed."""
    return self.examples(self.updates * self.records_per_update)

  @property
  def empty_rows(self) -> int:
    """Rows of an update's micro-batches in which there is no record."""
    return (
      self.ranks * self.accumulation * self.micro_batch
      - self.records_per_update
    )

  @property
  def epochs(self) -> float:
    """Passes over the training set."""
    return self.updates * self.records_per_update / self.records

  def examples(self, records: int) -> int:
    """Examples in so many records; about, if they are packed."""
    return round(records * self.packing_factor)

  def lines(self) -> list[str]:
    """The plan as a person reads it."""
    batch = (
      f"{self.micro_batch} examples = global batch {self.records_per_update}"
    )
    if self.packing_factor != 1.0:
      batch = (
        f"{self.micro_batch} records of {self.packing_factor:.2f} examples = "
        f"global batch {self.examples(self.records_per_update)} in "
        f"{self.records_per_update} records"
      )
    if self.empty_rows:
      batch += f" and {self.empty_rows} empty rows"
    return [
      f"{self.mode} mode: {self.ranks} ranks x {self.accumulation} "
      f"micro-batches x {batch}",
      f"{self.updates:,} updates ({self.warmup_updates:,} of warm-up) = "
      f"{self.total_examples:,} examples"
      + (
        f" = {self.epochs:.2f} epochs of {self.records:,} records"
        if self.records
        else ""
      ),
    ]


def _check_positive(**values: int) -> None:
  for name, value in values.items():
    if value < 1:
      raise UserError(f"--{name}={value}: must be at least 1")


def resolve(
  *,
  ranks: int,
  records: int | None,
  train_batch_size: int,
  num_train_steps: int,
  num_warmup_steps: int,
  num_accumulation_steps: int | None = None,
  global_batch_size: int | None = None,
  packing_factor: float = 1.0,
) -> TrainingPlan:
  """Resolves the flags of these names to a plan.

  Args:
    ranks: world size.
    records: in the training set; None for a plan without.
    train_batch_size: records of one rank's micro-batch; in global mode at most.
    num_train_steps: per-rank mode: for one rank; global mode: global batches.
    num_warmup_steps: the part of them that is warm-up.
    num_accumulation_steps: micro-batches of an update; None is 1 in per-rank
      mode and "what the global batch needs" in global mode.
    global_batch_size: examples of an update, the same on any number of ranks;
      None for per-rank mode.
    packing_factor: examples in a record on average; 1 if not packed.

  Raises:
    UserError: a number is not positive, there are more ranks than records in a
      global batch, the accumulation is not what it takes, or the data hold
      fewer records than one global batch.
  """
  _check_positive(
    train_batch_size=train_batch_size, num_train_steps=num_train_steps
  )
  if num_accumulation_steps is not None:
    _check_positive(num_accumulation_steps=num_accumulation_steps)
  if not 0 <= num_warmup_steps <= num_train_steps:
    raise UserError(
      f"--num_warmup_steps={num_warmup_steps} is not between 0 and "
      f"--num_train_steps={num_train_steps}"
    )
  if global_batch_size is None:
    mode, stated = "per-rank", train_batch_size
    micro_batch, accumulation = train_batch_size, num_accumulation_steps or 1
    global_batch = micro_batch * ranks * accumulation
  else:
    _check_positive(global_batch_size=global_batch_size)
    mode, stated = "global", global_batch_size
    global_batch = max(1, round(global_batch_size / packing_factor))
    micro_batch, accumulation = _spread(global_batch, train_batch_size, ranks)
    if num_accumulation_steps not in (None, accumulation):
      raise UserError(
        f"--num_accumulation_steps={num_accumulation_steps} disagrees with "
        f"--global_batch_size={global_batch_size}: on {ranks} ranks that is "
        f"{accumulation} micro-batches of {micro_batch} records "
        f"(--train_batch_size={train_batch_size} at most); leave it out"
      )
  divisor = global_batch * packing_factor / stated
  if records is not None and records < global_batch:
    raise UserError(
      f"{records} records are fewer than one global batch of {global_batch} "
      f"({ranks} ranks x {accumulation} micro-batches x {micro_batch}): "
      "make more records (a larger --dupe_factor) or lower the batch size"
    )
  return TrainingPlan(
    mode=mode,
    ranks=ranks,
    micro_batch=micro_batch,
    accumulation=accumulation,
    records_per_update=global_batch,
    updates=rounded_up(num_train_steps / divisor),
    warmup_updates=rounded_up(num_warmup_steps / divisor),
    records=records,
    divisor=divisor,
    packing_factor=packing_factor,
  )


def rounded_up(updates: float) -> int:
  """Never fewer examples than were asked for, but for an error of rounding."""
  return math.ceil(updates * (1.0 - 1e-12))


def _spread(global_batch: int, most: int, ranks: int) -> tuple[int, int]:
  """Micro-batch and accumulation with which ranks share a global batch.

  Args:
    global_batch: records of it.
    most: records that one micro-batch may have.
    ranks: world size.
  """
  if global_batch < ranks:
    raise UserError(
      f"a global batch of {global_batch} records leaves some of {ranks} ranks "
      "with nothing to do: start fewer, or raise --global_batch_size"
    )
  share = math.ceil(global_batch / ranks)
  accumulation = math.ceil(share / most)
  return math.ceil(share / accumulation), accumulation
