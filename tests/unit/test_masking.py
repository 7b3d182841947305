"""Masks: worked by hand, and their shares on many draws."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from records import masking

CLS, SEP, MASK, VOCAB = 2, 3, 4, 1000


def settings_of(prob=0.15, most=20):
  return masking.MaskSettings(prob, most, MASK, VOCAB)


def record(lengths, size, rng):
  """(ids, input_mask, segment_ids), [size]: [CLS] A [SEP] B [SEP] of each."""
  ids, numbers, segments = np.zeros((3, size), np.int32)
  start = 0
  for number, n in enumerate(lengths, 1):
    end, start_b = start + n, start + n // 2 + 1
    ids[start:end] = rng.integers(5, VOCAB, n)
    ids[[start, start_b - 1, end - 1]] = CLS, SEP, SEP
    numbers[start:end] = number
    segments[start_b:end] = 1
    start = end
  return ids, numbers, segments


def batch(all_lengths, size=128, seed=0):
  rng = np.random.default_rng(seed)
  made = [record(lengths, size, rng) for lengths in all_lengths]
  return tuple(np.stack(column) for column in zip(*made, strict=True))


def keys_of(rows, seed=0, series=0):
  return masking.record_keys(seed, series, np.arange(rows))


def test_num_to_predict():
  for n, most, want in (
    (128, 20, 19),  # 19.2
    (5, 20, 1),  # 0.75
    (3, 20, 1),  # 0.45: at least one
    (10, 20, 2),  # 1.5: to even, as Python rounds
    (30, 20, 4),  # 4.5: to even
    (512, 20, 20),  # 76.8: at most
  ):
    assert masking.num_to_predict(n, settings_of(most=most)) == want, n


def test_special_tokens_are_found_where_they_stand():
  ids, numbers, segments = batch([[7, 5], [8]], size=12)
  maskable = masking.maskable_tokens(ids, numbers, segments)
  want = (numbers > 0) & (ids != CLS) & (ids != SEP)
  np.testing.assert_array_equal(maskable, want)
  full = batch([[12]], size=12)
  assert masking.maskable_tokens(*full)[0].sum() == 9


def test_both_separators_between_texts_are_no_text():
  """Of RoBERTa's <s> A </s></s> B </s>."""
  ids = np.array([[CLS, 7, 8, SEP, SEP, 9, SEP, 0]])
  segments = np.array([[0, 0, 0, 0, 1, 1, 1, 0]])
  maskable = masking.maskable_tokens(ids, np.minimum(ids, 1), segments)
  assert ids[maskable].tolist() == [7, 8, 9]


def test_words_like_a_rows_last_may_be_masked():
  """Where a tokenizer's template has no [SEP] after a text."""
  ids = np.array([[CLS, 7, 9, 8, 9, CLS, 7, 9, 0]])
  numbers = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 0]])
  maskable = masking.maskable_tokens(ids, numbers, 0 * ids)
  assert ids[maskable].tolist() == [7, 9, 8, 7]


def scripted(monkeypatch, order, fates):
  """Lets words come in `order`, and hashes of chosen tokens be `fates`."""

  def _hash(keys, places, stream, size):
    if stream == masking._ORDER_STREAM:
      assert len(order) == len(places)
      return np.array(order, np.uint64) << np.uint64(40)
    return np.array(fates, np.uint64)

  monkeypatch.setattr(masking, "_hash", _hash)


def chosen(monkeypatch, order, segments, cont, most, prob=1.0):
  """Positions chosen in [CLS] ... [SEP] ... of one record."""
  n = len(segments)
  scripted(monkeypatch, order, [0] * most)
  monkeypatch.setattr(masking, "_replace", lambda ids, places, *_: places)
  return masking.mask_records(
    np.arange(n, dtype=np.int32)[None] + 5,
    np.ones((1, n), np.int32),
    np.array([segments]),
    keys_of(1),
    settings_of(prob, most),
    None if cont is None else np.array([cont], bool),
  ).tolist()


