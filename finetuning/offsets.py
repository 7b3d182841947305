"""Tokens with the characters of the text that they come from.

Answers are cut from the text itself, whatever the tokenizer did to case,
accents and spaces. Tokenizers drop characters: combining marks (uncased), soft
hyphens, joiners, marks of direction, spaces. `Encoder.encode_with_spans`
leaves them out; `with_dropped` adds those that a reader counts to a token.
"""

import numpy as np

from tokenization import TokenSpans


def with_dropped(text: str, spans: TokenSpans) -> TokenSpans:
  """Adds dropped characters to the spans of `Encoder.encode_with_spans`.

  They join the token before them, as a combining mark joins its letter; after a
  space or at the beginning of the text, the token after them. Spaces, and
  dropped characters alone between spaces, join none.
  """
  count = len(text)
  depth = np.zeros(count + 1, np.int32)  # its sums: tokens over a character
  np.add.at(depth, spans.starts, 1)
  np.add.at(depth, spans.ends, -1)
  is_space = np.array([char.isspace() for char in text], bool)
  is_dropped = (np.cumsum(depth)[:count] == 0) & ~is_space
  positions = np.arange(count + 1)
  # Begin and end of the dropped characters around each position.
  first = np.where(np.append(False, is_dropped), 0, positions)
  first = np.maximum.accumulate(first)
  last = np.where(np.append(is_dropped, False), count, positions)
  last = np.minimum.accumulate(last[::-1])[::-1]
  opens = np.append(True, is_space)[first]
  first = np.where(opens, first, positions)
  return TokenSpans(
    spans.ids,
    first[spans.starts].astype(np.int32),
    last[spans.ends].astype(np.int32),
  )


def covering(spans: TokenSpans, first: int, last: int) -> tuple | None:
  """First and last token with characters in text[first:last], or None."""
  inside = np.flatnonzero(
    np.maximum(spans.starts, first) < np.minimum(spans.ends, last)
  )
  return (int(inside[0]), int(inside[-1])) if len(inside) else None
