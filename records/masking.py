"""Which tokens are masked: a pure function of (token ids, keys).

google/bert's procedure (create_masked_lm_predictions) chooses 15% of an
example's tokens, at least one and at most `max_predictions_per_seq`: 80% become
[MASK], 10% a random token, 10% stay. Training may choose other shares.
Whole-word masks choose all tokens of a word. Chance is a hash of (the record's
key, the token's position), so it does not matter which records are masked
together.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from common.errors import UserError
from common.settings import check, setting

# Streams of chance: the order of the words, and what a chosen token becomes.
_ORDER_STREAM, _FATE_STREAM = np.uint64(1 << 32), np.uint64(2 << 32)
EVALUATION_PROB = 0.15  # so that losses of all recipes compare
# The settings of what a chosen token becomes.
SHARES = ("mask_replace_prob", "random_replace_prob")


class MaskSettings(NamedTuple):
  """The settings of masks; tokens and keys decide the rest."""

  masked_lm_prob: float | np.ndarray  # share to choose, of all or each [B]
  max_predictions_per_seq: int  # of a record
  mask_id: int  # id of [MASK]
  vocab_size: int  # random tokens are any of these ids, as in google/bert
  # Shares of the chosen tokens; the others stay.
  mask_replace_prob: float = 0.8  # become [MASK]
  random_replace_prob: float = 0.1  # become a random token


def shares(text: str | None) -> tuple[float, float] | None:
  """(first, last) of --masked_lm_prob."""
  if text is None:
    return None
  try:
    parts = [float(part) for part in text.split(":")]
  except ValueError:
    parts = []
  if len(parts) not in (1, 2) or not all(0 < part < 1 for part in parts):
    raise UserError(
      f"--masked_lm_prob={text}: must be a share between 0 and 1, as 0.3, or "
      "the first and the last one, as 0.3:0.15"
    )
  return parts[0], parts[-1]


@dataclasses.dataclass(frozen=True)
class MaskConfig:
  """How training masks records whose masks are drawn on reading."""

  # fmt: off
  masked_lm_prob: tuple | None = setting(None,
    "Share of the tokens to mask, as 0.3; or the shares in the first and the "
    "last update, as 0.3:0.15, between which it moves linearly. For records "
    "made with --dynamic_masks. Default: the share that they were made with. "
    "Evaluations always mask 15%, so that losses compare.", read=shares)
  do_whole_word_mask: bool | None = setting(None,
    "Mask whole words instead of single tokens. For records made with "
    "--dynamic_masks. Default: as they were made; only records made with "
    "--do_whole_word_mask know the words.")
  mask_replace_prob: float | None = setting(None,
    "Share of the chosen tokens that become [MASK]. For records made with "
    "--dynamic_masks. Default: 0.8.", low=0, high=1)
  random_replace_prob: float | None = setting(None,
    "Share of the chosen tokens that become a random token; what is left stays "
    "as it is. For records made with --dynamic_masks. Default: 0.1.",
    low=0, high=1)
  # fmt: on

  def __post_init__(self):
    check(self)
    values = MaskSettings._field_defaults | self.changes
    both = {f"--{name}={values[name]}": values[name] for name in SHARES}
    if sum(both.values()) > 1:
      raise UserError(
        f"{' and '.join(both)} are more than all of the chosen tokens"
      )

  @property
  def changes(self) -> dict:
    """Name -> value of the flags that are set."""
    values = dataclasses.asdict(self).items()
    return {name: value for name, value in values if value is not None}


def most_predictions(tokens: int, prob: float, examples: int) -> int:
  """The most predictions that a record of `examples` at most can have."""
  most = float(np.rint(tokens * prob))
  if examples > 1:
    # Each is rounded, up by a half at most, but for short ones: they have 3
    # tokens or more, [CLS] and [SEP] among them, and one prediction at least.
    most = tokens * prob + examples * max(0.5, 1 - 3 * prob)
  return int(np.clip(np.floor(most + 1e-6), 1, tokens))


class MaskedRecords(NamedTuple):
  """Masked records, as `records` has them; the arrays are new."""

  input_ids: np.ndarray  # [B, S], dtype of the input: what the model sees
  masked_lm_positions: np.ndarray  # int32 [B, P], ascending, then 0
  masked_lm_ids: np.ndarray  # int32 [B, P]: the original tokens, then 0
  masked_lm_weights: np.ndarray  # float32 [B, P]: 1, then 0


def mix64(x: np.ndarray) -> np.ndarray:
  """SplitMix64's finalizer (Steele et al. 2014), a good hash of uint64."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def record_keys(seed: int, series, numbers: np.ndarray) -> np.ndarray:
  """Keys, uint64 [B]; `series` is an epoch, or a shard if masks are written."""
  # Begins with a number that is not 0, which the hash maps to itself.
  key = np.array([0x9E3779B97F4A7C15], np.uint64)
  for part in (seed, series, numbers):
    key = mix64(np.atleast_1d(np.asarray(part)).astype(np.uint64) + key)
  return np.broadcast_to(key, np.shape(numbers))


def num_to_predict(num_tokens, settings: MaskSettings) -> np.ndarray:
  """How many of `num_tokens`, [CLS] and [SEP] among them, to choose; int64."""
  # A half goes to the even neighbour, as with Python's `round` in google/bert.
  wanted = np.rint(np.asarray(num_tokens) * settings.masked_lm_prob)
  return np.clip(wanted, 1, settings.max_predictions_per_seq).astype(np.int64)


