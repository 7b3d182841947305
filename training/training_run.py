"""One run of a run_*.py around `train_loop`: its graph, start, folder, end."""

import contextlib
import dataclasses
import sys
import textwrap
from collections.abc import Callable, Iterator

import numpy as np

import mixed_precision
from checkpoints import agreement, checkpointing, description, run_folder
from checkpoints.checkpoint_files import has_begun
from checkpoints.run_folder import is_written
from checkpoints.snapshot import Snapshot
from common import nvidia
from common.console import say
from common.errors import STOPPED_STATUS, UserError, end_on_signals
from common.tensorflow_v1 import tf
from config.precision import AUTO
from gradients import distributed
from model import sampled_softmax
from training import closing, elastic, profiling, resume, services, train_loop
from training.signals import StopSignals, Watchdog
from xla_patches import jit


def start(command, job: Callable) -> None:
  """Joins the ranks, runs `job`, and ends the program if a signal stopped it.

  `command`: a `run_settings.Command`. `job`: (config, comm, snapshot=None,
  signals=None) -> result of `run`.
  """
  flags = command.flags
  comm = distributed.init(flags.num_threads, flags.tensor_parallel)
  say(comm, *command.lines)
  config = command.config

  def world(comm, *state):
    nonlocal config
    comm.check_equal("a flag", "\n".join(sys.argv[1:]))
    if comm.is_root and not config:  # the first rank 0 was lost at once
      command.configure()
      config = command.config
    config = with_precision(comm.from_root(config), comm)
    if comm.elastic:
      check_elastic(config)
    return job(config, comm, *state)

  result = elastic.run(world, comm) if comm.elastic else world(comm)
  if result["training"] and result["training"]["stopped"]:
    sys.exit(STOPPED_STATUS)


def with_precision(config, comm):
  """The config with a type in the place of --precision=auto, on all ranks."""
  if config.precision != AUTO:
    return config
  answer = None
  if comm.is_root:
    folder = config.output_dir or ""
    run = description.read(folder).training
    if run and has_begun(folder):
      answer = run["flags"]["precision"], "as this run began"
    else:
      name, ratio = mixed_precision.faster_type(session_config(config, comm))
      answer = name, f"bf16 multiplies {ratio:.2f} times as fast as fp32 here"
  name, why = comm.from_root(answer)
  say(comm, f"--precision=auto: {name} ({why})")
  return dataclasses.replace(config, precision=name)


def precision_line(config, on_gpu: bool) -> str:
  """The types of the parts of the network, and how a GPU computes them."""
  parts = [f"precision: {mixed_precision.policy_of(config).describe()}"]
  if on_gpu:
    way = "TensorFloat-32 (--notf32: float32)" if config.tf32 else "float32"
    parts.append(f"what is float32 is multiplied as {way}")
    if config.deterministic:
      parts.append("deterministic")
  return "; ".join(parts)


def check_elastic(config) -> None:
  """Raises `UserError` for settings that depend on the number of ranks."""
  if config.tensor_parallel > 1:
    raise UserError(
      f"--tensor_parallel={config.tensor_parallel} is not for horovodrun "
      "--min-np: with a rank its slice of the model is lost"
    )
  is_fixed = config.global_batch_size and config.lr_scaling == "none"
  if config.do_train and not is_fixed:
    raise UserError(
      "under horovodrun --min-np the number of ranks changes, so "
      "--global_batch_size must say how many examples an update has, and "
      f"--lr_scaling={config.lr_scaling} cannot depend on ranks: use none"
    )
  if config.do_train and config.num_accumulation_steps:
    raise UserError(
      f"--num_accumulation_steps={config.num_accumulation_steps}: under "
      "horovodrun --min-np it follows from --global_batch_size and the ranks "
      "that are there: leave it out"
    )


def dropout_seed(config, plan, comm, micro) -> tf.Tensor:
  """int [2] of (seed, rank, micro-batch), so a resumed run draws the same."""
  # A run that continues with fewer micro-batches in an update would meet their
  # numbers again, so how many there are is a part of the seed.
  entropy = [config.seed, comm.data_parallel.rank, plan.accumulation]
  return _seed(entropy, micro.number)


