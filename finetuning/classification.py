"""Labels or numbers for texts and pairs of texts: GLUE, and any table."""

import dataclasses
import operator
import os
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from scipy import special

from checkpoints import run_start
from checkpoints.metrics import BestBy
from common import tensorflow_v1 as later
from common.errors import UserError
from common.settings import in_group
from corpus import tables
from finetuning import metrics, packed
from finetuning.behaviour import PAIRS, SINGLE, Behaviour, text_and_shares
from finetuning.labels import LabelledTask
from finetuning.task import FinetuningConfig
from finetuning.windows import encode_pair
from model import tasks

_data = in_group("Data")

PREDICTIONS_FILE = "predictions.tsv"
# In labels in that file: separators and the escape character itself.
_ESCAPES = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"})

_CORRELATIONS = tuple(metrics.OF_NUMBERS)


class Glue(NamedTuple):
  """How to read and score a GLUE task, https://arxiv.org/abs/1804.07461."""

  text: str  # name of a column, as pair and label are
  pair: str | None = None  # None for single texts
  label: str = "label"
  # In the order of their numbers; (): a regression, None: those in the data.
  labels: tuple | None = ("0", "1")
  metrics: tuple = ("accuracy",)  # the first one chooses the best
  evaluation: str = "dev"  # the file to evaluate on, without .tsv
  columns: tuple | None = None  # without a header (but the test file has one)
  names: tuple = ()  # that published models give `labels` that are numbers


_PAIR = "sentence1", "sentence2"
_MNLI = Glue(
  *_PAIR, "gold_label", ("contradiction", "entailment", "neutral"),
  evaluation="dev_matched",
)  # fmt: skip
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
# Field of `Glue` -> the flag that names such a column in another table.
_COLUMN_FLAGS = {
  "text": "text_column",
  "pair": "text_pair_column",
  "label": "label_column",
}
_OWN_TABLE = ("regression", "multi_label", *_COLUMN_FLAGS.values())


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
  text_column: str | None = _data(None,
    "Column of the text. Default: sentence.")
  text_pair_column: str | None = _data(None,
    "Column of the second text of a pair. Without it examples are single "
    "texts.")
  label_column: str | None = _data(None, "Column of the label. Default: label.")
  regression: bool = _data(False, "Predict numbers: the labels are numbers.")
  multi_label: bool = _data(False,
    "Decide each label by itself, so that a text may have several, or none: "
    "the labels are a list of texts in JSON lines, or a text with "
    "--label_separator between them, or --label_columns.",
    excludes=("regression", "task_name"))
  label_separator: str = _data(",",
    "What stands between the labels of a row. An empty text separates nothing.",
    needs="multi_label")
  label_columns: tuple = _data((),
    "Columns of which each is a label: 1 where a row has it, else 0. They "
    "count instead of --label_column.", needs="multi_label")
  label_threshold: float | None = in_group("Evaluation")(None,
    "Probability above which a text has a label. Default: the one with the "
    "highest F1 over all labels of the file that a training is evaluated on, "
    "which the model's folder keeps, or else 0.5.", needs="multi_label",
    low=0, below=1)
  metrics: tuple = in_group("Evaluation")((),
    "Metrics to report; the first one chooses the best checkpoint. Default: "
    "accuracy, or pearson and spearman with --regression, or those of "
    "--task_name, or the last three with --multi_label.", choices=(
      *metrics.OF_LABELS, *metrics.OF_NUMBERS, *metrics.OF_SETS))
  # fmt: on

  kind: ClassVar[str] = tasks.CLASSIFIER

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
    if len({*self.label_columns}) == 1:
      raise UserError(
        f"--label_columns={self.label_columns[0]} is one label, which a text "
        "has or not: give --label_column without --multi_label"
      )
    fitting: dict = metrics.OF_LABELS
    if self.multi_label:
      fitting = metrics.OF_SETS
    elif self.table().labels == ():
      fitting = metrics.OF_NUMBERS
    if set(self.metrics) - set(fitting):
      raise UserError(
        f"--metrics={','.join(self.metrics)}: not all are of "
        f"{', '.join(fitting)}, the metrics of such labels (see --regression "
        "and --multi_label)"
      )

  @classmethod
  def defaults(cls, task, flags):
    saved = super().defaults(task, flags)
    settled: list[str] = []
    if flags.get("task_name"):  # it settles the columns and metrics
      settled += (*_OWN_TABLE, "metrics")
    if flags.get("label_column"):
      settled.append("label_columns")
    if flags.get("do_train") and flags.get("do_eval"):  # it chooses again
      settled.append("label_threshold")
    for name in settled:
      saved.pop(name, None)
    return saved

  def as_dict(self):
    """Resolves defaults: a rank that starts late reads them from task.json."""
    task: dict[str, Any] = {"task": self.kind, **self.describe_table()}
    if self.table().labels == ():  # as task.json says that it is a regression
      task["labels"] = []
    return {**super().as_dict(), **self.defaults(task, {})}

  def describe_table(self) -> dict:
    """The keys of task.json about the table and its metrics."""
    text, pair, label = self.table()[:3]
    task: dict[str, Any] = {
      "metrics": list(self.table().metrics),
      "columns": {"text": text, "text_pair": pair, "label": label},
    }
    if self.multi_label:
      task |= {
        "multi_label": True,
        "label_separator": self.label_separator,
        "label_columns": list(self.label_columns),
      }
    return task

  def table(self) -> Glue:
    """Columns, labels and metrics."""
    if self.task_name:
      table = GLUE[self.task_name.lower()]
    else:
      table = Glue(
        text=self.text_column or "sentence",
        pair=self.text_pair_column or None,
        label=self.label_column or "label",
        labels=tuple(dict.fromkeys(self.label_columns)) or None,
      )
    if self.regression:
      table = table._replace(labels=(), metrics=_CORRELATIONS)
    if self.multi_label:
      table = table._replace(metrics=tuple(metrics.OF_SETS))
    return table._replace(metrics=tuple(self.metrics) or table.metrics)

  def path(self, part):
    path = getattr(self, f"{part}_file")
    if path:
      return path
    if not self.data_dir:
      raise UserError(f"give --{part}_file, or --data_dir with GLUE's files")
    dev = self.table().evaluation
    test = dev.replace("dev", "test")
    name = {"train": "train", "eval": dev, "predict": test}[part]
    return os.path.join(self.data_dir, f"{name}.tsv")


