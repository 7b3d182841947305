"""Answers as spans of a paragraph: SQuAD 1.1 and 2.0."""

import dataclasses
import os
from typing import ClassVar

import numpy as np

from checkpoints import metrics
from common import json_files
from common.errors import DataError
from common.settings import in_group
from finetuning import packed, squad_metric, windows
from finetuning.task import FinetuningConfig, FinetuningTask
from model import tasks

_data = in_group("Data")

PREDICTIONS_FILE = "predictions.json"
NBEST_FILE = "nbest_predictions.json"
NULL_ODDS_FILE = "null_odds.json"
# SQuAD 1.1 and 2.0; `json_files.expect` has the notation.
_QUESTION = {
  "id": (str, float),
  "question": str,
  "answers?": [{"text": str, "answer_start": int}],
  "is_impossible?": bool,
}
_FORMAT = {"data": [{"paragraphs": [{"context": str, "qas": [_QUESTION]}]}]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquadConfig(windows.AnswerSettings, FinetuningConfig):
  """Settings of run_squad.py; fields are named like its flags."""

  # fmt: off
  eval_file: str | None = _data(None,
    "File to evaluate on: {format}. Default: --predict_file.")
  # fmt: on

  kind: ClassVar[str] = tasks.SQUAD
  format: ClassVar[str] = "JSON in SQuAD's format"

  def __post_init__(self):
    super().__post_init__()
    self.check()

  def path(self, part):
    if part == "eval" and not self.eval_file and self.predict_file:
      return self.predict_file
    return super().path(part)


class Squad(FinetuningTask):
  """Finds the answer to each question in its paragraph, if there is one."""

  config: SquadConfig
  best_by = metrics.BestBy(("f1",), True)

  def read(self, part):
    config, path = self.config, self.config.path(part)
    if part == "predict" and config.do_eval and path == config.path("eval"):
      return self.evaluation_set
    return SquadSource(path, config, part)

  def head(self, batch, is_training, dropout_seed=None):
    from finetuning import heads  # it loads TensorFlow

    return heads.span(batch, self.config, is_training, dropout_seed)

  def results(self, source, outputs):
    right, best, odds = {}, {}, {}
    for question in source.questions:
      right[question.id] = [text for text, _ in question.answers]
    for name, answers in source.answers(outputs["logits"]).items():
      best[name] = answers.text()
      odds[name] = answers.null_odds
    if not self.config.version_2_with_negative:
      return squad_metric.evaluate_v1(right, best)
    threshold = self.config.null_score_diff_threshold
    return squad_metric.evaluate_v2(right, best, odds, threshold)

  def write_predictions(self, source, outputs):
    """SQuAD's official format: id -> text; also the n best and null odds."""
    config = self.config
    texts, candidates, odds = {}, {}, {}
    for question, answers in source.answers(outputs["logits"]).items():
      texts[question] = answers.text(config.threshold)
      odds[question] = answers.null_odds
      candidates[question] = [
        {"text": answer.text, "probability": share, **answer._asdict()}
        for answer, share in answers.shares(config)
      ]
    files = {PREDICTIONS_FILE: texts, NBEST_FILE: candidates}
    if config.version_2_with_negative:
      files[NULL_ODDS_FILE] = odds
    lines = []
    for name, value in files.items():
      path = os.path.join(config.output_dir, name)
      json_files.write(path, value)
      lines.append(f"predictions {path}")
    return lines

  def describe(self):
    names = windows.ANSWER_SETTINGS
    return {name: getattr(self.config, name) for name in names}


class SquadSource(packed.PackedSource):
  """A SQuAD file as packed windows."""

  def __init__(self, path: str, config: SquadConfig, part: str):
    """Reads and encodes for a `part`.

    "train" skips questions whose answers are not in their paragraphs, as
    google/bert does. "eval" counts them in the metrics, which compare texts,
    but not in the loss. "predict" needs no answers.
    """
    self._config, self._skips = config, part == "train"
    answered = part != "predict"
    self.questions = read_squad(path, config.version_2_with_negative, answered)
    both = windows.encode_questions(config.tokenizer(), self.questions, config)
    self._windows, answers = both
    self._lost = _not_found(path, self.questions, answers) if answered else []
    lost = set(self._lost)
    if self._skips:
      self._windows = [w for w in self._windows if w.question not in lost]
    examples = []
    for window in self._windows:
      number, weight = window.question, float(window.question not in lost)
      target = windows.target_span(window, answers[number])
      name = self.questions[number].id
      examples.append(
        packed.Example(window.ids, window.segments, name, target, weight)
      )
    super().__init__(path, examples, config)
    # Targets count from the row's first token.
    places = self.places
    self._columns["targets"][places.row, places.slot] += places.start[:, None]

  def line(self) -> str:
    line = super().line()
    if not self._lost:
      return line
    what = "skipped" if self._skips else "not in the loss"
    return (
      f"{line}; {len(self._lost):,} of {len(self.questions):,} questions are "
      f"{what}: their answers are not found; the first: "
      f"{_shown(self.questions[self._lost[0]])}"
    )

  def answers(self, logits: np.ndarray) -> dict[str, windows.Answers]:
    """Question id -> answers, from float32 [rows, S, 2]."""
    places = zip(self._windows, self.places.row, self.places.start, strict=True)
    scores = (logits[row, a : a + len(window.ids)] for window, row, a in places)
    answers = windows.choose_answers(
      self.questions, self._windows, scores, self._config
    )
    return {q.id: a for q, a in zip(self.questions, answers, strict=True)}


def _not_found(path: str, questions, answers) -> list[int]:
  """Numbers of questions whose answers are not found; an error if all are."""
  answered = [n for n, question in enumerate(questions) if question.answers]
  lost = [n for n in answered if answers[n] is None]
  if lost and lost == answered:
    raise DataError(
      f"{path}: none of the {len(lost):,} answers is found in its paragraph; "
      f"the first: {_shown(questions[lost[0]])}"
    )
  return lost


def _shown(question: windows.Question) -> str:
  """A question whose answer is not found, and why."""
  text, start = question.answers[0]
  there = question.context[max(0, start) : max(0, start + len(text))]
  return (
    f"question {question.id}: the answer {text!r} is not at answer_start "
    f"{start}, where {there!r} stands, or has no token"
  )


def read_squad(
  path: str, version_2: bool, needs_answers: bool
) -> list[windows.Question]:
  """The questions of a SQuAD 1.1 or 2.0 file; `DataError` for other formats."""
  content = json_files.read(path, _FORMAT, "not readable as SQuAD's format: {}")
  questions: dict[str, windows.Question] = {}
  for article in content["data"]:
    for paragraph in article["paragraphs"]:
      for entry in paragraph["qas"]:
        question = _question(entry, paragraph["context"])
        if question.id in questions:
          raise DataError(f"{path}: two questions have the id {question.id}")
        if needs_answers and not (question.answers or version_2):
          raise DataError(
            f"{path}: question {question.id} has no answer: for SQuAD 2.0 give "
            "--version_2_with_negative"
          )
        questions[question.id] = question
  if not questions:
    raise DataError(f"{path}: no questions")
  return list(questions.values())


def _question(entry: dict, context: str) -> windows.Question:
  answers = []
  if not entry.get("is_impossible", False):
    for answer in entry.get("answers", ()):
      if answer["text"].strip():
        answers.append((answer["text"], answer["answer_start"]))
  name, text = str(entry["id"]), entry["question"]
  return windows.Question(name, text, context, tuple(answers))
