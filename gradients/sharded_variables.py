"""What checkpoints have of variables that are sliced over ranks: the whole."""

from common.tensorflow_v1 import tf
from gradients import optimizers
from model.tensor_parallel import SLICED, Slices
from training import checkpointing


def share_out(comm) -> None:
  """Tells checkpoints of all sliced variables and their slots in the graph.

  Call it when the graph is complete.

  Args:
    comm: a `distributed.Comm` of all ranks.
  """
  slices = Slices(comm.slices)
  variables = {v.op.name: v for v in tf.global_variables()}
  for sliced in tf.get_collection(SLICED):
    name = sliced.variable.op.name
    for part in (name, *(f"{name}/{slot}" for slot in optimizers.SLOTS)):
      if part in variables:
        tf.add_to_collection(
          checkpointing.SHARED_OUT,
          _shared_out(variables[part], sliced, slices, comm),
        )


def _shared_out(part, sliced, slices, comm) -> checkpointing.SharedOut:
  """Of `part`, which is sliced as `sliced` is."""
  name = part.op.name
  whole = slices.whole(tf.convert_to_tensor(part), sliced, f"whole/{name}")
  fed = tf.placeholder(tf.float32, sliced.shape)
  every = comm.broadcast(fed, f"load/{name}")
  return checkpointing.SharedOut(
    part=part,
    whole={name: whole},
    fed={name: fed},
    load=part.assign(slices.own(every, sliced.axis), read_value=False),
  )
