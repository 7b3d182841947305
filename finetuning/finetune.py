"""The run that fine-tuning tasks share, on pre-training's loop.

A task (ELECTRA's idea) says what its examples, its head and its results are;
see `Task`. Everything else is here and the same for all.
"""

import dataclasses
import functools
import os
import shutil
from typing import ClassVar

import numpy as np

import errors
import json_files
import tokenization
from errors import UserError
from finetuning import packed
from model import model_flops
from pretraining_data import record_order
from tensorflow_v1 import tf
from training import (
  checkpointing,
  input_pipeline,
  train_loop,
  training_hooks,
  training_run,
)
from training.run_config import RunConfig

TASK_FILE = "task.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuningConfig(RunConfig):
  """What all fine-tuning is told; fields are named like their flags."""

  ends_with_best: ClassVar[bool] = True
  evaluates_untrained: ClassVar[bool] = False  # a random head says nothing
  length_flag: ClassVar[str] = "--num_train_epochs"

  do_predict: bool = False
  vocab_file: str | None = None
  spm_model_file: str | None = None
  do_lower_case: bool = True
  max_seq_length: int = 128
  examples_per_record: int = 32
  num_train_epochs: float = 3.0
  warmup_proportion: float = 0.1
  eval_every_epochs: float = 1.0

  def __post_init__(self):
    super().__post_init__()
    if not (self.do_train or self.do_eval or self.do_predict):
      raise UserError("give --do_train, --do_eval, --do_predict, or several")
    if not self.output_dir:
      raise UserError("--output_dir is missing")
    for name, most in (
      ("num_train_epochs", 1e6),
      ("warmup_proportion", 1.0),
      ("eval_every_epochs", 1e6),
    ):
      value = getattr(self, name)
      if not 0.0 <= value <= most:
        raise UserError(f"--{name}={value}: must be 0 to {most:g}")
    if self.early_stopping_evaluations and not (
      self.do_eval and (self.eval_every_steps or self.eval_every_epochs)
    ):
      raise UserError(
        "--early_stopping_evaluations needs --do_eval and --eval_every_epochs "
        "or --eval_every_steps"
      )
    if not 4 <= self.max_seq_length <= self.bert.max_position_embeddings:
      raise UserError(
        f"--max_seq_length={self.max_seq_length}: must be 4 to the BERT "
        f"config's max_position_embeddings={self.bert.max_position_embeddings}"
      )
    if self.examples_per_record < 1:
      raise UserError(
        f"--examples_per_record={self.examples_per_record}: must be at least 1"
      )
    tokenization.validate_case_matches_checkpoint(
      self.do_lower_case, self.init_checkpoint
    )

  def tokenizer(self) -> tokenization.Encoder:
    """That of the flags, or the one that the run folder has a copy of.

    Raises:
      DataError: there is none, or it has more tokens than the model.
    """
    vocab_file, spm_file = self.vocab_file, self.spm_model_file
    if not (vocab_file or spm_file):
      made = saved_task(self.output_dir).get("vocabulary", {})
      folder = functools.partial(os.path.join, self.output_dir)
      vocab_file, spm_file = (
        made.get(name) and folder(made[name])
        for name in ("vocab_file", "spm_model_file")
      )
    return tokenization.load_tokenizer(
      vocab_file, self.do_lower_case, spm_file, self.bert.vocab_size
    )


class Task:
  """What a kind of fine-tuning is made of; its subclasses say what.

  Attributes:
    name: of the kind, for task.json.
    config: a `FinetuningConfig`.
    best_by: a `training_hooks.BestBy`, of the results.
  """

  name: str
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


def saved_task(output_dir: str) -> dict:
  """What a run folder's task.json says; {} without one."""
  path = os.path.join(output_dir or "", TASK_FILE)
  if not os.path.exists(path):
    return {}
  remedy = "move it away, or give another folder"
  found = json_files.read_own(path, remedy)
  if not isinstance(found, dict):
    raise errors.DataError(f"{path}: not a task's description; {remedy}")
  return found


