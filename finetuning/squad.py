"""Answers as spans of a paragraph: SQuAD 1.1 and 2.0."""

import dataclasses
import os
from typing import ClassVar

import numpy as np

from checkpoints import metrics
from common import json_files
from common.errors import DataError, UserError
from common.settings import in_group
from finetuning import heads, packed, squad_metric, windows
from finetuning.finetune import FinetuningConfig, FinetuningTask
from model import model_flops

_data = in_group("Data")

PREDICTIONS_FILE = "predictions.json"
NBEST_FILE = "nbest_predictions.json"
NULL_ODDS_FILE = "null_odds.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquadConfig(windows.AnswerSettings, FinetuningConfig):
  """Settings of run_squad.py; fields are named like its flags."""

  # fmt: off
  train_file: str | None = _data(None,
    "JSON file in SQuAD's format to train on.")
  eval_file: str | None = _data(None,
    "JSON file in SQuAD's format to evaluate on. Default: --predict_file.")
  predict_file: str | None = _data(None,
    "JSON file in SQuAD's format whose questions to answer.")
  # fmt: on

  kind: ClassVar[str] = "squad"
  usual_flags: ClassVar[tuple] = (
    "n_best_size", "max_answer_length", "null_score_diff_threshold",
  )  # fmt: skip
  model_flags: ClassVar[tuple] = (
    *FinetuningConfig.model_flags,
    "doc_stride", "max_query_length", "version_2_with_negative",
  )  # fmt: skip

  def __post_init__(self):
    super().__post_init__()
    self.check()
    for part in ("train", "eval", "predict"):
      if getattr(self, f"do_{part}") and not self.path(part):
        raise UserError(f"--do_{part} needs --{part}_file")

  def path(self, part: str) -> str | None:
    given = getattr(self, f"{part}_file")
    return given or (self.predict_file if part == "eval" else None)


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
    return heads.span(batch, self.config, is_training, dropout_seed)

  def matmuls(self, rows, source):
    bert, policy = self.config.bert, self.config.policy
    tokens = rows * source.tokens
    return [
      *model_flops.encoder(bert, policy, rows, source.tokens),
      *model_flops.dense(1, tokens, bert.hidden_size, 2, policy.losses),
    ]

  def result_names(self):
    if not self.config.version_2_with_negative:
      return ["exact_match", "f1"]
    questions = self.evaluation_set.questions
    return squad_metric.names_v2({q.id: q.answers for q in questions})

  def results(self, source, outputs):
    answers = {q.id: [a for a, _ in q.answers] for q in source.questions}
    found = source.answers(outputs["logits"])
    best = {q: one.text() for q, one in found.items()}
    if not self.config.version_2_with_negative:
      return squad_metric.evaluate_v1(answers, best)
    odds = {q: one.null_odds for q, one in found.items()}
    threshold = self.config.null_score_diff_threshold
    return squad_metric.evaluate_v2(answers, best, odds, threshold)

  def write_predictions(self, source, outputs):
    """SQuAD's official format: id -> text; also the n best and null odds."""
    config = self.config
    found = source.answers(outputs["logits"])
    written = {
      PREDICTIONS_FILE: {q: a.text(config.threshold) for q, a in found.items()},
      NBEST_FILE: {
        question: [
          {"text": answer.text, "probability": share, **answer._asdict()}
          for answer, share in answers.shares(config)
        ]
        for question, answers in found.items()
      },
    }
    if config.version_2_with_negative:
      written[NULL_ODDS_FILE] = {q: a.null_odds for q, a in found.items()}
    lines = []
    for name, value in written.items():
      path = os.path.join(config.output_dir, name)
      json_files.write(path, value)
      lines.append(f"predictions {path}")
    return lines

  def describe(self):
    return {
      name: getattr(self.config, name) for name in windows.ANSWER_SETTINGS
    }


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
    made, answers = windows.encode_questions(
      config.tokenizer(), self.questions, config
    )
    self._lost = set()
    if answered:
      self._lost = _not_found(path, self.questions, answers)
    skipped = self._lost if self._skips else ()
    self._windows = [w for w in made if w.question not in skipped]
    examples = [
      packed.Example(
        window.ids,
        window.segments,
        self.questions[window.question].id,
        windows.target_span(window, answers[window.question]),
      )
      for window in self._windows
    ]
    super().__init__(path, examples, config)
    # Targets count from the row's first token.
    places = self.places
    self._columns["targets"][places.row, places.slot] += places.start[:, None]
    lost = [w.question in self._lost for w in self._windows]
    rows, slots = self.places.row[lost], self.places.slot[lost]
    self._columns["weights"][rows, slots] = 0.0

  def line(self) -> str:
    line = super().line()
    if not self._lost:
      return line
    first = _why(self.questions[min(self._lost)])
    return (
      f"{line}; {len(self._lost):,} of {len(self.questions):,} questions are "
      + ("skipped" if self._skips else "not in the loss")
      + f": their answers are not found; the first: {first}"
    )

  def answers(self, logits: np.ndarray) -> dict[str, windows.Answers]:
    """Question id -> answers, from float32 [rows, S, 2]."""
    places = zip(self._windows, self.places.row, self.places.start, strict=True)
    scores = (logits[row, a : a + len(window.ids)] for window, row, a in places)
    found = windows.choose_answers(
      self.questions, self._windows, scores, self._config
    )
    return {q.id: a for q, a in zip(self.questions, found, strict=True)}


