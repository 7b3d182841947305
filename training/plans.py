"""From settings and records to plans: of a run, or of each of its stages."""

import dataclasses

import input_pipeline
from checkpoints import agreement, checkpoint_files
from common.errors import UserError
from config import record_shapes, stages, training_plan


def of_run(config, source, ranks: int) -> training_plan.TrainingPlan:
  """The plan of a `PretrainingConfig`; `source` is None for unknown data."""
  steps = config.num_train_steps
  warmup = config.warmup_of(steps)
  if config.cooldown_from:
    steps = warmup + config.num_decay_steps
  plan = training_plan.resolve(
    ranks=ranks,
    records=len(source.set) if source else None,
    packing_factor=source.packing_factor if source else 1.0,
    train_batch_size=config.train_batch_size,
    num_train_steps=steps,
    num_warmup_steps=warmup,
    num_decay_steps=config.num_decay_steps,
    num_accumulation_steps=config.num_accumulation_steps,
    global_batch_size=config.global_batch_size,
  )
  if not config.cooldown_from:
    return plan
  # It continues from there, for its decay alone.
  first = checkpoint_files.step_of(config.cooldown_from) or 0
  if first < plan.warmup_updates:
    raise UserError(
      f"--cooldown_from={config.cooldown_from}: its update {first:,} is in "
      f"the {plan.warmup_updates:,} updates of warm-up: give that run's "
      "--num_train_steps and --num_warmup_steps"
    )
  # As many as at the end of that run.
  decay = training_plan.rounded_up(config.num_decay_steps / plan.divisor)
  last = first + decay
  return dataclasses.replace(
    plan, updates=last, decay_updates=decay, steps=0, cooldown_start=first
  )


def of_stages(
  config, begun: training_plan.Stage, comm, ranks: int
) -> stages.Stages:
  """The stages of a run, all checked from the one that has `begun`."""
  tokenizer = None  # of the first records that name one

  def open_checked(files: str, stage, training: bool = True):
    nonlocal tokenizer
    source = input_pipeline.open_records(files, stage, comm, training)
    agreement.agree_on_tokens(tokenizer, source.files.tokenizer, files)
    tokenizer = tokenizer or source.files.tokenizer
    return source

  def plan_of(stage) -> tuple[training_plan.TrainingPlan, float]:
    # The schedule is that of all stages.
    stage = dataclasses.replace(stage, num_warmup_steps=0, num_decay_steps=None)
    if not stage.input_file:
      length = record_shapes.of_run(None, stage).max_seq_length
      return of_run(stage, None, ranks), length
    source = open_checked(stage.input_file, stage)
    plan = of_run(stage, source, ranks)
    return plan, source.files.real_tokens() or source.shape.max_seq_length

  staged = stages.Stages(config, begun, plan_of)
  if config.do_eval:
    # Now, not when the stage begins: that may be days from here.
    for stage in staged.configs[begun.number :]:
      files = stage.eval_input_file or stage.input_file
      if files:
        open_checked(files, stage, training=False)
  return staged
