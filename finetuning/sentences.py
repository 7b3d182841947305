"""Sentences of words with labels: CoNLL's columns, and JSON lines."""

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from common import input_files, json_files
from common.errors import DataError
from common.settings import in_group
from finetuning import tables

_data = in_group("Data")
_DOCUMENT = "-DOCSTART-"  # CoNLL's mark between documents
# The first column of CoNLL-U's lines that are of several words, or of none.
_NO_WORD = re.compile(r"\d+[-.]\d+")


class Sentence(NamedTuple):
  """Words in order, and the label of each."""

  line: int  # of the file, from 1, where it begins
  words: list[str]
  labels: list[str]  # [] where they were not read


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceSettings:
  """Where words and labels stand in files; flags of run_ner.py."""

  # fmt: off
  word_column: int = _data(1,
    "Column of the words in files of columns, counted from 1.", low=1)
  label_column: int | None = _data(None,
    "Column of the words' labels in files of columns, counted from 1. Default: "
    "the last one.", low=1)
  tokens_field: str = _data("tokens",
    "Field of the list of a sentence's words in JSON lines.")
  tags_field: str = _data("ner_tags",
    "Field of the list of the words' labels in JSON lines.")
  label_names: tuple = _data((),
    "Labels in the order of the numbers that stand for them in JSON lines, for "
    "example O,B-PER,I-PER. Default: labels are text, and those of the "
    "training data by the alphabet.")
  # fmt: on


SENTENCE_SETTINGS = tuple(f.name for f in dataclasses.fields(SentenceSettings))


def read_sentences(
  path: str, settings: SentenceSettings, labelled: bool
) -> list[Sentence]:
  """The sentences of a UTF-8 file; DataError if it has none or another form.

  .jsonl and .json have an object for each sentence in a line. All other files
  have a word in each line, with its label in another column, and an empty line
  after each sentence; columns have tabs between them, or else spaces.
  """
  is_json = os.path.splitext(path)[1].lower() in (".jsonl", ".json")
  read: Callable = tables.read_table if is_json else input_files.read
  sentences_of: Callable = _objects if is_json else _columns
  content = read(path)  # its errors name the file
  try:
    sentences = [*sentences_of(content, settings, labelled)]
  except ValueError as e:
    raise DataError(f"{path}: {e}") from e
  if not sentences:
    raise DataError(f"{path}: no sentences")
  return sentences


def _objects(
  rows: Sequence[tables.Row], settings: SentenceSettings, labelled: bool
) -> Iterator[Sentence]:
  """ValueError for a line of another form."""
  names = settings.label_names
  form: dict[str, Any] = {settings.tokens_field: [str]}
  if labelled:
    form[settings.tags_field] = [(str, range(len(names))) if names else str]
  for line, values in rows:
    try:
      json_files.expect(values, form)
    except ValueError as e:
      raise ValueError(
        f"line {line}: {e}; see --tokens_field, --tags_field, and for labels "
        "that are numbers --label_names"
      ) from e
    words = values[settings.tokens_field]
    tags = values[settings.tags_field] if labelled else []
    if labelled and len(tags) != len(words):
      raise ValueError(
        f"line {line} has {len(words)} words, but {len(tags)} labels: each "
        "word has one"
      )
    labels = [names[tag] if isinstance(tag, int) else tag for tag in tags]
    yield Sentence(line, words, labels)


def _columns(
  content: bytes, settings: SentenceSettings, labelled: bool
) -> Iterator[Sentence]:
  """ValueError for a line of another number of columns."""
  word = settings.word_column - 1
  label = (settings.label_column or 0) - 1  # -1 is the last one
  least = settings.word_column
  if labelled:
    least = max(least, settings.label_column or 2)
  # Not by `splitlines`, which also breaks at characters that are text.
  rows = _rows(content.decode("utf-8-sig").split("\n"), least)
  for _, group in itertools.groupby(rows, lambda row: bool(row[1])):
    kept = [
      (line, fields)
      for line, fields in group
      if fields and (word == 0 or not _NO_WORD.fullmatch(fields[0]))
    ]
    words = [fields[word] for _, fields in kept]
    labels = [fields[label] for _, fields in kept] if labelled else []
    if words:
      yield Sentence(kept[0][0], words, labels)


def _rows(lines: Sequence[str], least: int) -> Iterator[tuple[int, list[str]]]:
  """(line, fields); no fields between two sentences.

  A comment begins with #, as a word may, and has not as many columns as words
  have: at least `least`, and all the same number.
  """
  rows = [_fields(line) for line in lines]
  widths = (
    len(fields)
    for fields in rows
    if fields and not fields[0].startswith((_DOCUMENT, "#"))
  )
  width = next(widths, 0)
  for number, fields in enumerate(rows, 1):
    if not fields or fields[0] == _DOCUMENT:
      yield number, []
    elif len(fields) == width >= least:
      yield number, fields
    elif not fields[0].startswith("#"):
      raise ValueError(
        f"line {number}: the number of its columns is {len(fields)}, not "
        f"{max(width, least)}: correct it, or see --word_column and "
        "--label_column"
      )


def _fields(line: str) -> list[str]:
  line = line.removesuffix("\r")
  if not line.strip():
    return []
  if "\t" in line:
    return line.split("\t")
  return [*filter(None, line.split(" "))]
