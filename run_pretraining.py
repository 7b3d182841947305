"""Pre-trains BERT on Horovod ranks: masked LM, with next sentences or without.

  python run_pretraining.py --dry_run --bert_config_file=base
  python run_pretraining.py --do_train --do_eval \\
    --bert_config_file=mini --output_dir=runs/first \\
    --input_file='records/train*.tfrecord' \\
    --eval_input_file='records/heldout*.tfrecord'

horovodrun -np 16 in front of it starts 16 ranks. The records are those of
create_pretraining_data.py, or google/bert's. The same command resumes a run
that was stopped.
"""

import contextlib
import dataclasses
import functools
import gc

from config.pretraining import PretrainingConfig
from interop import run_settings

if __name__ == "__main__":
  # Flags and files are checked first: TensorFlow takes seconds to load.
  COMMAND = run_settings.read_command(PretrainingConfig)

import input_pipeline
import mixed_precision
import modeling
import optimization
from checkpoints import agreement, checkpointing, metrics, run_folder, run_start
from common import input_files
from common.console import say, shown
from common.errors import DataError
from common.tensorflow_v1 import tf
from config import stages
from gradients import averages
from model import huggingface_types, initial_weights, model_flops
from model.tasks import MASKED_LM, NEXT_SENTENCE
from model.tensor_parallel import Slices
from records import cooccurrences, record_order
from training import dry_run, next_steps, plans, train_loop, training_run
from training.evaluation import EvaluationBatches, Evaluator, overlap_warning
from training.reporting import ratio
from training.signals import Budget, StopVote
from xla_patches import jit


def training_task(
  config: PretrainingConfig, comm, staged: stages.StageStart | None = None
) -> train_loop.Task:
  """Data, plan, model and update, of a run or of a stage."""
  source = input_pipeline.open_records(config.input_file, config, comm)
  run_start.check_vocabulary(config, source.describe())
  rows = config.bert.vocab_size
  say(comm, *input_pipeline.unused_rows(rows, source.manifests))
  ranks, shape = comm.data_parallel.size, source.shape
  plan = staged.plan if staged else plans.of_run(config, source, ranks)
  order = record_order.Order(
    len(source.set), config.seed, config.shuffle_block_records
  )
  vote = StopVote(comm)
  budget, lap = None, None
  if config.max_train_minutes:
    shares = staged.shares if staged else (0.0, 1.0)
    budget = Budget(config.max_train_minutes, *shares)
    lap = vote.lap()
  batches = input_pipeline.training_batches(
    source, order, plan, comm.data_parallel, budget and budget.share
  )
  state = checkpointing.TrainingState(order, bool(budget), bool(staged))
  # What a record costs by its length, and each masked token in the head.
  of_record = model_flops.of_run(config, 1, shape, masked=0)
  of_masked = model_flops.of_run(config, 0, shape, masked=1)
  slices = comm.tensor_parallel.size
  informed = functools.partial(informed_weights, config, source)
  return train_loop.Task(
    plan=plan,
    ops=training_step(config, shape, batches.next, state, plan, comm, lap),
    state=state,
    source=source,
    batches=batches,
    summarize=losses,
    headline=lambda row: f"{shown(row['masked_lm_accuracy'], '.1%')} right",
    positions=shape.max_seq_length,
    flops={
      "records": model_flops.total(of_record) / slices,
      "masked_lm_weight": model_flops.total(of_masked) / slices,
    },
    vote=vote,
    budget=budget,
    initial=informed if config.initial_weights == "informed" else None,
  )


def informed_weights(config: PretrainingConfig, source) -> dict:
  """Initial weights by variable, from a sample of the records."""
  statistics = cooccurrences.token_statistics(
    source.set, source.shape, config.bert.vocab_size, source.special_ids()
  )
  return initial_weights.informed(config.stage_bert, *statistics, config.seed)


def training_step(
  config, shape, micro, state, plan, comm, lap=None
) -> optimization.TrainOps:
  """From a `MicroBatch` to new weights: the algorithm. It advances `state`."""
  loss_scale = mixed_precision.make_loss_scale(config)
  dropout_seed = training_run.dropout_seed(config, plan, comm, micro)
  # All-reduced during the forward pass; the loss is a mean over all ranks.
  global_weights = comm.data_parallel.allreduce(micro.weights, "global_counts")
  sampling = training_run.sampling(config, plan, micro)

  # One function, so that --xla=step can compile it as one program.
  def forward_and_backward():
    sums = modeling.pretraining_model(
      micro.batch,
      config.trained_bert,
      is_training=True,
      dropout_seed=dropout_seed,
      policy=mixed_precision.policy_of(config),
      recompute=config.recompute,
      slices=Slices(comm.tensor_parallel),
      next_sentence=shape.next_sentence,
      sampling=sampling,
      z_loss=config.z_loss,
    )
    loss = modeling.pretraining_loss(sums, global_weights)
    scaled_loss = tf.multiply(loss, loss_scale.value, name="scaled_loss")
    return tf.gradients(scaled_loss, tf.trainable_variables()), sums

  gradients, sums = jit.compiled(forward_and_backward, ("step",))()
  # The last micro-batch of an update exchanges gradients and moves weights.
  sums = modeling.by_name(sums)
  return optimization.train_ops(
    config, plan, comm, gradients, sums, loss_scale, state, micro, lap
  )


