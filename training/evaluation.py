"""Evaluations on all ranks, batch by batch together."""

import dataclasses
import time

import numpy as np

from common.console import say
from gradients import distributed
from training import input_pipeline, metrics
from training.signals import Interrupted, StopVote


class Evaluator:
  """Evaluates on all ranks, prints the results and logs them."""

  def __init__(self, evaluation, headline, output_dir: str, comm):
    """Prepares evaluations of one run.

    Args:
      evaluation: (session, signals, watchdog) -> results, the same on all
        ranks; `examples` is one of them.
      headline: results -> what a line says of them.
      output_dir: the run's folder.
      comm: of all ranks.
    """
    self._evaluation, self._headline = evaluation, headline
    self._output_dir, self._comm = output_dir, comm
    self._log, self._last = None, None

  def __call__(
    self, session, step: int, signals, watchdog, log: bool = True
  ) -> dict:
    """The results of the variables of update `step`; the same on all ranks.

    Args:
      session: with all variables initialised.
      step: updates so far.
      signals: `StopSignals` that end it early, or None.
      watchdog: a `Watchdog`.
      log: whether eval_metrics.jsonl gets the results.

    Raises:
      Interrupted: on all ranks, if one of them had a signal.
    """
    if self._last and self._last["global_step"] == step:
      return self._last  # an update's weights are evaluated once
    began = time.monotonic()
    if self._last is None:
      watchdog.pause()  # each rank compiles
    results = self._evaluation(session, signals, watchdog)
    self._last = results = {**results, "global_step": step}
    if self._comm.is_root and log:
      # Opened here: what is dropped from an old log depends on the step.
      self._log = self._log or metrics.MetricsLog(
        self._output_dir, metrics.EVAL_METRICS_FILE, step - 1, "eval"
      )
      self._log.write(results)
    say(
      self._comm,
      f"evaluation at update {step:,}: {self._headline(results)}  "
      f"{results['examples']:,} examples in {time.monotonic() - began:.1f} s",
    )
    return results

  def close(self) -> None:
    """Closes the log."""
    if self._log:
      self._log.close()


@dataclasses.dataclass(frozen=True)
class EvaluationBatches:
  """What is run for each batch of an evaluation; to be made in the graph.

  All ranks run batch after batch together, also those that have none left: so
  all leave in the same one, and a rank that hangs is noticed.

  Attributes:
    fetches: name -> Tensor of one batch.
    source: an `input_pipeline.Source`.
    batches: of `source`; ranks may have different counts.
    comm: of all ranks.
  """

  fetches: dict
  source: object
  batches: input_pipeline.Batches
  vote: StopVote
  comm: distributed.Comm

  def run(self, session, signals, watchdog):
    """Yields name -> array, of each batch of this rank.

    Raises:
      Interrupted: ranks agreed to leave.
      records.DataError: a record is damaged.
    """
    own = self.batches.count
    self.batches.start(session, 0)
    for batch in range(int(self.comm.gather(np.array([own])).max())):
      fetches = self.fetches if batch < own else {}
      try:
        fetched, counts = session.run(
          [fetches, self.vote.counts], self.vote.feed(signals)
        )
      except input_pipeline.READ_ERRORS as e:
        raise clear_error(e, self.source, self.batches.numbers(batch)) from e
      if batch:
        watchdog.resume()
      else:
        watchdog.heartbeat()  # the first of all compiles: not yet watched
      if verdict := self.vote.verdict(counts):
        raise Interrupted(verdict)
      if batch < own:
        yield fetched


def clear_error(error: Exception, source=None, numbers=()) -> Exception:
  """The error to raise for one that a session raised.

  It is about one of the records with these `numbers` in `source`, if there is
  one that explains it.
  """
  explained = source.explain(numbers) if source else None
  return explained or distributed.rank_lost(error) or error


def add_up(rows, names, comm) -> dict:
  """name -> total of `rows`, name -> float of a batch each, over all ranks."""
  totals = np.zeros(len(names))
  for row in rows:
    totals += [row[name] for name in names]
  totals = comm.gather(totals).sum(axis=0).tolist()
  return dict(zip(names, totals, strict=True))
