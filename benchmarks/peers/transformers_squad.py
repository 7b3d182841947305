"""The SQuAD v1.1 side of transformers_finetune.py, in plain Python.

Apart from that script so that it can be tested without PyTorch. Imports nothing
of this project: what it counts is an independent check of ours. The
offsets of a window hold, for each of its tokens, the (first, past-the-last)
characters of its context, or None for tokens that are not of the context.
"""

import collections
import heapq
import json
import re
import string
from typing import NamedTuple

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = frozenset(string.punctuation)


class Question(NamedTuple):
  """One question: `answers` are (text, first character) of its context."""

  text: str
  context: str
  answers: list


def read_questions(path: str) -> list:
  """The Questions of a SQuAD v1.1 file in its order."""
  with open(path, encoding="utf-8") as f:
    articles = json.load(f)["data"]
  return [
    Question(
      # Spaces in front can fill a window; the examples drop them, too.
      qa["question"].lstrip(),
      paragraph["context"],
      [(answer["text"], answer["answer_start"]) for answer in qa["answers"]],
    )
    for article in articles
    for paragraph in article["paragraphs"]
    for qa in paragraph["qas"]
  ]


def answer_positions(offsets: list, answer: tuple) -> tuple:
  """The first and last token of `answer`, a (text, first character), in a
  window; (0, 0), which is [CLS], if the window does not hold all of it."""
  text, first = answer
  past = first + len(text)
  context = [i for i, offset in enumerate(offsets) if offset]
  if not context:
    return 0, 0
  if offsets[context[0]][0] > first or offsets[context[-1]][1] < past:
    return 0, 0
  start = max(i for i in context if offsets[i][0] <= first)
  end = min(i for i in context if offsets[i][1] >= past)
  return start, end


def best_answer(
  windows, context: str, n_best: int = 20, max_length: int = 30
) -> str:
  """The text of the span with the largest sum of logits in all windows.

  Args:
    windows: (offsets, start logits, end logits) of each window of a question.
    context: what the offsets are of.
    n_best: how many starts and how many ends of a window are looked at.
    max_length: the longest answer in tokens.
  """
  spans = []
  for offsets, starts, ends in windows:
    positions = range(len(offsets))
    likely_ends = heapq.nlargest(n_best, positions, key=ends.__getitem__)
    for start in heapq.nlargest(n_best, positions, key=starts.__getitem__):
      for end in likely_ends:
        inside = offsets[start] and offsets[end]
        if inside and start <= end < start + max_length:
          score = starts[start] + ends[end]
          spans.append((score, offsets[start][0], offsets[end][1]))
  if not spans:
    return ""
  _, first, past = max(spans, key=lambda span: span[0])
  return context[first:past]


def normalized(text: str) -> str:
  """Lower case without punctuation, articles and needless spaces."""
  text = "".join(c for c in text.lower() if c not in PUNCTUATION)
  return " ".join(ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, answer: str) -> float:
  return float(normalized(prediction) == normalized(answer))


def f1(prediction: str, answer: str) -> float:
  """Harmonic mean of precision and recall of the words; 0 if none is shared."""
  predicted, right = normalized(prediction).split(), normalized(answer).split()
  shared = collections.Counter(predicted) & collections.Counter(right)
  return 2 * shared.total() / max(1, len(predicted) + len(right))


def scores(predictions: list, questions: list) -> dict:
  """Means in percent of the best score over the answers of each question."""
  result = {}
  for name, score in (("exact_match", exact_match), ("f1", f1)):
    best = [
      max(score(prediction, text) for text, _ in question.answers)
      for prediction, question in zip(predictions, questions, strict=True)
    ]
    result[name] = round(100 * sum(best) / len(best), 2)
  return result
