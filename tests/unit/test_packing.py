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
  with pytest.raises(ValueError, match=r"example 1, \(11, 1\), does not fit"):
    pack([3, 11])
  with pytest.raises(ValueError, match=r"example 0, \(3, 9\)"):
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


def pack_rows(groups, seed=0, **limits):
  room = packing.RowLimits(**{"rows": 2, "tokens": 10, "groups": 9, **limits})
  return packing.pack_rows(groups, room, np.random.default_rng(seed))


def test_texts_of_a_group_share_a_record_and_not_always_a_row():
  # 9 and 8 take a row each; 1 goes beside the 9, the fuller row, 2 to the 8.
  assert pack_rows([[9, 1], [2, 8]]) == [[(0, [0, 0]), (1, [1, 1])]]
  # Of 6 and 5 tokens, 4 that are left are the least for the 4 of another group.
  record, other = pack_rows([[6, 5], [4, 2], [7, 7]])
  rows = dict((*record, *other))
  assert rows[1][0] == rows[0][0] and rows[1][1] == rows[0][1]
  assert sorted([len(record), len(other)]) == [1, 2]
  with pytest.raises(ValueError, match=r"example 1, \[6, 6, 6\], does not fit"):
    pack_rows([[3], [6, 6, 6]])


@pytest.mark.parametrize("texts, most", [(2, 32), (2, 3), (9, 32), (1, 32)])
def test_rows_hold_all_texts_and_are_nearly_full(texts, most):
  rng = np.random.default_rng(texts)
  groups = []
  for _ in range(1500):
    group = rng.integers(8, 250, texts)
    group[0] = rng.integers(5, 30)  # a query
    groups.append(group.tolist())
  limits = packing.cheapest_rows(groups, most)
  assert limits.tokens % 8 == 0
  packed = packing.pack_rows(groups, limits, np.random.default_rng(1))
  numbers, used = [], 0
  for members in packed:
    assert len(members) <= most
    filled = np.zeros(limits.rows)
    for number, row_of in members:
      numbers.append(number)
      np.add.at(filled, row_of, groups[number])
    assert max(filled) <= limits.tokens
    used += filled.sum()
  assert sorted(numbers) == list(range(len(groups))) != numbers
  assert used > 0.85 * len(packed) * limits.rows * limits.tokens


@pytest.mark.parametrize(
  "groups, most, want",
  [
    ([[10]] * 9, 32, (1, 32)),  # three in each
    ([[10]] * 9, 1, (1, 16)),
    # One of each; two of 62 are most of 128.
    ([[40], [62]] * 400, 32, (1, 104)),
    # Texts of 100 take a row each, and one row the short ones of three groups.
    ([[34, 100]] * 400, 32, (4, 104)),
    ([[100, 100, 100]] * 40, 1, (3, 104)),
    ([], 32, (1, 8)),
  ],
)
def test_rows_are_as_long_as_texts_fill_them(groups, most, want):
  assert packing.cheapest_rows(groups, most) == (*want, most)
