"""Groups of texts that a loss compares, as packed records in memory.

A group is an anchor, its positive and its negatives, or a text alone. Its
texts are examples of their own, each of which attends to itself only. A record
has R rows of S tokens, so that a group of many texts needs no long row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from common import tensorflow_v1 as later
from finetuning.packed import PackedRecords
from records import packing

NO_TEXT = -1  # instead of a text's identity


class Text(NamedTuple):
  """A text as the encoder reads it."""

  ids: np.ndarray  # int32 [n], special tokens included
  pooled: slice  # the tokens whose outputs its vector is the mean of
  identity: int  # equal for equal texts of a data set


class Group(NamedTuple):
  """Texts in the order anchor, positive, negatives."""

  texts: Sequence[Text]
  where: str  # line or id, for a person
  score: float = 0.0  # how alike the first two are


class GroupBatch(NamedTuple):
  """A micro-batch: Tensors of B records with up to G groups of T texts.

  Text t of group g has the number g * T + t + 1 in its record.
  """

  input_ids: Any  # int32 [B, R, S]
  input_mask: Any  # int32 [B, R, S], the token's text by its number, 0 padding
  pooled_mask: Any  # int32 [B, R, S], 0 also for tokens that are not pooled
  identities: Any  # int32 [B, G, T], `NO_TEXT` for a missing text
  scores: Any  # float32 [B, G]
  weights: Any  # float32 [B, G], 0 where no group is


class GroupSource(PackedRecords):
  """Groups in records of R rows, `rows_of_record`."""

  def __init__(self, path: str, groups: Sequence[Group], config, cut: int = 0):
    """`config` is an `EmbedderConfig`; `cut` texts lost their end."""
    sizes_of, totals = [], []
    for group in groups:
      sizes_of.append([len(text.ids) for text in group.texts])
      totals.append(sum(sizes_of[-1]))
    limits = packing.cheapest_rows(sizes_of, config.examples_per_record)
    row_of: dict[int, list[int]] = {}  # of each text of a group
    records = []
    rng = np.random.default_rng(0)
    for members in packing.pack_rows(sizes_of, limits, rng):
      row_of.update(members)
      records.append([*dict(members)])
    self.rows_of_record = limits.rows
    self.reads_first_tokens = config.pooling == "cls"
    super().__init__(path, groups, totals, records, limits.tokens, cut)
    self.texts = max(map(len, sizes_of))
    # Two at least: a row has positions of its own, and may be longer than all.
    self.slots = max(2, self.slots * self.texts)
    self._columns = self._laid_out(row_of)

  def _laid_out(self, row_of: dict[int, list[int]]) -> GroupBatch:
    """Arrays of all records; `row_of` has the row of each text of a group."""
    records, groups = len(self), self.slots // self.texts
    shape = records, self.rows_of_record, self.tokens
    ids, mask, pooled = np.zeros([3, *shape], np.int32)
    identities = np.full([records, groups, self.texts], NO_TEXT, np.int32)
    scores, weights = np.zeros([2, records, groups], np.float32)
    # Where each group is: int [groups].
    self.record_of, self.slot_of = np.zeros([2, len(self.examples)], np.int64)
    for record, members in enumerate(self._records):
      ends = [0] * self.rows_of_record
      for g, number in enumerate(members):
        group = self.examples[number]
        self.record_of[number], self.slot_of[number] = record, g
        scores[record, g], weights[record, g] = group.score, 1.0
        for t, text in enumerate(group.texts):
          row = row_of[number][t]
          start, end = ends[row], ends[row] + len(text.ids)
          ids[record, row, start:end] = text.ids
          mask[record, row, start:end] = g * self.texts + t + 1
          pooled[record, row, start:end][text.pooled] = g * self.texts + t + 1
          identities[record, g, t] = text.identity
          ends[row] = end
    return GroupBatch(ids, mask, pooled, identities, scores, weights)

  def batch(self, columns, row_weights):
    tf, batch = later.tf, super().batch(columns, row_weights)
    is_there = batch.weights[:, :, None] > 0
    identities = tf.where_v2(is_there, batch.identities, NO_TEXT)
    return batch._replace(identities=identities)
