"""The global order: which records an update reads, a function of (seed, epoch).

A run reads a stream of epochs, each a permutation of all records. Update k
takes positions k * global_batch to (k + 1) * global_batch - 1, and rank r of N
the r-th of N equal parts. So any number of ranks sees the same global batches,
and a stopped run resumes where it was.

Sets that are larger than memory are permuted in blocks. An epoch numbers the
records from a random one on, around the end, so its blocks are new. Whole
blocks come in random order, the rest last. The records of up to WINDOW_BLOCKS
successive blocks, a window, are shuffled together.
"""

import dataclasses

import numpy as np

from records import masking, tfrecord

_ROUNDS = 6

# A block gives 1/64 of a batch, so similar records in it matter little. Blocks
# have a few MB, which a disk reads at full speed, so the window in use and the
# next one need a few hundred MB of memory.
WINDOW_BLOCKS = 64

# Parts of the keys of permutations.
_OF_BLOCKS, _IN_WINDOW = 1, 2


def permute(
  positions: np.ndarray, count: int, seed: int, epoch: int, *part: int
) -> np.ndarray:
  """Where a random permutation of [0, count) sends `positions`, int64 [n].

  A Feistel network over an even number of bits, repeated until the value is
  below `count` (cycle walking: Black and Rogaway 2002,
  https://doi.org/10.1007/3-540-45760-7_9), needs constant memory.
  """
  half = max(3, ((count - 1).bit_length() + 1) // 2)
  half_bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
  chance = np.random.SeedSequence([seed, epoch, *part])
  keys = chance.generate_state(_ROUNDS, np.uint64)
  values = np.asarray(positions).astype(np.uint64)
  outside = np.ones(values.shape, bool)
  # Each round exchanges the halves; a value that is too large walks on.
  while outside.any():
    left, right = values[outside] >> half_bits, values[outside] & mask
    for key in keys:
      left, right = right, left ^ (masking.mix64(right + key) & mask)
    values[outside] = left << half_bits | right
    outside = values >= np.uint64(count)
  return values.astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Order:
  """The records of a stream of epochs, by position."""

  count: int  # records of an epoch
  seed: int  # not negative
  block: int = 0  # records of a block; 0 shuffles all records at once

  def records(self, positions: np.ndarray) -> np.ndarray:
    """Record numbers at stream positions, int64 [n], which may span epochs."""
    epochs, in_epoch = np.divmod(np.asarray(positions), self.count)
    return _by_group(self._of_epoch, in_epoch, epochs)

  def _of_epoch(self, positions, epoch):
    if not self.block:
      return permute(positions, self.count, self.seed, epoch)

    # Within a window, so that records that are read together are in memory.
    def shuffled(positions, window):
      start = window * self.window
      size = min(self.window, self.count - start)
      key = self.seed, epoch, _IN_WINDOW, window
      return start + permute(positions - start, size, *key)

    positions = _by_group(shuffled, positions, positions // self.window)
    return self._in_blocks(positions, epoch)

  def _in_blocks(self, positions, epoch):
    """The records of an epoch before windows are shuffled, by position."""
    blocks, offsets = np.divmod(positions, self.block)
    whole_blocks = self.count // self.block
    whole, key = blocks < whole_blocks, (self.seed, epoch, _OF_BLOCKS)
    blocks[whole] = permute(blocks[whole], whole_blocks, *key)
    # Each epoch numbers the records from another one on, so blocks differ.
    first = permute(np.zeros(1, np.int64), self.count, self.seed, epoch)
    return (first + blocks * self.block + offsets) % self.count

  @property
  def window(self) -> int:
    """Records that are shuffled together; the last window may have fewer."""
    if not self.block:
      return self.count
    blocks = -(-self.count // self.block)
    # As many windows as it takes, with about as many blocks each.
    windows = -(-blocks // WINDOW_BLOCKS)
    return -(-blocks // windows) * self.block

  def window_start(self, position: int) -> int:
    in_epoch = position % self.count
    return position - in_epoch % self.window

  def blocks(self, start: int, stop: int) -> list[tuple[int, int]]:
    """(first record, size) of blocks that begin at positions [start, stop)."""
    blocks: list[tuple[int, int]] = []
    for epoch in range(start // self.count, -(-stop // self.count)):
      begin = max(0, start - epoch * self.count)
      end = min(self.count, stop - epoch * self.count)
      first = -(-begin // self.block) * self.block
      positions = np.arange(first, end, self.block)
      sizes = np.minimum(self.block, self.count - positions)
      records = self._in_blocks(positions, epoch)
      blocks += zip(records.tolist(), sizes.tolist(), strict=True)
    return blocks


def _by_group(
  function, positions: np.ndarray, groups: np.ndarray
) -> np.ndarray:
  """function(positions of a group, group) for each group, put together."""
  out = np.empty_like(positions)
  for group in np.unique(groups):
    here = groups == group
    out[here] = function(positions[here], int(group))
  return out


class ReadAhead:
  """Has the kernel read each window of blocks while the one before is used.

  Call it before reading `size` positions: it asks for as many, a window ahead.
  """

  def __init__(self, files: tfrecord.RecordSet, order: Order):
    self._files, self._order = files, order
    self._done = 0  # reads were requested up to this stream position

  def __call__(self, position: int, size: int) -> None:
    # From the window in use to the end of the next one.
    start = self._order.window_start(position)
    stop = position + size + self._order.window
    if not start <= self._done <= stop:  # a run begins at this position
      self._done = start
    for block in self._order.blocks(self._done, stop):
      self._files.read_ahead(*block)
    self._done = stop
