"""Variables of which each rank holds a part: checkpoints have them whole."""

import collections
from collections.abc import Callable
from typing import NamedTuple

from common.tensorflow_v1 import tf
from gradients import all_reduce, moments
from model.tensor_parallel import SLICED, Slices

# The graph's collection of `ShardedVariable`s.
SHARDED_VARIABLES = "sharded_variables"
# That of variables of which only the sum over ranks matters.
SUMMED = "summed_variables"


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


def add_sliced(comm) -> None:
  """Adds a complete graph's sliced variables and their optimizer's slots."""
  slots: dict[str, list] = collections.defaultdict(list)  # by weight's name
  for slot in tf.get_collection(moments.SLOTS):
    slots[slot.op.name.rpartition("/")[0]].append(slot)
  for sliced in tf.get_collection(SLICED):
    for part in (sliced.variable, *slots[sliced.variable.op.name]):
      own = lambda tensors: tensors[0]
      add(part, {part.op.name: tf.convert_to_tensor(part)}, [sliced], own, comm)


def broadcast_op(variables, comm) -> tf.Operation:
  """Gives all ranks rank 0's `variables`; of a sum rank 0 keeps all."""
  summed = [] if comm.is_root else tf.get_collection(SUMMED)
  pairs = []
  for variable in variables if comm.size > 1 else ():
    name = f"broadcast/{variable.op.name}"
    pairs.append((variable, comm.broadcast(variable, name)))
  with tf.control_dependencies(moments.assign_all(pairs)):
    return all_reduce.clear(summed)


def add_up(comm) -> list[tf.Operation]:
  """Ops that give rank 0 the sums over ranks, and clear the other ranks' part.

  Run all that is returned: TensorFlow leaves out a sum that nothing reads.
  """
  # So rank 0 saves all of them, and training continues as a resumed run would.
  done: list[tf.Operation] = []
  ran: list[tf.Operation] = []
  for summed in tf.get_collection(SUMMED) if comm.size > 1 else ():
    with tf.control_dependencies(done):  # one at a time, to save memory
      value = tf.convert_to_tensor(summed)
    total = comm.allreduce(value, f"sum_of/{summed.op.name}")
    with tf.control_dependencies([total]):
      kept = total if comm.is_root else tf.zeros_like(total)
      done = [summed.assign(kept, read_value=False)]
    ran += [total.op, *done]
  return ran
