"""What a plan needs, measured in child processes: memory, time and disk.

A child runs updates on fake records as rank 0 of the planned ranks. Two sizes
of the micro-batch are measured: a small one, and the plan's if its updates are
quick. The line through both gives other sizes, for any --recompute.
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
from typing import Any, NamedTuple

import psutil

import input_pipeline
from checkpoints import checkpointing
from common import processes
from common.console import counted, say, tell
from common.errors import UserError
from common.tensorflow_v1 import tf
from config import record_shapes, stages, training_plan
from gradients import distributed
from model.tensor_parallel import cut_of
from records import record_shape
from training import evaluation, next_steps, plans, reporting, training_run
from workers.pool import available_cores

_MB = 2.0**20
_SHARE = 0.9  # of the free memory that a run may take
_TOKENS = 512  # of the first micro-batch, which has at least one record
_FARTHEST = 32  # largest predicted micro-batch over the largest measured
_QUICK = 20.0  # seconds; longer updates are not measured
_CGROUPS = "/sys/fs/cgroup"


def free_memory_mb() -> float:
  """MB of the host that are free: of the machine, and of this cgroup."""
  free = psutil.virtual_memory().available / _MB
  own = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
  for line in own:
    if line.startswith("0::"):  # of version 2
      return min([free, *_cgroup_mb(line.removeprefix("0::"))])
  return free


def _cgroup_mb(path: str) -> Iterator[float]:
  """What a cgroup and those above it leave, in MB, of those with a limit."""
  inside = pathlib.PurePosixPath(path.lstrip("/"))
  for group in (inside, *inside.parents):
    folder = pathlib.Path(_CGROUPS, group)
    with contextlib.suppress(OSError, ValueError):  # no limit; not mounted here
      limit = int((folder / "memory.max").read_text())
      used = int((folder / "memory.current").read_text())
      # The system drops cached files first.
      words = (folder / "memory.stat").read_text().split()
      cached = int(words[words.index("inactive_file") + 1])
      yield (limit - used + cached) / _MB


class Measured(NamedTuple):
  """What a child measured; MB are of 2^20 bytes."""

  size: int  # records of a micro-batch
  mb: float  # peak of the process without the checkpoint, or of its GPU
  micro_seconds: float  # of a micro-batch
  update_seconds: float  # of an update, besides its micro-batches
  parts: dict  # the MB of what has a known size
  parameters: dict  # of the whole model by part
  checkpoint_mb: float  # rank 0 has a copy in the host's memory
  gpu_mb: float | None  # that the GPU has


@dataclasses.dataclass(frozen=True)
class Job:
  """What all children have in common."""

  build: Callable  # (config, shape, micro-batch, state, plan, comm) -> TrainOps
  config: Any  # a `PretrainingConfig`
  plan: training_plan.TrainingPlan
  ranks: int
  here: int  # ranks on this host; 0 with GPUs
  shape: record_shape.RecordShape

  def measure(self, size: int, limit_mb: float) -> Measured | None:
    """Measures micro-batches of `size`; None if one process needs more MB."""
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


class PlannedRanks(distributed.Comm):
  """Rank 0 of `size` that are not there: what others send has its shape.

  A graph needs the memory and the time that it would have; `here` of the ranks
  are on this host.
  """

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

  def allgather(self, tensor, name):
    return tf.concat([tensor] * self.size, axis=0)


def _measured(job: Job, size: int) -> Measured:
  # To ask a GPU would begin TensorFlow's, before its settings are made.
  config, program_mb = job.config, reporting.host_peak_mb()
  times = min(2, job.plan.accumulation)
  plan = dataclasses.replace(job.plan, micro_batch=size, accumulation=times)
  comm = distributed.settled(
    PlannedRanks(job.ranks, job.here or 1, config.tensor_parallel),
    config.num_threads,
  )
  with training_run.graph(config):
    examples = input_pipeline.fake_batch(job.shape, size)
    micro = input_pipeline.fixed_micro_batch(examples, plan.accumulation)
    state = checkpointing.TrainingState()
    ops = job.build(config, job.shape, micro, state, plan, comm)
    parts, checkpoint_mb = _sizes(ops.variables, ("adam_m", "adam_v"))
    session = tf.Session(config=training_run.session_config(config, comm))
    session.run(tf.global_variables_initializer())
    session.run(tf.local_variables_initializer())
    micro_seconds, update_seconds = _times(session, ops, plan.accumulation)
    gpus = [d for d in session.list_devices() if d.device_type == "GPU"]
    parameters = _parameters(ops.variables)
  peaks = reporting.peak_memory()
  return Measured(
    size=size,
    mb=peaks.get("gpu_peak_memory_mb", peaks["peak_memory_mb"]),
    micro_seconds=micro_seconds,
    update_seconds=update_seconds,
    parts=parts if gpus else {"TensorFlow": program_mb, **parts},
    parameters=parameters,
    checkpoint_mb=checkpoint_mb,
    gpu_mb=gpus[0].memory_limit_bytes / _MB if gpus else None,
  )


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


def _whole(variable) -> int:
  """Elements of a variable, over all slices."""
  cut = cut_of(variable)
  return tf.TensorShape(cut.shape if cut else variable.shape).num_elements()


def _parameters(variables) -> dict[str, int]:
  """Part of the model -> parameters."""
  counts: dict[str, int] = {}
  for variable in variables:
    scope, *inner = variable.op.name.split("/")
    part = inner[0] if scope == "bert" else "heads"
    counts[part] = counts.get(part, 0) + _whole(variable)
  return counts


def _sizes(variables, slots: tuple[str, ...]) -> tuple[dict, float]:
  """MB of a rank by part, and of a checkpoint, which has all ranks'."""
  mb = lambda of: 4 * sum(v.shape.num_elements() for v in of) / _MB
  trained = {v.op.name for v in variables}
  state = [v for v in tf.global_variables() if v.op.name not in trained]
  others = [v for v in state if not v.op.name.endswith(slots)]
  weights_mb = 4 * sum(map(_whole, variables)) / _MB
  parts = {
    "weights": mb(variables),
    "gradients": mb(variables) + mb(tf.local_variables()),
    "moments": mb(state),
  }
  return parts, weights_mb * (1 + len(slots)) + mb(others)


