"""What a plan needs, measured in child processes: memory, time and disk.

A child runs updates on fake records as rank 0 of the planned ranks. The peaks
of its memory at two sizes of the micro-batch give those of other sizes: both
what stays and what each record adds are measured, for any --recompute.
"""

import contextlib
import dataclasses
import math
import multiprocessing
import os
import pathlib
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import input_pipeline
from checkpoints import checkpointing
from common.console import tell
from common.errors import UserError
from common.tensorflow_v1 import tf
from data.workers import available_cores
from gradients import distributed
from model.tensor_parallel import cut_of
from training import evaluation, reporting, training_run

_MB = 2.0**20
_SHARE = 0.9  # of the free memory that a run may take
_TOKENS = 512  # of the first micro-batch, which has at least one record
_GROWTH = 4  # largest factor from one measured micro-batch to the next
_FARTHEST = 32  # largest predicted micro-batch over the largest measured
_QUICK = 15.0  # longer updates (seconds) are measured only if they must be
_TIMED = 10.0  # seconds; updates are measured for about this long
_CGROUPS = "/sys/fs/cgroup"


def free_memory_mb() -> float:
  """MB of the host that are free: of the machine, and of this cgroup."""
  with open("/proc/meminfo", encoding="ascii") as f:
    fields = dict(line.split(":") for line in f)
  found = [int(fields["MemAvailable"].split()[0]) / 1024]
  with open("/proc/self/cgroup", encoding="utf-8") as f:
    groups = [line.rstrip("\n").split(":", 2)[1:] for line in f]
  for kinds, path in groups:
    if kinds == "":  # version 2
      found += _cgroup_mb("", path, "memory.max", "memory.current")
    elif "memory" in kinds.split(","):
      names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
      found += _cgroup_mb("memory", path, *names)
  return min(found)


def _cgroup_mb(kind: str, path: str, most: str, now: str) -> Iterator[float]:
  """What a cgroup and those above it leave, in MB, of those with a limit."""
  inside = pathlib.PurePosixPath(path.lstrip("/"))
  for group in (inside, *inside.parents):
    folder = pathlib.Path(_CGROUPS, kind, group)
    with contextlib.suppress(OSError, ValueError):  # no limit; not mounted here
      limit = int((folder / most).read_text())
      stat = dict(
        line.split() for line in (folder / "memory.stat").open(encoding="ascii")
      )
      # The system drops cached files first.
      cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
      yield (limit - int((folder / now).read_text()) + int(cached)) / _MB


class Measured(NamedTuple):
  """What a child measured; MB are of 2^20 bytes."""

  size: int  # records of a micro-batch
  records: int  # of the rank's update
  mb: float  # peak of the process without the checkpoint, or of its GPU
  seconds: float  # of an update
  parts: dict  # the MB of what has a known size
  parameters: dict  # of the whole model by part
  checkpoint_mb: float  # rank 0 has a copy in the host's memory
  gpu_mb: float | None  # that the GPU has


@dataclasses.dataclass(frozen=True)
class Job:
  """What all children have in common."""

  build: Callable  # (config, shape, micro-batch, state, plan, comm) -> TrainOps
  config: Any  # a `PretrainingConfig`
  plan: Any  # a `TrainingPlan`
  ranks: int
  here: int  # ranks on this host

  def measure(self, size: int, limit_mb: float) -> Measured | None:
    """Measures micro-batches of `size`; None if one process needs more MB."""
    tell(f"measuring updates of micro-batches of {size:,} ...")
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_run, args=(self, size, sender), daemon=True)
    child.start()
    sender.close()
    while not receiver.poll(0.05):
      if self.here and _resident_mb(child.pid) > limit_mb:
        child.kill()
    try:
      found = receiver.recv()
    except EOFError:
      found = None
    child.join()
    if child.exitcode not in (0, -signal.SIGKILL, -signal.SIGABRT):
      raise UserError(
        f"a micro-batch of {size} records could not be tried: see above"
      )
    return found


