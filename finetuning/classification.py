"""Labels or numbers for texts and pairs of texts: GLUE, and any table."""

import dataclasses
import functools
import io
import math
import os
import unicodedata
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from scipy import special

from checkpoints import description
from checkpoints.metrics import BestBy
from common.errors import DataError, UserError
from common.files import atomic_write
from common.settings import in_group
from finetuning import heads, metrics, packed, tables, windows
from finetuning.finetune import FinetuningConfig, FinetuningTask
from finetuning.task_file import model_folder
from model import model_flops

_data = in_group("Data")

PREDICTIONS_FILE = "predictions.tsv"
_MOST_LABELS = 1000
# In labels in that file: separators and the escape character itself.
_ESCAPES = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"})

_ACCURACY, _CORRELATIONS = ("accuracy",), ("pearson", "spearman")


class Glue(NamedTuple):
  """How to read and score a GLUE task, https://arxiv.org/abs/1804.07461."""

  text: str  # name of a column, as pair and label are
  pair: str | None = None  # None for single texts
  label: str = "label"
  # In the order of their numbers; (): a regression, None: those in the data.
  labels: tuple | None = ("0", "1")
  metrics: tuple = _ACCURACY  # the first one chooses the best
  evaluation: str = "dev"  # the file to evaluate on, without .tsv
  columns: tuple | None = None  # without a header (but the test file has one)
  names: tuple = ()  # that published models give `labels` that are numbers


