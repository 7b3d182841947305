"""Filters of documents and lines by their looks, as C4, Gopher and FineWeb do.

A settings file lists them in the order in which they are applied:

  {"filters": [{"filter": "words", "min": 50, "max": 100000}, ...]}

Those of `_LINES` remove lines, "citations" takes marks out of lines, and those
of `_DOCUMENTS` measure a document, which is removed if a number is below `min`
or above `max`. configs/filters has what was published. Words are what stands
between spaces, so filters that count them are for languages that have spaces.
"""

import dataclasses
import functools
import html
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from common import errors, input_files, json_files
from data import text_files

_ROOT = os.path.dirname(os.path.dirname(__file__))
_FOLDER = os.path.join(_ROOT, "configs", "filters")
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
_GOPHERS_STOP_WORDS = "the be to of and that have with".split()
_LETTER = re.compile(r"[^\W\d_]")
_WORD = re.compile(r"\w+")
_LANGUAGE_CHARS = 2000  # a walk over bytes in Python: more is slow
_EXAMPLES, _EXAMPLE_CHARS = 3, 200  # shown of each filter


class _Document:
  """A text, seen in the ways that filters need; each is found once."""

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
  def _word_ids(self) -> np.ndarray:
    """Equal words have the same one, the place of the first."""
    places = range(len(self.words))
    firsts: dict[str, int] = {}
    ids = map(firsts.setdefault, self.words, places)
    return np.fromiter(ids, np.int64, len(places))

  @functools.cached_property
  def _recurring(self) -> list[tuple[np.ndarray, np.ndarray]]:
    """What `recurring` found for 1 word, 2, and so on."""
    return [(np.arange(len(self.words)), self._word_ids)]

  def recurring(self, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of `size` words, 2 or more, that occur twice or more.

    Returns their places, and numbers that are the same for equal sequences.
    Few are looked at: the first words of a sequence that occurs twice do so.
    """
    found, ids = self._recurring, self._word_ids
    for shorter in range(len(found), size):
      places, numbers = found[-1]
      inner = places.searchsorted(len(ids) - shorter)
      places, numbers = places[:inner], numbers[:inner]
      found.append(_twice(places, numbers * len(ids) + ids[places + shorter]))
    return found[size - 1]

  def sequence_length(self, place: int, size: int) -> int:
    return len(" ".join(self.words[place : place + size]))


def _twice(places: np.ndarray, keys: np.ndarray) -> tuple:
  """(places, numbers below that of keys) of the keys that are there twice."""
  if not len(keys):
    return places, keys
  order = keys.argsort()
  ordered = keys[order]
  is_new = np.ones(len(keys) + 1, bool)
  np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:-1])
  again = order[~(is_new[:-1] & is_new[1:])]
  numbers = np.empty_like(keys)
  numbers[order] = is_new[:-1].cumsum() - 1
  again.sort()
  return places[again], numbers[again]


# What is measured -------------------------------------------------------------


def _line_share(is_so: Callable[[str], bool]) -> Callable[[_Document], float]:
  """The measure of the share of such lines."""
  return lambda d: sum(map(is_so, d.lines)) / max(1, len(d.lines))


def _repeated(items: Iterable[str]) -> list[str]:
  """Those that an earlier one equals."""
  seen: set[str] = set()
  # `add` returns None.
  return [item for item in items if item in seen or seen.add(item)]  # type: ignore[func-returns-value]


def _repeated_share(items: Sequence[str]) -> float:
  return len(_repeated(items)) / max(1, len(items))


def _repeated_characters(items: Sequence[str], document: _Document) -> float:
  return sum(map(len, _repeated(items))) / max(1, len(document.text))


def _letter_share(words: Sequence[str]) -> float:
  """The share of words with a letter."""
  rest = itertools.filterfalse(str.isalpha, words)
  without = sum(not _LETTER.search(word) for word in rest)
  return 1 - without / len(words) if words else 0.0


def _stop_words(
  document: _Document, words: Sequence[str] = _GOPHERS_STOP_WORDS
) -> float:
  """How many of the words occur, in small letters, capitals or with one."""
  found = set(document.words)
  forms = [(word, word.capitalize(), word.upper()) for word in words]
  return sum(not found.isdisjoint(form) for form in forms)


def _top_sequence(document: _Document, size: int) -> float:
  """The share of characters in the most frequent sequence of words, or 0."""
  places, numbers = document.recurring(size)
  if not len(places):
    return 0.0
  counts = np.bincount(numbers)[numbers]
  first = counts.argmax()
  length = document.sequence_length(places[first], size)
  return length * int(counts[first]) / len(document.text)


def _repeated_sequences(document: _Document, size: int) -> float:
  """The share of characters in sequences of words that an earlier one equals.

  Each character counts once.
  """
  places, numbers = document.recurring(size)
  seen, characters, next_place = set[int](), 0, 0
  for place, number in zip(places.tolist(), numbers.tolist(), strict=True):
    if number in seen and place >= next_place:
      characters += document.sequence_length(place, size)
      next_place = place + size
    seen.add(number)
  return characters / max(1, len(document.text))


def _listed_words(document: _Document, words: Sequence[str]) -> float:
  """How many of the words and phrases occur, without regard to case."""
  found = f" {' '.join(_WORD.findall(document.lower))} "
  return sum(f" {word} " in found for word in _listed(tuple(words)))


@functools.lru_cache(8)
def _listed(words: tuple[str, ...]) -> frozenset[str]:
  listed = (" ".join(_WORD.findall(word.lower())) for word in words)
  return frozenset(filter(None, listed))


def _language(document: _Document, code: str) -> float:
  """The probability of a language, by py3langid on the first characters."""
  found = dict(_language_model().rank(document.text[:_LANGUAGE_CHARS]))
  if code not in found:
    raise errors.DataError(
      f"the filter language knows no {code}, but {', '.join(sorted(found))}"
    )
  return found[code]


@functools.cache
def _language_model():
  try:
    from py3langid import langid
  except ImportError as e:
    raise errors.UserError(
      "the filter language needs py3langid: pip install -r "
      "requirements/text.txt"
    ) from e
  return langid.LanguageIdentifier.from_model_file(
    langid.MODEL_FILE, norm_probs=True
  )


class _Measure(NamedTuple):
  """A number of a document; keywords are options of the filter."""

  of: Callable[..., float]
  options: dict[str, Any] = {}  # names and types
  # For one of lines: no line of a document has more than this.
  most: Callable[[_Document], float] = lambda d: math.inf


_DOCUMENTS = {
  "lines": _Measure(lambda d: len(d.lines)),
  "words": _Measure(lambda d: len(d.words)),
  "mean_word_length": _Measure(
    lambda d: sum(map(len, d.words)) / max(1, len(d.words))
  ),
  "sentences": _Measure(
    lambda d: len(d.lines) + len(_SENTENCE_BREAK.findall(d.text))
  ),
  "hashes_per_word": _Measure(
    lambda d: d.text.count("#") / max(1, len(d.words))
  ),
  "ellipses_per_word": _Measure(
    lambda d: sum(map(d.text.count, _ELLIPSIS)) / max(1, len(d.words))
  ),
  "bullet_lines": _Measure(_line_share(lambda s: s.startswith(_BULLETS))),
  "ellipsis_lines": _Measure(_line_share(lambda s: s.endswith(_ELLIPSIS))),
  "words_with_letters": _Measure(lambda d: _letter_share(d.words)),
  "stop_words": _Measure(_stop_words, {"words?": [str]}),
  "punctuated_lines": _Measure(_line_share(lambda s: s.endswith(_TERMINAL))),
  "short_lines": _Measure(
    lambda d, characters=30: _line_share(lambda s: len(s) <= characters)(d),
    {"characters?": range(1, 1 << 20)},
  ),
  "lines_per_word": _Measure(lambda d: len(d.lines) / max(1, len(d.words))),
  "repeated_lines": _Measure(lambda d: _repeated_share(d.lines)),
  "repeated_line_characters": _Measure(
    lambda d: _repeated_characters(d.lines, d)
  ),
  "repeated_paragraphs": _Measure(lambda d: _repeated_share(d.paragraphs)),
  "repeated_paragraph_characters": _Measure(
    lambda d: _repeated_characters(d.paragraphs, d)
  ),
  "top_sequence": _Measure(_top_sequence, {"size": range(2, 101)}),
  "repeated_sequences": _Measure(_repeated_sequences, {"size": range(2, 101)}),
  "text": _Measure(lambda d, text: d.lower.count(text.lower()), {"text": str}),
  "listed_words": _Measure(_listed_words, {"words": [str]}),
  "language": _Measure(_language, {"code": str}),
}
_LINES = {
  "line_punctuated": _Measure(
    lambda line: line.endswith(_TERMINAL) and not line.endswith(_ELLIPSIS)
  ),
  "line_words": _Measure(lambda line: len(line.split())),
  "line_longest_word": _Measure(
    lambda line: max(map(len, line.split())),
    most=lambda d: max(map(len, d.words), default=0),
  ),
  "line_policy": _Measure(
    lambda line: sum(map(line.lower().count, _POLICY)),
    most=lambda d: sum(map(d.lower.count, _POLICY)),
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
    """What stays of a document."""
    if self.min <= self.measure.of(document, **self.options) <= self.max:
      return document
    counts.add(self.label, document.text, documents=1)
    return None


class _LineFilter(_Filter):
  """One that removes lines."""

  def apply(self, document: _Document, counts: "Counts") -> _Document | None:
    if self.min == -math.inf and self.measure.most(document) <= self.max:
      return document
    low, of, high = self.min, self.measure.of, self.max
    removed = [line for line in document.lines if not low <= of(line) <= high]
    if not removed:
      return document
    for line in removed:
      counts.add(self.label, line, lines=1)
    gone = set(removed)
    return _Document([line for line in document.all_lines if line not in gone])


class _Citations:
  """The filter that takes marks such as [12] and [edit] out of lines."""

  label = "citations"

  def apply(self, document: _Document, counts: "Counts") -> _Document:
    if "[" not in document.text:
      return document
    lines = []
    for line in document.all_lines:
      marks = _CITATION_MARK.findall(line)
      if marks:
        counts.add(self.label, " ".join(marks), lines=1)
        line = _CITATION_MARK.sub("", line).strip()
      if line or not marks:
        lines.append(line)
    return _Document(lines)


def _filter(line: dict) -> _Filter | _Citations:
  """ValueError for a line that is none."""
  measures = {**_LINES, **_DOCUMENTS}
  json_files.expect(line, {"filter": (*measures, _Citations.label)})
  name = line["filter"]
  if name == _Citations.label:
    if len(line) > 1:
      raise ValueError(f"the filter {name} has no min, max or options")
    return _Citations()
  measure = measures[name]
  json_files.expect(line, measure.options | {"min?": float, "max?": float})
  known = {key.rstrip("?") for key in measure.options}
  options = {key: line[key] for key in line.keys() & known}
  unknown = line.keys() - {"filter", "min", "max"} - known
  if unknown or not line.keys() & {"min", "max"}:
    raise ValueError(
      f"the filter {name} has min, max or both"
      + "".join(f", {option}" for option in sorted(known))
      + "".join(f", but no {key}" for key in sorted(unknown))
    )
  short = [str(line[key]) for key in sorted(options) if key != "words"]
  bounds = line.get("min", -math.inf), line.get("max", math.inf)
  kind = _LineFilter if name in _LINES else _Filter
  # The label is a field of a table, too: without tabs and line ends.
  label = " ".join(" ".join([name, *short]).split())
  return kind(label, measure, options, *bounds)


@functools.cache
def _chain(source: str) -> list[_Filter | _Citations]:
  return list(map(_filter, _settings(source)))


def _settings(source: str) -> list[dict]:
  return json_files.parse(source, {"filters": [dict]})["filters"]


def _with_words(line: dict) -> dict:
  """A filter with the words of its file, which decide what stays."""
  if line.get("filter") != "listed_words" or "file" not in line:
    return line
  json_files.expect(line, {"file": str})
  path = line["file"]
  words = text_files.utf8_lines(input_files.read(path).splitlines(), path)
  rest = {key: value for key, value in line.items() if key != "file"}
  return rest | {"words": list(words)}


@dataclasses.dataclass(frozen=True)
class Filters:
  """The filters of a settings file."""

  source: str = '{"filters": []}'

  @classmethod
  def load(cls, name: str) -> "Filters":
    """Those of configs/filters/NAME.json, or of a file; "": none.

    DataError names what is wrong in it.
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
      lines = list(map(_with_words, _settings(content.decode())))
      source = json.dumps({"filters": lines})
      # A trial shows what is missing for it before any text is read.
      for one in _chain(source):
        one.apply(_Document(["A trial."]), Counts())
    except ValueError as e:
      raise errors.DataError(f"{path}: {e}") from e
    return cls(source)

  def clean(self, lines: list[str], counts: "Counts") -> tuple[list[str], str]:
    """(the lines that stay, the filter that removes the document or "").

    "" in `lines` is between paragraphs. What is removed goes to `counts`.
    """
    document = _Document(lines)
    for one in _chain(self.source):
      left = one.apply(document, counts)
      if left is None:
        return [], one.label
      document = left
    return list(document.all_lines), ""


# What was removed -------------------------------------------------------------


@dataclasses.dataclass
class Removed:
  """What a filter removed."""

  documents: int = 0
  lines: int = 0
  characters: int = 0
  examples: list[str] = dataclasses.field(default_factory=list)

  def add(self, other: "Removed") -> None:
    self.documents += other.documents
    self.lines += other.lines
    self.characters += other.characters
    self.examples = (self.examples + other.examples)[:_EXAMPLES]


class Counts(dict[str, Removed]):
  """What each filter removed, by its label."""

  def add(
    self, label: str, text: str, documents: int = 0, lines: int = 0
  ) -> None:
    example = text[:_EXAMPLE_CHARS]
    removed = Removed(documents, lines, len(text), [example])
    self.setdefault(label, Removed()).add(removed)

  def to_json(self) -> dict:
    return {label: dataclasses.asdict(self[label]) for label in self}


def total(parts: Iterable[dict]) -> Counts:
  """The sum of `Counts.to_json`; the examples are the first ones."""
  counts = Counts()
  for part in parts:
    for label, fields in part.items():
      counts.setdefault(label, Removed()).add(Removed(**fields))
  return Counts(sorted(counts.items()))


# The report -------------------------------------------------------------------

_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>Corpus</title>
<style>
body {{ font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; }}
table {{ border-collapse: collapse; margin-bottom: 2em; }}
td, th {{ padding: .2em 1em .2em 0; text-align: left; vertical-align: top; }}
td.number {{ text-align: right; }}
tr {{ border-bottom: 1px solid #ddd; }}
.text {{ white-space: pre-wrap; }}
</style>
<h1>Corpus</h1>
{sections}
"""
Row = tuple[str, ...]
Section = tuple[str, Row, Sequence[Row]]  # title, heads of the columns, rows


def report_page(sections: Iterable[Section]) -> str:
  """A page with tables, in HTML."""
  parts = []
  for title, heads, rows in sections:
    parts.append(f"<h2>{html.escape(title)}</h2>\n<table>")
    parts.append(_html_row("th", heads))
    parts += [_html_row("td", row) for row in rows]
    parts.append("</table>")
  return _PAGE.format(sections="\n".join(parts))


def _html_row(kind: str, cells: Row) -> str:
  return "<tr>" + "".join(
    f'<{kind} class="{_class_of(cell)}">{html.escape(cell)}</{kind}>'
    for cell in cells
  )


def _class_of(cell: str) -> str:
  return "number" if re.fullmatch("[0-9.,]+%?", cell) else "text"


def section(counts: Counts, documents: int) -> Section:
  """The table of what each filter removed, of so many documents."""
  rows: list[Row] = [
    (
      label,
      f"{removed.documents:,}",
      f"{removed.documents / max(1, documents):.2%}",
      f"{removed.lines:,}",
      f"{removed.characters:,}",
      "\n".join(removed.examples),
    )
    for label, removed in counts.items()
  ]
  heads = "filter", "documents", "share", "lines", "characters", "examples"
  return "Filters", heads, rows
