"""The run of any `task.FinetuningTask`, on pre-training's loop."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import numpy as np

import input_pipeline
import mixed_precision
import modeling
import optimization
from checkpoints import checkpointing
from checkpoints.metrics import BestBy
from common.console import say, tell
from common.tensorflow_v1 import tf
from finetuning import contrastive, packed, task_file
from finetuning.task import FinetuningConfig, FinetuningTask
from gradients import averages
from model import huggingface_types, model_flops
from model.tasks import BY_KIND
from model.tensor_parallel import Slices
from records import record_order
from training import next_steps, reporting, train_loop, training_run
from training.evaluation import EvaluationBatches, Evaluator, overlap_warning
from training.signals import StopVote
from xla_patches import jit


def finetune(task: FinetuningTask, comm, snapshot=None, signals=None) -> dict:
  """Trains, evaluates and predicts; see `training_run.run`."""
  config, ranks = task.config, comm.data_parallel
  task.slices = Slices(comm.tensor_parallel)
  sets = task.check()
  if config.do_train:
    plan = task.training_set.plan(config, ranks.size)
    say(comm, *packed.rounding(plan))
    # --eval_every_epochs in updates.
    epochs = config.eval_every_epochs if config.do_eval else 0
    if epochs and not config.eval_every_steps:
      updates = plan.updates / config.num_train_epochs
      every = max(1, round(epochs * updates))
      config = dataclasses.replace(config, eval_every_steps=every)
  if config.do_train and config.do_eval:
    trained, evaluated = (source.describe()["files"] for source in sets[:2])
    say(comm, *overlap_warning(evaluated, trained, "--eval_file"))
  if comm.is_root:
    tell(*dict.fromkeys(source.line() for source in sets))
    say(comm, *task.lines())
  lacking = huggingface_types.lacks(
    config.bert, BY_KIND[config.kind], config.tokenizer().special_ids()
  )
  if lacking and config.do_train:
    say(comm, next_steps.NO_FOLDER.format(lacking))

  def build():
    train, begin, predict = None, None, None
    if config.do_train:
      train = training(task, config, comm)
      begin = functools.partial(task_file.write, config, task.task_content)
    evaluator = _evaluator(task, config, comm) if config.do_eval else None
    if config.do_predict:
      source = task.prediction_set
      collect = _collector(task, source, config, comm, "prediction")

      def predict(session, watchdog):
        outputs = collect(session, None, watchdog)
        return task.write_predictions(source, outputs) if comm.is_root else []

    steps = next_steps.after(
      str(config.output_dir),
      config.kind,
      pairs=task.reads_pairs,
      converts=not lacking,
      average=config.evaluate_average,
    )

    def evaluated(results):
      chosen = task.chosen_by(results)
      if chosen and task.config.do_train and comm.is_root:
        task_file.add(str(task.config.output_dir), chosen)

    return train_loop.Job(
      _best_by(task, config), train, evaluator, predict, evaluated, begin,
      task.labels, steps,
    )  # fmt: skip

  return training_run.run(config, comm, build, snapshot, signals)


def _best_by(task: FinetuningTask, config: FinetuningConfig) -> BestBy:
  """Which evaluation is the best, as the training has settled it."""
  model = None if config.do_train else task_file.binding(config)
  settled = BestBy.of_task(model.task) if model else None
  return settled or task.best_by


def start(command, kind: Callable[..., FinetuningTask]) -> None:
  """Runs the command of a script for a kind of task; see `training_run`."""

  def job(config, *world):
    task = command.task or kind(config)
    task.config = config  # the same on all ranks
    return finetune(task, *world)

  train_loop.run_read(lambda: training_run.start(command, job))


def training(
  task: FinetuningTask, config: FinetuningConfig, comm
) -> train_loop.Task:
  """Builds data, model and update in the graph."""
  source = task.training_set
  comm.check_equal("the training set", source.fingerprint())
  ranks, slices = comm.data_parallel, comm.tensor_parallel.size
  plan = source.plan(config, ranks.size)
  order = record_order.Order(len(source), config.seed)
  batches = input_pipeline.training_batches(source, order, plan, ranks)
  state = checkpointing.TrainingState(order)
  policy = mixed_precision.policy_of(config)
  rows = source.rows_of_record
  matmuls = model_flops.finetuning(
    config.bert, policy, config.kind, task.outputs, rows, source
  )
  build = contrastive.training_step if task.compares else training_step
  return train_loop.Task(
    plan=plan,
    ops=build(task, config, batches.next, state, plan, comm),
    state=state,
    source=source,
    batches=batches,
    summarize=_means,
    headline=_headline,
    positions=rows * source.tokens,
    flops={"records": model_flops.total(matmuls) / slices},
    vote=StopVote(comm),
  )


def training_step(
  task: FinetuningTask, config: FinetuningConfig, micro, state, plan, comm
) -> optimization.TrainOps:
  """Builds an update; see `training_step` of run_pretraining.py."""
  loss_scale = mixed_precision.make_loss_scale(config)
  dropout_seed = training_run.dropout_seed(config, plan, comm, micro)
  weights = comm.data_parallel.allreduce(micro.weights, name="global_counts")

  def forward_and_backward():
    batch = micro.batch
    head = task.head(batch, True, dropout_seed)
    sums = modeling.finetuning_sums(head.losses, head.correct, batch)
    # This micro-batch's share of the global batch's mean.
    loss = sums.loss / tf.maximum(weights[0], 1.0) * loss_scale.value
    return tf.gradients(loss, tf.trainable_variables()), modeling.by_name(sums)

  gradients, sums = jit.compiled(forward_and_backward, ("step",))()
  return optimization.train_ops(
    config, plan, comm, gradients, sums, loss_scale, state, micro
  )


def _headline(report: dict) -> str:
  right = report["accuracy"]
  return "" if right is None else f"{right:.1%} right"


def _means(sums: dict) -> dict:
  accuracy = None
  if "correct" in sums:
    accuracy = reporting.ratio(sums["correct"], sums["weights"])
  loss = reporting.ratio(sums["loss"], sums["weights"])
  return {"loss": loss, "accuracy": accuracy}


def _evaluator(
  task: FinetuningTask, config: FinetuningConfig, comm
) -> Evaluator:
  source = task.evaluation_set
  collect = _collector(task, source, config, comm, "evaluation")

  def evaluation(session, signals, watchdog):
    outputs, results = collect(session, signals, watchdog), {}
    weights = outputs.pop("weights")
    if "losses" in outputs:
      loss = (outputs.pop("losses") * weights).sum() / weights.sum()
      results["loss"] = float(loss)
    results |= task.results(source, outputs)
    # All ranks decide alike only if their numbers agree to the last bit.
    results = comm.from_root(results)
    watchdog.resume()
    return {**results, "examples": len(source.examples)}

  def headline(results):
    shown = []
    for name, value in results.items():
      # SQuAD's best thresholds, and TYPE/f1 of each type of entity.
      is_detail = name.startswith("best_") or "/" in name
      if isinstance(value, float) and not is_detail:
        shown.append(f"{name} {value:.4f}")
    return "  ".join(shown)

  return Evaluator(evaluation, headline, config, source.fingerprint(), comm)


def _collector(
  task: FinetuningTask, source, config: FinetuningConfig, comm, name: str
):
  """Makes (session, signals, watchdog) -> {name: [rows, ...] of all ranks}."""
  comm.check_equal(f"the {name} set", source.fingerprint())
  rows, ranks = source.rows_of(config.eval_batch_size), comm.data_parallel
  batches = input_pipeline.evaluation_batches(source, rows, ranks)
  # Training makes all variables. Without it this is what makes them.
  reuse = config.do_train or tf.AUTO_REUSE
  with averages.evaluated_scope(config.evaluate_average, reuse):
    head = task.head(batches.next, False)
  weights = batches.next.weights
  fetches = {"weights": weights, **head.outputs}
  if head.losses is not None:
    fetches["losses"] = head.losses
  vote = StopVote(comm, f"{name}_vote")
  evaluation = EvaluationBatches(fetches, source, batches, vote, comm)
  of_rank = -(-len(source) // ranks.size)  # rows

  def of_all_ranks(output: str, fetched: list[dict]) -> np.ndarray:
    """float32 [rows, ...], in the order of the source."""
    mine = np.zeros([of_rank, *fetches[output].shape[1:]], np.float32)
    rows = itertools.chain.from_iterable(batch[output] for batch in fetched)
    # A rank may have fewer rows, and padding may fill its last batch.
    for target, row in zip(mine, rows, strict=False):
      target[:] = row
    # [N, of_rank, ...]: rank r of N has the rows r, r + N, ...
    everyone = ranks.gather(mine)
    in_order = np.swapaxes(everyone, 0, 1).reshape(-1, *mine.shape[1:])
    return in_order[: len(source)]

  def collect(session, signals, watchdog):
    fetched = list(evaluation.run(session, signals, watchdog))
    watchdog.pause()  # the results may take long
    return {name: of_all_ranks(name, fetched) for name in fetches}

  return collect
