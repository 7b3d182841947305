"""The ranks: the only module that imports Horovod.

`init()` returns a `Comm`. Started by `horovodrun` it spans all ranks; otherwise
it is a world of one whose operations change nothing, so callers never ask
whether Horovod is there.
"""

import hashlib
import os
from collections.abc import Sequence

import numpy as np

from errors import UserError
from tensorflow_v1 import tf


class DistributedError(UserError):
  """Ranks that disagree, or a rank that went away."""


class Comm:
  """One rank's view of the world: who it is, and collectives over all ranks.

  Attributes:
    rank: this process' number, 0 to size - 1.
    size: number of ranks.
    local_rank: number among the ranks on this host; also its GPU.
    local_size: number of ranks on this host.
  """

  rank = 0
  size = 1
  local_rank = 0
  local_size = 1

  @property
  def is_root(self) -> bool:
    """Whether this is rank 0, which alone logs and saves."""
    return self.rank == 0

  def distributed_optimizer(self, optimizer: tf.train.Optimizer):
    """`optimizer` whose `compute_gradients` sums each gradient over ranks."""
    return optimizer

  def allreduce(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """The sum of `tensor` over ranks, in the graph. `name` is unique."""
    del name
    return tensor

  def broadcast_op(self, variables: Sequence[tf.Variable]) -> tf.Operation:
    """An op that gives all ranks rank 0's values of `variables`."""
    del variables
    return tf.no_op(name="broadcast")

  def gather(self, values: np.ndarray) -> np.ndarray:
    """Every rank's `values` [n], as [size, n], at once and on all ranks."""
    return np.asarray(values)[None]

  def check_equal(self, what: str, value: str) -> None:
    """Raises `DistributedError` naming the ranks whose `value` is not rank 0's.

    Call it on all ranks: ranks that train on different data or flags would
    otherwise hang or, worse, train something that nobody asked for.
    """
    digest = hashlib.sha256(value.encode()).digest()[:7]
    mine = np.array([int.from_bytes(digest, "little")], np.int64)
    everyone = self.gather(mine)[:, 0]
    odd = [r for r in range(self.size) if everyone[r] != everyone[0]]
    if odd:
      raise DistributedError(
        f"{what} of rank {odd} differs from rank 0's; this is rank "
        f"{self.rank} with: {value}. Give all hosts the same files and flags."
      )


class _HorovodComm(Comm):
  """A world of several ranks over Horovod."""

  def __init__(self, hvd):
    self._hvd = hvd
    self.rank, self.size = hvd.rank(), hvd.size()
    self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()

  def distributed_optimizer(self, optimizer):
    # Sum, not Average: each rank's loss is already divided by the counts of the
    # global batch (SPEC: the mean over the global batch, not a mean of means).
    return self._hvd.DistributedOptimizer(optimizer, op=self._hvd.Sum)

  def allreduce(self, tensor, name):
    return self._hvd.allreduce(tensor, op=self._hvd.Sum, name=name)

  def broadcast_op(self, variables):
    return tf.group(
      *[
        tf.assign(v, self._hvd.broadcast(v, 0, name="broadcast/" + v.op.name))
        for v in variables
      ],
      name="broadcast",
    )

  def gather(self, values):
    values = np.asarray(values)
    with tf.Graph().as_default(), tf.Session(config=_small_session()) as sess:
      return sess.run(self._hvd.allgather(tf.constant(values[None])))


def _small_session() -> tf.ConfigProto:
  """For a collective on the host: no GPU, which another session holds."""
  return tf.ConfigProto(device_count={"GPU": 0})


def init() -> Comm:
  """Joins the world this process was started in.

  Raises:
    DistributedError: started by horovodrun, but Horovod cannot be imported.
  """
  if int(os.environ.get("HOROVOD_SIZE", "1")) == 1:
    return Comm()
  try:
    import horovod.tensorflow as hvd
  except ImportError as e:
    raise DistributedError(
      f"started by horovodrun, but Horovod does not import: {e}. `make env` "
      "builds it."
    ) from e
  hvd.init()
  return _HorovodComm(hvd)


def session_config(comm: Comm, num_threads: int = 0) -> tf.ConfigProto:
  """One GPU and a fair share of the host's cores for this rank.

  Args:
    comm: this rank.
    num_threads: threads for one op; 0 divides the host's cores by its ranks.
  """
  cores = len(os.sched_getaffinity(0))
  num_threads = num_threads or max(1, cores // comm.local_size)
  # On a CPU one op at a time has all threads: two at once only share them, and
  # wait for each other's caches.
  gpu = tf.config.list_physical_devices("GPU")
  config = tf.ConfigProto(
    intra_op_parallelism_threads=num_threads,
    inter_op_parallelism_threads=num_threads if gpu else 1,
  )
  config.gpu_options.visible_device_list = str(comm.local_rank)
  config.gpu_options.allow_growth = True
  return config
