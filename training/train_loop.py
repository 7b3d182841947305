"""The session loop that all run_*.py share: update, report, save, evaluate."""

import dataclasses
import time
from collections.abc import Callable

import input_pipeline
import optimization
from checkpoints import checkpointing, metrics
from common import errors
from common.tensorflow_v1 import tf
from config import training_plan
from config.pretraining import RunConfig
from gradients import distributed
from training import divergence, evaluation, profiling, reporting
from training.signals import (
  Budget,
  Interrupted,
  StopSignals,
  StopVote,
  Votes,
  Watchdog,
)
from xla_patches import jit


@dataclasses.dataclass(frozen=True)
class Task:
  """The data, model and update that the loop trains."""

  plan: training_plan.TrainingPlan
  ops: optimization.TrainOps
  state: checkpointing.TrainingState  # the update advances it
  source: input_pipeline.Source
  batches: input_pipeline.Batches
  summarize: Callable[[dict], dict]  # global sums -> losses and accuracies
  headline: Callable[[dict], str]  # report -> its summary in a line
  tokens: str  # name of the sum that counts real tokens
  examples: str  # name of the sum that counts examples
  positions: int  # for tokens in a record, padding included
  # Of the matmuls on a record: forward, backward, padding included.
  flops: float
  vote: StopVote
  budget: Budget | None = None
  # Makes a new run's weights by name, where they are not random; on rank 0.
  initial: Callable[[], dict] | None = None


@dataclasses.dataclass(frozen=True)
class Parts:
  """What a run does, built in its graph; None is left out."""

  best_by: metrics.BestBy
  task: Task | None = None
  evaluate: evaluation.Evaluator | None = None
  # Gives lines about the files that it wrote; on all ranks.
  predict: Callable[[tf.Session, Watchdog], list] | None = None
  # Adds to a training's folder; on rank 0, after the weights are restored.
  begin: Callable[[], None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Parts):
  """The parts of a run and their surroundings."""

  config: RunConfig
  comm: distributed.Comm
  session: tf.Session
  checkpointer: checkpointing.Checkpointer
  watchdog: Watchdog
  signals: StopSignals
  profile: profiling.Profile


def train(run: Run) -> dict:
  """Trains from the session's variables to the plan's last update or time.

  A signal to one rank, or to all of an elastic run, ends it after the current
  update, which is saved. Returns speeds and counts of this call. Raises
  `distributed.WorldChange` if ranks come or go, after it commits, and
  `records.DataError`, `divergence.DivergedError` or `distributed.RankLost`.
  """
  plan, clock = run.task.plan, reporting.Clock()
  step = first = int(run.session.run(tf.train.get_global_step()))
  run.checkpointer.start(step)
  if budget := run.task.budget:  # before the batches, whose masks may ask it
    budget.passed = float(run.session.run(run.task.state.seconds))
  run.task.batches.start(run.session, step)
  reporter = reporting.Reporter(run, clock, step)
  guard = divergence.Guard(run)
  saver = Saver(run, clock, guard)
  saver.start(step)
  evaluations = Evaluations(run, clock, guard, saver, first)
  stop = evaluations.verdict(step)
  if budget and budget.is_over():
    stop = stop or "time"
  while step < plan.updates and not stop:
    if evaluations.are_due(step):
      stop = evaluations.make(step)
      if stop:
        break
    if step == first:
      jit.tell_compiling(run.comm, "the training step")
    update, stop = run_update(run, step + 1, saver.is_time())
    if update is None:
      break
    step += 1
    guard.check(step, update)
    if budget and not stop and not guard.bad and budget.is_over():
      stop = "time"  # what is saved has no time left
      taken = max(budget.seconds, budget.passed)
      run.task.state.seconds.load(taken, run.session)
    reporter.report(step, update, stop == "time" or step == plan.updates)
    saver.after_update(step, update["save"])
  if stop == "change" and step < plan.updates:
    saver.leave_world(step)
    raise distributed.WorldChange("ranks come or go")
  saved = saver.end(step)
  reporter.close()
  stalls = run.checkpointer.stalls
  return {
    **clock.closing(),
    "saves": len(stalls),
    "longest_save_stall_seconds": max(stalls, default=0.0),
    "stopped": stop == "stop",
    "stopped_early": stop == "no better",
    "out_of_time": stop == "time",
    "global_step": saved,
  }


def run_update(run: Run, number: int, save: bool = False) -> tuple:
  """Runs an update, unless the ranks stop while micro-batches add up.

  Returns what was fetched, or None if the ranks stop, and `StopVote.verdict`.
  Of the update's `seconds` it waited `input_seconds` for micro-batches. `save`
  is rank 0's wish for a checkpoint, which all ranks find in what was fetched.
  """
  task, waited, wishes, laps = run.task, [], [], []
  run.profile.at(number)
  began = time.monotonic()
  lap = lambda: task.budget.lap() if task.budget and run.comm.is_root else 0.0

  def micro_batch(fetches) -> tuple:
    asked = time.time()
    fetched, counts, made = run.session.run(
      [fetches, task.vote.counts, task.batches.made],
      task.vote.feed(run.signals, save, lap()),
    )
    votes = Votes(*counts)
    wishes.append(bool(votes.save))
    laps.append(float(votes.lap))
    waited.append(max(0.0, made - asked))
    return fetched, task.vote.verdict(counts)

  try:
    with run.profile.update(number):
      for _ in range(task.plan.micro_batches_of(number - 1) - 1):
        _, verdict = micro_batch(task.ops.accumulate)
        run.watchdog.heartbeat()
        if verdict:
          return None, verdict
      fetched, verdict = micro_batch(task.ops.fetches())
  except input_pipeline.READ_ERRORS as e:
    numbers = task.batches.numbers(number - 1)
    raise evaluation.clear_error(e, task.source, numbers) from e
  run.watchdog.resume()
  if task.budget:
    task.budget.after_update(laps[-1])
  measured = {
    "records": task.plan.records_of(number - 1),
    "seconds": time.monotonic() - began,
    "input_seconds": sum(waited),
    "save": any(wishes),
  }
  return {**fetched, **measured}, verdict