class Classification(LabelledTask):
  """Predicts a label, or a number, for each text or pair of texts."""

  config: ClassifierConfig
  if_too_many = "; for numbers give --regression"
  target_type: type = np.int32

  def __init__(self, config: ClassifierConfig):
    super().__init__(config)
    self._table = config.table()
    self._is_regression = self._table.labels == ()
    if self._is_regression:
      self.target_type = np.float32
    self._ranges: dict[str, tuple[float, float]] = {}  # of a file's numbers
    self.known_labels = self._table.labels
    self.published_names = self._table.names
    self.best_by = BestBy((self._table.metrics[0],), True)
    self.reads_pairs = bool(self._table.pair)

  def labels_of_data(self):
    path, name = self.config.path("train"), self._table.label
    values = self.column(path, self.rows(path), "label", may_be_empty=False)
    return f"{path}: column {name!r}", values

  def rows(self, path: str, all_rows: bool = False) -> Sequence[tables.Row]:
    """The rows of a table."""
    # GLUE's CoLA has a header in its test file only.
    has_header = os.path.basename(path).startswith("test")
    columns = None if has_header else self._table.columns
    return tables.read_table(path, columns, all_rows)

  def column(self, path: str, rows, kind: str, **options) -> list[str]:
    """The texts, the second ones of pairs, or the labels of rows."""
    name, flag = getattr(self._table, kind), f"--{_COLUMN_FLAGS[kind]}"
    if self.config.task_name:
      flag += ", and leave out --task_name, which settles it"
    elif kind == "label" and not self.config.multi_label:
      if any(isinstance(row.values.get(name), list) for row in rows):
        flag += " (--multi_label reads lists)"
    return tables.column(path, rows, name, flag, **options)

  def read(self, part):
    path, most = self.config.path(part), self.config.max_seq_length
    tokenizer = self.config.tokenizer()
    rows = self.rows(path, all_rows=part == "predict")
    texts = []
    for kind in ("text", "pair") if self._table.pair else ("text",):
      texts.append(tokenizer.encode_batch(self.column(path, rows, kind)))
    targets = self.targets(path, rows, part)
    examples, cut = [], 0
    for row, target, *parts in zip(rows, targets, *texts, strict=True):
      ids, segments, lost = encode_pair(tokenizer, most, *parts)
      cut += lost > 0
      examples.append(packed.Example(ids, segments, f"line {row.line}", target))
    dtype = self.target_type
    return packed.PackedSource(path, examples, self.config, dtype, cut)

  def targets(self, path: str, rows, part: str) -> Sequence[tuple]:
    """What the loss compares each row with; any will do to "predict".

    It is the head's row of the label, or a regression's number.
    """
    if part == "predict":
      return [(0,)] * len(rows)
    name = self._table.label
    labels = self.column(path, rows, "label", may_be_empty=False)
    if self._is_regression:
      numbers: Sequence[float] = tables.numbers(path, rows, name, labels)
      self._ranges[path] = min(numbers), max(numbers)
    else:
      lines = [row.line for row in rows]
      numbers = self.rows_in(path, name, zip(lines, labels, strict=True))
    return [*zip(numbers, strict=True)]

  def lines(self):
    lines = super().lines()
    for path, (least, most) in self._ranges.items():
      lines.append(f"{path}: labels from {least:g} to {most:g}")
    model, now = run_start.origin_of(self.config).task, self.config.multi_label
    before = bool(model.get("multi_label"))
    if self.labels and self.labels == model.get("labels") and before != now:
      kinds = "one label of these", "each label by itself (--multi_label)"
      lines.append(
        f"the model that training begins with gives {kinds[before]}, this one "
        f"{kinds[now]}: the classifier's weights are its first values"
      )
    return lines

  def head(self, batch, is_training, dropout_seed=None):
    """`heads.HeadOutput` of each example's label, or a regression's number.

    Outputs "logits", float32 [B, E, labels].
    """
    from finetuning import heads  # these load TensorFlow
    from model import layers

    tf = later.tf
    # The last layer is computed only where the pooler reads.
    rows = layers.get_shape_list(batch.input_ids)[0]
    nowhere = tf.zeros([rows, 0], tf.int32)
    encoder = heads.encode(
      batch, self, is_training, dropout_seed, positions=nowhere
    )
    of_labels = encoder.label_logits(tasks.LABELS)
    shape = layers.get_shape_list(batch.weights)
    logits = tf.cast(of_labels.matmul, tf.float32) + of_labels.bias
    losses, correct = self.losses_and_correct(
      of_labels, logits, batch.targets, encoder.policy
    )
    if correct is not None:
      correct = tf.reshape(correct, shape)
    logits = tf.reshape(logits, [*shape, self.outputs])
    return heads.HeadOutput(
      tf.reshape(losses, shape), correct, {"logits": logits}
    )

  def losses_and_correct(self, of_labels, logits, targets, policy) -> tuple:
    """The first two of `heads.HeadOutput`, float32 [B * E].

    `of_labels` has the two parts of `logits`, float32 [B * E, labels].
    """
    if self.outputs == 1:
      reshape, square = later.tf.reshape, later.tf.square
      return square(logits[:, 0] - reshape(targets, [-1])), None
    return of_labels.losses_and_correct(targets, policy)

  def logits(self, source, outputs) -> np.ndarray:
    """float32 [examples, labels]"""
    return outputs["logits"][source.record_of, source.slot_of]

  def results(self, source, outputs):
    logits = self.logits(source, outputs)
    targets = np.array([e.targets[0] for e in source.examples])
    predicted = logits[:, 0]
    if not self._is_regression:
      # F1 is of the second label, in the task's order: the model that training
      # began with may have its rows in another one.
      numbers = np.argsort(self._head[2])
      targets, predicted = numbers[targets], numbers[np.argmax(logits, axis=1)]
    return {
      name: metrics.metric(name, len(self.labels))(targets, predicted)
      for name in self._table.metrics
    }

  def write_predictions(self, source, outputs):
    """Tab-separated: row from 0, prediction, probability of each label."""
    path = self.config.output_file(PREDICTIONS_FILE)
    labels = [label.translate(_ESCAPES) for label in self.labels]
    lines = ["\t".join(["index", "prediction", *labels])]
    for number, row in enumerate(self.logits(source, outputs)):
      prediction, shares = self.prediction(row.astype(float), labels)
      fields = [f"{share:.6f}" for share in shares]
      lines.append("\t".join([str(number), prediction, *fields]))
    tables.write(path, lines)
    return [f"predictions {path}"]

  def prediction(self, logits, labels) -> tuple[str, Sequence[float]]:
    """What an example's logits say, and the probability of each label."""
    if self._is_regression:
      return f"{logits[0]:.4f}", ()
    return labels[np.argmax(logits)], special.softmax(logits)

  def describe(self):
    return {"labels": self.labels, **self.config.describe_table()}