def sampling(config, plan, micro) -> sampled_softmax.Sampling | None:
  """What --sampled_softmax draws: once an update, on all ranks the same."""
  if not config.sampled_softmax:
    return None
  # The second number is no rank's, whose dropout has draws of its own.
  seed = _seed([config.seed, 2**32 - 1], micro.number // plan.accumulation)
  words = config.bert.vocab_size
  return sampled_softmax.sampling(config.sampled_softmax, words, seed)


def _seed(entropy: list[int], number) -> tf.Tensor:
  state = np.random.SeedSequence(entropy).generate_state(1)
  return tf.stack([int(state[0]) >> 1, number])


@contextlib.contextmanager
def graph(config):
  """A block in a new graph, with the config's arithmetic and seed."""
  tf.config.experimental.enable_tensor_float_32_execution(config.tf32)
  if config.deterministic and tf.config.list_physical_devices("GPU"):
    tf.compat.v2.config.experimental.enable_op_determinism()
  with tf.Graph().as_default(), jit.mode(config.xla):
    tf.enable_resource_variables()
    tf.set_random_seed(config.seed)
    tf.train.get_or_create_global_step()
    yield


def session_config(config, comm) -> tf.ConfigProto:
  """This rank's threads, GPU and XLA clustering."""
  session = distributed.session_config(comm)
  if config.xla == "auto":
    options = session.graph_options.optimizer_options
    options.global_jit_level = tf.OptimizerOptions.ON_2
  return session


def run(
  config,
  comm,
  build: Callable[[], train_loop.Job],
  snapshot: Snapshot | None = None,
  signals: StopSignals | None = None,
) -> dict:
  """Trains, evaluates and predicts with what `build` adds to the graph.

  `snapshot` and `signals` are an elastic run's. Returns {"training": speeds and
  counts or None, "evaluation": results or None}; only speeds differ by rank.
  """
  fields = agreement.by_field(config.as_dict())
  lines = [f"{agreement.title(name)}={value}" for name, value in fields]
  comm.check_equal("a flag", "\n".join(lines))
  folder, watchdog = config.output_dir, Watchdog(comm)
  with run_folder.locked(folder, comm, is_written(config)), graph(config):
    job = build()
    checkpointer = checkpointing.Checkpointer(
      folder, comm, config.keep_checkpoints, snapshot, watchdog.heartbeat
    )
    say(comm, *_plan_lines(job, config, comm))
    with (
      contextlib.ExitStack() as reporting,
      tf.Session(config=session_config(config, comm)) as session,
      contextlib.closing(checkpointer),
      watchdog,  # ends first: closing may take any time
    ):
      run = train_loop.Run(
        job=job,
        config=config,
        comm=comm,
        session=session,
        checkpointer=checkpointer,
        watchdog=watchdog,
        signals=signals or StopSignals(),
        profile=profiling.Profile(config.profile, folder, comm),
      )
      step, resumed = resume.start_or_resume(run)
      if comm.is_root and is_written(config):
        # Only now: settings that do not fit must not enter the folder.
        if job.begin:
          job.begin()
        run_folder.write_start(config, run.task, step, resumed)
        to = services.reporting(config.report_to, folder, step)
        reporting.enter_context(to)
      comm.from_root(0)  # a signal finds all ranks in training, or none
      training, results, lines = None, None, []
      if run.task:
        training = _train(run, signals is None)
        step = training["global_step"]
      if not (training and training["stopped"]):
        if run.signals.received:  # since the last update, which is saved
          sys.exit(STOPPED_STATUS)
        results, lines = _conclude(run, training, step)
      if run.job.evaluate:
        run.job.evaluate.close()
      if comm.is_root:
        closing.finish(run, training, results, step, lines)
  return {"training": training, "evaluation": results}


def _plan_lines(job: train_loop.Job, config, comm) -> Iterator[str]:
  if job.task:
    yield from job.task.plan.lines()
    if job.task.budget:
      yield f"or {job.task.budget.seconds / 60:g} minutes, if less"
  on_gpu = bool(tf.config.list_physical_devices("GPU"))
  if on_gpu or mixed_precision.policy_of(config) != mixed_precision.FP32:
    line = precision_line(config, on_gpu)
    yield textwrap.fill(line, 80, subsequent_indent="  ")
  if on_gpu and comm.size > comm.local_size:
    yield textwrap.fill(nvidia.network_line(), 80, subsequent_indent="  ")


def _train(run: train_loop.Run, owns_signals: bool) -> dict:
  noting = run.signals if owns_signals else contextlib.nullcontext()
  with noting, run.profile:
    try:
      training = train_loop.train(run)
    except (tf.errors.OpError, ValueError) as e:
      if distributed.rank_lost(e):
        run.watchdog.pause()
        run.checkpointer.save_commit()  # there may be no next world
      raise
    run.signals.settled = training["stopped"]
  return {**training, "profile": run.profile.folder}


def _conclude(run: train_loop.Run, training: dict | None, step: int) -> tuple:
  """Returns the evaluation's results or None, and `Job.predict`'s lines."""
  # If no stage follows, all that trains is saved: signals may end it at once.
  if not training or run.task.plan.stage.is_last or training["stopped_early"]:
    end_on_signals()
  session, watchdog, results = run.session, run.watchdog, None
  evaluate = run.job.evaluate if run.has_model_of(step) else None
  if evaluate and (run.task or not run.config.ends_with_best):
    # Of other files, perhaps, an evaluation alone is not one of the training's.
    results = evaluate(session, step, None, watchdog, log=bool(run.task))
  watchdog.pause()
  if run.config.ends_with_best:
    best = run.comm.from_root(run.best_saved(step))
    if best not in (None, step):
      run.checkpointer.restore.rewind(session, best)
      say(run.comm, f"the best by evaluation is update {best:,}")
      step = best
    if evaluate:  # does nothing if that was evaluated before
      results = evaluate(session, step, None, watchdog, log=False)
  if results and run.job.evaluated:
    run.job.evaluated(results)
  return results, run.job.predict(session, watchdog) if run.job.predict else []
