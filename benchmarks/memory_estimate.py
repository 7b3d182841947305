"""The memory that --dry_run estimates, and the peak of a run of that size.

  python -m benchmarks.memory_estimate

Prints one JSON line a shape: what the dry run says of rank 0, and the peak that
a run of four updates, which saves two checkpoints, reports. --only=N measures
shape N only.
"""

import os
import re
import tempfile

from absl import flags

from benchmarks import fake_records, measuring
from checkpoints import metrics
from common import errors, json_files
from training.next_steps import python

FLAGS = flags.FLAGS
# BERT config, sequence, predictions, micro-batch, --recompute, --precision
SHAPES = (
  ("tiny", 128, 20, 256, "", "fp32"),
  ("tiny", 512, 76, 48, "layer", "bf16"),
  ("mini", 128, 20, 128, "", "bf16"),
  ("mini", 512, 76, 32, "gelu,attention,layer_norm", "fp32"),
  ("base", 128, 20, 24, "attention", "fp32"),
  ("base", 512, 76, 10, "layer", "bf16"),
)


def measure(bert, length, predictions, batch, recompute, precision) -> dict:
  """A JSON line."""
  config = f"configs/bert_{bert}.json"
  given = {
    "bert_config_file": config, "max_seq_length": length,
    "max_predictions_per_seq": predictions, "train_batch_size": batch,
    "recompute": recompute, "precision": precision, "num_train_steps": 4,
    "num_warmup_steps": 1,
  }  # fmt: skip
  planning = python("run_pretraining.py", dry_run=True, **given)
  (estimate,) = re.findall(
    r"^ +total +([\d,]+)$", measuring.run(planning), re.M
  )
  estimate = int(estimate.replace(",", ""))
  vocabulary = json_files.read(config)["vocab_size"]
  with tempfile.TemporaryDirectory() as folder:
    records = os.path.join(folder, "fake.tfrecord")
    fake_records.write(records, 4 * batch, length, predictions, vocabulary)
    run = os.path.join(folder, "run")
    training = python(
      "run_pretraining.py", do_train=True, input_file=records, output_dir=run,
      save_checkpoints_steps=2, log_every_steps=1, **given,
    )  # fmt: skip
    measuring.run(training)
    reports = metrics.read_jsonl(os.path.join(run, metrics.METRICS_FILE))
  peak = reports[-1]["peak_memory_mb"]
  return {
    "bert": bert,
    "length": length,
    "predictions": predictions,
    "batch": batch,
    "recompute": recompute,
    "precision": precision,
    "estimate_mb": estimate,
    "run_mb": round(peak),
    "error": round(estimate / peak - 1, 3),
  }


def main(_) -> None:
  for number, shape in enumerate(SHAPES):
    if FLAGS.only in (None, number):
      measuring.show(measure(*shape))


if __name__ == "__main__":
  flags.DEFINE_integer("only", None, "Measure this shape only.")
  errors.run_main(main)