def _resident_mb(pid: int) -> float:
  try:
    with open(f"/proc/{pid}/statm", encoding="ascii") as f:
      return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _MB
  except (OSError, IndexError):
    return 0.0  # it has ended


def _run(job: Job, size: int, sender) -> None:
  """In a child: sends a `Measured`, or None if the memory does not suffice."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
  with contextlib.suppress(OSError):  # should memory end, this process goes
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as f:
      f.write("1000")
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
  config, program = job.config, reporting.host_peak_mb()
  plan = dataclasses.replace(
    job.plan, micro_batch=size, accumulation=min(2, job.plan.accumulation)
  )
  comm = distributed.settled(
    PlannedRanks(job.ranks, job.here or 1, config.tensor_parallel),
    config.num_threads,
  )
  shape = config.record_shape(config.input_file)
  with training_run.graph(config):
    examples = input_pipeline.fake_batch(shape, size)
    micro = input_pipeline.fixed_micro_batch(examples, plan.accumulation)
    state = checkpointing.TrainingState()
    ops = job.build(config, shape, micro, state, plan, comm)
    sizes = _sizes(ops.variables, config.optimizer.kind.slots)
    session = tf.Session(config=training_run.session_config(config, comm))
    session.run(
      [tf.global_variables_initializer(), tf.local_variables_initializer()]
    )
    # The first update compiles, and the third may still need more memory.
    seconds: list[float] = []
    while len(seconds) < 3 or (len(seconds) < 6 and sum(seconds[1:]) < _TIMED):
      began = time.monotonic()
      for _ in range(plan.accumulation - 1):
        session.run(ops.accumulate)
      session.run(ops.fetches())
      seconds.append(time.monotonic() - began)
      if seconds[0] > 5:
        compiled = " with compiling" if len(seconds) == 1 else ""
        tell(f"  update {len(seconds)}: {seconds[-1]:.1f} s{compiled}")
    gpus = [d for d in session.list_devices() if d.device_type == "GPU"]
    parameters = _parameters(ops.variables)
  peaks, checkpoint = reporting.peak_memory(), sizes.pop("checkpoint")
  if not gpus:
    sizes = {"TensorFlow": program, **sizes}
  return Measured(
    size=size,
    records=plan.accumulation * size,
    mb=peaks.get("gpu_peak_memory_mb", peaks["peak_memory_mb"]),
    seconds=min(seconds[1:]),
    parts=sizes,
    parameters=parameters,
    checkpoint_mb=checkpoint,
    gpu_mb=gpus[0].memory_limit_bytes / _MB if gpus else None,
  )


def _whole(variable) -> int:
  """Elements of a variable, over all slices."""
  cut = cut_of(variable)
  return tf.TensorShape(cut.shape if cut else variable.shape).num_elements()


def _parameters(variables) -> dict[str, int]:
  """Part of the model -> parameters."""
  found: dict[str, int] = {}
  for variable in variables:
    scope, *inner = variable.op.name.split("/")
    part = inner[0] if scope == "bert" else "heads"
    found[part] = found.get(part, 0) + _whole(variable)
  return found


def _sizes(variables, slots: tuple[str, ...]) -> dict[str, float]:
  """MB of a rank by part, and of a checkpoint, which has all ranks'."""
  mb = lambda of: 4 * sum(v.shape.num_elements() for v in of) / _MB
  trained = {v.op.name for v in variables}
  state = [v for v in tf.global_variables() if v.op.name not in trained]
  others = [v for v in state if not v.op.name.endswith(slots)]
  whole = 4 * sum(map(_whole, variables)) / _MB
  return {
    "weights": mb(variables),
    "gradients": mb(variables) + mb(tf.local_variables()),
    "moments": mb(state),
    "checkpoint": whole * (1 + len(slots)) + mb(others),
  }