# Answers ----------------------------------------------------------------------


class LabelBehaviour(Behaviour):
  """Names the label of a text or pair, or for a regression its number."""

  head = tasks.LABELS
  # Training and evaluation read [MASK] as text.
  sees_masks = False

  def outputs(self, encoder):
    return encoder.label_outputs(self.head)

  def reads(self, context):
    columns = context.task.get("columns")
    if not columns:  # trained elsewhere
      return self.kinds
    return (PAIRS,) if columns["text_pair"] else (SINGLE,)

  def answer(self, ids, outputs, context):
    if "probabilities" not in outputs:
      return {"value": float(outputs["logits"][0])}
    shares = outputs["probabilities"]
    names = context.labels(len(shares))
    shares_of = dict(zip(names, shares.tolist(), strict=True))
    if not context.task.get("multi_label"):
      label = names[int(np.argmax(shares))]
      return {"label": label, "probabilities": shares_of}
    threshold = context.task.get("label_threshold", metrics.THRESHOLD)
    labels = []
    for name in sorted(names, key=shares_of.__getitem__, reverse=True):
      if shares_of[name] > threshold:
        labels.append(name)
    return {"labels": labels, "probabilities": shares_of}

  def answer_lines(self, answer):
    if "value" in answer:
      return [f"{answer['value']:.4f}"]
    share = operator.itemgetter(1)
    pairs = sorted(answer["probabilities"].items(), key=share, reverse=True)
    if "labels" not in answer:
      return [text_and_shares(pairs)]
    count = len(answer["labels"])
    if not count:
      return [f"(no label; the most likely: {text_and_shares(pairs[:1])})"]
    return [text_and_shares(pairs[:count])]
