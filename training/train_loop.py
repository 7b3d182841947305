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
from training import divergence, evaluation, profiling, reporting, signals
from training.signals import Budget, Stop, StopSignals, StopVote, Watchdog
from xla_patches import jit


@dataclasses.dataclass(frozen=True)
class Task:
  """The data, model and update that the loop trains."""

  plan: training_plan.TrainingPlan
  ops: optimization.TrainOps
  state: checkpointing.TrainingState  # the update advances it
  source: input_pipeline.Source
  batches: input_pipeline.Batches
  # Global sums, with "examples" and "tokens" -> losses and accuracies.
  summarize: Callable[[dict], dict]
  headline: Callable[[dict], str]  # report -> its summary in a line
  positions: int  # for tokens in a record, padding included
  # Of the matmuls, forward and backward: for each record, padding included, and
  # for each one that a sum of this name counts.
  flops: dict[str, float]
  vote: StopVote
  budget: Budget | None = None
  # Makes a new run's weights by name, where they are not random; on rank 0.
  initial: Callable[[], dict] | None = None


@dataclasses.dataclass(frozen=True)
class Job:
  """What a run does, built in its graph; None is left out."""

  best_by: metrics.BestBy
  task: Task | None = None
  evaluate: evaluation.Evaluator | None = None
  # Gives lines about the files that it wrote; on all ranks.
  predict: Callable[[tf.Session, Watchdog], list] | None = None
  # Takes the results of new best weights, on rank 0, and of those that the run
  # ends with, on all ranks.
  evaluated: Callable[[dict], None] | None = None
  # Adds to a training's folder; on rank 0, after the weights are restored.
  begin: Callable[[], None] | None = None
  labels: list[str] | None = None  # of a classifier's rows, as they stand
  # What to do with a trained model -> the command.
  next_steps: dict[str, list[str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A job and its surroundings."""

  job: Job
  config: RunConfig
  comm: distributed.Comm
  session: tf.Session
  checkpointer: checkpointing.Checkpointer
  watchdog: Watchdog
  signals: StopSignals
  profile: profiling.Profile

  @property
  def task(self) -> Task | None:
    return self.job.task

  def has_model_of(self, step: int) -> bool:
    """Whether the model here is that of update `step`, the newest."""
    # A new stage's model, which may have grown, begins with its first update.
    stage = self.task.plan.stage if self.task else None
    return not (stage and stage.number and step == stage.first_update)

  def best_saved(self, step: int) -> int | None:
    """On rank 0 the update up to `step` with the best evaluation, if saved."""
    if not self.comm.is_root:
      return None
    folder = self.config.output_dir
    best = metrics.best_evaluation(folder, step, self.job.best_by)
    return best if best in self.checkpointer.files.steps() else None


def train(run: Run) -> dict:
  """Trains to the plan's last update or time; returns speeds and counts.

  A signal to one rank, or to all of an elastic run, ends it after the current
  micro-batch; whole updates are saved. If ranks come or go it commits, then
  raises `distributed.WorldChange`.
  """
  plan, budget = run.task.plan, run.task.budget
  step = first = int(run.session.run(tf.train.get_global_step()))
  reporter = reporting.Reporter(run, step)
  run.checkpointer.start(step)
  if budget:  # before the batches, whose masks may ask it
    budget.passed = float(run.session.run(run.task.state.seconds))
  run.task.batches.start(run.session, step)
  saver = Saver(run, reporter)
  if run.comm.elastic:
    run.checkpointer.commit(run.session, step)
  saver.keep_best(step)
  evaluations, stop = Evaluations(run, saver, first), None
  if budget and budget.is_over():
    stop = Stop.TIME
  while step < plan.updates and not stop:
    # Before the update that follows, so a resumed run makes up for what a stop
    # between the save and the evaluation left out.
    stop = evaluations.make_if_due(step)
    if stop:
      break
    if step == first:
      jit.tell_compiling(run.comm, "the training step")
    update, stop = run_update(run, step + 1, saver.is_time())
    if update is None:
      break
    step += 1
    saver.guard.check(step, update)
    if budget and not stop and not saver.guard.bad and budget.is_over():
      stop = Stop.TIME
      # A run that resumes from what is saved has no time left.
      taken = max(budget.seconds, budget.passed)
      run.task.state.seconds.load(taken, run.session)
    is_last = step == plan.updates or stop == Stop.TIME
    reporter.after_update(step, update, is_last)
    saver.after_update(step, update["save"])
  # A world that has made all updates ends as usual.
  if stop == Stop.WORLD_CHANGE and step < plan.updates:
    if not saver.guard.bad:
      run.checkpointer.commit(run.session, step)
    run.watchdog.pause()
    run.checkpointer.save_commit()
    raise distributed.WorldChange("ranks come or go")
  saved, stalls = saver.end(step), run.checkpointer.stalls
  return {
    **reporter.close(),
    "saves": len(stalls),
    "longest_save_stall_seconds": max(stalls, default=0.0),
    "stopped": stop == Stop.SIGNAL,
    "stopped_early": stop == Stop.NO_BETTER,
    "out_of_time": stop == Stop.TIME,
    "global_step": saved,
  }


def run_update(run: Run, number: int, save: bool = False) -> tuple:
  """Runs an update, unless the ranks stop while micro-batches add up.

  Returns what was fetched, or None if the ranks stop, and why they do. Of the
  update's `seconds` it waited `input_seconds` for micro-batches. `save`: rank
  0's request for a checkpoint, which every rank gets with what was fetched.
  """
  task, budget = run.task, run.task.budget
  micro_batches = task.plan.micro_batches_of(number - 1)
  calls = task.ops.calls(micro_batches)
  began, waited, is_save_due = time.monotonic(), 0.0, False
  try:
    with run.profile.update(number):
      for index, call in enumerate(calls):
        lap = budget.lap() if budget and run.comm.is_root else 0.0
        called = time.monotonic()
        # A second pass reads no batch, and this would read the next one.
        reads = index < micro_batches
        fetched, counts, ready = run.session.run(
          [call, task.vote.counts, task.batches.ready_at if reads else []],
          task.vote.feed(run.signals, save, lap),
        )
        if reads:
          # A batch that was ready before the call has cost no time.
          waited += max(0.0, ready - called)
        votes = signals.Votes(*counts)
        is_save_due = is_save_due or votes.save > 0
        stop = task.vote.verdict(votes)
        if index + 1 < len(calls):
          run.watchdog.heartbeat()
          if stop:  # what was added up is lost, the update is made again
            return None, stop
  except input_pipeline.READ_ERRORS as e:
    numbers = task.batches.numbers(number - 1)
    raise evaluation.clear_error(e, task.source, numbers) from e
  run.watchdog.resume()
  if budget:
    budget.after_update(float(votes.lap))
  fetched |= {
    "records": task.plan.records_of(number - 1),
    "seconds": time.monotonic() - began,
    "input_seconds": waited,
    "save": is_save_due,
  }
  return fetched, stop


def _due(step: int, every: int) -> bool:
  return every > 0 and step % every == 0


class Saver:
  """Decides when to save and commit, and which checkpoints stay."""

  def __init__(self, run: Run, reporter: reporting.Reporter):
    self._run, self.reporter = run, reporter
    self.guard = divergence.Guard(run)
    self._is_due = False  # a save, which may wait for a good update or the disk
    self._saved = time.monotonic()  # of the last checkpoint, or the start

  def keep_best(self, step: int) -> bool:
    """Protects the best checkpoint by evaluation; saves it if new.

    On rank 0, whether that is the one of update `step`.
    """
    run, saves, is_new = self._run, self._run.checkpointer, False
    best: int | None = None
    if run.comm.is_root:
      folder, by = run.config.output_dir, run.job.best_by
      best = metrics.best_evaluation(folder, step, by)
      if best is not None:
        saves.files.protected = best
      is_new = best == step != saves.saved
    if run.comm.from_root(is_new):
      saves.save(run.session, step)
    return best == step

  def is_time(self) -> bool:
    """Whether --save_every_minutes have passed, by rank 0's clock."""
    seconds = 60 * self._run.config.save_every_minutes
    is_over = time.monotonic() - self._saved >= seconds > 0
    return self._run.comm.is_root and is_over

  def after_update(self, step: int, is_due: bool = False) -> None:
    """Saves or commits if due, by steps or `is_due`, unless it was bad."""
    run, config, saves = self._run, self._run.config, self._run.checkpointer
    # A run that went back has lost what was saved since.
    went_back = self.guard.spikes == divergence.PATIENCE
    if went_back:
      self.keep_best(step)
      if run.comm.elastic:  # what was committed before is left, too
        saves.commit(run.session, step)
    if is_due or went_back or _due(step, config.save_checkpoints_steps):
      self._is_due = True
    if self.guard.bad or self.guard.spikes:
      return
    with self.reporter.timing("save"):
      # While the last save is still being written the next one waits for a
      # later update. After the last update there is none.
      if step == run.task.plan.updates or (self._is_due and saves.is_ready()):
        saves.save(run.session, step)
        self._is_due, self._saved = False, time.monotonic()
      elif run.comm.elastic and _due(step, config.commit_every_steps):
        saves.commit(run.session, step, if_idle=True)
      saves.report_failed_save(step)

  def end(self, step: int) -> int:
    """Saves the last update unless it was bad; returns the newest good one."""
    run = self._run
    if self.guard.bad:
      step = self.guard.end(step)
    elif run.checkpointer.saved < step:
      run.checkpointer.save(run.session, step)
    run.checkpointer.finish()
    run.watchdog.pause()
    return step


class Evaluations:
  """Decides when to evaluate, and whether evaluations end the training."""

  def __init__(self, run: Run, saver: Saver, first: int):
    """The run starts from update `first`."""
    self._run, self._saver, self._first = run, saver, first

  def _are_due(self, step: int) -> bool:
    run, is_missing = self._run, False
    if not _due(step, run.config.eval_every_steps) or self._saver.guard.bad:
      return False
    if step > self._first:
      return True
    if not step:
      return not run.config.ends_with_best
    if not run.has_model_of(step):
      return False
    # Rank 0's files tell whether the update that a run resumes from lacks one.
    if run.comm.is_root:
      folder, records = run.config.output_dir, run.job.evaluate.records
      is_missing = not metrics.was_evaluated(folder, step, records)
    return run.comm.from_root(is_missing)

  def make_if_due(self, step: int) -> Stop | None:
    """Evaluates, and keeps the best; returns why training ends, or None."""
    run, timing = self._run, self._saver.reporter.timing
    if not self._are_due(step):  # a run that resumes may have ended early
      return self.verdict(step) if step == self._first else None
    try:
      with timing("evaluation"):
        results = run.job.evaluate(run.session, step, run.signals, run.watchdog)
    except signals.Interrupted as interrupted:
      return interrupted.stop
    with timing("save"):
      is_best = self._saver.keep_best(step)
    if is_best and run.job.evaluated:
      run.job.evaluated(results)
    if step == self._first:
      run.watchdog.pause()  # the first update compiles
    return self.verdict(step)

  def verdict(self, step: int) -> Stop | None:
    """`NO_BETTER` after too many evaluations without a new best."""
    run, since = self._run, 0
    limit, folder = run.config.early_stopping_evaluations, run.config.output_dir
    if not limit:
      return None
    if run.comm.is_root:
      by, first = run.job.best_by, run.task.plan.stage.first_update
      since = metrics.evaluations_since_best(folder, step, by, first)
    return Stop.NO_BETTER if run.comm.from_root(since) >= limit else None


def run_main(main: Callable[[list], None], *settings) -> None:
  """`errors.run_main`; lost ranks, missing memory and stops are a line, too."""

  def wrapped(argv):
    try:
      main(argv)
    except (tf.errors.OpError, MemoryError) as e:
      raise evaluation.clear_error(e) from e

  errors.end_on_signals()
  try:
    errors.run_main(wrapped, *settings)
  finally:
    errors.end_as_decided()


def run_read(main: Callable[[], None]) -> None:
  """`run_main` of a command whose flags have been read."""
  run_main(lambda _: main(), 0, lambda argv: argv[:1])  # it is read
