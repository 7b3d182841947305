"""Questions over paragraphs as inputs of the encoder, and answers out of them.

A paragraph that is too long is read in windows that overlap by all but
`doc_stride` tokens (google/bert's sliding window).
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from finetuning import offsets
from finetuning.offsets import TokenSpans


class Question(NamedTuple):
  """One of a SQuAD file."""

  id: str
  text: str
  context: str
  # Of (text, first character in the context), which may not be true; () if
  # there is none.
  answers: tuple


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
  """The windows of a question, from the paragraph's begin to its end.

  Args:
    tokenizer: for the special tokens.
    number: the question's.
    question_ids: int [q], cut already.
    context: the paragraph's tokens, with dropped characters
      (`offsets.with_dropped`), which answers then have.
    max_seq_length: tokens of a window.
    doc_stride: tokens from the begin of a window to that of the next.
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
    windows.append(
      Window(
        number, ids, segments, len(head), start, part, best[start:stop] == w
      )
    )
  return windows


def _best_window(parts: Sequence[tuple], count: int) -> np.ndarray:
  """int [count]: the window in which a token has the most around it.

  That is the smaller of what is left and right of it, and a little for a long
  window (google/bert's "max context"); the first of equal ones.
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
  it is the first that stands where it is said to and has a token; None if none
  does.

  Args:
    question: with any answers.
    context: the paragraph's tokens as `offsets.encode_with_spans` gives them.
  """
  for text, first in question.answers:
    if first >= 0 and question.context.startswith(text, first):
      found = offsets.covering(context, first, first + len(text))
      if found:
        return found
  return None


def target_span(window: Window, answer: tuple | None) -> tuple[int, int]:
  """First and last token of the answer in the window, counted from [CLS].

  (0, 0), which is [CLS], if the window does not hold all of it, or there is
  none.

  Args:
    window: any of the question's.
    answer: of `answer_tokens`.
  """
  if answer is None:
    return 0, 0
  a, b = (token - window.first for token in answer)
  if a < 0 or b >= len(window.spans.ids):
    return 0, 0
  return window.offset + a, window.offset + b


class Answer(NamedTuple):
  """A candidate."""

  text: str
  start_logit: float
  end_logit: float

  @property
  def score(self) -> float:
    """Of the span."""
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
    question: the question.
    windows: its windows.
    logits: float [tokens, 2] of each window, start and end.
    n_best_size: answers at most, and starts and ends to try in a window.
    max_answer_length: tokens of an answer.

  Returns:
    Up to n_best_size answers with different texts that are not empty, the best
    first; and [CLS] as the answer, of the window where that has the lowest
    score.
  """
  found, nulls = [], []
  for window, scores in zip(windows, logits, strict=True):
    nulls.append(Answer("", float(scores[0, 0]), float(scores[0, 1])))
    found += _of_window(
      question, window, scores, n_best_size, max_answer_length
    )
  # Two that are equal: the one that was found first.
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
  starts, ends = (_best_places(scores[:, i], n_best_size) for i in (0, 1))
  count = len(window.spans.ids)
  starts = [
    p for p in starts - window.offset if 0 <= p < count and window.is_best[p]
  ]
  ends = [p for p in ends - window.offset if 0 <= p < count]
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


def _best_places(scores: np.ndarray, count: int) -> np.ndarray:
  """The places of the highest scores, the first of equal ones first."""
  return np.argsort(-scores, kind="stable")[:count]


def shares(answers: Sequence[Answer]) -> list[float]:
  """Softmax of the answers' scores."""
  if not answers:
    return []
  highest = max(answer.score for answer in answers)
  weights = [math.exp(answer.score - highest) for answer in answers]
  return [weight / sum(weights) for weight in weights]
