"""What a kind of fine-tuning defines: its settings, and a `FinetuningTask`."""

import dataclasses
import functools
import os
from typing import Any, ClassVar

from checkpoints import agreement, metrics
from common import processes
from common.errors import UserError
from common.files import file_sha256
from common.settings import in_group
from config.exchange_config import models_of
from config.pretraining import RunConfig
from finetuning import packed, task_file
from model.tasks import BY_KIND
from text_encoders import kinds
from text_encoders.base import Encoder

_data, _batch = in_group("Data"), in_group("Batches and steps")
_vocabulary = in_group("Vocabulary")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuningConfig(kinds.VocabularyFiles, RunConfig):
  """Settings of all fine-tuning; fields are named like their flags."""

  ends_with_best: ClassVar[bool] = True  # a random head says nothing
  length_flag: ClassVar[str] = "--num_train_epochs"
  unit: ClassVar[str] = "examples"
  format: ClassVar[str] = "a table (.tsv, .csv, .jsonl, Parquet or Arrow)"
  inherits: ClassVar[bool] = False  # defaults from a model of its kind
  whose_vocabulary = " that the checkpoint was trained with"
  default_vocabulary = (
    " Default: as found in --output_dir, beside --init_checkpoint or its "
    "training data."
  )
  # fmt: off
  do_predict: bool = in_group("What to do")(False,
    "Predict with the weights of the best checkpoint.")
  train_file: str | None = _data(None, "File to train on: {format}.")
  eval_file: str | None = _data(None,
    "File to evaluate on, which chooses the best checkpoint: {format}.")
  predict_file: str | None = _data(None, "File to predict: {format}.")
  do_lower_case: bool = _vocabulary(True,
    "Lower-case the text, as uncased models expect. Without this flag the "
    "model's case is used where a file says it.")
  max_seq_length: int = _data(128,
    "Tokens of one example at most, and of one record, which may hold several "
    "examples. Longer texts are cut.", low=4)
  examples_per_record: int = _data(32,
    "Examples that are packed into one record at most, so that little of it is "
    "padding; each loss stays that of its example alone. 1 does not pack.",
    low=1)
  num_train_epochs: float = _batch(3.0,
    "Epochs of training: passes over the training examples.",
    above=0, high=1e6)
  warmup_proportion: float = _batch(0.1,
    "Share of the updates in which the learning rate rises to its peak.",
    low=0, high=1)
  eval_every_epochs: float = in_group("Evaluation")(1.0,
    "Epochs between two evaluations while training with --do_eval; the best "
    "checkpoint is kept. 0 evaluates at the end only. --eval_every_steps wins "
    "over it.", low=0, high=1e6)
  # fmt: on

  def __post_init__(self):
    super().__post_init__()
    if not (self.do_train or self.do_eval or self.do_predict):
      raise UserError("give --do_train, --do_eval, --do_predict, or several")
    if not self.output_dir:
      raise UserError("--output_dir is missing")
    if self.early_stopping_evaluations and not (
      self.do_eval and (self.eval_every_steps or self.eval_every_epochs)
    ):
      raise UserError(
        "--early_stopping_evaluations needs --do_eval and --eval_every_epochs "
        "or --eval_every_steps"
      )
    task_file.check_length(self.max_seq_length, self.bert)

  def path(self, part: str) -> str:
    """The file to "train", "eval" or "predict" with, or `UserError`."""
    path = getattr(self, f"{part}_file")
    if not path:
      raise UserError(f"--do_{part} needs --{part}_file")
    return path

  def output_file(self, name: str) -> str:
    """The path of a file in the run folder."""
    return os.path.join(self.output_dir or "", name)

  @classmethod
  def defaults(cls, task: dict, flags: dict) -> dict:
    """The flags that task.json of a model of this kind says, by name."""
    if task.get("task") != cls.kind:
      return {}
    known = agreement.of_task(task)
    return {name: known[name] for name in known.keys() - agreement.OTHERS}

  def as_dict(self):
    values = super().as_dict()
    # By their content, since ranks that start late find the folder's copy.
    for flag, path in self._vocabulary().items():
      if os.path.isfile(path):
        values[flag] = file_sha256(path)
    return values

  def _vocabulary(self) -> dict[str, str]:
    """Flag -> file: the flags' vocabulary, or the model folder's copy of it."""
    files = self.named_vocabulary()
    is_there = files and all(map(os.path.isfile, files.values()))
    # A flag's file may be gone by now, or be on another machine.
    model = None if is_there else task_file.binding(self)
    return (model and task_file.kept_vocabulary(model)) or files

  def tokenizer(self) -> Encoder:
    """The encoder by the files of `_vocabulary`."""
    return kinds.load_tokenizer(
      **self._vocabulary(),
      do_lower_case=self.do_lower_case,
      vocab_size=self.bert.vocab_size,
    )


