"""Filters that remove text of low quality, as C4, Gopher and FineWeb do.

A settings file lists them in the order in which they are applied:

  {"filters": [{"filter": "words", "min": 50, "max": 100000}, ...]}

Filters of `_LINES` remove lines, "citations" takes marks out of lines, and
filters of `_DOCUMENTS` remove a document if a number of it is below `min` or
above `max`. configs/filters has the published ones. Words are separated by
spaces, so filters that count them are for languages that have spaces.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from common import environment, errors, input_files, json_files
from corpus import text_files

_FOLDER = os.path.join(environment.ROOT, "configs", "filters")
_TERMINAL = tuple(".?!\"'”’。？！؟۔।")
# Between two sentences of a line; Chinese has no space there.
_SENTENCE_BREAK = re.compile(
  r"""[.!?。？！](?:["'”’)]*[ ]+["'“‘(]*[^\W_a-z]|(?<=[。？！])(?=.))"""
)
_PARAGRAPH_BREAK = re.compile(r"\n\n+")
# Wikipedia's, as C4's code has them.
_CITATION_MARK = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_ELLIPSIS = ("...", "…")
_BULLETS = ("•", "-", "*", "‣", "●")
_POLICY = (
  "javascript,terms of use,privacy policy,cookie policy,uses cookies,"
  "use of cookies,use cookies"
).split(",")
# Languages without spaces, and the filters whose words stand between spaces.
_UNSPACED = ("zh", "ja", "th", "lo", "km", "my")
_COUNT_WORDS = (
  "words line_words mean_word_length stop_words listed_words top_sequence "
  "repeated_sequences hashes_per_word ellipses_per_word lines_per_word"
).split()
_HTML = re.compile(
  r"</?(p|a|b|i|br|div|span|td|tr|li|ul|h\d|img|script|style)\b[^<>]*>"
  r"|&(nbsp|amp|lt|gt|quot|#\d+);",
  re.I,
)
_MOJIBAKE = re.compile("\ufffd|\xc3[\x80-\xbf]|\xc2[\xa0-\xbf]|\xe2\u20ac")
# Of text that is no prose, or was read in a wrong encoding; it only counts.
# Most documents have none of the first letters, which are looked for first.
_SIGNS = {"HTML": ("<&", _HTML), "mojibake": ("\ufffd\xc2\xc3\xe2", _MOJIBAKE)}
_GOPHERS_STOP_WORDS = "the be to of and that have with".split()
_NO_LETTERS = re.compile(r"[\W\d_]+")
_LETTER = re.compile(r"[^\W\d_]")
_WORD = re.compile(r"\w+")
_LANGUAGE_CHARS = 2000  # the library walks over bytes in Python: more is slow
_EXAMPLES, _EXAMPLE_CHARS = 3, 200  # shown of each filter
# Of the text that a filter removed.
NOTHING = {"documents": 0, "lines": 0, "characters": 0, "examples": []}


class _Document:
  """A text in the forms that filters need; each is made once."""

  def __init__(self, lines: Sequence[str]):
    self.all_lines = lines  # "" between paragraphs

  @functools.cached_property
  def lines(self) -> list[str]:
    return list(filter(None, self.all_lines))

  @functools.cached_property
  def text(self) -> str:
    return "\n".join(self.all_lines)

  @functools.cached_property
  def lower(self) -> str:
    return self.text.lower()

  @functools.cached_property
  def paragraphs(self) -> list[str]:
    return _PARAGRAPH_BREAK.split(self.text.strip("\n"))

  @functools.cached_property
  def words(self) -> list[str]:
    return self.text.split()

  @functools.cached_property
  def _recurring(self) -> list[tuple[np.ndarray, np.ndarray]]:
    """The results of `recurring` for 1 word, 2, and so on."""
    # A word's id is the index of its first occurrence.
    indices, firsts = np.arange(len(self.words)), dict[str, int]()
    ids = map(firsts.setdefault, self.words, range(len(indices)))
    return [(indices, np.fromiter(ids, np.int64, len(indices)))]

  def recurring(self, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The n-grams of `size` words, 2 or more, that occur twice or more.

    Returns the indices of their first words, ascending, and numbers that are
    the same for equal n-grams.
    """
    results, (_, ids) = self._recurring, self._recurring[0]
    for shorter in range(len(results), size):
      # Only candidates are checked: a repeated n-gram begins with a repeated
      # (n-1)-gram. Its key is that one's number and the id of the last word.
      indices, numbers = results[-1]
      inside = indices.searchsorted(len(ids) - shorter)
      indices, numbers = indices[:inside], numbers[:inside]
      keys = numbers * len(ids) + ids[indices + shorter]
      _, numbers, counts = np.unique(
        keys, return_inverse=True, return_counts=True
      )
      again = counts[numbers] > 1
      results.append((indices[again], numbers[again]))
    return results[size - 1]

  def ngram_length(self, index: int, size: int) -> int:
    """The characters of `size` words from `index` on."""
    return len(" ".join(self.words[index : index + size]))


# What is measured -------------------------------------------------------------


class _Measure(NamedTuple):
  """A number of a document, or of a line."""

  of: Callable[..., float]
  options: dict[str, Any] = {}  # of the filter, with their types
  # A number of a document that is an upper bound of its lines' numbers.
  bound: Callable[[_Document], float] | None = None


def _signs_per_word(*signs: str) -> _Measure:
  def share(document: _Document) -> float:
    return sum(map(document.text.count, signs)) / max(1, len(document.words))

  return _Measure(share)


def _share_of_lines(
  test: Callable[..., bool], options: dict | None = None
) -> _Measure:
  """The share of lines that pass test(line, **options)."""

  def share(document: _Document, **values: Any) -> float:
    count = 0
    for line in document.lines:
      count += test(line, **values)
    return count / max(1, len(document.lines))

  return _Measure(share, options or {})


def _repeated(part: str, in_characters: bool = False) -> _Measure:
  """The share of lines or paragraphs that an earlier one equals."""

  def share(document: _Document) -> float:
    texts = getattr(document, part)
    once = set(texts)
    if in_characters:
      repeated = len("".join(texts)) - len("".join(once))
      return repeated / max(1, len(document.text))
    return (len(texts) - len(once)) / max(1, len(texts))

  return _Measure(share)


def _words_with_letters(document: _Document) -> float:
  words, count = document.words, 0
  for word in words:
    count += word.isalpha() or bool(_LETTER.search(word))
  return count / max(1, len(words))


def _stop_words(
  document: _Document, words: Sequence[str] = _GOPHERS_STOP_WORDS
) -> float:
  """How many of the words occur, in small letters, capitals or with one."""
  known, count = set(document.words), 0
  for word in words:
    count += not known.isdisjoint((word, word.capitalize(), word.upper()))
  return count


def _top_ngram(document: _Document, size: int) -> float:
  """The share of characters in the most frequent n-gram of words, or 0."""
  indices, numbers = document.recurring(size)
  if not len(indices):
    return 0.0
  counts = np.bincount(numbers)[numbers]
  first = counts.argmax()
  length = document.ngram_length(indices[first], size)
  return length * int(counts[first]) / len(document.text)


def _repeated_ngrams(document: _Document, size: int) -> float:
  """The share of characters in n-grams of words that an earlier one equals."""
  indices, numbers = document.recurring(size)
  seen, characters, end = set[int](), 0, 0
  for index, number in zip(indices.tolist(), numbers.tolist(), strict=True):
    # Each character counts once, also where n-grams overlap.
    if number in seen and index >= end:
      characters += document.ngram_length(index, size)
      end = index + size
    seen.add(number)
  return characters / max(1, len(document.text))


def _listed_words(document: _Document, words: Sequence[str]) -> float:
  """How many of the words and phrases occur, without regard to case."""
  text = _spaced_words(document.lower)
  return sum(map(text.__contains__, _listed(tuple(words))))


@functools.lru_cache(8)
def _listed(words: tuple[str, ...]) -> frozenset[str]:
  listed = {_spaced_words(word.lower()) for word in words}
  return frozenset(listed - {_spaced_words("")})


def _spaced_words(text: str) -> str:
  return f" {' '.join(_WORD.findall(text))} "


def _language(document: _Document, code: str) -> float:
  """The probability of a language, by py3langid on the first characters."""
  shares = dict(_language_model().rank(document.text[:_LANGUAGE_CHARS]))
  if code not in shares:
    raise errors.DataError(
      f"the filter language knows no {code}, but {', '.join(sorted(shares))}"
    )
  return shares[code]


@functools.cache
def _language_model():
  with errors.needing("text", "the filter language"):
    from py3langid.langid import MODEL_FILE, LanguageIdentifier
  return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def _line(form: str, split: Callable, function: Callable) -> _Measure:
  """function(split(line)); the same of a document's `form` is the bound."""
  return _Measure(
    lambda line: function(split(line)),
    bound=lambda document: function(getattr(document, form)),
  )


_NGRAM_SIZE = {"size": range(2, 101)}
_DOCUMENTS = {
  "lines": _Measure(lambda document: len(document.lines)),
  "words": _Measure(lambda document: len(document.words)),
  "mean_word_length": _Measure(
    lambda document: sum(map(len, document.words)) / max(1, len(document.words))
  ),
  "sentences": _Measure(
    lambda document: (
      len(document.lines) + len(_SENTENCE_BREAK.findall(document.text))
    )
  ),
  "hashes_per_word": _signs_per_word("#"),
  "ellipses_per_word": _signs_per_word(*_ELLIPSIS),
  "bullet_lines": _share_of_lines(lambda line: line.startswith(_BULLETS)),
  "ellipsis_lines": _share_of_lines(lambda line: line.endswith(_ELLIPSIS)),
  "punctuated_lines": _share_of_lines(lambda line: line.endswith(_TERMINAL)),
  "short_lines": _share_of_lines(
    lambda line, characters=30: len(line) <= characters,
    {"characters?": range(1, 1 << 20)},
  ),
  "lines_per_word": _Measure(
    lambda document: len(document.lines) / max(1, len(document.words))
  ),
  "words_with_letters": _Measure(_words_with_letters),
  "stop_words": _Measure(_stop_words, {"words?": [str]}),
  "repeated_lines": _repeated("lines"),
  "repeated_line_characters": _repeated("lines", in_characters=True),
  "repeated_paragraphs": _repeated("paragraphs"),
  "repeated_paragraph_characters": _repeated("paragraphs", in_characters=True),
  "top_sequence": _Measure(_top_ngram, _NGRAM_SIZE),
  "repeated_sequences": _Measure(_repeated_ngrams, _NGRAM_SIZE),
  "text": _Measure(
    lambda document, text: document.lower.count(text.lower()), {"text": str}
  ),
  "listed_words": _Measure(_listed_words, {"words": [str]}),
  "language": _Measure(_language, {"code": str}),
}
_LINES = {
  # An ellipsis ends no sentence, though it ends in a mark that does.
  "line_punctuated": _Measure(
    lambda line: line.endswith(_TERMINAL) and not line.endswith(_ELLIPSIS)
  ),
  "line_words": _Measure(lambda line: len(line.split())),
  "line_longest_word": _line(
    "words", str.split, lambda words: max(map(len, words), default=0)
  ),
  "line_policy": _line(
    "lower", str.lower, lambda text: sum(map(text.count, _POLICY))
  ),
}


# Filters ----------------------------------------------------------------------


class _Filter(NamedTuple):
  """A line of a settings file."""

  label: str  # its name and options
  measure: _Measure
  options: dict
  min: float
  max: float

  def apply(self, document: _Document, counts: "Counts") -> _Document | None:
    """The document, or None if it is removed."""
    if self.min <= self.measure.of(document, **self.options) <= self.max:
      return document
    counts.add(self.label, 1, 0, document.text)
    return None

  def bounds(self) -> str:
    """What it lets pass, for people."""
    return f"{self.min:g} to {self.max:g}"


class _LineFilter(_Filter):
  def apply(self, document: _Document, counts: "Counts") -> _Document | None:
    low, high, (of, _, bound) = self.min, self.max, self.measure
    # Most documents pass without a look at each line.
    if low == -math.inf and bound and bound(document) <= high:
      return document
    left = []
    for line in document.all_lines:
      if not line or low <= of(line) <= high:
        left.append(line)
      else:
        counts.add(self.label, 0, 1, line)
    return document if len(left) == len(document.all_lines) else _Document(left)


class _Citations:
  """The filter that takes marks such as [12] and [edit] out of lines."""

  label = "citations"

  def bounds(self) -> str:
    return ""

  def apply(self, document: _Document, counts: "Counts") -> _Document:
    if "[" not in document.text:
      return document
    lines = []
    for line in document.all_lines:
      marks = _CITATION_MARK.findall(line)
      if marks:
        counts.add(self.label, 0, 1, " ".join(marks))
        line = _CITATION_MARK.sub("", line).strip()
      if line or not marks:
        lines.append(line)
    return _Document(lines)


def _filter(line: dict) -> _Filter | _Citations:
  """The filter of a line of a settings file; ValueError if it is none."""
  measures = {**_LINES, **_DOCUMENTS}
  json_files.expect(line, {"filter": (*measures, _Citations.label)})
  name = line["filter"]
  if name == _Citations.label:
    if len(line) > 1:
      raise ValueError(f"the filter {name} has no min, max or options")
    return _Citations()
  measure = measures[name]
  json_files.expect(line, measure.options | {"min?": float, "max?": float})
  options = dict(line)
  del options["filter"]
  has_bound = "min" in options or "max" in options
  low, high = options.pop("min", -math.inf), options.pop("max", math.inf)
  known = [key.removesuffix("?") for key in measure.options]
  unknown = sorted(options.keys() - set(known))
  if unknown or not has_bound:
    takes = ", ".join([f"the filter {name} has min, max or both", *known])
    raise ValueError(", but no ".join([takes, *unknown]))
  label = name
  for key in known:
    if key != "words" and key in options:
      label += f" {options[key]}"
  kind = _LineFilter if name in _LINES else _Filter
  # The label is a field of a table, too: without tabs and line ends.
  return kind(" ".join(label.split()), measure, options, low, high)


@functools.cache
def _chain(source: str) -> list[_Filter | _Citations]:
  """The filters of a settings file's content."""
  lines = json_files.parse(source, {"filters": [dict]})["filters"]
  return [_filter(line) for line in lines]


@dataclasses.dataclass(frozen=True)
class Filters:
  """The filters of a settings file."""

  source: str = '{"filters": []}'

  @classmethod
  def load(cls, name: str, language: str = "en") -> "Filters":
    """The filters of configs/filters/NAME.json, or of a file; "": none.

    DataError for those that would remove all text of the language.
    """
    if not name:
      return cls()
    published = os.path.join(_FOLDER, f"{name}.json")
    path = published if os.path.exists(published) else name
    if not os.path.exists(path):
      names = ", ".join(sorted(os.listdir(_FOLDER))).replace(".json", "")
      raise errors.DataError(
        f"--filters={name}: no such file: give a settings file, or one of "
        + names
      )
    content = input_files.read(path)
    try:
      lines = json_files.parse(content.decode(), {"filters": [dict]})["filters"]
      for line in lines:
        _check_language(line, language)
        # The words decide what stays, so they replace the name of their file.
        if line.get("filter") == "listed_words" and "file" in line:
          json_files.expect(line, {"file": str})
          words = line.pop("file")
          raw = input_files.read(words).splitlines()
          line["words"] = list(text_files.utf8_lines(raw, words))
      source = json.dumps({"filters": lines})
      # A trial shows what is missing for it before any text is read.
      for one in _chain(source):
        one.apply(_Document(["A trial."]), Counts())
    except ValueError as e:
      raise errors.DataError(f"{path}: {e}") from e
    return cls(source)

  def bounds(self) -> Iterator[tuple[str, str]]:
    """The label and the bounds of each filter."""
    for one in _chain(self.source):
      yield one.label, one.bounds()

  def clean(self, lines: list[str], counts: "Counts") -> tuple[list[str], str]:
    """(the lines that stay, the filter that removes the document or "")."""
    document = _Document(lines)
    for one in _chain(self.source):
      left = one.apply(document, counts)
      if left is None:
        return [], one.label
      document = left
    return list(document.all_lines), ""


def _check_language(line: dict, language: str) -> None:
  """ValueError if a filter's words are of another language."""
  name, change = line.get("filter"), ""
  is_other = language in _UNSPACED and name in _COUNT_WORDS
  if name == "stop_words" and "words" not in line and language != "en":
    change = 'give it the "words" of your language, or '
  if name == "language" and language not in ("en", line.get("code")):
    change = f'give it "code": "{language}", or '
  if is_other or change:
    raise ValueError(
      f"the filter {name} is not for text of --language={language}: in a file "
      f"of your own {change}leave it out (docs/data.md)"
    )


def signs_of(lines: list[str], counts: "Counts") -> None:
  """Counts a text that passes with HTML or a wrong encoding in it."""
  text = "\n".join(lines)
  for label, (firsts, pattern) in _SIGNS.items():
    has_first = any(map(text.__contains__, firsts))
    if has_first and (match := pattern.search(text)):
      counts.add(label, 1, 0, text[max(0, match.start() - 40) :])


# What was removed -------------------------------------------------------------


class Counts(dict[str, dict]):
  """Counts and examples of removed text by the label of its filter; JSON.

  The examples are of different kinds, and from all over the text: those with
  the lowest hashes of their first letters.
  """

  def add(self, label: str, documents: int, lines: int, text: str) -> None:
    counts = [documents, lines, len(text), [text[:_EXAMPLE_CHARS]]]
    self.add_up({label: dict(zip(NOTHING, counts, strict=True))})

  def add_up(self, parts: dict[str, dict]) -> None:
    for label, counts in parts.items():
      total = self.setdefault(label, NOTHING.copy())
      for name, value in counts.items():
        total[name] = total[name] + value
      kinds = {_kind_of(text): text for text in reversed(total["examples"])}
      total["examples"] = [kinds[key] for key in sorted(kinds)[:_EXAMPLES]]


def _kind_of(text: str) -> bytes:
  """The same for texts that begin alike, but for numbers; as if by chance."""
  begin = _NO_LETTERS.sub("", text.lower())[:20]
  return hashlib.blake2b(begin.encode(), digest_size=8).digest()


def total(parts: Iterable[dict]) -> Counts:
  """The sum of counts."""
  counts = Counts()
  for part in parts:
    counts.add_up(part)
  return Counts(sorted(counts.items()))
