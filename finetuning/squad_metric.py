"""SQuAD's official metrics, exact match and F1 of answers, as shares of 1.

The definitions, but not the percent, of evaluate-v1.1.py and evaluate-v2.0.py
(https://rajpurkar.github.io/SQuAD-explorer/; arXiv:1606.05250 section 6.1,
arXiv:1806.03822 section 5).
"""

import collections
import re
import string
from collections.abc import Mapping, Sequence

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
  """Lower case, without punctuation, articles and extra spaces."""
  text = text.lower().translate(_NO_PUNCTUATION)
  return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(answer: str, prediction: str) -> float:
  """1 if they are equal after `normalize_answer`."""
  return float(normalize_answer(answer) == normalize_answer(prediction))


def f1_v1(answer: str, prediction: str) -> float:
  """F1 of words; 0 for two texts without words, as in evaluate-v1.1.py."""
  wanted = normalize_answer(answer).split()
  got = normalize_answer(prediction).split()
  common = (collections.Counter(wanted) & collections.Counter(got)).total()
  if not common:
    return 0.0
  precision, recall = common / len(got), common / len(wanted)
  return 2 * precision * recall / (precision + recall)


def f1_v2(answer: str, prediction: str) -> float:
  """`f1_v1`, but 1 if neither text has words (evaluate-v2.0.py)."""
  return f1_v1(answer, prediction) or exact_match(answer, prediction)


def _best(metric, answers: Sequence[str], prediction: str) -> float:
  return max(metric(answer, prediction) for answer in answers)


def evaluate_v1(
  answers: Mapping[str, Sequence[str]], predictions: Mapping[str, str]
) -> dict:
  """Means by name."""
  results = {}
  for name, metric in (("exact_match", exact_match), ("f1", f1_v1)):
    scores = [_best(metric, answers[q], predictions[q]) for q in answers]
    results[name] = sum(scores) / len(answers)
  return results


def evaluate_v2(
  answers: Mapping[str, Sequence[str]],
  predictions: Mapping[str, str],
  null_odds: Mapping[str, float],
  threshold: float = 0.0,
) -> dict:
  """SQuAD 2.0's metrics by name.

  `predictions` are the best answers that are not empty; where `null_odds`, the
  score of "no answer" minus that answer's, are above `threshold`, it is "".
  HasAns_ and NoAns_ are of the questions with and without an answer, if there
  are any. best_exact and best_f1 are at the best thresholds (best_..._thresh).
  If all answers to a question normalise to nothing, "" is right, but the
  question still counts as one with an answer.
  """
  # As in evaluate-v2.0.py, answers that normalise to nothing are no answers.
  right = []
  for texts in answers.values():
    right.append([text for text in texts if normalize_answer(text)] or [""])
  odds = np.array([null_odds[question] for question in answers])
  has_answer = np.array([bool(texts) for texts in answers.values()])
  everywhere = np.full_like(has_answer, True)
  groups = {"": everywhere, "HasAns_": has_answer, "NoAns_": ~has_answer}
  # Scores of the empty answer, and of the one that is not empty.
  empty = np.array([float(texts == [""]) for texts in right])
  scores, at_best = {}, {}
  for name, metric in (("exact", exact_match), ("f1", f1_v2)):
    answered = []
    for question, texts in zip(answers, right, strict=True):
      answered.append(_best(metric, texts, predictions[question]))
    scores[name] = np.where(odds > threshold, empty, answered)
    # The threshold that would have been best is told beside the given one's
    # scores.
    best, where = _best_threshold(np.array(answered), empty, odds)
    at_best[f"best_{name}"] = best / len(right)
    at_best[f"best_{name}_thresh"] = where
  results = {}
  for prefix, group in groups.items():
    for name in scores if group.any() else ():
      results[prefix + name] = sum(scores[name][group]) / sum(group)
  return {name: float(n) for name, n in {**results, **at_best}.items()}


def _best_threshold(answered, empty, odds) -> tuple[float, float]:
  """Best sum of scores and its threshold; lower or equal odds get an answer."""
  order = np.argsort(odds, kind="stable")
  # Sum k: the k questions of the lowest odds are answered, the others not.
  sums = np.cumsum([sum(empty), *(answered - empty)[order]])
  thresholds = np.array([min(0.0, odds.min() - 1.0), *odds[order]])
  # Questions of equal odds get their answers together.
  sums[1:-1][thresholds[1:-1] == thresholds[2:]] = -np.inf
  best = np.argmax(sums)  # the first one, with the fewest answers
  return sums[best], thresholds[best]
