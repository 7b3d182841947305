"""Sentences of given words as inputs of the encoder, and back to words.

A word speaks through its first token. A long sentence becomes windows that
begin `doc_stride` tokens apart; each word speaks in the one where that token
has most context. A word of which the tokenizer makes nothing, as of a control
character, is silent.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from common.settings import in_group
from finetuning import windows

_data = in_group("Data")
SILENT = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowSettings:
  """How sentences are cut; flags of run_ner.py."""

  # fmt: off
  max_seq_length: int = _data(128,
    "Tokens of one window (a part of a sentence and two special tokens) at "
    "most, and of one record, which may hold several windows.", low=4)
  doc_stride: int = _data(64,
    "Tokens of a long sentence from the beginning of one window to that of the "
    "next.", low=1, high=1 << 20)
  # fmt: on


WINDOW_SETTINGS = tuple(f.name for f in dataclasses.fields(WindowSettings))


class Window(NamedTuple):
  """[CLS] a part of a sentence [SEP]."""

  sentence: int  # its number
  ids: np.ndarray  # int32 [n]
  segments: np.ndarray  # int32 [n], all 0
  words: np.ndarray  # int32 [n]: number of the word that speaks here, else -1

  @property
  def spoken(self) -> np.ndarray:
    """Numbers of the words that speak in this window."""
    return self.words[self.words >= 0]


def encode_sentences(
  tokenizer, sentences: Iterable[Sequence[str]], settings: WindowSettings
) -> list[Window]:
  """All windows in order; `tokenizer` is a `tokenization.Encoder`."""
  # A word's tokens are those that it has after a space inside of a text.
  tokens_of = functools.cache(lambda word: tokenizer.encode_rest(f" {word}"))
  room = settings.max_seq_length - 2
  found = []
  for number, words in enumerate(sentences):
    tokens = [tokens_of(word) for word in words]
    ids = np.concatenate([np.zeros(0, np.int32), *tokens])
    speaks = np.full(len(ids), -1, np.int32)
    first = 0
    for word, of_word in enumerate(tokens):
      speaks[first : first + 1] = word  # of silent words the next is here
      first += len(of_word)
    for start, stop, is_best in windows.parts_of(
      len(ids), room, settings.doc_stride
    ):
      inside = np.where(is_best, speaks[start:stop], -1)
      joined = windows.join(tokenizer, ids[start:stop])
      found.append(
        Window(number, *joined, np.pad(inside, 1, constant_values=-1))
      )
  return found


def values_of_words(
  counts: Sequence[int],
  found: Sequence[Window],
  values: Iterable[np.ndarray],
) -> list[np.ndarray]:
  """[words] of each sentence, from the `values` [n] of each window's tokens.

  `counts` are the sentences' numbers of words. A silent word has SILENT.
  """
  of_words = [np.full(count, float(SILENT)) for count in counts]
  for window, of_window in zip(found, values, strict=True):
    of_words[window.sentence][window.spoken] = of_window[window.words >= 0]
  return of_words
