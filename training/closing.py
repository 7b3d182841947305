"""The closing screen: what a run did, where its files are, what comes next."""

import os

from checkpoints import metrics, run_folder
from common import json_files
from common.console import tell
from training import next_steps, reporting


def finish(
  run, training: dict | None, results: dict | None, step: int, predicted: list
) -> None:
  """Writes and tells what training and evaluation returned; on rank 0."""
  folder, prefix = run.config.output_dir, run.checkpointer.files.prefix
  lines = [""]  # apart from the progress above
  if training and training["updates"]:
    path = os.path.join(folder, run_folder.TRAINING_RESULTS_FILE)
    json_files.write(path, training)
    lines.append(reporting.speed_lines(training))
  elif training and not (training["stopped"] or training["stopped_early"]):
    lines.append(f"nothing left to train: update {step:,} is the last")
  if results and not run_folder.is_written(run.config):
    lines.append(f"evaluation  only shown: {folder} may not be written")
  elif results:
    path = os.path.join(folder, run_folder.EVAL_RESULTS_FILE)
    json_files.write(path, results)
    lines.append(f"evaluation  {path}")
  lines += predicted
  best = run.best_saved(step)
  if best is not None:
    lines.append(f"best        {prefix(best)} by evaluation")
  if training:
    lines += [
      f"checkpoint  {prefix(step) if step else 'none yet'}",
      f"metrics     {os.path.join(folder, metrics.METRICS_FILE)}",
      f"TensorBoard {folder}",
    ]
    if training["profile"]:
      lines.append(
        f"profile     {training['profile']}, for TensorBoard with "
        "tensorboard-plugin-profile"
      )
    elif run.config.profile and run.task.plan.stage.count == 1:
      lines.append("profile     none: its updates were not made in this run")
    lines.append(_why_it_ended(run, training, step))
    # Commands for the model, once there is one and no stage follows.
    is_over = run.task.plan.stage.is_last or training["stopped_early"]
    if step and is_over and not training["stopped"]:
      lines += next_steps.lines(run.job.next_steps)
  tell(*lines)


def _why_it_ended(run, training: dict, step: int) -> str:
  """Why it ended, and how it can continue."""
  stage, config = run.task.plan.stage, run.config
  if training["stopped"] and not step:
    return "stopped as asked before update 1: the same command starts it"
  if training["stopped"]:
    return (
      f"stopped as asked after update {step:,}, saved: the same command "
      "resumes there"
    )
  if training["stopped_early"]:
    return (
      f"stopped early: {config.early_stopping_evaluations} evaluations in a "
      "row were no better"
    )
  if not stage.is_last:
    return f"stage {stage.number + 1} of {stage.count} ended"
  if training["out_of_time"]:
    return (
      f"ended after --max_train_minutes={config.max_train_minutes:g}, at the "
      "end of its learning rate's schedule: to train longer, start a new run"
    )
  return config.how_to_continue()
