"""Entities of labels: seqeval 1.2.2's answers, and another definition."""

import numpy as np
import pytest

from finetuning import entities

# (labels, the entities in them): as seqeval 1.2.2's get_entities says.
RECORDED = [
  ("O O", ""),
  ("B-PER I-PER O", "PER 0 1"),
  ("I-LOC I-LOC O I-LOC", "LOC 0 1, LOC 3 3"),
  ("B-LOC B-LOC I-LOC", "LOC 0 0, LOC 1 2"),
  ("I-LOC B-LOC B-P-X O I-LOC", "LOC 0 0, LOC 1 1, P-X 2 2, LOC 4 4"),
  ("B-PER I-LOC I-LOC", "PER 0 0, LOC 1 2"),
  ("O I-P-X I-LOC I-P-X", "P-X 1 1, LOC 2 2, P-X 3 3"),
  ("B-LOC I-LOC E-LOC S-LOC", "LOC 0 2, LOC 3 3"),
  ("B-LOC E-LOC I-LOC", "LOC 0 1, LOC 2 2"),
  ("O E-P-X I-LOC S-LOC", "P-X 1 1, LOC 2 2, LOC 3 3"),
  ("B-LOC S-LOC S-LOC S-P-X", "LOC 0 0, LOC 1 1, LOC 2 2, P-X 3 3"),
  ("E-LOC E-LOC", "LOC 0 0, LOC 1 1"),
  ("I-A I-A-B B-A", "A 0 0, A-B 1 1, A 2 2"),
  # BILOU, and BMES of Chinese data, which seqeval's default does not know.
  ("B-A I-A L-A U-A B-B M-B E-B S-B", "A 0 2, A 3 3, B 4 6, B 7 7"),
  # Without types, as BioBERT's data and those of Chinese words.
  ("B I O I I B B E S", "_ 0 1, _ 3 4, _ 5 5, _ 6 7, _ 8 8"),
  ("B- I-A I B", "_ 0 0, A 1 1, _ 2 2, _ 3 3"),
  ("B M E S S B E", "_ 0 2, _ 3 3, _ 4 4, _ 5 6"),
]


@pytest.mark.parametrize("labels, found", RECORDED)
def test_entities_are_seqevals(labels, found):
  wanted = [one.split() for one in found.split(", ") if one]
  wanted = [(name, int(first), int(last)) for name, first, last in wanted]
  assert entities.entities_of(labels.split()) == wanted


def by_borders(labels):
  """conlleval's definition: where a chunk ends and where one begins."""
  found, begin = [], None
  padded = ["O", *labels, "O"]
  for place in range(len(labels) + 1):
    (before, kind), (now, other) = (
      (tag[0], tag[2:]) for tag in padded[place : place + 2]
    )
    differs = kind != other
    ends = before in "ES" or (before in "BI" and (now in "BSO" or differs))
    begins = now in "BS" or (now in "IE" and (before in "ESO" or differs))
    if ends:
      found.append((kind, begin, place - 1))
    if begins:
      begin = place
  return found


def test_entities_by_their_borders():
  rng = np.random.default_rng(0)
  for letters in ("I", "BI", "BIES"):
    labels = ["O", *(f"{x}-{t}" for x in letters for t in ("A", "B"))]
    for _ in range(500):
      some = rng.choice(labels, rng.integers(1, 9)).tolist()
      assert entities.entities_of(some) == by_borders(some), some


# (right, predicted, F1, precision, recall): seqeval 1.2.2's, rounded.
SCORED = [
  ("I-LOC / O B-LOC B-P-X O I-LOC O I-LOC / I-LOC I-P-X O",
   "O / I-LOC B-LOC O O I-LOC O B-P-X / I-LOC I-P-X O",
   0.615385, 0.666667, 0.571429),
  ("O O / O O / O O B-P-X I-LOC O B-LOC",
   "O O / O I-LOC / O I-P-X I-LOC I-P-X O I-P-X", 0.0, 0.0, 0.0),
  ("O I-P-X B-LOC B-LOC / B-LOC B-P-X O O B-P-X / B-P-X B-P-X B-LOC O",
   "O I-P-X B-LOC B-P-X / O B-P-X O O B-P-X / B-P-X B-P-X B-LOC O",
   0.823529, 0.875, 0.777778),
  ("B-LOC / B-LOC E-LOC I-LOC / B-LOC S-LOC S-LOC S-P-X",
   "E-P-X / B-LOC E-LOC I-LOC / B-LOC O S-LOC O",
   0.666667, 0.8, 0.571429),
  ("O E-P-X O / E-P-X O S-LOC / I-LOC E-LOC B-P-X B-P-X",
   "O E-P-X O / E-P-X S-P-X S-LOC / O E-LOC B-P-X B-P-X",
   0.769231, 0.714286, 0.833333),
]  # fmt: skip


def sentences(text):
  """With an O after each."""
  return [*text.replace("/", "O").split(), "O"]


@pytest.mark.parametrize("right, predicted, f1, precision, recall", SCORED)
def test_scores_are_seqevals(right, predicted, f1, precision, recall):
  found = entities.scores(sentences(right), sentences(predicted), [])
  want = {"f1": f1, "precision": precision, "recall": recall}
  assert found == pytest.approx(want, abs=1e-6)


def test_scores_of_types():
  right = sentences("B-A I-A O B-B / B-A")
  predicted = sentences("B-A I-A O B-A / B-B")
  found = entities.scores(right, predicted, ["A", "B", "C"])
  assert found["f1"] == pytest.approx(1 / 3)
  assert (found["A/precision"], found["A/recall"]) == (0.5, 0.5)
  assert [found[f"{t}/f1"] for t in "ABC"] == [0.5, 0.0, 0.0]


def test_which_labels_mark_entities():
  for labels, types in (
    ("O B-PER I-PER", ["PER"]), ("S-B O E-A I-B", ["A", "B"]),
    ("NOUN VERB O", []), ("O B-PER NOUN", []), ("O B- I-A", []),
    ("B I O", ["_"]), ("O I", ["_"]), ("B M E S", ["_"]), ("B I O 0", []),
    ("B-A B I O", ["A", "_"]), ("M L S", []), ("B-A O o", []), ("A-B O", []),
  ):  # fmt: skip
    assert entities.types_of(labels.split()) == types
