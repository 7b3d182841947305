"""--stages: one run whose data, lengths, batches and masks change on the way.

A JSON list; an item holds flags of run_pretraining.py without "--", for the
updates of its stage:

  [{"input_file": "records32/*", "global_batch_size": [64, 256],
    "num_train_steps": 2000, "masked_lm_prob": "0.3:0.2"},
   {"input_file": "records128/*", "learning_rate": 0.001,
    "num_train_tokens": 50000000}]

Each stage has a graph of its own. Weights, moments, counters and the one
learning rate schedule continue, and so does the position in the data unless the
files change.
"""

import bisect
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from checkpoints import checkpointing, run_folder
from checkpoints.checkpoint_files import Checkpoint, CheckpointFiles
from common import json_files
from common.errors import UserError
from config import training_plan
from data import masking

# A stage ends by one of these; the first is a flag.
_ENDS = ("num_train_steps", "num_train_tokens", "time_share")
_FLAGS = {
  "input_file": str,
  "max_seq_length": int,
  "max_predictions_per_seq": int,
  "shuffle_block_records": int,
  "train_batch_size": int,
  "learning_rate": float,
  "hidden_dropout_prob": float,
  "attention_probs_dropout_prob": float,
}
_MASKS = {
  "masked_lm_prob": str,
  "do_whole_word_mask": bool,
  "mask_replace_prob": float,
  "random_replace_prob": float,
}
_KINDS = {
  **_FLAGS, **_MASKS, "global_batch_size": list,
  "num_train_steps": int, "num_train_tokens": int, "time_share": float,
}  # fmt: skip
# What a stage that has begun may change.
_FREE = ("learning_rate", "train_batch_size")
_STATE = "training_state/stage"
_NAMES = {str: "text", int: "an integer", float: "a number", bool: "a boolean"}


def read(path: str) -> tuple[dict, ...]:
  """The checked items of a --stages file; raises `UserError`."""
  try:
    items = json_files.read(path)
  except OSError as e:
    raise UserError(f"--stages={path}: {e.strerror}") from e
  if not (isinstance(items, list) and items):
    raise UserError(f"--stages={path}: must be a list of stages")
  return tuple(
    _checked(item, f"--stages={path}, stage {number}")
    for number, item in enumerate(items, 1)
  )


def _checked(item, where: str) -> dict:
  if not isinstance(item, dict):
    raise UserError(f"{where}: must be an object of flags")
  ends = [name for name in _ENDS if name in item]
  if len(ends) != 1:
    raise UserError(
      f"{where}: must have one of {', '.join(_ENDS)}; it has "
      f"{' and '.join(ends) or 'none'}"
    )
  made = {}
  for name, value in item.items():
    kind = _KINDS.get(name)
    if kind is None:
      raise UserError(
        f"{where}: {name} cannot change in a run; a stage may have "
        f"{', '.join(_KINDS)}"
      )
    if kind is float and type(value) is int:
      value = float(value)
    if name == "masked_lm_prob" and type(value) is float:
      value = str(value)
    if kind is list:
      value = _batches(value, f"{where}: {name}={value}")
    elif type(value) is not kind:
      raise UserError(f"{where}: {name}={value!r}: must be {_NAMES[kind]}")
    elif name in _ENDS and not value > 0:
      raise UserError(f"{where}: {name}={value}: must be positive")
    made[name] = value
  return made


def _batches(value, where: str) -> list[int]:
  """[first, last] or [first, last, updates of the growth], all positive."""
  values = value if isinstance(value, list) else [value, value]
  fits = len(values) in (2, 3) and all(type(n) is int and n > 0 for n in values)
  if not fits or values[0] > values[1]:
    raise UserError(
      f"{where}: must be a number of examples, or the first and the last one "
      "of a batch that grows, and if need be in how many updates"
    )
  return values


def configs(base) -> list:
  """The `PretrainingConfig` of each stage, without its end."""
  kinds = {"time_share" in item for item in base.stages}
  timed = kinds == {True}
  if len(kinds) > 1 or timed != bool(base.max_train_minutes):
    raise UserError(
      "--stages: stages end by time_share, with --max_train_minutes, or by "
      "num_train_steps and num_train_tokens, without it: choose one of the two"
    )
  if len(set(base.masks.masked_lm_prob or ())) > 1:
    raise UserError(
      "--stages: a --masked_lm_prob that moves is a stage's: give it there"
    )
  shares = math.fsum(item.get("time_share", 0.0) for item in base.stages)
  if timed and not math.isclose(shares, 1.0, abs_tol=1e-6):
    raise UserError(
      f"--stages: the time_share of all stages is {shares:g}, not 1"
    )
  made = []
  for number, item in enumerate(base.stages):
    with _in_stage(number):
      made.append(_config(base, item))
  return made


