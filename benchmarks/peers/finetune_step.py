"""Times the updates of a fine-tuning; compare_finetuning.py runs it.

  python -m benchmarks.peers.finetune_step classifier --train_file=... (flags of
    run_classifier.py; or squad or ner, and those of their scripts)

Answers each line on stdin with a JSON line: the seconds of --updates_per_round
updates and the examples in them. Batches come from the shuffled training set,
as in the run.
"""

import sys
import time

from absl import flags

from benchmarks.peers import turns
from checkpoints import run_folder
from common import settings
from common.tensorflow_v1 import tf
from finetuning import classification, finetune, ner, squad
from finetuning.task import FinetuningTask
from gradients import distributed
from training import train_loop, training_run

_KINDS = {
  "classifier": (
    classification.ClassifierConfig,
    classification.Classification,
  ),
  "squad": (squad.SquadConfig, squad.Squad),
  "ner": (ner.NerConfig, ner.Ner),
}
_WARM_UPDATES = 3


def serve(task: FinetuningTask, updates_per_round: int) -> None:
  """Trains so many updates for each line on stdin."""
  comm = distributed.init(task.config.num_threads)
  with training_run.graph(task.config):
    training = finetune.training(task, task.config, comm)
    saver = tf.train.Saver(
      [v for v in tf.trainable_variables() if v.op.name.startswith("bert/")]
    )
    session = tf.Session(config=training_run.session_config(task.config, comm))
    session.run(
      [tf.global_variables_initializer(), tf.local_variables_initializer()]
    )
    saver.restore(session, task.config.init_checkpoint)
    training.batches.start(session, 0)
  fetches = {"update": training.ops.update, "sums": training.ops.sums}

  def updates(count: int) -> dict:
    seconds, examples = [], []
    for _ in range(count):
      began = time.perf_counter()
      for _ in range(training.plan.accumulation - 1):
        session.run(training.ops.accumulate)
      sums = session.run(fetches)["sums"]
      seconds.append(time.perf_counter() - began)
      examples.append(float(sums["examples"]))
    return {"seconds": seconds, "examples": examples}

  updates(_WARM_UPDATES)
  versions = run_folder.versions()
  about = {name: versions[name] for name in ("tensorflow", "git")}
  turns.serve(lambda: updates(updates_per_round), **about)


def main(argv: list) -> None:
  config, task = _KINDS[argv[1]]
  serve(task(config.from_flags(flags.FLAGS)), flags.FLAGS.updates_per_round)


if __name__ == "__main__":
  settings.define_flags(_KINDS[sys.argv[1]][0])
  flags.DEFINE_integer("updates_per_round", 5, "Updates for each line.")
  train_loop.run_main(main, 1)
