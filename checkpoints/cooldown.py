"""Which checkpoint a cooldown (--cooldown_from) starts from."""

import os

from checkpoints import checkpoint_files, metrics, run_folder
from common.errors import UserError
from gradients import distributed


def start_of(named: str, output_dir: str) -> str:
  """The checkpoint that --cooldown_from=`named` means for `output_dir`.

  A run that has begun keeps its own. Raises `UserError` unless the checkpoint
  is of the part of its run with a constant rate.
  """
  named = os.path.normpath(named)
  if not (os.path.dirname(named) or os.path.isdir(named)):
    named = os.path.join(os.curdir, named)
  begun = None
  # A rank that joins an elastic run may find no checkpoint yet.
  if checkpoint_files.has_begun(output_dir) or distributed.is_elastic():
    begun = run_folder.last_training(output_dir)
  path = begun["flags"].get("cooldown_from") if begun else None
  if begun and (not path or named not in (path, os.path.dirname(path))):
    raise UserError(
      f"{output_dir} holds a run "
      + (f"with --cooldown_from={path}" if path else "without --cooldown_from")
      + f", not of {named}: use another --output_dir"
    )
  if path:
    return path
  folder = named if os.path.isdir(named) else os.path.dirname(named)
  run = run_folder.last_training(folder)
  if run is None:
    raise UserError(
      f"--cooldown_from={named}: {folder or '.'} is no folder of a training"
    )
  flags, plan = run["flags"], run["plan"]
  for name in ("max_train_minutes", "stages"):
    if flags.get(name):
      raise UserError(
        f"--cooldown_from={named}: {folder} holds a run with --{name}, whose "
        "rate does not follow its updates alone: it has no cooldowns"
      )
  if not flags.get("rewarmup", True):
    raise UserError(
      f"--cooldown_from={named}: {folder} holds a run with --norewarmup, whose "
      "schedule began in another run: it has no cooldowns"
    )
  first, last = plan["warmup_updates"], plan["updates"]
  if flags["lr_schedule"].startswith("wsd"):
    last -= plan["decay_updates"]
  elif flags["lr_schedule"] != "constant":
    first = last + 1
  files = checkpoint_files.CheckpointFiles(folder, keep=1)
  steps = files.steps()
  if named != folder:
    steps = [step for step in steps if files.prefix(step) == named]
  rates = _rates(folder)
  steps = [
    step
    for step in steps
    if first <= step <= last and not _falls(rates, first, step)
  ]
  if not steps:
    constant = f"updates {first:,} to {last:,}" if first <= last else "none"
    raise UserError(
      f"--cooldown_from={named}: no checkpoint there is of the part with a "
      f"constant rate ({constant}; --lr_schedule={flags['lr_schedule']}); a "
      "run keeps as many as its --keep_checkpoints"
    )
  return files.prefix(steps[0])


def _rates(folder: str) -> dict[int, float]:
  """Update -> its learning rate, of the run's reports."""
  reports = metrics.read_jsonl(os.path.join(folder, metrics.METRICS_FILE))
  return {
    one["global_step"]: one["learning_rate"]
    for one in reports
    if "learning_rate" in one
  }


def _falls(rates: dict[int, float], first: int, step: int) -> bool:
  """Whether the rate has fallen in the last two reports up to `step`.

  So it does where the run once ended, if it was then continued.
  """
  known = sorted(update for update in rates if first <= update <= step)
  return len(known) > 1 and rates[known[-1]] < rates[known[-2]]
