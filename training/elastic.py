"""Goes on with the ranks that are left, and takes new ones in.

Under `horovodrun --min-np` ranks may come and go. A world is a fixed set of
ranks: all of a run (graph, plan, order of records) is made for one world, and
made anew for the next one, which begins with the state that the last one
committed. Horovod's own elastic state for sessions does not work on TensorFlow
2; of Horovod this uses its driver and its notices only.
"""

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

from common import errors
from common.tensorflow_v1 import tf
from gradients import distributed
from training import checkpointing, train_loop, training_hooks


def run(job: Callable, comm) -> Any:
  """Returns what `job` returns in the first world that it finishes in.

  Args:
    job: (comm, commit, signals) -> result; begins where `commit` is.
    comm: the first world, elastic.

  Raises:
    SystemExit: this rank was asked to leave.
    DistributedError: there is no next world for this rank.
  """
  commit = checkpointing.Commit()
  with training_hooks.StopSignals() as signals:
    while True:
      began = time.monotonic()
      try:
        return job(comm, commit, signals)
      except distributed.WorldChange as change:
        if signals.received:
          _say(comm, f"{signals.received}: leaves the run, the others go on")
          sys.exit(training_hooks.STOPPED_STATUS)
        why = str(change)
      except distributed.RankLost:
        why = "a rank was lost"
      except errors.UserError:
        raise
      except (tf.errors.OpError, ValueError) as e:  # Horovod raises both
        if distributed.rank_lost(e) is None:
          raise
        why = "a rank was lost"
      back = (
        f"back to update {commit.step:,}"
        if commit.values is not None
        else "back to the start"
      )
      _say(
        comm,
        f"{why} after {time.monotonic() - began:.0f} s of {comm.size} ranks; "
        f"{back}, waiting for the ranks of the next world",
      )
      gc.collect()  # the last world's graph refers to itself
      comm = distributed.rejoin(comm)
      train_loop.say(comm, f"going on with {comm.size} ranks")


def _say(comm, line: str) -> None:
  training_hooks.tell(f"rank {comm.rank}: {line}")
