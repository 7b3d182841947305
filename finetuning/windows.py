"""Long texts as inputs of the encoder: google/bert's sliding window."""

from collections.abc import Iterator

import numpy as np


def join(tokenizer, *texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """int32 ids and segments of one text or two in the tokenizer's template.

  That is [CLS] a [SEP] or [CLS] a [SEP] b [SEP] if the tokenizer is BERT's.
  """
  first, *rest = tokenizer.template(len(texts))
  parts = [first]
  for text, after in zip(texts, rest, strict=True):
    parts += [text, after]
  ids = np.concatenate(parts).astype(np.int32)
  segments = np.zeros(len(ids), np.int32)
  segments[sum(map(len, parts[:3])) :] = 1
  return ids, segments


def num_special(tokenizer, count: int) -> int:
  """The special tokens that `join` adds to `count` texts."""
  return sum(map(len, tokenizer.template(count)))


def encode_pair(tokenizer, max_seq_length: int, a, b=None) -> tuple:
  """`join` of int [tokens] arrays, cut to the length.

  The longer text of a pair loses its end, token by token, as in google/bert.
  """
  if b is None:
    return join(tokenizer, a[: max_seq_length - num_special(tokenizer, 1)])
  room = max_seq_length - num_special(tokenizer, 2)
  # Where the longer text (b, if they are equal) loses one token at a time.
  keep_b = min(len(b), max(room // 2, room - len(a)))
  return join(tokenizer, a[: room - keep_b], b[:keep_b])


def pair_length(tokenizer, a, b=None) -> int:
  """Tokens of `encode_pair` if it cuts nothing."""
  texts = [a] if b is None else [a, b]
  return sum(map(len, texts)) + num_special(tokenizer, len(texts))


def parts_of(
  count: int, room: int, stride: int
) -> Iterator[tuple[int, int, np.ndarray]]:
  """Parts of at most `room` of `count` tokens, each `stride` after the last.

  Yields first token, past the last, and bool [tokens]: whether this is the part
  with the most context for a token. A `stride` above `room` counts as `room`.
  """
  starts = [0]
  while starts[-1] + room < count:
    starts.append(starts[-1] + min(stride, room))
  parts = [(start, min(start + room, count)) for start in starts]
  # Context is the smaller number of tokens on a token's sides, plus 1% of the
  # part's length (google/bert). The first of equal parts wins.
  best, scores = np.zeros(count, np.int32), np.full(count, -1.0)
  for number, (start, stop) in enumerate(parts):
    inside = np.arange(stop - start)
    context = np.minimum(inside, inside[::-1]) + 0.01 * (stop - start)
    better = context > scores[start:stop]
    best[start:stop][better] = number
    scores[start:stop][better] = context[better]
  for number, (start, stop) in enumerate(parts):
    yield start, stop, best[start:stop] == number
