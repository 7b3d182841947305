"""Stops a run that cannot get better by itself, and says where it went bad.

Updates whose gradient is not finite are skipped, and a dynamic loss scale falls
until they are. Where it cannot fall, a few of them in a row mean that the
weights, a record or the learning rate are beyond repair.
"""

import os
import shlex
import sys

import numpy as np

from common import json_files
from common.console import say
from common.errors import UserError

FILE = "nonfinite.json"
PATIENCE = 10  # updates in a row
_SHOWN = 8  # records in the message


class DivergedError(UserError):
  """Training that has become infinite or NaN for good."""


class Guard:
  """Watches for updates that are not finite and have no remedy."""

  def __init__(self, run):
    """Prepares to watch a `train_loop.Run`."""
    self._run = run
    self._first: dict | None = None  # of the updates in a row
    self._last: dict = {}
    self._doubtful = False

  @property
  def bad(self) -> bool:
    """Whether the state is not to be saved; the same on all ranks.

    The last update was skipped, or lost micro-batches as the one before it.
    """
    return self._first is not None and self._doubtful

  def check(self, step: int, update: dict) -> None:
    """Looks at an `update` of `train_loop.run_update`.

    Raises:
      DivergedError: it was the last of `PATIENCE` in a row; on all ranks.
    """
    task = self._run.task
    failed = update["skipped"] or update["dropped_micro_batches"] > 0
    if not failed or update["loss_scale"] > task.loss_scale_floor:
      self._first = None
      return
    self._doubtful = bool(update["skipped"]) or self._first is not None
    if self._first is None:
      which = int(update["nonfinite_variable"])
      self._first = {
        "update": step,
        "samples_seen_before": (step - 1) * task.plan.records_per_update,
        "gradient_of": task.ops.variables[which].op.name
        if which >= 0
        else "all variables together",
      }
    self._last = update
    if step - self._first["update"] + 1 >= PATIENCE:
      self._raise(step)

  def end(self, step: int) -> int:
    """To be called where a run ends in bad updates: they are not saved.

    Returns:
      The update from which a run that was stopped resumes.

    Raises:
      DivergedError: `step` was the plan's last update; on all ranks.
    """
    if step == self._run.task.plan.updates:
      self._raise(step)
    saved = self._run.checkpointer.fall_back()
    say(
      self._run.comm,
      f"updates {self._first['update']:,} to {step:,} were not finite and are "
      f"not saved: update {saved:,} is the newest that is",
    )
    return saved

  def _raise(self, step: int) -> None:
    self._run.checkpointer.wait()  # the message may name what it writes
    message = self._message(step)
    # The first rank that ends has horovodrun end the others: not before
    # rank 0 knows what to say.
    self._run.comm.gather(np.zeros(1))
    raise DivergedError(message)

  def _message(self, step: int) -> str:
    first, run = self._first, self._run
    reason = (
      f"update {step:,}: gradients are not finite for "
      f"{step - first['update'] + 1} updates in a row, first at update "
      f"{first['update']:,} that of {first['gradient_of']}"
      f" (loss scale {self._last['loss_scale']:g}, which cannot fall)"
    )
    if not run.comm.is_root:
      return f"{reason}; rank 0 says more"
    path, records, weights = self._write_report()
    named = ", ".join(":".join(map(str, r.values())) for r in records[:_SHOWN])
    name, largest = next(iter(weights.items()))
    newest = run.checkpointer.newest(before=first["update"])
    return (
      f"{reason}. Largest weight: {largest:.3g} in {name}. Its "
      f"{len(records)} records: {named}"
      + (" and so on" if len(records) > _SHOWN else "")
      + f" (all in {path}; `python -m tools.inspect_records FILE` shows "
      "records). "
      + (
        f"{newest} is from before (delete its .json to go back further)"
        if newest
        else "No checkpoint was made before"
      )
      + "; to resume from there with a lower learning rate:\n  "
      + _command(run.comm.size, run.config.learning_rate / 2)
    )

  def _write_report(self) -> tuple[str, list, dict]:
    """Writes `FILE`; returns its path, the update's records, the weights."""
    first, last, run = self._first, self._last, self._run
    positions = first["samples_seen_before"] + np.arange(
      run.task.plan.records_per_update
    )
    numbers = run.task.state.order.records(positions)
    records = [run.task.source.locate(n) for n in numbers.tolist()]
    values = run.checkpointer.values(run.session)
    weights = _extremes(values, run.task.ops.variables)
    path = os.path.join(run.config.output_dir, FILE)
    json_files.write(
      path,
      {
        **first,
        "learning_rate": float(last["learning_rate"]),
        "loss_scale": float(last["loss_scale"]),
        "records": records,
        "largest_weights": weights,
      },
    )
    return path, records, weights


def _extremes(values: dict, variables) -> dict:
  """Largest absolute value of each variable, the worst ten, NaN first."""
  largest = {
    v.op.name: float(np.max(np.abs(values[v.op.name]))) for v in variables
  }
  worst = sorted(largest, key=lambda n: -np.nan_to_num(largest[n], nan=np.inf))
  return {name: largest[name] for name in worst[:10]}


def _command(ranks: int, learning_rate: float) -> str:
  launcher = ["horovodrun", "-np", str(ranks)] if ranks > 1 else []
  given = [a for a in sys.argv if not a.startswith("--learning_rate=")]
  return shlex.join(
    [*launcher, "python", *given, f"--learning_rate={learning_rate:g}"]
  )
