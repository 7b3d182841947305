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

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time

from absl import flags

from benchmarks import fake_records
from checkpoints import checkpoint_files, metrics, run_folder
from common import errors, json_files
from training.next_steps import python

FLAGS = flags.FLAGS
SAVE_EVERY, UPDATES = 20, 60
LENGTH, PREDICTIONS, RECORDS = 128, 20, 64


def define_flags() -> None:
  flags.DEFINE_string("bert_config_file", None, "The model.", required=True)
  flags.DEFINE_integer("train_batch_size", 2, "Examples of an update.")
  flags.DEFINE_string("precision", "fp32", "As run_pretraining.py's.")
  flags.DEFINE_integer("rounds", 3, "How often it goes on.", lower_bound=1)


class Run:
  """One run folder, trained on by the same command."""

  def __init__(self, folder: str):
    self.output = os.path.join(folder, "run")
    self._command = python(
      "run_pretraining.py", do_train=True,
      bert_config_file=FLAGS.bert_config_file, output_dir=self.output,
      input_file=f"{folder}/records.tfrecord", precision=FLAGS.precision,
      train_batch_size=FLAGS.train_batch_size,
      global_batch_size=FLAGS.train_batch_size, num_warmup_steps=0,
      save_checkpoints_steps=SAVE_EVERY, keep_checkpoints=1,
      lr_schedule="constant", log_every_steps=1,
    )  # fmt: skip

  def train(self, updates: int) -> tuple[dict, float]:
    """Trains up to an update.

    Returns:
      training_results.json; and seconds of the process before the first update.
    """
    began = time.monotonic()
    process = subprocess.run(
      [*self._command, f"--num_train_steps={updates}"],
      stderr=subprocess.PIPE,
      text=True,
    )
    seconds = time.monotonic() - began
    if process.returncode:
      raise errors.UserError(f"training failed:\n{process.stderr[-2000:]}")
    path = os.path.join(self.output, run_folder.TRAINING_RESULTS_FILE)
    results = json_files.read(path)
    return results, seconds - results["seconds"]

  def update_seconds(self) -> dict[int, float]:
    """Seconds of each update."""
    path = os.path.join(self.output, metrics.METRICS_FILE)
    return {
      r["global_step"]: FLAGS.train_batch_size / r["examples_per_second"]
      for r in metrics.read_jsonl(path)
    }


def main(_) -> None:
  vocab_size = json_files.read(FLAGS.bert_config_file)["vocab_size"]
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "records.tfrecord")
    fake_records.write(path, RECORDS, LENGTH, PREDICTIONS, vocab_size)
    run = Run(folder)
    results, fresh = run.train(UPDATES)
    seconds = run.update_seconds()
    after = [seconds[n] for n in seconds if n > 2 and n % SAVE_EVERY in (1, 2)]
    usual = statistics.median(seconds[n] for n in range(3, SAVE_EVERY + 1))
    between = [seconds[SAVE_EVERY + n] for n in range(1, SAVE_EVERY + 1)]
    resumed = [run.train(UPDATES + 1 + turn)[1] for turn in range(FLAGS.rounds)]
    prefix = os.path.join(run.output, checkpoint_files.PREFIX)
    data = f"{prefix}-{UPDATES + FLAGS.rounds}.data-00000-of-00001"
    line = {
      "model": os.path.basename(FLAGS.bert_config_file),
      "precision": FLAGS.precision,
      "batch": FLAGS.train_batch_size,
      "checkpoint_mb": round(os.path.getsize(data) / 1e6),
      "saves": results["saves"],
      "stall": round(results["longest_save_stall_seconds"], 3),
      "update": round(usual, 3),
      "update_while_writing": round(statistics.median(after), 3),
      "saving": round(sum(between) - usual * SAVE_EVERY, 2),
      "fresh_start": round(fresh, 1),
      "resume": [round(r, 1) for r in resumed],
    }
    shutil.rmtree(run.output)
  print(json.dumps(line))


if __name__ == "__main__":
  define_flags()
  errors.run_main(main)
