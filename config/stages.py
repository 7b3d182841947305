"""--stages: one run whose data, lengths, batches and masks change on the way.

A JSON list; an item holds flags of run_pretraining.py without "--", for the
updates of its stage:

  [{"input_file": "records32/*", "global_batch_size": [64, 256],
    "num_train_steps": 2000, "masked_lm_prob": "0.3:0.2"},
   {"input_file": "records128/*", "learning_rate": 0.001,
    "num_train_tokens": 50000000}]

Each stage has a graph of its own. Weights, moments, counters and the one
learning rate schedule continue, and so does the position in the data unless the
files change. A stage with a model of its own size trains what `model.growth`
makes of the one before.

A batch that grows has a list of sizes, each for some updates. Its stage has one
graph for all of them: only the number of micro-batches changes.
"""

import bisect
import contextlib
import copy
import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from common import json_files
from common.errors import UserError
from config import training_plan
from config.bert_config import BertConfig
from records import masking

# A stage ends by one of these; the first is a flag.
_ENDS = {"num_train_steps": int, "num_train_tokens": int, "time_share": float}
_FLAGS = {
  "input_file": str, "max_seq_length": int, "max_predictions_per_seq": int,
  "shuffle_block_records": int, "train_batch_size": int, "learning_rate": float,
  "hidden_dropout_prob": float, "attention_probs_dropout_prob": float,
  "sampled_softmax": int,
}  # fmt: skip
_MASKS = {
  "masked_lm_prob": (str, float), "do_whole_word_mask": bool,
  "mask_replace_prob": float, "random_replace_prob": float,
}  # fmt: skip
# What only grows from stage to stage; null heads of keys are as many as heads.
_SIZES = (
  "num_hidden_layers", "hidden_size", "num_attention_heads",
  "num_key_value_heads", "intermediate_size",
)  # fmt: skip
# A model's keys, instead of the BERT config's; and how one comes from another.
_MODEL = {"global_rope_theta": float, **dict.fromkeys(_SIZES, int)}
_METHODS = "stack", "interpolate"
_KINDS = {
  **_FLAGS, **_MODEL, "growth": _METHODS, **_MASKS,
  "global_batch_size": (int, [int]), **_ENDS,
}  # fmt: skip


def read(path: str) -> tuple[dict, ...]:
  """The checked items of a --stages file; raises `UserError`."""
  try:
    items = json_files.read(path)
  except ValueError as e:
    raise UserError(f"--stages: {e}") from e
  if not (isinstance(items, list) and items):
    raise UserError(f"--stages={path}: must be a list of stages")
  checked = []
  for number, item in enumerate(items, 1):
    checked.append(read_item(item, f"--stages={path}, stage {number}"))
  return tuple(checked)


def read_item(item, where: str) -> dict:
  """A stage's flags with values of their types; `where` names it in errors."""
  try:
    form = {f"{name}?": kind for name, kind in _KINDS.items()}
    json_files.expect(item, form)
  except ValueError as e:
    raise UserError(f"{where}: {e}") from e
  ends = [item[name] for name in _ENDS if name in item]
  if len(ends) != 1 or ends[0] <= 0 or not item.keys() <= _KINDS.keys():
    raise UserError(
      f"{where}: {item} must have one of {', '.join(_ENDS)}, which is "
      f"positive, and can change no flags but {', '.join(_KINDS)}"
    )
  flags = {}
  for name, value in item.items():
    if _KINDS[name] is float:
      value = float(value)
    elif name == "masked_lm_prob":
      value = str(value)
    elif name == "global_batch_size" and type(value) is int:
      value = [value, value]
    flags[name] = value
  sizes = flags.get("global_batch_size", [1, 1])
  # When a stage of a share of the time ends is not known beforehand.
  is_known = len(sizes) == 3 or "time_share" not in flags
  first, last = (*sizes, 0, 0)[:2]
  fits = first == last or (is_known and last >= 2 * first)
  if len(sizes) not in (2, 3) or min(sizes) < 1 or not fits:
    raise UserError(
      f"{where}: global_batch_size={sizes}: must be a number of examples, or "
      "[first, last, updates] of a batch that grows in multiples of its first "
      "size: to at least twice as many, in so many updates. Without time_share "
      "the updates may be left out"
    )
  return flags


class Growth(NamedTuple):
  """How a stage makes its model of an earlier stage's."""

  small: BertConfig
  large: BertConfig
  method: str

  def changes(self) -> str:
    """A part of a line: the sizes that differ; "" for none."""
    before, now = self.small.meaning(), self.large.meaning()
    changed = [key for key in _SIZES if before[key] != now[key]]
    return ", ".join(f"{key} {before[key]} -> {now[key]}" for key in changed)


