"""SQuAD's official metrics: exact match and F1 of answers, in percent.

The definitions of evaluate-v1.1.py and evaluate-v2.0.py
(https://rajpurkar.github.io/SQuAD-explorer/; arXiv:1606.05250 section 6.1,
arXiv:1806.03822 section 5).
"""

import collections
import re
import string
from collections.abc import Mapping, Sequence

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
  wanted, got = (normalize_answer(t).split() for t in (answer, prediction))
  common = (collections.Counter(wanted) & collections.Counter(got)).total()
  if not common:
    return 0.0
  precision, recall = common / len(got), common / len(wanted)
  return 2 * precision * recall / (precision + recall)


def f1_v2(answer: str, prediction: str) -> float:
  """`f1_v1`, but 1 if neither text has words (evaluate-v2.0.py)."""
  if not normalize_answer(answer) and not normalize_answer(prediction):
    return 1.0
  return f1_v1(answer, prediction)


def _best(metric, answers: Sequence[str], prediction: str) -> float:
  return max(metric(answer, prediction) for answer in answers)


def evaluate_v1(
  answers: Mapping[str, Sequence[str]], predictions: Mapping[str, str]
) -> dict:
  """Percentages by name; a question without prediction counts 0."""
  exact = words = 0.0
  for question, right in answers.items():
    if question in predictions:
      exact += _best(exact_match, right, predictions[question])
      words += _best(f1_v1, right, predictions[question])
  share = 100.0 / max(1, len(answers))
  return {"exact_match": share * exact, "f1": share * words}


def evaluate_v2(
  answers: Mapping[str, Sequence[str]],
  predictions: Mapping[str, str],
  null_odds: Mapping[str, float],
  threshold: float = 0.0,
) -> dict:
  """SQuAD 2.0's metrics by name; exact and f1 are in percent.

  HasAns_ and NoAns_ are of the questions with and without an answer, if there
  are any. best_exact and best_f1 are at the best thresholds (best_..._thresh).
  If all answers to a question normalise to nothing, "" is right, but the
  question still counts as one with an answer.

  Args:
    answers: id -> right answers, none if the question has no answer.
    predictions: id -> the best answer that is not empty.
    null_odds: id -> score of "no answer" minus score of that answer.
    threshold: where `null_odds` is above it, the answer is "".
  """
  groups = {
    "": list(answers),
    "HasAns_": [q for q, right in answers.items() if right],
    "NoAns_": [q for q, right in answers.items() if not right],
  }
  right = {
    question: [a for a in texts if normalize_answer(a)] or [""]
    for question, texts in answers.items()
  }
  results = {}
  for name, metric in (("exact", exact_match), ("f1", f1_v2)):
    # Scores of the answer that is not empty, and of the empty one.
    answered = {q: _best(metric, right[q], predictions[q]) for q in right}
    empty = {q: float(right[q] == [""]) for q in right}
    scores = {
      q: empty[q] if null_odds[q] > threshold else answered[q] for q in right
    }
    for prefix, members in groups.items():
      if members:
        total = sum(scores[q] for q in members)
        results[prefix + name] = 100.0 * total / len(members)
    best, where = _best_threshold(answered, empty, null_odds)
    results[f"best_{name}"] = 100.0 * best / max(1, len(right))
    results[f"best_{name}_thresh"] = where
  return results


def _best_threshold(answered, empty, null_odds) -> tuple[float, float]:
  """Best sum of scores and its threshold; lower or equal odds get an answer."""
  score = best = sum(empty.values())
  order = sorted(null_odds, key=null_odds.get)
  where = min(0.0, null_odds[order[0]] - 1.0) if order else 0.0
  for i, question in enumerate(order):
    score += answered[question] - empty[question]
    tied = i + 1 < len(order) and null_odds[order[i + 1]] == null_odds[question]
    if score > best and not tied:
      best, where = score, null_odds[question]
  return best, where
