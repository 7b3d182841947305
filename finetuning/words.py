"""Words of sentences as inputs of the encoder, and a value for each word."""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from finetuning.windows import join, parts_of

SILENT = -1  # instead of a word, of a label
WORD_STRIDE = 64  # default of a long sentence's doc_stride


class WordWindow(NamedTuple):
  """[CLS] a part of a sentence [SEP]."""

  sentence: int  # its number
  ids: np.ndarray  # int32 [n]
  segments: np.ndarray  # int32 [n], all 0
  words: np.ndarray  # int32 [n]: the word that a token speaks for, or SILENT


def tokens_in_text(
  tokenizer, text: str, spans: Sequence[tuple[int, int]]
) -> list[np.ndarray]:
  """The tokens of each word, at `spans` of its text, as the text has them."""
  tokens = tokenizer.encode_with_spans(text)
  # What is before a word belongs to the one before it.
  begins = np.array(spans, int).reshape(-1, 2)[1:, 0]
  parts = np.split(tokens.ids, np.searchsorted(tokens.starts, begins))
  return parts[: len(spans)]


def encode_words(
  tokenizer,
  sentences: Iterable[Sequence],
  max_seq_length: int,
  doc_stride: int,
  space_before: bool = True,
) -> list[WordWindow]:
  """Windows in order; words are numbered through all sentences.

  A sentence has its words as str, or those of `tokens_in_text`. A word speaks
  through its first token, in the window with the most context for it. Without
  `space_before` a word has the tokens that transformers' tokenizer gives it
  where words come one by one. A word without tokens, such as a control
  character, is silent. So is the number after a sentence's last word, which
  marks its end.
  """

  @functools.cache
  def of_word(word: str) -> np.ndarray:
    return tokenizer.encode_word(word, space_before)

  # `first_word` is the number of the sentence's first word in the whole set.
  windows, first_word = [], 0
  before, after = tokenizer.template(1)
  around = len(before), len(after)
  for number, words in enumerate(sentences):
    tokens = [of_word(w) if isinstance(w, str) else w for w in words]
    ids = np.concatenate([np.zeros(0, np.int32), *tokens])
    lengths = np.array([*map(len, tokens)], int)
    # The first token of each word that has any gets the word's number.
    speaks = np.full(len(ids), SILENT)
    firsts = (np.cumsum(lengths) - lengths)[lengths > 0]
    speaks[firsts] = first_word + np.flatnonzero(lengths)
    for start, stop, is_best in parts_of(
      len(ids), max_seq_length - sum(around), doc_stride
    ):
      inside = np.where(is_best, speaks[start:stop], SILENT)
      # Special tokens speak for no word.
      padded = np.pad(inside, around, constant_values=SILENT)
      joined = join(tokenizer, ids[start:stop])
      windows.append(WordWindow(number, *joined, padded))
    first_word += len(words) + 1
  return windows


def of_words(
  count: int, words: np.ndarray, of_tokens: np.ndarray
) -> np.ndarray:
  """float [count]: each word's value, from those of the tokens in windows.

  `words` has the shape of `of_tokens`, and is as in `WordWindow`. A word that
  no token speaks for has SILENT.
  """
  values = np.full(count, float(SILENT))
  speaks = words != SILENT
  values[words[speaks]] = of_tokens[speaks]
  return values
