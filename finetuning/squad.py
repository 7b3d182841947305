"""Answers to questions as spans of a paragraph: SQuAD 1.1 and 2.0."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

import json_files
from errors import DataError, UserError
from finetuning import heads, packed, squad_metric, windows
from finetuning.finetune import FinetuningConfig, Task
from finetuning.offsets import encode_with_spans
from model import model_flops
from training import training_hooks

PREDICTIONS_FILE = "predictions.json"
NBEST_FILE = "nbest_predictions.json"
NULL_ODDS_FILE = "null_odds.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSettings:
  """How paragraphs are cut and answers chosen; named like the flags."""

  max_seq_length: int = 384
  doc_stride: int = 128
  max_query_length: int = 64
  n_best_size: int = 20
  max_answer_length: int = 30
  version_2_with_negative: bool = False
  null_score_diff_threshold: float = 0.0


ANSWER_SETTINGS = tuple(f.name for f in dataclasses.fields(AnswerSettings))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquadConfig(AnswerSettings, FinetuningConfig):
  """What run_squad.py is told; fields are named like its flags."""

  train_file: str | None = None
  eval_file: str | None = None
  predict_file: str | None = None

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
    for name in (
      "doc_stride", "max_query_length", "n_best_size", "max_answer_length",
    ):  # fmt: skip
      if not 1 <= getattr(self, name) < 1 << 20:
        raise UserError(f"--{name}={getattr(self, name)}: must be 1 or more")
    if self.max_seq_length <= self.max_query_length + 3:
      raise UserError(
        f"--max_seq_length={self.max_seq_length} leaves no room for the "
        f"paragraph beside --max_query_length={self.max_query_length} tokens "
        "and three special ones"
      )
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
    return self._set(self.config.train_file, answered=True)

  @functools.cached_property
  def evaluation_set(self) -> packed.PackedSource:
    path = self.config.eval_file or self.config.predict_file
    return self._set(path, answered=True)

  @functools.cached_property
  def prediction_set(self) -> packed.PackedSource:
    path = self.config.predict_file
    if self.config.do_eval and (self.config.eval_file or path) == path:
      return self.evaluation_set
    return self._set(path, answered=False)

  def _set(self, path: str, answered: bool) -> "SquadSource":
    return SquadSource(path, self.config, answered)

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
    # Which groups there are is known from the data.
    answers = [q.answers for q in self.evaluation_set.questions]
    groups = ["", "HasAns_"] if any(answers) else [""]
    groups += ["NoAns_"] if not all(answers) else []
    return [
      *(group + name for group in groups for name in ("exact", "f1")),
      *("best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh"),
    ]

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


class SquadSource(packed.PackedSource):
  """A SQuAD file as packed windows.

  Attributes:
    questions: list of `windows.Question`.
  """

  def __init__(self, path: str, config: SquadConfig, answered: bool):
    """Reads and encodes; with `answered` the answers are targets."""
    self.questions = read_squad(
      path, config.version_2_with_negative, needs_answers=answered
    )
    self._windows = encode_questions(config.tokenizer(), self.questions, config)
    examples = [
      packed.Example(
        window.ids,
        window.segments,
        self.questions[window.question].id,
        windows.target_span(window, self.questions[window.question])
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


def encode_questions(
  tokenizer, questions: Sequence[windows.Question], settings: AnswerSettings
) -> list[windows.Window]:
  """All windows of all questions, in their order."""
  texts = tokenizer.encode_batch([q.text for q in questions])
  contexts, made = {}, []
  for number, (question, ids) in enumerate(zip(questions, texts, strict=True)):
    if question.context not in contexts:
      # Questions of a paragraph follow each other: one is kept.
      contexts = {
        question.context: encode_with_spans(tokenizer, question.context)
      }
    made += windows.make_windows(
      tokenizer,
      number,
      ids[: settings.max_query_length],
      contexts[question.context],
      settings.max_seq_length,
      settings.doc_stride,
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
    DataError: it is not there, not in that format, an answer does not stand
      where it is said to, or two questions have one id.
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
    for answer in entry.get("answers", []):
      words = _text(path, answer, "text", f"question {name}")
      start = answer.get("answer_start")
      if not isinstance(start, int) or not (
        0 <= start and context[start : start + len(words)] == words
      ):
        raise DataError(
          f"{path}: question {name}: the answer {words!r} does not stand at "
          f"answer_start {start} of its paragraph, where "
          f"{context[start : start + len(words)]!r} is"
          if isinstance(start, int)
          else f"{path}: question {name}: answer_start is {start!r}"
        )
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
