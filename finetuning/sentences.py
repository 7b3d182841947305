"""Sentences of words with labels: CoNLL's columns, and JSON lines."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from common import input_files, json_files
from common.errors import DataError
from common.input_files import Format
from common.settings import in_group
from corpus import tables

_data = in_group("Data")
_DOCUMENT = "-DOCSTART-"  # CoNLL's mark between documents
# The first column of CoNLL-U's lines that are of several words, or of none.
_NO_WORD = re.compile(r"\d+[-.]\d+")


class Sentence(NamedTuple):
  """Words in order, and the label of each; [] if these were not read."""

  lines: list[int]  # of the file, from 1: each word's, or where it begins
  words: list[str]
  labels: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceSettings:
  """Where words and labels stand in files; flags of run_ner.py."""

  # fmt: off
  word_column: int = _data(1,
    "Column of words in files of columns, counted from 1.", low=1)
  label_column: int | None = _data(None,
    "Column of labels in files of columns, counted from 1. Default: the last.",
    low=1)
  tokens_field: str = _data("tokens",
    "Field of the list of a sentence's words in JSON lines.")
  tags_field: str = _data("ner_tags",
    "Field of the list of the words' labels in JSON lines.")
  label_names: tuple = _data((),
    "Labels in the order of the numbers that stand for them in JSON lines, as "
    "O,B-PER,I-PER. Default: those of the training data, by the alphabet.")
  # fmt: on


def read_sentences(
  path: str, settings: SentenceSettings, labelled: bool
) -> list[Sentence]:
  """The sentences of a UTF-8 file; DataError if it has none or another form.

  JSON lines have an object for each sentence. Other files have
  a word in each line, with its label in another column, and an empty line after
  each sentence. Columns have tabs between them, or else spaces.
  """
  if input_files.format_of(path) in (Format.JSON_LINES, Format.JSON):
    reader = _of_objects(tables.read_table(path), settings, labelled)
  else:
    reader = _of_columns(input_files.read(path), settings, labelled)
  try:  # the reader's errors do not name the file
    sentences = [*reader]
  except ValueError as e:
    raise DataError(f"{path}: {e}") from e
  if not any(sentence.words for sentence in sentences):
    raise DataError(f"{path}: no words")
  return sentences


def _of_objects(rows, settings, labelled: bool) -> Iterator[Sentence]:
  # Labels are names, or numbers if names for them are given.
  names = settings.label_names
  form: dict[str, Any] = {settings.tokens_field: [str]}
  if labelled:
    form[settings.tags_field] = [(str, range(len(names))) if names else str]
  for line, values in rows:
    try:
      json_files.expect(values, form)
      words = values[settings.tokens_field]
      tags = values[settings.tags_field] if labelled else []
      if labelled and len(tags) != len(words):
        raise ValueError(f"{len(words)} words have {len(tags)} labels")
    except ValueError as e:
      raise ValueError(
        f"line {line}: {e}; its fields are {', '.join(values)}: see "
        "--tokens_field, --tags_field, and for labels that are numbers "
        "--label_names"
      ) from e
    labels = [names[tag] if isinstance(tag, int) else tag for tag in tags]
    yield Sentence([line] * max(1, len(words)), words, labels)


def _of_columns(content: bytes, settings, labelled: bool) -> Iterator[Sentence]:
  # Not by `splitlines`, which also breaks at characters that are text. The
  # empty line ends the last sentence.
  lines = [*content.decode("utf-8-sig").split("\n"), ""]
  word, label = settings.word_column, settings.label_column if labelled else 0
  least = max(word, label or 2) if labelled else word
  rows: list[tuple] = []
  for line, fields in _numbered(lines, least):
    if not fields and rows:
      numbers, words, labels = map(list, zip(*rows, strict=True))
      yield Sentence(numbers, words, labels if labelled else [])
      rows = []
    elif fields and (word == 1 or not _NO_WORD.fullmatch(fields[0])):
      rows.append((line, fields[word - 1], fields[(label or 0) - 1]))


def _numbered(lines: list[str], least: int) -> Iterator[tuple[int, list]]:
  """(line, fields), none between two sentences; all have as many, or `least`.

  A comment begins with #, as a word may, and has another number of fields, or
  no tab where words have.
  """
  rows, width, words_have_tabs = [], 0, False
  for line in lines:
    line = line.removesuffix("\r") if line.strip() else ""
    fields = line.split("\t")
    if len(fields) == 1:
      fields = [*filter(None, line.split(" "))]
    # The first line of words says how many columns there are.
    if not width and fields and not fields[0].startswith((_DOCUMENT, "#")):
      width, words_have_tabs = len(fields), "\t" in line
    rows.append((fields, "\t" in line))
  for number, (fields, has_tab) in enumerate(rows, 1):
    has_mark = bool(fields) and fields[0].startswith("#")
    if not fields or fields[0] == _DOCUMENT:
      yield number, []
    elif has_mark and words_have_tabs and not has_tab:
      continue
    elif len(fields) == width >= least:
      yield number, fields
    elif not has_mark:
      raise ValueError(
        f"line {number}: the number of its columns is {len(fields)}, not "
        f"{max(width, least)}: correct it, or see --word_column and "
        "--label_column"
      )
