"""Times all-reduces of Horovod over ranks and prints one JSON line a case.

  horovodrun -np 2 python -m benchmarks.network.allreduce
  ... --megabytes=420 --tensors=200

Each case sends `megabytes` of float32 in so many tensors: each on its own, in
groups, and as float16. Bus bandwidth is what the wire of each rank carried, 2
(n - 1) / n of the bytes of a ring over n ranks, per second.
"""

import functools

from benchmarks import measuring
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


def main(_) -> None:
  comm = distributed.init()
  size = int(FLAGS.megabytes * 2**20 / 4 / FLAGS.tensors)
  variables = [
    tf.get_variable(f"v{i}", initializer=tf.ones([size]))
    for i in range(FLAGS.tensors)
  ]
  session = tf.Session(config=distributed.session_config(comm))
  runs = {}
  for name, case in CASES.items():
    with tf.name_scope(name.replace(", ", "_").replace(" ", "_")):
      pairs = [(v * 2.0, v) for v in variables]
      reduced = comm.sum_gradients(pairs, **case)
      # Fetched one by one: a group of them would be optimised away.
      ops = [gradient.op for gradient, _ in reduced]
    runs[name] = functools.partial(session.run, ops)
  session.run(tf.global_variables_initializer())
  for run in runs.values():
    run()  # opens connections and buffers
  seconds = measuring.in_turns(
    {
      name: functools.partial(measuring.seconds_of, run)
      for name, run in runs.items()
    },
    FLAGS.repeats,
  )
  moved = 2 * (comm.size - 1) / comm.size * size * 4 * FLAGS.tensors
  for name in runs if comm.is_root else ():
    median = measuring.median(seconds[name], 5)
    measuring.show(
      {
        "case": name,
        "ranks": comm.size,
        "megabytes": FLAGS.megabytes,
        "tensors": FLAGS.tensors,
        "seconds_median": median,
        "bus_gigabytes_per_second": round(moved / median / 1e9, 3),
      }
    )


if __name__ == "__main__":
  tf.flags.DEFINE_float("megabytes", 64.0, "Of all tensors together.")
  tf.flags.DEFINE_integer("tensors", 50, "How many.", lower_bound=4)
  tf.flags.DEFINE_integer("repeats", 10, "Of each case.", lower_bound=1)
  train_loop.run_main(main)
