"""Pre-trains BERT (masked LM and next sentence prediction) on Horovod ranks.

  python run_pretraining.py --do_train ...                      one process
  horovodrun -np 16 python run_pretraining.py --do_train ...    16 ranks

Made from records of create_pretraining_data.py (or google/bert's). The same
command goes on where an earlier one stopped.
"""

import contextlib
import dataclasses
import functools
import os
import sys

import numpy as np

import checkpoint_files
import checkpointing
import distributed
import elastic
import flags_common
import input_pipeline
import json_files
import mixed_precision
import modeling
import optimization
import train_loop
import training_hooks
import training_plan
import xla
from errors import UserError
from lr_schedule import scale_peak
from pretraining_config import PretrainingConfig
from pretraining_data import record_order
from tensorflow_v1 import tf

FLAGS = tf.flags.FLAGS


def define_flags() -> None:
  """google/bert's flags with its meaning where it has them, and ours."""
  flags = tf.flags
  flags_common.define_model_flags()
  flags_common.define_precision_flags()
  flags_common.define_optimizer_flags()
  flags_common.define_allreduce_flags()
  flags_common.define_training_flags()
  flags.DEFINE_string(
    "config_json",
    None,
    "DeepSpeed-style JSON with batch sizes, optimizer, schedule and precision; "
    "flags given on the command line win over it.",
  )
  flags.DEFINE_bool(
    "dry_run",
    False,
    "Build everything, print the plan and the parameter table, run one update "
    "on fake records, and write nothing.",
  )
  flags.DEFINE_integer(
    "dry_run_ranks",
    1,
    "With --dry_run: plan for so many ranks, without having them.",
    lower_bound=1,
  )
  flags.adopt_module_key_flags(flags_common)  # so that --help shows them
  flags.DEFINE_bool("do_train", False, "Train.")
  flags.DEFINE_bool("do_eval", False, "Evaluate, after training if both.")
  flags.DEFINE_string(
    "input_file", None, "Record files: comma-separated names and globs."
  )
  flags.DEFINE_integer(
    "shuffle_block_records",
    0,
    "For data larger than memory: shuffle blocks of so many records (a few "
    f"MB), and the records of {record_order.WINDOW_BLOCKS} blocks at a time; "
    "reading then needs the memory of twice as many. 0: shuffle all records.",
    lower_bound=0,
  )
  flags.DEFINE_string(
    "eval_input_file",
    None,
    "Record files to evaluate on; default: --input_file.",
  )
  flags.DEFINE_integer(
    "max_seq_length",
    None,
    "Tokens of a record. Default: the manifest's, or 128 for records without.",
  )
  flags.DEFINE_integer(
    "max_predictions_per_seq",
    None,
    "Masked tokens of a record. Default: the manifest's, or 20.",
  )
  flags.DEFINE_integer(
    "max_eval_steps",
    0,
    "At most so many batches over all ranks in an evaluation; 0: every record.",
    lower_bound=0,
  )
  flags.mark_flag_as_required("bert_config_file")


def open_source(files: str, config: PretrainingConfig, comm):
  """Opens record files and makes sure that all ranks see the same."""
  shape = config.record_shape(files)
  if shape.max_seq_length > config.bert.max_position_embeddings:
    raise UserError(
      f"{files}: records of {shape.max_seq_length} tokens, but the BERT config "
      f"has max_position_embeddings={config.bert.max_position_embeddings}"
    )
  source = input_pipeline.Source(files, shape)
  comm.check_equal(f"the data in {files}", source.fingerprint())
  return source


def make_plan(config: PretrainingConfig, source, ranks: int):
  """The resolved `training_plan.TrainingPlan`; without a `source` of none."""
  return training_plan.resolve(
    ranks=ranks,
    records=len(source.set) if source else None,
    packing_factor=source.packing_factor if source else 1.0,
    train_batch_size=config.train_batch_size,
    num_train_steps=config.num_train_steps,
    num_warmup_steps=config.num_warmup_steps,
    num_accumulation_steps=config.num_accumulation_steps,
    global_batch_size=config.global_batch_size,
  )