def test_tokens_by_hand(monkeypatch):
  ids = np.array([[CLS, 50, 51, 52, SEP, 53, 54, SEP]], np.int32)
  segments = np.array([[0, 0, 0, 0, 0, 1, 1, 1]])
  # Tokens 1 2 3 5 6 are maskable; the order is 6 1 5 2 3, so 0.5 * 8 = 4 of
  # them are 1 2 5 6. Their fates: [MASK], kept, kept, random.
  half = lambda share, low: int(share * 2**32) << 32 | low
  fates = [half(0.79, 0), half(0.81, 0), half(0.89, 0), half(0.91, 1 << 31)]
  scripted(monkeypatch, [1, 3, 4, 2, 0], fates)
  out = masking.mask_records(
    ids, np.ones_like(ids), segments, keys_of(1), settings_of(0.5, 6)
  )
  assert out.masked_lm_positions.tolist() == [[1, 2, 5, 6, 0, 0]]
  assert out.masked_lm_ids.tolist() == [[50, 51, 53, 54, 0, 0]]
  assert out.masked_lm_weights.tolist() == [[1, 1, 1, 1, 0, 0]]
  middle = VOCAB // 2  # half of 2^32 is half of the vocabulary
  assert out.input_ids.tolist() == [[CLS, MASK, 51, 52, SEP, 53, middle, SEP]]
  assert ids.tolist() == [[CLS, 50, 51, 52, SEP, 53, 54, SEP]]


