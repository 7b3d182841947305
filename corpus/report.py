"""The report on a corpus: lines for the screen, and a page of tables."""

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from common.console import counted
from corpus import filters

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
{tables}
"""
_Row = Sequence[str]


class Summary(NamedTuple):
  """The numbers of a corpus; JSON values."""

  read: int  # documents
  sides: dict[str, list[int]]  # documents and sentences of each file
  cut: int  # documents that were cut into pieces, which count as documents
  removed: dict[str, int]  # documents by reason
  lines_removed: int  # that recur
  filtered: dict  # `filters.Counts`
  passed: dict = {}  # those of text that looks like no prose, but passed
  # Of two near-duplicates: similarity, names, and texts where they differ.
  pair: Sequence[str] = ()
  problem: str = ""  # why there is no corpus

  def removals(self) -> Iterator[str]:
    """A line for each reason for which text was removed."""
    for reason, number in self.removed.items():
      yield f"{counted(number, 'document')} removed: {reason}"
    if self.lines_removed:
      yield f"{counted(self.lines_removed, 'line')} removed: recur"
    for label, counts in self.passed.items():
      texts = counted(counts["documents"], "document")
      yield f"{texts} passed with {label} (examples in report.html)"

  def page(
    self, facts: Iterable[_Row] = (), bounds: Iterable[_Row] = ()
  ) -> str:
    """The report, in HTML: with facts of the command, and filters' bounds."""
    documents = max(1, self.read)
    sides, removed, command = [], [], [*facts]
    if self.problem:
      command.append(("No corpus was written", self.problem))
    for name, (texts, sentences) in self.sides.items():
      sides.append((name, f"{texts:,}", f"{sentences:,}"))
    for reason, number in self.removed.items():
      removed.append((reason, f"{number:,}", f"{number / documents:.2%}"))
    limits: dict[str, str] = {}
    for label, limit in bounds:
      limits[label] = " and ".join(filter(None, [limits.get(label), limit]))
    heads = "documents", "share", "lines", "characters", "examples"
    filtered = _rows(self.filtered, documents, limits)
    passed = _rows(self.passed, documents, {})
    pairs = [*zip(self.pair[1:3], self.pair[3:], strict=True)]
    title = f"A pair of near-duplicates (similarity {''.join(self.pair[:1])})"
    tables = [
      _table("Command", ("", ""), command),
      _table("Input", ("documents",), [(f"{self.read:,}",)]),
      _table("Corpus", ("file", "documents", "sentences"), sides),
      _table("Removed documents", ("reason", "documents", "share"), removed),
      _table("Lines that recur", ("removed",), [(f"{self.lines_removed:,}",)]),
      _table("Filters", ("filter", "lets pass", *heads), filtered),
      _table("Passed the filters, but no prose", ("what", "", *heads), passed),
    ]
    if pairs:
      tables.append(_table(title, ("document", "where they differ"), pairs))
    return _PAGE.format(tables="\n".join(tables))


def _rows(
  counted_text: dict, documents: int, limits: dict[str, str]
) -> Iterator[_Row]:
  """Rows of `filters.Counts`; also for a filter that removed nothing."""
  counts = filters.total([counted_text])
  for label in [*limits, *sorted(counts.keys() - limits.keys())]:
    removed = counts.get(label, filters.NOTHING)
    texts, lines, characters, examples = removed.values()
    yield (
      label, limits.get(label, ""), f"{texts:,}", f"{texts / documents:.2%}",
      f"{lines:,}", f"{characters:,}", "\n\n".join(examples),
    )  # fmt: skip


def _table(title: str, heads: _Row, rows: Iterable[_Row]) -> str:
  """A titled table in HTML."""
  parts = [f"<h2>{html.escape(title)}</h2>\n<table>"]
  for number, cells in enumerate([heads, *rows]):
    tag, line = "td" if number else "th", "<tr>"
    for cell in cells:
      look = "number" if re.fullmatch("[0-9.,]+%?", cell) else "text"
      line += f'<{tag} class="{look}">{html.escape(cell)}</{tag}>'
    parts.append(line)
  return "\n".join([*parts, "</table>"])
