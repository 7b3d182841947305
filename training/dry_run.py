"""What a plan needs: memory, time and disk.

The memory of weights and moments is arithmetic. What the activations of a
micro-batch need, and how long it takes, a child process measures: it runs
updates on fake records as rank 0 of the planned ranks.
"""

import contextlib
import dataclasses
import math
import multiprocessing
import pathlib
import signal
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import psutil

import input_pipeline
from checkpoints import checkpointing
from checkpoints.snapshot import SavedVariables, Snapshot
from common import processes
from common.console import counted, say, tell
from common.errors import UserError
from common.tensorflow_v1 import tf
from config import record_shapes, stages, training_plan
from config.exchange_config import models_of
from config.pretraining import PretrainingConfig
from gradients import distributed, sharded_variables
from model import model_flops
from records import record_shape
from training import evaluation, next_steps, plans, reporting, training_run
from workers.pool import available_cores

_MB = 2.0**20
_SHARE = 0.9  # of the free memory that a run may take
# Arithmetic of the micro-batch that is measured on CPUs: 3 to 15 s an update.
_FLOPS = 6e11
_CGROUPS = "/sys/fs/cgroup"


def free_memory_mb() -> float:
  """MB of the host that are free: of the machine, and of this cgroup."""
  free = [psutil.virtual_memory().available / _MB]
  own = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
  paths = [line.removeprefix("0::/") for line in own if line[:3] == "0::"]
  inside = pathlib.PurePosixPath(paths[0] if paths else "")  # of version 2
  # A limit of any group above this one holds, too.
  for group in (inside, *inside.parents):
    folder = pathlib.Path(_CGROUPS, group)
    with contextlib.suppress(OSError, ValueError):  # no limit; not mounted here
      limit = int((folder / "memory.max").read_text())
      used = int((folder / "memory.current").read_text())
      # The system drops cached files first.
      words = (folder / "memory.stat").read_text().split()
      cached = int(words[words.index("inactive_file") + 1])
      free.append((limit - used + cached) / _MB)
  return min(free)


class Measured(NamedTuple):
  """What a child found; MB are of 2^20 bytes."""

  size: int  # records of the micro-batch
  peak_mb: float  # of the process without the checkpoint, or of its GPU
  micro_seconds: float  # of a micro-batch
  update_seconds: float  # of an update, besides its micro-batches
  parts: dict[str, float]  # MB of what does not depend on the size
  parameters: dict[str, int]  # of the whole model by part
  checkpoint_mb: float  # rank 0 has a copy in the host's memory
  gpu_mb: float | None  # that the GPU has

  @property
  def record_mb(self) -> float:
    """What a record of the micro-batch needs: activations and buffers."""
    return max(0.0, self.peak_mb - sum(self.parts.values())) / self.size

  def seconds_of(self, micro_batches: int, size: int) -> float:
    """Seconds of an update of so many micro-batches of `size` on a rank."""
    one = self.micro_seconds * size / self.size
    return micro_batches * one + self.update_seconds


@dataclasses.dataclass(frozen=True)
class Job:
  """What all children have in common."""

  build: Callable  # (config, shape, micro-batch, state, plan, comm) -> TrainOps
  config: PretrainingConfig
  plan: training_plan.TrainingPlan
  ranks: int
  here: int  # ranks on this host; 0 with GPUs
  free_mb: float  # of the host, for all its ranks
  shape: record_shape.RecordShape

  def room_mb(self, measured: Measured) -> float:
    """The highest peak that a rank may have; rank 0 has a copy besides."""
    capacity = measured.gpu_mb or self.free_mb
    copy = measured.checkpoint_mb if self.here else 0.0
    return (_SHARE * capacity - copy) / max(1, self.here)

  def try_size(self, size: int) -> Measured | None:
    """Measures micro-batches of `size`; None if they do not fit."""
    measured = self.measure(size, self.free_mb / max(1, self.here))
    if measured and measured.peak_mb > self.room_mb(measured):
      return None
    return measured

  def measure(self, size: int, limit_mb: float) -> Measured | None:
    """Measures them; a process on the host that needs more MB is ended."""
    tell(f"measuring updates of micro-batches of {size:,} ...")
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_run, args=(self, size, sender), daemon=True)
    child.start()
    sender.close()
    process = psutil.Process(child.pid)
    while not receiver.poll(0.05):
      with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
        if self.here and process.memory_info().rss > limit_mb * _MB:
          child.kill()
    measured = None
    with contextlib.suppress(EOFError):  # the child was ended
      measured = receiver.recv()
    child.join()
    if child.exitcode not in (0, -signal.SIGKILL, -signal.SIGABRT):
      raise UserError(
        f"a micro-batch of {size} records could not be tried: see above"
      )
    return measured


