"""Prose to sentences: wrapped lines are joined, then a language's rules split.

Only a guess can tell whether a line goes on in the next one; Chinese, which has
neither spaces nor capitals, needs a guess of its own.
"""

import unicodedata
from collections.abc import Iterable, Iterator

from text_encoders.characters import has_chinese

MAX_PARAGRAPH = 2 << 20  # characters; longer ones of prose or JSON are cut
_UNFINISHED = tuple(",;，、；")  # at its end: a line continues in the next one
_HEADLINE = 20  # Chinese characters: shorter lines were not wrapped


def sentences(lines: Iterable[str], language: str) -> Iterator[str]:
  """Stripped lines of prose, wrapped or not, to sentences; "" stays.

  A line continues in the next one if it ends in a comma or the like, or if it
  ends without punctuation and the next starts with a small letter or, after a
  Chinese line too long for a headline, a Chinese one. Without a language, lines
  are sentences.
  """
  if not language:
    yield from lines
    return
  for paragraph in _paragraphs(lines):
    if paragraph:
      yield from split_sentences(paragraph, language)
    else:
      yield ""


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
  parts: list[str] = []  # of the paragraph so far
  size = 0
  # Lines are joined while they continue; a paragraph without end is cut.
  for line in lines:
    joint = None
    if line and 0 < size < MAX_PARAGRAPH:
      joint = _joint(parts[-1], size, line)
    if joint is None:
      if parts:
        yield "".join(parts)
      parts, size = [line], len(line)
    else:
      parts += joint, line
      size += len(joint) + len(line)
  if parts:
    yield "".join(parts)


def _joint(line: str, size: int, following: str) -> str | None:
  """The text between two lines of a sentence, or None if they are apart."""
  between = "" if has_chinese(following[0]) else " "
  if line.endswith(_UNFINISHED):
    return between
  ends_in_a_word = unicodedata.category(line[-1])[0] in "LN"
  if not ends_in_a_word:
    return None
  if has_chinese(line[-1]):
    return "" if has_chinese(following[0]) and size >= _HEADLINE else None
  return " " if following[0].islower() else None


def split_sentences(text: str, language: str = "en") -> list[str]:
  """The stripped sentences of a paragraph; line ends count as spaces."""
  # Imported here, because only prose needs it.
  import sentencex

  sentences = sentencex.segment(language, " ".join(text.split()))
  return [s.strip() for s in sentences if s.strip()]
