"""Answers to questions as spans of a paragraph: SQuAD 1.1 and 2.0."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from common import json_files, settings
from common.errors import DataError, UserError
from common.settings import in_group
from finetuning import heads, offsets, packed, squad_metric, windows
from finetuning.finetune import FinetuningConfig, Task
from model import model_flops
from training import training_hooks

_data, _answer = in_group("Data"), in_group("Evaluation")

PREDICTIONS_FILE = "predictions.json"
NBEST_FILE = "nbest_predictions.json"
NULL_ODDS_FILE = "null_odds.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSettings:
  """How paragraphs are cut and answers chosen; named like the flags."""

  # fmt: off
  max_seq_length: int = _data(384,
    "Tokens of one window (a question, a part of its paragraph and three "
    "special tokens) at most, and of one record, which may hold several "
    "windows.", low=4)
  doc_stride: int = _data(128,
    "Tokens of the paragraph from the beginning of one window to that of the "
    "next.", low=1, high=1 << 20)
  max_query_length: int = _data(64,
    "Tokens of one question at most; the rest of a longer one is cut.",
    low=1, high=1 << 20)
  version_2_with_negative: bool = _data(False,
    "Read SQuAD 2.0, where a question may have no answer.")
  n_best_size: int = _answer(20,
    "Answers to keep of each question: the best ones.", low=1, high=1 << 20)
  max_answer_length: int = _answer(30,
    "Tokens of one answer at most.", low=1, high=1 << 20)
  null_score_diff_threshold: float = _answer(0.0,
    "Score difference, no answer minus best answer, above which no answer is "
    "predicted. Only with --version_2_with_negative.")
  # fmt: on

  def check(self) -> None:
    """Raises `UserError` for settings with which nothing can be read."""
    settings.check(self)
    if self.max_seq_length <= self.max_query_length + 3:
      raise UserError(
        f"--max_seq_length={self.max_seq_length} leaves no room for the "
        f"paragraph beside --max_query_length={self.max_query_length} tokens "
        "and three special ones"
      )


ANSWER_SETTINGS = tuple(f.name for f in dataclasses.fields(AnswerSettings))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquadConfig(AnswerSettings, FinetuningConfig):
  """What run_squad.py is told; fields are named like its flags."""

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
    parts = {
      "do_train": [self.train_file, "--train_file"],
      "do_eval": [self.eval_file or self.predict_file, "--eval_file"],
      "do_predict": [self.predict_file, "--predict_file"],
    }
    for name, (path, flag) in parts.items():
      if getattr(self, name) and not path:
        raise UserError(f"--{name} needs {flag}")


class Squad(Task):
  """A span of the paragraph for each question, or none."""

  def __init__(self, config: SquadConfig):
    super().__init__(config)
    self.best_by = training_hooks.BestBy(("f1",), True)

  @functools.cached_property
  def training_set(self) -> packed.PackedSource:
    return SquadSource(self.config.train_file, self.config, TRAINED)

  @functools.cached_property
  def evaluation_set(self) -> packed.PackedSource:
    path = self.config.eval_file or self.config.predict_file
    return SquadSource(path, self.config, EVALUATED)

  @functools.cached_property
  def prediction_set(self) -> packed.PackedSource:
    path = self.config.predict_file
    if self.config.do_eval and (self.config.eval_file or path) == path:
      return self.evaluation_set
    return SquadSource(path, self.config, PREDICTED)

  def head(self, batch, is_training, dropout_seed=None):
    return heads.span(batch, self.config, is_training, dropout_seed)

  def head_matmuls(self, rows, source):
    config = self.config
    return model_flops.dense(
      1, rows * source.tokens, config.bert.hidden_size, 2, config.policy.losses
    )

  def result_names(self):
    if not self.config.version_2_with_negative:
      return ["exact_match", "f1"]
    return squad_metric.names_v2(
      {q.id: q.answers for q in self.evaluation_set.questions}
    )

  def results(self, source, outputs):
    answers = {q.id: [a for a, _ in q.answers] for q in source.questions}
    found = source.answers(outputs["logits"], self.config)
    best = {q: (a[0].text if a else "") for q, (a, _) in found.items()}
    if not self.config.version_2_with_negative:
      return squad_metric.evaluate_v1(answers, best)
    return squad_metric.evaluate_v2(
      answers,
      best,
      {q: _null_odds(*candidates) for q, candidates in found.items()},
      self.config.null_score_diff_threshold,
    )

  def write_predictions(self, source, outputs):
    """The official format: id -> text; and all of the best, and null odds."""
    found = source.answers(outputs["logits"], self.config)
    predictions, nbest, odds = {}, {}, {}
    for question, (answers, null) in found.items():
      predictions[question] = chosen_text(answers, null, self.config)
      candidates = list(answers)
      if self.config.version_2_with_negative:
        odds[question] = _null_odds(answers, null)
        candidates.append(null)
      nbest[question] = [
        {
          "text": answer.text,
          "probability": share,
          "start_logit": answer.start_logit,
          "end_logit": answer.end_logit,
        }
        for answer, share in zip(
          candidates, windows.shares(candidates), strict=True
        )
      ]
    written = {PREDICTIONS_FILE: predictions, NBEST_FILE: nbest}
    if odds:
      written[NULL_ODDS_FILE] = odds
    lines = []
    for name, value in written.items():
      path = os.path.join(self.config.output_dir, name)
      json_files.write(path, value)
      lines.append(f"predictions {path}")
    return lines

  def describe(self):
    return {name: getattr(self.config, name) for name in ANSWER_SETTINGS}


def _null_odds(answers, null) -> float:
  """How much higher "no answer" scores than the best answer."""
  return null.score - answers[0].score if answers else float("1e9")


def chosen_text(answers, null, settings: AnswerSettings) -> str:
  """The text that is predicted, "" for no answer.

  Args:
    answers, null: of `windows.best_answers`.
    settings: whether there may be no answer, and when.
  """
  if not answers:
    return ""
  if settings.version_2_with_negative:
    if _null_odds(answers, null) > settings.null_score_diff_threshold:
      return ""
  return answers[0].text


# What a file's answers are for.
TRAINED, EVALUATED, PREDICTED = "trained", "evaluated", "predicted"


class SquadSource(packed.PackedSource):
  """A SQuAD file as packed windows.

  Attributes:
    questions: list of `windows.Question`.
  """

  def __init__(self, path: str, config: SquadConfig, use: str):
    """Reads and encodes.

    Args:
      path: the file.
      config: how paragraphs are cut, and the vocabulary.
      use: TRAINED: answers are targets, and a question whose answer is not
        found in its paragraph is skipped (google/bert). EVALUATED: its answer
        counts in the metrics, which compare texts, but not in the loss.
        PREDICTED: there need be no answers.

    Raises:
      DataError: see `read_squad`; or no answer at all is found.
    """
    answered = use != PREDICTED
    self.questions = read_squad(
      path, config.version_2_with_negative, needs_answers=answered
    )
    made = encode_questions(config.tokenizer(), self.questions, config)
    self._lost, self._use = set(), use
    if answered:
      self._lost = _not_found(path, self.questions, made.answers)
    self._windows = [
      window
      for window in made.windows
      if use != TRAINED or window.question not in self._lost
    ]
    examples = [
      packed.Example(
        window.ids,
        window.segments,
        self.questions[window.question].id,
        windows.target_span(window, made.answers[window.question])
        if answered
        else (0, 0),
      )
      for window in self._windows
    ]
    super().__init__(
      path, examples, config.max_seq_length, config.examples_per_record
    )
    # Targets count from the row's first token.
    self._columns["targets"] += self._columns["starts"][..., None]
    lost = [w.question in self._lost for w in self._windows]
    rows, slots = self.places.row[lost], self.places.slot[lost]
    self._columns["weights"][rows, slots] = 0.0

  def line(self) -> str:
    """See `packed.PackedSource.line`; and which answers were not found."""
    line = super().line()
    if not self._lost:
      return line
    first = _why(self.questions[min(self._lost)])
    return (
      f"{line}; {len(self._lost):,} of {len(self.questions):,} questions are "
      + ("skipped" if self._use == TRAINED else "not in the loss")
      + f": their answers are not found; the first: {first}"
    )

  def answers(self, logits: np.ndarray, settings: AnswerSettings) -> dict:
    """id -> `windows.best_answers` of the question.

    Args:
      logits: float32 [rows, S, 2].
      settings: how many answers, and how long.
    """
    of_question = [[] for _ in self.questions]
    for number, window in enumerate(self._windows):
      of_question[window.question].append(number)
    row, start = self.places.row, self.places.start
    own = lambda i: logits[
      row[i], start[i] : start[i] + len(self.examples[i].ids)
    ]
    return {
      question.id: windows.best_answers(
        question,
        [self._windows[i] for i in numbers],
        [own(i) for i in numbers],
        settings.n_best_size,
        settings.max_answer_length,
      )
      for question, numbers in zip(self.questions, of_question, strict=True)
    }


def _not_found(path: str, questions, answers) -> set:
  """The numbers of questions with answers, none of which is found.

  Raises:
    DataError: these are all.
  """
  answered = {n for n, question in enumerate(questions) if question.answers}
  lost = {n for n in answered if answers[n] is None}
  if lost and lost == answered:
    raise DataError(
      f"{path}: none of the {len(lost):,} answers is found in its paragraph; "
      f"the first: {_why(questions[min(lost)])}"
    )
  return lost


def _why(question: windows.Question) -> str:
  """Why its answer is not found, for a person."""
  text, start = question.answers[0]
  there = question.context[start : start + len(text)] if start >= 0 else ""
  if there == text:
    why = "has nothing that the tokenizer keeps"
  else:
    why = f"does not stand at answer_start {start}, where {there!r} is"
  return f"question {question.id}: the answer {text!r} {why}"


class EncodedQuestions(NamedTuple):
  """All windows of all questions, in their order."""

  windows: list  # of `windows.Window`
  answers: list  # `windows.answer_tokens` of each question


def encode_questions(
  tokenizer, questions: Sequence[windows.Question], settings: AnswerSettings
) -> EncodedQuestions:
  """Questions over their paragraphs as inputs of the encoder."""
  texts = tokenizer.encode_batch([q.text for q in questions])
  context, tokens, shown = None, None, None
  made = EncodedQuestions([], [])
  for number, (question, ids) in enumerate(zip(questions, texts, strict=True)):
    if question.context != context:
      # Questions of a paragraph follow each other: one is kept.
      context = question.context
      tokens = offsets.encode_with_spans(tokenizer, context)
      shown = offsets.with_dropped(context, tokens)
    made.answers.append(windows.answer_tokens(question, tokens))
    made.windows.extend(
      windows.make_windows(
        tokenizer,
        number,
        ids[: settings.max_query_length],
        shown,
        settings.max_seq_length,
        settings.doc_stride,
      )
    )
  return made


def read_squad(
  path: str, version_2: bool, needs_answers: bool
) -> list[windows.Question]:
  """The questions of a SQuAD file.

  Args:
    path: JSON in the format of SQuAD 1.1 or 2.0.
    version_2: questions may have no answer.
    needs_answers: whether a question without answers is an error.

  Raises:
    DataError: it is not there, not in that format, or two questions have one
      id.
  """
  try:
    found = json_files.read(path)
  except OSError as e:
    raise DataError(f"{path}: {e.strerror}") from e
  questions, ids = [], set()
  for a, article in enumerate(_list(path, found, "data", "the file")):
    for p, paragraph in enumerate(
      _list(path, article, "paragraphs", f"article {a}")
    ):
      where = f"article {a}, paragraph {p}"
      context = _text(path, paragraph, "context", where)
      for entry in _list(path, paragraph, "qas", where):
        question = _question(path, entry, context, where)
        if question.id in ids:
          raise DataError(f"{path}: two questions have the id {question.id}")
        if needs_answers and not (question.answers or version_2):
          raise DataError(
            f"{path}: question {question.id} has no answer: for SQuAD 2.0 give "
            "--version_2_with_negative"
          )
        ids.add(question.id)
        questions.append(question)
  if not questions:
    raise DataError(f"{path}: no questions")
  return questions


def _question(path, entry, context, where) -> windows.Question:
  text = _text(path, entry, "question", where)
  name = _text(path, entry, "id", f"{where}, question {text[:40]!r}")
  answers = []
  if not entry.get("is_impossible", False):
    where = f"question {name}"
    for answer in _list(path, {"answers": [], **entry}, "answers", where):
      words = _text(path, answer, "text", where)
      start = answer.get("answer_start")
      if not isinstance(start, int):
        raise DataError(f"{path}: {where}: answer_start is {start!r}")
      if words.strip():
        answers.append((words, start))
  return windows.Question(name, text, context, tuple(answers))


def _list(path: str, found, key: str, where: str) -> list:
  value = found.get(key) if isinstance(found, dict) else None
  if not isinstance(value, list):
    raise DataError(f"{path}: {where} has no list {key!r}: not SQuAD's format")
  return value


def _text(path: str, found, key: str, where: str) -> str:
  value = found.get(key) if isinstance(found, dict) else None
  if not isinstance(value, str):
    raise DataError(f"{path}: {where} has no text {key!r}: not SQuAD's format")
  return value