_PAIR = "sentence1", "sentence2"
_MNLI = Glue(
  *_PAIR,
  "gold_label",
  ("contradiction", "entailment", "neutral"),
  evaluation="dev_matched",
)
_F1, _ENTAILMENT = ("f1", "accuracy"), ("entailment", "not_entailment")
_EQUAL = ("not_equivalent", "equivalent")
_DUPLICATE = ("not_duplicate", "duplicate")
GLUE = {
  "cola": Glue(
    "sentence",
    metrics=("matthews", "accuracy"),
    columns=("source", "label", "original", "sentence"),
    names=("unacceptable", "acceptable"),
  ),
  "sst-2": Glue("sentence", names=("negative", "positive")),
  "mrpc": Glue("#1 String", "#2 String", "Quality", metrics=_F1, names=_EQUAL),
  "sts-b": Glue(*_PAIR, "score", (), _CORRELATIONS),
  "qqp": Glue(
    "question1", "question2", "is_duplicate", metrics=_F1, names=_DUPLICATE
  ),
  "mnli": _MNLI,
  "mnli-mm": _MNLI._replace(evaluation="dev_mismatched"),
  "qnli": Glue("question", "sentence", labels=_ENTAILMENT),
  "rte": Glue(*_PAIR, labels=_ENTAILMENT),
  "wnli": Glue(*_PAIR, names=("not_entailment", "entailment")),
}
_OWN_TABLE = ("regression", "text_column", "text_pair_column", "label_column")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierConfig(FinetuningConfig):
  """Settings of run_classifier.py; fields are named like its flags."""

  # fmt: off
  task_name: str | None = _data(None,
    f"Task of GLUE: {', '.join(GLUE)}. Without it the data are a table of your "
    "own, read by the names of its columns.")
  data_dir: str | None = _data(None,
    "Folder with GLUE's train.tsv, dev.tsv and test.tsv. --train_file, "
    "--eval_file and --predict_file win over it.")
  train_file: str | None = _data(None,
    "Table (.tsv, .csv or .jsonl) to train on.")
  eval_file: str | None = _data(None,
    "Table (.tsv, .csv or .jsonl) to evaluate on, which chooses the best "
    "checkpoint.")
  predict_file: str | None = _data(None,
    "Table (.tsv, .csv or .jsonl) whose labels to predict.")
  text_column: str | None = _data(None,
    "Column of the text. Default: sentence.")
  text_pair_column: str | None = _data(None,
    "Column of the second text of a pair. Without it examples are single "
    "texts.")
  label_column: str | None = _data(None, "Column of the label. Default: label.")
  regression: bool = _data(False, "Predict numbers: the labels are numbers.")
  metrics: tuple = in_group("Evaluation")((),
    "Metrics to report; the first one chooses the best checkpoint. Default: "
    "accuracy, or pearson and spearman with --regression, or those of "
    "--task_name.", choices=(*metrics.OF_LABELS, *metrics.OF_NUMBERS))
  # fmt: on

  kind: ClassVar[str] = "classifier"

  def __post_init__(self):
    super().__post_init__()
    if self.task_name:
      if self.task_name.lower() not in GLUE:
        raise UserError(
          f"--task_name={self.task_name}: not one of {', '.join(GLUE)}; for a "
          "table of your own leave it out"
        )
      for name in _OWN_TABLE:
        if getattr(self, name):
          raise UserError(f"give --{name} or --task_name, which settles it")
    is_regression = self.table().labels == ()
    fitting = metrics.OF_NUMBERS if is_regression else metrics.OF_LABELS
    if set(self.metrics) - set(fitting):
      raise UserError(
        f"--metrics={','.join(self.metrics)}: not all are of "
        f"{', '.join(fitting)}, the metrics of such labels (see --regression)"
      )

  @classmethod
  def defaults(cls, task, given):
    saved = super().defaults(task, given)
    if given.get("task_name"):  # it settles the columns and metrics
      for name in (*_OWN_TABLE, "metrics"):
        saved.pop(name, None)
    return saved

  def as_dict(self):
    """Resolves defaults: a rank that starts late reads them from task.json."""
    task = {"task": self.kind, **self.describe_table()}
    return {**super().as_dict(), **self.defaults(task, {})}

  def describe_table(self) -> dict:
    """The keys "metrics" and "columns" of task.json."""
    text, pair, label = self.table()[:3]
    return {
      "metrics": list(self.table().metrics),
      "columns": {"text": text, "text_pair": pair, "label": label},
    }

  def table(self) -> Glue:
    """Columns, labels and metrics."""
    if self.task_name:
      table = GLUE[self.task_name.lower()]
    else:
      table = Glue(
        text=self.text_column or "sentence",
        pair=self.text_pair_column or None,
        label=self.label_column or "label",
        labels=() if self.regression else None,
        metrics=_CORRELATIONS if self.regression else _ACCURACY,
      )
    return table._replace(metrics=tuple(self.metrics) or table.metrics)

  def path(self, part: str) -> str:
    """The file to "train", "eval" or "predict" with, or `UserError`."""
    if given := getattr(self, f"{part}_file"):
      return given
    if not self.data_dir:
      raise UserError(f"give --{part}_file, or --data_dir with GLUE's files")
    dev = self.table().evaluation
    test = dev.replace("dev", "test")
    name = {"train": "train", "eval": dev, "predict": test}[part]
    return os.path.join(self.data_dir, f"{name}.tsv")