@contextlib.contextmanager
def _in_stage(number: int) -> Iterator[None]:
  """Errors say of which stage they are."""
  try:
    yield
  except UserError as e:
    raise UserError(f"--stages, stage {number + 1}: {e}") from e


def _config(base, item: dict):
  given = {name: item[name] for name in _FLAGS if name in item}
  masks = {name: item[name] for name in _MASKS if name in item}
  if "masked_lm_prob" in masks:
    masks["masked_lm_prob"] = masking.shares(masks["masked_lm_prob"])
  batches = item.get("global_batch_size")
  return dataclasses.replace(
    base,
    **given,
    masks=dataclasses.replace(base.masks, **masks),
    global_batch_size=batches[1] if batches else base.global_batch_size,
  )


class Place(NamedTuple):
  """A stage where it begins in its run."""

  config: Any  # a `PretrainingConfig`
  plan: training_plan.TrainingPlan
  shares: tuple[float, float]  # of --max_train_minutes; (0, 1) without


@dataclasses.dataclass(frozen=True)
class Stages:
  """The stages of a run over ranks, all checked but those that have ended."""

  configs: list
  # As if each were the first one; None: it has ended.
  plans: list[training_plan.TrainingPlan | None]
  shares: list[tuple[float, float]]

  @classmethod
  def of(cls, base, begun: training_plan.Stage, plan_of) -> "Stages":
    """`begun`: the run's present stage.

    `plan_of`: config -> the plan of its batch; its updates do not count.
    """
    made = configs(base)
    plans: list[training_plan.TrainingPlan | None] = [None] * begun.number
    for number in range(begun.number, len(made)):
      with _in_stage(number):
        plan = plan_of(made[number])
        plans.append(_sized(plan, made[number], base.stages[number]))
    total = begun.first_update + sum(plan.updates for plan in plans if plan)
    if base.max_train_minutes:
      total = base.num_train_steps
    decay = base.num_decay_steps or math.ceil(total / 10)
    if base.num_warmup_steps + decay * bool(base.num_decay_steps) > total:
      raise UserError(
        f"--num_warmup_steps={base.num_warmup_steps} and --num_decay_steps="
        f"{base.num_decay_steps or 0} are more than the {total:,} updates of "
        "all stages"
      )
    whole = {"warmup_updates": base.num_warmup_steps, "decay_updates": decay}
    ends = [
      *itertools.accumulate(i.get("time_share", 0.0) for i in base.stages)
    ]
    if base.max_train_minutes:
      ends[-1] = 1.0
      shares = list(itertools.pairwise([0.0, *ends]))
    else:
      shares = [(0.0, 1.0)] * len(made)
    return cls(
      made,
      [
        plan
        and dataclasses.replace(
          plan,
          **whole,
          stage=dataclasses.replace(
            plan.stage, number=number, total_updates=total, count=len(plans)
          ),
        )
        for number, plan in enumerate(plans)
      ],
      shares,
    )

  def place(self, stage: training_plan.Stage) -> Place:
    """The stage that begins where `stage` says."""
    number = stage.number
    plan = self.plans[number]
    assert plan, "it has not ended"
    begins = {name: getattr(stage, name) for name in checkpointing.STAGE}
    plan = dataclasses.replace(
      plan,
      updates=min(stage.first_update + plan.updates, plan.stage.total_updates),
      stage=dataclasses.replace(plan.stage, **begins),
    )
    return Place(self.configs[number], plan, self.shares[number])

  def after(
    self, plan: training_plan.TrainingPlan, update: int
  ) -> training_plan.Stage:
    """Where the stage after `plan`'s begins, if that ended with `update`."""
    number = plan.stage.number + 1
    before, here = self.configs[number - 1 : number + 1]
    same = all(
      getattr(before, name) == getattr(here, name)
      for name in ("input_file", "shuffle_block_records")
    )
    return training_plan.Stage(
      number=number,
      first_update=update,
      first_record=plan.records_before(update) if same else 0,
      first_example=plan.examples_before(update),
    )

  def lines(self) -> Iterator[str]:
    for number, (plan, item) in enumerate(
      zip(self.plans, self.configs[0].stages, strict=True), 1
    ):
      if not plan:
        yield f"stage {number}: has ended"
        continue
      share = item.get("time_share")
      ends = (
        f"{plan.updates:,} updates" if not share else f"{share:.0%} of time"
      )
      batch = plan.examples(plan.records_per_update)
      if plan.stage.growing:
        batch = f"{plan.examples(plan.stage.first_batch)} to {batch}"
      yield f"stage {number}: {ends} of {batch} examples"


