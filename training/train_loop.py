"""The session loop that all run_*.py share: update, report, save, evaluate."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np

import optimization
from common import errors
from common.tensorflow_v1 import tf
from gradients import distributed
from training import (
  checkpointing,
  divergence,
  input_pipeline,
  reporting,
  training_hooks,
  training_plan,
)


@dataclasses.dataclass(frozen=True)
class LoopConfig:
  """When to do what, in updates, 0 for never; and what messages say."""

  output_dir: str
  learning_rate: float
  save_checkpoints_steps: int
  commit_every_steps: int
  log_every_steps: int
  eval_every_steps: int
  early_stopping_evaluations: int
  evaluates_untrained: bool
  peak_tflops: float | None
  best_by: training_hooks.BestBy


@dataclasses.dataclass(frozen=True)
class Task:
  """What the loop trains.

  Attributes:
    plan: a `training_plan.TrainingPlan`.
    ops: `optimization.TrainOps`.
    state: a `checkpointing.TrainingState`, advanced by the update.
    source: an `input_pipeline.Source`.
    batches: its `input_pipeline.Batches`.
    summarize: global sums of an update -> the losses and accuracies to report.
    headline: what of a report the progress line shows.
    tokens: name of the sum that counts real tokens.
    examples: name of the sum that counts examples.
    capacity: token positions of one global batch, padding included.
    flops: of the model's matmuls on one global batch, see `model_flops`:
      forward and backward, padding included, so that it says how well the
      devices are used, and `padding` for what.
    wishes: what ranks ask for, that all see.
    loss_scale_floor: a loss scale that is not above it cannot fall.
  """

  plan: training_plan.TrainingPlan
  ops: optimization.TrainOps
  state: checkpointing.TrainingState
  source: input_pipeline.Source
  batches: input_pipeline.Batches
  summarize: Callable[[dict], dict]
  headline: Callable[[dict], str]
  tokens: str
  examples: str
  capacity: int
  flops: float
  wishes: "Wishes"
  loss_scale_floor: float


class Wishes:
  """What ranks ask for, of which all learn in the same micro-batch.

  Attributes:
    agreed: float [3], over how many ranks: were asked to stop, were so a while
      ago, know of hosts that came or went.
  """

  # So long an elastic run waits for all ranks to be asked to stop, before it
  # takes it that some are to leave and the others to go on.
  PATIENCE_SECONDS = 3.0

  def __init__(self, comm, name: str = "wishes"):
    """Adds the wishes to the graph, under a name of their own."""
    self._comm = comm
    self._own = tf.placeholder_with_default(
      np.zeros(3, np.float32), [3], f"own_{name}"
    )
    self.agreed = comm.allreduce(self._own, name=name)

  def feed(self, signals) -> dict:
    """This rank's wishes.

    Args:
      signals: `training_hooks.StopSignals`; None wishes for nothing.
    """
    if signals is None:
      return {}
    asked, waited = signals.received is not None, signals.since()
    overdue = waited > self.PATIENCE_SECONDS
    return {self._own: [asked, overdue, self._comm.hosts_changed()]}

  def verdict(self, agreed) -> str | None:
    """What ranks agreed on.

    Returns:
      "stop" (all ranks), "change" (to a world of other ranks) or None.
    """
    asked, overdue, changed = agreed
    if asked == self._comm.size or (asked and not self._comm.elastic):
      return "stop"
    return "change" if overdue or changed else None


class Interrupted(Exception):
  """All ranks left an evaluation in the same batch.

  Attributes:
    verdict: what they agreed on, of `Wishes.verdict`.
  """

  def __init__(self, verdict: str):
    super().__init__(f"ranks agreed on {verdict}")
    self.verdict = verdict


def say(comm, *lines: str) -> None:
  """Prints lines on rank 0."""
  if comm.is_root:
    training_hooks.tell(*lines)


def train(
  session,
  task: Task,
  evaluate,
  checkpointer,
  config,
  comm,
  signals,
  watchdog,
  profile,
) -> dict:
  """Trains from where the session's variables are to the plan's last update.

  A stop that any rank is asked for ends it after the update before, saved; in
  an elastic run one that all ranks are asked for.

  Args:
    session: with all variables initialised.
    task: what to train.
    evaluate: an `Evaluator`, or None.
    checkpointer: a `checkpointing.Checkpointer`.
    config: a `LoopConfig`.
    comm: a `distributed.Comm`.
    signals: `training_hooks.StopSignals`.
    watchdog: `training_hooks.Watchdog`.
    profile: a `profiling.Profile`.

  Returns:
    Speeds and counts of this call, for the closing lines; `stopped` if it was
    asked to, `stopped_early` if evaluations became no better.

  Raises:
    records.DataError: a record is damaged.
    divergence.DivergedError: updates are not finite and stay so, or are not at
      the plan's end.
    distributed.RankLost: another rank stopped.
    distributed.WorldChange: ranks come or go; what is done is committed.
  """
  plan, ops, clock = task.plan, task.ops, reporting.Clock()
  step, samples = (
    int(n)
    for n in session.run([tf.train.get_global_step(), task.state.samples_seen])
  )
  first = step
  checkpointer.start(step)
  task.batches.start(session, samples)
  if comm.is_root:
    log = training_hooks.MetricsLog(
      config.output_dir, training_hooks.METRICS_FILE, step, "train"
    )
    progress = training_hooks.Progress(plan.updates, step, task.headline)
  if comm.elastic:
    checkpointer.commit(session, step)
  _keep_best(session, step, checkpointer, config, comm)
  guard = divergence.Guard(task, checkpointer, config, comm)
  verdict, to_save = None, False
  enough = _is_enough(step, config, comm)
  while step < plan.updates and not verdict and not enough:
    if (
      _due(step, config.eval_every_steps)
      and not guard.bad
      and (step > first or _lacks_evaluation(step, config, comm))
    ):
      try:
        with clock.timing("evaluation"):
          evaluate(session, step, signals, watchdog)
      except Interrupted as interrupted:
        verdict = interrupted.verdict
        break
      with clock.timing("save"):
        _keep_best(session, step, checkpointer, config, comm)
      if step == first:
        watchdog.look_away()  # the first update compiles
      enough = _is_enough(step, config, comm)
      if enough:
        break
    profile.at(step + 1)
    began = time.monotonic()
    try:
      with profile.update(step + 1):
        got, verdict = _update(session, task, signals, watchdog)
    except input_pipeline.READ_ERRORS as e:
      numbers = task.batches.numbers(samples)
      raise _clear_error(e, task.source, numbers) from e
    if got is None:
      break
    guard.see(session, step + 1, samples, got)
    step, samples = step + 1, samples + plan.global_batch
    clock.add(time.monotonic() - began, got, task)
    if comm.is_root:
      report = reporting.report(
        step, samples, got, task, clock, config.peak_tflops
      )
      _tell_trouble(step, got, ops.variables)
      progress.show(step, report)
      if step % config.log_every_steps == 0 or step == plan.updates:
        log.write(report)
        clock.lap()
    to_save = to_save or _due(step, config.save_checkpoints_steps)
    if guard.bad:
      continue
    with clock.timing("save"):
      if step == plan.updates or (to_save and checkpointer.is_ready()):
        checkpointer.save(session, step)
        to_save = False
      elif comm.elastic and _due(step, config.commit_every_steps):
        checkpointer.try_commit(session, step)
      checkpointer.look_after(step)
  if verdict == "change" and step < plan.updates:
    if not guard.bad:
      checkpointer.commit(session, step)
    watchdog.look_away()
    checkpointer.save_commit()
    raise distributed.WorldChange("ranks come or go")
  made = step - first
  if guard.bad:
    step = guard.end(session, step)
  elif checkpointer.saved < step:
    checkpointer.save(session, step)
  checkpointer.finish()
  watchdog.look_away()
  if comm.is_root:
    log.close()
  stalls = checkpointer.stalls
  return {
    **reporting.closing(clock, made, task),
    "saves": len(stalls),
    "longest_save_stall_seconds": max(stalls, default=0.0),
    "stopped": verdict == "stop",
    "stopped_early": enough,
    "global_step": step,
  }


def _keep_best(session, step: int, checkpointer, config, comm) -> None:
  """Sees to it that the best checkpoint by evaluation is there and stays."""
  best = None
  if comm.is_root:
    best = training_hooks.best_evaluation(
      config.output_dir, step, config.best_by
    )
  checkpointer.keep_best(session, step, best)


def _lacks_evaluation(step: int, config, comm) -> bool:
  """Whether the evaluation due where a run starts is still to be made.

  It is if the run that made this checkpoint stopped before it, or in it.
  """
  if not step:
    return config.evaluates_untrained
  lacks = False
  if comm.is_root:
    lacks = not training_hooks.was_evaluated(config.output_dir, step)
  return bool(comm.gather(np.array([lacks]))[0, 0])


def _is_enough(step: int, config, comm) -> bool:
  """Whether evaluations are no better since long; the same on all ranks."""
  if not config.early_stopping_evaluations:
    return False
  since = 0
  if comm.is_root:
    since = training_hooks.evaluations_since_best(
      config.output_dir, step, config.best_by
    )
  since = comm.gather(np.array([since]))[0, 0]
  return bool(since >= config.early_stopping_evaluations)


def _update(session, task: Task, signals, watchdog) -> tuple:
  """Runs an update, unless a rank is to stop while micro-batches add up.

  Returns:
    What was fetched, with `input_seconds`, for which micro-batches were not
    ready; or None: then the update was not made and is to be begun anew. And
    the verdict of `Wishes`.
  """
  ops, waited = task.ops, []
  for _ in range(task.plan.accumulation - 1):
    verdict = _run(session, ops.accumulate, task, signals, waited)[1]
    watchdog.moved()
    if verdict:
      return None, verdict
  got, verdict = _run(session, ops.fetches(), task, signals, waited)
  watchdog.watch()
  return {**got, "input_seconds": sum(waited)}, verdict


def _run(session, fetches, task: Task, signals, waited: list) -> tuple:
  """Runs a micro-batch; `waited` gets the seconds until it was ready.

  Returns:
    What was fetched, and the verdict of `Wishes`.
  """
  wishes, asked = task.wishes, time.time()
  got, agreed, made = session.run(
    [fetches, wishes.agreed, task.batches.made], wishes.feed(signals)
  )
  waited.append(max(0.0, made - asked))
  return got, wishes.verdict(agreed)


def _due(step: int, every: int) -> bool:
  return every > 0 and step % every == 0


def _tell_trouble(step: int, got: dict, variables) -> None:
  """Says on stderr when an update or a micro-batch was not finite."""
  bad = int(got["nonfinite_variable"])
  # Each may be finite and the sum of all squares not.
  which = variables[bad].op.name if bad >= 0 else "all variables together"
  if got["skipped"]:
    training_hooks.tell(
      f"update {step}: skipped, the gradient of {which} is not finite (loss "
      f"scale {got['loss_scale']:g})"
    )
  elif got["dropped_micro_batches"] > 0:
    training_hooks.tell(
      f"update {step}: {got['dropped_micro_batches']:.0f} micro-batches "
      f"dropped, the gradient of {which} was not finite (loss scale "
      f"{got['loss_scale']:g})"
    )


def _clear_error(error: Exception, source=None, numbers=None):
  """The error to raise for one that TensorFlow raised in a session.

  If an input pipeline is involved, `source` and the `numbers` of the records
  that it was reading tell whether one of them is to blame.
  """
  explained = source.explain(numbers) if source else None
  if explained is not None:
    return explained
  return distributed.rank_lost(error) or error


class Evaluator:
  """Evaluates on all ranks, says the results and logs them."""

  def __init__(self, evaluation, headline, output_dir: str, comm):
    """Prepares evaluations of one run.

    Args:
      evaluation: (session, signals, watchdog) -> results, the same on all
        ranks; `examples` is one of them.
      headline: results -> what to say of them.
      output_dir: the run's folder.
      comm: a `distributed.Comm`.
    """
    self._evaluation, self._headline = evaluation, headline
    self._output_dir, self._comm = output_dir, comm
    self._log, self._last = None, None

  def __call__(
    self, session, step: int, signals, watchdog, log: bool = True
  ) -> dict:
    """Evaluates; the same results on all ranks.

    Args:
      session: with all variables initialised.
      step: the update that the variables are from.
      signals: `training_hooks.StopSignals` that end it early, or None.
      watchdog: a `training_hooks.Watchdog`.
      log: whether eval_metrics.jsonl gets the results.

    Raises:
      Interrupted: on all ranks, if one of them had a signal.
    """
    if self._last and self._last["global_step"] == step:
      return self._last  # an update's weights are evaluated once
    began = time.monotonic()
    if self._last is None:
      watchdog.look_away()  # each rank compiles
    results = self._evaluation(session, signals, watchdog)
    self._last = results = {**results, "global_step": step}
    if self._comm.is_root and log:
      # Opened here: what is dropped from an old log depends on the step.
      self._log = self._log or training_hooks.MetricsLog(
        self._output_dir, training_hooks.EVAL_METRICS_FILE, step - 1, "eval"
      )
      self._log.write(results)
    say(
      self._comm,
      f"evaluation at update {step:,}: {self._headline(results)}  "
      f"{results['examples']:,} examples in {time.monotonic() - began:.1f} s",
    )
    return results

  def close(self) -> None:
    """Closes the log."""
    if self._log:
      self._log.close()


@dataclasses.dataclass(frozen=True)
class EvaluationBatches:
  """What is run for each batch of an evaluation; to be made in the graph.

  All ranks run batch after batch together, also those that have none left: so
  all leave in the same one, and a rank that hangs is noticed.

  Attributes:
    fetches: name -> Tensor of one batch.
    source: an `input_pipeline.Source`.
    batches: its `input_pipeline.Batches`; ranks may have different counts.
    wishes: what ranks ask for.
    comm: a `distributed.Comm` of all ranks.
  """

  fetches: dict
  source: object
  batches: input_pipeline.Batches
  wishes: Wishes
  comm: distributed.Comm

  def run(self, session, signals, watchdog):
    """Yields name -> array, of each batch of this rank.

    Args:
      session: with all variables initialised.
      signals: `training_hooks.StopSignals` that end it early, or None.
      watchdog: a `training_hooks.Watchdog`.

    Raises:
      Interrupted: ranks agreed to leave.
      records.DataError: a record is damaged.
    """
    own = self.batches.count
    self.batches.start(session, 0)
    for batch in range(int(self.comm.gather(np.array([own])).max())):
      fetches = self.fetches if batch < own else {}
      try:
        got, agreed = session.run(
          [fetches, self.wishes.agreed], self.wishes.feed(signals)
        )
      except input_pipeline.READ_ERRORS as e:
        numbers = self.batches.numbers(batch)
        raise _clear_error(e, self.source, numbers) from e
      if batch:
        watchdog.watch()
      else:
        watchdog.moved()  # the first of all compiles, and does not watch yet
      if verdict := self.wishes.verdict(agreed):
        raise Interrupted(verdict)
      if batch < own:
        yield got


def add_up(rows, names, comm) -> dict:
  """name -> float64 total over all batches and ranks.

  Args:
    rows: of each of this rank's batches: name -> float.
    names: of all sums.
    comm: a `distributed.Comm`.
  """
  totals = np.zeros(len(names))
  for row in rows:
    totals += [row[name] for name in names]
  totals = comm.gather(totals).sum(axis=0).tolist()
  return dict(zip(names, totals, strict=True))


def run_main(main: Callable[[list], None], arguments: int | None = 0) -> None:
  """`errors.run_main` for commands that run sessions.

  So an end of the world, as another rank's failure, is one clear line too.
  """

  def wrapped(argv):
    try:
      main(argv)
    except tf.errors.OpError as e:
      raise _clear_error(e) from e

  errors.run_main(wrapped, arguments)
