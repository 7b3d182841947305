"""Long texts as inputs of the encoder: google/bert's sliding window."""

from collections.abc import Iterator

import numpy as np

from records import instances


def join(tokenizer, *texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """int32 ids and segments of one text or two in the tokenizer's template.

  That is [CLS] a [SEP] or [CLS] a [SEP] b [SEP] if the tokenizer is BERT's.
  """
  ids, segments = instances.join(texts, tokenizer.template(len(texts)))
  return ids.astype(np.int32), segments.astype(np.int32)


def encode_pair(tokenizer, max_seq_length: int, *texts: np.ndarray) -> tuple:
  """`join` of one text or two, int [tokens], and how many tokens do not fit.

  The longer text of a pair loses its end, token by token, as in google/bert.
  """
  room = max_seq_length - sum(map(len, tokenizer.template(len(texts))))
  cut = max(0, sum(map(len, texts)) - room)
  first, *second = texts
  # The second one loses tokens first, if they are equal.
  second = [text[: max(room // 2, room - len(first))] for text in second]
  first = first[: room - sum(map(len, second))]
  return *join(tokenizer, first, *second), cut


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
