"""Filters of documents and lines by their looks, as C4, Gopher and FineWeb do.

A settings file lists them in the order in which they are applied:

  {"filters": [{"filter": "words", "min": 50, "max": 100000}, ...]}

Those of `_LINES` remove lines, those of `_DOCUMENTS` measure a document, which
is removed if a number is below `min` or above `max`. configs/filters has what
was published. Words are what stands between spaces, so filters that count them
are for languages that have spaces.
"""

import collections
import dataclasses
import functools
import html
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from common import errors, files, input_files, json_files

_FOLDER = os.path.join(
  os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
  "configs",
  "filters",
)
_TERMINAL = (".", "?", "!", '"', "'", "”", "’", "。", "？", "！")
_ELLIPSIS = ("...", "…")
_BULLETS = ("•", "-", "*", "‣", "●")
_POLICY = re.compile(
  "javascript|terms of use|privacy policy|cookie policy|uses cookies|"
  "use of cookies|use cookies",
  re.IGNORECASE,
)
_GOPHERS_STOP_WORDS = "the be to of and that have with".split()
_LETTER = re.compile(r"[^\W\d_]")
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
  def paragraphs(self) -> list[str]:
    return self.text.split("\n\n")

  @functools.cached_property
  def words(self) -> list[str]:
    return self.text.split()

  def sequences(self, size: int) -> list[str]:
    """All of `size` consecutive words."""
    shifted = [self.words[place:] for place in range(size)]
    return list(map(" ".join, zip(*shifted, strict=False)))


# What is measured -------------------------------------------------------------


def _share(is_so: Callable[[str], bool], items: Sequence[str]) -> float:
  return sum(map(is_so, items)) / len(items) if items else 0.0


def _repeated(items: Iterable[str]) -> list[str]:
  """Those that an earlier one equals."""
  seen: set[str] = set()
  # `add` returns None.
  return [item for item in items if item in seen or seen.add(item)]  # type: ignore[func-returns-value]


def _repeated_share(items: Sequence[str]) -> float:
  return len(_repeated(items)) / max(1, len(items))


def _repeated_characters(items: Sequence[str], document: _Document) -> float:
  return sum(map(len, _repeated(items))) / max(1, len(document.text))


def _top_sequence(document: _Document, size: int) -> float:
  """The share of characters in the most frequent sequence of words."""
  most = collections.Counter(document.sequences(size)).most_common(1)
  characters = sum(len(words) * count for words, count in most)
  return characters / max(1, len(document.text))


def _repeated_sequences(document: _Document, size: int) -> float:
  """The share of characters in sequences of words that an earlier one equals.

  Each character counts once.
  """
  seen, characters, next_place = set[str](), 0, 0
  for place, words in enumerate(document.sequences(size)):
    if words in seen and place >= next_place:
      characters += len(words)
      next_place = place + size
    seen.add(words)
  return characters / max(1, len(document.text))


def _language(document: _Document, code: str) -> float:
  """The probability of a language, by py3langid."""
  return dict(_language_model().rank(document.text)).get(code, 0.0)


@functools.cache
def _language_model():
  try:
    from py3langid import langid
  except ImportError as e:
    raise errors.UserError(
      "the filter language needs py3langid: pip install -r "
      "requirements/text.txt"
    ) from e
  return langid.LanguageIdentifier.from_pickled_model(
    langid.MODEL_FILE, norm_probs=True
  )


@functools.cache
def _words_of(path: str) -> frozenset[str]:
  with open(path, encoding="utf-8") as f:
    return frozenset(f.read().lower().split())


class _Measure(NamedTuple):
  """A number of a document; keywords are options of the filter."""

  of: Callable[..., float]
  options: dict[str, Any] = {}  # names and types


