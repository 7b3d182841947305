"""Tokens with the characters of the text that they come from.

Answers are cut from the text itself, whatever the tokenizer did to case,
accents and spaces. Tokenizers drop characters: combining marks (uncased), soft
hyphens, joiners, marks of direction, spaces. `encode_with_spans` leaves them
out; `with_dropped` adds those that a reader counts to a token.
"""

from typing import NamedTuple

import numpy as np

import tokenization
from tokenization import SENTENCEPIECE_SPACE


class TokenSpans(NamedTuple):
  """int32 arrays [tokens]: token i is from text[starts[i] : ends[i]].

  A SentencePiece token that is only a space has no characters: start == end.
  """

  ids: np.ndarray
  starts: np.ndarray
  ends: np.ndarray


def encode_with_spans(tokenizer, text: str) -> TokenSpans:
  """`tokenizer` is a `tokenization.Encoder`."""
  if isinstance(tokenizer, tokenization.SentencePieceEncoder):
    return _of_sentencepiece(tokenizer, text)
  return _of_wordpiece(tokenizer, text)


def with_dropped(text: str, spans: TokenSpans) -> TokenSpans:
  """Adds dropped characters to the spans of `encode_with_spans`.

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


def _as_arrays(spans: list) -> TokenSpans:
  columns = np.array(spans, np.int32).reshape(-1, 3).T
  return TokenSpans(*columns)


def _of_wordpiece(tokenizer, text: str) -> TokenSpans:
  words = tokenizer.split_words(text)
  lengths = {}  # character -> number of characters that it becomes in words
  for char in set(text):
    lengths[char] = len("".join(tokenizer.split_words(char)))
  # Position in the text of each of the words' characters.
  places = np.repeat(np.arange(len(text)), [lengths[char] for char in text])
  if len(places) != sum(map(len, words)):
    return _word_by_word(tokenizer, text)
  spans, begin = [], 0
  for word in words:
    ids = tokenizer.pieces_of(word)
    sizes = [len(tokenizer.tokens[i].removeprefix("##")) for i in ids]
    if sum(sizes) != len(word):  # the word is unknown
      ids, sizes = ids[:1], [len(word)]
    for token, size in zip(ids, sizes, strict=True):
      spans.append((token, places[begin], places[begin + size - 1] + 1))
      begin += size
  return _as_arrays(spans)


def _word_by_word(tokenizer, text: str) -> TokenSpans:
  """If neighbours change a character: all tokens of a word have its span."""
  spans, end = [], 0
  for word in text.split():
    start = text.index(word, end)
    end = start + len(word)
    for part in tokenizer.split_words(word):
      for token in tokenizer.pieces_of(part):
        spans.append((token, start, end))
  return _as_arrays(spans)


def _of_sentencepiece(tokenizer, text: str) -> TokenSpans:
  places = list(range(len(text)))
  if tokenizer.do_lower_case:
    places = np.repeat(places, [len(char.lower()) for char in text]).tolist()
  places.append(len(text))

  def shows(token: int) -> bool:
    return tokenizer.tokens[token].strip(SENTENCEPIECE_SPACE) != ""

  kept = set()  # characters that tokens show
  for char in set(text):
    if any(shows(token) for token, *_ in tokenizer.encode_spans(char)):
      kept.add(char)
  spans = []
  for token, begin, end in tokenizer.encode_spans(text):
    # A piece may begin with the space before its word. If a character gives
    # several pieces (an ellipsis gives three), only the last has it.
    inner = []
    if shows(token):
      for place in places[begin : max(end, begin + 1)]:
        if place < len(text) and text[place] in kept:
          inner.append(place)
    first = inner[0] if inner else places[begin]
    spans.append((token, first, inner[-1] + 1 if inner else first))
  return _as_arrays(spans)
