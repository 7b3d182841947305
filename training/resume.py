"""How a run begins: with new weights, or where the run in its folder is."""

import dataclasses

from checkpoints import agreement, description, run_start
from checkpoints.agreement import NEW_RUN, STAGE
from checkpoints.restore import of_encoder
from common.console import say, tell
from common.errors import UserError
from common.tensorflow_v1 import tf
from config.lr_schedule import scale_peak
from records import record_order


def start_or_resume(run) -> tuple[int, bool]:
  """Gives the variables of a `train_loop.Run` values.

  Returns their update, and whether the run had come so far itself. Raises
  `UserError` if the run in the folder is another one than this.
  """
  session, task, config = run.session, run.task, run.config
  restore = run.checkpointer.restore
  resumes = restore.has_checkpoint()
  is_pretraining = config.kind == description.PRETRAINING
  branches_from = config.cooldown_from if is_pretraining else None
  before = description.NOTHING
  if run.comm.is_root and (resumes or branches_from):
    before = run_start.origin_of(config, resumes)
  # Before variables are read: those of another run may not even fit.
  check_run(config, task and task.plan, before)
  if resumes:
    staged = is_pretraining and config.stages
    name = restore.resume(session, grow=config.growth_from if staged else None)
    say(run.comm, f"resumed {name}")
  elif branches_from:
    restore.resume(session, branches_from)
    say(run.comm, f"continues from {branches_from}")
  else:
    _start(run)
  step = int(session.run(tf.train.get_global_step()))
  if not task:
    return step, resumes
  counted = int(session.run(task.state.schedule_start))
  schedule = config.planned_schedule(task.plan)
  if not resumes:
    schedule.check_trains(step, counted)
  if step:
    is_new_stage = task.state.begin_stage(session, task.plan.stage)
    seen = int(session.run(task.state.records_seen))
    orders = task.state.orders(session)
    data = task.source.describe()
    lines = check_position(config, task.plan, data, step, seen, orders, before)
    # A stage that began without a save is not yet this one.
    last = (before.training or {}).get("plan") or {}
    stage = last.get("stage", {}).get("number", 0)
    if lines and not is_new_stage and stage == task.plan.stage.number:
      title = "changed since its last start:"
      if branches_from and not resumes:
        title = f"differs from the run in {before.folder}:"
      tell(title, *(f"  {line}" for line in lines))
  zero = schedule.zero_from(counted)
  if zero is not None:
    say(
      run.comm,
      f"the learning rate is 0 from update {zero:,} on: its schedule of "
      f"{schedule.total:,} updates counts {counted:,} of --init_checkpoint. "
      "End there, or start again without --norewarmup",
    )
  return step, resumes


def _start(run) -> None:
  """Gives new weights, those of --init_checkpoint where it has them."""
  task, config = run.task, run.config
  if not (task or config.init_checkpoint):
    raise UserError(
      "nothing to evaluate: no checkpoint in --output_dir="
      f"{config.output_dir} and no --init_checkpoint"
    )
  report = run.checkpointer.restore.initialise(
    run.session,
    config.init_checkpoint,
    task.state.schedule_start if task and not config.rewarmup else None,
    task.initial if task else None,
    run.job.labels,
  )
  if report:
    say(run.comm, *report.lines())
    needed = report.missing
    if task:  # training makes a head, but of an encoder no other half
      needed = of_encoder(needed)
      if config.kind == description.PRETRAINING and of_encoder(report.loaded):
        needed = []
    if needed:
      raise UserError(
        f"--init_checkpoint={config.init_checkpoint} lacks {needed[0]} (of "
        f"{len(needed)} variables), and random ones would answer: train them "
        "first, or name a checkpoint that has them"
      )


def facts_of(config, plan=None, data: dict | None = None) -> dict:
  """The facts of this start, as `Description.facts` has the last one's."""
  plan = dataclasses.asdict(plan) if plan else None
  flags = description.of_one_run(config.as_dict(), {})  # the rest may change
  return agreement.of_start(flags, plan, data) | {"task": config.kind}


def check_run(config, plan, before: description.Description) -> None:
  """Raises `UserError` unless it is the model and, with a plan, the run."""
  was, now, keep = before.facts(), facts_of(config), ""
  scopes = agreement.scopes(bool(plan))
  last = before.training
  if plan and last and last["flags"].get("lr_scaling") == config.lr_scaling:
    # With another number of ranks the learning rate would be another one.
    scaling = config.lr_scaling
    factor = scale_peak(1.0, scaling, last["plan"]["ranks"])
    was["lr_factor"] = factor
    now["lr_factor"] = scale_peak(1.0, scaling, plan.ranks)
    peak = config.learning_rate * factor
    keep = f"--lr_scaling=none --learning_rate={peak!r}"
    if last["flags"].get("stages"):
      keep = (
        f"--lr_scaling=none and {factor!r} times --learning_rate and each "
        "stage's learning_rate"
      )
  agreement.agree(was, now, before.folder, scopes, keep)


def check_position(
  config,
  plan,
  data: dict,
  step: int,
  records_seen: int,
  orders: tuple[record_order.Order, record_order.Order],
  before: description.Description,
) -> list[str]:
  """Lines about what changed; `UserError` if its updates were not of `plan`."""
  folder = before.folder or config.output_dir
  # What the checkpoint says counts; its folder's files may be older.
  was = before.facts() | order_facts(orders[0])
  now = facts_of(config, plan, data) | order_facts(orders[1])
  lines = agreement.agree(was, now, folder, (STAGE,))
  last = (before.training or {}).get("plan") or {}
  other = plan.other_batch(last, step, records_seen)
  if other:
    difference, batch = other
    keep = ""
    if batch:
      # Flags that keep the run's updates. This command's flags may state
      # another batch and other steps than the last one's.
      names = {"divisor", "records_per_update"} & last.keys()
      then = dataclasses.replace(plan, **{name: last[name] for name in names})
      flags = " ".join(config.flags_for(then, batch))
      if config.num_accumulation_steps:
        flags += " and leave out --num_accumulation_steps"
      keep = f"to resume it give {flags}; or "
    raise UserError(
      f"{folder}: {difference}: updates and the learning rate's schedule "
      f"count global batches, so a run keeps its own: {keep}{NEW_RUN}"
    )
  if step > plan.updates:
    remedy = f"{config.length_flag} to resume it, or leave out --do_train"
    if plan.cooldown_start:
      remedy = "--num_decay_steps to resume it"
    raise UserError(
      f"{folder} holds a run of {step:,} updates, more than the "
      f"{plan.updates:,} of this plan: give more {remedy}, or {NEW_RUN}"
    )
  return lines


def order_facts(order: record_order.Order) -> dict[str, int]:
  """Facts of what decides the order of records."""
  return {
    "seed": order.seed,
    "shuffle_block_records": order.block,
    "records": order.count,
  }
