"""Labels as the names of a head's rows: a model's own, or found in its data."""

import functools
import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from checkpoints import run_start
from common.errors import DataError, UserError
from corpus import tables
from finetuning.task import FinetuningTask

_MOST_LABELS = 1000
_MOST_SHOWN = 24


class LabelledTask(FinetuningTask):
  """A task whose head has a row for each label."""

  # In the order of their numbers; (): a regression, None: those in the data.
  known_labels: Sequence[str] | None = None
  published_names: Sequence[str] = ()  # of `known_labels` that are numbers
  if_too_many: ClassVar[str] = ""  # a remedy

  def __init__(self, config):
    super().__init__(config)
    # File -> its labels as they are spelt, with their number and first line.
    self.labels_in: dict[str, dict[str, tuple[int, int]]] = {}

  def labels_of_data(self) -> tuple[str, Iterable[str]]:
    """Where the labels to train on are, and all of them."""
    raise NotImplementedError

  @functools.cached_property
  def _head(self) -> tuple[list[str], list[str], list[int]]:
    """The labels of its rows; the task's labels in order, and their rows."""
    # The model that is used or trained on may name its labels.
    of_model = run_start.origin_of(self.config).task.get("labels", [])
    of_task = self.known_labels
    if of_task is None:
      is_trained = of_model and not self.config.do_train
      labels = of_model if is_trained else self._labels_of_file()
      of_task = sorted(labels, key=label_order)
    # A model's rows keep their labels, whatever the order of this task.
    rows = rows_of(of_model, of_task) or rows_of(of_model, self.published_names)
    labels = of_model if rows else list(of_task)
    return labels, list(of_task), rows or [*range(len(labels))]

  @property
  def labels(self) -> list[str]:  # type: ignore[override]
    """The labels of the head's rows, in their order; [] for a regression."""
    return self._head[0]

  @functools.cached_property
  def _rows_by_key(self) -> tuple[Callable[[str], str], dict[str, int]]:
    _, of_task, rows = self._head
    # Data may spell a label otherwise than the model: Yes and yes, 1 and 1.0.
    key = key_of(of_task)
    return key, dict(zip(map(key, of_task), rows, strict=True))

  def rows_in(
    self, path: str, name: str, labels: Iterable[tuple[int, str]]
  ) -> list[int]:
    """The head's row of each (line, label) of a file, where it is a `name`.

    A `DataError` names a label that the head has no row for.
    """
    key, rows = self._rows_by_key
    counts: dict[str, tuple[int, int]] = {}
    numbers = []
    for line, label in labels:
      if key(label) not in rows:
        known = ", ".join(self._head[1][:10])
        raise DataError(
          f"{path}: line {line}: {name} is {label!r}, not one of {known}"
        )
      count, first = counts.get(label, (0, line))
      counts[label] = count + 1, first
      numbers.append(rows[key(label)])
    self.labels_in[path] = counts
    return numbers

  def lines(self):
    lines = []
    for path, counts in self.labels_in.items():
      shown = [f"{label!r} {counts[label][0]:,}" for label in by_count(counts)]
      # Rare ones, which may be mistakes, are at the end.
      if len(shown) > _MOST_SHOWN:
        half = _MOST_SHOWN // 2
        others = f"{len(shown) - 2 * half:,} others"
        shown = [*shown[:half], others, *shown[-half:]]
      lines.append(f"{path}: labels {', '.join(shown)}")
    return lines

  def _labels_of_file(self) -> list[str]:
    """The different labels in the file to train on, each as first spelt."""
    if not (self.config.do_train or self.config.train_file):
      raise UserError(
        f"--output_dir={self.config.output_dir} has no run that says which "
        "labels there are: train first (--do_train), or give --train_file"
      )
    where, values = self.labels_of_data()
    names: dict[str, str] = {}
    # Of several spellings the shortest names the label.
    for value in sorted(sorted(set(values)), key=len):
      names.setdefault(identity(value), value.strip())
    labels = [*names.values()]
    if not 2 <= len(labels) <= _MOST_LABELS:
      raise DataError(
        f"{where} has {len(labels)} different labels, such as {labels[0]!r}: a "
        f"classifier needs 2 to {_MOST_LABELS}{self.if_too_many}"
      )
    return labels


def by_count(counts: dict[str, tuple[int, int]]) -> list[str]:
  """The labels of `labels_in`, the most frequent first, else as they come."""
  return sorted(counts, key=lambda label: (-counts[label][0], counts[label][1]))


def label_order(label: str) -> tuple:
  """Sort key: numbers by size, then other labels by the alphabet."""
  number = tables.as_number(label)
  # NaN has no place in an order of numbers, so it counts as a word.
  return (1, 0.0, label) if math.isnan(number) else (0, number, label)


@functools.lru_cache(_MOST_LABELS)
def identity(label: str) -> str:
  """The same for 1, 1.0, true and " 1", which are one label."""
  text = unicodedata.normalize("NFC", " ".join(label.split()))
  text = {"true": "1", "false": "0"}.get(text.lower(), text)
  # Only what Python writes for a number is one: 007 and 1.00 are names.
  is_number = text == str(tables.as_number(text))
  return text.removesuffix(".0") if is_number else text


def key_of(labels: Sequence[str]) -> Callable[[str], str]:
  """A function whose values differ for these labels, as few as do.

  Case counts only where nothing else tells two labels apart.
  """
  caseless = lambda label: identity(label).casefold()
  for key in (caseless, identity):
    if len(set(map(key, labels))) == len(labels):
      return key
  return str


def rows_of(head: Sequence[str], labels: Sequence[str]) -> list[int]:
  """The head's row of each label, by name; [] if its labels are others."""
  key = key_of(head)
  of_head, wanted = [*map(key, head)], [*map(key, labels)]
  if sorted(of_head) != sorted(wanted):
    return []
  return [of_head.index(label) for label in wanted]
