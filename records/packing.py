"""Which examples share a record: a pure function of (sizes, rng).

Best-fit decreasing: each example, longest first, goes into the record with the
least room that still holds it. The records are at most 11/9 of the fewest
possible (Johnson et al. 1974, https://doi.org/10.1137/0203025). A histogram of
lengths (Krell et al. 2021, https://arxiv.org/abs/2107.02027) would need the
whole corpus at once. Chance decides which examples of one length meet.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Scores of attention that cost as much as the rest of a token: by FLOPs 6 times
# the hidden size, less in fact. It hardly changes which length is the best.
_TOKEN_SCORES = 1000
_SAMPLE = 512  # examples that show how well a length packs


class Limits(NamedTuple):
  """The room of a record."""

  max_seq_length: int  # tokens, special ones included
  max_predictions_per_seq: int  # masked tokens
  examples_per_record: int  # 1: not packed


class _Record:
  """A record that is being filled, and the room that it has left."""

  def __init__(self, limits: Limits):
    self.examples: list[int] = []
    self.tokens, self.predictions, self.slots = limits


class _OpenRecords:
  """Records that are being filled, by the tokens that they have room for."""

  def __init__(self, max_seq_length: int):
    self._by_room: list[list[_Record]] = [[] for _ in range(max_seq_length + 1)]
    self._rooms = 0  # bit r is set where _by_room[r] is not empty

  def add(self, record: _Record) -> None:
    self._by_room[record.tokens].append(record)
    self._rooms |= 1 << record.tokens

  def take(self, tokens: int, predictions: int) -> _Record | None:
    """Takes out the record with the least room for both, or returns None."""
    # Bits of the rooms that are large enough; the lowest is the best fit.
    rooms = self._rooms >> tokens << tokens
    while rooms:
      lowest = rooms & -rooms
      room = lowest.bit_length() - 1
      # Only the last record of each room is tried: most have room for the
      # predictions, which are a share of the tokens.
      if self._by_room[room][-1].predictions >= predictions:
        record = self._by_room[room].pop()
        if not self._by_room[room]:
          self._rooms ^= lowest
        return record
      rooms ^= lowest
    return None


def pack(
  tokens: Sequence[int],
  predictions: Sequence[int],
  limits: Limits,
  rng: np.random.Generator,
) -> list[list[int]]:
  """The examples of each record, shuffled; ValueError if one fits in none."""
  order = rng.permutation(len(tokens))
  if limits.examples_per_record == 1:
    return [[i] for i in order.tolist()]
  lengths = np.asarray(tokens)
  order = order[np.argsort(-lengths[order], kind="stable")].tolist()
  packed, open_records = [], _OpenRecords(limits.max_seq_length)
  # Best fit: the longest that are left go where the least room holds them.
  for i in order:
    record = open_records.take(tokens[i], predictions[i])
    if record is None:
      record = _Record(limits)
      packed.append(record.examples)
    record.examples.append(i)
    record.tokens -= tokens[i]
    record.predictions -= predictions[i]
    record.slots -= 1
    if record.tokens < 0 or record.predictions < 0:
      raise ValueError(
        f"example {i} of {tokens[i]} tokens and {predictions[i]} masked ones "
        f"does not fit into {limits}"
      )
    if record.tokens and record.slots:
      open_records.add(record)
  return [packed[i] for i in rng.permutation(len(packed)).tolist()]


def cheapest_length(tokens: Sequence[int], examples_per_record: int) -> int:
  """Tokens of a record, a multiple of 8, at which examples cost least.

  Many of 65 to 80 tokens fill 160 well and 128 badly, but each token is
  compared with all of its record. Tried are lengths from that of the longest
  example to twice as much, by a sample of the examples.
  """
  shortest = -(-max(tokens, default=1) // 8) * 8
  order = np.random.default_rng(0).permutation(len(tokens))
  sample = [tokens[i] for i in order[:_SAMPLE].tolist()]
  costs = {}
  for length in range(shortest, 2 * shortest + 1, 8):
    limits = Limits(length, 0, examples_per_record)
    rng = np.random.default_rng(0)
    records = pack(sample, [0] * len(sample), limits, rng)
    costs[length] = len(records) * length * (_TOKEN_SCORES + length)
  return min(costs, key=costs.__getitem__)
