"""Answers to questions: windows of paragraphs, and spans by their scores."""

import dataclasses
import math
import operator
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from common.errors import UserError
from common.settings import check, in_group
from finetuning.windows import join, parts_of
from text_encoders.base import TokenSpans

_data, _answer = in_group("Data"), in_group("Evaluation")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSettings:
  """How paragraphs are cut and answers chosen; flags of run_squad.py."""

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

  @property
  def threshold(self) -> float:
    """No answer is predicted for `Answers.null_odds` above this."""
    if self.version_2_with_negative:
      return self.null_score_diff_threshold
    return math.inf

  def check(self) -> None:
    check(self)
    if self.max_seq_length <= self.max_query_length + 3:
      raise UserError(
        f"--max_seq_length={self.max_seq_length} leaves no room for the "
        f"paragraph beside --max_query_length={self.max_query_length} tokens "
        "and three special ones"
      )


ANSWER_SETTINGS = tuple(f.name for f in dataclasses.fields(AnswerSettings))


class Question(NamedTuple):
  """A question of a SQuAD file."""

  id: str
  text: str
  context: str
  answers: tuple  # (text, first character in the context, maybe wrong), ...


class Window(NamedTuple):
  """[CLS] question [SEP] a part of its paragraph [SEP]."""

  question: int  # its number
  ids: np.ndarray  # int32 [n]
  segments: np.ndarray  # int32 [n], 1 from the paragraph on
  offset: int  # place of the part's first token in `ids`
  first: int  # number of that token in the paragraph
  spans: TokenSpans  # of the part, in characters of the context
  is_best: np.ndarray  # bool [part]: of `parts_of`


def make_windows(
  tokenizer,
  number: int,
  question_ids: np.ndarray,
  context: TokenSpans,
  settings: AnswerSettings,
) -> list[Window]:
  """Windows of a paragraph in order; `context` is `with_dropped`."""
  before, between, after = map(len, tokenizer.template(2))
  most = settings.max_seq_length - before - between - after
  # A template with more special tokens than BERT's may leave no other room.
  question_ids = question_ids[: min(settings.max_query_length, most - 1)]
  offset, room = before + len(question_ids) + between, most - len(question_ids)
  windows, count = [], len(context.ids)
  for start, stop, is_best in parts_of(count, room, settings.doc_stride):
    part = TokenSpans(*(a[start:stop] for a in context))
    ids, segments = join(tokenizer, question_ids, part.ids)
    windows.append(Window(number, ids, segments, offset, start, part, is_best))
  return windows


def encode_questions(
  tokenizer, questions: Sequence[Question], settings: AnswerSettings
) -> tuple[list[Window], list[tuple | None]]:
  """All windows, and each question's `answer_tokens`."""
  texts = tokenizer.encode_batch([q.text for q in questions])
  context: str | None = None
  windows: list[Window] = []
  answers = []
  for number, (question, ids) in enumerate(zip(questions, texts, strict=True)):
    # Questions about a paragraph are neighbours in a file, so it is encoded
    # once for all of them.
    if question.context != context:
      context = question.context
      tokens = tokenizer.encode_with_spans(context)
      shown = tokens.with_dropped(context)
    # Marks that the tokenizer drops belong to no token; answers that are shown
    # to people keep them.
    answers.append(answer_tokens(question, tokens))
    windows += make_windows(tokenizer, number, ids, shown, settings)
  return windows, answers


def answer_tokens(question: Question, context: TokenSpans) -> tuple | None:
  """First and last token of the first answer that is where the file says.

  Dropped characters do not count: `context` is `Encoder.encode_with_spans`.
  """
  for text, first in question.answers:
    end = _end_of(text, question.context, first) if first >= 0 else None
    span = context.covering(first, end) if end else None
    if span:
      return span
  return None


def _end_of(text: str, context: str, first: int) -> int | None:
  """Where a text ends that begins at `first`, whatever its white space is."""
  end = first
  # Files differ from their paragraphs in line breaks and non-breaking spaces.
  for part in re.findall(r"\s+|\S+", text):
    rest = context[end:]
    if part.isspace():
      end += len(rest) - len(rest.lstrip())
    elif rest.startswith(part):
      end += len(part)
    else:
      return None
  return end


def target_span(window: Window, answer: tuple | None) -> tuple[int, int]:
  """`answer` counted from [CLS]; (0, 0) if it is not all in the window."""
  if answer is None:
    return 0, 0
  # google/bert's label of a window without the answer is [CLS], token 0.
  first, last = answer[0] - window.first, answer[1] - window.first
  if first < 0 or last >= len(window.spans.ids):
    return 0, 0
  return window.offset + first, window.offset + last


class Answer(NamedTuple):
  """A candidate for the answer."""

  text: str
  start_logit: float
  end_logit: float

  @property
  def score(self) -> float:
    return self.start_logit + self.end_logit


class Answers(NamedTuple):
  """The candidates for a question."""

  best: list[Answer]  # of different texts, none empty; the best one first
  null: Answer  # [CLS] of the window where its score is lowest

  @property
  def null_odds(self) -> float:
    """Score of "no answer" minus the score of the best answer."""
    return self.null.score - self.best[0].score if self.best else 1e9

  def text(self, threshold: float = math.inf) -> str:
    """The best text; "" without one, or with `null_odds` above `threshold`."""
    if not self.best or self.null_odds > threshold:
      return ""
    return self.best[0].text

  def shares(self, settings: AnswerSettings) -> list[tuple[Answer, float]]:
    """Answers with probabilities; SQuAD 2.0 includes "no answer"."""
    null = [self.null] if settings.version_2_with_negative else []
    answers = self.best + null
    if not answers:
      return []
    probabilities = special.softmax([answer.score for answer in answers])
    return list(zip(answers, probabilities.tolist(), strict=True))


def choose_answers(
  questions: Sequence[Question], windows, logits, settings: AnswerSettings
) -> list[Answers]:
  """One for each question; `logits` are each window's float [tokens, 2]."""
  candidates: list[list[Answer]] = [[] for _ in questions]
  nulls: list[list[Answer]] = [[] for _ in questions]
  for window, scores in zip(windows, logits, strict=True):
    number = window.question
    context = questions[number].context
    candidates[number] += _of_window(context, window, scores, settings)
    nulls[number].append(Answer("", *map(float, scores[0])))
  chosen, score = [], operator.attrgetter("score")
  for of_question, of_null in zip(candidates, nulls, strict=True):
    # Windows overlap, so a text may be there several times: its best one stays.
    # The sort is stable: of equal scores the first one wins.
    texts: dict[str, Answer] = {}
    for answer in sorted(of_question, key=score, reverse=True):
      if answer.text:
        texts.setdefault(answer.text, answer)
    best = list(texts.values())[: settings.n_best_size]
    chosen.append(Answers(best, min(of_null, key=score)))
  return chosen


def _of_window(context: str, window, scores, settings) -> Iterator[Answer]:
  """Spans from the best starts to the best ends of a window."""
  best = np.argsort(-scores.T, kind="stable")[:, : settings.n_best_size]
  starts, ends = best - window.offset
  count = len(window.spans.ids)
  part = scores[window.offset :]
  for start in starts:
    # Elsewhere another window has more context for this token, and scores it.
    if not (0 <= start < count and window.is_best[start]):
      continue
    past = min(start + settings.max_answer_length, count)
    for end in ends:
      if start <= end < past:
        text = context[window.spans.starts[start] : window.spans.ends[end]]
        yield Answer(text.strip(), float(part[start, 0]), float(part[end, 1]))
