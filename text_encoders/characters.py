"""Characters as google/bert classifies them, by Python's `unicodedata`."""

import re
import string
import unicodedata

# google/bert's "CJK character": the Unified Ideographs, extensions A to E and
# the compatibility blocks, but not Hangul, Hiragana or Katakana.
_CHINESE = re.compile(
  "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
  "\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f]"
)


def has_chinese(text: str) -> bool:
  """Whether google/bert takes a character of a text for Chinese."""
  return bool(_CHINESE.search(text))


def letters_of(text: str) -> int:
  """The number of characters that are no space."""
  return len(text) - sum(map(text.count, " \t\xa0\u3000"))


def spelt_letters(word: str) -> int:
  """The letters of a text that a word, or a piece of one, stands for."""
  # Lower-casing takes a syllable of Hangul apart: its first part counts.
  return letters_of(re.sub("[\u1160-\u11ff]", "", word))


def without_surrogates(text: str) -> str:
  """A lone surrogate, which UTF-8 does not have, becomes "?"."""
  return text.encode("utf-8", "replace").decode()


def is_whitespace(char: str) -> bool:
  """Whether google/bert splits words there."""
  return char in "\t\n\r" or unicodedata.category(char) == "Zs"


def is_control(char: str) -> bool:
  """Whether google/bert drops the character."""
  return char not in "\t\n\r" and unicodedata.category(char) in ("Cc", "Cf")


def is_punctuation(char: str) -> bool:
  """Unicode's punctuation, and ASCII's symbols such as $, ^ and `."""
  return char in string.punctuation or unicodedata.category(char)[0] == "P"
