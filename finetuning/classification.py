"""Sentences and pairs of them to a label or a number: GLUE, and any table."""

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from common.errors import DataError, UserError
from common.settings import in_group
from finetuning import heads, metrics, packed, tables
from finetuning.finetune import FinetuningConfig, Task
from finetuning.settled import model_folder, saved_task
from model import model_flops
from training import training_hooks

_data = in_group("Data")

PREDICTIONS_FILE = "predictions.tsv"
# What would end a field there, and what marks it.
_ESCAPES = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"})


class Glue(NamedTuple):
  """One of GLUE's tasks, https://arxiv.org/abs/1804.07461, as its files are.

  Attributes:
    text: the column of the text.
    pair: that of the second text, or None.
    label: that of the label.
    labels: in the order of their numbers; none: it is a regression.
    metrics: names in `metrics.CLASSIFICATION`; the first one chooses the best.
    evaluation: its file to evaluate on, without .tsv.
    columns: of files without a header (but the test file has one).
  """

  text: str
  pair: str | None
  label: str
  labels: tuple
  metrics: tuple
  evaluation: str = "dev"
  columns: tuple | None = None


_YES_NO = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_MNLI = Glue(
  "sentence1",
  "sentence2",
  "gold_label",
  ("contradiction", "entailment", "neutral"),
  ("accuracy",),
  "dev_matched",
)
GLUE = {
  "cola": Glue(
    "sentence",
    None,
    "label",
    _YES_NO,
    ("matthews", "accuracy"),
    columns=("source", "label", "original", "sentence"),
  ),
  "sst-2": Glue("sentence", None, "label", _YES_NO, ("accuracy",)),
  "mrpc": Glue(
    "#1 String", "#2 String", "Quality", _YES_NO, ("f1", "accuracy")
  ),
  "sts-b": Glue("sentence1", "sentence2", "score", (), ("pearson", "spearman")),
  "qqp": Glue(
    "question1", "question2", "is_duplicate", _YES_NO, ("f1", "accuracy")
  ),
  "mnli": _MNLI,
  "mnli-mm": _MNLI._replace(evaluation="dev_mismatched"),
  "qnli": Glue("question", "sentence", "label", _ENTAILMENT, ("accuracy",)),
  "rte": Glue("sentence1", "sentence2", "label", _ENTAILMENT, ("accuracy",)),
  "wnli": Glue("sentence1", "sentence2", "label", _YES_NO, ("accuracy",)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierConfig(FinetuningConfig):
  """What run_classifier.py is told; fields are named like its flags."""

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
    if self.task_name and self.regression:
      raise UserError("--regression is for tables of your own: leave it out")
    for name in self.metrics:
      if name in metrics.REGRESSION and not self.regression:
        raise UserError(f"--metrics={name} is of numbers: give --regression")
      if name not in metrics.REGRESSION and self.regression:
        raise UserError(
          f"--metrics={name} is of labels, but --regression predicts numbers: "
          f"choose from {', '.join(sorted(metrics.REGRESSION))}"
        )

  @classmethod
  def found(cls, flags):
    found = super().found(flags)
    if flags.task_name:  # it says what is not of all fine-tuning
      shared = FinetuningConfig.model_flags
      return {name: found[name] for name in shared if name in found}
    return found

  @classmethod
  def flags_of(cls, task):
    columns = task.get("columns") or {}
    task = {**task, **{f"{name}_column": columns[name] for name in columns}}
    if "labels" in task:
      task["regression"] = not task["labels"]
    return super().flags_of(task)

  def as_dict(self):
    """Says what defaults stand for.

    A rank that joins later has found it in task.json.
    """
    table = self.table()
    return {
      **super().as_dict(),
      "text_column": table.text,
      "text_pair_column": table.pair,
      "label_column": table.label,
      "metrics": list(table.metrics),
    }

  def table(self) -> Glue:
    """Columns, labels and metrics; labels may still be ()."""
    if self.task_name:
      return GLUE[self.task_name.lower()]
    usual = ("pearson", "spearman") if self.regression else ("accuracy",)
    return Glue(
      text=self.text_column or "sentence",
      pair=self.text_pair_column or None,
      label=self.label_column or "label",
      labels=(),
      metrics=tuple(self.metrics) or usual,
    )

  def path(self, part: str) -> str:
    """The file to "train", "eval" or "predict" with.

    Raises:
      UserError: neither a flag nor --data_dir says which.
    """
    if given := getattr(self, f"{part}_file"):
      return given
    if not self.data_dir:
      raise UserError(f"give --{part}_file, or --data_dir with GLUE's files")
    dev = self.table().evaluation
    name = {
      "train": "train",
      "eval": dev,
      "predict": dev.replace("dev", "test"),
    }
    return os.path.join(self.data_dir, name[part] + ".tsv")


class Classification(Task):
  """A label, or a number, for each text or pair of texts."""

  def __init__(self, config: ClassifierConfig):
    super().__init__(config)
    self._table = config.table()
    self._is_regression = config.regression or (
      bool(config.task_name) and not self._table.labels
    )
    self.best_by = training_hooks.BestBy((self._table.metrics[0],), True)

  @functools.cached_property
  def labels(self) -> list[str]:
    """In the order of their numbers; [] for a regression.

    Of a table they are what the training file has, or what a run before found.
    """
    if self._is_regression:
      return []
    if self._table.labels:
      return list(self._table.labels)
    if not self.config.do_train:
      folder = model_folder(self.config)
      saved = folder is not None and saved_task(folder).get("labels")
      if saved:
        return saved
      if not self.config.train_file:
        raise UserError(
          f"--output_dir={self.config.output_dir} has no run that says which "
          "labels there are: train first (--do_train), or give --train_file"
        )
    path = self.config.path("train")
    found = sorted(set(self._column(path, self._table.label)), key=label_order)
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

  def _rows(self, path: str, all_rows: bool = False) -> Sequence[tables.Row]:
    columns = self._table.columns
    if columns and os.path.basename(path).startswith("test"):
      columns = None
    return tables.read_table(path, columns, all_rows)

  def _column(self, path: str, name: str) -> list[str]:
    return tables.column(path, self._rows(path), name)

  @functools.cached_property
  def training_set(self) -> packed.PackedSource:
    return self._source(self.config.path("train"), has_labels=True)

  @functools.cached_property
  def evaluation_set(self) -> packed.PackedSource:
    return self._source(self.config.path("eval"), has_labels=True)

  @functools.cached_property
  def prediction_set(self) -> packed.PackedSource:
    return self._source(self.config.path("predict"), has_labels=False)

  def _source(self, path: str, has_labels: bool) -> packed.PackedSource:
    rows = self._rows(path, all_rows=not has_labels)
    texts = [tables.column(path, rows, self._table.text)]
    if self._table.pair:
      texts.append(tables.column(path, rows, self._table.pair))
    tokenizer, most = self.config.tokenizer(), self.config.max_seq_length
    inputs = encode_texts(tokenizer, most, *texts)
    targets = self._targets(path, rows) if has_labels else [0] * len(rows)
    examples = [
      packed.Example(ids, segments, f"line {row.line}", (target,))
      for (ids, segments), row, target in zip(
        inputs.pairs, rows, targets, strict=True
      )
    ]
    return packed.PackedSource(
      path,
      examples,
      most,
      self.config.examples_per_record,
      np.float32 if self._is_regression else np.int32,
      cut=inputs.cut,
    )

  def _targets(self, path: str, rows) -> list:
    given = tables.column(path, rows, self._table.label)
    numbers = {label: i for i, label in enumerate(self.labels)}
    targets = []
    for row, label in zip(rows, given, strict=True):
      try:
        target = float(label) if self._is_regression else numbers[label]
      except (KeyError, ValueError) as e:
        wanted = (
          "a number"
          if self._is_regression
          else "one of " + ", ".join(self.labels[:10])
        )
        raise DataError(
          f"{path}: line {row.line}: {self._table.label} is {label!r}, not "
          f"{wanted}"
        ) from e
      if not np.isfinite(target):
        raise DataError(f"{path}: line {row.line}: {label} is not finite")
      targets.append(target)
    return targets

  def head(self, batch, is_training, dropout_seed=None):
    return heads.classification(
      batch, len(self.labels) or 1, self.config, is_training, dropout_seed
    )

  def head_matmuls(self, rows, source):
    return model_flops.pooled(
      self.config.bert,
      self.config.policy,
      rows * source.slots,
      len(self.labels) or 1,
    )

  def _logits(self, source, outputs) -> np.ndarray:
    """float32 [examples, labels]"""
    return outputs["logits"][source.places.row, source.places.slot]

  def result_names(self):
    return list(self._table.metrics)

  def results(self, source, outputs):
    logits = self._logits(source, outputs)
    targets = np.array([e.targets[0] for e in source.examples])
    predicted = (
      logits[:, 0] if self._is_regression else np.argmax(logits, axis=1)
    )
    return {
      name: metrics.metric(name, len(self.labels))(targets, predicted)
      for name in self._table.metrics
    }

  def write_predictions(self, source, outputs):
    """One line for each row of the file that is predicted, in its order.

    Fields, between tabs: the row's number from 0, the prediction, and each
    label's probability. In labels a backslash, a tab, a line feed and a
    carriage return are written \\\\, \\t, \\n and \\r.
    """
    logits = self._logits(source, outputs)
    path = os.path.join(self.config.output_dir, PREDICTIONS_FILE)
    labels = [label.translate(_ESCAPES) for label in self.labels]
    with open(path + ".tmp", "w", encoding="utf-8", newline="\n") as f:
      print("index", "prediction", *labels, sep="\t", file=f)
      for number, row in enumerate(logits):
        if self._is_regression:
          print(number, f"{row[0]:.4f}", sep="\t", file=f)
        else:
          shares = [f"{p:.6f}" for p in probabilities(row)]
          print(number, labels[np.argmax(row)], *shares, sep="\t", file=f)
    os.replace(path + ".tmp", path)
    return [f"predictions {path}"]

  def describe(self):
    return {
      "labels": self.labels,
      "metrics": list(self._table.metrics),
      "columns": {
        "text": self._table.text,
        "text_pair": self._table.pair,
        "label": self._table.label,
      },
    }


def label_order(label: str) -> tuple:
  """Numbers by size, then other labels by the alphabet."""
  try:
    number = float(label)
  except ValueError:
    number = math.nan
  # NaN is neither above nor below a number: a word, or no order would hold.
  return (1, 0.0, label) if math.isnan(number) else (0, number, label)


def probabilities(logits: np.ndarray) -> np.ndarray:
  """Softmax over the last axis, in float64."""
  shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
  weights = np.exp(shifted)
  return weights / weights.sum(axis=-1, keepdims=True)


class EncodedTexts(NamedTuple):
  """Inputs of the encoder."""

  pairs: list  # (ids, segments), int32 [tokens] each, of each text
  cut: int  # how many texts lost their end


def encode_texts(
  tokenizer, max_seq_length: int, texts: Sequence[str], pairs=None
) -> EncodedTexts:
  """[CLS] text [SEP], and the second text with another [SEP].

  Too long a text loses its end; of a pair the longer one, a token at a time, as
  in google/bert.

  Args:
    tokenizer: a `tokenization.Encoder`.
    max_seq_length: special tokens included.
    texts: [n].
    pairs: (optional) [n].
  """
  first = tokenizer.encode_batch(texts)
  second = tokenizer.encode_batch(pairs) if pairs else [None] * len(first)
  both = list(zip(first, second, strict=True))
  whole = [
    len(a) + 2 + (0 if b is None else len(b) + 1) <= max_seq_length
    for a, b in both
  ]
  return EncodedTexts(
    [encode_pair(tokenizer, max_seq_length, a, b) for a, b in both],
    whole.count(False),
  )


def encode_pair(tokenizer, max_seq_length: int, a, b=None) -> tuple:
  """Ids and segments of one input; `a` and `b` are int [tokens]."""
  cls, sep = [tokenizer.cls_id], [tokenizer.sep_id]
  if b is None:
    ids = np.concatenate([cls, a[: max_seq_length - 2], sep])
    return ids.astype(np.int32), np.zeros(len(ids), np.int32)
  room = max_seq_length - 3
  # What taking from the longer one (b, if they are as long) would leave.
  keep_b = min(len(b), max(room // 2, room - len(a)))
  a = a[: room - keep_b]
  b = b[:keep_b]
  ids = np.concatenate([cls, a, sep, b, sep]).astype(np.int32)
  segments = np.zeros(len(ids), np.int32)
  segments[len(a) + 2 :] = 1
  return ids, segments
