"""The order of records: a permutation, the same for any world, resumable."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import record_order
from distributed import Comm


def rank(number, size):
  """A world that only says who this is: its collectives are not used."""
  comm = Comm()
  comm.rank, comm.size = number, size
  return comm


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


def test_epochs_and_seeds_differ():
  at = np.arange(100)
  base = record_order.permute(at, 100, 0, 0)
  assert (base != record_order.permute(at, 100, 0, 1)).mean() > 0.9
  assert (base != record_order.permute(at, 100, 1, 0)).mean() > 0.9


def test_every_epoch_holds_every_record_once_whatever_the_batch():
  count, batch = 103, 16
  stream = np.concatenate(
    [
      record_order.stream_records(k * batch, batch, count, seed=9)
      for k in range(3 * count // batch + 1)
    ]
  )
  for epoch in range(3):
    seen = stream[epoch * count : (epoch + 1) * count]
    np.testing.assert_array_equal(np.sort(seen), np.arange(count))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_share_each_global_batch(size):
  one = record_order.rank_records(48, 24, 100, 7, rank(0, 1))
  parts = [
    record_order.rank_records(48, 24, 100, 7, rank(r, size))
    for r in range(size)
  ]
  np.testing.assert_array_equal(np.concatenate(parts), one)
