"""Labels as the names of a head's rows: a model's own, or found in its data."""

import functools
import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from checkpoints import run_start
from common.errors import DataError, UserError
from finetuning.task import FinetuningTask

_MOST_LABELS = 1000


class LabelledTask(FinetuningTask):
  """A task whose head has a row for each label."""

  # In the order of their numbers; (): a regression, None: those in the data.
  known_labels: Sequence[str] | None = None
  published_names: Sequence[str] = ()  # of `known_labels` that are numbers
  if_too_many: ClassVar[str] = ""  # a remedy

  def labels_of_data(self) -> tuple[str, Iterable[str]]:
    """Where the labels to train on are, and all of them."""
    raise NotImplementedError

  @functools.cached_property
  def _head(self) -> tuple[list[str], list[str], list[int]]:
    """The labels of its rows; the task's labels in order, and their rows."""
    of_model, of_task = self._labels_of_model(), self.known_labels
    if of_task is None and of_model and not self.config.do_train:
      of_task = sorted(of_model, key=label_order)
    elif of_task is None:
      of_task = sorted(self._labels_of_file(), key=label_order)
    # A model's rows keep their labels, whatever the order of this task.
    rows = rows_of(of_model, of_task) or rows_of(of_model, self.published_names)
    labels = of_model if rows else list(of_task)
    return labels, list(of_task), rows or [*range(len(labels))]

  # Of the head's rows, in their order; [] for a regression.
  labels = property(lambda self: self._head[0])

  @functools.cached_property
  def _rows_by_key(self) -> tuple[Callable[[str], str], dict[str, int]]:
    _, of_task, rows = self._head
    key = key_of(of_task)
    return key, dict(zip(map(key, of_task), rows, strict=True))

  def row_of(self, label: str, place: str) -> int:
    """The row of a label, which stands at `place`; `DataError` without one."""
    key, rows = self._rows_by_key
    if key(label) not in rows:
      known = ", ".join(self._head[1][:10])
      raise DataError(f"{place} is {label!r}, not one of {known}")
    return rows[key(label)]

  def _labels_of_model(self) -> list[str]:
    """Of the model that is used or trained on; [] if no file says them."""
    return run_start.origin_of(self.config).task.get("labels", [])

  def _labels_of_file(self) -> list[str]:
    """Those in the training's file."""
    if not (self.config.do_train or self.config.train_file):
      raise UserError(
        f"--output_dir={self.config.output_dir} has no run that says which "
        "labels there are: train first (--do_train), or give --train_file"
      )
    place, values = self.labels_of_data()
    names: dict[str, str] = {}
    for value in sorted(sorted(set(values)), key=len):
      names.setdefault(identity(value), value.strip())  # the shortest one
    labels = [*names.values()]
    if not 2 <= len(labels) <= _MOST_LABELS:
      raise DataError(
        f"{place} has {len(labels)} different labels, such as {labels[0]!r}: a "
        f"classifier needs 2 to {_MOST_LABELS}{self.if_too_many}"
      )
    return labels


def as_number(text: str) -> float:
  """NaN for a word."""
  try:
    return float(text)
  except ValueError:
    return math.nan


def label_order(label: str) -> tuple:
  """Sort key: numbers by size, then other labels by the alphabet."""
  number = as_number(label)
  # NaN has no place in an order of numbers, so it counts as a word.
  return (1, 0.0, label) if math.isnan(number) else (0, number, label)


@functools.lru_cache(_MOST_LABELS)
def identity(label: str) -> str:
  """The same for 1, 1.0, true and " 1", which are one label."""
  text = unicodedata.normalize("NFC", " ".join(label.split()))
  text = {"true": "1", "false": "0"}.get(text.lower(), text)
  # Of what Python writes for a number: 007 and 1.00 are names.
  is_number = text == str(as_number(text))
  return text.removesuffix(".0") if is_number else text


def key_of(labels: Sequence[str]) -> Callable[[str], str]:
  """What tells these labels apart; case does only where nothing else does."""
  caseless = lambda label: identity(label).casefold()
  for key in (caseless, identity):
    if len({*map(key, labels)}) == len(labels):
      return key
  return str


def rows_of(head: Sequence[str], labels: Sequence[str]) -> list[int]:
  """The row of each label in a head, by name; [] if it is of other labels."""
  key = key_of(head)
  there, here = [*map(key, head)], [*map(key, labels)]
  if sorted(there) != sorted(here):
    return []
  return [there.index(label) for label in here]
