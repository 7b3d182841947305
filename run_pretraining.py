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
import os

import numpy as np
from absl import flags

from common import errors

if __name__ == "__main__":
  errors.leave_when_asked()  # also while TensorFlow is imported

import input_pipeline
import modeling
import optimization
from checkpoints import (
  checkpoint_files,
  checkpointing,
  run_folder,
  run_start,
)
from common import console, settings
from common.console import say
from common.errors import DataError, UserError
from common.tensorflow_v1 import tf
from config import stages, training_plan
from config.pretraining import BEST_BY, PretrainingConfig, is_preset
from data import cooccurrences, record_order, records, unigrams
from gradients import distributed, sharded_variables
from interop import model_source
from model import initial_weights, model_flops
from model.tensor_parallel import Slices
from training import dry_run, reporting, train_loop, training_run
from training.evaluation import (
  EvaluationBatches,
  Evaluator,
  add_up,
  overlap_warning,
)
from training.signals import Budget, StopVote
from xla_patches import jit


def define_flags() -> None:
  """Defines google/bert's flags, with their meaning there, and ours."""
  settings.define_flags(PretrainingConfig)


def open_source(
  files: str, config: PretrainingConfig, comm, training: bool = True
):
  """Opens record files, which must be the same on all ranks."""
  shape = config.record_shape(files, training)
  if shape.max_seq_length > config.bert.max_position_embeddings:
    raise UserError(
      f"{files}: records of {shape.max_seq_length} tokens, but the BERT config "
      f"has max_position_embeddings={config.bert.max_position_embeddings}"
    )
  source = input_pipeline.Source(files, shape)
  comm.check_equal(f"what is in {files}", source.fingerprint())
  return source


def unused_rows(vocab_size: int, manifests: dict) -> list[str]:
  """A line if the model has rows for more tokens than its records."""
  found = [manifest.tokenizer for _, manifest in manifests.values()]
  most = max(found, key=lambda t: t.vocab_size, default=None)
  if most is None or most.vocab_size >= vocab_size:
    return []
  return [
    f"the BERT config has vocab_size={vocab_size:,}, but the records' "
    f"vocabulary {most.file} has {most.vocab_size:,} tokens: "
    f"{vocab_size - most.vocab_size:,} rows would never be used. A new run can "
    f"have vocab_size={most.vocab_size}, as --bert_config_file=tiny, mini, "
    "base or large has"
  ]


def make_plan(config: PretrainingConfig, source, ranks: int):
  """The `training_plan.TrainingPlan`; `source` is None for unknown data."""
  steps = config.num_train_steps
  if config.cooldown_from:
    steps = config.num_warmup_steps + config.num_decay_steps
  plan = training_plan.resolve(
    ranks=ranks,
    records=len(source.set) if source else None,
    packing_factor=source.packing_factor if source else 1.0,
    train_batch_size=config.train_batch_size,
    num_train_steps=steps,
    num_warmup_steps=config.num_warmup_steps,
    num_decay_steps=config.num_decay_steps,
    num_accumulation_steps=config.num_accumulation_steps,
    global_batch_size=config.global_batch_size,
  )
  if config.cooldown_from:
    first = checkpoint_files.step_of(config.cooldown_from) or 0
    if first < plan.warmup_updates:
      raise UserError(
        f"--cooldown_from={config.cooldown_from}: its update {first:,} is in "
        f"the {plan.warmup_updates:,} updates of warm-up: give that run's "
        "--num_warmup_steps"
      )
    # As many as at the end of that run.
    decay = training_plan.rounded_up(config.num_decay_steps / plan.divisor)
    plan = dataclasses.replace(
      plan,
      updates=first + decay,
      decay_updates=decay,
      steps=0,
      cooldown_start=first,
    )
  return plan


def training_task(
  config: PretrainingConfig, comm, staged: stages.StageStart | None = None
) -> train_loop.Task:
  """Data, plan, model and update, of a run or of a stage."""
  source = open_source(config.input_file, config, comm)
  input_pipeline.check_words(source.tokenizer, known_words(config))
  say(comm, *unused_rows(config.bert.vocab_size, source.manifests))
  ranks = comm.data_parallel.size
  plan = staged.plan if staged else make_plan(config, source, ranks)
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
  matmuls = config.matmuls(1, source.shape)
  return train_loop.Task(
    plan=plan,
    ops=training_step(
      config, source.shape, batches.next, state, plan, comm, lap
    ),
    state=state,
    source=source,
    batches=batches,
    summarize=losses,
    tokens="tokens",
    examples="examples",
    headline=lambda report: (
      f"{console.shown(report['masked_lm_accuracy'], '.1%')} right"
    ),
    positions=source.shape.max_seq_length,
    flops=model_flops.total(matmuls) / comm.tensor_parallel.size,
    vote=vote,
    budget=budget,
    initial=(
      functools.partial(informed_weights, config, source)
      if config.initial_weights == "informed"
      else None
    ),
  )


