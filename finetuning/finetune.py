"""The run that fine-tuning tasks share, on pre-training's loop.

A task (ELECTRA's idea) says what its examples, its head and its results are;
see `Task`. Everything else is here and the same for all.
"""

import dataclasses
import functools
import os
from typing import ClassVar

import numpy as np

import tokenization
from common import errors
from common.errors import UserError
from common.settings import in_group
from common.tensorflow_v1 import tf
from data import record_order
from finetuning import packed, settled
from finetuning.settled import TASK_FILE, saved_task
from model import model_flops
from training import (
  checkpointing,
  input_pipeline,
  reporting,
  train_loop,
  training_hooks,
  training_run,
)
from training.config import RunConfig

_data, _model, _batch = map(in_group, ("Data", "Model", "Batches and steps"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuningConfig(RunConfig):
  """What all fine-tuning is told; fields are named like their flags."""

  ends_with_best: ClassVar[bool] = True
  evaluates_untrained: ClassVar[bool] = False  # a random head says nothing
  length_flag: ClassVar[str] = "--num_train_epochs"
  kind: ClassVar[str]  # of the task, for task.json
  # Flags that task.json has: those that a trained model keeps, and those of how
  # files are read and answers chosen, which an evaluation or a prediction may
  # be given others of.
  model_flags: ClassVar[tuple] = ("max_seq_length", "do_lower_case")
  usual_flags: ClassVar[tuple] = ()
  # fmt: off
  help_here: ClassVar[dict] = dict(
    do_eval=
    "Evaluate the model: while training as --eval_every_epochs says, and the "
    "best checkpoint at the end.",
    train_batch_size=
    "Examples in one rank's micro-batch (one forward and backward pass). With "
    "--global_batch_size this is the most that a micro-batch may have.",
    global_batch_size=
    "Examples in one update, over all ranks and micro-batches. Default: "
    "--train_batch_size x ranks x --num_accumulation_steps. A run keeps its "
    "global batch when it is resumed.",
    lr_decay_steps=
    "Updates in which an exponential decay multiplies the learning rate by "
    "--lr_decay_rate.",
    eval_batch_size="Examples in one rank's batch of an evaluation.",
    eval_every_steps=
    "Updates between two evaluations while training. 0 leaves it to "
    "--eval_every_epochs. Needs --do_eval.",
    early_stopping_evaluations=
    "Evaluations in a row without a new best result after which training "
    "stops. 0: it never stops early. Needs --do_eval, and --eval_every_epochs "
    "or --eval_every_steps.",
    output_dir=
    "Folder for checkpoints, metrics, task.json and predictions. A training "
    "that finds its own checkpoint there resumes from it; an evaluation or a "
    "prediction uses the best one.",
    seed=
    "Seed of the initial weights, of the order of examples and of dropout.",
  )

  do_predict: bool = in_group("What to do")(False,
    "Predict with the weights of the best checkpoint.")
  vocab_file: str | None = _model(None,
    "WordPiece vocabulary that the checkpoint was trained with. A run folder "
    "keeps a copy, which is used without this flag.")
  spm_model_file: str | None = _model(None,
    "SentencePiece model that the checkpoint was trained with, instead of "
    "--vocab_file. A run folder keeps a copy, which is used without this flag.")
  do_lower_case: bool = _model(True,
    "Lower-case the text, as uncased models expect.")
  max_seq_length: int = _data(128,
    "Tokens of one example at most, and of one record, which may hold several "
    "examples. Longer texts are cut.", low=4)
  examples_per_record: int = _data(32,
    "Examples that are packed into one record at most, so that little of it is "
    "padding; each loss stays that of its example alone. 1 does not pack.",
    low=1)
  num_train_epochs: float = _batch(3.0,
    "Epochs of training: passes over the training examples.",
    low=0, high=1e6)
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
    if self.max_seq_length > self.bert.max_position_embeddings:
      raise UserError(
        f"--max_seq_length={self.max_seq_length}: must be 4 to the BERT "
        f"config's max_position_embeddings={self.bert.max_position_embeddings}"
      )
    tokenization.validate_case_matches_checkpoint(
      self.do_lower_case, self.init_checkpoint
    )

  @classmethod
  def found(cls, flags):
    """What task.json says, where the run starts from a trained model."""
    folder = settled.model_folder(flags)
    saved = {} if folder is None else saved_task(folder)
    if saved.get("task") != cls.kind:
      return {}
    found = cls.flags_of(saved)
    for field in dataclasses.fields(cls):
      value = found.get(field.name, field.default)
      if field.name in found and not _fits(value, field.default):
        raise errors.DataError(
          f"{os.path.join(folder, TASK_FILE)}: {field.name} is {value!r}: "
          "damaged; bring back the file that the training wrote"
        )
    given = {n: getattr(flags, n) for n in found if flags[n].present}
    free = () if flags.do_train else cls.usual_flags
    settled.compare(given, found, free, os.path.join(folder, TASK_FILE))
    return found

  @classmethod
  def flags_of(cls, task: dict) -> dict:
    """Flag -> value, of those that a task.json has."""
    names = (*cls.model_flags, *cls.usual_flags)
    return {name: task[name] for name in names if name in task}

  def tokenizer(self) -> tokenization.Encoder:
    """That of the flags, or the one that the model's folder has a copy of.

    Raises:
      DataError: there is none, or it has more tokens than the model.
    """
    vocab_file, spm_file = self.vocab_file, self.spm_model_file
    folder = settled.model_folder(self)
    if not (vocab_file or spm_file) and folder is not None:
      kept = settled.kept_vocabulary(folder)
      vocab_file, spm_file = map(kept.get, settled.VOCABULARIES)
    return tokenization.load_tokenizer(
      vocab_file, self.do_lower_case, spm_file, self.bert.vocab_size
    )


class Task:
  """What a kind of fine-tuning is made of; its subclasses say what.

  Attributes:
    config: a `FinetuningConfig`.
    best_by: a `training_hooks.BestBy`, of the results.
  """

  best_by: training_hooks.BestBy

  def __init__(self, config: FinetuningConfig):
    """Reads no data yet: `training_set` and the others do."""
    self.config = config

  @functools.cached_property
  def training_set(self) -> packed.PackedSource:
    """Examples with targets."""
    raise NotImplementedError

  @functools.cached_property
  def evaluation_set(self) -> packed.PackedSource:
    """Examples with targets, held out."""
    raise NotImplementedError

  @functools.cached_property
  def prediction_set(self) -> packed.PackedSource:
    """Examples whose targets nobody reads."""
    raise NotImplementedError

  def head(self, batch, is_training: bool, dropout_seed=None):
    """The `heads.HeadOutput` of a `packed.FinetuningBatch`."""
    raise NotImplementedError

  def head_matmuls(self, rows: int, source) -> list:
    """The `model_flops.Matmul`s of the head on so many rows of `source`."""
    raise NotImplementedError

  def results(self, source, outputs: dict) -> dict:
    """Metrics, name -> float.

    Args:
      source: the evaluation set.
      outputs: name -> float32 [rows, ...] of the head.
    """
    raise NotImplementedError

  def result_names(self) -> list[str]:
    """The keys of `results`."""
    raise NotImplementedError

  def write_predictions(self, source, outputs: dict) -> list[str]:
    """Writes into the run folder; returns lines that say what."""
    raise NotImplementedError

  def describe(self) -> dict:
    """What task.json has beside the vocabulary: all that predicting needs."""
    raise NotImplementedError


def _fits(value, default) -> bool:
  """Whether a value from JSON can be that of a flag with this default."""
  if isinstance(default, tuple):
    return isinstance(value, list) and all(isinstance(v, str) for v in value)
  if default is None:
    return value is None or isinstance(value, str)
  kinds = (int, float) if isinstance(default, float) else (type(default),)
  return type(value) in kinds


def _description(task: Task) -> dict:
  """What task.json says beside the vocabulary."""
  config = task.config
  return {
    "task": config.kind,
    **task.describe(),
    "max_seq_length": config.max_seq_length,
    "do_lower_case": config.do_lower_case,
    "best_by": task.best_by._asdict(),
  }


def finetune(task: Task, comm, commit=None, signals=None) -> dict:
  """Trains, evaluates and predicts; see `training_run.run`."""
  config = task.config
  describe = functools.partial(_description, task)
  settled.check(config, describe)
  if config.do_train:
    config = _with_evaluations(
      config, task.training_set.plan(config, comm.size)
    )
  if comm.is_root:
    training_hooks.tell(*_sets(task))

  def build():
    train = training(task, config, comm) if config.do_train else None
    with tf.variable_scope(tf.get_variable_scope(), reuse=config.do_train):
      evaluate = _evaluator(task, config, comm) if config.do_eval else None
    reuse = config.do_train or config.do_eval
    with tf.variable_scope(tf.get_variable_scope(), reuse=reuse):
      predict = _predictor(task, config, comm) if config.do_predict else None
    begin = functools.partial(settled.write, config, describe)
    return training_run.Parts(
      task.best_by, train, evaluate, predict, begin if train else None
    )

  return training_run.run(config, comm, build, commit, signals)


def _sets(task: Task) -> list[str]:
  """What is in the files, for a person."""
  config = task.config
  sets = [task.training_set] if config.do_train else []
  sets += [task.evaluation_set] if config.do_eval else []
  sets += [task.prediction_set] if config.do_predict else []
  return list(dict.fromkeys(source.line() for source in sets))


def _with_evaluations(config, plan) -> FinetuningConfig:
  """`config` with --eval_every_epochs in updates."""
  if config.eval_every_steps or not (
    config.do_eval and config.eval_every_epochs
  ):
    return config
  epoch = plan.updates / max(config.num_train_epochs, 1e-9)
  every = max(1, round(config.eval_every_epochs * epoch))
  return dataclasses.replace(config, eval_every_steps=every)


def training(task: Task, config, comm) -> train_loop.Task:
  """Data, plan, model and update, in the graph."""
  source = task.training_set
  comm.check_equal("the training set", source.fingerprint())
  plan = source.plan(config, comm.size)
  order = record_order.Order(len(source), config.seed)
  batches = input_pipeline.training_batches(source, order, plan, comm)
  state = checkpointing.TrainingState(order)

  def forward(batch, dropout_seed):
    head = task.head(batch, True, dropout_seed)
    loss = tf.reduce_sum(head.losses * batch.weights)
    real_rows = tf.cast(batch.weights[:, :1] > 0, tf.float32)
    tokens = tf.cast(batch.input_mask > 0, tf.float32) * real_rows
    return [loss], {
      "loss": loss,
      "correct": tf.reduce_sum(head.correct * batch.weights),
      "examples": tf.reduce_sum(batch.weights),
      "tokens": tf.reduce_sum(tokens),
    }

  return train_loop.Task(
    plan=plan,
    ops=training_run.training_ops(
      config, batches.next, forward, state, plan, comm
    ),
    state=state,
    source=source,
    batches=batches,
    summarize=_means,
    headline=lambda report: (
      f"{training_hooks.shown(report['accuracy'], '.1%')} right"
    ),
    tokens="tokens",
    examples="examples",
    capacity=plan.global_batch * source.tokens,
    flops=model_flops.total(
      model_flops.encoder(
        config.bert, config.policy, plan.global_batch, source.tokens
      )
      + task.head_matmuls(plan.global_batch, source)
    ),
    wishes=train_loop.Wishes(comm),
    loss_scale_floor=config.loss_scale.floor(config.uses_fp16),
  )


def _means(sums: dict) -> dict:
  return {
    "loss": reporting.ratio(sums["loss"], sums["examples"]),
    "accuracy": reporting.ratio(sums["correct"], sums["examples"]),
  }


def _evaluator(task: Task, config, comm) -> train_loop.Evaluator:
  source = task.evaluation_set
  comm.check_equal("the evaluation set", source.fingerprint())
  collect = _collector(task, source, config, comm, "evaluation")
  names = ["loss", *task.result_names()]

  def evaluation(session, signals, watchdog):
    outputs = collect(session, signals, watchdog)
    values = np.zeros(len(names))
    if comm.is_root:
      weights = outputs.pop("weights")
      loss = (outputs.pop("losses") * weights).sum() / weights.sum()
      found = {"loss": float(loss), **task.results(source, outputs)}
      values = np.array([found[name] for name in names])
    # Rank 0's, for all.
    values = comm.gather(values)[0].tolist()
    watchdog.watch()
    results = dict(zip(names, values, strict=True))
    return {**results, "examples": len(source.examples)}

  def headline(results):
    shown = [n for n in names if not n.startswith("best_")]
    return "  ".join(f"{n} {results[n]:.4f}" for n in shown)

  return train_loop.Evaluator(evaluation, headline, config.output_dir, comm)


def _predictor(task: Task, config, comm):
  source = task.prediction_set
  comm.check_equal("the prediction set", source.fingerprint())
  collect = _collector(task, source, config, comm, "prediction")

  def predict(session, watchdog):
    outputs = collect(session, None, watchdog)
    return task.write_predictions(source, outputs) if comm.is_root else []

  return predict


def _collector(task: Task, source, config, comm, name: str):
  """(session, signals, watchdog) -> name -> [rows, ...], of all rows and ranks.

  See `train_loop.EvaluationBatches`; `name` is unique in the graph.
  """
  rows = source.rows_of(config.eval_batch_size)
  batches = input_pipeline.evaluation_batches(source, rows, comm)
  head = task.head(batches.next, False)
  fetches = {
    "losses": head.losses,
    "weights": batches.next.weights,
    **head.outputs,
  }
  most = -(-len(source) // comm.size)  # rows of a rank
  batches = train_loop.EvaluationBatches(
    fetches=fetches,
    source=source,
    batches=batches,
    wishes=train_loop.Wishes(comm, f"{name}_wishes"),
    comm=comm,
  )

  def collect(session, signals, watchdog):
    found = list(batches.run(session, signals, watchdog))
    watchdog.look_away()  # rank 0 makes results of it, however long
    # A rank may have no rows, where there are fewer than ranks.
    none = {
      n: np.zeros([0, *t.shape[1:]], np.float32) for n, t in fetches.items()
    }
    return {
      name: _of_all_ranks(
        [f[name] for f in (*found, none)], most, len(source), comm
      )
      for name in fetches
    }

  return collect


def _of_all_ranks(parts: list, most: int, rows: int, comm) -> np.ndarray:
  """Rank r's rows, which are r, r + size, ..., put together: [rows, ...]."""
  own = np.concatenate(parts)[:most]
  missing = most - len(own)
  own = np.pad(own, [(0, missing)] + [(0, 0)] * (own.ndim - 1))
  everyone = comm.gather(own)  # [size, most, ...]
  return np.swapaxes(everyone, 0, 1).reshape(-1, *own.shape[1:])[:rows]