class Survey:
  """Micro-batches that were measured, and what others need."""

  def __init__(self, job: Job, free_mb: float):
    """`free_mb` is the host's free memory, for all its ranks."""
    self.job, self._free_mb = job, free_mb
    self.measured: list[Measured] = []  # by size
    self._too_much: float = math.inf  # the smallest size that did not fit

  def knows(self, size: int) -> bool:
    return any(m.size == size for m in self.measured)

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

  def add(self, size: int) -> bool:
    """Measures `size`, the largest so far; returns whether it fits."""
    found = self.job.measure(size, self.room_mb)
    if found:
      self.measured.append(found)  # its checkpoint is known
      if found.mb <= self.room_mb:
        return True
      self.measured.pop()
    self._too_much = size
    return False

  def begin(self, target: int, tokens: int) -> None:
    """Measures small sizes, and `target` records if they fit and are quick."""
    first = max(1, min(_TOKENS // tokens, target // _GROWTH))
    if not self.add(first) and not (first > 1 and self.add(1)):
      here = f" in {self.room_mb:,.0f} MB" if self.job.here else ""
      raise UserError(
        f"a micro-batch of one record does not fit{here}: give a smaller model "
        "or --max_seq_length, or --recompute=layer"
      )
    rows = self.last.records // self.last.size
    quick = lambda size: self.seconds(rows * size) <= _QUICK
    while len(self.measured) < 2 or (
      not self._has_grown() and self.last.size < target and quick(self._next())
    ):
      if self._next() == self.last.size or not self.add(self._next()):
        break
    for size in (target, _GROWTH * self.last.size):
      if self.last.size < size <= min(target, self.largest) and quick(size):
        self.add(size)
        return

  def _has_grown(self) -> bool:
    """Whether the last two peaks differ by more than chance."""
    return self.last.mb > 1.1 * self.measured[-2].mb

  def find_largest(self) -> None:
    """Measures until the last is the largest that fits, or 2% below it."""
    while (size := self._next()) > 1.02 * self.last.size:
      self.add(size)
    self._too_much = min(self._too_much, self.last.size + 1)

  def _next(self) -> int:
    """A larger size that should fit."""
    size = min(_GROWTH * self.last.size, self._room())
    if len(self.measured) == 1:  # what stays is not known: a child may be ended
      size = max(size, 2 * self.last.size)
    between = (self.last.size + self._too_much) / 2
    return int(min(size, between))

  def fits(self, size: int) -> bool:
    return size < self._too_much and self.peak_mb(size) <= self.room_mb

  @property
  def record_mb(self) -> float:
    """What a record more adds."""
    return self._line(lambda m: (m.size, m.mb))[1]

  def peak_mb(self, size: int) -> float:
    """Peak of a rank with this micro-batch, without the checkpoint's copy."""
    for known in self.measured:
      if known.size == size:
        return known.mb
    start, slope = self._line(lambda m: (m.size, m.mb))
    return start + slope * size

  def seconds(self, records: int) -> float:
    """Seconds of an update in which a rank has so many records."""
    for known in self.measured:
      if known.records == records:
        return known.seconds
    start, slope = self._line(lambda m: (m.records, m.seconds))
    return max(0.0, start) + slope * records

  @property
  def largest(self) -> int:
    """The largest micro-batch that fits, at most `_FARTHEST` times the last."""
    if self._room() >= self._too_much:  # which was tried: the line is too low
      return self.last.size
    return int(min(self._room(), _FARTHEST * self.last.size))

  def _room(self) -> float:
    """The micro-batch that the line has room for; what was measured fits."""
    size = (self.room_mb - self.peak_mb(0)) / max(self.record_mb, 1e-3)
    return max(size, self.last.size)

  def _line(self, of: Callable) -> tuple[float, float]:
    """(value at 0, slope) by the last size and the next of at most its half.

    Of one size alone: as if 0 records needed nothing.
    """
    *others, (x2, y2) = map(of, self.measured)
    others = others or [(0, 0)]
    x, y = ([p for p in others if 2 * p[0] <= x2] or others)[-1]
    slope = max(0.0, (y2 - y) / (x2 - x))
    return y2 - slope * x2, slope


def duration(survey: Survey, plan, limit: float) -> tuple[int, float]:
  """A plan's updates, fewer if they would take more seconds than `limit`.

  And their seconds.
  """
  made, taken = 0, 0.0
  for updates, records in plan.sizes():
    rows = plan.micro_batches(records) * plan.micro_batch
    seconds = survey.seconds(rows)
    in_time = int(min(updates, (limit - taken) / seconds))
    made += in_time
    taken += in_time * seconds
    if in_time < updates:
      break
  return made, taken


def lines(
  survey: Survey, config, plan, limit: float = math.inf
) -> Iterator[str]:
  """What the plan needs, for people; it ends after `limit` seconds."""
  last, size, here = survey.last, plan.micro_batch, survey.job.here
  row = lambda name, number: f"  {name:<44}{number:>14,.0f}"
  yield row("parameters", sum(last.parameters.values()))
  yield from (row(f"  {n}", count) for n, count in last.parameters.items())
  peak = survey.peak_mb(size)
  parts = {**last.parts}
  parts["activations and buffers"] = peak - sum(parts.values())
  if here:
    parts["copy of what is saved, in rank 0 only"] = last.checkpoint_mb
  how = "measured" if survey.knows(size) else f"from up to {last.size:,}"
  yield f"  memory of micro-batches of {size:,} records ({how}), MB"
  yield from (row(f"  {name}", mb) for name, mb in parts.items())
  yield row("  total", sum(parts.values()))
  yield row("  each further record", survey.record_mb)
  place = f"for {here} ranks on this host" if here else "of each GPU"
  yield row(f"  available, {place}", survey.capacity_mb)
  fits = "fits" if survey.fits(size) else "DOES NOT FIT"
  yield (
    f"  {fits}; with {1 - _SHARE:.0%} left free, the largest is "
    f"--train_batch_size={survey.largest}"
  )
  seconds = survey.seconds(plan.accumulation * size)
  updates, whole = duration(survey, plan, limit)
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


def _duration(seconds: float) -> str:
  units = (("days", 86400), ("hours", 3600), ("minutes", 60), ("s", 1))
  name, unit = next((u for u in units if seconds >= 2 * u[1]), units[-1])
  return f"{seconds / unit:.1f} {name}"


def tell_needs(
  build: Callable, config, plan, shares: tuple[float, float], ranks: int
) -> int:
  """Prints the plan of a run or of a stage, and what it needs.

  `build` is a `Job`'s; the plan has these `shares` of --max_train_minutes.
  Returns its last update.
  """
  on_gpu = bool(tf.config.list_physical_devices("GPU"))
  precision = training_run.precision_line(config, on_gpu)
  for line in (*plan.lines(), precision, str(config.optimizer)):
    tell(*textwrap.wrap(line, 80, subsequent_indent="  "))
  limit = 60.0 * config.max_train_minutes * (shares[1] - shares[0]) or math.inf
  if limit < math.inf:
    tell(f"or {limit / 60:.3g} minutes, if less")
  config.planned_schedule(plan).check_trains(first=0)
  here = 0 if on_gpu else min(ranks, available_cores())
  survey = Survey(Job(build, config, plan, ranks, here), free_memory_mb())
  length = config.record_shape(config.input_file).max_seq_length
  survey.begin(plan.micro_batch, length)
  if config.find_batch_size:
    survey.find_largest()
  tell("", *lines(survey, config, plan, limit))
  if config.find_batch_size:
    tell(f"largest micro-batch: --train_batch_size={survey.last.size}")
  updates, _ = duration(survey, plan, limit)
  return plan.stage.first_update + max(1, updates)
