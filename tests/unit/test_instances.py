"""Cutting documents into examples: by hand, invariants, shares."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from records import instances


class ScriptedRng:
  """Answers as told, in place of chance, and says if some was left over."""

  def __init__(self, draws, binomials=()):
    self._draws, self._binomials = list(draws), list(binomials)

  def random(self):
    return self._draws.pop(0)

  def binomial(self, n, p):
    assert p == 0.5
    front = self._binomials.pop(0)
    assert 0 <= front <= n
    return front

  @property
  def used_up(self):
    return not self._draws and not self._binomials


def corpus_of(*documents):
  """Documents given as lists of sentence lengths; token t has id t."""
  lengths = [n for d in documents for n in d]
  sentences = np.concatenate([[0], np.cumsum(lengths)])
  return instances.Documents(
    tokens=np.arange(sentences[-1], dtype=np.int32),
    sentence_offsets=sentences,
    document_offsets=np.concatenate(
      [[0], np.cumsum([len(d) for d in documents])]
    ),
  )


def pair(a, b, is_random_next):
  return instances.Example([a, b], is_random_next)


NOT_SHORT, SAME_DOC, RANDOM, ACTUAL = 0.1, 0.0, 0.49, 0.5


# Documents; what chance says: draws, binomials; the pairs of document 0.
BY_HAND = {
  # 4 + 3 + 3 tokens fill the 10; A is randint(1, 2) sentences: 0.99 -> 2.
  "the actual next": (
    ([4, 3, 3], [5]), [NOT_SHORT, 0.99, ACTUAL], [],
    [pair((0, 7), (7, 10), False)],
  ),
  # Chunk of 3 sentences, A = 1 of them. B is random: from document 1 (the
  # first draw gives document 0 again), sentence 0 of it; 6 tokens wanted, so
  # sentences of 5 and 2. Sentences 1 and 2 come again: chunk of 2 (6 tokens,
  # the document ends), A = 1, actual next.
  # A 4 + B 7 = 11 is one too many: B is the longer; 1 token from the front.
  "a random next puts the rest back": (
    ([4, 3, 3], [5, 2, 2]),
    [NOT_SHORT, 0.0, RANDOM, SAME_DOC, 0.5, 0.0, 0.5, ACTUAL], [1],
    [pair((0, 4), (11, 17), True), pair((4, 7), (7, 10), False)],
  ),
  # No draw for "random or actual": document 1, its sentence 1 of 2.
  "one sentence always gets a random next": (
    ([4], [5, 3]), [NOT_SHORT, 0.9, 0.5], [], [pair((0, 4), (9, 12), True)],
  ),
  # A has 12 tokens > 10, so B's wanted length is negative: one sentence. Then
  # A is cut to 5, B to 5.
  "a long sentence still gets one": (
    ([12], [6, 6]), [NOT_SHORT, 0.9, 0.0], [2, 1],
    [pair((2, 7), (13, 18), True)],
  ),
  # 0.09 < 0.1: short; randint(2, 10) with 0.0 is 2, so every sentence fills.
  "a short target": (
    ([4, 3], [5]), [0.09, 0.0, 0.9, 0.0, 0.9, 0.0], [],
    [pair((0, 4), (7, 12), True), pair((4, 7), (7, 12), True)],
  ),
  # The eleventh draw is for the sentence: document 0 is taken after all.
  "ten tries for another document": (
    ([4], [5]), [NOT_SHORT, *[SAME_DOC] * 10, 0.0], [],
    [pair((0, 4), (0, 4), True)],
  ),
}  # fmt: skip


@pytest.mark.parametrize(
  "documents, draws, binomials, want", BY_HAND.values(), ids=BY_HAND
)
def test_pairs_by_hand(documents, draws, binomials, want):
  rng = ScriptedRng(draws, binomials)
  made = instances.pairs_from_document(corpus_of(*documents), 0, 10, 0.1, rng)
  assert made == want and rng.used_up


@given(st.integers(1, 60), st.integers(1, 60), st.integers(2, 50))
def test_truncated_lengths_equal_the_loop(a, b, most):
  got = instances.truncated_lengths(a, b, most)
  while a + b > most:
    if a > b:
      a -= 1
    else:
      b -= 1
  assert got == (a, b)


@settings(deadline=None, max_examples=200)
@given(
  st.lists(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    min_size=2,
    max_size=8,
  ),
  st.integers(0, 2**30),
  st.integers(8, 64),
  st.sampled_from([0.0, 0.1, 1.0]),
)
def test_invariants(lengths, seed, max_seq_length, short):
  documents = corpus_of(*lengths)
  limits = documents.sentence_offsets[documents.document_offsets]
  for d in range(len(lengths)):
    rng = instances.generator(seed, 0, d)
    found = instances.pairs_from_document(
      documents, d, max_seq_length - 3, short, rng
    )
    assert found
    for ((a_start, a_end), (b_start, b_end)), is_random_next in found:
      assert a_end > a_start and b_end > b_start
      assert a_end - a_start + b_end - b_start <= max_seq_length - 3
      assert limits[d] <= a_start and a_end <= limits[d + 1]
      if not is_random_next:
        assert a_end <= b_start and b_end <= limits[d + 1]
      else:
        home = np.searchsorted(limits, b_start, side="right") - 1
        assert b_end <= limits[home + 1]


def test_random_next_is_half_and_from_elsewhere():
  keys = itertools.product((1, 2), (0, 1), (0, 1))
  assert len({instances.generator(*key).random() for key in keys}) == 8
  documents = corpus_of(*[[5] * 40] * 50)
  limits = documents.sentence_offsets[documents.document_offsets]
  random, total, same, others = 0, 0, 0, set()
  for copy in range(20):
    for d in range(50):
      rng = instances.generator(7, copy, d)
      for (_, (b_start, _)), is_random_next in instances.pairs_from_document(
        documents, d, 61, 0.1, rng
      ):
        home = np.searchsorted(limits, b_start, side="right") - 1
        total += 1
        random += is_random_next
        same += is_random_next and home == d
        others.add(int(home))
  assert total > 4000
  # Chunks of one sentence at a document's end add a little to the half.
  assert 0.48 < random / total < 0.60
  assert same == 0 and len(others) == 50


def test_truncation_takes_from_both_ends():
  fronts = [
    instances._truncate(0, 40, 10, np.random.default_rng(i))[0]
    for i in range(400)
  ]
  assert 14.4 < np.mean(fronts) < 15.6  # 30 coins: mean 15, sigma 0.14
  assert 2.3 < np.std(fronts) < 3.2  # sqrt(30) / 2 = 2.74


def test_sequences_by_hand():
  tokens = np.arange(100, 120, dtype=np.int32)
  texts = [tokens[1:3], tokens[7:8], tokens[9:10]]
  ids, segments = instances.join(texts, [[2], [3], [3], [3]])
  assert ids.tolist() == [2, 101, 102, 3, 107, 3, 109, 3]
  assert segments.tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
  assert ids.dtype == tokens.dtype
  documents = corpus_of([4, 3, 6], [2, 1], [1])

  def ranges(*chosen, length, draws=(), short=0.0):
    rng = ScriptedRng(draws)
    made = instances.sequences(documents, chosen, length - 1, 1, short, rng)
    assert rng.used_up
    return [example.ranges for example in made]

  # Five tokens, [CLS] and [SEP].
  assert ranges(0, length=7) == [[(0, 5)], [(5, 10)], [(10, 13)]]
  assert ranges(0, 1, 2, length=7) == [
    [(0, 5)], [(5, 10)], [(10, 13), (13, 14)], [(14, 16), (16, 17)],
  ]  # fmt: skip
  # No room for a token of the next document and its [SEP].
  assert ranges(1, 2, length=6) == [[(13, 16)], [(16, 17)]]
  # The second one is shorter: 2 + 0.5 * 5 tokens without [CLS].
  draws = [0.9, 0.1, 0.5, 0.9, 0.9]
  assert ranges(1, 0, length=7, draws=draws, short=0.2) == [
    [(13, 16), (0, 1)], [(1, 4)], [(4, 9)], [(9, 13)]
  ]  # fmt: skip


@settings(max_examples=50)
@given(
  st.lists(
    st.lists(st.integers(1, 20), min_size=1, max_size=5), min_size=1, max_size=6
  ),
  st.integers(8, 40),
  st.sampled_from([0.0, 0.5]),
)
def test_sequences_hold_every_token_once(lengths, length, short):
  documents = corpus_of(*lengths)
  rng = np.random.default_rng(0)
  chosen = range(len(lengths))
  made = instances.sequences(documents, chosen, length - 1, 1, short, rng)
  sizes, tokens = [], []
  for ranges, _ in made:
    around = [[-1], *[[-2]] * len(ranges)]
    texts = [documents.tokens[start:end] for start, end in ranges]
    ids, segments = instances.join(texts, around)
    ends = np.flatnonzero(ids == -2) + 1
    assert ids[0] == -1 and len(ends) == len(ranges) and ends[-1] == len(ids)
    assert set(np.flatnonzero(np.diff(segments)) + 1) == set(ends[:-1])
    sizes.append(len(ids))
    tokens += ids[ids >= 0].tolist()
  assert tokens == list(range(len(documents.tokens)))
  assert max(sizes) <= length
  if not short:  # one place may be left: a token and its [SEP] need two
    assert all(size >= length - 1 for size in sizes[:-1])