def _sized(plan, config, item: dict) -> training_plan.TrainingPlan:
  """The plan with the stage's updates, from 0, and its growing batch."""
  first, last, *growing = item.get("global_batch_size") or (0, 0)
  grows = first < last
  if grows:
    if last < 2 * first:
      raise UserError(
        f"global_batch_size={[first, last, *growing]}: a batch grows in "
        "multiples of its first size: give at least twice as many at the end"
      )
    if not growing and "time_share" in item:
      raise UserError(
        f"global_batch_size={[first, last]} of a stage that ends by "
        "time_share: say as a third number in how many updates it grows"
      )
    records = max(1, round(first / plan.packing_factor))
    # Ranks may have nothing to do at first: a run resumes on any number.
    micro, _ = training_plan.spread(
      records, config.train_batch_size, plan.ranks
    )
    share = -(-plan.records_per_update // plan.ranks)
    plan = dataclasses.replace(
      plan, micro_batch=micro, accumulation=-(-share // micro)
    )

  def sized(updates: int) -> training_plan.TrainingPlan:
    if not grows:
      return dataclasses.replace(plan, updates=updates)
    stage = training_plan.Stage(
      first_batch=records, growing=min([*growing, updates - 1])
    )
    return dataclasses.replace(plan, updates=updates, stage=stage)

  if tokens := item.get("num_train_tokens"):
    wanted = math.ceil(tokens / config.tokens_of_a_record())
    smallest = records if grows else plan.records_per_update
    updates = bisect.bisect_left(
      range(-(-wanted // smallest)), wanted, lo=1,
      key=lambda n: sized(n).records_before(n),
    )  # fmt: skip
    return sized(updates)
  # One that ends by time ends there at the latest.
  return sized(item.get("num_train_steps", config.num_train_steps))


def current(config, comm, snapshot=None) -> training_plan.Stage:
  """Where the stage of the run's newest state began; on all ranks.

  Raises `UserError` if the stages up to this one were others.
  """
  found: Sequence[int] = [0] * len(checkpointing.STAGE)
  if comm.is_root:
    values, folder = snapshot.values if snapshot else None, config.output_dir
    names = values or ()
    if values is None:
      newest = CheckpointFiles(folder, keep=1).newest_whole()
      if newest:
        values = Checkpoint(newest)
        names = values.shapes
    if values is not None:
      if _STATE not in names:
        raise UserError(
          f"{folder} holds a run without --stages: give its weights as "
          "--init_checkpoint to a new run in another --output_dir"
        )
      found = [int(n) for n in values[_STATE]]
      _check_same(config, found[0])
  return training_plan.Stage(
    **dict(zip(checkpointing.STAGE, comm.from_root(found), strict=True))
  )


def _check_same(config, number: int) -> None:
  before = run_folder.last_training(config.output_dir)
  made = (before or {"flags": {}})["flags"].get("stages") or []
  given = [dict(item) for item in config.stages]
  for i, (old, new) in enumerate(zip(made, given, strict=False)):
    fixed = lambda item: {**item, **dict.fromkeys(_FREE)}
    if i <= number and fixed(old) != fixed(new):
      raise UserError(
        f"{config.output_dir} holds a run whose stage {i + 1} was {old}; "
        f"--stages now says {new}. Stages that have begun keep all but their "
        f"{' and '.join(_FREE)}: give them as they were, or train in another "
        "--output_dir"
      )
  if number >= len(given):
    raise UserError(
      f"{config.output_dir} holds a run in stage {number + 1}, --stages has "
      f"{len(given)}"
    )
