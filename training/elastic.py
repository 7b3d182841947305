"""Continues with the ranks that are left, and takes new ones in.

Under `horovodrun --min-np` ranks may come and go. A world is a fixed set of
ranks: all of a run (graph, plan, order of records) is made for one world, and
made again for the next one, which begins with the state that the last one
committed. Horovod's own elastic state for sessions does not work on TensorFlow
2; of Horovod this uses its driver and its notices only.
"""

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

from common import errors
from common.console import say, tell
from common.tensorflow_v1 import tf
from gradients import distributed
from training.signals import STOPPED_STATUS, StopSignals
from training.snapshot import Snapshot


def run(job: Callable, comm) -> Any:
  """Returns what `job` returns in the first world that it finishes in.

  Args:
    job: (comm, snapshot, signals) -> result; begins where `snapshot` is.
    comm: the first world, elastic.

  Raises:
    SystemExit: this rank was asked to leave.
    DistributedError: there is no next world for this rank.
  """
  snapshot = Snapshot()
  with StopSignals() as signals:
    while True:
      began = time.monotonic()
      try:
        return job(comm, snapshot, signals)
      except distributed.WorldChange as change:
        if signals.received:
          tell(
            f"rank {comm.rank}: {signals.received}: leaves the run, the others "
            "continue"
          )
          sys.exit(STOPPED_STATUS)
        why = str(change)
      except distributed.RankLost:
        why = "a rank was lost"
      except errors.UserError:
        raise
      except (tf.errors.OpError, ValueError) as e:  # Horovod raises both
        if distributed.rank_lost(e) is None:
          raise
        why = "a rank was lost"
      back = "the start"
      if snapshot.values is not None:
        back = f"update {snapshot.step:,}"
      tell(
        f"rank {comm.rank}: {why} after {time.monotonic() - began:.0f} s of "
        f"{comm.size} ranks; back to {back}, waiting for the ranks of the next "
        "world"
      )
      gc.collect()  # the last world's graph refers to itself
      comm = distributed.rejoin(comm)
      say(comm, f"resuming with {comm.size} ranks")