def losses(sums: dict) -> dict:
  """Losses (nats) and accuracies from global sums; None without examples."""
  results: dict = {"loss": None}
  if "z_loss" in sums:
    results["z_loss"] = ratio(sums["z_loss"], sums["masked_lm_weight"])
  for head in ("masked_lm", "next_sentence"):
    if f"{head}_loss" not in sums:
      continue
    weight = sums[modeling.LOSS_WEIGHTS[f"{head}_loss"]]
    loss = ratio(sums[f"{head}_loss"], weight)
    accuracy = ratio(sums[f"{head}_correct"], weight)
    results |= {f"{head}_loss": loss, f"{head}_accuracy": accuracy}
    # google/bert's loss: the sum of the heads'.
    if loss is not None:
      results["loss"] = loss + (results["loss"] or 0.0)
  return results


def headline(results: dict) -> str:
  """An evaluation in one line."""
  parts = []
  for short, name in (("mlm", "masked_lm"), ("nsp", "next_sentence")):
    if f"{name}_loss" in results:
      loss = shown(results[f"{name}_loss"], ".3f")
      right = shown(results[f"{name}_accuracy"], ".1%")
      parts.append(f"{short} {loss} ({right})")
  return "  ".join(parts)


def evaluator(config: PretrainingConfig, comm, training=None) -> Evaluator:
  """Builds the evaluation graph; `training`: the source that is trained on."""
  files = config.eval_input_file or config.input_file
  source = input_pipeline.open_records(files, config, comm, training=False)
  if not training:
    run_start.check_vocabulary(config, source.describe())
    newest = run_start.evaluated_bert(config, comm)
    bert = dataclasses.replace(config, bert=newest).bert  # with its checks
  else:
    # Of all stages: held-out text must be in none of them.
    bert, trained = config.stage_bert, [*training.paths]
    for item in config.stages or ():
      with contextlib.suppress(DataError):  # an ended stage's may be gone
        trained += input_files.expand_patterns(item.get("input_file", ""))
    before, now = training.files.tokenizer, source.files.tokenizer
    agreement.agree_on_tokens(before, now, files)
    say(comm, *overlap_warning(source.paths, trained, "--eval_input_file"))
  most = config.max_eval_steps * config.eval_batch_size or len(source)
  stream = input_pipeline.evaluation_batches(
    source, config.eval_batch_size, comm.data_parallel, limit=most
  )
  with averages.evaluated_scope(config.evaluate_average, config.do_train):
    sums = modeling.pretraining_model(
      stream.next,
      bert,
      is_training=False,
      policy=mixed_precision.policy_of(config),
      slices=Slices(comm.tensor_parallel),
      next_sentence=source.shape.next_sentence,
    )
  sums = modeling.by_name(sums)
  vote = StopVote(comm, "evaluation_vote")
  batches = EvaluationBatches(sums, source, stream, vote, comm)

  def evaluation(session, signals, watchdog):
    totals = batches.totals(session, signals, watchdog)
    results = losses(totals)
    del results["loss"]
    return {**results, "examples": int(totals["examples"])}

  evaluated = f"{source.contents()} {min(most, len(source))}"
  return Evaluator(evaluation, headline, config, evaluated, comm)


def pretrain(
  config: PretrainingConfig, comm, snapshot=None, signals=None
) -> dict:
  """Trains and evaluates as `config` says; see `training_run.run`."""
  if not config.stages:
    return pretrain_stage(config, None, comm, snapshot, signals)
  begun = run_start.stage(config, comm, snapshot)
  staged = plans.of_stages(config, begun, comm, comm.data_parallel.size)
  say(comm, *staged.lines())
  # Each stage builds a graph of its own, and resumes from the checkpoint that
  # the one before has left.
  while True:
    stage = staged.start(begun)
    result = pretrain_stage(stage.config, stage, comm, snapshot, signals)
    training = result["training"]
    ended = not (training["stopped"] or training["stopped_early"])
    if stage.plan.stage.is_last or not ended:
      return result
    begun = staged.after(stage.plan, training["global_step"])
    gc.collect()  # the last stage's graph refers to itself


def pretrain_stage(
  config: PretrainingConfig, staged, comm, snapshot=None, signals=None
) -> dict:
  """`pretrain` without stages, or one of them: `staged` is its start."""

  def build():
    task = training_task(config, comm, staged) if config.do_train else None
    with_pairs = task and task.source.shape.next_sentence
    head = NEXT_SENTENCE if with_pairs else MASKED_LM
    lacking = huggingface_types.lacks(config.bert, head, {})
    if lacking and task:
      say(comm, next_steps.NO_FOLDER.format(lacking))
    evaluate: Evaluator | None = None
    if config.do_eval:
      evaluate = evaluator(config, comm, task and task.source)
    return train_loop.Job(
      best_by=metrics.BEST_BY,
      task=task,
      evaluate=evaluate,
      begin=task
      and functools.partial(
        run_folder.keep_vocabulary, config, task.source.manifests
      ),
      next_steps=next_steps.after(
        config.output_dir,
        positions=config.bert.max_position_embeddings,
        converts=not lacking,
        average=config.evaluate_average,
      ),
    )

  return training_run.run(config, comm, build, snapshot, signals)


def main(command: run_settings.Command) -> None:
  """Pre-trains, or makes a --dry_run."""
  if not command.flags.dry_run:
    training_run.start(command, pretrain)
  elif command.config:  # rank 0 does it for all
    dry_run.run(command.config, command.lines, training_step)


if __name__ == "__main__":
  train_loop.run_read(lambda: main(COMMAND))
