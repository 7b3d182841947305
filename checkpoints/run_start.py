"""Where a run starts: in a stage of its own, or as a cooldown of another run.

A cooldown (--cooldown_from) is the last stage of a run, but in another folder.
"""

import dataclasses
import os

from checkpoints import agreement, checkpoint_files, description, metrics
from checkpoints.checkpoint_files import Checkpoint, CheckpointFiles
from common.errors import UserError
from config import training_plan
from config.bert_config import BertConfig

STAGE = "training_state/stage"  # a checkpoint's variable
# What a stage that has begun may change.
_FREE = ("learning_rate", "train_batch_size")


def stage(config, comm, snapshot=None) -> training_plan.Stage:
  """Where the stage of the run's newest state began; on all ranks.

  Raises `UserError` if the stages up to this one were others.
  """
  start = _newest_start(config, snapshot) if comm.is_root else None
  names = training_plan.SAVED_OF_STAGE
  start = comm.from_root(start) or [0] * len(names)
  return training_plan.Stage(**dict(zip(names, start, strict=True)))


def _newest_start(config, snapshot) -> list[int] | None:
  """What the newest state says of its stage, or None for a new run."""
  if snapshot and snapshot.values is not None:
    return [int(n) for n in snapshot.values[STAGE]]
  # A checkpoint says where its stage began; run.json, what stages were before.
  newest = CheckpointFiles(config.output_dir, keep=1).newest_whole()
  if not newest:
    return None
  before = origin_of(config)
  now = agreement.of_start(config.as_dict())
  agreement.agree(before.facts(), now, before.folder, (agreement.RUN,))
  start = [int(n) for n in Checkpoint(newest)[STAGE]]
  if before.training:
    was = begun_stages(before.training["flags"].get("stages") or (), start[0])
    now = begun_stages(config.stages, start[0])
    agreement.agree(was, now, before.folder, (agreement.START,))
  return start


def evaluated_bert(config, comm) -> BertConfig:
  """The model that an evaluation alone reads; on all ranks.

  A run that has stopped has that of its newest checkpoint's stage.
  """
  bert, folder = config.bert, config.output_dir or ""
  if comm.is_root and checkpoint_files.has_begun(folder):
    newest = CheckpointFiles(folder, keep=1).newest_whole()
    step = checkpoint_files.step_of(newest) if newest else None
    about = dataclasses.replace(description.read(folder), step=step)
    bert = about.bert or bert
  return comm.from_root(bert)


def begun_stages(stages, number: int) -> dict:
  """Facts of the stages up to one, but for what they may change."""
  begun = []
  for item in stages[: number + 1]:
    begun.append({key: item[key] for key in item if key not in _FREE})
  return {"begun_stages": begun}


def cooldown(named: str, about: description.Description, begun: bool) -> str:
  """The checkpoint that --cooldown_from=`named` means.

  `about` is the run's own folder if it has `begun`, which keeps its checkpoint;
  else the folder that is named. Raises `UserError` unless the checkpoint is of
  the part of its run with a constant rate.
  """
  run, folder = about.training, about.folder
  if begun and run:
    kept = run["flags"].get("cooldown_from")
    if kept and named == os.path.dirname(kept):
      named = kept
    was, now = {"cooldown_from": kept}, {"cooldown_from": named}
    agreement.agree(was, now, folder, (agreement.START,))
  if begun:
    return named
  if run is None:
    raise UserError(
      f"--cooldown_from={named}: {folder or '.'} is no folder of a training"
    )
  first, last = _constant_part(run)
  files = CheckpointFiles(folder, keep=1)
  reports = metrics.reports_of(folder)
  # The newest comes first. Reports tell where the rate has fallen after all.
  for step in files.steps():
    prefix, rates = files.prefix(step), []
    if named not in (folder, prefix) or not first <= step <= last:
      continue
    for report in reports:
      if first <= report["global_step"] <= step and "learning_rate" in report:
        rates.append(report["learning_rate"])
    # It has where the run once ended, if it was then continued.
    if len(rates) < 2 or rates[-1] >= rates[-2]:
      return prefix
  raise UserError(
    f"--cooldown_from={named}: none of its checkpoints lies in the part whose "
    f"rate is constant by its updates ({first:,} to {last:,} of --lr_schedule="
    f"{run['flags']['lr_schedule']}): keep more with --keep_checkpoints"
  )


def _constant_part(run: dict) -> tuple[int, int]:
  """The first and the last update that end with the rate at its peak."""
  flags, plan = run["flags"], run["plan"]
  # None, (1, 0), where the rate does not follow the run's own updates.
  follows_others = flags.get("stages") or not flags.get("rewarmup", True)
  if flags.get("max_train_minutes") or follows_others:
    return 1, 0
  first, last = plan["warmup_updates"], plan["updates"]
  if flags["lr_schedule"].startswith("wsd"):
    return first, last - plan["decay_updates"]
  return (first, last) if flags["lr_schedule"] == "constant" else (1, 0)


def origin_of(config, resumes: bool = False) -> description.Description:
  """What the folder says that a run goes on from.

  It is --output_dir if that has a checkpoint, or the run `resumes` from memory,
  else --cooldown_from's or --init_checkpoint's.
  """
  folder = config.output_dir or ""
  if not (resumes or checkpoint_files.has_begun(folder)):
    branch = getattr(config, "cooldown_from", None)
    folder = description.folder_of(branch or config.init_checkpoint)
  return description.read(folder)


def check_vocabulary(config, data: dict) -> None:
  """Raises `UserError` for records of other tokens than the model's.

  --other_vocabulary allows them where the model only begins a run. `data` is as
  in run.json.
  """
  before, now = origin_of(config), agreement.of_start({}, None, data)
  if before.folder == config.output_dir or not config.other_vocabulary:
    agreement.agree(before.facts(), now, before.folder, (agreement.MODEL,))
