"""Minimal pairs: two sentences, of which a good model prefers the first.

Read from JSON lines as BLiMP's (https://arxiv.org/abs/1912.00582), in files or
in .zip archives. A paradigm is the pairs that show one phenomenon.
"""

import collections
import hashlib
import lzma
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from common import json_files
from common.errors import DataError
from data import records, text_files

_UNNAMED = "-"  # field and term of pairs that do not say theirs
_SENTENCES = ("sentence_good", "sentence_bad")
_KEYS = (*_SENTENCES, "UID", "field", "linguistics_term")
_NORMAL_95 = 1.96  # standard errors on each side of a 95% interval
# What the standard library raises for a damaged archive.
_ZIP_ERRORS = (
  zipfile.BadZipFile,
  lzma.LZMAError,
  zlib.error,
  EOFError,
  OSError,
  ValueError,
  RuntimeError,
)


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
  """The pairs of `records.expand_patterns`, at most `sample` of a paradigm.

  Which these are is a hash of their text. DataError names file and line.
  """
  pairs: list[Pair] = []
  for path in records.expand_patterns(patterns):
    for name, data in _files(path):
      pairs += _pairs(name, data)
  if sample is None:
    return pairs
  chosen: list[int] = []
  for numbers in by_paradigm(pairs).values():
    chosen += sorted(numbers, key=lambda n: _digest(pairs[n]))[:sample]
  return [pairs[number] for number in sorted(chosen)]


def by_paradigm(pairs: Sequence[Pair]) -> dict[str, list[int]]:
  """Paradigm -> the numbers of its pairs."""
  numbers = collections.defaultdict(list)
  for number, pair in enumerate(pairs):
    numbers[pair.paradigm].append(number)
  return dict(sorted(numbers.items()))


def _digest(pair: Pair) -> bytes:
  text = f"{pair.good}\n{pair.bad}".encode("utf-8", "surrogatepass")
  return hashlib.sha256(text).digest()


def _files(path: str) -> Iterator[tuple[str, bytes]]:
  """Name and bytes of a file, or of the .jsonl files in an archive."""
  if not path.endswith(".zip"):
    with open(path, "rb") as f:
      yield path, f.read()
    return
  try:
    with zipfile.ZipFile(path) as archive:
      # Systems add files of their own, whose names begin with a dot.
      names = [
        name
        for name in sorted(archive.namelist())
        if text_files.is_jsonl(name)
        and not os.path.basename(name).startswith(".")
      ]
      for name in names:
        yield f"{path}/{name}", archive.read(name)
  except _ZIP_ERRORS as e:
    raise DataError(
      f"{path}: not a readable .zip file ({e}): copy it again"
    ) from e
  if not names:
    raise DataError(f"{path}: no .jsonl file is in it")


def _pairs(name: str, data: bytes) -> list[Pair]:
  """The pairs in the lines of a file; without a UID it is their paradigm."""
  pairs = []
  defaults = dict.fromkeys(_KEYS[3:], _UNNAMED)
  defaults["UID"] = os.path.splitext(name)[0]
  for number, line in enumerate(
    text_files.utf8_lines(data.split(b"\n"), name), 1
  ):
    if line.strip():
      pairs.append(_pair(line, f"{name}: line {number}", defaults))
  if not pairs:
    raise DataError(f"{name}: there is no pair in it")
  return pairs


def _pair(line: str, where: str, defaults: Mapping[str, str]) -> Pair:
  """The pair of a line; `defaults` are the values of keys that it may lack."""
  try:
    values = {**defaults, **json_files.parse(line)}
  except (ValueError, TypeError) as e:
    raise DataError(
      f"{where}: not a JSON object ({e}): a pair is a line "
      f"{{{', '.join(map(repr, _SENTENCES))}, ...}}"
    ) from e
  for key in _KEYS:
    value = values.get(key)
    if not isinstance(value, str) or not value.strip():
      raise DataError(f'{where}: "{key}" is missing, empty or no text')
  good, bad, paradigm, field, term = (values[key].strip() for key in _KEYS)
  # BLiMP spells one field in two ways.
  return Pair(good, bad, where, paradigm, field.replace("/", "_"), term)


