"""Tokens of a text with the characters that each is from.

The ids are the encoder's own; an answer can then be cut out of the text as it
stands, whatever the tokenizer did to case, accents and spaces.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import tokenization


class TokenSpans(NamedTuple):
  """int32 arrays [tokens]: token i is from text[starts[i] : ends[i]]."""

  ids: np.ndarray
  starts: np.ndarray
  ends: np.ndarray


def encode_with_spans(tokenizer, text: str) -> TokenSpans:
  """The tokens of a text, with their characters.

  Args:
    tokenizer: a `tokenization.Encoder`.
    text: any text.
  """
  if isinstance(tokenizer, tokenization.SentencePieceEncoder):
    return _of_sentencepiece(tokenizer, text)
  return _of_wordpiece(tokenizer, text)


def _as_arrays(spans: list) -> TokenSpans:
  columns = zip(*spans, strict=True) if spans else ([], [], [])
  return TokenSpans(*(np.array(list(c), np.int32) for c in columns))


def _of_wordpiece(tokenizer, text: str) -> TokenSpans:
  words = tokenizer.split_words(text)
  places = _places(tokenizer.split_words, text)
  if len(places) != sum(map(len, words)):
    return _word_by_word(tokenizer, text)
  spans, begin = [], 0
  for word in words:
    ids = tokenizer.pieces_of(word)
    lengths = [len(tokenizer.tokens[i].removeprefix("##")) for i in ids]
    if sum(lengths) != len(word):  # the word is unknown
      ids, lengths = ids[:1], [len(word)]
    for token, length in zip(ids, lengths, strict=True):
      first, last = places[begin], places[begin + length - 1]
      spans.append((token, first, last + 1))
      begin += length
  return _as_arrays(spans)


class _Kept(dict):
  """Character -> what is left of it in a word."""

  def __init__(self, split: Callable):
    super().__init__()
    self._split = split

  def __missing__(self, char):
    self[char] = kept = len("".join(self._split(char)))
    return kept


def _places(split: Callable, text: str) -> list[int]:
  """The character of the text that each character of its words is from."""
  kept = _Kept(split)
  return [i for i, char in enumerate(text) for _ in range(kept[char])]


def _word_by_word(tokenizer, text: str) -> TokenSpans:
  """Where characters change with those around them: words share a span."""
  spans, end = [], 0
  for word in text.split():
    start = text.index(word, end)
    end = start + len(word)
    for part in tokenizer.split_words(word):
      spans += [(token, start, end) for token in tokenizer.pieces_of(part)]
  return _as_arrays(spans)


def _of_sentencepiece(tokenizer, text: str) -> TokenSpans:
  places = list(range(len(text)))
  if tokenizer.do_lower_case:
    places = [i for i, char in enumerate(text) for _ in char.lower()]
  spans = []
  for token, begin, end in tokenizer.encode_spans(text):
    # A piece may begin with the space before its word.
    chars = [places[i] for i in range(begin, min(end, len(places)))]
    inner = [i for i in chars if not text[i].isspace()] or chars
    first = inner[0] if inner else min(begin, len(text))
    spans.append((token, first, inner[-1] + 1 if inner else first))
  return _as_arrays(spans)
