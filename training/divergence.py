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
from common.errors import UserError
from training import training_hooks

FILE = "nonfinite.json"
PATIENCE = 10  # updates in a row
_SHOWN = 8  # records in the message


class DivergedError(UserError):
  """Training that has become infinite or NaN for good."""


class Guard:
  """Watches for updates that are not finite and have no remedy."""

  def __init__(self, task, checkpointer, config, comm):
    """Prepares to watch one run.

    Args:
      task: a `train_loop.Task`.
      checkpointer: a `checkpointing.Checkpointer`.
      config: a `train_loop.LoopConfig`.
      comm: a `distributed.Comm`.
    """
    self._task, self._checkpointer = task, checkpointer
    self._config, self._comm = config, comm
    self._first: dict | None = None  # of the updates in a row
    self._last: dict = {}
    self._doubtful = False

  @property
  def bad(self) -> bool:
    """Whether the state is not to be saved; the same on all ranks.

    The last update was skipped, or lost micro-batches as the one before it.
    """
    return self._first is not None and self._doubtful

  def see(self, session, step: int, samples: int, got: dict) -> None:
    """Looks at an update.

    Args:
      session: that it ran in.
      step: its number.
      samples: records that were seen before it.
      got: what `optimization.TrainOps` gave.

    Raises:
      DivergedError: it was the last of `PATIENCE` in a row; on all ranks.
    """
    failed = got["skipped"] or got["dropped_micro_batches"] > 0
    if not failed or got["loss_scale"] > self._task.loss_scale_floor:
      self._first = None
      return
    self._doubtful = bool(got["skipped"]) or self._first is not None
    if self._first is None:
      which = int(got["nonfinite_variable"])
      self._first = {
        "update": step,
        "samples_seen_before": samples,
        "gradient_of": self._task.ops.variables[which].op.name
        if which >= 0
        else "all variables together",
      }
    self._last = got
    if step - self._first["update"] + 1 >= PATIENCE:
      self._raise(session, step)

  def end(self, session, step: int) -> int:
    """To be called where a run ends in such updates: they are not saved.

    Args:
      session: that they ran in.
      step: the last of them.

    Returns:
      The update where a run that was stopped resumes.

    Raises:
      DivergedError: it was the plan's last update; on all ranks.
    """
    if step == self._task.plan.updates:
      self._raise(session, step)
    saved = self._checkpointer.fall_back()
    if self._comm.is_root:
      training_hooks.tell(
        f"updates {self._first['update']:,} to {step:,} were not finite and "
        f"are not saved: update {saved:,} is the newest that is"
      )
    return saved

  def _raise(self, session, step: int) -> None:
    self._checkpointer.wait()  # what it writes may be what the message names
    message = self._message(session, step, self._last)
    # The first rank that ends has horovodrun end the others: not before
    # rank 0 knows what to say.
    self._comm.gather(np.zeros(1))
    raise DivergedError(message)

  def _message(self, session, step: int, got: dict) -> str:
    first = self._first
    reason = (
      f"update {step:,}: gradients are not finite for "
      f"{step - first['update'] + 1} updates in a row, first at update "
      f"{first['update']:,} that of {first['gradient_of']}"
      f" (loss scale {got['loss_scale']:g}, which cannot fall)"
    )
    if not self._comm.is_root:
      return f"{reason}; rank 0 says more"
    records = [
      self._task.source.locate(n)
      for n in self._records(first["samples_seen_before"]).tolist()
    ]
    weights = _extremes(
      self._checkpointer.values(session), self._task.ops.variables
    )
    path = os.path.join(self._config.output_dir, FILE)
    json_files.write(
      path,
      {
        **first,
        "learning_rate": float(got["learning_rate"]),
        "loss_scale": float(got["loss_scale"]),
        "records": records,
        "largest_weights": weights,
      },
    )
    named = ", ".join(":".join(map(str, r.values())) for r in records[:_SHOWN])
    name, largest = next(iter(weights.items()))
    newest = self._checkpointer.newest(before=first["update"])
    return (
      f"{reason}. Largest weight: {largest:.3g} in {name}. Its "
      f"{len(records)} records: {named}"
      + (" and so on" if len(records) > _SHOWN else "")
      + f" (all in {path}; `python -m tools.inspect_records FILE` shows "
      "records). "
      + (
        f"{newest} is of before (delete its .json to go back further)"
        if newest
        else "No checkpoint was made before"
      )
      + "; to go on from there with a lower learning rate:\n  "
      + _command(self._comm.size, self._config.learning_rate / 2)
    )

  def _records(self, samples: int) -> np.ndarray:
    """Numbers of an update's records, of all ranks."""
    places = samples + np.arange(self._task.plan.global_batch)
    return self._task.state.order.records(places)


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