class Classification(FinetuningTask):
  """Predicts a label, or a number, for each text or pair of texts."""

  config: ClassifierConfig

  def __init__(self, config: ClassifierConfig):
    super().__init__(config)
    self._table = config.table()
    self._is_regression = self._table.labels == ()
    self.best_by = BestBy((self._table.metrics[0],), True)
    self.reads_pairs = bool(self._table.pair)

  @functools.cached_property
  def _head(self) -> tuple[list[str], list[str], list[int]]:
    """The labels of its rows; the task's labels in order, and their rows."""
    of_model, of_task = self._labels_of_model(), self._table.labels
    if of_task is None:
      is_known = of_model and not self.config.do_train
      of_task = of_model if is_known else self._labels_of_file()
      of_task = sorted(of_task, key=label_order)
    # A model's rows keep their labels, whatever the order of this task.
    rows = rows_of(of_model, of_task) or rows_of(of_model, self._table.names)
    labels = of_model if rows else list(of_task)
    return labels, list(of_task), rows or [*range(len(labels))]

  # Of the head's rows, in their order; [] for a regression.
  labels = property(lambda self: self._head[0])

  def _labels_of_model(self) -> list[str]:
    """Of the model that is used or trained on; [] if no file says them."""
    start = description.folder_of(self.config.init_checkpoint)
    folder = model_folder(self.config) or start
    return description.read(folder).task.get("labels", [])

  def _labels_of_file(self) -> list[str]:
    """Those in the training's file."""
    if not (self.config.do_train or self.config.train_file):
      raise UserError(
        f"--output_dir={self.config.output_dir} has no run that says which "
        "labels there are: train first (--do_train), or give --train_file"
      )
    path, name = self.config.path("train"), self._table.label
    values = tables.column(path, self._rows(path), name, may_be_empty=False)
    names: dict[str, str] = {}
    for value in sorted(set(values), key=lambda value: (len(value), value)):
      names.setdefault(identity(value), value.strip())  # the shortest one
    labels = [*names.values()]
    if not 2 <= len(labels) <= _MOST_LABELS:
      raise DataError(
        f"{path}: column {name!r} has {len(labels)} different labels, such as "
        f"{labels[0]!r}: a classifier needs 2 to {_MOST_LABELS}; for numbers "
        "give --regression"
      )
    return labels

  def _rows(self, path: str, all_rows: bool = False) -> Sequence[tables.Row]:
    has_header = os.path.basename(path).startswith("test")
    columns = None if has_header else self._table.columns
    return tables.read_table(path, columns, all_rows)

  def read(self, part):
    path, most = self.config.path(part), self.config.max_seq_length
    tokenizer = self.config.tokenizer()
    rows = self._rows(path, all_rows=part == "predict")
    texts = []
    for name in filter(None, (self._table.text, self._table.pair)):
      texts.append(tokenizer.encode_batch(tables.column(path, rows, name)))
    targets = (
      [0] * len(rows) if part == "predict" else self._targets(path, rows)
    )
    examples, cut = [], 0
    for row, target, *parts in zip(rows, targets, *texts, strict=True):
      ids, segments = encode_pair(tokenizer, most, *parts)
      cut += pair_length(*parts) > most
      where = f"line {row.line}"
      examples.append(packed.Example(ids, segments, where, (target,)))
    dtype = np.float32 if self._is_regression else np.int32
    return packed.PackedSource(path, examples, self.config, dtype, cut)

  def _targets(self, path: str, rows) -> list:
    """Each row's number: of its label, or for a regression its label."""
    name, (_, known, numbers) = self._table.label, self._head
    key = key_of(known)
    number_of = dict(zip(map(key, known), numbers, strict=True))
    wanted = f"one of {', '.join(known[:10])}"
    if self._is_regression:
      wanted = "a finite number"
    targets = []
    labels = tables.column(path, rows, name, may_be_empty=False)
    for row, label in zip(rows, labels, strict=True):
      target = number_of.get(key(label), math.nan)
      if self._is_regression:
        target = _as_number(label)
      if not math.isfinite(target):
        raise DataError(
          f"{path}: line {row.line}: {name} is {label!r}, not {wanted}"
        )
      targets.append(target)
    return targets

  def head(self, batch, is_training, dropout_seed=None):
    return heads.classification(
      batch, len(self.labels) or 1, self.config, is_training, dropout_seed
    )

  def matmuls(self, rows, source):
    model = self.config.bert, self.config.policy
    examples, labels = rows * source.slots, len(self.labels) or 1
    read = 0 if self.config.bert.pools_all_tokens else source.slots
    return [
      *model_flops.encoder(*model, rows, source.tokens, read),
      *model_flops.pooled(*model, examples, labels),
    ]

  def _logits(self, source, outputs) -> np.ndarray:
    """float32 [examples, labels]"""
    return outputs["logits"][source.places.row, source.places.slot]

  def results(self, source, outputs):
    logits = self._logits(source, outputs)
    targets = np.array([e.targets[0] for e in source.examples])
    predicted = logits[:, 0]
    if not self._is_regression:
      # F1 is of the second label in the task's order, not the model's rows'.
      numbers = np.argsort(self._head[2])
      targets, predicted = numbers[targets], numbers[np.argmax(logits, axis=1)]
    return {
      name: metrics.metric(name, len(self.labels))(targets, predicted)
      for name in self._table.metrics
    }

  def write_predictions(self, source, outputs):
    """Tab-separated: row from 0, prediction, probability of each label."""
    logits = self._logits(source, outputs)
    path = os.path.join(self.config.output_dir, PREDICTIONS_FILE)
    labels = [label.translate(_ESCAPES) for label in self.labels]
    with (
      atomic_write(path) as raw,
      # JSON's half of a surrogate pair has no UTF-8.
      io.TextIOWrapper(raw, "utf-8", "backslashreplace", newline="\n") as f,
    ):
      print("index", "prediction", *labels, sep="\t", file=f)
      for number, row in enumerate(logits):
        if self._is_regression:
          print(number, f"{row[0]:.4f}", sep="\t", file=f)
        else:
          shares = [f"{p:.6f}" for p in special.softmax(row.astype(float))]
          print(number, labels[np.argmax(row)], *shares, sep="\t", file=f)
    return [f"predictions {path}"]

  def describe(self):
    return {"labels": self.labels, **self.config.describe_table()}