def maskable_tokens(
  input_ids: np.ndarray, input_mask: np.ndarray, segment_ids: np.ndarray
) -> np.ndarray:
  """bool [B, S]: not padding, an example's first or a segment's last token.

  Nor a token that equals such a one beside it: RoBERTa has two </s> between
  texts.
  """
  maskable = input_mask > 0
  new_example = np.diff(input_mask, axis=1) != 0
  maskable[:, 0] = False
  maskable[:, 1:] &= ~new_example
  maskable[:, :-1] &= ~(new_example | (np.diff(segment_ids, axis=1) != 0))
  maskable[:, -1] = False
  is_twin = (input_ids[:, :-1] == input_ids[:, 1:]) & (input_mask[:, 1:] > 0)
  maskable[:, :-1] &= maskable[:, 1:] | ~is_twin
  maskable[:, 1:] &= maskable[:, :-1] | ~is_twin
  return maskable


def mask_records(
  input_ids: np.ndarray,
  input_mask: np.ndarray,
  segment_ids: np.ndarray,
  keys: np.ndarray,
  settings: MaskSettings,
  is_continuation: np.ndarray | None = None,
) -> MaskedRecords:
  """Masks records, int or bool [B, S], with their `record_keys`, uint64 [B].

  A word is a token and the continuations after it; without `is_continuation`
  every token is one. Words come in random order; one that exceeds what is left
  to choose is skipped, so fewer tokens may be chosen.
  """
  rows, size = input_ids.shape
  # Examples are numbered through the batch, padding first in each row.
  per_row = int(input_mask.max(initial=0)) + 1
  example = input_mask + per_row * np.arange(rows)[:, None]
  lengths = np.bincount(example.ravel(), minlength=rows * per_row)
  lengths = lengths.reshape(rows, per_row)
  prob = np.reshape(settings.masked_lm_prob, (-1, 1))
  wanted = num_to_predict(lengths, settings._replace(masked_lm_prob=prob))
  room = np.where(lengths > 0, wanted, 0)
  room[:, 0] = 0
  wanted = room.sum(axis=1)
  if wanted.max(initial=0) > settings.max_predictions_per_seq:
    raise ValueError(
      f"a record wants {wanted.max()} masked tokens, but there is room for "
      f"max_predictions_per_seq={settings.max_predictions_per_seq}"
    )
  tokens = np.flatnonzero(maskable_tokens(input_ids, input_mask, segment_ids))
  example = example.ravel()[tokens]
  # As in google/bert, a continuation belongs to the maskable token before it
  # even across [SEP] (a segment may have been cut inside a word), and one at
  # the start of an example begins a word.
  starts = np.ones(len(tokens), bool)
  if is_continuation is not None:
    continues = is_continuation.ravel()[tokens].astype(bool)
    starts[1:] = ~continues[1:] | (np.diff(example) != 0)
  chosen = _choose_words(tokens, example, starts, room.ravel(), keys, size)
  return _replace(input_ids, np.sort(tokens[chosen]), keys, settings)


def _hash(keys, indices, stream, size):
  """uint64 of flat indices: a hash of (key of the row, position, stream)."""
  rows, columns = indices // size, indices % size
  return mix64(keys[rows] + mix64(columns.astype(np.uint64) + stream))


def _choose_words(tokens, example, starts, room, keys, size):
  """bool [t]: the chosen `tokens`, flat indices, up to `room` per example."""
  first = np.flatnonzero(starts)
  sizes = np.diff(np.append(first, len(tokens)))
  owner = example[first]
  # Sorted by example, then at random.
  shuffle = _hash(keys, tokens[first], _ORDER_STREAM, size)
  owner_bits = owner.astype(np.uint64) << np.uint64(40)
  order = np.argsort(owner_bits | shuffle >> np.uint64(24))
  counts = np.bincount(owner, minlength=len(room))
  begins = np.cumsum(counts) - counts
  taken = np.zeros(len(first), bool)
  room = room.copy()
  # All examples at once: the first word of each, then the second, ...
  active = np.flatnonzero((room > 0) & (counts > 0))
  word_rank = 0
  while len(active):
    words = order[begins[active] + word_rank]
    fits = sizes[words] <= room[active]
    taken[words[fits]] = True
    room[active[fits]] -= sizes[words[fits]]
    word_rank += 1
    active = active[(room[active] > 0) & (counts[active] > word_rank)]
  return np.repeat(taken, sizes)


def _replace(input_ids, indices, keys, settings):
  """Masks the tokens at flat indices, ascending."""
  rows, size = input_ids.shape
  p = settings.max_predictions_per_seq
  row = indices // size
  rank = np.arange(len(indices)) - np.searchsorted(row, row)
  positions, labels = np.zeros((2, rows, p), np.int32)
  weights = np.zeros((rows, p), np.float32)
  # Each row's predictions come first, in the order of their positions.
  positions[row, rank] = indices % size
  labels[row, rank] = input_ids.ravel()[indices]
  weights[row, rank] = 1.0
  # The upper half of a hash decides what becomes of a token, the lower half
  # which random token it is.
  fate = _hash(keys, indices, _FATE_STREAM, size)
  share = (fate >> np.uint64(32)) / 2.0**32
  low = fate & np.uint64(0xFFFFFFFF)
  shown = low * np.uint64(settings.vocab_size) >> np.uint64(32)
  shown = shown.astype(input_ids.dtype)
  kept = share < 1.0 - settings.random_replace_prob
  shown[kept] = input_ids.ravel()[indices[kept]]
  shown[share < settings.mask_replace_prob] = settings.mask_id
  masked = input_ids.copy()
  masked.ravel()[indices] = shown
  return MaskedRecords(masked, positions, labels, weights)
