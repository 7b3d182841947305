"""Trains the same updates in every precision and XLA mode, and compares.

  python -m benchmarks.loss_curves --output=curves.png \\
    --bert_config_file=runs/quickstart/bert_config.json \\
    --input_file='runs/quickstart/records/train*.tfrecord'

Prints one JSON line for each variant: the largest relative difference from its
reference (float32 without XLA; for a mode the same precision without XLA) of
the loss, averaged over windows of 10 updates, and plots all of them.
"""

import json
import os
import subprocess
import tempfile

import matplotlib
import numpy as np

from checkpoints import metrics
from common.tensorflow_v1 import tf
from training.next_steps import python

matplotlib.use("Agg")
from matplotlib import pyplot

FLAGS = tf.flags.FLAGS
WINDOW = 10
# (precision, mode): reference
VARIANTS = {
  ("fp32", "off"): ("fp32", "off"),
  ("fp32", "auto"): ("fp32", "off"),
  ("fp32", "layers"): ("fp32", "off"),
  ("fp32", "step"): ("fp32", "off"),
  ("bf16", "off"): ("fp32", "off"),
  ("bf16", "layers"): ("bf16", "off"),
  ("bf16", "step"): ("bf16", "off"),
  ("fp16", "off"): ("fp32", "off"),
  ("fp16", "layers"): ("fp16", "off"),
}


def define_flags() -> None:
  flags = tf.flags
  flags.DEFINE_string("bert_config_file", None, "The model.", required=True)
  flags.DEFINE_string("input_file", None, "Records.", required=True)
  flags.DEFINE_string("output", "curves.png", "Where to plot.")
  flags.DEFINE_integer("steps", 200, "Steps of --batch examples of each run.")
  flags.DEFINE_integer("batch", 32, "Records of an update.")
  flags.DEFINE_float("learning_rate", 1e-3, "Peak.")


def train(precision: str, mode: str) -> np.ndarray:
  """The losses of one run."""
  with tempfile.TemporaryDirectory() as folder:
    command = python(
      "run_pretraining.py", do_train=True, output_dir=folder,
      bert_config_file=FLAGS.bert_config_file, input_file=FLAGS.input_file,
      train_batch_size=FLAGS.batch, learning_rate=FLAGS.learning_rate,
      num_train_steps=FLAGS.steps, num_warmup_steps=FLAGS.steps // 10,
      bias_correction=True, log_every_steps=1, precision=precision, xla=mode,
    )  # fmt: skip
    subprocess.run(command, check=True)
    path = os.path.join(folder, metrics.METRICS_FILE)
    return np.array([r["loss"] for r in metrics.read_jsonl(path)])


def windows(losses: np.ndarray) -> np.ndarray:
  return losses[: len(losses) // WINDOW * WINDOW].reshape(-1, WINDOW).mean(1)


def main(_) -> None:
  curves = {variant: train(*variant) for variant in VARIANTS}
  figure, (top, bottom) = pyplot.subplots(
    2, sharex=True, figsize=(8, 7), layout="constrained"
  )
  for (precision, mode), reference in VARIANTS.items():
    losses = windows(curves[precision, mode])
    difference = losses / windows(curves[reference]) - 1.0
    updates = WINDOW * (np.arange(len(losses)) + 1)
    label = f"{precision}, {mode}"
    top.plot(updates, losses, label=label, linewidth=1)
    if (precision, mode) != reference:
      label += f" / {', '.join(reference)}"
      bottom.plot(updates, 100 * difference, label=label, linewidth=1)
    result = {
      "precision": precision,
      "xla": mode,
      "reference": ", ".join(reference),
      "updates": len(curves[precision, mode]),
      "last_window_loss": round(float(losses[-1]), 4),
      "largest_difference": round(float(np.abs(difference).max()), 6),
    }
    print(json.dumps(result), flush=True)
  top.set_ylabel("training loss (nats)")
  bottom.set_ylabel("difference from reference (%)")
  bottom.set_xlabel("updates")
  for axes in (top, bottom):
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
  figure.savefig(FLAGS.output, dpi=120)


if __name__ == "__main__":
  define_flags()
  tf.app.run(main)
