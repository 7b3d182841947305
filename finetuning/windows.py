"""Questions over paragraphs as inputs of the encoder, and answers from scores.

A long paragraph is read in windows, each of which begins `doc_stride` tokens
after the one before (google/bert's sliding window).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

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


def join(tokenizer, *texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """int32 ids and segments of [CLS] a [SEP], or of [CLS] a [SEP] b [SEP]."""
  sep = [tokenizer.sep_id]
  parts = [part for text in texts for part in (text, sep)]
  ids = np.concatenate([[tokenizer.cls_id], *parts]).astype(np.int32)
  segments = np.zeros(len(ids), np.int32)
  segments[len(texts[0]) + 2 :] = 1
  return ids, segments


def make_windows(
  tokenizer,
  number: int,
  question_ids: np.ndarray,
  context: TokenSpans,
  max_seq_length: int,
  doc_stride: int,
) -> list[Window]:
  """The windows of a question, from the paragraph's beginning to its end.

  `question_ids`, int [q], are cut already. `context` has the paragraph's tokens
  `offsets.with_dropped`, so that answers have the dropped characters.
  """
  offset, count = len(question_ids) + 2, len(context.ids)
  room = max_seq_length - offset - 1
  starts = [0]
  while starts[-1] + room < count:
    starts.append(starts[-1] + min(doc_stride, room))
  parts = [(s, min(s + room, count)) for s in starts]
  best = _best_window(parts, count)
  windows = []
  for w, (start, stop) in enumerate(parts):
    part = TokenSpans(*(a[start:stop] for a in context))
    ids, segments = join(tokenizer, question_ids, part.ids)
    is_best = best[start:stop] == w
    windows.append(Window(number, ids, segments, offset, start, part, is_best))
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


class Answers(NamedTuple):
  """The candidates for a question."""

  best: list[Answer]  # of different texts, none empty; the best one first
  null: Answer  # [CLS], of the window where it has the lowest score

  @property
  def null_odds(self) -> float:
    """How much higher "no answer" scores than the best answer."""
    return self.null.score - self.best[0].score if self.best else 1e9

  def text(self, threshold: float = math.inf) -> str:
    """The best text; "" without one, or with `null_odds` above `threshold`."""
    if not self.best or self.null_odds > threshold:
      return ""
    return self.best[0].text


def best_answers(
  question: Question,
  windows: Sequence[Window],
  logits: Sequence[np.ndarray],
  n_best_size: int,
  max_answer_length: int,
) -> Answers:
  """The best answers of a question over its windows, and "no answer".

  `logits` are float [tokens, 2] of each window, start and end. `n_best_size`
  is the most answers, and the most starts and ends to try in a window.
  """
  found = [
    answer
    for window, scores in zip(windows, logits, strict=True)
    for answer in _of_window(
      question, window, scores, n_best_size, max_answer_length
    )
  ]
  texts: dict[str, Answer] = {}
  # Of equal scores the first that was found wins.
  for answer in sorted(found, key=lambda answer: answer.score, reverse=True):
    if answer.text:
      texts.setdefault(answer.text, answer)
  nulls = [Answer("", *map(float, scores[0])) for scores in logits]
  return Answers(
    list(texts.values())[:n_best_size],
    min(nulls, key=lambda answer: answer.score),
  )


def _of_window(
  question, window, scores, n_best_size, max_answer_length
) -> list[Answer]:
  # Stable: of equal scores the first position wins.
  tried = np.argsort(-scores.T, kind="stable")[:, :n_best_size] - window.offset
  count = len(window.spans.ids)
  starts, ends = ([p for p in row if 0 <= p < count] for row in tried)
  part = scores[window.offset :]
  return [
    Answer(
      question.context[
        window.spans.starts[start] : window.spans.ends[end]
      ].strip(),
      float(part[start, 0]),
      float(part[end, 1]),
    )
    for start in starts
    for end in ends
    if window.is_best[start] and start <= end < start + max_answer_length
  ]


def shares(answers: Sequence[Answer]) -> list[float]:
  """Softmax of the answers' scores."""
  scores = [answer.score for answer in answers]
  return special.softmax(scores).tolist() if scores else []