def _not_found(path: str, questions, answers) -> set:
  """Numbers of questions whose answers are not found; an error if all are."""
  answered = {n for n, question in enumerate(questions) if question.answers}
  lost = {n for n in answered if answers[n] is None}
  if lost and lost == answered:
    raise DataError(
      f"{path}: none of the {len(lost):,} answers is found in its paragraph; "
      f"the first: {_why(questions[min(lost)])}"
    )
  return lost


def _why(question: windows.Question) -> str:
  """Why its answer is not found."""
  text, start = question.answers[0]
  there = question.context[start : start + len(text)] if start >= 0 else ""
  why = "has nothing that the tokenizer keeps"
  if there != text:
    why = f"does not stand at answer_start {start}, where {there!r} is"
  return f"question {question.id}: the answer {text!r} {why}"


def read_squad(
  path: str, version_2: bool, needs_answers: bool
) -> list[windows.Question]:
  """The questions of a SQuAD 1.1 or 2.0 file; `DataError` for other formats."""
  try:
    found = json_files.read(path)
  except OSError as e:
    raise DataError(f"{path}: {e.strerror}") from e
  questions: dict[str, windows.Question] = {}
  for a, article in enumerate(_get(path, found, "data", "the file")):
    where = f"article {a}"
    for p, paragraph in enumerate(_get(path, article, "paragraphs", where)):
      where = f"article {a}, paragraph {p}"
      context = _get(path, paragraph, "context", where, str)
      for entry in _get(path, paragraph, "qas", where):
        question = _question(path, entry, context, where)
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


def _question(path, entry, context, where) -> windows.Question:
  text = _get(path, entry, "question", where, str)
  name = _get(path, entry, "id", f"{where}, question {text[:40]!r}", str)
  answers = []
  if not entry.get("is_impossible", False):
    where = f"question {name}"
    for answer in _get(path, {"answers": [], **entry}, "answers", where):
      words = _get(path, answer, "text", where, str)
      start = answer.get("answer_start")
      if not isinstance(start, int):
        raise DataError(f"{path}: {where}: answer_start is {start!r}")
      if words.strip():
        answers.append((words, start))
  return windows.Question(name, text, context, tuple(answers))


def _get(path: str, found, key: str, where: str, kind: type = list):
  """found[key]; `DataError` for another type."""
  value = found.get(key) if isinstance(found, dict) else None
  if not isinstance(value, kind):
    name = "text" if kind is str else "list"
    raise DataError(
      f"{path}: {where} has no {name} {key!r}: not SQuAD's format"
    )
  return value
