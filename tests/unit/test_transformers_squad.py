"""The scores and spans of the Hugging Face side's SQuAD, by hand."""

import json

import numpy as np
import pytest

from benchmarks.peers import transformers_squad as squad
from finetuning import squad_metric

CONTEXT = "The Apollo program put men on the Moon."
# [CLS] who ? [SEP] the apollo program put men on the moon . [SEP]
OFFSETS = [None] * 4
OFFSETS += [(0, 3), (4, 10), (11, 18), (19, 22), (23, 26), (27, 29), (30, 33)]
OFFSETS += [(34, 38), (38, 39), None]


def test_scores_of_one_answer_are_ours():
  """Of answers with one or several words, articles and marks, or none."""
  rng = np.random.default_rng(0)
  words = ["the", "Moon!", "moon", "a", "an-d", "Apollo", "and", "B.", ","]
  for _ in range(500):
    texts = [" ".join(rng.choice(words, rng.integers(0, 5))) for _ in range(2)]
    prediction, answer = texts
    wanted = squad_metric.exact_match(answer, prediction)
    assert squad.exact_match(prediction, answer) == wanted, texts
    wanted = squad_metric.f1_v1(answer, prediction)
    assert squad.f1(prediction, answer) == pytest.approx(wanted), texts


def test_the_best_of_the_answers_counts_and_questions_are_averaged():
  questions = [
    squad.Question("q", "c", [("Mars", 0), ("the Moon", 0)]),
    squad.Question("q", "c", [("project Apollo", 0), ("Gemini", 0)]),
  ]
  found = squad.scores(["moon", "Apollo"], questions)
  assert found == {"exact_match": 50.0, "f1": 83.33}


@pytest.mark.parametrize(
  "answer, positions",
  [
    (("Apollo program", 4), (5, 6)),
    (("Moon", 34), (11, 11)),
    # In the middle of tokens: the tokens that hold it.
    (("pollo pro", 5), (5, 6)),
    (("The", 0), (4, 4)),
  ],
)
def test_positions_of_an_answer(answer, positions):
  assert squad.answer_positions(OFFSETS, answer) == positions


def test_an_answer_that_a_window_cuts_is_at_cls():
  without_end = [*OFFSETS[:6], None]
  without_start = [*OFFSETS[:4], *OFFSETS[6:]]
  for window in (without_end, without_start, [None, None]):
    assert squad.answer_positions(window, ("Apollo program", 4)) == (0, 0)


def logits(**high):
  values = [0.0] * len(OFFSETS)
  for position, value in high.items():
    values[int(position[1:])] = value
  return values


def best(starts, ends, n_best=20, max_length=30):
  windows = [(OFFSETS, starts, ends)]
  return squad.best_answer(windows, CONTEXT, n_best, max_length)


def test_the_best_span_is_in_the_context_in_order_and_not_too_long():
  # [CLS] and a span that ends before it begins have larger sums.
  starts, ends = logits(_0=9, _5=5, _10=6), logits(_0=9, _6=5, _7=4)
  assert best(starts, ends) == "Apollo program"
  starts, ends = logits(_5=5, _11=3), logits(_11=5)
  for tokens in (30, 7):
    found = best(starts, ends, max_length=tokens)
    assert found == "Apollo program put men on the Moon"
  assert best(starts, ends, max_length=6) == "Moon"


def test_the_n_best_positions_of_all_windows_count():
  starts, ends = logits(_0=9, _5=5), logits(_6=5)
  assert best(starts, ends, n_best=2) == "Apollo program"
  assert best(starts, ends, n_best=1) == ""
  first = OFFSETS, logits(_5=2), logits(_5=2)
  second = OFFSETS[:4] + OFFSETS[8:], logits(_7=3), logits(_7=3)
  assert squad.best_answer([first, second], CONTEXT, 20, 30) == "Moon"
  assert squad.best_answer([second, first], CONTEXT, 20, 30) == "Moon"


def test_reading_questions(tmp_path):
  answers = [{"text": "men", "answer_start": 23}]
  qa = {"id": "1", "question": "  Who?", "answers": answers}
  article = {"paragraphs": [{"context": CONTEXT, "qas": [qa]}]}
  path = tmp_path / "train.json"
  path.write_text(json.dumps({"data": [article]}), encoding="utf-8")
  (question,) = squad.read_questions(str(path))
  assert question == ("Who?", CONTEXT, [("men", 23)])