def _due(step: int, every: int) -> bool:
  return every > 0 and step % every == 0


class Saver:
  """Decides when to save and commit, and which checkpoint is the best."""

  def __init__(self, run: Run, clock: reporting.Clock, guard: divergence.Guard):
    self._run, self._clock, self._guard = run, clock, guard
    self._is_due = False
    self._saved = time.monotonic()  # of the last checkpoint, or the start

  def start(self, step: int) -> None:
    """Commits, if elastic, and keeps the best so far."""
    if self._run.comm.elastic:
      self._run.checkpointer.commit(self._run.session, step)
    self.keep_best(step)

  def keep_best(self, step: int) -> None:
    """Protects the best checkpoint by evaluation; saves it if new."""
    run, saves, is_new_best = self._run, self._run.checkpointer, False
    if run.comm.is_root:
      best = metrics.best_evaluation(run.config.output_dir, step, run.best_by)
      if best is not None:
        saves.files.protect(best)
        is_saved = step in (saves.saved, *saves.files.steps())
        is_new_best = best == step and not is_saved
    if run.comm.from_root(is_new_best):
      saves.save(run.session, step)

  def is_time(self) -> bool:
    """Whether --save_every_minutes have passed, by rank 0's clock."""
    minutes = self._run.config.save_every_minutes
    passed = time.monotonic() - self._saved
    return self._run.comm.is_root and minutes > 0 and passed >= 60 * minutes

  def after_update(self, step: int, asked: bool = False) -> None:
    """Saves or commits if due or `asked`, unless the update was bad."""
    run, config, saves = self._run, self._run.config, self._run.checkpointer
    due = asked or _due(step, config.save_checkpoints_steps)
    self._is_due = self._is_due or due
    if self._guard.bad:
      return
    with self._clock.timing("save"):
      is_last = step == run.task.plan.updates
      if is_last or (self._is_due and saves.is_ready()):
        saves.save(run.session, step)
        self._is_due, self._saved = False, time.monotonic()
      elif run.comm.elastic and _due(step, config.commit_every_steps):
        saves.commit(run.session, step, if_idle=True)
      saves.report_failed_save(step)

  def leave_world(self, step: int) -> None:
    """Commits, and begins to save the commit, before ranks come or go."""
    run = self._run
    if not self._guard.bad:
      run.checkpointer.commit(run.session, step)
    run.watchdog.pause()
    run.checkpointer.save_commit()

  def end(self, step: int) -> int:
    """Saves the last update unless it was bad; returns the newest good one."""
    run = self._run
    if self._guard.bad:
      step = self._guard.end(step)
    elif run.checkpointer.saved < step:
      run.checkpointer.save(run.session, step)
    run.checkpointer.finish()
    run.watchdog.pause()
    return step


class Evaluations:
  """Decides when to evaluate, and whether evaluations end the training."""

  def __init__(self, run: Run, clock, guard, saver: Saver, first: int):
    """The run starts from update `first`."""
    self._run, self._clock, self._guard = run, clock, guard
    self._saver, self._first = saver, first

  def are_due(self, step: int) -> bool:
    if not _due(step, self._run.config.eval_every_steps) or self._guard.bad:
      return False
    return step > self._first or self._lacks_first()

  def _lacks_first(self) -> bool:
    """Whether update `first` was not evaluated yet."""
    run, step = self._run, self._first
    if not step:
      return run.config.evaluates_untrained
    return run.comm.from_root(
      run.comm.is_root
      and not metrics.was_evaluated(
        run.config.output_dir, step, run.evaluate.records
      )
    )

  def make(self, step: int) -> str | None:
    """Evaluates, and keeps the best; returns why training ends, or None."""
    run = self._run
    try:
      with self._clock.timing("evaluation"):
        run.evaluate(run.session, step, run.signals, run.watchdog)
    except Interrupted as interrupted:
      return interrupted.verdict
    with self._clock.timing("save"):
      self._saver.keep_best(step)
    if step == self._first:
      run.watchdog.pause()  # the first update compiles
    return self.verdict(step)

  def verdict(self, step: int) -> str | None:
    """Returns "no better" after too many evaluations without a new best."""
    run, since = self._run, 0
    limit, folder = run.config.early_stopping_evaluations, run.config.output_dir
    if not limit:
      return None
    if run.comm.is_root:
      since = metrics.evaluations_since_best(folder, step, run.best_by)
    return "no better" if run.comm.from_root(since) >= limit else None


def run_main(main: Callable[[list], None], arguments: int | None = 0) -> None:
  """`errors.run_main`; lost ranks, missing memory and stops are a line, too."""

  def wrapped(argv):
    try:
      main(argv)
    except (tf.errors.OpError, MemoryError) as e:
      raise evaluation.clear_error(e) from e

  errors.leave_when_asked()
  errors.run_main(wrapped, arguments)
