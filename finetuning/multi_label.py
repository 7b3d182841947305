"""Several labels of a text, or none: each is decided by itself."""

import json
from collections.abc import Sequence

import numpy as np
from scipy import special

from common import tensorflow_v1 as later
from common.errors import DataError
from corpus import tables
from finetuning import metrics
from finetuning.classification import Classification, ClassifierConfig
from finetuning.labels import identity

_THRESHOLD = "label_threshold"


def task_of(config: ClassifierConfig) -> Classification:
  """The task of run_classifier.py that the settings ask for."""
  if config.multi_label:
    return MultiLabel(config)
  return Classification(config)


class MultiLabel(Classification):
  """Predicts for each label whether a text or pair of texts has it."""

  if_too_many = "; see --label_separator"
  target_type = np.float32

  def __init__(self, config: ClassifierConfig):
    super().__init__(config)
    self._counts: dict[str, np.ndarray] = {}  # labels of each row of a file
    # Only a training's evaluations choose: those of a finished model, as on a
    # test set, must not look for what suits their own labels.
    self._threshold = config.label_threshold
    self._chooses = config.do_train and self._threshold is None
    if self._threshold is None:
      self._threshold = metrics.THRESHOLD

  def labels_of_data(self):
    path, labels = self.config.path("train"), list[str]()
    for of_row in self._sets(path, self.rows(path)):
      labels += of_row
    return f"{path}: column {self._table.label!r}", labels

  def _sets(self, path: str, rows: Sequence[tables.Row]) -> list[list[str]]:
    """Each row's labels; `DataError` for other values, or if no row has any."""
    sets: list[list[str]] = []
    for row in rows:
      stripped = dict.fromkeys(map(str.strip, self._labels_of(path, row)))
      stripped.pop("", None)
      sets.append([*stripped])
    if not any(sets):
      raise DataError(
        f"{path}: no row has a label: to train and evaluate some must"
      )
    return sets

  def _labels_of(self, path: str, row: tables.Row) -> list[str]:
    """A row's labels as they are written."""
    name, separator = self._table.label, self.config.label_separator
    value = row.values.get(name)
    if self.config.label_columns:
      return self._named_by_columns(path, row)
    if not isinstance(value, list):
      (text,) = self.column(path, [row], "label")
      return text.split(separator) if separator else [text]
    for label in value:
      if not isinstance(label, str):
        raise DataError(
          f"{path}: line {row.line}: {name} has {json.dumps(label)}, but "
          "labels are texts: write their names, in quotes"
        )
    return value

  def _named_by_columns(self, path: str, row: tables.Row) -> list[str]:
    labels = []
    for name in self.config.label_columns:
      flag = "--label_columns"
      (value,) = tables.column(path, [row], name, flag, may_be_empty=False)
      has_label = identity(value)
      if has_label not in ("0", "1"):
        raise DataError(
          f"{path}: line {row.line}: {name} is {value!r}, neither 0 nor 1"
        )
      if has_label == "1":
        labels.append(name)
    return labels

  def targets(self, path, rows, part):
    """Each row's 1.0 or 0.0 of all labels."""
    targets = np.zeros([len(rows), self.outputs], np.float32)
    if part == "predict":
      return [*targets]
    numbers, in_lines = [], []
    for number, labels in enumerate(self._sets(path, rows)):
      for label in labels:
        numbers.append(number)
        in_lines.append((rows[number].line, label))
    columns = self.rows_in(path, self._table.label, in_lines)
    targets[numbers, columns] = 1.0
    self._counts[path] = targets.sum(axis=1)
    return [*targets]

  def lines(self):
    lines = super().lines()
    for path, counts in self._counts.items():
      none = np.count_nonzero(counts == 0)
      lines.append(
        f"{path}: {counts.mean():.2f} labels of an example, {none:,} of "
        f"{len(counts):,} without one"
      )
    return lines

  def losses_and_correct(self, of_labels, logits, targets, policy):
    """The mean logistic loss over labels, and whether all are right at 0.5."""
    tf = later.tf
    targets = tf.reshape(targets, [-1, self.outputs])
    losses = tf.nn.sigmoid_cross_entropy_with_logits(targets, logits=logits)
    right = tf.reduce_all(tf.equal(logits > 0.0, targets > 0.5), axis=-1)
    return tf.reduce_mean(losses, axis=-1), tf.cast(right, tf.float32)

  def results(self, source, outputs):
    logits = self.logits(source, outputs).astype(float)
    shares, threshold = special.expit(logits), self._threshold
    targets = np.array([e.targets for e in source.examples], int)
    if self._chooses:
      threshold = metrics.best_threshold(targets, shares)
    predicted, results = (shares > threshold).astype(int), {}
    for name in self._table.metrics:
      results[name] = metrics.metric(name, len(self.labels))(targets, predicted)
    return {**results, _THRESHOLD: threshold}

  def chosen_by(self, results):
    self._threshold = results[_THRESHOLD]
    return {_THRESHOLD: self._threshold}

  def prediction(self, logits, labels):
    shares = special.expit(logits)
    separator, names = self.config.label_separator or ",", []
    for label, share in zip(labels, shares, strict=True):
      if share > self._threshold:
        names.append(label.replace(separator, f"\\{separator}"))
    return separator.join(names), shares

  def describe(self):
    task = super().describe()
    if self.config.label_threshold is not None:
      task[_THRESHOLD] = self.config.label_threshold
    return task
