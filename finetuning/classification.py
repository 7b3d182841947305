"""Labels or numbers for texts and pairs of texts: GLUE, and any table."""

import dataclasses
import functools
import io
import math
import os
from collections.abc import Sequence
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
from training import next_steps

_data = in_group("Data")

PREDICTIONS_FILE = "predictions.tsv"
# In labels in that file: separators and the escape character itself.
_ESCAPES = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"})


class Glue(NamedTuple):
  """How to read and score a GLUE task, https://arxiv.org/abs/1804.07461."""

  text: str  # name of a column, as pair and label are
  pair: str | None = None  # None for single texts
  label: str = "label"
  labels: tuple = ("0", "1")  # in the order of their numbers; (): regression
  metrics: tuple = ("accuracy",)  # the first one chooses the best
  evaluation: str = "dev"  # the file to evaluate on, without .tsv
  columns: tuple | None = None  # without a header (but the test file has one)


_PAIR = "sentence1", "sentence2"
_MNLI = Glue(
  *_PAIR,
  "gold_label",
  ("contradiction", "entailment", "neutral"),
  evaluation="dev_matched",
)
_F1, _ENTAILMENT = ("f1", "accuracy"), ("entailment", "not_entailment")
GLUE = {
  "cola": Glue(
    "sentence",
    metrics=("matthews", "accuracy"),
    columns=("source", "label", "original", "sentence"),
  ),
  "sst-2": Glue("sentence"),
  "mrpc": Glue("#1 String", "#2 String", "Quality", metrics=_F1),
  "sts-b": Glue(*_PAIR, "score", (), ("pearson", "spearman")),
  "qqp": Glue("question1", "question2", "is_duplicate", metrics=_F1),
  "mnli": _MNLI,
  "mnli-mm": _MNLI._replace(evaluation="dev_mismatched"),
  "qnli": Glue("question", "sentence", labels=_ENTAILMENT),
  "rte": Glue(*_PAIR, labels=_ENTAILMENT),
  "wnli": Glue(*_PAIR),
}


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
    "--task_name.", choices=metrics.CLASSIFICATION)
  # fmt: on

  kind: ClassVar[str] = "classifier"
  model_flags: ClassVar[tuple] = (
    *FinetuningConfig.model_flags, "regression", "metrics",
  )  # fmt: skip
  usual_flags: ClassVar[tuple] = (
    "text_column", "text_pair_column", "label_column",
  )  # fmt: skip

  def __post_init__(self):
    super().__post_init__()
    if self.task_name and self.task_name.lower() not in GLUE:
      raise UserError(
        f"--task_name={self.task_name}: not one of {', '.join(GLUE)}; for your "
        "own table leave it out and give --text_column and --label_column"
      )
    own = ("regression", "text_column", "text_pair_column", "label_column")
    if given := [n for n in own if self.task_name and getattr(self, n)]:
      raise UserError(
        f"--{given[0]} is for tables of your own, and --task_name="
        f"{self.task_name} has columns of its own: leave one of the two out"
      )
    for name in self.metrics:
      if name in metrics.REGRESSION and not self.predicts_numbers:
        remedy = "choose others" if self.task_name else "give --regression"
        raise UserError(f"--metrics={name} is of numbers: {remedy}")
      if name not in metrics.REGRESSION and self.predicts_numbers:
        raise UserError(
          f"--metrics={name} is of labels, but numbers are predicted: "
          f"choose from {', '.join(sorted(metrics.REGRESSION))}"
        )

  @property
  def predicts_numbers(self) -> bool:
    """Whether it is a regression."""
    return self.regression or bool(self.task_name and not self.table().labels)

  @classmethod
  def defaults(cls, task, given):
    known = super().defaults(task, given)
    if given.get("task_name"):  # it settles the columns and metrics
      shared = FinetuningConfig.model_flags
      return {name: known[name] for name in shared if name in known}
    return known

  @classmethod
  def flags_of(cls, task):
    columns = task.get("columns") or {}
    task = {**task, **{f"{name}_column": columns[name] for name in columns}}
    if "labels" in task:
      task["regression"] = not task["labels"]
    return super().flags_of(task)

  def as_dict(self):
    """Resolves defaults: a rank that starts late reads them from task.json."""
    return {**super().as_dict(), **self.flags_of(self.describe_table())}

  def describe_table(self) -> dict:
    """The keys "metrics" and "columns" of task.json."""
    text, pair, label = self.table()[:3]
    return {
      "metrics": list(self.table().metrics),
      "columns": {"text": text, "text_pair": pair, "label": label},
    }

  def table(self) -> Glue:
    """Columns, labels and metrics; the labels of your own table are ()."""
    if self.task_name:
      glue = GLUE[self.task_name.lower()]
      return glue._replace(metrics=tuple(self.metrics) or glue.metrics)
    usual = ("pearson", "spearman") if self.regression else ("accuracy",)
    return Glue(
      text=self.text_column or "sentence",
      pair=self.text_pair_column or None,
      label=self.label_column or "label",
      labels=(),
      metrics=tuple(self.metrics) or usual,
    )

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
    self._is_regression = config.predicts_numbers
    self.best_by = BestBy((self._table.metrics[0],), True)

  @functools.cached_property
  def labels(self) -> list[str]:
    """In the order of their numbers; [] for a regression."""
    if self._is_regression:
      return []
    known = self._labels_of_model()
    labels = list(self._table.labels)
    if not labels and known and not self.config.do_train:
      return known
    labels = labels or self._labels_of_table()
    # A model's rows keep their labels, whatever the order of this task.
    return known if set(known) == set(labels) else labels

  def _labels_of_model(self) -> list[str]:
    """Of the model that is used or trained on; [] if no file says them."""
    start = os.path.dirname(self.config.init_checkpoint or "")
    folder = model_folder(self.config) or start
    return description.read(folder).task.get("labels", [])

  def _labels_of_table(self) -> list[str]:
    """Those in the training's file, in the order of `label_order`."""
    if not (self.config.do_train or self.config.train_file):
      raise UserError(
        f"--output_dir={self.config.output_dir} has no run that says which "
        "labels there are: train first (--do_train), or give --train_file"
      )
    path = self.config.path("train")
    given = tables.column(
      path, self._rows(path), self._table.label, may_be_empty=False
    )
    found = sorted(set(given), key=label_order)
    if len(found) < 2:
      raise DataError(
        f"{path}: the labels of column {self._table.label!r} are all "
        f"{found[0]!r}: there is nothing to tell apart"
      )
    if len(found) > 1000:
      raise DataError(
        f"{path}: column {self._table.label!r} has {len(found)} different "
        "labels; for numbers give --regression"
      )
    return found

  def assumed(self):
    folder = model_folder(self.config)
    trains = self.config.do_train or folder is None
    if not self.labels or trains or description.read(folder).task.get("labels"):
      return []
    return [
      f"{folder}: nothing says which label each of the model's numbers is: "
      f"assumed in the order {', '.join(self.labels)}"
    ]

  def _rows(self, path: str, all_rows: bool = False) -> Sequence[tables.Row]:
    has_header = os.path.basename(path).startswith("test")
    columns = None if has_header else self._table.columns
    return tables.read_table(path, columns, all_rows)

  def read(self, part):
    path, most = self.config.path(part), self.config.max_seq_length
    tokenizer = self.config.tokenizer()
    rows = self._rows(path, all_rows=part == "predict")
    first, second = (
      tokenizer.encode_batch(tables.column(path, rows, name))
      if name
      else [None] * len(rows)
      for name in (self._table.text, self._table.pair)
    )
    known = part != "predict"
    targets = self._targets(path, rows) if known else [0] * len(rows)
    examples = [
      packed.Example(
        *encode_pair(tokenizer, most, a, b), f"line {row.line}", (target,)
      )
      for a, b, row, target in zip(first, second, rows, targets, strict=True)
    ]
    return packed.PackedSource(
      path,
      examples,
      self.config,
      np.float32 if self._is_regression else np.int32,
      cut=sum(map(lambda a, b: pair_length(a, b) > most, first, second)),
    )

  def _targets(self, path: str, rows) -> list:
    given = tables.column(path, rows, self._table.label, may_be_empty=False)
    numbers = {label: i for i, label in enumerate(self.labels)}
    read, wanted = numbers.__getitem__, f"one of {', '.join(self.labels[:10])}"
    if self._is_regression:
      read, wanted = float, "a number"
    targets = []
    for row, label in zip(rows, given, strict=True):
      try:
        targets.append(read(label))
      except (KeyError, ValueError) as e:
        raise DataError(
          f"{path}: line {row.line}: {self._table.label} is {label!r}, not "
          f"{wanted}"
        ) from e
      if not np.isfinite(targets[-1]):
        raise DataError(f"{path}: line {row.line}: {label} is not finite")
    return targets

  def head(self, batch, is_training, dropout_seed=None):
    return heads.classification(
      batch, len(self.labels) or 1, self.config, is_training, dropout_seed
    )

  def matmuls(self, rows, source):
    model = self.config.bert, self.config.policy
    examples, labels = rows * source.slots, len(self.labels) or 1
    return [
      *model_flops.encoder(*model, rows, source.tokens, source.slots),
      *model_flops.pooled(*model, examples, labels),
    ]

  def _logits(self, source, outputs) -> np.ndarray:
    """float32 [examples, labels]"""
    return outputs["logits"][source.places.row, source.places.slot]

  def result_names(self):
    return list(self._table.metrics)

  def results(self, source, outputs):
    logits = self._logits(source, outputs)
    targets = np.array([e.targets[0] for e in source.examples])
    predicted = logits[:, 0]
    if not self._is_regression:
      # F1 is of the second label in the task's order, not the model's rows'.
      order = self._table.labels or sorted(self.labels, key=label_order)
      numbers = np.array([order.index(label) for label in self.labels])
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
      io.TextIOWrapper(raw, encoding="utf-8", newline="\n") as f,
    ):
      print("index", "prediction", *labels, sep="\t", file=f)
      for number, row in enumerate(logits):
        if self._is_regression:
          print(number, f"{row[0]:.4f}", sep="\t", file=f)
        else:
          shares = [f"{p:.6f}" for p in special.softmax(row.astype(float))]
          print(number, labels[np.argmax(row)], *shares, sep="\t", file=f)
    return [f"predictions {path}"]

  def next_steps(self):
    return next_steps.after(
      self.config.output_dir,
      self.config.kind,
      pairs=bool(self._table.pair),
      converts=not self.config.bert.pre_layer_norm,
    )

  def describe(self):
    return {"labels": self.labels, **self.config.describe_table()}


def label_order(label: str) -> tuple:
  """Sort key: numbers by size, then other labels by the alphabet."""
  try:
    number = float(label)
  except ValueError:
    number = math.nan
  # NaN has no place in an order of numbers, so it counts as a word.
  return (1, 0.0, label) if math.isnan(number) else (0, number, label)


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