def training_task(config: PretrainingConfig, comm) -> train_loop.Task:
  """Data, plan, model and update: everything that training runs."""
  if comm.elastic:
    check_elastic(config)
  source = open_source(config.input_file, config, comm)
  plan = make_plan(config, source, comm.size)
  order = record_order.Order(
    len(source.set), config.seed, config.shuffle_block_records
  )
  batches = input_pipeline.training_batches(source, order, plan, comm)
  state = checkpointing.TrainingState(order)
  ops = training_graph(config, batches.next, state, plan, comm)
  return train_loop.Task(
    plan=plan,
    ops=ops,
    state=state,
    source=source,
    batches=batches,
    summarize=losses,
    tokens="tokens",
    examples="next_sentence_weight",
    capacity=plan.global_batch * source.shape.max_seq_length,
    wishes=train_loop.Wishes(comm),
    loss_scale_floor=config.loss_scale.floor(config.uses_fp16),
  )


def check_elastic(config: PretrainingConfig) -> None:
  """Raises `UserError` for what depends on the number of ranks."""
  if not config.global_batch_size or config.lr_scaling != "none":
    raise UserError(
      "under horovodrun --min-np the number of ranks changes, so "
      "--global_batch_size must say how many examples an update has, and "
      f"--lr_scaling={config.lr_scaling} cannot depend on ranks: use none"
    )


def training_graph(config, micro, state, plan, comm) -> optimization.TrainOps:
  """Model, loss and update of one micro-batch.

  Args:
    config: a `PretrainingConfig`.
    micro: an `input_pipeline.MicroBatch`.
    state: a `checkpointing.TrainingState`, advanced by the update.
    plan: a `training_plan.TrainingPlan`.
    comm: a `distributed.Comm`.
  """
  # Dropout is a function of (seed, rank, micro-batch), so nothing hidden in a
  # kernel decides it and a resumed run draws what the stopped one would have.
  rank_seed = np.random.SeedSequence([config.seed, comm.rank]).generate_state(1)
  dropout_seed = tf.stack([int(rank_seed[0]) >> 1, micro.number])

  # The loss is the mean over the masked tokens of the GLOBAL batch, so this
  # micro-batch's share of it divides by counts over all ranks.
  counts = comm.allreduce(
    tf.stack([micro.masked_lm_weight, micro.next_sentence_weight]),
    name="global_counts",
  )

  def forward():
    sums = modeling.pretraining_model(
      micro.batch,
      config.bert,
      is_training=True,
      dropout_seed=dropout_seed,
      policy=config.policy,
      recompute=config.recompute,
    )
    with tf.name_scope("loss"):
      loss = sums.masked_lm_loss / tf.maximum(counts[0], 1.0)
      loss += sums.next_sentence_loss / tf.maximum(counts[1], 1.0)
    return loss, sums._asdict()

  schedule = config.schedule(
    scale_peak(config.learning_rate, config.lr_scaling, comm.size),
    plan.updates,
    plan.warmup_updates,
    plan.divisor,
  )
  step = tf.convert_to_tensor(tf.train.get_or_create_global_step())
  return optimization.build_train_ops(
    forward,
    config.optimizer.make(schedule(step + state.schedule_start)),
    comm,
    micro_batches=plan.accumulation,
    clip_norm=config.optimizer.clip_norm,
    prenormalize=config.optimizer.prenormalize,
    loss_scale=config.loss_scale.make(config.uses_fp16),
    allreduce=config.allreduce,
    samples=(state.samples_seen, plan.global_batch),
  )


def losses(sums: dict) -> dict:
  """Losses (nats) and accuracies from global sums by name."""
  masked = max(float(sums["masked_lm_weight"]), 1.0)
  pairs = max(float(sums["next_sentence_weight"]), 1.0)
  masked_lm_loss = float(sums["masked_lm_loss"]) / masked
  next_sentence_loss = float(sums["next_sentence_loss"]) / pairs
  return {
    "loss": masked_lm_loss + next_sentence_loss,
    "masked_lm_loss": masked_lm_loss,
    "masked_lm_accuracy": float(sums["masked_lm_correct"]) / masked,
    "next_sentence_loss": next_sentence_loss,
    "next_sentence_accuracy": float(sums["next_sentence_correct"]) / pairs,
  }


def evaluator(config: PretrainingConfig, comm) -> train_loop.Evaluator:
  """Builds the evaluation graph."""
  source = open_source(
    config.eval_input_file or config.input_file, config, comm
  )
  batches = input_pipeline.evaluation_batches(
    source,
    config.eval_batch_size,
    comm,
    limit=config.max_eval_steps * config.eval_batch_size,
  )
  with tf.variable_scope(tf.get_variable_scope(), reuse=config.do_train):
    sums = modeling.pretraining_model(
      batches.next, config.bert, is_training=False, policy=config.policy
    )

  def evaluation(session, signals):
    totals = train_loop.add_up(
      session, sums._asdict(), source, batches, comm, signals
    )
    if totals is None:
      return None
    results = losses(totals)
    del results["loss"]
    return {**results, "examples": int(totals["next_sentence_weight"])}

  return train_loop.Evaluator(evaluation, config.output_dir, comm)