class Needs:
  """Micro-batches that were measured, and what others need by them."""

  def __init__(self, job: Job, free_mb: float):
    """`free_mb` is the host's free memory, for all its ranks."""
    self.job, self._free_mb = job, free_mb
    self.measured: list[Measured] = []  # by size
    self._too_large: float = math.inf  # the smallest size that did not fit

  @property
  def last(self) -> Measured:
    return self.measured[-1]

  @property
  def capacity_mb(self) -> float:
    """Memory of a GPU, or of the host for all its ranks."""
    gpu_mb = self.last.gpu_mb if self.measured else None
    return gpu_mb or self._free_mb

  @property
  def room_mb(self) -> float:
    """The highest peak that a rank may have; rank 0 has a copy besides."""
    here = self.job.here
    copy = self.last.checkpoint_mb if here and self.measured else 0.0
    return (_SHARE * self.capacity_mb - copy) / max(1, here)

  def measure(self, size: int) -> bool:
    """Measures `size`, the largest so far; returns whether it fits."""
    measured = self.job.measure(size, self.room_mb)
    if measured:
      self.measured.append(measured)  # its checkpoint is known
      if measured.mb <= self.room_mb:
        return True
      self.measured.pop()
    self._too_large = size
    return False

  def begin(self, target: int, tokens: int) -> None:
    """Measures two sizes; the second is `target` if it fits and is quick."""
    first = max(1, min(_TOKENS // tokens, target // 4))
    if not self.measure(first) and not (first > 1 and self.measure(1)):
      raise UserError(
        "a micro-batch of one record does not fit: give a smaller model or "
        "--max_seq_length, or --recompute=layer"
      )
    first = self.last.size
    # One that is quick: children run updates of up to two micro-batches.
    quick = int(first * _QUICK / (2 * self.last.micro_seconds))
    size = max(2 * first, min(target, quick))
    while size > first and not (size < self._too_large and self.measure(size)):
      size = (first + size) // 2

  def find_largest(self) -> None:
    """Tries what fits by `record_mb`, and a little more, until that does not.

    Then it halves what is between. Each size takes a minute of compiling.
    """
    more = 0.02  # of the size that fits
    while self._too_large > 1 + 1.02 * (fits := self.last.size):
      size = self._expected
      if size <= (1 + more) * fits:
        size = fits + 1 + int(more * fits)
        more *= 2
      if size >= self._too_large:
        size = (fits + int(self._too_large)) // 2
      self.measure(size)
    self._too_large = self.last.size + 1

  def fits(self, size: int) -> bool:
    return size < self._too_large and self.peak_mb(size) <= self.room_mb

  @property
  def record_mb(self) -> float:
    """What a record more adds; of one size alone all of it."""
    first, last = self.measured[0], self.last
    if first.size == last.size:
      return last.mb / last.size
    return max(0.0, (last.mb - first.mb) / (last.size - first.size))

  def peak_mb(self, size: int) -> float:
    """Peak of a rank with this micro-batch, without the checkpoint's copy."""
    return self.last.mb + (size - self.last.size) * self.record_mb

  def seconds(self, micro_batches: int, size: int) -> float:
    """Seconds of an update of so many micro-batches of `size` on a rank."""
    one = self.last.micro_seconds * size / self.last.size
    return micro_batches * one + self.last.update_seconds

  @property
  def _expected(self) -> int:
    """What fits by `record_mb`, at most `_FARTHEST` times the last size."""
    more = (self.room_mb - self.last.mb) / max(self.record_mb, 1e-3)
    return int(min(self.last.size + more, _FARTHEST * self.last.size))

  @property
  def largest(self) -> int:
    """The largest micro-batch that fits, as far as is known."""
    # One that was tried in vain shows that memory is no line in the size.
    size = self._expected
    return size if size < self._too_large else self.last.size


def duration(needs: Needs, plan, limit: float) -> tuple[int, float]:
  """Updates of a plan that end within `limit` seconds, and their seconds."""
  made, taken = 0, 0.0
  for updates, records in plan.sizes():
    micro_batches = plan.micro_batches(records)
    seconds = needs.seconds(micro_batches, plan.micro_batch)
    in_time = int(min(updates, (limit - taken) / seconds))
    made += in_time
    taken += in_time * seconds
    if in_time < updates:
      break
  return made, taken


def lines(needs: Needs, config, plan, limit: float = math.inf) -> Iterator[str]:
  """What the plan needs, for people; it ends after `limit` seconds."""
  last, size, here = needs.last, plan.micro_batch, needs.job.here
  yield _row("parameters", sum(last.parameters.values()))
  for part, count in last.parameters.items():
    yield _row(f"  {part}", count)
  how = "measured" if size == last.size else f"extrapolated from {last.size:,}"
  yield f"  memory of micro-batches of {size:,} records ({how}), MB"
  parts = dict(last.parts)
  parts["activations and buffers"] = needs.peak_mb(size) - sum(parts.values())
  if here:
    parts["copy of what is saved, in rank 0 only"] = last.checkpoint_mb
  for part, mb in parts.items():
    yield _row(f"  {part}", mb)
  yield _row("  total", sum(parts.values()))
  yield _row("  each further record", needs.record_mb)
  place = f"for {counted(here, 'rank')} here" if here else "of each GPU"
  yield _row(f"  available, {place}", needs.capacity_mb)
  fits = "fits" if needs.fits(size) else "DOES NOT FIT"
  yield (
    f"  {fits}; with {1 - _SHARE:.0%} left free, the largest is "
    f"--train_batch_size={needs.largest}"
  )
  if needs.largest != last.size:
    yield "  (extrapolated)"
  seconds = needs.seconds(plan.accumulation, size)
  updates, whole = duration(needs, plan, limit)
  yield (
    f"  time without network and evaluations: {seconds:.3g} s an update, "
    f"{_duration(whole)} in total"
  )
  if limit < math.inf:
    yield f"  --max_train_minutes has time for about {updates:,} updates"
  kept, one = config.keep_checkpoints, last.checkpoint_mb / 1024
  yield (
    f"  disk: {one:.2g} GB a checkpoint, {one * (kept + 1):.2g} GB for "
    f"--keep_checkpoints={kept} and the best"
  )


def _row(name: str, number: float) -> str:
  return f"  {name:<44}{number:>14,.0f}"


def _duration(seconds: float) -> str:
  for name, unit in (("days", 86400), ("hours", 3600), ("minutes", 60)):
    if seconds >= 2 * unit:
      return f"{seconds / unit:.1f} {name}"
  return f"{seconds:.1f} s"


def tell_needs(build: Callable, start: stages.StageStart, ranks: int) -> int:
  """Prints the plan of a run or a stage, and what it needs.

  `build` is a `Job`'s. Returns the plan's last update.
  """
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
  job = Job(build, config, plan, ranks, here, shape)
  needs = Needs(job, free_memory_mb())
  needs.begin(plan.micro_batch, shape.max_seq_length)
  tell("", *lines(needs, config, plan, limit))
  updates, _ = duration(needs, plan, limit)
  if config.find_batch_size:
    needs.find_largest()
    tell(f"largest micro-batch: --train_batch_size={needs.last.size}")
  return plan.stage.first_update + max(1, updates)


def run(config, about: Sequence[str], build: Callable) -> None:
  """Plans a run, and measures what it needs; on rank 0.

  `about` are lines about the config, `build` is as `Job.build`.
  """
  _, started = processes.started()
  ranks = config.dry_run_ranks or started
  groups, left_over = divmod(ranks, config.tensor_parallel)
  if left_over:
    raise UserError(
      f"--tensor_parallel={config.tensor_parallel}: --dry_run_ranks={ranks} is "
      "not a multiple of it"
    )
  tf.config.list_physical_devices()  # TensorFlow starts before the first line
  comm, begun = distributed.Comm(), training_plan.Stage()
  say(comm, *about)
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
