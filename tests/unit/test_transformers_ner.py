"""The scores of the Hugging Face side's labels of words."""

import numpy as np
import pytest

from benchmarks.peers import transformers_ner as peer
from finetuning import entities


def test_reading(tmp_path):
  path = tmp_path / "a.txt"
  path.write_text(
    "-DOCSTART- -X- O\n\nEU NNP B-ORG\nwins V O\n\n\nUN N B-ORG\n"
  )
  assert peer.read_sentences(str(path)) == [
    (["EU", "wins"], ["B-ORG", "O"]),
    (["UN"], ["B-ORG"]),
  ]


def test_entities_are_ours():
  rng = np.random.default_rng(0)
  for _ in range(300):
    labels = rng.choice(["O", "B-A", "I-A", "B-B", "I-B"], rng.integers(1, 9))
    ours = {(a, b, kind) for kind, a, b in entities.entities_of(labels)}
    assert peer.chunks(labels.tolist()) == ours, labels


def test_scores():
  right = [["B-A", "I-A", "O"], ["B-B"]]
  predicted = [["B-A", "I-A", "B-B"], ["O"]]
  assert peer.scores(right, predicted) == {
    "precision": 50.0, "recall": 50.0, "f1": 50.0, "accuracy": 50.0,
  }  # fmt: skip
  none = peer.scores([["O"]], [["O"]])
  assert none["f1"] == 0.0 and none["accuracy"] == pytest.approx(100.0)
