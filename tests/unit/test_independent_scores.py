"""Our scores of SQuAD and of entities, beside a second implementation."""

import independent_scores
import numpy as np
import pytest

from finetuning import entities, squad_metric


def test_scores_of_one_answer_are_ours():
  """Answers with one or several words, articles and punctuation, or none."""
  rng = np.random.default_rng(0)
  words = ["the", "Moon!", "moon", "a", "an-d", "Apollo", "and", "B.", ","]
  for _ in range(500):
    texts = [" ".join(rng.choice(words, rng.integers(0, 5))) for _ in range(2)]
    prediction, answer = texts
    wanted = squad_metric.exact_match(answer, prediction)
    assert independent_scores.exact_match(prediction, answer) == wanted, texts
    wanted = squad_metric.f1_v1(answer, prediction)
    f1 = independent_scores.f1(prediction, answer)
    assert f1 == pytest.approx(wanted), texts


def test_entities_are_ours():
  rng = np.random.default_rng(0)
  for _ in range(300):
    labels = rng.choice(["O", "B-A", "I-A", "B-B", "I-B"], rng.integers(1, 9))
    ours = {(a, b, kind) for kind, a, b in entities.entities_of(labels)}
    assert independent_scores.entities(labels.tolist()) == ours, labels