def model_of(bert: BertConfig, item: Mapping) -> BertConfig:
  """The BERT config of a stage: `bert` with the stage's keys."""
  bert = copy.copy(bert)
  for key in _MODEL.keys() & item.keys():
    setattr(bert, key, item[key])
  return bert


def growth(bert: BertConfig, items, before: int, now: int) -> Growth:
  """How the model of stage `now` comes from that of stage `before`."""
  small, large = model_of(bert, items[before]), model_of(bert, items[now])
  return Growth(small, large, items[now].get("growth", _METHODS[0]))


def check_models(bert: BertConfig, items) -> None:
  """Raises `UserError` for a stage's model that cannot be."""
  for number in range(len(items)):
    how = growth(bert, items, max(0, number - 1), number)
    with _in_stage(number):
      how.large.validate("the BERT config of the stage")
      before, now = how.small.meaning(), how.large.meaning()
      heads = []
      for model in (how.small, how.large):
        readers = model.num_attention_heads // model.key_value_heads
        heads.append((model.head_size, readers))
      shrinks = any(now[key] < before[key] for key in _SIZES)
      if shrinks or heads[0] != heads[1]:
        raise UserError(
          f"{how.changes()}: a model only grows, and keeps heads of "
          f"{heads[0][0]} numbers, and {heads[0][1]} of them for one of keys"
        )


def configs(base, ended: int = 0) -> list:
  """The `PretrainingConfig` of each stage, without its end.

  The first `ended` ones have ended, perhaps on other ranks.
  """
  by_time = bool(base.max_train_minutes)
  if {"time_share" in item for item in base.stages} != {by_time}:
    raise UserError(
      "--stages: stages end by time_share, with --max_train_minutes, or by "
      "num_train_steps and num_train_tokens, without it: choose one of the two"
    )
  shares = math.fsum(item.get("time_share", 0.0) for item in base.stages)
  if by_time and not math.isclose(shares, 1.0, abs_tol=1e-6):
    raise UserError(
      f"--stages: the time_share of all stages is {shares:g}, not 1"
    )
  if len(set(base.masks.masked_lm_prob or ())) > 1:
    raise UserError(
      "--stages: a --masked_lm_prob that moves is a stage's: give it there"
    )
  staged = []
  for number, item in enumerate(base.stages):
    flags = {name: item[name] for name in _FLAGS if name in item}
    flags["stage"] = number
    if number < ended:  # it is not built again
      flags["tensor_parallel"] = 1
    masks = {name: item[name] for name in _MASKS if name in item}
    if "global_batch_size" in item:
      flags["global_batch_size"] = item["global_batch_size"][1]
    with _in_stage(number):
      if "masked_lm_prob" in masks:
        masks["masked_lm_prob"] = masking.shares(masks["masked_lm_prob"])
      masks = dataclasses.replace(base.masks, **masks)
      staged.append(dataclasses.replace(base, **flags, masks=masks))
  return staged


@contextlib.contextmanager
def _in_stage(number: int) -> Iterator[None]:
  """Makes errors say of which stage they are."""
  try:
    yield
  except UserError as e:
    raise UserError(f"--stages, stage {number + 1}: {e}") from e


class StageStart(NamedTuple):
  """A stage, and where it begins in its run."""

  config: Any  # a `PretrainingConfig`
  plan: training_plan.TrainingPlan
  shares: tuple[float, float]  # of --max_train_minutes; (0, 1) without