def first_size(job: Job, record_flops: float) -> Measured:
  """Measures the plan's micro-batch; a smaller one if that does not fit."""
  size = job.plan.micro_batch
  # On CPUs an update may take minutes: measure a part, and time is in
  # proportion to the records.
  if job.here:
    size = max(1, min(size, int(_FLOPS / record_flops)))
  while True:
    measured = job.try_size(size)
    if measured:
      return measured
    if size == 1:
      raise UserError(
        "a micro-batch of one record does not fit: give a smaller model or "
        "--max_seq_length, or --recompute=layer"
      )
    size //= 2


def find_largest(job: Job, measured: Measured) -> Measured:
  """Doubles what fits until it does not, then halves what is between."""
  too_large = math.inf
  # Each size takes a minute of compiling, so it ends within a sixteenth.
  while too_large > measured.size + 1 + measured.size // 16:
    size = 2 * measured.size
    if size >= too_large:
      size = (measured.size + int(too_large)) // 2
    fitting = job.try_size(size)
    if fitting:
      measured = fitting
    else:
      too_large = size
  return measured


class PlannedRanks(distributed.Comm):
  """Rank 0 of `size` that are not there; `here` of them are on this host."""

  # What others would send has the shape of what this rank has: so a graph needs
  # the memory and the time that it would have.

  def __init__(self, size: int, here: int = 1, tensor_parallel: int = 1):
    self.size, self.local_size = size, here
    if size > 1:
      with contextlib.suppress(distributed.DistributedError):
        distributed.load_horovod()  # it takes memory, too
    if tensor_parallel > 1:
      self._tensor_parallel = PlannedRanks(tensor_parallel)
      self._data_parallel = PlannedRanks(size // tensor_parallel)

  def reducescatter(self, tensor, name, fp16=False):
    return tensor[: tensor.shape[0] // self.size]

  def allgather(self, tensor, name, rows=None):
    own = tensor.shape.as_list()[0]
    rows = rows or self.size * own
    return tf.concat([tensor] * -(-rows // own), axis=0)[:rows]


def _run(job: Job, size: int, sender) -> None:
  """In a child: sends a `Measured`, or None if the memory does not suffice."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
  processes.end_with(multiprocessing.parent_process().pid, signal.SIGKILL)
  try:
    sender.send(_measured(job, size))
  except (tf.errors.OpError, MemoryError) as e:
    if not evaluation.is_out_of_memory(e):
      raise
    sender.send(None)


def _measured(job: Job, size: int) -> Measured:
  config = job.config
  plan = dataclasses.replace(
    job.plan, micro_batch=size, accumulation=min(2, job.plan.accumulation)
  )
  comm = distributed.settled(
    PlannedRanks(job.ranks, job.here or 1, config.tensor_parallel),
    config.num_threads,
  )
  with training_run.graph(config):
    examples = input_pipeline.fake_batch(job.shape, size)
    micro = input_pipeline.fixed_micro_batch(examples, plan.accumulation)
    state = checkpointing.TrainingState()
    ops = job.build(config, job.shape, micro, state, plan, comm)
    sharded_variables.add_sliced(comm)
    # As checkpoints have them: of all ranks and slices, with slots.
    saved = SavedVariables(Snapshot(), is_kept=False).shapes
    session = tf.Session(config=training_run.session_config(config, comm))
    session.run(tf.global_variables_initializer())
    session.run(tf.local_variables_initializer())
    here = {v.op.name: _mb(v.shape) for v in tf.global_variables()}
    weights = sum(here[v.op.name] for v in ops.variables)
    stores = sum(_mb(v.shape) for v in tf.local_variables())  # of gradients
    moments = "moments and averages" if config.average_updates else "moments"
    parts = {
      "weights": weights,
      "gradients": weights + stores,
      moments: sum(here.values()) - weights,
    }
    gpus = [d for d in session.list_devices() if d.device_type == "GPU"]
    if not gpus:
      # What the process has by now, besides all variables.
      now = psutil.Process().memory_info().rss / _MB
      parts["TensorFlow and the graph"] = now - sum(here.values()) - stores
    micro_seconds, update_seconds = _times(session, ops, plan.accumulation)
    parameters: dict[str, int] = {}
    for variable in ops.variables:
      scope, *inner = variable.op.name.split("/")
      part = inner[0] if scope == "bert" else "heads"
      count = tf.TensorShape(saved[variable.op.name]).num_elements()
      parameters[part] = parameters.get(part, 0) + count
  peaks = reporting.peak_memory()
  return Measured(
    size=size,
    peak_mb=peaks.get("gpu_peak_memory_mb", peaks["peak_memory_mb"]),
    micro_seconds=micro_seconds,
    update_seconds=update_seconds,
    parts=parts,
    parameters=parameters,
    checkpoint_mb=sum(map(_mb, saved.values())),
    gpu_mb=gpus[0].memory_limit_bytes / _MB if gpus else None,
  )


def _mb(shape) -> float:
  """MB of a float32 tensor; the few counters of 8 bytes do not matter."""
  return 4 * tf.TensorShape(shape).num_elements() / _MB


def _times(session, ops, accumulation: int) -> tuple[float, float]:
  """Seconds of a micro-batch, and what an update takes besides."""
  added, last = [], []
  # The first update compiles, and the third may still need more memory.
  for _ in range(4):
    began = time.monotonic()
    if accumulation > 1:
      session.run(ops.accumulate)
    between = time.monotonic()
    session.run(ops.fetches())
    added.append(between - began)
    last.append(time.monotonic() - between)
  if accumulation == 1:
    return min(last[1:]), 0.0
  return min(added[1:]), max(0.0, min(last[1:]) - min(added[1:]))


def duration(measured: Measured, plan, limit: float) -> tuple[int, float]:
  """Updates of a plan that end within `limit` seconds, and their seconds."""
  done, taken = 0, 0.0
  for updates, records in plan.sizes():
    seconds = measured.seconds_of(plan.micro_batches(records), plan.micro_batch)
    in_time = int(min(updates, (limit - taken) / seconds))
    done += in_time
    taken += in_time * seconds
    if in_time < updates:
      break
  return done, taken


def lines(
  job: Job, measured: Measured, limit: float = math.inf
) -> Iterator[str]:
  """What the plan needs, for people; it ends after `limit` seconds."""
  plan, size, here = job.plan, job.plan.micro_batch, job.here
  yield _row("parameters", sum(measured.parameters.values()))
  for part, count in measured.parameters.items():
    yield _row(f"  {part}", count)
  how = "measured" if size == measured.size else f"from {measured.size:,}"
  yield f"  memory of micro-batches of {size:,} records ({how}), MB"
  parts = dict(measured.parts)
  parts["activations and buffers"] = size * measured.record_mb
  if here:
    parts["copy of what is saved, in rank 0 only"] = measured.checkpoint_mb
  for part, mb in parts.items():
    yield _row(f"  {part}", mb)
  yield _row("  total", sum(parts.values()))
  yield _row("  each further record", measured.record_mb)
  host = f"for {counted(here, 'rank')} here" if here else "of each GPU"
  yield _row(f"  available, {host}", measured.gpu_mb or job.free_mb)
  room = job.room_mb(measured) - sum(measured.parts.values())
  largest = int(room / max(measured.record_mb, 1e-3))
  yield (
    f"  {'fits' if size <= largest else 'DOES NOT FIT'}; with "
    f"{1 - _SHARE:.0%} left free, the largest is about "
    f"--train_batch_size={largest}"
  )
  updates, total = duration(measured, plan, limit)
  seconds = measured.seconds_of(plan.accumulation, size)
  yield (
    f"  time without network and evaluations: {seconds:.3g} s an update, "
    f"{_duration(total)} in total"
  )
  if limit < math.inf:
    yield f"  --max_train_minutes has time for about {updates:,} updates"
  kept, one = job.config.keep_checkpoints, measured.checkpoint_mb / 1024
  yield (
    f"  disk: {one:.2g} GB a checkpoint, {one * (kept + 2):.2g} GB for "
    f"--keep_checkpoints={kept}, the best and one more"
  )


def _row(name: str, number: float) -> str:
  return f"  {name:<44}{number:>14,.0f}"


def _duration(seconds: float) -> str:
  for name, unit in (("days", 86400), ("hours", 3600), ("minutes", 60)):
    if seconds >= 2 * unit:
      return f"{seconds / unit:.1f} {name}"
  return f"{seconds:.1f} s"


def tell_needs(build: Callable, start: stages.StageStart, ranks: int) -> int:
  """Prints a plan and what it needs; returns its last update."""
  config, plan, shares = start
  on_gpu = bool(tf.config.list_physical_devices("GPU"))
  precision = training_run.precision_line(config, on_gpu)
  settings = dataclasses.asdict(config.optimizer)
  optimizer = " ".join(next_steps.flag_words(settings))
  for line in (*plan.lines(), precision, optimizer):
    tell(*textwrap.wrap(line, 80, subsequent_indent="  "))
  limit = 60.0 * config.max_train_minutes * (shares[1] - shares[0]) or math.inf
  if limit < math.inf:
    tell(f"or {limit / 60:.3g} minutes, if less")
  config.planned_schedule(plan).check_trains(first=0)
  here = 0 if on_gpu else min(ranks, available_cores())
  shape = record_shapes.of_patterns(config.input_file, config)
  job = Job(build, config, plan, ranks, here, free_memory_mb(), shape)
  record_flops = model_flops.total(model_flops.of_run(config, 1, shape))
  measured = first_size(job, record_flops)
  tell("", *lines(job, measured, limit))
  if config.find_batch_size:
    largest = find_largest(job, measured).size
    tell(f"largest micro-batch: --train_batch_size={largest}")
  updates, _ = duration(measured, plan, limit)
  return plan.stage.first_update + max(1, updates)


def run(config, about: Sequence[str], build: Callable) -> None:
  """Plans a run, tells `about` it, and measures what it needs; on rank 0."""
  _, started = processes.started()
  ranks = config.dry_run_ranks or started
  groups = models_of(ranks, config.tensor_parallel)
  tf.config.list_physical_devices()  # TensorFlow starts before the first line
  comm, begun = distributed.Comm(), training_plan.Stage()
  say(comm, *about)
  config = training_run.with_precision(config, comm)
  if not config.stages:
    source = None
    if config.input_file:
      source = input_pipeline.open_records(config.input_file, config, comm)
    plan = plans.of_run(config, source, groups)
    if config.cooldown_from:  # its own updates
      plan = dataclasses.replace(
        plan, updates=plan.decay_updates, warmup_updates=0, cooldown_start=0
      )
    tell_needs(build, stages.StageStart(config, plan, (0.0, 1.0)), ranks)
  else:
    staged = plans.of_stages(config, begun, comm, groups)
    tell(*staged.lines())
    while True:
      start = staged.start(begun)
      last = tell_needs(build, start, ranks)
      stage = start.plan.stage
      if stage.is_last:
        break
      if last >= stage.total_updates:
        tell(
          f"stage {stage.number + 1} would be the last: "
          f"--num_train_steps={start.config.num_train_steps} end there"
        )
        break
      begun = staged.after(start.plan, last)
  tell("nothing was written")
