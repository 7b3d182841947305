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
_SAMPLE = 1024  # texts that show how well rows pack
_ROWS = 4  # of a record: more would make updates coarse, and pack no better


class Limits(NamedTuple):
  """The room of a record."""

  max_seq_length: int  # tokens, special ones included
  max_predictions_per_seq: int  # masked tokens
  examples_per_record: int  # 1: not packed


class RowLimits(NamedTuple):
  """The room of a record of rows, for groups of texts."""

  rows: int
  tokens: int  # of a row
  groups: int


class _Record:
  """A record that is being filled by examples: (tokens, predictions)."""

  def __init__(self, limits: Limits):
    self.members: list[int] = []
    # Tokens, predictions and examples that there is room for.
    self.room, self._predictions, self.slots = limits

  def add(self, number: int, example: tuple[int, int]) -> bool:
    """Whether it has taken the example."""
    tokens, predictions = example
    if tokens > self.room or predictions > self._predictions:
      return False
    self.members.append(number)
    self.room -= tokens
    self._predictions -= predictions
    self.slots -= 1
    return True


class _RowsRecord:
  """A record that is being filled by groups: the tokens of each text."""

  def __init__(self, limits: RowLimits):
    # Groups with the row of each of their texts.
    self.members: list[tuple[int, list[int]]] = []
    self._rooms = [limits.tokens] * limits.rows
    self.room = limits.tokens  # for a text, in the emptiest row
    self.slots = limits.groups

  def add(self, number: int, texts: Sequence[int]) -> bool:
    """Whether it has taken the group, each text in the fullest row for it."""
    if sum(texts) > sum(self._rooms):
      return False
    rooms, row_of = [*self._rooms], [0] * len(texts)
    by_length = sorted(range(len(texts)), key=texts.__getitem__)
    for text in reversed(by_length):
      large_enough = [room for room in rooms if room >= texts[text]]
      if not large_enough:
        return False
      row = rooms.index(min(large_enough))
      rooms[row] -= texts[text]
      row_of[text] = row
    self.members.append((number, row_of))
    self._rooms, self.room = rooms, max(rooms)
    self.slots -= 1
    return True


class _OpenRecords:
  """Records that are being filled, by the tokens that they have room for."""

  def __init__(self, most: int):
    self._by_room: list[list] = [[] for _ in range(most + 1)]
    self._rooms = 0  # bit r is set where _by_room[r] is not empty

  def put(self, record) -> None:
    self._by_room[record.room].append(record)
    self._rooms |= 1 << record.room

  def take(self, tokens: int, number: int, example):
    """Takes out the record that has taken the example, or None.

    It is the one of the least room, of at least `tokens`.
    """
    # Bits of the rooms that are large enough; the lowest is the best fit.
    rooms = self._rooms >> tokens << tokens
    while rooms:
      lowest = rooms & -rooms
      room = lowest.bit_length() - 1
      # Only the last record of each room is tried: most take the example, whose
      # predictions are a share of its tokens.
      record = self._by_room[room][-1]
      if record.add(number, example):
        self._by_room[room].pop()
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
  if limits.examples_per_record == 1:
    return [[i] for i in rng.permutation(len(tokens)).tolist()]
  examples = [*zip(tokens, predictions, strict=True)]
  return _pack(_Record, limits, examples, tokens, tokens, rng)


def pack_rows(
  groups: Sequence[Sequence[int]], limits: RowLimits, rng: np.random.Generator
) -> list[list[tuple[int, list[int]]]]:
  """The groups of each record and the row of each of their texts, shuffled.

  `groups` has the tokens of each group's texts. ValueError if one fits in none.
  """
  return _pack(_RowsRecord, limits, groups, *_sizes(groups), rng)


def _sizes(groups) -> tuple[list[int], list[int]]:
  """The tokens of each group, and of its longest text."""
  totals, longest = [], []
  for texts in groups:
    totals.append(sum(texts))
    longest.append(max(texts))
  return totals, longest


def _pack(kind, limits, examples, sizes, needs, rng) -> list:
  """The members of each record of a `kind`, the largest `sizes` first.

  `needs` is the room that each example needs at least. Records are shuffled.
  """
  order = rng.permutation(len(examples))
  order = order[np.argsort(-np.asarray(sizes)[order], kind="stable")].tolist()
  packed, open_records = [], _OpenRecords(kind(limits).room)
  # Best fit: the longest that are left go where the least room holds them.
  for i in order:
    record = open_records.take(needs[i], i, examples[i])
    if record is None:
      record = kind(limits)
      packed.append(record)
      if not record.add(i, examples[i]):
        raise ValueError(f"example {i}, {examples[i]}, does not fit {limits}")
    if record.room and record.slots:
      open_records.put(record)
  return [packed[i].members for i in rng.permutation(len(packed)).tolist()]


def cheapest_rows(
  groups: Sequence[Sequence[int]], groups_per_record: int
) -> RowLimits:
  """The records at which groups of texts cost least; a multiple of 8 tokens.

  Texts of 65 to 80 tokens fill rows of 160 well and of 128 badly, but a token
  is compared with all of its row. Tried are up to `_ROWS` rows, or as many as a
  group has texts, of the fewest tokens to twice as many, by a sample.
  """
  texts = max(map(len, groups), default=1)
  totals, longest = _sizes(groups)
  most = max(totals, default=1)
  order = np.random.default_rng(0).permutation(len(groups))
  sample = [groups[i] for i in order[: -(-_SAMPLE // texts)].tolist()]
  costs = {}
  for rows in range(1, (1 if texts == 1 else max(texts, _ROWS)) + 1):
    # A record holds each group: if its k-th longest text, of n tokens, fits in
    # no row, each row has a text, so k > rows, and less room than n. The group
    # has at least k * n tokens, and more than rows * (tokens - n) + n, so more
    # than tokens * (rows + 1) / 2.
    least = max(longest, default=1)
    if texts > rows:
      least = max(least, -(-2 * most // (rows + 1)))
    shortest = -(-least // 8) * 8
    for tokens in range(shortest, 2 * shortest + 1, 8):
      limits = RowLimits(rows, tokens, groups_per_record)
      records = pack_rows(sample, limits, np.random.default_rng(0))
      costs[limits] = len(records) * rows * tokens * (_TOKEN_SCORES + tokens)
  return min(costs, key=costs.__getitem__)
