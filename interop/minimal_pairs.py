"""Minimal pairs: two sentences, of which a good model prefers the first.

Read from BLiMP's JSON lines (https://arxiv.org/abs/1912.00582), from text
whose odd lines are bad and whose even lines are good sentences, and from .zip
archives of both. A paradigm is the pairs that show one phenomenon.
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
_KEYS = "sentence_good", "sentence_bad", "UID", "field", "linguistics_term"
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
  """The pairs of `records.expand_patterns`, at most `sample` of a paradigm.

  Which these are is a hash of their text. DataError names file and line.
  """
  pairs = [
    pair
    for path in records.expand_patterns(patterns)
    for name, data in _contents(path)
    for pair in _pairs(name, data)
  ]
  unnamed: dict[str, str] = {}  # a paradigm without a UID -> its file
  for pair in pairs:
    file = pair.where.rpartition(": line ")[0]
    if pair.paradigm == _stem(file):
      other = unnamed.setdefault(pair.paradigm, file)
      if other != file:
        raise DataError(
          f"{other} and {file}: both are the paradigm {pair.paradigm}: give "
          "them different names"
        )
  if sample is None:
    return pairs
  chosen = [
    number
    for numbers in by_paradigm(pairs).values()
    for number in sorted(numbers, key=lambda n: _chance(pairs[n]))[:sample]
  ]
  return [pairs[number] for number in sorted(chosen)]


def by_paradigm(pairs: Sequence[Pair]) -> dict[str, list[int]]:
  """Paradigm -> the numbers of its pairs."""
  found = collections.defaultdict(list)
  for number, pair in enumerate(pairs):
    found[pair.paradigm].append(number)
  return dict(sorted(found.items()))


def _chance(pair: Pair) -> bytes:
  text = f"{pair.good}\n{pair.bad}".encode("utf-8", "surrogatepass")
  return hashlib.sha256(text).digest()


def _contents(path: str) -> Iterator[tuple[str, bytes]]:
  """Name and bytes of a file, or of the files in an archive."""
  if text_files.is_compressed(path):
    raise DataError(f"{path}: unpack it first; of archives .zip alone is read")
  if not path.endswith(".zip"):
    with open(path, "rb") as f:
      yield path, f.read()
    return
  try:
    with zipfile.ZipFile(path) as archive:
      names = [
        name
        for name in archive.namelist()
        if name.endswith((".jsonl", ".txt"))
        and not os.path.basename(name).startswith(".")  # a system's own
      ]
      if any(map(text_files.is_jsonl, names)):  # then a .txt is about them
        names = list(filter(text_files.is_jsonl, names))
      for name in sorted(names):
        yield f"{path}/{name}", archive.read(name)
  except (
    zipfile.BadZipFile,
    lzma.LZMAError,
    zlib.error,
    EOFError,
    OSError,
    ValueError,
    RuntimeError,
  ) as e:
    raise DataError(
      f"{path}: not a readable .zip file ({e}): copy it again"
    ) from e
  if not names:
    raise DataError(f"{path}: no .jsonl or .txt file is in it")


def _stem(name: str) -> str:
  return os.path.splitext(os.path.basename(name))[0]


def _pairs(name: str, data: bytes) -> Iterator[Pair]:
  lines = list(text_files.utf8_lines(data.rstrip().split(b"\n"), name))
  stem = _stem(name)
  if lines == [""]:
    raise DataError(f"{name}: there is no pair in it")
  if text_files.is_jsonl(name) or name.lower().endswith(".json"):
    found = [
      _of_json(line, f"{name}: line {number}", stem)
      for number, line in enumerate(lines, 1)
      if line.strip()
    ]
  elif name.lower().endswith((".tsv", ".csv")):
    raise DataError(
      f"{name}: a table: give JSON lines (.jsonl), or text with the bad "
      "sentence on odd and the good one on even lines (.txt)"
    )
  elif len(lines) % 2:
    raise DataError(
      f"{name}: {len(lines)} lines, but a pair has two, the bad sentence and "
      "then the good one: one is missing (JSON lines are in files .jsonl)"
    )
  else:
    found = [
      Pair(
        lines[at + 1].strip(), lines[at].strip(), f"{name}: line {at + 1}", stem
      )
      for at in range(0, len(lines), 2)
    ]
  for pair in found:
    if not (pair.good and pair.bad):
      which = "bad" if pair.good else "good"
      raise DataError(f"{pair.where}: the {which} sentence is empty")
    yield pair


def _of_json(line: str, where: str, stem: str) -> Pair:
  try:
    found = json_files.parse(line)
  except ValueError as e:
    raise DataError(f"{where}: not JSON ({e})") from e
  if not isinstance(found, dict):
    raise DataError(f"{where}: not a JSON object")
  values = {**dict.fromkeys(_KEYS[3:], _UNNAMED), "UID": stem, **found}
  for key in _KEYS:
    if not isinstance(values.get(key), str):
      raise DataError(f'{where}: "{key}" is missing, or no text')
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
  found = {
    name: {
      "field": pairs[numbers[0]].field,
      "linguistics_term": pairs[numbers[0]].term,
      **_counts(scores[numbers]),
      "unigram": _counts(unigram[numbers]) if unigram is not None else None,
    }
    for name, numbers in by_paradigm(pairs).items()
  }
  every = list(found.values())
  return {
    **_means(every),
    "interval_95": interval([(one["right"], one["pairs"]) for one in every]),
    "fields": _grouped(every, "field"),
    "linguistics_terms": _grouped(every, "linguistics_term"),
    "paradigms": found,
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


def _means(paradigms: Sequence[Mapping]) -> dict:
  """Of some paradigms: as in BLiMP their mean, and the mean of their pairs."""
  right, ties, pairs = (
    sum(one[key] for one in paradigms) for key in ("right", "ties", "pairs")
  )
  unigram = [one["unigram"] for one in paradigms if one.get("unigram")]
  return {
    "accuracy": math.fsum(one["accuracy"] for one in paradigms)
    / len(paradigms),
    "accuracy_of_pairs": right / pairs,
    "ties": ties,
    "pairs": pairs,
    **({"unigram": _means(unigram)} if unigram else {}),
  }


def _grouped(paradigms: Sequence[Mapping], key: str) -> dict:
  groups = collections.defaultdict(list)
  for one in paradigms:
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


def table(found: Mapping) -> list[str]:
  """Lines of `results` for people."""
  every = found["paradigms"]
  width = max(22, 2 + max(map(len, every)))

  def line(name, one):
    """Of a model and, on the right, of the unigram baseline."""
    columns = f"{name:<{width}}{one['accuracy']:>8.1%}{one['ties']:>6,}"
    columns += f"{one['pairs']:>8,}"
    if unigram := one.get("unigram"):
      columns += f"{unigram['accuracy']:>9.1%}{unigram['ties']:>7,}"
    return columns

  baseline = "  unigram  ties" if found.get("unigram") else ""
  lines = [f"{'':<{width}}accuracy  ties   pairs{baseline}"]
  for field, mean in found["fields"].items():
    lines.append(line(field, mean))
    names = [name for name, one in every.items() if one["field"] == field]
    lines += [line(f"  {name}", every[name]) for name in names]
  low, high = found["interval_95"]
  return [
    *lines,
    line(f"mean of {len(every)} paradigms", found),
    f"95% interval {low:.1%} to {high:.1%}; mean of all pairs "
    f"{found['accuracy_of_pairs']:.1%}",
  ]
