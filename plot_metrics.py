"""Draws a run's curves from its folder as one PNG.

python plot_metrics.py --output=curve.png OUTPUT_DIR
"""

import os

import matplotlib
from absl import flags

import errors
import records
import training_hooks

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def unigram_entropy(record_files: list[str]) -> float | None:
  """The entropy in the manifest of the first file; None without a manifest."""
  found = records.find_manifest(record_files[0]) if record_files else None
  return found[1].counts.get("unigram_entropy") if found else None


def _column(reports: list[dict], key: str) -> tuple[list, list]:
  return [r["global_step"] for r in reports], [r[key] for r in reports]


def plot(run_dir: str, output: str, title: str = "") -> None:
  """Draws losses and accuracies over updates, training and held out.

  Args:
    run_dir: a folder of run_pretraining.py.
    output: the PNG to write.
    title: text above; default: the folder.

  Raises:
    UserError: the folder has no reports.
  """
  read = lambda name: training_hooks.read_jsonl(os.path.join(run_dir, name))
  train = read(training_hooks.METRICS_FILE)
  held_out = read(training_hooks.EVAL_METRICS_FILE)
  if not train:
    raise errors.UserError(
      f"{run_dir}: no {training_hooks.METRICS_FILE} with reports"
    )
  entropy = unigram_entropy(training_hooks.trained_on(run_dir))

  figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True)
  panels = [
    ("masked_lm_loss", "masked LM loss (nats)"),
    ("masked_lm_accuracy", "masked LM accuracy"),
    ("next_sentence_loss", "next sentence loss (nats)"),
    ("next_sentence_accuracy", "next sentence accuracy"),
  ]
  for axis, (key, label) in zip(axes.flat, panels, strict=True):
    axis.plot(*_column(train, key), color="#9db8d6", lw=0.8, label="training")
    if held_out:
      axis.plot(
        *_column(held_out, key), color="#b2401f", marker="o", ms=3,
        label="held out",
      )  # fmt: skip
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)
  if entropy:
    axes[0, 0].axhline(
      entropy, color="black", ls="--", lw=1, label="unigram entropy"
    )
  axes[0, 0].legend()
  for axis in axes[1]:
    axis.set_xlabel("update")
  figure.suptitle(title or run_dir)
  figure.tight_layout()
  figure.savefig(output, dpi=120)
  plt.close(figure)


def main(argv: list) -> None:
  plot(argv[1], flags.FLAGS.output, flags.FLAGS.title)
  print(flags.FLAGS.output)


if __name__ == "__main__":
  flags.DEFINE_string("output", "curve.png", "PNG file to write.")
  flags.DEFINE_string("title", "", "Text above; default: the folder.")
  errors.run_main(main, arguments=1)