class FinetuningTask:
  """The base of all kinds of fine-tuning, as in google-research/electra."""

  best_by: metrics.BestBy  # which of its `results` are the best
  labels: list[str] | None = None  # of the head's rows, if they have names
  reads_pairs = False  # of texts
  compares = False  # the loss of an example depends on all of an update
  slices: Any = None  # of the encoder, by a run's ranks; None: it is whole

  def __init__(self, config: FinetuningConfig):
    self.config = config

  # Read on first use: a prediction needs no training data.
  training_set = functools.cached_property(lambda self: self.read("train"))
  evaluation_set = functools.cached_property(lambda self: self.read("eval"))
  prediction_set = functools.cached_property(lambda self: self.read("predict"))

  def check(self) -> list[packed.PackedSource]:
    """The sets to train on, evaluate and predict: all errors in their files.

    TensorFlow need not be loaded. UserError for another task than the model's.
    """
    config, sets = self.config, list[packed.PackedSource]()
    task_file.check(config, self.task_content)
    if config.do_train:
      sets.append(self.training_set)
      _, ranks = processes.started()
      self.training_set.plan(config, models_of(ranks, config.tensor_parallel))
    if config.do_eval:
      sets.append(self.evaluation_set)
    if config.do_predict:
      sets.append(self.prediction_set)
    return sets

  def lines(self) -> list[str]:
    """What people should know of the data that was read."""
    return []

  def read(self, part: str) -> packed.PackedSource:
    """The examples to "train", "eval" (held out) or "predict" with."""
    raise NotImplementedError

  def head(self, batch, is_training: bool, dropout_seed=None):
    """The `heads.HeadOutput` of a `packed.FinetuningBatch`."""
    raise NotImplementedError

  def losses(self, groups):
    """The `contrastive.Losses` of an update's texts, if it `compares` them."""
    raise NotImplementedError

  @property
  def outputs(self) -> int:
    """The number of the head's outputs; a regression has one."""
    fixed = BY_KIND[self.config.kind].outputs
    if fixed is not None:
      return fixed
    return len(self.labels or ()) or 1

  def results(self, source, outputs: dict) -> dict:
    """Metrics: name -> float. The head's `outputs` are float32 [rows, ...]."""
    raise NotImplementedError

  def chosen_by(self, results: dict) -> dict:
    """What an evaluation's results add to task.json; on all ranks."""
    return {}

  def write_predictions(self, source, outputs: dict) -> list[str]:
    """Writes into the run folder; returns lines for the console."""
    raise NotImplementedError

  def describe(self) -> dict:
    """The keys of task.json that only this kind has."""
    raise NotImplementedError

  def task_content(self) -> dict:
    """task.json without the vocabulary: all else that predicting needs."""
    return {
      "task": self.config.kind,
      **self.describe(),
      "max_seq_length": self.config.max_seq_length,
      "do_lower_case": self.config.do_lower_case,
      "best_by": self.best_by._asdict(),
    }