# Results ----------------------------------------------------------------------


def results(
  pairs: Sequence[Pair], scores: np.ndarray, unigram: np.ndarray | None
) -> dict:
  """Accuracies, as JSON has them, by paradigm, field, term and in all.

  `scores` are float64 [pairs, 2], of the good and the bad sentence; a tie is
  an error. `unigram` are a baseline's, or None.
  """
  paradigms = {}
  for name, numbers in by_paradigm(pairs).items():
    paradigms[name] = {
      "field": pairs[numbers[0]].field,
      "linguistics_term": pairs[numbers[0]].term,
      **_counts(scores[numbers]),
      "unigram": _counts(unigram[numbers]) if unigram is not None else None,
    }
  counts = list(paradigms.values())
  return {
    **_means(counts),
    "interval_95": interval([(one["right"], one["pairs"]) for one in counts]),
    "fields": _grouped(counts, "field"),
    "linguistics_terms": _grouped(counts, "linguistics_term"),
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
  """The mean of paradigms, as BLiMP's authors report it, and that of pairs.

  `counts` are those of each paradigm.
  """
  total = {
    key: sum(one[key] for one in counts) for key in ("right", "ties", "pairs")
  }
  means = {
    "accuracy": math.fsum(one["accuracy"] for one in counts) / len(counts),
    "accuracy_of_pairs": total["right"] / total["pairs"],
    "ties": total["ties"],
    "pairs": total["pairs"],
  }
  if unigram := [one["unigram"] for one in counts if one.get("unigram")]:
    means["unigram"] = _means(unigram)
  return means


def _grouped(counts: Sequence[Mapping], key: str) -> dict:
  groups = collections.defaultdict(list)
  for one in counts:
    groups[one[key]].append(one)
  return {name: _means(group) for name, group in sorted(groups.items())}


def interval(counts: Sequence[tuple[int, int]]) -> list[float]:
  """The 95% interval of the mean of paradigms, of (right, pairs) each.

  Pairs are chance, paradigms are not. The variance of a paradigm's share is
  that of Agresti and Coull's interval, with two right and two wrong pairs more
  (The American Statistician 52, 1998), so it is never 0.
  """
  shares = [((right + 2) / (pairs + 4), pairs + 4) for right, pairs in counts]
  variance = math.fsum(p * (1 - p) / n for p, n in shares) / len(shares) ** 2
  mean = math.fsum(right / pairs for right, pairs in counts) / len(counts)
  width = _NORMAL_95 * math.sqrt(variance)
  return [max(0.0, mean - width), min(1.0, mean + width)]


def table(accuracies: Mapping) -> list[str]:
  """Lines of `results` for people."""
  paradigms = accuracies["paradigms"]
  width = max(22, 2 + max(map(len, paradigms)))

  def line(name, counts):
    """Of a model and, on the right, of the unigram baseline."""
    columns = f"{name:<{width}}{counts['accuracy']:>8.1%}{counts['ties']:>6,}"
    columns += f"{counts['pairs']:>8,}"
    if unigram := counts.get("unigram"):
      columns += f"{unigram['accuracy']:>9.1%}{unigram['ties']:>7,}"
    return columns

  baseline = "  unigram  ties" if accuracies.get("unigram") else ""
  lines = [f"{'':<{width}}accuracy  ties   pairs{baseline}"]
  for field, mean in accuracies["fields"].items():
    lines.append(line(field, mean))
    for name, counts in paradigms.items():
      if counts["field"] == field:
        lines.append(line(f"  {name}", counts))
  low, high = accuracies["interval_95"]
  return [
    *lines,
    line(f"mean of {len(paradigms)} paradigms", accuracies),
    f"95% interval {low:.1%} to {high:.1%}; mean of all pairs "
    f"{accuracies['accuracy_of_pairs']:.1%}",
  ]
