"""Continues with the remaining ranks, and with new ones.

Under `horovodrun --min-np` ranks may come and go. A world is a fixed set of
ranks: each has its own graph, plan and order of records, and begins with the
state that the previous one committed. This uses Horovod's elastic driver and
notices; Horovod's elastic state for sessions does not work on TensorFlow 2.
"""

import gc
import sys
import time
from collections.abc import Callable

from checkpoints.snapshot import Snapshot
from common import errors
from common.console import say, tell
from common.tensorflow_v1 import tf
from gradients import distributed
from training.signals import StopSignals


def run(job: Callable[..., dict], comm) -> dict:
  """The result of `job(comm, snapshot, signals)` in the last world."""
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
          sys.exit(errors.STOPPED_STATUS)
        why = str(change)
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
