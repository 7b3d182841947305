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
  """Lower case, without punctuation, articles and spare spaces."""
  text = text.lower().translate(_NO_PUNCTUATION)
  return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(answer: str, prediction: str) -> float:
  """1 if they are the same but for `normalize_answer`."""
  return float(normalize_answer(answer) == normalize_answer(prediction))


def f1(answer: str, prediction: str) -> float:
  """Harmonic mean of precision and recall of words.

  If one of them has no words: 1 if neither has any.
  """
  wanted, got = (normalize_answer(t).split() for t in (answer, prediction))
  if not wanted or not got:
    return float(wanted == got)
  common = (collections.Counter(wanted) & collections.Counter(got)).total()
  if not common:
    return 0.0
  precision, recall = common / len(got), common / len(wanted)
  return 2 * precision * recall / (precision + recall)


def _best(metric, answers: Sequence[str], prediction: str) -> float:
  return max(metric(answer, prediction) for answer in answers)


def _answers_v2(answers: Sequence[str]) -> list[str]:
  """Answers with words in them; [""] for a question that has none."""
  return [a for a in answers if normalize_answer(a)] or [""]


def evaluate_v1(
  answers: Mapping[str, Sequence[str]], predictions: Mapping[str, str]
) -> dict:
  """Exact match and F1 over all questions; one without prediction counts 0.

  Args:
    answers: id -> right answers of a question, at least one.
    predictions: id -> answer.

  Returns:
    {"exact_match", "f1"} in percent.
  """
  exact = words = 0.0
  for question, right in answers.items():
    if question in predictions:
      exact += _best(exact_match, right, predictions[question])
      words += _best(f1, right, predictions[question])
  share = 100.0 / max(1, len(answers))
  return {"exact_match": share * exact, "f1": share * words}


def evaluate_v2(
  answers: Mapping[str, Sequence[str]],
  predictions: Mapping[str, str],
  null_odds: Mapping[str, float],
  threshold: float = 0.0,
) -> dict:
  """SQuAD 2.0's metrics.

  Args:
    answers: id -> right answers, none if the question has no answer.
    predictions: id -> the best answer that is not empty.
    null_odds: id -> how much more is to be said for no answer.
    threshold: where `null_odds` is above it, the answer is "".

  Returns:
    exact and f1 in percent, of questions with an answer (HasAns_) and without
    (NoAns_) too, where there are any; best_exact and best_f1, which the
    thresholds best_exact_thresh and best_f1_thresh would give; these are of
    the answers given here, so that no threshold of before is in them.
  """
  right = {q: _answers_v2(a) for q, a in answers.items()}
  results = {}
  for name, metric in (("exact", exact_match), ("f1", f1)):
    # Of the answer that is not empty, and of the empty one.
    answered = {q: _best(metric, right[q], predictions[q]) for q in right}
    empty = {q: float(right[q] == [""]) for q in right}
    scores = {
      q: empty[q] if null_odds[q] > threshold else answered[q] for q in right
    }
    groups = {
      "": list(right),
      "HasAns_": [q for q in right if not empty[q]],
      "NoAns_": [q for q in right if empty[q]],
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
  """The highest sum of scores, and the lowest threshold that gives it.

  A threshold t answers the questions whose null odds are at most t.
  """
  score = best = sum(empty.values())
  order = sorted(null_odds, key=null_odds.get)
  where = min(0.0, null_odds[order[0]] - 1.0) if order else 0.0
  for i, question in enumerate(order):
    score += answered[question] - empty[question]
    tied = i + 1 < len(order) and null_odds[order[i + 1]] == null_odds[question]
    if score > best and not tied:
      best, where = score, null_odds[question]
  return best, where
