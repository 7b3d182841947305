"""Pre-trains BERT (masked LM and next sentence prediction) on Horovod ranks.

  python run_pretraining.py --do_train ...                      one process
  horovodrun -np 16 python run_pretraining.py --do_train ...    16 ranks

Made from records of create_pretraining_data.py (or google/bert's). The same
command goes on where an earlier one stopped.
"""

import dataclasses
import math
import os

import numpy as np

import checkpointing
import distributed
import flags_common
import input_pipeline
import mixed_precision
import modeling
import optimization
import train_loop
import training_hooks
import training_plan
from errors import UserError
from lr_schedule import Schedule, scale_peak
from tensorflow_v1 import tf

FLAGS = tf.flags.FLAGS


def define_flags() -> None:
  """google/bert's flags with its meaning where it has them, and ours."""
  flags = tf.flags
  flags_common.define_model_flags()
  flags_common.define_precision_flags()
  flags_common.define_optimizer_flags()
  flags_common.define_training_flags()
  flags.adopt_module_key_flags(flags_common)  # so that --help shows them
  flags.DEFINE_bool("do_train", False, "Train.")
  flags.DEFINE_bool("do_eval", False, "Evaluate, after training if both.")
  flags.DEFINE_string(
    "input_file", None, "Record files: comma-separated names and globs."
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
  flags.mark_flags_as_required(["input_file", "bert_config_file", "output_dir"])


@dataclasses.dataclass(frozen=True)
class PretrainingConfig:
  """Everything a run needs, checked; fields are named like their flags."""

  bert: modeling.BertConfig
  optimizer: optimization.OptimizerConfig
  loss_scale: mixed_precision.LossScaleConfig
  input_file: str
  output_dir: str
  do_train: bool
  do_eval: bool
  eval_input_file: str | None = None
  init_checkpoint: str | None = None
  max_seq_length: int | None = None
  max_predictions_per_seq: int | None = None
  train_batch_size: int = 32
  eval_batch_size: int = 32
  num_accumulation_steps: int | None = None
  global_batch_size: int | None = None
  learning_rate: float = 5e-5
  lr_scaling: str = "none"
  precision: str = "fp32"
  precision_policy: tuple = ()
  lr_schedule: str = "linear"
  lr_power: float | None = None
  lr_decay_rate: float = 0.9
  lr_decay_steps: int = 1000
  lr_offset: float = 0.0
  rewarmup: bool = True
  num_train_steps: int = 100000
  num_warmup_steps: int = 10000
  save_checkpoints_steps: int = 1000
  keep_checkpoints: int = 5
  log_every_steps: int = 10
  eval_every_steps: int = 0
  max_eval_steps: int = 0
  seed: int = 12345
  num_threads: int = 0

  def __post_init__(self):
    if not (self.do_train or self.do_eval):
      raise UserError("give --do_train, --do_eval or both")
    if self.eval_every_steps and not self.do_eval:
      raise UserError("--eval_every_steps needs --do_eval")
    if self.seed < 0:
      raise UserError(f"--seed={self.seed}: must not be negative")
    for name in ("learning_rate", "lr_offset"):
      value = getattr(self, name)
      if not (math.isfinite(value) and value >= 0):
        raise UserError(f"--{name}={value}: must be finite and not negative")
    self.schedule(self.learning_rate, total=1, warmup=0)
    self.loss_scale.check(self.policy)

  @classmethod
  def from_flags(cls, flags) -> "PretrainingConfig":
    """Raises `UserError` for every setting that cannot be right."""
    try:
      bert = modeling.BertConfig.from_json_file(flags.bert_config_file)
    except (ValueError, tf.errors.OpError) as e:
      message = getattr(e, "message", None) or str(e)
      if flags.bert_config_file not in message:
        message = f"{flags.bert_config_file}: {message}"
      raise UserError(f"--bert_config_file: {message}") from e

    def values(part, *others):
      names = [f.name for f in dataclasses.fields(part)]
      return {n: getattr(flags, n) for n in names if n not in others}

    return cls(
      bert=bert,
      optimizer=optimization.OptimizerConfig(
        **values(optimization.OptimizerConfig)
      ),
      loss_scale=mixed_precision.LossScaleConfig(
        **values(mixed_precision.LossScaleConfig)
      ),
      **values(cls, "bert", "optimizer", "loss_scale"),
    )

  def as_dict(self) -> dict:
    """Plain values, for the run folder and to compare ranks."""
    return {**dataclasses.asdict(self), "bert": self.bert.to_dict()}

  @property
  def policy(self) -> mixed_precision.Policy:
    """The type in which each part of the network computes."""
    return mixed_precision.make_policy(self.precision, self.precision_policy)

  def schedule(
    self, peak: float, total: int, warmup: int, divisor: int = 1
  ) -> Schedule:
    """The learning rate of each update; `divisor` as in `TrainingPlan`."""
    return Schedule(
      peak=peak,
      total=total,
      warmup=warmup,
      name=self.lr_schedule,
      power=self.lr_power,
      decay_rate=self.lr_decay_rate,
      decay_steps=math.ceil(self.lr_decay_steps / divisor),
      offset=self.lr_offset,
    )

  def loop(self) -> train_loop.LoopConfig:
    """The part that the loop reads."""
    return train_loop.LoopConfig(
      **{
        f.name: getattr(self, f.name)
        for f in dataclasses.fields(train_loop.LoopConfig)
      }
    )

  def record_shape(self, files: str) -> input_pipeline.RecordShape:
    """Lengths from the flags, else from the records' manifest, else 128/20."""
    made = input_pipeline.manifest_lengths(files) or (128, 20)
    return input_pipeline.RecordShape(
      max_seq_length=self.max_seq_length or made[0],
      max_predictions_per_seq=self.max_predictions_per_seq or made[1],
      vocab_size=self.bert.vocab_size,
    )


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


def make_plan(config: PretrainingConfig, records: int, comm):
  """The resolved `training_plan.TrainingPlan` of a training set."""
  return training_plan.resolve(
    ranks=comm.size,
    records=records,
    train_batch_size=config.train_batch_size,
    num_train_steps=config.num_train_steps,
    num_warmup_steps=config.num_warmup_steps,
    num_accumulation_steps=config.num_accumulation_steps,
    global_batch_size=config.global_batch_size,
  )


def training_task(config: PretrainingConfig, comm) -> train_loop.Task:
  """Data, plan, model and update: everything that training runs."""
  source = open_source(config.input_file, config, comm)
  plan = make_plan(config, len(source.set), comm)
  batches = input_pipeline.training_batches(
    source, config.seed, plan.micro_batch, plan.accumulation, comm
  )
  state = checkpointing.TrainingState(config.seed, len(source.set))
  ops = training_graph(config, batches.next, state, plan, comm)
  return train_loop.Task(
    plan=plan,
    ops=ops,
    state=state,
    source=source,
    batches=batches,
    summarize=losses,
    tokens="tokens",
    capacity=plan.global_batch * source.shape.max_seq_length,
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
  sums = modeling.pretraining_model(
    micro.batch,
    config.bert,
    is_training=True,
    dropout_seed=dropout_seed,
    policy=config.policy,
  )

  # The loss is the mean over the masked tokens of the GLOBAL batch, so this
  # micro-batch's share of it divides by counts over all ranks.
  counts = comm.allreduce(
    tf.stack([micro.masked_lm_weight, micro.next_sentence_weight]),
    name="global_counts",
  )
  loss = sums.masked_lm_loss / tf.maximum(counts[0], 1.0)
  loss += sums.next_sentence_loss / tf.maximum(counts[1], 1.0)

  schedule = config.schedule(
    scale_peak(config.learning_rate, config.lr_scaling, comm.size),
    plan.updates,
    plan.warmup_updates,
    plan.divisor,
  )
  step = tf.convert_to_tensor(tf.train.get_or_create_global_step())
  return optimization.build_train_ops(
    loss,
    sums._asdict(),
    config.optimizer.make(schedule(step + state.schedule_start)),
    comm,
    micro_batches=plan.accumulation,
    clip_norm=config.optimizer.clip_norm,
    prenormalize=config.optimizer.prenormalize,
    loss_scale=config.loss_scale.make(config.policy),
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

  def evaluation(session):
    totals = train_loop.add_up(session, sums._asdict(), source, batches, comm)
    results = losses(totals)
    del results["loss"]
    return {**results, "examples": int(totals["next_sentence_weight"])}

  return train_loop.Evaluator(evaluation, config.output_dir, comm)


def pretrain(config: PretrainingConfig, comm) -> dict:
  """Trains and evaluates as `config` says; the whole of a run but its flags.

  Returns:
    {"training": speeds and counts or None, "evaluation": results or None}, the
    same on all ranks but for speeds.

  Raises:
    UserError: settings, data, checkpoint or ranks that do not fit together.
  """
  comm.check_equal("the settings", repr(config.as_dict()))
  with tf.Graph().as_default():
    tf.enable_resource_variables()
    tf.set_random_seed(config.seed)
    tf.train.get_or_create_global_step()
    task = training_task(config, comm) if config.do_train else None
    evaluate = evaluator(config, comm) if config.do_eval else None
    checkpointer = checkpointing.Checkpointer(
      config.output_dir, comm, config.keep_checkpoints
    )
    write_run_folder(config, task, comm)
    with tf.Session(
      config=distributed.session_config(comm, config.num_threads)
    ) as session:
      step = start_or_resume(session, checkpointer, task, config, comm)
      training = results = None
      if task:
        training = train_loop.train(
          session, task, evaluate, checkpointer, config.loop(), comm
        )
        step = max(step, task.plan.updates)
      if evaluate:
        results = evaluate(session, step)
        evaluate.close()
  finish(config, training, results, step, comm)
  return {"training": training, "evaluation": results}


def start_or_resume(session, checkpointer, task, config, comm) -> int:
  """Gives the variables their values; returns the update they are from.

  Raises:
    UserError: the checkpoint is from a run with another seed or other data, or
      there is none to evaluate.
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
    made = session.run([task.state.data_seed, task.state.data_records])
    here = [config.seed, len(task.source.set)]
    if made != here:
      raise UserError(
        f"{config.output_dir} holds a run with --seed={made[0]} on {made[1]} "
        f"records; this is --seed={here[0]} on {here[1]}. Use the same to go "
        "on with it, or start a new run in another --output_dir (with "
        "--init_checkpoint to keep the weights)"
      )
  return step


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
    training_hooks.write_json(path, training)
    lines.append(training_hooks.speed_line(training))
  elif training:
    lines.append(f"nothing left to train: update {step:,} is the plan's last")
  if results:
    path = os.path.join(folder, training_hooks.EVAL_RESULTS_FILE)
    training_hooks.write_json(path, results)
    lines.append(f"evaluation  {path}")
  if training:
    lines += [
      f"checkpoint  {os.path.join(folder, checkpointing.PREFIX)}-{step}",
      f"metrics     {os.path.join(folder, training_hooks.METRICS_FILE)}",
      f"TensorBoard {folder}",
      "to train on, give the same command with more --num_train_steps",
    ]
  train_loop.say(comm, *lines)


def main(_) -> None:
  config = PretrainingConfig.from_flags(FLAGS)
  pretrain(config, distributed.init())


if __name__ == "__main__":
  define_flags()
  train_loop.run_main(main)
