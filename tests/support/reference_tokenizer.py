"""google/bert's BasicTokenizer as it works: character by character, then words.

The product's splits whole texts at once; it must give the same words.
"""

import itertools
import unicodedata

from text_encoders.characters import has_chinese


def _is_whitespace(char):
  return char in " \t\n\r" or unicodedata.category(char) == "Zs"


def _is_control(char):
  return char not in "\t\n\r" and unicodedata.category(char) in ("Cc", "Cf")


def _is_punctuation(char):
  is_ascii_sign = "!" <= char <= "~" and not char.isalnum()
  return is_ascii_sign or unicodedata.category(char)[0] == "P"


def _split_at_punctuation(word):
  for is_punctuation, group in itertools.groupby(word, key=_is_punctuation):
    chars = list(group)
    yield from chars if is_punctuation else ["".join(chars)]


def words(text: str, do_lower_case: bool = True) -> list[str]:
  """The words of a text."""
  kept = (c for c in text if c not in "\0\ufffd" and not _is_control(c))
  spaced = (" " if _is_whitespace(c) else c for c in kept)
  text = "".join(f" {c} " if has_chinese(c) else c for c in spaced)
  found = []
  for word in text.split():
    if do_lower_case:
      parts = unicodedata.normalize("NFD", word.lower())
      word = "".join(c for c in parts if unicodedata.category(c) != "Mn")
    found.extend(_split_at_punctuation(word))
  return " ".join(found).split()