def pretrain(
  config: PretrainingConfig, comm, commit=None, signals=None
) -> dict:
  """Trains and evaluates as `config` says; the whole of a run but its flags.

  Args:
    config: what to do.
    comm: a `distributed.Comm`.
    commit: `checkpointing.Commit` of an elastic run.
    signals: its `training_hooks.StopSignals`; by default they are this call's.

  Returns:
    {"training": speeds and counts or None, "evaluation": results or None}, the
    same on all ranks but for speeds.

  Raises:
    UserError: settings, data, checkpoint or ranks that do not fit together.
  """
  comm.check_equal("the settings", repr(config.as_dict()))
  with tf.Graph().as_default(), xla.mode(config.xla):
    tf.enable_resource_variables()
    tf.set_random_seed(config.seed)
    tf.train.get_or_create_global_step()
    task = training_task(config, comm) if config.do_train else None
    evaluate = evaluator(config, comm) if config.do_eval else None
    checkpointer = checkpointing.Checkpointer(
      config.output_dir, comm, config.keep_checkpoints, commit
    )
    write_run_folder(config, task, comm)
    with (
      tf.Session(config=session_config(config, comm)) as session,
      contextlib.closing(checkpointer),
    ):
      step = start_or_resume(session, checkpointer, task, config, comm)
      training = results = None
      if task:
        own = training_hooks.StopSignals()
        with (
          contextlib.nullcontext(signals) if signals else own as signals,
          training_hooks.Watchdog(comm) as watchdog,
        ):
          training = train_loop.train(
            session,
            task,
            evaluate,
            checkpointer,
            config.loop(),
            comm,
            signals,
            watchdog,
          )
        step = training["global_step"]
      if evaluate and not (training and training["stopped"]):
        results = evaluate(session, step)
      if evaluate:
        evaluate.close()
  finish(config, training, results, step, comm)
  return {"training": training, "evaluation": results}


def session_config(config: PretrainingConfig, comm) -> tf.ConfigProto:
  """Threads, GPU and XLA's clustering of this rank's session."""
  proto = distributed.session_config(comm)
  return xla.session_config(proto, config.xla)


def start_or_resume(session, checkpointer, task, config, comm) -> int:
  """Gives the variables their values; returns the update they are from.

  Raises:
    UserError: the checkpoint is from a run with another order of records (seed,
      blocks) or other data, or there is none to evaluate.
  """
  if not checkpointer.has_checkpoint():
    if not (config.do_train or config.init_checkpoint):
      raise UserError(
        "nothing to evaluate: no checkpoint in --output_dir="
        f"{config.output_dir} and no --init_checkpoint"
      )
    report = checkpointer.initialise(
      session,
      config.init_checkpoint,
      schedule_start=task.state.schedule_start
      if task and not config.rewarmup
      else None,
    )
    if report:
      train_loop.say(comm, *report.lines())
    return 0
  path = checkpointer.resume(session)
  step = int(session.run(tf.train.get_global_step()))
  train_loop.say(comm, f"resumed {path}")
  if task:
    made, here = task.state.orders(session)
    if made != here:
      raise UserError(
        f"{config.output_dir} holds a run with {_data_settings(made)}; this is "
        f"{_data_settings(here)}. Use the same to go on with it, or start a "
        "new run in another --output_dir (with --init_checkpoint to keep the "
        "weights)"
      )
  return step


def _data_settings(order: record_order.Order) -> str:
  return (
    f"--seed={order.seed} and --shuffle_block_records={order.block} on "
    f"{order.count} records"
  )


def write_run_folder(config: PretrainingConfig, task, comm) -> None:
  """Flags, plan, versions, devices and the BERT config, before training."""
  train_loop.say(comm, *(task.plan.lines() if task else []))
  if config.policy != mixed_precision.FP32:
    train_loop.say(comm, f"precision: {config.policy.describe()}")
  if not comm.is_root:
    return
  os.makedirs(config.output_dir, exist_ok=True)
  path = os.path.join(config.output_dir, "bert_config.json")
  with open(path, "w", encoding="utf-8") as f:
    f.write(config.bert.to_json_string())
  training_hooks.write_run_file(
    config.output_dir,
    flags=config.as_dict(),
    plan=task.plan if task else None,
    data=task.source.describe() if task else None,
    devices=[d.name for d in tf.config.list_physical_devices()],
  )