def _as_number(text: str) -> float:
  """NaN for a word."""
  try:
    return float(text)
  except ValueError:
    return math.nan


def label_order(label: str) -> tuple:
  """Sort key: numbers by size, then other labels by the alphabet."""
  number = _as_number(label)
  # NaN has no place in an order of numbers, so it counts as a word.
  return (1, 0.0, label) if math.isnan(number) else (0, number, label)


@functools.lru_cache(_MOST_LABELS)
def identity(label: str) -> str:
  """The same for 1, 1.0, true and " 1", which are one label."""
  text = unicodedata.normalize("NFC", " ".join(label.split()))
  text = {"true": "1", "false": "0"}.get(text.lower(), text)
  # Of what Python writes for a number: 007 and 1.00 are names.
  is_number = text == str(_as_number(text))
  return text.removesuffix(".0") if is_number else text


def key_of(labels: Sequence[str]) -> Callable[[str], str]:
  """What tells these labels apart; case does only where nothing else does."""
  keys = (lambda label: identity(label).casefold(), identity)
  known = (key for key in keys if len({*map(key, labels)}) == len(labels))
  return next(known, str)


def rows_of(head: Sequence[str], labels: Sequence[str]) -> list[int]:
  """The row of each label in a head, by name; [] if it is of other labels."""
  key = key_of(head)
  there, here = [*map(key, head)], [*map(key, labels)]
  return [*map(there.index, here)] if sorted(there) == sorted(here) else []


def pair_length(a, b=None) -> int:
  """Tokens of `encode_pair` if it cuts nothing."""
  return len(a) + 2 + (0 if b is None else len(b) + 1)


def encode_pair(tokenizer, max_seq_length: int, a, b=None) -> tuple:
  """`windows.join` of int [tokens] arrays, cut to the length.

  The longer text of a pair loses its end, token by token, as in google/bert.
  """
  if b is None:
    return windows.join(tokenizer, a[: max_seq_length - 2])
  room = max_seq_length - 3
  # Where the longer text (b, if they are equal) loses one token at a time.
  keep_b = min(len(b), max(room // 2, room - len(a)))
  return windows.join(tokenizer, a[: room - keep_b], b[:keep_b])
