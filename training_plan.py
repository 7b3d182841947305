"""How many updates of what batch: the arithmetic of ranks and steps.

Two ways to say it, never mixed:
  per-rank mode (google/bert's flags): `train_batch_size` is per rank, and steps
    are stated for ONE rank without accumulation, so they are divided by ranks x
    accumulation and the examples seen stay the same on any number of ranks;
  global mode: `global_batch_size` is given, steps count global batches, and the
    accumulation follows from it.

Steps and the global batch are stated in examples; a micro-batch has records,
which hold one example each unless they are packed. So a recipe is the same for
packed records: as many examples an update, and in all.
"""

import dataclasses
import math

from errors import UserError

_PACKED_TOLERANCE = 0.05  # of the global batch's examples


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
  """The resolved numbers, the same on all ranks."""

  mode: str  # "per-rank" or "global"
  ranks: int
  micro_batch: int  # records of one rank's forward pass
  accumulation: int  # micro-batches of one rank's update
  global_batch: int  # records of one update
  updates: int
  warmup_updates: int
  records: int | None  # in the training set; None: it is not known
  divisor: float  # examples of an update over those of a step as stated
  packing_factor: float = 1.0  # examples in a record on average

  @property
  def samples(self) -> int:
    """Examples seen by the whole run; about, if records are packed."""
    return self.examples(self.updates * self.global_batch)

  @property
  def epochs(self) -> float:
    """Passes over the training set."""
    return self.updates * self.global_batch / self.records

  def examples(self, records: int) -> int:
    """Examples in so many records; about, if they are packed."""
    return round(records * self.packing_factor)

  def lines(self) -> list[str]:
    """The plan as a person reads it."""
    batch = f"{self.micro_batch} examples = global batch {self.global_batch}"
    if self.packing_factor != 1.0:
      batch = (
        f"{self.micro_batch} records of {self.packing_factor:.2f} examples = "
        f"global batch {self.examples(self.global_batch)} in "
        f"{self.global_batch} records"
      )
    return [
      f"{self.mode} mode: {self.ranks} ranks x {self.accumulation} "
      f"micro-batches x {batch}",
      f"{self.updates:,} updates ({self.warmup_updates:,} of warm-up) = "
      f"{self.samples:,} samples"
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
    train_batch_size: records of one rank's micro-batch.
    num_train_steps: per-rank mode: for one rank; global mode: global batches.
    num_warmup_steps: the part of them that is warm-up.
    num_accumulation_steps: micro-batches of an update; None is 1 in per-rank
      mode and "what the global batch needs" in global mode.
    global_batch_size: examples of an update; None for per-rank mode.
    packing_factor: examples in a record on average; 1 if not packed.

  Raises:
    UserError: a number is not positive, the global batch is not divisible, or
      the data hold fewer records than one global batch.
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
    accumulation = num_accumulation_steps or 1
  else:
    _check_positive(global_batch_size=global_batch_size)
    mode, stated = "global", global_batch_size
    accumulation = _accumulation(
      global_batch_size,
      train_batch_size,
      ranks,
      num_accumulation_steps,
      packing_factor,
    )
  global_batch = train_batch_size * ranks * accumulation
  divisor = global_batch * packing_factor / stated
  if records is not None and records < global_batch:
    raise UserError(
      f"{records} records are fewer than one global batch of {global_batch} "
      f"({ranks} ranks x {accumulation} micro-batches x {train_batch_size}): "
      "make more records (a larger --dupe_factor) or lower the batch size"
    )
  return TrainingPlan(
    mode=mode,
    ranks=ranks,
    micro_batch=train_batch_size,
    accumulation=accumulation,
    global_batch=global_batch,
    updates=_rounded_up(num_train_steps / divisor),
    warmup_updates=_rounded_up(num_warmup_steps / divisor),
    records=records,
    divisor=divisor,
    packing_factor=packing_factor,
  )


def _rounded_up(updates: float) -> int:
  """Never fewer samples than were asked for, but for an error of rounding."""
  return math.ceil(updates - 1e-6)


def _accumulation(
  global_batch: int,
  micro_batch: int,
  ranks: int,
  given: int | None,
  packing_factor: float,
) -> int:
  """Micro-batches of an update in global mode."""
  wanted = global_batch / packing_factor / (micro_batch * ranks)
  accumulation = max(1, round(wanted))
  packed = packing_factor != 1.0
  # Packed records hold a number of examples that varies anyway.
  if abs(accumulation / wanted - 1.0) > (_PACKED_TOLERANCE if packed else 0.0):
    if not packed:
      raise UserError(
        f"--global_batch_size={global_batch} is not a multiple of "
        f"--train_batch_size={micro_batch} x {ranks} ranks = "
        f"{micro_batch * ranks}: change one of the two"
      )
    records = global_batch / packing_factor / ranks
    fits = max(1, round(records / max(1, math.ceil(records / micro_batch))))
    raise UserError(
      f"--global_batch_size={global_batch} examples are "
      f"{global_batch / packing_factor:.1f} packed records of "
      f"{packing_factor:.2f} examples, and --train_batch_size={micro_batch} "
      f"records x {ranks} ranks = {micro_batch * ranks} do not come near a "
      f"multiple: use --train_batch_size={fits}"
    )
  if given not in (None, accumulation):
    raise UserError(
      f"--num_accumulation_steps={given} disagrees with --global_batch_size="
      f"{global_batch} = {accumulation} x {micro_batch} x {ranks} ranks: leave "
      "it out in global mode"
    )
  return accumulation