def informed_weights(config: PretrainingConfig, source) -> dict:
  """`initial_weights.informed` of the text in `source`, by name."""
  shape, vocab_size = source.shape, config.bert.vocab_size
  # At most ten million tokens or 200,000 records: about half a minute.
  most = max(1, min(200_000, 10_000_000 // shape.max_seq_length))
  chosen = unigrams.numbers(source.set, most, in_a_row=min(100, -(-most // 10)))
  with console.Progress("reading words", len(chosen), "records") as bar:
    features = dict.fromkeys(source.set.paths, shape.features())
    read = unigrams.texts(source.set, chosen, features, bar.at)
    sequences = [ids.astype("int32") for ids in read]
  console.tell("counting neighbours ...")
  ids = np.concatenate(sequences)
  counts = unigrams.count([ids], vocab_size, source.special_ids())
  counted = cooccurrences.count(sequences, counts)
  console.tell(
    f"factorising {counted.nnz:,} counts of neighbours into word embeddings ..."
  )
  return initial_weights.informed(
    config.bert, unigrams.log_frequencies(counts), counted, config.seed
  )


def training_step(
  config, shape, micro, state, plan, comm, lap=None
) -> optimization.TrainOps:
  """From a `MicroBatch` to new weights: the algorithm. It advances `state`."""
  loss_scale = config.loss_scale.make(config.uses_fp16)
  dropout_seed = training_run.dropout_seed(config, plan, comm, micro)
  # All-reduced during the forward pass; the loss is a mean over all ranks.
  global_weights = comm.data_parallel.allreduce(
    micro.weights, name="global_counts"
  )

  sampling = training_run.sampling(config, plan, micro)

  def forward_and_backward():
    sums = modeling.pretraining_model(
      micro.batch,
      config.trained_bert,
      is_training=True,
      dropout_seed=dropout_seed,
      policy=config.policy,
      recompute=config.recompute,
      triton=config.triton,
      slices=Slices(comm.tensor_parallel),
      next_sentence=shape.next_sentence,
      sampling=sampling,
    )
    loss = modeling.pretraining_loss(sums, global_weights)
    scaled_loss = tf.multiply(loss, loss_scale.value, name="scaled_loss")
    return tf.gradients(scaled_loss, tf.trainable_variables()), sums

  gradients, sums = jit.compiled(forward_and_backward, ("step",))()
  return optimization.train_ops(
    config, gradients, sums.by_name(), loss_scale, state, plan, micro, comm, lap
  )


def losses(sums: dict) -> dict:
  """Losses (nats) and accuracies from global sums; None without examples."""
  weights = {"masked_lm": "masked_lm_weight", "next_sentence": "examples"}
  found = {
    f"{head}_{name}": reporting.ratio(sums[f"{head}_{key}"], sums[weight])
    for head, weight in weights.items()
    if f"{head}_loss" in sums
    for name, key in (("loss", "loss"), ("accuracy", "correct"))
  }
  heads = (found.get(f"{head}_loss") for head in weights)
  known = [loss for loss in heads if loss is not None]
  return {"loss": sum(known) if known else None, **found}


def headline(results: dict) -> str:
  """An evaluation in one line."""
  heads = (("mlm", "masked_lm"), ("nsp", "next_sentence"))
  return "  ".join(
    f"{short} {console.shown(results[f'{name}_loss'], '.3f')} "
    f"({console.shown(results[f'{name}_accuracy'], '.1%')})"
    for short, name in heads
    if f"{name}_loss" in results
  )


def known_words(config: PretrainingConfig):
  """Like `run_folder.tokenizer`, of the model that a run starts with.

  That is --output_dir's if it has a checkpoint, else --cooldown_from's or
  --init_checkpoint's.
  """
  folder = config.output_dir or ""
  if not checkpoint_files.has_begun(folder):
    start = config.cooldown_from or config.init_checkpoint
    folder = os.path.dirname(start or "")
  return run_folder.tokenizer(folder) if folder else None


def evaluator(config: PretrainingConfig, comm) -> Evaluator:
  """Builds the evaluation graph."""
  files = config.eval_input_file or config.input_file
  source = open_source(files, config, comm, training=False)
  if not config.do_train:
    input_pipeline.check_words(source.tokenizer, known_words(config))
  else:
    trained = records.expand_patterns(config.input_file)
    for item in config.stages or ():
      with contextlib.suppress(DataError):  # an ended stage's may be gone
        trained += records.expand_patterns(item.get("input_file", ""))
    found = records.find_manifest(trained[0])
    input_pipeline.check_words(
      found and (found[0], found[1].tokenizer), source.tokenizer
    )
    say(comm, *overlap_warning(source.paths, trained, "--eval_input_file"))
  stream = input_pipeline.evaluation_batches(
    source,
    config.eval_batch_size,
    comm.data_parallel,
    limit=config.max_eval_steps * config.eval_batch_size,
  )
  with tf.variable_scope(tf.get_variable_scope(), reuse=config.do_train):
    sums = modeling.pretraining_model(
      stream.next,
      config.bert,
      is_training=False,
      policy=config.policy,
      slices=Slices(comm.tensor_parallel),
      next_sentence=source.shape.next_sentence,
    ).by_name()

  vote = StopVote(comm, "evaluation_vote")
  batches = EvaluationBatches(sums, source, stream, vote, comm)

  def evaluation(session, signals, watchdog):
    rows = batches.run(session, signals, watchdog)
    totals = add_up(rows, sums, comm.data_parallel)
    results = losses(totals)
    del results["loss"]
    return {**results, "examples": int(totals["examples"])}

  most = config.max_eval_steps * config.eval_batch_size or len(source)
  evaluated = f"{source.contents()} {min(most, len(source))}"
  return Evaluator(evaluation, headline, config.output_dir, evaluated, comm)


def pretrain(
  config: PretrainingConfig, comm, snapshot=None, signals=None
) -> dict:
  """Trains and evaluates as `config` says; see `training_run.run`."""
  if not config.stages:
    return pretrain_stage(config, None, comm, snapshot, signals)
  begun = run_start.stage(config, comm, snapshot)
  each = all_stages(config, begun, comm, comm.data_parallel.size)
  say(comm, *each.lines())
  while True:
    stage = each.start(begun)
    result = pretrain_stage(stage.config, stage, comm, snapshot, signals)
    training = result["training"]
    ended = not (training["stopped"] or training["stopped_early"])
    if stage.plan.stage.is_last or not ended:
      return result
    begun = each.after(stage.plan, training["global_step"])
    gc.collect()  # the last stage's graph refers to itself


def all_stages(
  config: PretrainingConfig, begun: training_plan.Stage, comm, ranks: int
) -> stages.Stages:
  """The stages of a run, all checked from the one that has `begun`."""
  words = None  # the tokenizer of the first records that name one

  def opened(files, one, training=True):
    nonlocal words
    source = open_source(files, one, comm, training)
    input_pipeline.check_words(words, source.tokenizer)
    words = words or source.tokenizer
    return source

  each = stages.Stages(
    config,
    begun,
    lambda one: make_plan(
      dataclasses.replace(one, num_warmup_steps=0, num_decay_steps=None),
      opened(one.input_file, one) if one.input_file else None,
      ranks,
    ),
  )
  for one in each.configs[begun.number :] if config.do_eval else ():
    if files := one.eval_input_file or one.input_file:
      opened(files, one, training=False)
  return each


def pretrain_stage(
  config: PretrainingConfig, staged, comm, snapshot=None, signals=None
) -> dict:
  """`pretrain` without stages, or one of them: `staged` is its start."""

  def build():
    task = training_task(config, comm, staged) if config.do_train else None
    parts = train_loop.Parts(
      best_by=BEST_BY,
      task=task,
      evaluate=evaluator(config, comm) if config.do_eval else None,
      begin=task
      and functools.partial(
        run_folder.keep_vocabulary, config.output_dir, task.source.manifests
      ),
    )
    sharded_variables.add_sliced(comm, config.optimizer.kind.slots)
    return parts

  return training_run.run(config, comm, build, snapshot, signals)


def plan_only(config: PretrainingConfig) -> None:
  """Prints the plan, and what it needs by measurements in child processes."""
  own, started = distributed.started()
  if own:
    return  # horovodrun started it, and rank 0 does it
  ranks = config.dry_run_ranks or started
  groups, left_over = divmod(ranks, config.tensor_parallel)
  if left_over:
    raise UserError(
      f"--tensor_parallel={config.tensor_parallel}: --dry_run_ranks={ranks} is "
      "not a multiple of it"
    )
  needs = functools.partial(dry_run.tell_needs, training_step)
  if config.stages:
    begun = training_plan.WHOLE_RUN
    each = all_stages(config, begun, distributed.Comm(), groups)
    place = each.start(begun)
    last = needs(*place, ranks)
    while not place.plan.stage.is_last:
      if last >= place.plan.stage.total_updates:
        console.tell(
          f"stage {place.plan.stage.number + 1} would be the last: "
          f"--num_train_steps={config.num_train_steps} end there"
        )
        break
      place = each.start(each.after(place.plan, last))
      last = needs(*place, ranks)
  else:
    files = config.input_file
    source = open_source(files, config, distributed.Comm()) if files else None
    plan = make_plan(config, source, groups)
    if config.cooldown_from:  # its own updates
      plan = dataclasses.replace(
        plan, updates=plan.decay_updates, warmup_updates=0, cooldown_start=0
      )
    needs(config, plan, (0.0, 1.0), ranks)
  console.tell("nothing was written")


def main(_) -> None:
  """Pre-trains, or makes a --dry_run, with the flags' settings."""
  lines = model_source.settle(flags.FLAGS)
  config = PretrainingConfig.from_flags(flags.FLAGS)
  if is_preset(name := flags.FLAGS.bert_config_file):
    known = "the records' manifest" if config.vocabulary_size() else "its file"
    lines.append(
      f"--bert_config_file={name}: vocabulary of {config.bert.vocab_size:,} "
      f"from {known}"
    )
  if config.dry_run:
    if lines:
      console.tell(*lines)
    plan_only(config)
  else:
    job = functools.partial(pretrain, config)
    training_run.start(config, job, config.tensor_parallel, lines)


if __name__ == "__main__":
  define_flags()
  train_loop.run_main(main)
