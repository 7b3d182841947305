"""Variables of which each rank holds a part: checkpoints have them whole."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.tensorflow_v1 import tf
from model.tensor_parallel import SLICED, Slices

# The graph's collection of `ShardedVariable`s.
SHARDED_VARIABLES = "sharded_variables"


class ShardedVariable(NamedTuple):
  """Part of checkpoints' tensors; all ranks run `whole` or `load` together."""

  part: tf.Variable
  whole: dict  # name -> tensor as checkpoints have it, made of all ranks' parts
  fed: dict  # name -> placeholder of such a tensor; rank 0's values count
  load: tf.Operation  # assigns to `part` what it has of the fed tensors


def add(part, tensors: dict, cuts: list, own: Callable, comm) -> None:
  """Makes the variable `part` a `ShardedVariable`.

  `tensors` are this slice's, by name, made of the parts of its ranks; `cuts`
  are their `SlicedVariable`s, or None where not sliced. `own` makes the value
  of `part` from a list of such tensors. `comm` has all ranks.
  """
  slices = Slices(comm.tensor_parallel)
  whole, fed, broadcasts, read = {}, {}, [], []
  for (name, tensor), cut in zip(tensors.items(), cuts, strict=True):
    whole[name] = slices.whole(tensor, cut, f"whole/{name}") if cut else tensor
    fed[name] = tf.placeholder(tf.float32, whole[name].shape)
    value = comm.broadcast(fed[name], f"load/{name}")
    broadcasts.append(value)
    read.append(slices.own(value, cut.axis) if cut else value)
  # All ranks take part in all broadcasts, also in those that `own` leaves out.
  with tf.control_dependencies(broadcasts):
    load = part.assign(own(read), read_value=False)
  sharded = ShardedVariable(part, whole, fed, load)
  tf.add_to_collection(SHARDED_VARIABLES, sharded)


def add_sliced(comm, slots: Sequence[str]) -> None:
  """Adds a complete graph's sliced variables and their optimizer `slots`."""
  variables = {v.op.name: v for v in tf.global_variables()}
  for sliced in tf.get_collection(SLICED):
    name = sliced.variable.op.name
    for part in (name, *(f"{name}/{slot}" for slot in slots)):
      if part in variables:
        value = tf.convert_to_tensor(variables[part])
        own = lambda tensors: tensors[0]
        add(variables[part], {part: value}, [sliced], own, comm)