_DOCUMENTS = {
  "lines": _Measure(lambda d: len(d.lines)),
  "words": _Measure(lambda d: len(d.words)),
  "mean_word_length": _Measure(
    lambda d: sum(map(len, d.words)) / max(1, len(d.words))
  ),
  "sentence_ends": _Measure(lambda d: len(re.findall(r"[.!?。！？]", d.text))),
  "hashes_per_word": _Measure(
    lambda d: d.text.count("#") / max(1, len(d.words))
  ),
  "ellipses_per_word": _Measure(
    lambda d: sum(map(d.text.count, _ELLIPSIS)) / max(1, len(d.words))
  ),
  "bullet_lines": _Measure(
    lambda d: _share(lambda line: line.startswith(_BULLETS), d.lines)
  ),
  "ellipsis_lines": _Measure(
    lambda d: _share(lambda line: line.endswith(_ELLIPSIS), d.lines)
  ),
  "words_with_letters": _Measure(
    lambda d: _share(lambda word: bool(_LETTER.search(word)), d.words)
  ),
  "stop_words": _Measure(
    lambda d, words=_GOPHERS_STOP_WORDS: len(
      set(words) & set(d.text.lower().split())
    ),
    {"words?": [str]},
  ),
  "punctuated_lines": _Measure(
    lambda d: _share(lambda line: line.endswith(_TERMINAL), d.lines)
  ),
  "short_lines": _Measure(
    lambda d, characters=30: _share(
      lambda line: len(line) <= characters, d.lines
    ),
    {"characters?": int},
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
  "top_sequence": _Measure(_top_sequence, {"size": int}),
  "repeated_sequences": _Measure(_repeated_sequences, {"size": int}),
  "text": _Measure(
    lambda d, text: d.text.lower().count(text.lower()), {"text": str}
  ),
  "listed_words": _Measure(
    lambda d, file: len(_words_of(file) & set(d.text.lower().split())),
    {"file": str},
  ),
  "language": _Measure(_language, {"code": str}),
}
_LINES = {
  "line_punctuated": _Measure(
    lambda line: line.endswith(_TERMINAL) and not line.endswith(_ELLIPSIS)
  ),
  "line_words": _Measure(lambda line: len(line.split())),
  "line_longest_word": _Measure(lambda line: max(map(len, line.split()))),
  "line_policy": _Measure(lambda line: len(_POLICY.findall(line))),
}


# Filters ----------------------------------------------------------------------


class _Filter(NamedTuple):
  """A line of a settings file."""

  label: str  # its name and options
  of: Callable[..., float]
  options: dict
  min: float
  max: float

  def keeps(self, item: _Document | str) -> bool:
    return self.min <= self.of(item, **self.options) <= self.max


class _Chain(NamedTuple):
  lines: list[_Filter]
  documents: list[_Filter]


def _filter(line: dict) -> _Filter:
  """ValueError for a line that is none."""
  measures = {**_LINES, **_DOCUMENTS}
  json_files.expect(line, {"filter": tuple(measures)})
  name = line["filter"]
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
  words = [str(line[key]) for key in sorted(options)]
  bounds = line.get("min", -math.inf), line.get("max", math.inf)
  return _Filter(" ".join([name, *words]), measure.of, options, *bounds)


@functools.cache
def _chain(source: str) -> _Chain:
  filters = json_files.parse(source, {"filters": [dict]})["filters"]
  chain = _Chain([], [])
  for line in filters:
    (chain.lines if line.get("filter") in _LINES else chain.documents).append(
      _filter(line)
    )
  return chain


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
    source = input_files.read(path).decode(errors="replace")
    try:
      _chain(source)
    except ValueError as e:
      raise errors.DataError(f"{path}: {e}") from e
    return cls(source)

  def clean(self, lines: list[str], counts: "Counts") -> tuple[list[str], str]:
    """(the lines that stay, the filter that removes the document or "").

    "" in `lines` is between paragraphs. What is removed goes to `counts`.
    """
    chain = _chain(self.source)
    kept = []
    for line in lines if chain.lines else ():
      for one in chain.lines:
        if line and not one.keeps(line):
          counts.add(one.label, line, lines=1)
          break
      else:
        kept.append(line)
    document = _Document(kept if chain.lines else lines)
    for one in chain.documents:
      if not one.keeps(document):
        counts.add(one.label, document.text, documents=1)
        return [], one.label
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


def report_page(path: str, sections: Iterable[Section]) -> None:
  """Writes a page with tables."""
  parts = []
  for title, heads, rows in sections:
    parts.append(f"<h2>{html.escape(title)}</h2>\n<table>")
    parts.append(_html_row("th", heads))
    parts += [_html_row("td", row) for row in rows]
    parts.append("</table>")
  page = _PAGE.format(sections="\n".join(parts))
  files.write(path, page.encode())


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
