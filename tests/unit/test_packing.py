"""Which examples share a record: hand-worked packs, and what always holds."""

import numpy as np
import pytest

from records import packing


def pack(tokens, predictions=None, seed=0, **limits):
  most = dict(max_seq_length=10, max_predictions_per_seq=100)
  most |= {"examples_per_record": 9, **limits}
  if predictions is None:
    predictions = [1] * len(tokens)
  rng = np.random.default_rng(seed)
  return packing.pack(tokens, predictions, packing.Limits(**most), rng)


def lengths(packs, tokens):
  return sorted([tokens[i] for i in pack] for pack in packs)


@pytest.mark.parametrize(
  "tokens, want",
  [
    # 8 and 7 open records with room 2 and 3; 3 fills the one and 2 the other; 6
    # opens a third with room 4, which takes 4.
    ([2, 7, 4, 8, 3, 6], [[6, 4], [7, 3], [8, 2]]),
    # 5 does not fit beside 8, 4 does beside 5; 1 then fits beside either: room
    # 2 and room 1.
    ([8, 5, 4, 1], [[5, 4, 1], [8]]),
  ],
  ids=["the longest go first", "the least room that is enough is taken"],
)
def test_each_goes_where_it_fits_best(tokens, want):
  assert lengths(pack(tokens), tokens) == want


def test_a_record_has_no_more_examples_and_masked_tokens_than_it_may():
  packs = pack([2] * 10, examples_per_record=3)
  assert sorted(map(len, packs)) == [1, 3, 3, 3]
  masked = [3, 3, 3, 1, 1]
  packs = pack([4, 4, 4, 2, 2], masked, max_predictions_per_seq=4)
  assert lengths(packs, masked) == [[3], [3, 1], [3, 1]]


def test_an_example_that_fits_nowhere_is_named():
  with pytest.raises(ValueError, match="example 1 of 11 tokens"):
    pack([3, 11])
  with pytest.raises(ValueError, match="and 9 masked ones"):
    pack([3], [9], max_predictions_per_seq=8)


def test_one_example_a_record_is_a_shuffle():
  packs = pack(list(range(1, 11)) * 10, examples_per_record=1)
  numbers = [i for (i,) in packs]
  assert sorted(numbers) == list(range(100)) != numbers


def test_random_sizes_fill_records_and_chance_decides_who_meets():
  rng = np.random.default_rng(1)
  # As on real text: a third long, the others short, 15% masked.
  tokens = np.where(
    rng.random(4000) < 0.35, 512, rng.integers(5, 512, 4000)
  ).tolist()
  predictions = [max(1, round(0.15 * n)) for n in tokens]
  limits = dict(
    max_seq_length=512, max_predictions_per_seq=80, examples_per_record=16
  )
  packs = pack(tokens, predictions, **limits)
  assert sorted(i for p in packs for i in p) == list(range(4000))
  for p in packs:
    assert len(p) <= 16
    assert sum(tokens[i] for i in p) <= 512
    assert sum(predictions[i] for i in p) <= 80
  assert sum(tokens) / (512 * len(packs)) > 0.98
  # A full shuffle: neither the records' order nor their members follow sizes.
  firsts = [tokens[p[0]] for p in packs]
  halves = np.mean(firsts[: len(packs) // 2]), np.mean(firsts)
  assert halves[0] == pytest.approx(halves[1], rel=0.05)
  again = pack(tokens, predictions, **limits)
  other = pack(tokens, predictions, seed=1, **limits)
  assert again == packs
  meetings = lambda ps: {frozenset(p) for p in ps if len(p) > 1}
  assert len(meetings(packs) & meetings(other)) < 0.25 * len(meetings(packs))


@pytest.mark.parametrize(
  "tokens, examples, want",
  [
    ([10] * 9, 32, 32),  # three in each
    ([10] * 9, 1, 16),
    ([40, 62] * 400, 32, 104),  # one of each; two of 62 are most of 128
    ([], 32, 8),
  ],
)
def test_a_record_is_as_long_as_its_examples_fill_it(tokens, examples, want):
  assert packing.cheapest_length(tokens, examples) == want
