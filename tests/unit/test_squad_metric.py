"""SQuAD's official metric against cases worked by hand."""

import pytest

from finetuning import squad_metric


def test_normalize_answer():
  for text, normal in (
    ("The  Cat, sat!", "cat sat"), ("a an the", ""), ("U.S.A.", "usa"),
    ("Theatre and another", "theatre and another"),
    ("state-of-the-art", "stateoftheart"),
    ("\tJohn F. Kennedy's\n", "john f kennedys"),
    ("10,000 \u20ac", "10000 \u20ac"),
  ):  # fmt: skip
    assert squad_metric.normalize_answer(text) == normal


def test_one_answer():
  for answer, prediction, exact, words in (
    ("the Denver Broncos", "Denver Broncos!", 1.0, 1.0),
    # 2 words in common: precision 2/3, recall 2/2.
    ("Denver Broncos", "Denver Broncos team", 0.0, 0.8),
    # A word that stands twice counts as often as in both: 1 of 2 and 1 of 1.
    ("big", "big big", 0.0, 2 / 3),
    ("Denver", "Carolina", 0.0, 0.0),
    ("", "", 1.0, 1.0),
    ("the", "", 1.0, 1.0),  # no words are left of it
    ("Denver", "", 0.0, 0.0),
    ("", "Denver", 0.0, 0.0),
  ):
    assert squad_metric.exact_match(answer, prediction) == exact
    assert squad_metric.f1_v2(answer, prediction) == pytest.approx(words)
    # evaluate-v1.1.py finds no common word where there is none.
    nothing = not squad_metric.normalize_answer(answer)
    of_v1 = squad_metric.f1_v1(answer, prediction)
    assert of_v1 == pytest.approx(0.0 if nothing else words)


def test_version_1_takes_the_best_of_several_answers():
  answers = {
    "q1": ["in 1968", "1968"], "q2": ["two men", "two"], "q3": ["Paris"],
    "q4": ["Rome"],
  }  # fmt: skip
  predictions = {"q1": "1968.", "q2": "two old men", "q3": "London", "q4": ""}
  # q1: 1, 1; q2: 0, 0.8 (2 of 3, 2 of 2); q3 and q4: 0, 0.
  assert squad_metric.evaluate_v1(answers, predictions) == pytest.approx(
    {"exact_match": 0.25, "f1": 0.45}
  )


def test_version_2():
  answers = {"a": ["red car"], "b": ["blue"], "c": [], "d": []}
  best = {"a": "red", "b": "blue", "c": "green", "d": "grey"}
  odds = {"a": -2.0, "b": 3.0, "c": -1.0, "d": 1.0}
  found = squad_metric.evaluate_v2(answers, best, odds, threshold=0.0)
  # a: "red", f1 2/3. b: above the threshold, so "", wrong. c: "green", wrong.
  # d: "", right.
  assert found["exact"] == pytest.approx(0.25)
  assert found["f1"] == pytest.approx((2 / 3 + 1) / 4)
  assert found["HasAns_exact"] == 0.0
  assert found["HasAns_f1"] == pytest.approx(1 / 3)
  assert found["NoAns_exact"] == found["NoAns_f1"] == 0.5
  # No threshold at all: c and d are right, 2 of 4 exactly. Up to -2 a is
  # answered, 2 exactly and 2.67 in words; up to -1 and 1 c and d are lost.
  assert found["best_exact"] == pytest.approx(0.5)
  assert found["best_exact_thresh"] < -2.0
  assert found["best_f1"] == pytest.approx((2 / 3 + 2) / 4)
  assert found["best_f1_thresh"] == -2.0
  # With that threshold it is that f1.
  again = squad_metric.evaluate_v2(answers, best, odds, threshold=-2.0)
  assert again["f1"] == pytest.approx(found["best_f1"])


def test_version_2_with_equal_odds_has_thresholds_that_can_be():
  answers = {"a": ["x"], "b": []}
  found = squad_metric.evaluate_v2(
    answers, {"a": "x", "b": "y"}, {"a": 1.0, "b": 1.0}
  )
  # Both are answered or none: one is right either way.
  assert found["best_exact"] == found["best_f1"] == 0.5
  assert "NoAns_exact" in found and "HasAns_exact" in found


@pytest.mark.parametrize(
  "answers, groups",
  [
    ([["the"], ["."]], ["", "HasAns_"]),  # nothing is left of them
    ([["the"], []], ["", "HasAns_", "NoAns_"]),
    ([["the", "red"], ["blue"]], ["", "HasAns_"]),
    ([[], []], ["", "NoAns_"]),
  ],
)
@pytest.mark.parametrize("best", ["red", "the", ""])
@pytest.mark.parametrize("odds", [-1.0, 1.0])
def test_version_2_of_any_questions(answers, groups, best, odds):
  """Equal to what evaluate-v2.0.py says of the predictions, worked out."""
  answers = dict(enumerate(answers))
  found = squad_metric.evaluate_v2(
    answers, dict.fromkeys(answers, best), dict.fromkeys(answers, odds)
  )
  chosen = "" if odds > 0.0 else best
  members = {
    "": list(answers.values()),
    "HasAns_": [a for a in answers.values() if a],
    "NoAns_": [a for a in answers.values() if not a],
  }
  for group in groups:
    right = []
    for each in members[group]:
      words = [answer for answer in each if answer not in ("the", ".")]
      right.append(chosen in words if words else chosen in ("", "the"))
    expected = sum(right) / len(right)
    assert found[f"{group}exact"] == pytest.approx(expected)
    assert found[f"{group}f1"] == pytest.approx(expected)
  names = {n.removesuffix("exact") for n in found if n.endswith("exact")}
  assert names == {*groups, "best_"}
