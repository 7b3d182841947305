"""What saving holds up, and how long it takes to go on from a checkpoint.

  python -m benchmarks.checkpoint --bert_config_file=bert_base.json

Trains on fake records, saving every twentieth update, and goes on from there by
the same command. One JSON line, all in seconds:

  stall      the longest for which a save held the training loop
  update     an update, median: while nothing is written, and the two after a
             save began, while it is written in the background
  saving     what all updates between two saves took beyond that median
  resume     from the start of the process to the first update: imports, graph,
             checksums, reading, all but compiling
"""

import os
import tempfile
import time

from absl import flags

from benchmarks import fake_records, measuring
from checkpoints import checkpoint_files, metrics, run_folder
from common import errors, json_files
from training.next_steps import python

FLAGS = flags.FLAGS
SAVE_EVERY, UPDATES = 20, 60
LENGTH, PREDICTIONS, RECORDS = 128, 20, 64


def train(folder: str, updates: int) -> tuple[dict, float]:
  """Trains the run in `folder` up to an update.

  Returns:
    training_results.json; and seconds of the process before the first update.
  """
  command = python(
    "run_pretraining.py", do_train=True, output_dir=f"{folder}/run",
    bert_config_file=FLAGS.bert_config_file, precision=FLAGS.precision,
    input_file=f"{folder}/records.tfrecord", num_train_steps=updates,
    train_batch_size=FLAGS.train_batch_size,
    global_batch_size=FLAGS.train_batch_size, num_warmup_steps=0,
    save_checkpoints_steps=SAVE_EVERY, keep_checkpoints=1,
    lr_schedule="constant", log_every_steps=1,
  )  # fmt: skip
  began = time.monotonic()
  measuring.run(command)
  seconds = time.monotonic() - began
  results = json_files.read(f"{folder}/run/{run_folder.TRAINING_RESULTS_FILE}")
  return results, seconds - results["seconds"]


def measure(folder: str) -> dict:
  """The JSON line."""
  vocab_size = json_files.read(FLAGS.bert_config_file)["vocab_size"]
  sizes = RECORDS, LENGTH, PREDICTIONS, vocab_size
  fake_records.write(f"{folder}/records.tfrecord", *sizes)
  results, fresh = train(folder, UPDATES)
  reports = metrics.read_jsonl(f"{folder}/run/{metrics.METRICS_FILE}")
  seconds = {
    report["global_step"]: FLAGS.train_batch_size
    / report["examples_per_second"]
    for report in reports
  }
  after = [seconds[n] for n in seconds if n > 2 and n % SAVE_EVERY in (1, 2)]
  usual = measuring.median(seconds[n] for n in range(3, SAVE_EVERY + 1))
  between = [seconds[SAVE_EVERY + n] for n in range(1, SAVE_EVERY + 1)]
  resumed = [
    train(folder, UPDATES + turn)[1] for turn in range(1, FLAGS.rounds + 1)
  ]
  newest = f"{checkpoint_files.PREFIX}-{UPDATES + FLAGS.rounds}"
  data = f"{folder}/run/{newest}.data-00000-of-00001"
  return {
    "model": os.path.basename(FLAGS.bert_config_file),
    "precision": FLAGS.precision,
    "batch": FLAGS.train_batch_size,
    "checkpoint_mb": round(os.path.getsize(data) / 1e6),
    "saves": results["saves"],
    "stall": round(results["longest_save_stall_seconds"], 3),
    "update": round(usual, 3),
    "update_while_writing": measuring.median(after, 3),
    "saving": round(sum(between) - usual * SAVE_EVERY, 2),
    "fresh_start": round(fresh, 1),
    "resume": [round(r, 1) for r in resumed],
  }


def main(_) -> None:
  with tempfile.TemporaryDirectory() as folder:
    measuring.show(measure(folder))


if __name__ == "__main__":
  flags.DEFINE_string("bert_config_file", None, "The model.", required=True)
  flags.DEFINE_integer("train_batch_size", 2, "Examples of an update.")
  flags.DEFINE_string("precision", "fp32", "As run_pretraining.py's.")
  flags.DEFINE_integer("rounds", 3, "How often it goes on.", lower_bound=1)
  errors.run_main(main)
