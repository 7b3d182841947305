"""Questions over paragraphs as inputs of the encoder, and answers from scores.

A long paragraph is read in windows, each of which begins `doc_stride` tokens
after the one before (google/bert's sliding window).
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from finetuning import offsets
from finetuning.offsets import TokenSpans


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
  is_best: np.ndarray  # bool [part]: no other window has more around the token


def make_windows(
  tokenizer,
  number: int,
  question_ids: np.ndarray,
  context: TokenSpans,
  max_seq_length: int,
  doc_stride: int,
) -> list[Window]:
  """The windows of a question, from the paragraph's beginning to its end.

  Args:
    number: the question's.
    question_ids: int [q], cut already.
    context: the paragraph's tokens `offsets.with_dropped`, so that answers have
      the dropped characters.
    doc_stride: tokens from the beginning of a window to that of the next.
  """
  head = np.concatenate(
    [[tokenizer.cls_id], question_ids, [tokenizer.sep_id]]
  ).astype(np.int32)
  room = max_seq_length - len(head) - 1
  count = len(context.ids)
  starts = [0]
  while starts[-1] + room < count:
    starts.append(starts[-1] + min(doc_stride, room))
  parts = [(s, min(s + room, count)) for s in starts]
  best = _best_window(parts, count)
  windows = []
  for w, (start, stop) in enumerate(parts):
    part = TokenSpans(*(a[start:stop] for a in context))
    ids = np.concatenate([head, part.ids, [tokenizer.sep_id]]).astype(np.int32)
    segments = np.zeros(len(ids), np.int32)
    segments[len(head) :] = 1
    is_best = best[start:stop] == w
    windows.append(
      Window(number, ids, segments, len(head), start, part, is_best)
    )
  return windows


def _best_window(parts: Sequence[tuple], count: int) -> np.ndarray:
  """int [count]: the window in which a token has the most context.

  Context is the smaller number of tokens left and right of it, and a little for
  a long window (google/bert's "max context"); the first of equal windows wins.
  """
  best, scores = np.zeros(count, np.int32), np.full(count, -1.0)
  for w, (start, stop) in enumerate(parts):
    inside = np.arange(stop - start)
    own = np.minimum(inside, inside[::-1]) + 0.01 * (stop - start)
    better = own > scores[start:stop]
    best[start:stop][better] = w
    scores[start:stop][better] = own[better]
  return best


def answer_tokens(question: Question, context: TokenSpans) -> tuple | None:
  """First and last token of the question's answer in its paragraph.

  Characters of the answer that no token has do not count. Of several answers
  it is the first that is where the file says and has a token; None if none is.
  `context` are the paragraph's tokens of `offsets.encode_with_spans`.
  """
  for text, first in question.answers:
    if first >= 0 and question.context.startswith(text, first):
      found = offsets.covering(context, first, first + len(text))
      if found:
        return found
  return None


def target_span(window: Window, answer: tuple | None) -> tuple[int, int]:
  """First and last token of `answer_tokens` in the window, counted from [CLS].

  (0, 0), which is [CLS], without an answer that is all in the window.
  """
  if answer is None:
    return 0, 0
  a, b = (token - window.first for token in answer)
  if a < 0 or b >= len(window.spans.ids):
    return 0, 0
  return window.offset + a, window.offset + b


class Answer(NamedTuple):
  """A candidate; its score is that of the span."""

  text: str
  start_logit: float
  end_logit: float

  @property
  def score(self) -> float:
    return self.start_logit + self.end_logit


def best_answers(
  question: Question,
  windows: Sequence[Window],
  logits: Sequence[np.ndarray],
  n_best_size: int,
  max_answer_length: int,
) -> tuple[list[Answer], Answer]:
  """The best answers of a question over its windows, and "no answer".

  Args:
    logits: float [tokens, 2] of each window, start and end.
    n_best_size: the most answers, and starts and ends to try in a window.

  Returns:
    Answers with different texts that are not empty, the best first; and [CLS]
    as the answer, of the window where that has the lowest score.
  """
  found, nulls = [], []
  for window, scores in zip(windows, logits, strict=True):
    nulls.append(Answer("", float(scores[0, 0]), float(scores[0, 1])))
    found += _of_window(
      question, window, scores, n_best_size, max_answer_length
    )
  # Of equal scores the first that was found wins.
  ranked = heapq.nlargest(len(found), found, key=lambda answer: answer.score)
  texts = {}
  for answer in ranked:
    if answer.text:
      texts.setdefault(answer.text, answer)
    if len(texts) == n_best_size:
      break
  return list(texts.values()), min(nulls, key=lambda answer: answer.score)


def _of_window(
  question, window, scores, n_best_size, max_answer_length
) -> list[Answer]:
  # Stable: of equal scores the first position wins.
  starts, ends = np.argsort(-scores.T, kind="stable")[:, :n_best_size] - (
    window.offset
  )
  count = len(window.spans.ids)
  starts = [p for p in starts if 0 <= p < count and window.is_best[p]]
  ends = [p for p in ends if 0 <= p < count]
  answers = []
  for start in starts:
    for end in ends:
      if start <= end < start + max_answer_length:
        first, last = window.spans.starts[start], window.spans.ends[end]
        answers.append(
          Answer(
            question.context[first:last].strip(),
            float(scores[start + window.offset, 0]),
            float(scores[end + window.offset, 1]),
          )
        )
  return answers


def shares(answers: Sequence[Answer]) -> list[float]:
  """Softmax of the answers' scores."""
  if not answers:
    return []
  highest = max(answer.score for answer in answers)
  weights = [math.exp(answer.score - highest) for answer in answers]
  return [weight / sum(weights) for weight in weights]
