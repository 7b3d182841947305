"""Minimal pairs: two sentences, of which a good model prefers the first.

Read from tables such as BLiMP's JSON lines (https://arxiv.org/abs/1912.00582).
A paradigm is the pairs that show one phenomenon.
"""

import collections
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from common import input_files, json_files
from common.errors import DataError
from corpus import tables

_UNNAMED = "-"  # field and term of pairs that do not say theirs
_FORM = dict.fromkeys(
  ("sentence_good", "sentence_bad", "UID?", "field?", "linguistics_term?"), str
)
_NORMAL_95 = 1.96  # standard errors on each side of a 95% interval


class Pair(NamedTuple):
  """Two sentences, and where they are from."""

  good: str
  bad: str
  where: str  # FILE: line N, for messages
  paradigm: str
  field: str = _UNNAMED  # of linguistics, as morphology
  term: str = _UNNAMED  # the phenomenon, as anaphor_agreement


# Reading ----------------------------------------------------------------------


def read(patterns: str, sample: int | None = None) -> list[Pair]:
  """The pairs of `input_files.expand_patterns`, at most `sample` of a paradigm.

  Which these are is a hash of their text. DataError names file and line.
  """
  pairs: list[Pair] = []
  for path in input_files.expand_patterns(patterns):
    for number, values in tables.read_table(path):
      where = f"{path}: line {number}"
      try:
        json_files.expect(values, _FORM)
      except ValueError as e:
        raise DataError(f"{where}: not a minimal pair: {e}") from e
      # Without a UID a file is a paradigm. BLiMP spells one field in two ways.
      pairs.append(
        Pair(
          values["sentence_good"].strip(),
          values["sentence_bad"].strip(),
          where,
          values.get("UID", os.path.splitext(path)[0]),
          values.get("field", _UNNAMED).replace("/", "_"),
          values.get("linguistics_term", _UNNAMED),
        )
      )

  def digest(number: int) -> bytes:
    text = f"{pairs[number].good}\n{pairs[number].bad}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

  # By the text, so that a file's order and its other pairs do not matter.
  chosen: list[int] = []
  for numbers in by_paradigm(pairs).values():
    chosen += sorted(numbers, key=digest)[:sample]
  return [pairs[number] for number in sorted(chosen)]


def by_paradigm(pairs: Sequence[Pair]) -> dict[str, list[int]]:
  """Paradigm -> the numbers of its pairs."""
  numbers = collections.defaultdict(list)
  for number, pair in enumerate(pairs):
    numbers[pair.paradigm].append(number)
  return dict(sorted(numbers.items()))


# Results ----------------------------------------------------------------------


def results(
  pairs: Sequence[Pair], scores: np.ndarray, unigram: np.ndarray | None
) -> dict:
  """Accuracies, as JSON has them, by paradigm, field, term and in all.

  `scores` are float64 [pairs, 2], of the good and the bad sentence; a tie is
  an error. `unigram` are a baseline's, or None.
  """
  # All pairs of a paradigm show one phenomenon, so the first names its field.
  paradigms = {}
  fields, terms = collections.defaultdict(list), collections.defaultdict(list)
  for name, numbers in by_paradigm(pairs).items():
    first = pairs[numbers[0]]
    counts: dict = {"field": first.field, "linguistics_term": first.term}
    counts |= {**_counts(scores[numbers]), "unigram": None}
    if unigram is not None:
      counts["unigram"] = _counts(unigram[numbers])
    paradigms[name] = counts
    fields[first.field].append(counts)
    terms[first.term].append(counts)
  everything = list(paradigms.values())
  return {
    **_means(everything),
    "interval_95": interval([(p["right"], p["pairs"]) for p in everything]),
    "fields": {name: _means(fields[name]) for name in sorted(fields)},
    "linguistics_terms": {name: _means(terms[name]) for name in sorted(terms)},
    "paradigms": paradigms,
  }


def _counts(scores: np.ndarray) -> dict:
  good, bad = scores.T
  right = int((good > bad).sum())
  return {
    "accuracy": right / len(good),
    "right": right,
    "ties": int((good == bad).sum()),
    "pairs": len(good),
  }


def _means(counts: Sequence[Mapping]) -> dict:
  """Means over paradigms, as BLiMP's authors report them, and over pairs."""
  accuracies: list[float] = []
  unigrams: list = []
  totals: collections.Counter[str] = collections.Counter()
  for paradigm in counts:
    accuracies.append(paradigm["accuracy"])
    unigrams.append(paradigm.get("unigram"))
    for key in ("right", "ties", "pairs"):
      totals[key] += paradigm[key]
  means = {
    "accuracy": math.fsum(accuracies) / len(accuracies),
    "accuracy_of_pairs": totals["right"] / totals["pairs"],
    "ties": totals["ties"],
    "pairs": totals["pairs"],
  }
  return {**means, "unigram": _means(unigrams)} if unigrams[0] else means


def interval(counts: Sequence[tuple[int, int]]) -> list[float]:
  """The 95% interval of the mean of paradigms, of (right, pairs) each.

  Pairs are chance, paradigms are not. The variance of a paradigm's share is
  that of Agresti and Coull's interval, with two right and two wrong pairs more
  (The American Statistician 52, 1998), so it is never 0.
  """
  variances, shares = [], []
  for right, pairs in counts:
    p, n = (right + 2) / (pairs + 4), pairs + 4
    variances.append(p * (1 - p) / n)
    shares.append(right / pairs)
  variance = math.fsum(variances) / len(counts) ** 2
  mean = math.fsum(shares) / len(counts)
  width = _NORMAL_95 * math.sqrt(variance)
  return [max(0.0, mean - width), min(1.0, mean + width)]


def table(accuracies: Mapping) -> list[str]:
  """Lines of `results` for people, on the right the unigram baseline's."""
  paradigms = accuracies["paradigms"]
  width = max(22, 2 + max(map(len, paradigms)))
  lines = [f"{'':<{width}}accuracy  ties   pairs"]
  if accuracies.get("unigram"):
    lines[0] += "  unigram  ties"

  def add(name, counts):
    columns = f"{name:<{width}}{counts['accuracy']:>8.1%}{counts['ties']:>6,}"
    columns += f"{counts['pairs']:>8,}"
    unigram = counts.get("unigram")
    if unigram:
      columns += f"{unigram['accuracy']:>9.1%}{unigram['ties']:>7,}"
    lines.append(columns)

  for field, mean in accuracies["fields"].items():
    add(field, mean)
    for name, counts in paradigms.items():
      if counts["field"] == field:
        add(f"  {name}", counts)
  add(f"mean of {len(paradigms)} paradigms", accuracies)
  low, high = accuracies["interval_95"]
  lines.append(
    f"95% interval {low:.1%} to {high:.1%}; mean of all pairs "
    f"{accuracies['accuracy_of_pairs']:.1%}"
  )
  return lines
