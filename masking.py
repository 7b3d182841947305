"""Which tokens are masked: pure functions of (token ids, rng).

google/bert's procedure (create_masked_lm_predictions): 15% of the tokens are
chosen, at least one and at most `max_predictions_per_seq`; of these 80% become
[MASK], 10% a random token, 10% stay. With whole-word masks the pieces of a
word are chosen together.

The same function serves masks written into records and masks drawn when a
record is read.
"""

from typing import NamedTuple

import numpy as np


class MaskSettings(NamedTuple):
  """What a mask depends on besides the tokens and the rng."""

  masked_lm_prob: float  # share of the tokens to choose
  max_predictions_per_seq: int
  mask_id: int  # id of [MASK]
  vocab_size: int  # random tokens are any of these ids, as in google/bert


class MaskedTokens(NamedTuple):
  """A masked sequence; k tokens were chosen."""

  input_ids: np.ndarray  # [n], dtype of the input: what the model sees
  positions: np.ndarray  # int64 [k], ascending
  labels: np.ndarray  # [k], dtype of the input: what stood there


def num_to_predict(num_tokens: int, settings: MaskSettings) -> int:
  """How many tokens of a sequence to choose, [CLS] and [SEP] counted in.

  `round` is Python's (a half goes to the even neighbour), as in google/bert.
  """
  wanted = max(1, int(round(num_tokens * settings.masked_lm_prob)))
  return min(settings.max_predictions_per_seq, wanted)


def choose_tokens(
  maskable: np.ndarray, count: int, rng: np.random.Generator
) -> np.ndarray:
  """Chooses `count` of the maskable positions, all alike.

  Args:
    maskable: bool [n].
    count: how many; fewer are chosen where there are not so many.
    rng: advanced by one permutation.

  Returns:
    int64 [k], ascending.
  """
  candidates = maskable.nonzero()[0]
  chosen = rng.permutation(candidates)[:count]
  chosen.sort()
  return chosen


def choose_words(
  maskable: np.ndarray,
  is_continuation: np.ndarray,
  count: int,
  rng: np.random.Generator,
) -> np.ndarray:
  """Chooses whole words of at most `count` tokens in all.

  Words are taken in random order; one that would exceed `count` is skipped and
  the next is tried, so fewer than `count` tokens may come out. A word is a
  token and the continuations after it. As in google/bert, a continuation
  belongs to the maskable token before it even across [SEP] (a segment may have
  been cut inside a word), and one at the very start begins a word.

  Args:
    maskable: bool [n].
    is_continuation: bool [n], True for tokens that go on with a word.
    count: tokens to choose at most.
    rng: advanced by one permutation.

  Returns:
    int64 [k], ascending; k may be 0 where every word is longer than `count`.
  """
  candidates = maskable.nonzero()[0]
  is_start = ~is_continuation[candidates]
  is_start[:1] = True
  starts = is_start.nonzero()[0]
  ends = np.append(starts[1:], len(candidates)).tolist()
  starts = starts.tolist()
  chosen = []
  for word in rng.permutation(len(starts)).tolist():
    room = count - len(chosen)
    if not room:
      break
    if ends[word] - starts[word] <= room:
      chosen.extend(range(starts[word], ends[word]))
  chosen.sort()
  return candidates[chosen] if chosen else candidates[:0]


def mask_tokens(
  ids: np.ndarray,
  maskable: np.ndarray,
  rng: np.random.Generator,
  settings: MaskSettings,
  is_continuation: np.ndarray | None = None,
) -> MaskedTokens:
  """Masks one sequence.

  Args:
    ids: int [n], the sequence without padding, [CLS] and [SEP] included (they
      count for how many tokens are chosen). Not changed.
    maskable: bool [n], False for [CLS] and [SEP].
    rng: the only source of chance.
    settings: shares and ids.
    is_continuation: bool [n] for whole-word masks; None chooses single tokens.

  Returns:
    The masked sequence, with the chosen positions and their original tokens.
  """
  count = num_to_predict(len(ids), settings)
  if is_continuation is None:
    positions = choose_tokens(maskable, count, rng)
  else:
    positions = choose_words(maskable, is_continuation, count, rng)
  labels = ids[positions]
  # One uniform draw decides: [0, 0.8) [MASK], [0.8, 0.9) stay, rest random.
  draw = rng.random(len(positions))
  # Random tokens are drawn for all positions: cheaper than picking out some.
  shown = rng.integers(settings.vocab_size, size=len(positions), dtype=np.int32)
  kept = draw < 0.9
  shown[kept] = labels[kept]
  shown[draw < 0.8] = settings.mask_id
  masked = ids.copy()
  masked[positions] = shown
  return MaskedTokens(masked, positions, labels)
