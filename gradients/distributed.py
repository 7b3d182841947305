"""The ranks: the only module that imports Horovod.

`init()` returns a `Comm` of the ranks that `horovodrun` started. Without it
that is a world of one whose operations change nothing, so no caller has to ask.
"""

import itertools
import os
import pickle
import re
from collections.abc import Sequence

import numpy as np

from common import processes
from common.errors import UserError, leaving_in_c
from common.tensorflow_v1 import monotonic_seconds, tf
from config.exchange_config import models_of

_MOST_SHOWN = 5  # differences of ranks in one message


class DistributedError(UserError):
  """Ranks that disagree, or a rank that went away."""


class RankLost(DistributedError):
  """A rank stopped, hangs or cannot be reached."""


class WorldChange(Exception):
  """All ranks are about to leave this world for one with other ranks."""


class Comm:
  """One rank's view of the world, with its collectives; here a world of one."""

  rank, size = 0, 1  # of all
  local_rank, local_size = 0, 1  # on this host; rank n there uses GPU n
  num_threads = 0  # CPU threads for one op; 0 is all cores
  elastic = False  # whether ranks may come and go (`horovodrun --min-np`)
  _data_parallel = _tensor_parallel = None

  @property
  def data_parallel(self) -> "Comm":
    """The ranks with the same slice of the model, which share the batch."""
    return self._data_parallel or self

  @property
  def tensor_parallel(self) -> "Comm":
    """The ranks that hold one model together; this one alone, unless sliced."""
    return self._tensor_parallel or Comm()

  @property
  def is_root(self) -> bool:
    """Whether this is rank 0, which alone logs and saves."""
    return self.rank == 0

  def sum_gradients(self, pairs: list, groups: int, fp16: bool = False) -> list:
    """[(gradient, variable), ...] with sums over ranks, sent in `groups`.

    With 0 groups each gradient is sent alone; with `fp16` as float16.
    """
    return pairs

  def allreduce(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """The sum of `tensor` over ranks. All names are unique in a graph."""
    return tensor

  def grouped_allreduce(self, tensors: Sequence, name: str) -> list:
    """The sums over ranks, sent together when the last tensor is ready."""
    return list(tensors)

  def reducescatter(
    self, tensor: tf.Tensor, name: str, fp16: bool = False
  ) -> tf.Tensor:
    """[n, ...] of [ranks x n, ...]: this rank's part of the sum over ranks."""
    return tensor

  def allgather(self, tensor, name: str, rows: int | None = None) -> tf.Tensor:
    """All tensors along the first axis: `rows` in all, if they differ."""
    return tensor

  def broadcast(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Rank 0's `tensor`."""
    return tensor

  def seconds_between(self, local: Sequence, reduced: Sequence) -> tf.Tensor:
    """float64 scalar: how long this rank waits for what is reduced over ranks.

    From the last of `local`, its own tensors, to the last of `reduced`. Not a
    number on GPUs.
    """
    return tf.constant(0.0, tf.float64)

  def gather(self, values: np.ndarray) -> np.ndarray:
    """[size, n]: every rank's `values`, [n]. It runs a session; all call it."""
    return np.asarray(values)[None]

  def from_root(self, value, root: int = 0):
    """The value of rank `root`, of any type; others' do not count."""
    # First how long it is: a gather needs arrays of one shape from all ranks.
    content = pickle.dumps(value) if self.rank == root else b""
    length = int(self.gather(np.array([len(content)]))[root, 0])
    padded = np.frombuffer(content.ljust(length), np.uint8)
    return pickle.loads(self.gather(padded)[root].tobytes())

  def hosts_changed(self) -> bool:
    """Whether this rank heard, since it joined, that hosts came or went."""
    return _NOTICES.came  # of `_HorovodComm`s alone

  def check_equal(self, what: str, value: str) -> None:
    """`DistributedError` with the lines in which ranks' `value`s differ."""
    first = self.from_root(value)
    odd = np.flatnonzero(self.gather(np.array([value != first]))).tolist()
    if not odd:
      return
    texts = first.splitlines(), self.from_root(value, odd[0]).splitlines()
    differences = []
    for a, b in itertools.zip_longest(*texts, fillvalue="nothing"):
      if a != b:
        differences.append(f"rank 0 has {a}, rank {odd[0]} has {b}")
    more = len(differences) - _MOST_SHOWN
    if more > 0:
      differences[_MOST_SHOWN:] = [f"and {more} more"]
    raise DistributedError(
      f"{what} of rank {odd} differs from rank 0's: {'; '.join(differences)}. "
      "Give all hosts the same files and flags"
    )


class _GradientSource(tf.train.Optimizer):
  """Returns the gradients that it gets: an optimizer for Horovod to wrap."""

  # Horovod sums gradients in groups only around an optimizer.

  def __init__(self):
    super().__init__(use_locking=False, name="GivenGradients")

  def compute_gradients(self, pairs):
    return pairs


class _HorovodComm(Comm):
  def __init__(self, hvd, ranks=None):
    """`ranks`: an initialised `hvd.ProcessSet`; None is all."""
    self._hvd, self._ranks = hvd, ranks or hvd.global_process_set
    self.rank, self.size = self._ranks.rank(), self._ranks.size()
    self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
    self.elastic = is_elastic()

  def _sum(self, fp16=False) -> dict:
    # Sum, not Average: each rank's loss is already divided by the counts of the
    # global batch, so an average over ranks would be a mean of means.
    kinds = self._hvd.Compression
    kind = kinds.fp16 if fp16 else kinds.none
    return dict(op=self._hvd.Sum, compression=kind, process_set=self._ranks)

  def sum_gradients(self, pairs, groups, fp16=False):
    optimizer = self._hvd.DistributedOptimizer(
      _GradientSource(),
      name="DistributedLocalAccumulation",
      num_groups=min(groups, len(tf.trainable_variables())),
      **self._sum(fp16),
    )
    return optimizer.compute_gradients(pairs)

  def allreduce(self, tensor, name):
    return self._hvd.allreduce(tensor, name=name, **self._sum())

  def grouped_allreduce(self, tensors, name):
    if not tensors:
      return []
    return self._hvd.grouped_allreduce(tensors, name=name, **self._sum())

  def seconds_between(self, local, reduced):
    # A GPU's ops count as done when they have begun.
    if tf.config.list_physical_devices("GPU"):
      with tf.device("/cpu:0"):
        return tf.constant(np.nan, tf.float64)
    with tf.control_dependencies(local):
      began = monotonic_seconds()
    with tf.control_dependencies([began, *reduced]):
      return monotonic_seconds() - began

  def reducescatter(self, tensor, name, fp16=False):
    if tf.config.list_physical_devices("GPU"):
      return self._hvd.reducescatter(tensor, name=name, **self._sum(fp16))
    # Gloo's own takes more than twice as long as an all-reduce of the tensor.
    wire = tf.cast(tensor, tf.float16 if fp16 else tensor.dtype)
    parts = self._hvd.alltoall(wire, name=name, process_set=self._ranks)
    rows = tensor.shape[0] // self.size
    by_rank = tf.reshape(parts, [self.size, rows, *tensor.shape[1:]])
    return tf.reduce_sum(tf.cast(by_rank, tensor.dtype), axis=0)

  def allgather(self, tensor, name, rows=None):
    return self._hvd.allgather(tensor, name=name, process_set=self._ranks)

  def broadcast(self, tensor, name):
    root = self._ranks.ranks[0]
    return self._hvd.broadcast(tensor, root, name=name, process_set=self._ranks)

  def gather(self, values):
    values = np.asarray(values)
    # No GPU for this session on the host: another one holds it.
    config = tf.ConfigProto(device_count={"GPU": 0})
    with tf.Graph().as_default(), tf.Session(config=config) as session:
      fed = tf.placeholder(values.dtype, [1, *values.shape])  # of any size
      return session.run(self.allgather(fed, name=None), {fed: values[None]})


def init(num_threads: int = 0, tensor_parallel: int = 1) -> Comm:
  """Joins the world this process was started in, before any graph is built.

  `num_threads` are this rank's; 0 is the host's cores divided by its ranks.
  `tensor_parallel` consecutive ranks hold a model together.
  """
  return settled(_join(tensor_parallel), num_threads)


def settled(comm: Comm, num_threads: int) -> Comm:
  """`comm`, after limiting this process to its share of the host."""
  cores = len(os.sched_getaffinity(0))
  comm.num_threads = num_threads or max(1, cores // comm.local_size)
  config, threads = session_config(comm), tf.config.threading
  # Tracing a function that is to be compiled makes threads and GPU contexts for
  # the whole process, before a session, and knows no session's settings.
  threads.set_intra_op_parallelism_threads(config.intra_op_parallelism_threads)
  threads.set_inter_op_parallelism_threads(config.inter_op_parallelism_threads)
  gpus = tf.config.list_physical_devices("GPU")
  if gpus:
    number = int(config.gpu_options.visible_device_list)
    if number >= len(gpus):
      raise DistributedError(
        f"{comm.local_size} ranks on a host with {len(gpus)} GPUs: start at "
        "most as many, or hide the GPUs (CUDA_VISIBLE_DEVICES=)"
      )
    tf.config.set_visible_devices(gpus[number], "GPU")
    tf.config.experimental.set_memory_growth(gpus[number], True)
  # The first session makes the threads of this process as its own config says,
  # and later ones use the same. A collective's would make one for each core.
  config.device_count["GPU"] = 0  # the run's session makes it
  tf.Session(graph=tf.Graph(), config=config).close()
  return comm


class _Notices:
  came = False

  def on_hosts_updated(self, timestamp, update) -> None:
    self.came = True  # in a thread of Horovod


_NOTICES = _Notices()


def is_elastic() -> bool:
  """Whether ranks may come and go, by horovodrun's environment."""
  return os.environ.get("HOROVOD_ELASTIC") == "1"


def load_horovod():
  """Horovod's module; `DistributedError` if it cannot be imported."""
  tf.get_default_graph()  # TensorFlow's start is ours, not Horovod's
  try:
    import horovod.tensorflow as hvd
  except ImportError as e:
    raise DistributedError(
      f"started by horovodrun, but Horovod does not import: {e}. `make "
      "horovod` builds it."
    ) from e
  return hvd


def _join(tensor_parallel: int) -> Comm:
  _, size = processes.started()
  models_of(size, tensor_parallel)  # or an error
  if size == 1 and not is_elastic():
    return Comm()
  hvd = load_horovod()
  # Else what happens to be ready at the same time is summed in one buffer, and
  # a number's place there decides in which order the ranks' values are added.
  os.environ["HOROVOD_DISABLE_GROUP_FUSION"] = "1"
  if not tf.config.list_physical_devices("GPU"):
    # How often (ms) ranks ask each other what is ready, on the cores that
    # compute: Horovod's 1 took 8 to 15% of an update. But slices wait for each
    # other several times in each layer.
    cycle = "5" if tensor_parallel == 1 else "1"
    os.environ.setdefault("HOROVOD_CYCLE_TIME", cycle)
  else:
    # Else a thread waits on the host for every group of gradients.
    os.environ.setdefault("HOROVOD_ENABLE_ASYNC_COMPLETION", "1")
  if tensor_parallel > 1:
    return _init_sliced(hvd, size, tensor_parallel)
  _init(hvd)
  if is_elastic():
    from horovod.common import elastic

    elastic.notification_manager.init()
    elastic.notification_manager.register_listener(_NOTICES)
  return _HorovodComm(hvd)


def _init_sliced(hvd, size: int, tensor_parallel: int) -> Comm:
  models = np.arange(size).reshape(-1, tensor_parallel)
  # Horovod refuses a set of all ranks, and one rank alone needs no Horovod.
  sets = {}
  for ranks in (*models, *models.T):
    if 1 < len(ranks) < size:
      sets[tuple(ranks)] = hvd.ProcessSet(ranks.tolist())
  _init(hvd, sets.values())

  def comm_of(ranks):
    alone = len(ranks) == 1
    return Comm() if alone else _HorovodComm(hvd, sets.get(tuple(ranks)))

  world = _HorovodComm(hvd)
  row, column = divmod(world.rank, tensor_parallel)
  world._tensor_parallel = comm_of(models[row])
  world._data_parallel = comm_of(models[:, column])
  return world


def _init(hvd, process_sets=()) -> None:
  try:
    with leaving_in_c():
      hvd.init(process_sets=list(process_sets))
  except ValueError as e:
    raise DistributedError(
      "this rank is not in the run: the ranks did not find each other, or its "
      "host was taken out. Horovod's line above says which"
    ) from e


def rejoin(comm: Comm) -> Comm:
  """Leaves an elastic world; returns when all ranks of the next are there."""
  hvd = load_horovod()
  hvd.shutdown()
  _NOTICES.came = False  # the next world knows all notices up to here
  _init(hvd)
  new = _HorovodComm(hvd)
  new.num_threads = comm.num_threads  # TensorFlow's threads exist already
  return new


def rank_lost(error: Exception) -> RankLost | None:
  """The `RankLost` that an error is, or means as a collective's; or None."""
  if isinstance(error, RankLost):
    return error
  message = getattr(error, "message", None) or str(error)
  # A traceback names files, perhaps in a folder of that name.
  is_named = "orovod" in re.sub(r'File "[^"]*"', "", message)
  if not is_named or isinstance(error, UserError):
    return None
  if "ncclCommInitRank" in message:
    return RankLost(
      "NCCL does not connect the ranks' GPUs: do two ranks use one "
      "(CUDA_VISIBLE_DEVICES)? NCCL_DEBUG=WARN says more"
    )
  return RankLost(
    "another rank stopped, hangs or cannot be reached, so this one cannot "
    "continue; the last line of that rank, or of horovodrun, says why"
  )


def session_config(comm: Comm) -> tf.ConfigProto:
  """One GPU and this rank's share of the host's cores."""
  # On a CPU one op at a time has all threads: two would share them and wait for
  # each other's caches. With several ranks (an elastic world of one may get
  # more) a second thread hands gradients to Horovod while the first is busy.
  at_once = 1 if comm.size == 1 and not comm.elastic else 2
  gpus = tf.config.list_physical_devices("GPU")
  if gpus:
    at_once = max(2, comm.num_threads)
  # A launcher may show each rank its own GPU only (Slurm's --gpus-per-task).
  shown = os.environ.get("CUDA_VISIBLE_DEVICES")
  own_gpu = 0 if len(gpus) == 1 and shown else comm.local_rank
  config = tf.ConfigProto(
    intra_op_parallelism_threads=comm.num_threads,
    inter_op_parallelism_threads=at_once,
  )
  config.gpu_options.visible_device_list = str(own_gpu)
  config.gpu_options.allow_growth = True
  # Grappler takes seconds of each start, and updates are as fast without.
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  return config
