"""How often tokens of records stand beside each other."""

from collections.abc import Iterable

import numpy as np
from scipy import sparse

OFFSETS = (-2, -1, 1, 2)  # where the neighbours stand
MOST_NEIGHBOURS = 4096


def count(
  sequences: Iterable[np.ndarray], counts: np.ndarray
) -> sparse.csr_array:
  """float32 [V, offsets x N]: pairs of a token and its neighbour.

  Neighbours are the N most frequent tokens of `counts`, [V]. Tokens that do not
  count there, as [CLS], have no neighbours and are none. `sequences` are ids.
  """
  vocab_size = len(counts)
  frequent = np.argsort(-counts, kind="stable")[:MOST_NEIGHBOURS]
  columns = np.full(vocab_size, -1)
  columns[frequent] = np.arange(len(frequent))
  columns[counts == 0] = -1
  # Tokens that do not count keep the sequences apart.
  apart = np.full(max(OFFSETS), -1, np.int32)
  joined = [part for ids in sequences for part in (ids, apart)]
  ids = np.concatenate([np.zeros(0, np.int32), *joined])
  counted = np.append(counts > 0, False)[ids]  # that of -1 is the last
  neighbours = np.where(counted, columns[ids], -1)
  blocks = []
  for offset in OFFSETS:
    own = slice(max(0, -offset), len(ids) - max(0, offset))
    other = slice(max(0, offset), len(ids) - max(0, -offset))
    used = counted[own] & (neighbours[other] >= 0)
    places = ids[own][used], neighbours[other][used]
    ones = np.ones(len(places[0]), np.float32)
    shape = vocab_size, len(frequent)
    blocks.append(sparse.coo_array((ones, places), shape=shape).tocsr())
  return sparse.hstack(blocks, format="csr")