def finetune(task: Task, comm, commit=None, signals=None) -> dict:
  """Trains, evaluates and predicts; see `training_run.run`."""
  config = task.config
  if config.do_train:
    config = _with_evaluations(
      config, task.training_set.plan(config, comm.size)
    )
  if comm.is_root:
    _write_task(task)
    training_hooks.tell(*_sets(task))

  def build():
    train = training(task, config, comm) if config.do_train else None
    with tf.variable_scope(tf.get_variable_scope(), reuse=config.do_train):
      evaluate = _evaluator(task, config, comm) if config.do_eval else None
    reuse = config.do_train or config.do_eval
    with tf.variable_scope(tf.get_variable_scope(), reuse=reuse):
      predict = _predictor(task, config, comm) if config.do_predict else None
    return training_run.Parts(task.best_by, train, evaluate, predict)

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


def _write_task(task: Task) -> None:
  """task.json and a copy of the vocabulary, so that the folder is enough.

  Raises:
    UserError: the folder is another task's, or no fine-tuning's.
  """
  config = task.config
  saved, about = saved_task(config.output_dir), task.describe()
  run_file = os.path.join(config.output_dir, training_hooks.RUN_FILE)
  if os.path.exists(run_file) and (
    saved.get("task") != task.name or saved.get("labels") != about.get("labels")
  ):
    raise UserError(
      f"--output_dir={config.output_dir} holds a run of "
      f"{saved.get('task', 'pre-training')} {saved.get('labels', '')}, this is "
      f"{task.name} {about.get('labels', '')}: use another folder (and its "
      "checkpoint as --init_checkpoint to keep the weights)"
    )
  os.makedirs(config.output_dir, exist_ok=True)
  vocabulary = {}
  for name in ("vocab_file", "spm_model_file"):
    if path := getattr(config, name):
      vocabulary[name] = os.path.basename(path)
      copy = os.path.join(config.output_dir, vocabulary[name])
      if os.path.realpath(copy) != os.path.realpath(path):
        shutil.copyfile(path, copy + ".tmp")
        os.replace(copy + ".tmp", copy)
  json_files.write(
    os.path.join(config.output_dir, TASK_FILE),
    {
      "task": task.name,
      **about,
      "max_seq_length": config.max_seq_length,
      "do_lower_case": config.do_lower_case,
      "vocabulary": vocabulary or saved.get("vocabulary", {}),
      "best_by": task.best_by._asdict(),
    },
  )


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
    headline=lambda report: f"{report['accuracy']:.1%} right",
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
  examples = max(float(sums["examples"]), 1.0)
  return {
    "loss": float(sums["loss"]) / examples,
    "accuracy": float(sums["correct"]) / examples,
  }


def _evaluator(task: Task, config, comm) -> train_loop.Evaluator:
  source = task.evaluation_set
  comm.check_equal("the evaluation set", source.fingerprint())
  collect = _collector(task, source, config, comm)
  names = ["loss", *task.result_names()]

  def evaluation(session, signals):
    outputs = collect(session, signals)
    if outputs is None:
      return None
    values = np.zeros(len(names))
    if comm.is_root:
      weights = outputs.pop("weights")
      loss = (outputs.pop("losses") * weights).sum() / weights.sum()
      found = {"loss": float(loss), **task.results(source, outputs)}
      values = np.array([found[name] for name in names])
    # Rank 0's, for all.
    results = dict(zip(names, comm.gather(values)[0].tolist(), strict=True))
    return {**results, "examples": len(source.examples)}

  def headline(results):
    shown = [n for n in names if not n.startswith("best_")]
    return "  ".join(f"{n} {results[n]:.4f}" for n in shown)

  return train_loop.Evaluator(evaluation, headline, config.output_dir, comm)


def _predictor(task: Task, config, comm):
  source = task.prediction_set
  comm.check_equal("the prediction set", source.fingerprint())
  collect = _collector(task, source, config, comm)

  def predict(session):
    outputs = collect(session)
    return task.write_predictions(source, outputs) if comm.is_root else []

  return predict


def _collector(task: Task, source, config, comm):
  """(session, signals) -> name -> [rows, ...], of all rows, on all ranks.

  None if a rank was told to stop.
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

  def collect(session, signals=None):
    found, ended = [], False
    batches.start(session, 0)
    for _ in range(batches.count):
      found.append(session.run(fetches))
      if signals and signals.received:
        ended = True
        break
    if comm.gather(np.array([ended])).any():
      return None
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