class Stages:
  """The stages of a run over ranks, all planned but those that have ended."""

  def __init__(self, base, begun: training_plan.Stage, plan_of: Callable):
    """`begun` is the run's present stage.

    `plan_of`: config -> the plan of its batch, whose updates do not count, and
    the mean of real tokens in a record.
    """
    self._base, self.configs = base, configs(base, begun.number)
    # By number, as if each were the run's first stage.
    self._plans: dict[int, training_plan.TrainingPlan] = {}
    for number in range(begun.number, len(self.configs)):
      config = self.configs[number]
      with _in_stage(number):
        plan, tokens = plan_of(config)
        item = base.stages[number]
        self._plans[number] = _planned(plan, config, item, tokens)
    # Stages that have ended made their updates, whatever --stages says of them.
    total = begun.first_update
    for plan in self._plans.values():
      total += plan.updates
    self._total = base.num_train_steps if base.max_train_minutes else total
    decay = base.num_decay_steps or 0
    self._warmup = base.warmup_of(self._total)
    if self._warmup + decay > self._total:
      raise UserError(
        f"--num_warmup_steps={self._warmup} and --num_decay_steps="
        f"{decay} are more than the {self._total:,} updates of all stages"
      )
    self._decay = decay or math.ceil(self._total / 10)

  def start(self, begun: training_plan.Stage) -> StageStart:
    """The stage that begins where `begun` says."""
    plan, count = self._plans[begun.number], len(self.configs)
    stage = dataclasses.replace(
      begun, ramp=plan.stage.ramp, total_updates=self._total, count=count
    )
    plan = dataclasses.replace(
      plan,
      updates=min(begun.first_update + plan.updates, self._total),
      warmup_updates=self._warmup,
      decay_updates=self._decay,
      stage=stage,
    )
    first, last = 0.0, 1.0
    if self._base.max_train_minutes:
      shares = [item["time_share"] for item in self._base.stages]
      first = sum(shares[: begun.number])
      if not stage.is_last:  # that one ends at 1, whatever the sum's rounding
        last = first + shares[begun.number]
    return StageStart(self.configs[begun.number], plan, (first, last))

  def after(
    self, plan: training_plan.TrainingPlan, update: int
  ) -> training_plan.Stage:
    """Where the stage after `plan`'s begins, if that ended with `update`."""
    # The same files and order go on; others begin with their first record.
    number = plan.stage.number + 1
    before, here = self.configs[number - 1 : number + 1]
    data = operator.attrgetter("input_file", "shuffle_block_records")
    same_data = data(before) == data(here)
    return training_plan.Stage(
      number=number,
      first_update=update,
      first_record=plan.records_before(update) if same_data else 0,
      first_example=plan.examples_before(update),
    )

  def lines(self) -> Iterator[str]:
    for number, item in enumerate(self._base.stages):
      plan = self._plans.get(number)
      if not plan:
        yield f"stage {number + 1}: has ended"
        continue
      ends = f"{plan.updates:,} updates"
      if "time_share" in item:
        ends = f"{item['time_share']:.0%} of time"
      batch = f"{plan.examples(plan.records_per_update)}"
      if plan.stage.ramp:
        batch = f"{plan.examples(plan.records_of(0))} to {batch}"
      line = f"stage {number + 1}: {ends} of {batch} examples"
      for key in (*_MODEL, "growth", "sampled_softmax"):
        if key in item:
          line += f", {key} {item[key]}"
      yield line


def _planned(
  plan, config, item: dict, tokens: float
) -> training_plan.TrainingPlan:
  """`plan` with the stage's updates, counted from 0, and its growing batch."""
  sizes = item.get("global_batch_size", [config.global_batch_size] * 2)
  first, last, *growth = sizes
  smallest = max(1, round(first / plan.packing_factor))
  # The first size decides the micro-batch, so that all sizes share a graph.
  # Ranks may have nothing to do at first: a run resumes on any number.
  micro, _ = training_plan.spread(smallest, config.train_batch_size, plan.ranks)
  share = math.ceil(plan.records_per_update / plan.ranks)
  times = math.ceil(share / micro)
  plan = dataclasses.replace(plan, micro_batch=micro, accumulation=times)

  def of(updates: int) -> training_plan.TrainingPlan:
    if first == last:
      return dataclasses.replace(plan, updates=updates)
    grows_for = min([*growth, updates - 1])
    sizes = _ramp(smallest, plan.records_per_update, grows_for)
    stage = training_plan.Stage(ramp=sizes)
    return dataclasses.replace(plan, updates=updates, stage=stage)

  if "num_train_tokens" not in item:
    # One that ends by time ends there at the latest.
    return of(item.get("num_train_steps", config.num_train_steps))
  # The fewest updates that read so many tokens: with a batch that grows there
  # is no formula, and each number of updates has its own ramp.
  records = math.ceil(item["num_train_tokens"] / tokens)
  most = math.ceil(records / smallest)
  records_in = lambda n: of(n).records_before(n)
  return of(bisect.bisect_left(range(most), records, lo=1, key=records_in))


def _ramp(first: int, last: int, updates: int) -> tuple:
  """The sizes of a batch that grows in `updates`, as `Stage.ramp` has them."""
  # In multiples of the first, so that no micro-batch is partly empty, on any
  # ranks.
  times = np.linspace(1, last / first, updates + 1)[:-1]
  sizes = np.minimum(first * np.rint(times).astype(int), last)
  equal = itertools.groupby(sizes.tolist())
  return tuple((len(list(group)), size) for size, group in equal)
