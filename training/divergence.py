"""Stops a run that cannot get better by itself, and says where it went bad.

Updates whose gradient is not finite are skipped, and a dynamic loss scale falls
until they are. Where it cannot fall, a few of them in a row mean that the
weights, a record or the learning rate are beyond repair.
"""

import os
import shlex
import sys

import numpy as np

import json_files
from errors import UserError

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
    self._first: dict | None = None

  @property
  def bad(self) -> bool:
    """Whether the last update was one; no checkpoint should be made then."""
    return self._first is not None

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
    if self._first is None:
      which = int(got["nonfinite_variable"])
      self._first = {
        "update": step,
        "samples_seen_before": samples,
        "gradient_of": self._task.ops.variables[which].op.name
        if which >= 0
        else "all variables together",
      }
    if step - self._first["update"] + 1 >= PATIENCE:
      message = self._message(session, step, got)
      # The first rank that ends has horovodrun end the others: not before
      # rank 0 knows what to say.
      self._comm.gather(np.zeros(1))
      raise DivergedError(message)

  def _message(self, session, step: int, got: dict) -> str:
    first = self._first
    reason = (
      f"update {step:,}: gradients are not finite for {PATIENCE} updates in a "
      f"row, first at update {first['update']:,} that of {first['gradient_of']}"
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
    newest = self._checkpointer.newest()
    return (
      f"{reason}. Largest weight: {largest:.3g} in {name}. Its "
      f"{len(records)} records: {named}"
      + (" and so on" if len(records) > _SHOWN else "")
      + f" (all in {path}; `python records.py FILE` shows records). "
      + (
        f"{newest} is of before (delete its .json to go back further)"
        if newest
        else "No checkpoint was made yet"
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
