"""Measured figures: each file has a page, and each section has a date."""

import pathlib
import re

import runs

ROOT = pathlib.Path(runs.ROOT)
RESULTS = ROOT / "docs/results.md"
# A commit that is named as one, or days: "commit bfe3990", "21 November 2026".
_COMMIT = re.compile(r"\b[Cc]ommits? [0-9a-f]{7}\b")
_DAY = re.compile(r"\b\d{1,2} (?:[A-Z][a-z]+) \d{4}\b")


def test_each_file_of_results_is_cited_by_a_page():
  pages = [RESULTS, ROOT / "README.md", *(ROOT / "research").glob("*.md")]
  text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
  files = sorted(p.name for p in (ROOT / "benchmarks/results").iterdir())
  assert [name for name in files if name not in text] == []


def test_each_section_says_of_which_commit_or_day_it_is():
  text = RESULTS.read_text(encoding="utf-8")
  sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
  undated = [
    section.splitlines()[0]
    for section in sections
    if not (_COMMIT.search(section) or _DAY.search(section))
  ]
  assert sections and undated == []
  assert len(text.splitlines()) <= 250
