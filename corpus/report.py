"""The report on a corpus: lines for the screen, and a page of tables."""

import html
import re
from collections.abc import Iterator, Sequence
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

  def removals(self) -> Iterator[str]:
    """A line for each reason for which text was removed."""
    for reason, number in self.removed.items():
      yield f"{counted(number, 'document')} removed: {reason}"
    if self.lines_removed:
      yield f"{counted(self.lines_removed, 'line')} removed: recur"

  def page(self) -> str:
    """The report, in HTML."""
    documents = max(1, self.read)
    sides, removed, filtered = [], [], []
    for name, (texts, sentences) in self.sides.items():
      sides.append((name, f"{texts:,}", f"{sentences:,}"))
    for reason, number in self.removed.items():
      removed.append((reason, f"{number:,}", f"{number / documents:.2%}"))
    for label, counts in filters.total([self.filtered]).items():
      texts, lines, characters, examples = counts.values()
      shown = f"{texts:,}", f"{texts / documents:.2%}", f"{lines:,}"
      row = label, *shown, f"{characters:,}", "\n".join(examples)
      filtered.append(row)
    heads = "filter", "documents", "share", "lines", "characters", "examples"
    tables = [
      _table("Input", ("documents",), [(f"{self.read:,}",)]),
      _table("Corpus", ("file", "documents", "sentences"), sides),
      _table("Removed documents", ("reason", "documents", "share"), removed),
      _table("Lines that recur", ("removed",), [(f"{self.lines_removed:,}",)]),
      _table("Filters", heads, filtered),
    ]
    return _PAGE.format(tables="\n".join(tables))


def _table(title: str, heads: _Row, rows: Sequence[_Row]) -> str:
  """A titled table in HTML."""
  parts = [f"<h2>{html.escape(title)}</h2>\n<table>"]
  for number, cells in enumerate([heads, *rows]):
    tag, line = "td" if number else "th", "<tr>"
    for cell in cells:
      look = "number" if re.fullmatch("[0-9.,]+%?", cell) else "text"
      line += f'<{tag} class="{look}">{html.escape(cell)}</{tag}>'
    parts.append(line)
  return "\n".join([*parts, "</table>"])
