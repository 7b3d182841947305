"""Evaluations on all ranks, batch by batch together."""

import dataclasses
import hashlib
import time
from collections.abc import Iterator, Sequence

import numpy as np

import input_pipeline
from checkpoints import description, metrics
from common import errors
from common.console import say, tell
from common.tensorflow_v1 import tf
from config.optimizers import AVERAGE
from gradients import distributed
from training.signals import Interrupted, StopVote
from xla_patches import jit


class Evaluator:
  """Evaluates on all ranks, prints the results and logs them."""

  def __init__(self, evaluation, headline, config, evaluated: str, comm):
    # evaluation: (session, signals, watchdog) -> results with `examples`, the
    # same on all ranks; headline: results -> their summary in a line;
    # evaluated: what the records are, so that only equal ones are compared.
    self._evaluation, self._headline = evaluation, headline
    self._output_dir, self._comm = config.output_dir, comm
    self._of = " of the average" if config.evaluate_average else ""
    records = f"{evaluated}{self._of}".encode()
    self.records = hashlib.sha256(records).hexdigest()[:12]
    self._log: metrics.MetricsLog | None = None
    self._by_step: dict[int, dict] = {}

  def __call__(
    self, session, step: int, signals, watchdog, log: bool = True
  ) -> dict:
    """The results of update `step`, or `Interrupted`, the same on all ranks."""
    if step in self._by_step:  # an update's weights are evaluated once
      return self._by_step[step]
    began = time.monotonic()
    if not self._by_step:
      watchdog.pause()  # each rank compiles
      jit.tell_compiling(self._comm, "the evaluation")
    results = self._evaluation(session, signals, watchdog)
    self._by_step[step] = results = {**results, "global_step": step}
    if self._of:
      results[metrics.EVALUATED_WEIGHTS] = AVERAGE
    if self._comm.is_root and log:
      if not self._log:
        folder, kept = self._output_dir, step - 1
        before = metrics.evaluations(folder, kept) or [{}]
        on = before[-1].get(metrics.EVALUATION_SET)
        if on not in (None, self.records):
          tell(
            f"the evaluations in {folder} are of other records or weights: the "
            "best one is chosen among those from here on"
          )
        # An old log keeps its evaluations before this step.
        name = metrics.EVAL_METRICS_FILE
        self._log = metrics.MetricsLog(folder, name, kept, "eval")
      self._log.write({**results, metrics.EVALUATION_SET: self.records})
    say(
      self._comm,
      f"evaluation{self._of} at update {step:,}: {self._headline(results)}  "
      f"in {time.monotonic() - began:.1f} s",
    )
    return results

  def forget_after(self, step: int) -> None:
    """Drops the evaluations of updates after `step`, which a run has left."""
    self.close()
    name = metrics.EVAL_METRICS_FILE
    self._log = metrics.MetricsLog(self._output_dir, name, step, "eval")

  def close(self) -> None:
    if self._log:
      self._log.close()


@dataclasses.dataclass(frozen=True)
class EvaluationBatches:
  """The batches of an evaluation, which all ranks run together."""

  fetches: dict  # name -> Tensor of one batch
  source: input_pipeline.Source  # or any other source
  batches: input_pipeline.Batches  # ranks may have different counts
  vote: StopVote
  comm: distributed.Comm

  def run(self, session, signals, watchdog) -> Iterator[dict]:
    """Yields name -> array of each batch of this rank; see `Interrupted`."""
    mine = self.batches.count
    most = int(self.comm.gather(np.array([mine])).max())
    self.batches.start(session, 0)
    # A rank without batches left takes part in the votes, too: all leave in the
    # same batch, and a rank that hangs is noticed.
    for batch in range(most):
      fetches = [self.fetches if batch < mine else {}, self.vote.counts]
      try:
        fetched, counts = session.run(fetches, self.vote.feed(signals))
      except input_pipeline.READ_ERRORS as e:
        raise clear_error(e, self.source, self.batches.numbers(batch)) from e
      if batch:
        watchdog.resume()
      else:
        watchdog.heartbeat()  # the very first batch compiles: not watched yet
      stop = self.vote.verdict(counts)
      if stop:
        raise Interrupted(stop)
      if batch < mine:
        yield fetched

  def totals(self, session, signals, watchdog) -> dict:
    """name -> total of what is fetched, scalars, over all ranks; as `run`."""
    totals = np.zeros(len(self.fetches))
    for row in self.run(session, signals, watchdog):
      totals += [row[name] for name in self.fetches]
    totals = self.comm.data_parallel.gather(totals).sum(axis=0).tolist()
    return dict(zip(self.fetches, totals, strict=True))


def overlap_warning(
  evaluated: Sequence[str], trained: Sequence[str], flag: str
) -> list[str]:
  """A line if files to evaluate on are files that are trained on."""
  same = description.shared(evaluated, trained)
  if not same:
    return []
  return [
    f"evaluating on training data: {len(same)} of {len(evaluated)} files, such "
    f"as {same[0]}, are also trained on, so the results say nothing about "
    f"other text. Give files that are held out as {flag}"
  ]


def is_out_of_memory(error: Exception) -> bool:
  """Whether memory of the host or of the GPU did not suffice; XLA's, too."""
  if errors.remedy(error):  # a disk, by TensorFlow's kinds
    return False
  if isinstance(error, (MemoryError, tf.errors.ResourceExhaustedError)):
    return True
  words = ("out of memory", "resource_exhausted", "oom when allocating")
  text = str(error).lower()
  return isinstance(error, tf.errors.OpError) and any(w in text for w in words)


def clear_error(error: Exception, source=None, numbers=()) -> Exception:
  """The cause of an error: memory, a damaged record, a lost rank, or itself."""
  if is_out_of_memory(error):
    return errors.UserError(
      f"out of memory ({errors.reason(error)[:200]}): lower "
      "--train_batch_size, or that of the stage, which with "
      "--global_batch_size trains the same, or --eval_batch_size in an "
      "evaluation; or give --recompute=layer; run_pretraining.py's --dry_run "
      "--find_batch_size finds the largest"
    )
  # A thread that reads has noted its own error, which TensorFlow rewords.
  # A lost rank comes before the search for a damaged record: others wait.
  known = getattr(source, "error", None) or distributed.rank_lost(error)
  return known or (source and source.explain(numbers)) or error
