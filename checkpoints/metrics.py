"""The reports of a run in .jsonl files and TensorBoard; the best evaluation."""

import math
import os
from typing import NamedTuple

from common import files, json_files
from common import tensorflow_v1 as later
from common.console import tell
from common.errors import DataError, reason
from config.optimizers import AVERAGE

METRICS_FILE = "metrics.jsonl"
EVAL_METRICS_FILE = "eval_metrics.jsonl"
SPIKES_FILE = "spikes.jsonl"  # what --spike_deviations has skipped
EVALUATION_SET = "evaluation_set"  # a key of an evaluation: on which records
EVALUATED_WEIGHTS = "evaluated_weights"  # a key of one of AVERAGE
# Keys of reports and evaluations, for people.
LABELS = {
  "masked_lm_loss": "masked words: loss (nats)",
  "masked_lm_accuracy": "masked words: right",
  "next_sentence_loss": "next sentence: loss (nats)",
  "next_sentence_accuracy": "next sentence: right",
  "loss": "loss",
  "accuracy": "right",
}


def read_jsonl(path: str) -> list[dict]:
  """The reports of a .jsonl file of a run; [] without one."""
  return json_files.read_lines(path, {"global_step": int}, strict=False)


def reports_of(output_dir: str) -> list[dict]:
  """What a run's training reported."""
  return read_jsonl(os.path.join(output_dir, METRICS_FILE))


class BestBy(NamedTuple):
  """Which evaluation is the best."""

  keys: tuple  # of results, whose sum counts; the first is in all of them
  higher: bool  # is better

  @classmethod
  def of_task(cls, task: dict) -> "BestBy | None":
    """As a task.json says; None if it does not, as in older versions' runs."""
    saved = task.get("best_by")
    return cls(tuple(saved["keys"]), saved["higher"]) if saved else None

  def score(self, results: dict) -> float:
    """Higher is better; NaN for results that are None."""
    values = [results[key] for key in self.keys if key in results]
    if None in values:
      return math.nan
    return sum(values) if self.higher else -sum(values)


BEST_BY = BestBy(("masked_lm_loss", "next_sentence_loss"), higher=False)


def evaluations(output_dir: str, step: float = math.inf) -> list[dict]:
  """A run's evaluations up to update `step`."""
  reports = read_jsonl(os.path.join(output_dir, EVAL_METRICS_FILE))
  return [report for report in reports if report["global_step"] <= step]


def forget_after(output_dir: str, name: str, step: int) -> None:
  """Drops reports after `step`, and a last line without its end."""
  path = os.path.join(output_dir, name)
  if os.path.exists(path):
    kept = [r for r in read_jsonl(path) if r["global_step"] <= step]
    content = b"".join(map(_line, kept))
    with open(path, "rb") as f:
      is_same = f.read() == content
    if not is_same:  # else a full disk ends no run
      files.write(path, content)


def was_evaluated(output_dir: str, step: int, on: str) -> bool:
  """Whether there is an evaluation of update `step` on the records `on`."""
  for results in evaluations(output_dir, step):
    if results["global_step"] == step and results.get(EVALUATION_SET) == on:
      return True
  return False


def best_evaluation(output_dir: str, step: int, by: BestBy) -> int | None:
  """The first update from 1 to `step` with the best evaluation, if any."""
  # `max` takes the first of equal ones: training on did not help.
  scores = _scores(output_dir, step, by)
  return max(scores, key=scores.__getitem__, default=None)


def is_of_average(output_dir: str, step: int) -> bool:
  """Whether the evaluation of update `step` was of the average of weights."""
  return evaluations(output_dir, step)[-1].get(EVALUATED_WEIGHTS) == AVERAGE


def evaluations_since_best(
  output_dir: str, step: int, by: BestBy, first: int = 0
) -> int:
  """The number of evaluations after the best of those from `first` to `step`.

  A stage that begins with update `first` may have another model.
  """
  scores = _scores(output_dir, step, by, first)
  best = max(scores, key=scores.__getitem__, default=step)
  return sum(update > best for update in scores)


def _scores(
  output_dir: str, step: int, by: BestBy, first: int = 0
) -> dict[int, float]:
  """Update -> score, of the evaluations after `first` with finite scores."""
  known = evaluations(output_dir, step)
  scores = {}
  for results in known:
    if by.keys[0] not in results:
      raise DataError(
        f"{os.path.join(output_dir, EVAL_METRICS_FILE)}: has an evaluation of "
        f"another task, without {by.keys[0]}. Use another --output_dir, or "
        "remove the file"
      )
    update, score = results["global_step"], by.score(results)
    # Another set of records has losses of its own: no comparison with it.
    comparable = results.get(EVALUATION_SET) == known[-1].get(EVALUATION_SET)
    if comparable and update > first and math.isfinite(score):
      scores[update] = score
  return scores


class MetricsLog:
  """A .jsonl file of reports with TensorBoard events of the same numbers."""

  _trouble: str | None = None

  def __init__(self, output_dir: str, name: str, resume_step: int, tag: str):
    """Drops reports after `resume_step`; `tag` is the events' folder."""
    self._path = os.path.join(output_dir, name)
    forget_after(output_dir, name, resume_step)
    self._file = open(self._path, "ab", buffering=0)
    self._written, self._waiting = self._file.tell(), b""
    self._events = later.tf.summary.FileWriter(os.path.join(output_dir, tag))
    # It makes TensorBoard drop later updates.
    start = later.tf.SessionLog(status=later.tf.SessionLog.START)
    self._add_event("session_log", start, resume_step + 1)
    self._tag = tag

  def write(self, report: dict) -> None:
    """Appends a report; on a full disk says so once and tries again later."""
    self._waiting += _line(report)
    reported = self._trouble
    self._flush()
    if self._trouble and not reported:
      tell(f"{self._path}: {self._trouble}; training continues and tries again")
    summary = later.tf.Summary()
    for key, value in report.items():
      if isinstance(value, (int, float)) and key != "global_step":
        summary.value.add(tag=f"{self._tag}/{key}", simple_value=value)
    self._add_event("summary", summary, report["global_step"])

  def _add_event(self, kind: str, event, step: int) -> None:
    # The numbers are in the .jsonl file: TensorBoard ends at its first error.
    if self._events is None:
      return
    try:
      getattr(self._events, f"add_{kind}")(event, step)
      self._events.flush()
    except (later.tf.errors.OpError, OSError, IndexError, RuntimeError) as e:
      # TensorFlow raises some errors of the file system as built-in ones.
      self._events = None
      tell(f"TensorBoard gets no more of this run: {reason(e)}")

  def _flush(self) -> None:
    # Unbuffered: after an error it is known which bytes are in the file.
    try:
      done = 0
      while done < len(self._waiting):
        done += self._file.write(self._waiting[done:])
    except OSError as e:
      self._trouble = reason(e)
      # A part of a line would be no report.
      self._file.truncate(self._written)
    else:
      self._trouble = None
      self._written += len(self._waiting)
      self._waiting = b""

  def close(self) -> None:
    """Raises `DataError` if reports could not be written."""
    self._flush()
    self._file.close()
    if self._events is not None:
      self._events.close()
    if self._waiting:
      reports = self._waiting.count(b"\n")
      raise DataError(
        f"{self._path}: {reports} reports could not be written: {self._trouble}"
      )


def _line(report: dict) -> bytes:
  return json_files.text(report).encode() + b"\n"
