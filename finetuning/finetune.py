"""The run that all fine-tuning tasks share, on pre-training's loop.

A `FinetuningTask` (ELECTRA's idea) defines examples, head and results; the rest
is here.
"""

import dataclasses
import functools
import itertools
import os
from typing import ClassVar

import numpy as np

import input_pipeline
import mixed_precision
import optimization
from checkpoints import checkpointing, description, metrics
from common import console
from common.console import say
from common.errors import UserError
from common.files import file_sha256
from common.settings import in_group
from common.tensorflow_v1 import tf
from config.pretraining import RunConfig
from finetuning import packed, task_file
from model import huggingface_types, model_flops
from model.tasks import BY_KIND
from records import record_order
from text_encoders import kinds, tokenizer_files
from text_encoders.base import Encoder
from training import next_steps, reporting, train_loop, training_run
from training.evaluation import EvaluationBatches, Evaluator, overlap_warning
from training.signals import StopVote
from xla_patches import jit

_data, _model, _batch = map(in_group, ("Data", "Model", "Batches and steps"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuningConfig(RunConfig):
  """Settings of all fine-tuning; fields are named like their flags."""

  ends_with_best: ClassVar[bool] = True
  evaluates_untrained: ClassVar[bool] = False  # a random head says nothing
  length_flag: ClassVar[str] = "--num_train_epochs"
  unit: ClassVar[str] = "examples"
  format: ClassVar[str]  # of the files
  # fmt: off
  do_predict: bool = in_group("What to do")(False,
    "Predict with the weights of the best checkpoint.")
  train_file: str | None = _data(None, "File to train on: {format}.")
  eval_file: str | None = _data(None,
    "File to evaluate on, which chooses the best checkpoint: {format}.")
  predict_file: str | None = _data(None, "File to predict: {format}.")
  vocab_file: str | None = _model(None,
    "WordPiece vocabulary that the checkpoint was trained with. Default: as "
    "found in --output_dir, beside --init_checkpoint or its training data.")
  spm_model_file: str | None = _model(None,
    "SentencePiece model that the checkpoint was trained with, instead of "
    "--vocab_file. Default: as found in --output_dir, beside "
    "--init_checkpoint or its training data.")
  tokenizer_file: str | None = _model(None,
    "Hugging Face tokenizer.json that the checkpoint was trained with, instead "
    "of --vocab_file. Default: as found in --output_dir, beside "
    "--init_checkpoint or its training data.")
  do_lower_case: bool = _model(True,
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
    given = getattr(self, f"{part}_file")
    if not given:
      raise UserError(f"--do_{part} needs --{part}_file")
    return given

  def check_files(self) -> None:
    """Raises OSError for a file of the task that is missing, else as `path`."""
    for part in ("train", "eval", "predict"):
      if getattr(self, f"do_{part}"):
        os.stat(self.path(part))

  @classmethod
  def defaults(cls, task, given):
    """The flags that task.json of a model of this kind says, by name."""
    if task.get("task") != cls.kind:
      return {}
    saved = {}
    for fact, value in description.task_facts(task).items():
      if fact.startswith("--"):
        saved[fact.removeprefix("--")] = value
    return saved

  def as_dict(self):
    """Vocabularies by their content: late ranks find the folder's copy."""
    values = super().as_dict()
    for flag, path in self._vocabulary().items():
      if os.path.isfile(path):
        values[flag] = file_sha256(path)
    return values

  def _vocabulary(self) -> dict[str, str]:
    """Flag -> file: the flags' vocabulary, or the model folder's copy of it."""
    files = tokenizer_files.named(self)
    folder = task_file.model_folder(self)
    is_there = files and all(map(os.path.isfile, files.values()))
    if folder is not None and not is_there:
      files = task_file.kept_vocabulary(folder) or files
    return files

  def tokenizer(self) -> Encoder:
    """Of the flags' vocabulary, or else of the model folder's copy of it."""
    return kinds.load_tokenizer(
      **self._vocabulary(),
      do_lower_case=self.do_lower_case,
      vocab_size=self.bert.vocab_size,
    )


class FinetuningTask:
  """What a kind of fine-tuning defines; data sets are read on first use."""

  best_by: metrics.BestBy  # which of its `results` are the best
  labels: list[str] | None = None  # of the head's rows, if they have names
  reads_pairs = False  # of texts

  def __init__(self, config: FinetuningConfig):
    self.config = config

  training_set = functools.cached_property(lambda self: self.read("train"))
  evaluation_set = functools.cached_property(lambda self: self.read("eval"))
  prediction_set = functools.cached_property(lambda self: self.read("predict"))

  def read(self, part: str) -> packed.PackedSource:
    """The examples to "train", "eval" (held out) or "predict" with."""
    raise NotImplementedError

  def head(self, batch, is_training: bool, dropout_seed=None):
    """The `heads.HeadOutput` of a `packed.FinetuningBatch`."""
    raise NotImplementedError

  @property
  def outputs(self) -> int:
    """Of the head; a regression has one."""
    head = BY_KIND[self.config.kind]
    return head.outputs or len(self.labels or ()) or 1

  def matmuls(self, rows: int, source) -> list:
    """The `model_flops.Matmul`s of training on `rows` rows of `source`."""
    config = self.config
    policy = mixed_precision.policy_of(config)
    return model_flops.finetuning(
      config.bert, policy, config.kind, self.outputs, rows, source
    )

  def results(self, source, outputs: dict) -> dict:
    """Metrics: name -> float. The head's `outputs` are float32 [rows, ...]."""
    raise NotImplementedError

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


def finetune(task: FinetuningTask, comm, snapshot=None, signals=None) -> dict:
  """Trains, evaluates and predicts; see `training_run.run`."""
  config = task.config
  task_file.check(config, task.task_content)
  sets = []
  if config.do_train:
    plan = task.training_set.plan(config, comm.size)
    say(comm, *packed.rounding(plan))
    config = _with_evaluations(config, plan)
    sets.append(task.training_set)
  if config.do_eval:
    sets.append(task.evaluation_set)
  if config.do_train and config.do_eval:
    trained, evaluated = (source.describe()["files"] for source in sets)
    say(comm, *overlap_warning(evaluated, trained, "--eval_file"))
  if config.do_predict:
    sets.append(task.prediction_set)
  if comm.is_root:
    console.tell(*dict.fromkeys(source.line() for source in sets))

  def build():
    train, begin = None, None
    if config.do_train:
      train = training(task, config, comm)
      begin = functools.partial(task_file.write, config, task.task_content)
    return train_loop.Job(
      task.best_by,
      train,
      _evaluator(task, config, comm) if config.do_eval else None,
      _predictor(task, config, comm) if config.do_predict else None,
      begin,
      task.labels,
      next_steps.after(
        config.output_dir,
        config.kind,
        pairs=task.reads_pairs,
        converts=huggingface_types.has(config.bert),
      ),
    )

  return training_run.run(config, comm, build, snapshot, signals)


def _with_evaluations(config, plan) -> FinetuningConfig:
  """Turns --eval_every_epochs into updates."""
  epochs = config.eval_every_epochs if config.do_eval else 0
  if config.eval_every_steps or not epochs:
    return config
  updates = plan.updates / config.num_train_epochs
  every = max(1, round(epochs * updates))
  return dataclasses.replace(config, eval_every_steps=every)


def training(task: FinetuningTask, config, comm) -> train_loop.Task:
  """Builds data, model and update in the graph."""
  source = task.training_set
  comm.check_equal("the training set", source.fingerprint())
  plan = source.plan(config, comm.size)
  order = record_order.Order(len(source), config.seed)
  batches = input_pipeline.training_batches(source, order, plan, comm)
  state = checkpointing.TrainingState(order)
  return train_loop.Task(
    plan=plan,
    ops=training_step(task, config, batches.next, state, plan, comm),
    state=state,
    source=source,
    batches=batches,
    summarize=_means,
    headline=lambda report: f"{console.shown(report['accuracy'], '.1%')} right",
    positions=source.tokens,
    flops={"records": model_flops.total(task.matmuls(1, source))},
    vote=StopVote(comm),
  )


def training_step(
  task: FinetuningTask, config, micro, state, plan, comm
) -> optimization.TrainOps:
  """Builds an update; see `training_step` of run_pretraining.py."""
  loss_scale = mixed_precision.make_loss_scale(
    config.loss_scale, config.uses_fp16
  )
  dropout_seed = training_run.dropout_seed(config, plan, comm, micro)
  weights = comm.data_parallel.allreduce(micro.weights, name="global_counts")

  def forward_and_backward():
    batch = micro.batch
    head = task.head(batch, True, dropout_seed)
    loss = tf.reduce_sum(head.losses * batch.weights)
    real_rows = tf.cast(batch.weights[:, :1] > 0, tf.float32)
    tokens = tf.cast(batch.input_mask > 0, tf.float32) * real_rows
    sums = {
      "loss": loss,
      "weights": tf.reduce_sum(batch.weights),
      "examples": tf.reduce_sum(tf.cast(batch.weights > 0, tf.float32)),
      "tokens": tf.reduce_sum(tokens),
    }
    if head.correct is not None:
      sums["correct"] = tf.reduce_sum(head.correct * batch.weights)
    mean = loss / tf.maximum(weights[0], 1.0) * loss_scale.value
    return tf.gradients(mean, tf.trainable_variables()), sums

  gradients, sums = jit.compiled(forward_and_backward, ("step",))()
  return optimization.train_ops(
    config, gradients, sums, loss_scale, state, plan, micro, comm
  )


def _means(sums: dict) -> dict:
  accuracy = None
  if "correct" in sums:
    accuracy = reporting.ratio(sums["correct"], sums["weights"])
  loss = reporting.ratio(sums["loss"], sums["weights"])
  return {"loss": loss, "accuracy": accuracy}


def _evaluator(task: FinetuningTask, config, comm) -> Evaluator:
  source = task.evaluation_set
  collect = _collector(task, source, config, comm, "evaluation")

  def evaluation(session, signals, watchdog):
    outputs = collect(session, signals, watchdog)
    weights = outputs.pop("weights")
    loss = (outputs.pop("losses") * weights).sum() / weights.sum()
    results = {"loss": float(loss), **task.results(source, outputs)}
    # To the last bit all ranks have the same numbers.
    results = comm.from_root(results)
    watchdog.resume()
    return {**results, "examples": len(source.examples)}

  def headline(results):
    words = []
    for name, value in results.items():
      is_detail = name.startswith("best_") or "/" in name  # TYPE/f1
      if isinstance(value, float) and not is_detail:
        words.append(f"{name} {value:.4f}")
    return "  ".join(words)

  evaluated = source.fingerprint()
  return Evaluator(evaluation, headline, config.output_dir, evaluated, comm)


def _predictor(task: FinetuningTask, config, comm):
  source = task.prediction_set
  collect = _collector(task, source, config, comm, "prediction")

  def predict(session, watchdog):
    outputs = collect(session, None, watchdog)
    return task.write_predictions(source, outputs) if comm.is_root else []

  return predict


def _collector(task: FinetuningTask, source, config, comm, name: str):
  """Makes (session, signals, watchdog) -> {name: [rows, ...] of all ranks}."""
  comm.check_equal(f"the {name} set", source.fingerprint())
  rows = source.rows_of(config.eval_batch_size)
  batches = input_pipeline.evaluation_batches(source, rows, comm)
  reuse = config.do_train or tf.AUTO_REUSE  # training makes all variables
  with tf.variable_scope(tf.get_variable_scope(), reuse=reuse):
    head = task.head(batches.next, False)
  weights = batches.next.weights
  fetches = {"losses": head.losses, "weights": weights, **head.outputs}
  vote = StopVote(comm, f"{name}_vote")
  evaluation = EvaluationBatches(fetches, source, batches, vote, comm)
  of_rank = -(-len(source) // comm.size)  # rows

  def of_all_ranks(name: str, batches: list[dict]) -> np.ndarray:
    """[rows, ...] in order; rank r of N has the rows r, r + N, ..."""
    mine = np.zeros([of_rank, *fetches[name].shape[1:]], np.float32)
    rows = itertools.chain.from_iterable(batch[name] for batch in batches)
    # A rank may have fewer rows, and padding may fill its last batch.
    for place, row in zip(mine, rows, strict=False):
      place[:] = row
    everyone = comm.gather(mine)  # [N, of_rank, ...]
    in_order = np.swapaxes(everyone, 0, 1).reshape(-1, *mine.shape[1:])
    return in_order[: len(source)]

  def collect(session, signals, watchdog):
    fetched = list(evaluation.run(session, signals, watchdog))
    watchdog.pause()  # the results may take long
    return {name: of_all_ranks(name, fetched) for name in fetches}

  return collect
