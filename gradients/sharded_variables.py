"""Variables of which each rank holds a part: checkpoints have them whole."""

from typing import NamedTuple

from common.tensorflow_v1 import tf
from gradients import moments
from model.tensor_parallel import SLICED, Slices

# The graph's collection of `ShardedVariable`s.
SHARDED_VARIABLES = "sharded_variables"


class ShardedVariable(NamedTuple):
  """A rank's part of one or more tensors of a checkpoint.

  All ranks run `whole` or `load` together.
  """

  part: tf.Variable
  whole: dict  # name -> tensor as checkpoints have it, of all ranks' parts
  fed: dict  # name -> placeholder of such a tensor; rank 0's values count
  load: tf.Operation  # assigns to `part` what it has of the fed tensors


def add_sliced(comm) -> None:
  """Makes all variables sliced by tensor parallelism, and their slots, known.

  Call it when the graph is complete, with a `distributed.Comm` of all ranks.
  """
  slices = Slices(comm.tensor_parallel)
  variables = {v.op.name: v for v in tf.global_variables()}
  for sliced in tf.get_collection(SLICED):
    name = sliced.variable.op.name
    for part in (name, *(f"{name}/{slot}" for slot in moments.SLOTS)):
      if part in variables:
        tf.add_to_collection(
          SHARDED_VARIABLES, _sharded(variables[part], sliced, slices, comm)
        )


def _sharded(part, sliced, slices, comm) -> ShardedVariable:
  """Of `part`, which is cut as `sliced` is."""
  name = part.op.name
  whole = slices.whole(tf.convert_to_tensor(part), sliced, f"whole/{name}")
  fed = tf.placeholder(tf.float32, sliced.shape)
  every = comm.broadcast(fed, f"load/{name}")
  return ShardedVariable(
    part=part,
    whole={name: whole},
    fed={name: fed},
    load=part.assign(slices.own(every, sliced.axis), read_value=False),
  )
