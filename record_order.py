"""The global order: which records an update reads, a function of (seed, epoch).

The order is a full shuffle, as a permutation that is computed, not stored. The
stream of a run is epoch after epoch; update k takes `global_batch` positions of
it from k * global_batch on, and rank r of N the r-th of N equal parts of them.
So any number of ranks sees the same global batches, and a run that stopped goes
on where it was.
"""

import numpy as np

import masking

_ROUNDS = 6


def permute(
  positions: np.ndarray, count: int, seed: int, epoch: int
) -> np.ndarray:
  """Where a random permutation of [0, count) sends `positions`.

  A Feistel network over the smallest even number of bits that holds `count`,
  walked until the value is below `count` (cycle walking: Black and Rogaway
  2002, https://doi.org/10.1007/3-540-45760-7_9). Constant memory, and each
  position costs the same wherever a run starts.

  Args:
    positions: int64 [n], each in [0, count).
    count: size of the permuted set.
    seed, epoch: choose the permutation.

  Returns:
    int64 [n].
  """
  half = max(3, ((count - 1).bit_length() + 1) // 2)
  half_bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
  keys = np.random.SeedSequence([seed, epoch]).generate_state(
    _ROUNDS, np.uint64
  )
  values = np.asarray(positions).astype(np.uint64)
  outside = np.ones(values.shape, bool)
  while outside.any():
    left, right = values[outside] >> half_bits, values[outside] & mask
    for key in keys:
      left, right = right, left ^ (masking.mix64(right + key) & mask)
    values[outside] = left << half_bits | right
    outside = values >= np.uint64(count)
  return values.astype(np.int64)


def stream_records(start: int, size: int, count: int, seed: int) -> np.ndarray:
  """The record numbers at stream positions start to start + size - 1.

  Every epoch, `count` positions, holds every record once; a batch may run from
  one epoch into the next.

  Returns:
    int64 [size].
  """
  positions = np.arange(start, start + size, dtype=np.int64)
  epochs, places = positions // count, positions % count
  out = np.empty(size, np.int64)
  for epoch in np.unique(epochs):
    here = epochs == epoch
    out[here] = permute(places[here], count, seed, int(epoch))
  return out


def rank_records(
  position: int, global_batch: int, count: int, seed: int, comm
) -> np.ndarray:
  """This rank's part of the global batch at a stream position: int64 [n]."""
  share = global_batch // comm.size
  numbers = stream_records(position, global_batch, count, seed)
  return numbers[comm.rank * share : (comm.rank + 1) * share]
