"""Stops a run that cannot recover by itself, and says where it went bad.

Updates whose gradients are not finite are skipped, and a dynamic loss scale
falls until they are finite. If it cannot fall, several in a row mean that the
weights, a record or the learning rate are beyond repair.

Spikes are skipped, too. After several in a row the run goes back to weights of
before, and on with the records that follow. If spikes go on, it stops.
"""

import contextlib
import os
from collections.abc import Iterator

import numpy as np

from checkpoints import checkpoint_files, metrics
from common import json_files
from common.console import say, tell
from common.errors import UserError, reason

FILE = "nonfinite.json"
PATIENCE = 10  # updates in a row
_SHOWN = 8  # records in the message


class DivergedError(UserError):
  """Training that has become infinite or NaN for good."""


def variable_named(update: dict, variables) -> str:
  """The variable whose gradient is not finite, for messages."""
  which = int(update["nonfinite_variable"])
  # Each gradient may be finite while the sum of all squares is not.
  return variables[which].op.name if which >= 0 else "all variables together"


class Guard:
  """Watches a `train_loop.Run` for bad updates in a row."""

  def __init__(self, run):
    self._run = run
    self._floor = run.config.loss_scale.floor(run.config.uses_fp16)
    self._first: dict = {}  # of the bad updates in a row
    self._last: dict = {}
    # The last update was skipped, or it and the one before lost micro-batches:
    # the state must not be saved. The same on all ranks.
    self.bad = False
    # Spikes in a row up to the last update. A run would resume among them, so
    # a save waits for their end.
    self.spikes = 0

  def check(self, step: int, update: dict) -> None:
    """Raises `DivergedError` on all ranks after `PATIENCE` bad in a row."""
    self.spikes = int(update["spikes_in_a_row"])
    if self.spikes:  # it has changed no weights
      self._first, self.bad = {}, False
      self._after_spike(step, update)
      return
    # While the loss scale can still fall the next update may be finite.
    failed = update["skipped"] or update["dropped_micro_batches"] > 0
    if not failed or update["loss_scale"] > self._floor:
      self._first, self.bad = {}, False
      return
    self.bad = bool(update["skipped"] or self._first)
    self._first = self._first or self._bad_update(step, update)
    self._last = update
    if step - self._first["update"] + 1 >= PATIENCE:
      self._raise(step)

  def _bad_update(self, step: int, update: dict) -> dict:
    """The facts that a report has of update `step`."""
    task = self._run.task
    return {
      "update": step,
      "samples_seen_before": task.plan.records_before(step - 1),
      "gradient_of": variable_named(update, task.ops.variables),
    }

  def _after_spike(self, step: int, update: dict) -> None:
    """Names a spike; goes back, or raises, after too many in a row."""
    run, in_a_row = self._run, self.spikes
    files = run.checkpointer.files
    if run.comm.is_root and update["spike"].any():
      self._tell_spike(step, update)
    if in_a_row % PATIENCE:
      return
    first, to = step - in_a_row + 1, None
    run.checkpointer.wait()  # what is written removes older ones
    run.watchdog.pause()  # until the next update
    # Weights had gone bad before norms and losses showed it.
    if in_a_row == PATIENCE and run.comm.is_root:
      newest = files.newest_whole(first - PATIENCE)
      to = checkpoint_files.step_of(newest) if newest else None
    to = run.comm.from_root(to)
    # At its border a stage may have another model.
    if to is None or to <= run.task.plan.stage.first_update:
      self._first, self._last = self._bad_update(first, update), update
      self._raise(step)
    run.checkpointer.restore.rewind(run.session, to)
    run.checkpointer.saved = to  # newer ones go
    if run.comm.is_root:  # what has gone bad is not for a second time
      files.remove(bad for bad in files.steps() if bad > to)
      if run.job.evaluate:
        run.job.evaluate.forget_after(to)
    say(
      run.comm,
      f"update {step:,}: {in_a_row} updates in a row were far above those "
      f"before, so weights and moments are those of update {to:,} again; "
      "training goes on with the records that follow",
    )

  def end(self, step: int) -> int:
    """The update to resume from after a bad one; raises if it is the last."""
    if step == self._run.task.plan.updates:
      self._raise(step)
    saved = self._run.checkpointer.save_commit()
    say(
      self._run.comm,
      f"updates {self._first['update']:,} to {step:,} were not finite and are "
      f"not saved: update {saved:,} is the newest that is",
    )
    return saved

  def _raise(self, step: int) -> None:
    self._run.checkpointer.wait()  # the message may name what it writes
    self._run.watchdog.pause()  # checkpoints are read
    message = self._message(step)
    # horovodrun ends all ranks when one ends: rank 0 must have its message.
    self._run.comm.gather(np.zeros(1))
    raise DivergedError(message)

  def _message(self, step: int) -> str:
    first, run = self._first, self._run
    count = step - first["update"] + 1
    what = f"gradients are not finite for {count} updates in a row"
    why = f"loss scale {self._last['loss_scale']:g}, which cannot fall"
    whose = f" that of {first['gradient_of']}"
    if self._last["spikes_in_a_row"]:
      what = (
        f"gradients or losses are far above those before for {count} updates "
        "in a row"
      )
      why, whose = "--spike_deviations=0 trains on them", ""
    trouble = (
      f"update {step:,}: {what}, first at update {first['update']:,}{whose} "
      f"({why})"
    )
    if not run.comm.is_root:
      return f"{trouble}; rank 0 says more"
    path = os.path.join(run.config.output_dir, FILE)
    report = self._report()
    with _noting(path):
      json_files.write(path, report)
    records = report["records"]
    name, largest = next(iter(report["largest_weights"].items()))
    newest = run.checkpointer.files.newest_whole(first["update"])
    start = "No checkpoint was made before"
    if newest:
      start = f"{newest} is from before"
      saved = checkpoint_files.step_of(newest) or 0
      if run.checkpointer.files.newest_whole(saved):
        start += " (delete its .json to go back further)"
    how, flags = run.config.lower_rate(run.task.plan.stage)
    return (
      f"{trouble}. Largest weight: {largest:.3g} in {name}. Its "
      f"{len(records)} records: {_named(records)} (all in {path}; `python -m "
      f"tools.inspect_records FILE` shows records). {start}; to resume from "
      f"there {how}: give the same command{' with '.join(['', *flags])}"
    )

  def _records(self, step: int) -> list[dict]:
    """Where an update's records are."""
    task = self._run.task
    count = task.plan.records_of(step - 1)
    positions = task.plan.records_before(step - 1) + np.arange(count)
    numbers = task.state.order.records(positions).tolist()
    return [task.source.locate(number) for number in numbers]

  def _tell_spike(self, step: int, update: dict) -> None:
    """Names an update that was skipped, in a line and in a file."""
    path = os.path.join(self._run.config.output_dir, metrics.SPIKES_FILE)
    records = self._records(step)
    norm = float(update["grad_norm"])
    loss = self._run.task.summarize(update["sums"])["loss"]
    norm_deviations, loss_deviations = update["spike"].tolist()
    spike = {
      "global_step": step,
      "grad_norm": norm,
      "loss": loss,
      "norm_deviations": norm_deviations,
      "loss_deviations": loss_deviations,
      "records": records,
    }
    with _noting(path):
      json_files.append_line(path, spike)
    judged = (
      ("the gradient's norm", norm, norm_deviations),
      ("the loss", loss, loss_deviations),
    )
    reasons = " and ".join(
      f"{what} {value:.3g} is {deviations:.1f} deviations above those before"
      for what, value, deviations in judged
      if deviations
    )
    tell(
      f"update {step}: skipped, {reasons}. Its records: {_named(records)} (all "
      f"in {path})"
    )

  def _report(self) -> dict:
    """The first bad update with its records, and the largest weights now."""
    first, last, run = self._first, self._last, self._run
    largest, variables = {}, run.task.ops.variables
    values = run.session.run(variables)
    for variable, value in zip(variables, values, strict=True):
      largest[variable.op.name] = float(np.max(np.abs(value)))
    # NaN first, then the largest.
    order = lambda name: -np.nan_to_num(largest[name], nan=np.inf)
    worst = sorted(largest, key=order)[:10]
    return {
      **first,
      "learning_rate": float(last["learning_rate"]),
      "loss_scale": float(last["loss_scale"]),
      "records": self._records(first["update"]),
      "largest_weights": {name: largest[name] for name in worst},
    }


@contextlib.contextmanager
def _noting(path: str) -> Iterator[None]:
  """A block that writes a note, whose failure is told and ends nothing."""
  try:
    yield
  except OSError as e:
    tell(f"{path} could not be written: {reason(e)}")


def _named(records: list[dict]) -> str:
  """The first of the places of records."""
  named = [":".join(map(str, r.values())) for r in records[:_SHOWN]]
  if len(records) > _SHOWN:
    named.append("and so on")
  return ", ".join(named)
