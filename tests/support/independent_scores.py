"""Scores of answers and entities by their definitions, apart from finetuning/.

Imports nothing of this project: what it counts is an independent check of ours.
"""

import collections
import re
import string

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = frozenset(string.punctuation)


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


def entities(labels: list) -> set:
  """(first, last, type) of the entities in a sentence's IOB2 labels.

  As conlleval: I- begins an entity where none of its type goes on.
  """
  result, first = set(), None
  for index, label in enumerate([*labels, "O"]):
    before = labels[index - 1] if index else "O"
    goes_on = label.startswith("I-") and label[1:] == before[1:]
    if first is not None and not goes_on:
      result.add((first, index - 1, before[2:]))
      first = None
    if first is None and label != "O":
      first = index
  return result
