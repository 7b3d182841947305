"""Times all-reduces of Horovod over ranks and prints one JSON line a case.

  horovodrun -np 2 python -m benchmarks.network.allreduce
  ... --megabytes=420 --tensors=200

Each case sends `megabytes` of float32 in so many tensors: each on its own, in
groups, and as float16. Bus bandwidth is what the wire of each rank carried, 2
(n - 1) / n of the bytes of a ring over n ranks, per second.
"""

import json
import statistics
import time

from common.errors import UserError
from common.tensorflow_v1 import tf
from gradients import distributed
from training import train_loop

FLAGS = tf.flags.FLAGS

CASES = {
  "each": {"groups": 0},
  "four groups": {"groups": 4},
  "one group": {"groups": 1},
  "one group, fp16": {"groups": 1, "fp16": True},
}


def define_flags() -> None:
  flags = tf.flags
  flags.DEFINE_float("megabytes", 64.0, "Of all tensors together.")
  flags.DEFINE_integer("tensors", 50, "How many.", lower_bound=4)
  flags.DEFINE_integer("repeats", 10, "Of each case, in turns.", lower_bound=1)


class _Given(tf.train.Optimizer):
  """An optimizer whose gradients are given."""

  def __init__(self):
    super().__init__(use_locking=False, name="Given")

  def compute_gradients(self, pairs):
    return pairs


def main(_) -> None:
  comm = distributed.init()
  if comm.size == 1:
    raise UserError("one rank reduces nothing: start it by horovodrun -np N")
  size = int(FLAGS.megabytes * 2**20 / 4 / FLAGS.tensors)
  ops = {}
  variables = [
    tf.get_variable(f"v{i}", initializer=tf.ones([size]))
    for i in range(FLAGS.tensors)
  ]
  for name, case in CASES.items():
    with tf.name_scope(name.replace(", ", "_").replace(" ", "_")):
      pairs = [(v * 2.0, v) for v in variables]
      optimizer = comm.distributed_optimizer(_Given(), **case)
      reduced = optimizer.compute_gradients(pairs)
      # Fetched one by one: a group of them would be optimised away.
      ops[name] = [gradient.op for gradient, _ in reduced]
  seconds = {name: [] for name in ops}
  with tf.Session(config=distributed.session_config(comm)) as session:
    session.run(tf.global_variables_initializer())
    for repeat in range(FLAGS.repeats + 1):
      for name, op in ops.items():
        began = time.perf_counter()
        session.run(op)
        if repeat:  # the first opens connections and buffers
          seconds[name].append(time.perf_counter() - began)
  moved = 2 * (comm.size - 1) / comm.size * size * 4 * FLAGS.tensors
  for name in ops if comm.is_root else ():
    median = statistics.median(seconds[name])
    result = {
      "case": name,
      "ranks": comm.size,
      "megabytes": FLAGS.megabytes,
      "tensors": FLAGS.tensors,
      "seconds_median": round(median, 5),
      "bus_gigabytes_per_second": round(moved / median / 1e9, 3),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
  define_flags()
  train_loop.run_main(main)
