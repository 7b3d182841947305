"""The memory that --dry_run estimates, and the peak of a run of that size.

  python -m benchmarks.memory_estimate

Prints one JSON line a shape: the estimate, what two small micro-batches alone
would have given, and the peak that a run of four updates, which saves
two checkpoints, reports. --only=N measures shape N only.
"""

import json
import os
import subprocess
import sys
import tempfile

from absl import flags

import run_pretraining
from benchmarks import fake_records
from checkpoints import metrics
from common import errors, settings
from config.pretraining import PretrainingConfig
from training import dry_run, plans

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


def flags_of(shape) -> list[str]:
  bert, length, masked, batch, recompute, precision = shape
  return [
    f"--bert_config_file=configs/bert_{bert}.json",
    f"--max_seq_length={length}",
    f"--max_predictions_per_seq={masked}",
    f"--train_batch_size={batch}",
    f"--recompute={recompute}",
    f"--precision={precision}",
    "--num_train_steps=4",
    "--num_warmup_steps=1",
  ]


def estimate(shape) -> dict:
  """MB of rank 0 by a dry run, and by its two smallest sizes alone."""
  given = flags.FlagValues()
  settings.define_flags(PretrainingConfig, given)
  given(["step", "--dry_run", *flags_of(shape)])
  config = PretrainingConfig.from_flags(given)
  plan = plans.of_run(config, None, 1)
  job = dry_run.Job(run_pretraining.training_step, config, plan, 1, 1)
  free_mb = FLAGS.free_mb or dry_run.free_memory_mb()
  needs = dry_run.Needs(job, free_mb)
  needs.begin(plan.micro_batch, config.max_seq_length)
  copy = needs.last.checkpoint_mb
  found = {
    "estimate_mb": needs.peak_mb(plan.micro_batch) + copy,
    "measured_up_to": needs.last.size,
  }
  # As if the plan's own size had been too slow to measure.
  small = dry_run.Needs(job, free_mb)
  first = needs.measured[0].size
  for size in (first, 4 * first):
    small.measure(size)
  found["by_two_small_mb"] = small.peak_mb(plan.micro_batch) + copy
  found["their_sizes"] = [m.size for m in small.measured]
  return found


def real_peak(shape) -> float:
  """MB of a run of this shape."""
  bert, length, masked, batch, *_ = shape
  with open(f"configs/bert_{bert}.json", encoding="utf-8") as f:
    vocabulary = json.load(f)["vocab_size"]
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "fake.tfrecord")
    fake_records.write(path, 4 * batch, length, masked, vocabulary)
    run = os.path.join(folder, "run")
    subprocess.run(
      [
        *[sys.executable, "run_pretraining.py", "--do_train"],
        *[f"--input_file={path}", f"--output_dir={run}", *flags_of(shape)],
        *["--save_checkpoints_steps=2", "--log_every_steps=1"],
      ],
      check=True,
    )
    reports = metrics.read_jsonl(os.path.join(run, metrics.METRICS_FILE))
    return reports[-1]["peak_memory_mb"]


def main(_) -> None:
  names = ("bert", "length", "predictions", "batch", "recompute", "precision")
  for number, shape in enumerate(SHAPES):
    if FLAGS.only in (None, number):
      found = {**estimate(shape), "run_mb": real_peak(shape)}
      found["error"] = found["estimate_mb"] / found["run_mb"] - 1
      found["error_by_two"] = found["by_two_small_mb"] / found["run_mb"] - 1
      found = {
        name: round(value, 3 if "error" in name else 0)
        if isinstance(value, float)
        else value
        for name, value in found.items()
      }
      row = dict(zip(names, shape, strict=True))
      print(json.dumps({**row, **found}), flush=True)


if __name__ == "__main__":
  flags.DEFINE_integer("only", None, "Measure this shape only.")
  flags.DEFINE_float("free_mb", 16000, "Memory to plan for; 0: what is free.")
  errors.run_main(main)
