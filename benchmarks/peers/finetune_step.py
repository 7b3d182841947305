"""Times the updates of a fine-tuning; compare_finetuning.py runs it.

  python -m benchmarks.peers.finetune_step classifier --train_file=... (flags of
    run_classifier.py; or squad, and those of run_squad.py)

Answers each line on stdin with a JSON line: the seconds of --updates_per_round
updates and the examples in them. Batches come from the shuffled training set,
as in the run.
"""

import json
import sys
import time

import numpy as np
from absl import flags

from checkpoints import run_folder
from common import settings
from common.tensorflow_v1 import tf
from finetuning import classification, finetune, squad
from gradients import distributed
from training import train_loop, training_run

_KINDS = {
  "classifier": (
    classification.ClassifierConfig,
    classification.Classification,
  ),
  "squad": (squad.SquadConfig, squad.Squad),
}
_WARM_UPDATES = 3


def serve(task: finetune.FinetuningTask, updates_per_round: int) -> None:
  """Trains so many updates for each line on stdin."""
  comm = distributed.init(task.config.num_threads)
  with training_run.graph(task.config):
    training = finetune.training(task, task.config, comm)
    saver = tf.train.Saver(
      [v for v in tf.trainable_variables() if v.op.name.startswith("bert/")]
    )
    config = training_run.session_config(task.config, comm)
    with tf.Session(config=config) as session:
      session.run(
        [tf.global_variables_initializer(), tf.local_variables_initializer()]
      )
      saver.restore(session, task.config.init_checkpoint)
      training.batches.start(session, 0)
      fetches = {"update": training.ops.update, "sums": training.ops.sums}

      def update() -> tuple[float, float]:
        began = time.perf_counter()
        for _ in range(training.plan.accumulation - 1):
          session.run(training.ops.accumulate)
        sums = session.run(fetches)["sums"]
        return time.perf_counter() - began, float(sums[training.examples])

      for _ in range(_WARM_UPDATES):
        update()
      versions = run_folder.versions()
      print(json.dumps({"ready": True, **versions}), flush=True)
      for _ in sys.stdin:
        done = np.array([update() for _ in range(updates_per_round)])
        answer = {
          "seconds": done[:, 0].tolist(),
          "examples": done[:, 1].tolist(),
        }
        print(json.dumps(answer), flush=True)


def main(argv: list) -> None:
  config, task = _KINDS[argv[1]]
  serve(task(config.from_flags(flags.FLAGS)), flags.FLAGS.updates_per_round)


if __name__ == "__main__":
  if len(sys.argv) < 2 or sys.argv[1] not in _KINDS:
    sys.exit(f"usage: {__doc__}")
  settings.define_flags(_KINDS[sys.argv[1]][0])
  flags.DEFINE_integer("updates_per_round", 10, "Updates for each line.")
  train_loop.run_main(main, arguments=1)
