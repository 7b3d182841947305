"""Where a run starts: in a stage of its own, or as a cooldown of another run.

A cooldown (--cooldown_from) is the last stage of a run, but in another folder.
"""

import os

from checkpoints import checkpoint_files, checkpointing, description, metrics
from checkpoints.checkpoint_files import Checkpoint, CheckpointFiles
from common.errors import UserError
from config import training_plan
from gradients import distributed

_STATE = "training_state/stage"
# What a stage that has begun may change.
_FREE = ("learning_rate", "train_batch_size")


def stage(config, comm, snapshot=None) -> training_plan.Stage:
  """Where the stage of the run's newest state began; on all ranks.

  Raises `UserError` if the stages up to this one were others.
  """
  start = [0] * len(checkpointing.STAGE)
  if comm.is_root:
    start = _newest_start(config, snapshot) or start
  start = comm.from_root(start)
  return training_plan.Stage(
    **dict(zip(checkpointing.STAGE, start, strict=True))
  )


def _newest_start(config, snapshot) -> list[int] | None:
  """What the newest state says of its stage, or None for a new run."""
  folder = config.output_dir
  if snapshot and snapshot.values is not None:
    state, names = snapshot.values, snapshot.values
  else:
    newest = CheckpointFiles(folder, keep=1).newest_whole()
    if not newest:
      return None
    state = Checkpoint(newest)
    names = state.shapes
  if _STATE not in names:
    raise UserError(
      f"{folder} holds a run without --stages: give its weights as "
      "--init_checkpoint to a new run in another --output_dir"
    )
  start = [int(n) for n in state[_STATE]]
  _check_begun_stages(config, start[0])
  return start


def _check_begun_stages(config, number: int) -> None:
  run = description.read(config.output_dir).training or {"flags": {}}
  before, now = run["flags"].get("stages") or [], config.stages
  for i, (old, new) in enumerate(zip(before, now, strict=False)):
    fixed = lambda item: {**item, **dict.fromkeys(_FREE)}
    if i <= number and fixed(old) != fixed(new):
      raise UserError(
        f"{config.output_dir} holds a run whose stage {i + 1} was {old}; "
        f"--stages now says {new}. Stages that have begun keep all but their "
        f"{' and '.join(_FREE)}: give them as they were, or train in another "
        "--output_dir"
      )
  if number >= len(now):
    raise UserError(
      f"{config.output_dir} holds a run in stage {number + 1}, --stages has "
      f"{len(now)}"
    )


def cooldown(named: str, output_dir: str) -> str:
  """The checkpoint that --cooldown_from=`named` means for `output_dir`.

  A run that has begun keeps its own. Raises `UserError` unless the checkpoint
  is of the part of its run with a constant rate.
  """
  named = os.path.normpath(named)
  if not (os.path.dirname(named) or os.path.isdir(named)):
    named = os.path.join(os.curdir, named)
  # A rank that joins an elastic run may find no checkpoint yet.
  if checkpoint_files.has_begun(output_dir) or distributed.is_elastic():
    if begun := description.read(output_dir).training:
      return _begun_cooldown(
        begun["flags"].get("cooldown_from"), named, output_dir
      )
  folder = named if os.path.isdir(named) else os.path.dirname(named)
  run = description.read(folder).training
  if run is None:
    raise UserError(
      f"--cooldown_from={named}: {folder or '.'} is no folder of a training"
    )
  first, last = _constant_part(run, f"--cooldown_from={named}: {folder}")
  files = CheckpointFiles(folder, keep=1)
  reports = metrics.read_jsonl(os.path.join(folder, metrics.METRICS_FILE))
  # The newest comes first.
  for step in files.steps():
    is_meant = named in (folder, files.prefix(step))
    if (
      is_meant
      and first <= step <= last
      and not _has_fallen(reports, first, step)
    ):
      return files.prefix(step)
  constant = f"updates {first:,} to {last:,}" if first <= last else "no updates"
  raise UserError(
    f"--cooldown_from={named}: none of its checkpoints lies in the "
    f"constant-rate part ({constant} of --lr_schedule="
    f"{run['flags']['lr_schedule']}): keep more with --keep_checkpoints"
  )


def _begun_cooldown(path: str | None, named: str, output_dir: str) -> str:
  """`path`, from which `output_dir`'s run began, if `named` means it."""
  if path and named in (path, os.path.dirname(path)):
    return path
  start = f"with --cooldown_from={path}" if path else "without --cooldown_from"
  raise UserError(
    f"{output_dir} holds a run {start}, not of {named}: use another "
    "--output_dir"
  )


def _constant_part(run: dict, where: str) -> tuple[int, int]:
  """The first and the last update that end with the rate at its peak."""
  flags, plan = run["flags"], run["plan"]
  refused = {
    "max_train_minutes": "whose rate does not follow its updates alone",
    "stages": "whose rate does not follow its updates alone",
    "norewarmup": "whose schedule began in another run",
  }
  has = {**flags, "norewarmup": not flags.get("rewarmup", True)}
  for name, reason in refused.items():
    if has.get(name):
      raise UserError(
        f"{where} holds a run with --{name}, {reason}: it has no cooldowns"
      )
  first, last = plan["warmup_updates"], plan["updates"]
  if flags["lr_schedule"].startswith("wsd"):
    return first, last - plan["decay_updates"]
  return (first, last) if flags["lr_schedule"] == "constant" else (1, 0)


def _has_fallen(reports: list[dict], first: int, step: int) -> bool:
  """Whether the rate fell between the last two reports from `first` to `step`.

  So it does where the run once ended, if it was then continued.
  """
  rates = []
  for report in reports:
    if first <= report["global_step"] <= step and "learning_rate" in report:
      rates.append(report["learning_rate"])
  return len(rates) > 1 and rates[-1] < rates[-2]


def check_vocabulary(config, data: dict) -> None:
  """Raises `UserError` for records of other words than the model's.

  `data` is as in run.json. The model is --output_dir's if it has a checkpoint,
  else --cooldown_from's or --init_checkpoint's.
  """
  folder = config.output_dir or ""
  if not checkpoint_files.has_begun(folder):
    start = config.cooldown_from or config.init_checkpoint
    folder = description.folder_of(start)
  before = description.read(folder).facts()
  now = description.facts({}, None, data)
  description.agree(before, now, folder, (description.MODEL,))