def test_whole_words_by_hand(monkeypatch):
  #      CLS un ##aff ##able a SEP be ##d c SEP
  cont = [0, 0, 1, 1, 0, 0, 0, 1, 0, 0]
  segments = [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
  # Words: {1 2 3} {4} {6 7} {8}; order c, unaffable (would make 4 of 3:
  # skipped), bed, a (the budget is used up).
  got = chosen(monkeypatch, [1, 3, 2, 0], segments, cont, 3)
  assert got == [6, 7, 8]


def test_continuation_after_a_cut_belongs_to_the_word_before(monkeypatch):
  # google/bert joins a leading ## piece of B to the last word of A, and lets
  # one at the very start be a word of its own.
  cont, segments = [0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1]
  pick = lambda order: chosen(monkeypatch, order, segments, cont, 2)
  assert pick([1, 0]) == [2, 4]
  assert pick([0, 1]) == [1]


def test_words_longer_than_the_budget_give_no_mask():
  ids = np.array([[CLS, 9, 10, 11, SEP]], np.int32)
  made = ids, np.ones_like(ids), np.zeros_like(ids)
  continuation = np.array([[0, 0, 1, 1, 0]])
  out = masking.mask_records(*made, keys_of(1), settings_of(), continuation)
  assert out.masked_lm_weights.sum() == out.masked_lm_positions.sum() == 0
  assert out.input_ids.tolist() == ids.tolist()
  # More masks than there is room for are refused.
  made = batch([[60, 60]])
  with pytest.raises(ValueError, match="wants 18 masked tokens"):
    masking.mask_records(*made, keys_of(1), settings_of(most=17))


@settings(deadline=None, max_examples=150)
@given(
  lengths=st.lists(st.integers(5, 60), min_size=1, max_size=4),
  most=st.integers(1, 12),
  seed=st.integers(0, 2**32),
  whole=st.booleans(),
)
def test_invariants(lengths, most, seed, whole):
  size, p = 250, 48
  ids, numbers, segments = batch([lengths, [30]], size, seed)
  maskable = masking.maskable_tokens(ids, numbers, segments)
  rng = np.random.default_rng(seed)
  cont = rng.random(ids.shape) < 0.4 if whole else None
  keys = keys_of(2, seed)
  arguments = (settings_of(0.15, p), cont)
  out = masking.mask_records(ids, numbers, segments, keys, *arguments)
  for row in range(2):
    k = int(out.masked_lm_weights[row].sum())
    assert out.masked_lm_weights[row].tolist() == [1] * k + [0] * (p - k)
    positions = out.masked_lm_positions[row, :k]
    assert np.all(np.diff(positions) > 0)
    assert maskable[row, positions].all()
    assert not out.masked_lm_positions[row, k:].any()
    assert not out.masked_lm_ids[row, k:].any()
    original = out.input_ids[row].copy()
    original[positions] = out.masked_lm_ids[row, :k]
    np.testing.assert_array_equal(original, ids[row])
    for number, n in enumerate(lengths if row == 0 else [30], 1):
      own = numbers[row] == number
      is_chosen = np.isin(np.arange(size), positions) & own
      budget = masking.num_to_predict(n, settings_of(0.15, p))
      if not whole:
        assert is_chosen.sum() == min(budget, (maskable[row] & own).sum())
        continue
      assert is_chosen.sum() <= budget
      mine = maskable[row] & own
      first = np.arange(mine.sum()) == 0
      words = np.cumsum(~cont[row][mine] | first)
      for word in range(1, words[-1] + 1):  # all of a word or nothing
        assert len(set(is_chosen[mine][words == word])) == 1
  assert out.input_ids.dtype == ids.dtype
  # A record's masks do not depend on the records beside it.
  second = (array[1:] for array in (ids, numbers, segments, keys))
  cont = None if cont is None else cont[1:]
  alone = masking.mask_records(*second, arguments[0], cont)
  for one, both in zip(alone, out, strict=True):
    np.testing.assert_array_equal(one[0], both[1])


def within(count, total, share, sigmas=5):
  """Whether a binomial count is as likely as it should be."""
  bound = sigmas * np.sqrt(total * share * (1 - share))
  return abs(count - total * share) < bound


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("lengths", [[128], [70, 58]], ids=str)
def test_shares(whole, lengths):
  """15% chosen; of them 80% [MASK], 10% random, 10% kept: over epochs."""
  rounds = 3000
  made = batch([lengths])
  ids, numbers, segments = (np.repeat(a, rounds, axis=0) for a in made)
  cont = np.zeros_like(ids, bool) if whole else None
  keys = masking.record_keys(3, np.arange(rounds), np.zeros(rounds, np.int64))
  out = masking.mask_records(ids, numbers, segments, keys, settings_of(), cont)
  used = out.masked_lm_weights > 0
  rows = np.nonzero(used)[0]
  positions, labels = out.masked_lm_positions[used], out.masked_lm_ids[used]
  shown = out.input_ids[rows, positions]
  same, is_mask = shown == labels, shown == MASK
  total, masked, kept = used.sum(), is_mask.sum(), same.sum()
  other = total - masked - kept
  wanted = [round(0.15 * n) for n in lengths]
  assert total == sum(wanted) * rounds
  # A random token may happen to be [MASK] or the old one: 1 in 1,000 each.
  assert within(masked, total, 0.8 + 0.1 / VOCAB)
  assert within(kept, total, 0.1 + 0.1 / VOCAB)
  assert within(other, total, 0.1 * (1 - 2 / VOCAB))
  # All positions of an example alike, and random tokens from all there are.
  counts = np.bincount(positions, minlength=128)
  for number, n in enumerate(lengths, 1):
    own = (made[1][0] == number) & masking.maskable_tokens(*made)[0]
    share = wanted[number - 1] / (n - 3)
    assert all(within(c, rounds, share) for c in counts[own])
  drawn = np.bincount(shown[~same & ~is_mask], minlength=VOCAB)
  assert within(drawn[: VOCAB // 2].sum(), other, 0.5)
  assert drawn.max() < other / VOCAB * 5
  # Two neighbours are chosen together as often as any two.
  places = np.zeros((rounds, 128), bool)
  places[rows, positions] = True
  first = wanted[0] * (wanted[0] - 1) / ((lengths[0] - 3) * (lengths[0] - 4))
  pair = (places[:, 5] & places[:, 6]).sum()
  assert within(pair, rounds, first)


def test_each_record_may_have_its_own_share():
  made = batch([[100], [100], [60, 40]])
  probs = np.array([0.3, 0.1, 0.3])
  drawn = masking.mask_records(*made, keys_of(3), settings_of(probs, 40))
  assert drawn.masked_lm_weights.sum(axis=1).tolist() == [30, 10, 18 + 12]
  # As if all had that share.
  alone = masking.mask_records(*made, keys_of(3), settings_of(0.3, 40))
  for got, want in zip(drawn, alone, strict=True):
    np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("masked, random", [(1, 0), (0, 1), (0, 0), (0.5, 0.5)])
def test_what_chosen_tokens_become(masked, random):
  made = batch([[100]] * 200)
  settings = settings_of(0.3, 40)._replace(
    mask_replace_prob=masked, random_replace_prob=random
  )
  drawn = masking.mask_records(*made, keys_of(200), settings)
  rows = np.arange(200)[:, None]
  shown = drawn.input_ids[rows, drawn.masked_lm_positions[:, :30]]
  was = drawn.masked_lm_ids[:, :30]
  kept = 1 - masked - random
  assert (shown == MASK).mean() == pytest.approx(masked, abs=0.02)
  assert (shown == was).mean() == pytest.approx(kept, abs=0.02)


@pytest.mark.parametrize(
  "text, want",
  [
    (None, None), ("0.3", (0.3, 0.3)), ("0.3:0.15", (0.3, 0.15)),
    *((bad, "must be a share") for bad in ("1", "0.3:", "0.3:0.2:0.1", "nan")),
  ],
)  # fmt: skip
def test_shares_of_a_flag(text, want):
  if isinstance(want, str):
    with pytest.raises(UserError, match=want):
      masking.shares(text)
  else:
    assert masking.shares(text) == want
  with pytest.raises(UserError, match="more than all of the chosen tokens"):
    masking.MaskConfig(mask_replace_prob=0.95)


@pytest.mark.parametrize("prob", [0.05, 0.1, 0.15, 0.225, 0.3, 0.5])
def test_no_split_of_a_record_needs_more_room(prob):
  wanted = lambda n: int(masking.num_to_predict(n, settings_of(prob, 99)))
  most = {(0, 0): 0}  # (tokens, examples) -> predictions
  for total, count in itertools.product(range(3, 21), range(1, 7)):
    found = [
      most[total - n, count - 1] + wanted(n)
      for n in range(3, total + 1)
      if (total - n, count - 1) in most
    ]
    if found:
      most[total, count] = max(found)
  for (_, count), needed in most.items():
    assert needed <= masking.most_predictions(20, prob, max(1, count))


def test_there_is_room_for_what_records_want():
  """Of any examples that fit: three of 4 tokens each round up.

  In some the bound is an integer, which float64 just misses.
  """
  fit = ([128], [4] * 32, [7, 7, 114], [43, 42, 43])
  for prob, lengths in (
    *itertools.product([0.05, 0.15, 0.3, 0.6], fit),
    *((0.35, [130] * 5), (0.29, [150] * 5), (0.7, [45, 45]), (0.1, [3] * 3)),
  ):
    wanted = masking.num_to_predict(lengths, settings_of(prob, 999)).sum()
    room = masking.most_predictions(sum(lengths), prob, len(lengths))
    assert 0 < wanted <= room, (prob, lengths)


def test_masks_are_a_function_of_seed_epoch_and_record():
  made = batch([[100]] * 3)
  draw = lambda *key: masking.mask_records(
    *made, masking.record_keys(*key), settings_of()
  ).masked_lm_positions.tolist()
  numbers = np.arange(3)
  one = draw(1, 0, numbers)
  assert one == draw(1, 0, numbers)
  assert one[0] != one[1] != one[2]
  assert one != draw(2, 0, numbers) and one != draw(1, 1, numbers)
  # A record keeps its key in an epoch, whatever the others' epochs are.
  keys = masking.record_keys(1, 0, numbers)
  np.testing.assert_array_equal(
    masking.record_keys(1, np.array([0, 1, 0]), numbers)[[0, 2]], keys[[0, 2]]
  )
