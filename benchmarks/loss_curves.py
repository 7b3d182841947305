"""Trains the same updates in every precision and XLA mode, and compares.

  python -m benchmarks.loss_curves --output=curves.png \\
    --bert_config_file=runs/quickstart/bert_config.json \\
    --input_file='runs/quickstart/records/train*.tfrecord'

Prints one JSON line for each variant: the largest relative difference from its
reference (float32 without XLA; for a mode the same precision without XLA) of
the loss, averaged over windows of 10 updates, and plots all of them.
"""

import os
import tempfile

import numpy as np

from benchmarks import measuring
from checkpoints import metrics
from common.tensorflow_v1 import tf
from training.next_steps import python

os.environ["MPLBACKEND"] = "Agg"  # Jupyter names one that .venv lacks
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


def train(precision: str, mode: str) -> np.ndarray:
  """The losses of one run, averaged over windows."""
  with tempfile.TemporaryDirectory() as folder:
    command = python(
      "run_pretraining.py", do_train=True, output_dir=folder,
      bert_config_file=FLAGS.bert_config_file, input_file=FLAGS.input_file,
      train_batch_size=32, learning_rate=1e-3, num_train_steps=FLAGS.steps,
      num_warmup_steps=FLAGS.steps // 10, bias_correction=True,
      log_every_steps=1, precision=precision, xla=mode,
    )  # fmt: skip
    measuring.run(command)
    reports = metrics.read_jsonl(os.path.join(folder, metrics.METRICS_FILE))
  losses = np.array([report["loss"] for report in reports])
  return losses[: len(losses) // WINDOW * WINDOW].reshape(-1, WINDOW).mean(1)


def main(_) -> None:
  curves = {variant: train(*variant) for variant in VARIANTS}
  figure, (top, bottom) = pyplot.subplots(
    2, sharex=True, figsize=(8, 7), layout="constrained"
  )
  for variant, reference in VARIANTS.items():
    losses, label = curves[variant], ", ".join(variant)
    difference = losses / curves[reference] - 1.0
    updates = WINDOW * (np.arange(len(losses)) + 1)
    top.plot(updates, losses, label=label, linewidth=1)
    if variant != reference:
      label += f" / {', '.join(reference)}"
      bottom.plot(updates, 100 * difference, label=label, linewidth=1)
    precision, mode = variant
    measuring.show(
      {
        "precision": precision,
        "xla": mode,
        "reference": ", ".join(reference),
        "updates": WINDOW * len(losses),
        "last_window_loss": round(float(losses[-1]), 4),
        "largest_difference": round(float(np.abs(difference).max()), 6),
      }
    )
  top.set_ylabel("training loss (nats)")
  bottom.set_ylabel("difference from reference (%)")
  bottom.set_xlabel("updates")
  for axes in (top, bottom):
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
  figure.savefig(FLAGS.output, dpi=120)


if __name__ == "__main__":
  flags = tf.flags
  flags.DEFINE_string("bert_config_file", None, "The model.", required=True)
  flags.DEFINE_string("input_file", None, "Records.", required=True)
  flags.DEFINE_string("output", "curves.png", "Where to plot.")
  flags.DEFINE_integer("steps", 200, "Steps of 32 examples of each run.")
  tf.app.run(main)
