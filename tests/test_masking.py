"""Masks: worked by hand, and their shares on many draws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import masking

CLS, SEP, MASK, VOCAB = 2, 3, 4, 1000


class ScriptedRng:
  """Answers as told, in place of chance."""

  def __init__(self, order, draws, random_tokens):
    self._order, self._draws = order, draws
    self._random_tokens = random_tokens

  def permutation(self, x):
    x = np.arange(x) if np.isscalar(x) else x
    assert len(self._order) == len(x)
    return np.asarray(x)[self._order]

  def random(self, size):
    assert size == len(self._draws)
    return np.array(self._draws)

  def integers(self, high, size, dtype):
    assert high == VOCAB and size == len(self._random_tokens)
    return np.array(self._random_tokens, dtype)


def settings_of(prob=0.15, most=20):
  return masking.MaskSettings(prob, most, MASK, VOCAB)


def sequence(n, rng):
  """(ids, maskable) of [CLS] A [SEP] B [SEP] with n tokens in all."""
  ids = rng.integers(5, VOCAB, n, dtype=np.int32)
  ids[[0, n // 2, -1]] = CLS, SEP, SEP
  return ids, (ids != CLS) & (ids != SEP)


@pytest.mark.parametrize(
  "n, most, want",
  [
    (128, 20, 19),  # 19.2
    (5, 20, 1),  # 0.75
    (3, 20, 1),  # 0.45: at least one
    (10, 20, 2),  # 1.5: to even, as Python rounds
    (30, 20, 4),  # 4.5: to even
    (512, 20, 20),  # 76.8: at most
  ],
)
def test_num_to_predict(n, most, want):
  assert masking.num_to_predict(n, settings_of(most=most)) == want


def test_tokens_by_hand():
  ids = np.array([CLS, 50, 51, 52, SEP, 53, 54, SEP], np.int32)
  maskable = np.array([0, 1, 1, 1, 0, 1, 1, 0], bool)
  # Candidates 1 2 3 5 6 in the order 6 1 5 2 3; 0.5 * 8 = 4 of them: 1 2 5 6.
  rng = ScriptedRng([4, 0, 3, 1, 2], [0.79, 0.8, 0.89, 0.9], [7, 8, 9, 10])
  out = masking.mask_tokens(ids, maskable, rng, settings_of(prob=0.5))
  assert out.positions.tolist() == [1, 2, 5, 6]
  assert out.labels.tolist() == [50, 51, 53, 54]
  # [MASK], kept, kept, random.
  assert out.input_ids.tolist() == [CLS, MASK, 51, 52, SEP, 53, 10, SEP]
  assert ids.tolist() == [CLS, 50, 51, 52, SEP, 53, 54, SEP]


def test_whole_words_by_hand():
  #      CLS un ##aff ##able a SEP be ##d c SEP
  cont = np.array([0, 0, 1, 1, 0, 0, 0, 1, 0, 0], bool)
  maskable = np.array([0, 1, 1, 1, 1, 0, 1, 1, 1, 0], bool)
  # Words: {1 2 3} {4} {6 7} {8}; order c, unaffable (would make 4 of 3:
  # skipped), bed, a (the budget is used up).
  rng = ScriptedRng([3, 0, 2, 1], [], [])
  assert masking.choose_words(maskable, cont, 3, rng).tolist() == [6, 7, 8]


def test_continuation_after_a_cut_belongs_to_the_word_before():
  # google/bert joins a leading ## piece of B to the last word of A, and lets
  # one at the very start be a word of its own.
  cont = np.array([0, 1, 0, 0, 1, 0], bool)
  maskable = np.array([0, 1, 1, 0, 1, 0], bool)
  pick = lambda order: masking.choose_words(
    maskable, cont, 2, ScriptedRng(order, [], [])
  ).tolist()
  assert pick([1, 0]) == [2, 4]
  assert pick([0, 1]) == [1]


def test_words_longer_than_the_budget_give_no_mask():
  cont = np.array([0, 0, 1, 1, 0], bool)
  maskable = np.array([0, 1, 1, 1, 0], bool)
  rng = np.random.default_rng(0)
  ids = np.array([CLS, 9, 10, 11, SEP], np.int32)
  out = masking.mask_tokens(ids, maskable, rng, settings_of(), cont)
  assert out.positions.tolist() == out.labels.tolist() == []
  assert out.input_ids.tolist() == ids.tolist()


@settings(deadline=None, max_examples=200)
@given(
  n=st.integers(5, 200),
  most=st.integers(1, 40),
  seed=st.integers(0, 2**32),
  whole=st.booleans(),
)
def test_invariants(n, most, seed, whole):
  rng = np.random.default_rng(seed)
  ids, maskable = sequence(n, rng)
  cont = rng.random(n) < 0.4 if whole else None
  out = masking.mask_tokens(ids, maskable, rng, settings_of(0.15, most), cont)
  budget = masking.num_to_predict(n, settings_of(0.15, most))
  assert np.all(np.diff(out.positions) > 0)
  assert maskable[out.positions].all()
  np.testing.assert_array_equal(out.labels, ids[out.positions])
  untouched = np.delete(np.arange(n), out.positions)
  np.testing.assert_array_equal(out.input_ids[untouched], ids[untouched])
  assert out.input_ids.dtype == ids.dtype
  if not whole:
    assert len(out.positions) == min(budget, maskable.sum())
    return
  assert len(out.positions) <= budget
  chosen = np.isin(np.arange(n), out.positions)[maskable]
  words = np.cumsum(~cont[maskable] | (np.arange(maskable.sum()) == 0))
  for word in range(1, words[-1] + 1):
    assert len(set(chosen[words == word])) == 1  # all of a word or nothing


def within(count, total, share, sigmas=5):
  """Whether a binomial count is as likely as it should be."""
  bound = sigmas * np.sqrt(total * share * (1 - share))
  return abs(count - total * share) < bound


@pytest.mark.parametrize("whole", [False, True])
def test_shares(whole):
  rng = np.random.default_rng(3)
  n, rounds = 128, 3000
  ids, maskable = sequence(n, rng)
  cont = np.zeros(n, bool) if whole else None
  chosen = np.zeros(n, np.int64)
  masked = kept = other = 0
  drawn = np.zeros(VOCAB, np.int64)
  for _ in range(rounds):
    out = masking.mask_tokens(ids, maskable, rng, settings_of(), cont)
    chosen[out.positions] += 1
    shown = out.input_ids[out.positions]
    same, is_mask = shown == out.labels, shown == MASK
    masked += is_mask.sum()
    kept += same.sum()
    np.add.at(drawn, shown[~same & ~is_mask], 1)
  total = chosen.sum()
  other = total - masked - kept
  assert total == 19 * rounds  # round(0.15 * 128)
  # A random token may happen to be [MASK] or the old one: 1 in 1,000 each.
  assert within(masked, total, 0.8 + 0.1 / VOCAB)
  assert within(kept, total, 0.1 + 0.1 / VOCAB)
  assert within(other, total, 0.1 * (1 - 2 / VOCAB))
  # All positions alike, and random tokens from the whole vocabulary.
  assert all(within(c, rounds, 19 / 125) for c in chosen[maskable])
  assert (drawn[:500].sum() > 0) and within(drawn[:500].sum(), other, 0.5)
  assert drawn.max() < other / VOCAB * 5


def test_same_seed_same_mask():
  ids, maskable = sequence(100, np.random.default_rng(0))
  one, two, three = (
    masking.mask_tokens(
      ids, maskable, np.random.default_rng(seed), settings_of()
    )
    for seed in (1, 1, 2)
  )
  np.testing.assert_array_equal(one.input_ids, two.input_ids)
  assert one.positions.tolist() != three.positions.tolist()