def finish(config, training, results, step: int, comm) -> None:
  """Writes the results and says where everything is."""
  if not comm.is_root:
    return
  folder = config.output_dir
  lines = [""]
  if training and training["updates"]:
    path = os.path.join(folder, training_hooks.TRAINING_RESULTS_FILE)
    json_files.write(path, training)
    lines.append(training_hooks.speed_line(training))
  elif training:
    lines.append(f"nothing left to train: update {step:,} is the plan's last")
  if results:
    path = os.path.join(folder, training_hooks.EVAL_RESULTS_FILE)
    json_files.write(path, results)
    lines.append(f"evaluation  {path}")
  best = os.path.join(
    folder,
    f"{checkpoint_files.PREFIX}-{training_hooks.best_evaluation(folder, step)}",
  )
  if os.path.exists(best + ".json"):
    lines.append(f"best        {best} by evaluation")
  if training:
    lines += [
      f"checkpoint  {os.path.join(folder, checkpoint_files.PREFIX)}-{step}",
      f"metrics     {os.path.join(folder, training_hooks.METRICS_FILE)}",
      f"TensorBoard {folder}",
      f"stopped before update {step + 1:,}: the same command goes on there"
      if training["stopped"]
      else "to train on, give the same command with more --num_train_steps",
    ]
  train_loop.say(comm, *lines)


def dry_run(config: PretrainingConfig) -> None:
  """Plan, parameters and one update of fake records, for any number of ranks.

  The update is of two micro-batches (or one, without accumulation) of at most
  two examples, so that it fits where the planned one would not.
  """
  shape = config.record_shape(config.input_file)
  plan = make_plan(config, None, config.dry_run_ranks)
  say = functools.partial(train_loop.say, distributed.Comm())
  say(*plan.lines(), f"precision: {config.policy.describe()}")
  say(str(config.optimizer), "")
  small = dataclasses.replace(
    plan,
    micro_batch=min(2, plan.micro_batch),
    accumulation=min(2, plan.accumulation),
  )
  with tf.Graph().as_default(), xla.mode(config.xla):
    tf.enable_resource_variables()
    tf.set_random_seed(config.seed)
    tf.train.get_or_create_global_step()
    examples = input_pipeline.fake_batch(shape, small.micro_batch)
    micro = input_pipeline.fixed_micro_batch(examples, small.accumulation)
    state = checkpointing.TrainingState()
    ops = training_graph(config, micro, state, small, distributed.Comm())
    say(*parameter_table(ops.variables), "")
    session = tf.Session(config=session_config(config, distributed.Comm()))
    session.run(
      [tf.global_variables_initializer(), tf.local_variables_initializer()]
    )
    for _ in range(small.accumulation - 1):
      session.run(ops.accumulate)
    fetches = {"sums": ops.sums, "lr": ops.learning_rate, "update": ops.update}
    fetches |= {"grad_norm": ops.grad_norm, "skipped": ops.skipped}
    got = session.run(fetches)
  loss = losses(got["sums"])["loss"]
  say(
    f"one update of {small.accumulation} x {small.micro_batch} fake examples "
    f"of {shape.max_seq_length} tokens: loss {loss:.3f}  "
    f"gradient norm {got['grad_norm']:.3f}  lr {got['lr']:.2e}"
    + ("  skipped: not finite at this loss scale" if got["skipped"] else ""),
    "nothing was written",
  )


def parameter_table(variables) -> list[str]:
  """Name, shape and size of each variable, and their sum."""
  rows = [
    f"  {v.op.name:<64} {v.shape.as_list()!s:>14} {v.shape.num_elements():>13,}"
    for v in variables
  ]
  total = sum(v.shape.num_elements() for v in variables)
  return [*rows, f"  {'parameters':<64} {'':>14} {total:>13,}"]


def main(_) -> None:
  config = PretrainingConfig.from_flags(FLAGS)
  if config.dry_run:
    dry_run(config)
    return
  comm = distributed.init(config.num_threads)
  if comm.elastic:
    result = elastic.run(functools.partial(pretrain, config), comm)
  else:
    result = pretrain(config, comm)
  if result["training"] and result["training"]["stopped"]:
    sys.exit(training_hooks.STOPPED_STATUS)


if __name__ == "__main__":
  define_flags()
  train_loop.run_main(main)
