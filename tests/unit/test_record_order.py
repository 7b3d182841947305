"""The order of records: a permutation, the same for any world, resumable."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from records import record_order


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 1000))
def test_permute_is_a_permutation(count, seed, epoch):
  out = record_order.permute(np.arange(count), count, seed, epoch)
  np.testing.assert_array_equal(np.sort(out), np.arange(count))


def test_permute_is_a_fixed_function():
  # Stored runs depend on it: a change of these numbers breaks their resume.
  out = record_order.permute(np.arange(8), 8, seed=1, epoch=0)
  assert out.tolist() == FIXED
  big = record_order.permute(np.array([0, 10**11]), 10**12, 1, 0)
  assert big.tolist() == FIXED_BIG


FIXED = [1, 0, 6, 2, 4, 5, 7, 3]
FIXED_BIG = [512507570743, 445723568041]


def test_permute_is_a_good_shuffle():
  """Displacement, neighbours and places look like a uniform permutation's."""
  n = 4096
  out = record_order.permute(np.arange(n), n, seed=3, epoch=0)
  # The mean distance of a uniform permutation is n/3, deviation ~ 0.3 sqrt(n).
  assert abs(np.abs(out - np.arange(n)).mean() - n / 3) < 6 * 0.3 * n**0.5
  assert abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < 0.08  # 5 sigma
  # Over many epochs each record visits each eighth of the epoch evenly.
  first = [
    record_order.permute(np.array([5]), n, 3, epoch)[0] for epoch in range(800)
  ]
  counts = np.bincount(np.array(first) * 8 // n, minlength=8)
  assert ((counts - 100) ** 2 / 100).sum() < 30  # chi-square, 7 degrees


def positions(start, size):
  return np.arange(start, start + size)


@settings(deadline=None, max_examples=30)
@given(
  count=st.integers(1, 400),
  block=st.integers(0, 40),
  seed=st.integers(0, 2**40),
  batch=st.integers(1, 200),
)
def test_every_epoch_holds_every_record_once(count, block, seed, batch):
  batch = max(batch, count // 40)  # more calls only take time
  order = record_order.Order(count, seed, block)
  starts = range(0, 2 * count, batch)
  stream = np.concatenate([order.records(positions(s, batch)) for s in starts])
  for epoch in range(2):
    seen = stream[epoch * count : (epoch + 1) * count]
    np.testing.assert_array_equal(np.sort(seen), np.arange(count))


def test_blocks_are_a_fixed_function():
  # As the permutation: stored runs depend on it.
  order = record_order.Order(10, seed=1, block=3)
  assert order.records(positions(0, 20)).tolist() == FIXED_BLOCKS
  # Numbered from 1 and 2 on: 1 2 3 | 4 5 6 | 7 8 9 | 0, and 2 3 4 | ...
  assert order.blocks(0, 10) == [(4, 3), (1, 3), (7, 3), (0, 1)]
  assert order.blocks(10, 20) == [(8, 3), (2, 3), (5, 3), (1, 1)]


FIXED_BLOCKS = [2, 6, 0, 7, 8, 1, 5, 9, 4, 3, 3, 2, 4, 0, 5, 1, 8, 7, 6, 9]


def held(order, start, stop):
  """The records of the blocks of stream positions, not shuffled."""
  blocks = order.blocks(start, stop)
  return np.concatenate([a + np.arange(n) for a, n in blocks]) % order.count


@settings(deadline=None, max_examples=20)
@given(
  count=st.integers(1, 20000), block=st.integers(1, 50), epoch=st.integers(0, 3)
)
def test_a_window_holds_the_records_of_its_blocks(count, block, epoch):
  order = record_order.Order(count, 3, block)
  assert order.window <= record_order.WINDOW_BLOCKS * block
  begin, end = epoch * count, (epoch + 1) * count
  for start in range(begin, end, order.window):
    stop = min(start + order.window, end)
    blocks = order.blocks(start, stop)
    assert 1 <= len(blocks) <= record_order.WINDOW_BLOCKS
    np.testing.assert_array_equal(
      np.sort(order.records(np.arange(start, stop))),
      np.sort(held(order, start, stop)),
    )
    for position in (start, stop - 1):
      assert order.window_start(position) == start


def test_blocks_are_announced_once_wherever_one_looks():
  order = record_order.Order(1000, 3, 7)
  whole = order.blocks(0, 3000)
  parts = [order.blocks(at, min(at + 11, 3000)) for at in range(0, 3000, 11)]
  assert sum(parts, []) == whole and len(whole) == 3 * 143


def test_blocks_come_in_random_order_and_windows_are_shuffled_well():
  order = record_order.Order(16 * 64 * 64, 3, 64)
  n = order.window
  assert n == 64 * 64  # so there are 16 windows
  for start in range(0, order.count, n):
    out = order.records(positions(start, n))
    # 64 blocks of everywhere: their mean deviates by (12 * 64)**-0.5.
    assert abs(out.mean() / order.count - 0.5) < 4 * (12 * 64) ** -0.5
    # As a uniform permutation of the blocks' records has them.
    unshuffled = held(order, start, start + n)
    places = np.argsort(unshuffled)[np.searchsorted(np.sort(unshuffled), out)]
    assert abs(np.abs(places - np.arange(n)).mean() - n / 3) < 6 * 0.3 * n**0.5
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.08  # 5 sigma


def test_the_rest_of_less_than_a_block_is_other_records_in_each_epoch():
  order = record_order.Order(1001, 3, 100)
  last = [order.blocks(1001 * e, 1001 * (e + 1))[-1] for e in range(300)]
  assert {size for _, size in last} == {1}
  thirds = np.bincount([first * 3 // 1001 for first, _ in last], minlength=3)
  assert thirds.min() > 60 and len({first for first, _ in last}) > 200


@pytest.mark.parametrize("block", [0, 8])
def test_orders_of_epochs_and_seeds_differ(block):
  base = record_order.Order(1000, 5, block).records(positions(0, 2000))
  if not block:  # an epoch is one permutation
    for epoch in range(2):
      want = record_order.permute(np.arange(1000), 1000, 5, epoch)
      here = base[1000 * epoch : 1000 * (epoch + 1)]
      np.testing.assert_array_equal(here, want)
  other = record_order.Order(1000, 6, block).records(positions(0, 1000))
  assert (base[:1000] != base[1000:]).mean() > 0.9
  assert (base[:1000] != other).mean() > 0.9


def test_each_window_is_read_ahead_once_before_its_records():
  order = record_order.Order(1000, 5, 4)
  asked, log = set(), []

  class Files:
    def read_ahead(self, first, count):
      numbers = (first + np.arange(count)) % 1000
      asked.update(numbers.tolist())
      log.extend(numbers.tolist())

  ahead = record_order.ReadAhead(Files(), order)
  for position in range(300, 700, 8):
    ahead(position, 8)
    assert asked.issuperset(order.records(np.arange(position, position + 8)))
    if position == 300:
      assert len(asked) <= 2 * order.window
  assert len(log) == len(asked)  # none twice: this is within an epoch
  ahead(20, 8)  # started anew
  assert asked.issuperset(order.records(np.arange(20, 28)))
