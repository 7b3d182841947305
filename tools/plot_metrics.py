"""Draws the curves of one or more runs from their folders as one picture.

  python -m tools.plot_metrics --output=curve.png runs/first runs/second

The picture has a panel for each loss and metric of the runs, one for the
learning rate and one for the speed. A single run has its training in blue and
its evaluations in red; each of several runs has one colour. What the training
reported is faint, its moving mean is not.
"""

import dataclasses
import glob
import math
import os
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import matplotlib.ticker
import numpy as np

from checkpoints import description, metrics
from common import errors
from common.settings import run_with, setting

matplotlib.use("Agg")
import matplotlib.pyplot as plt

warnings.filterwarnings("ignore", "Glyph")  # that the font lacks

# Panels of known keys, in order; other metrics come after the accuracies.
_LABELS = {
  "masked_lm_loss": "masked words: loss (nats)",
  "masked_lm_accuracy": "masked words: right",
  "next_sentence_loss": "next sentence: loss (nats)",
  "next_sentence_accuracy": "next sentence: right",
  "loss": "loss",
  "accuracy": "right",
}
_LAST = {
  "learning_rate": "learning rate",
  "tokens_per_second": "tokens/s, all ranks",
}
_ENTROPY_PANEL = "masked_lm_loss"
_ENTROPY = "unigram entropy (frequencies alone)"
_COLUMNS = 2
_TRAINING_COLOR, _EVALUATION_COLOR = "#33689f", "#b2401f"
_SMOOTHED_FROM = 20  # points of a curve
# Updates at whose numbers the scale does not look, as a share of all.
_START = 0.05


class Run(NamedTuple):
  """The curves of a run folder."""

  name: str
  train: list[dict]  # reports
  evaluations: list[dict]
  entropy: float | None  # nats, of its records' tokens
  model: str  # in words; "" if run.json does not say
  data: str  # as model
  evaluated: str  # "held out" if evaluations have files that are not trained on

  def panels(self) -> set[str]:
    """Keys of the reports and evaluations that have a panel."""
    keys = {k for k in _keys(self.train) if k.endswith(("loss", "accuracy"))}
    if "masked_lm_loss" in keys:
      keys -= {"loss"}  # the sum of two losses with panels of their own
    for key in _keys(self.evaluations) - {"global_step", "examples"}:
      if not key.startswith("best_"):
        keys.add(key)
    return keys


def _keys(reports: list[dict]) -> set[str]:
  """Keys that have a number that can be drawn in one of the reports."""
  keys = set()
  for report in reports:
    for key, value in report.items():
      if type(value) in (int, float) and math.isfinite(value):
        keys.add(key)
  return keys


def read_run(run_dir: str) -> Run:
  """Reads a run folder; `UserError` if it has no reports."""
  train = metrics.read_jsonl(os.path.join(run_dir, metrics.METRICS_FILE))
  if not train:
    inside = os.path.join(glob.escape(run_dir), "*", metrics.METRICS_FILE)
    runs = " or ".join(map(os.path.dirname, sorted(glob.glob(inside))))
    raise errors.UserError(
      f"{run_dir}: no {metrics.METRICS_FILE} with reports: "
      + (f"did you mean {runs}?" if runs else "name a training's --output_dir")
    )
  about = description.read(run_dir)
  run = about.training or {}
  flags = run.get("flags", {})
  model, entropy, evaluated = "", None, "evaluation"
  if bert := flags.get("bert"):
    model = (
      f"BERT of {bert['num_hidden_layers']} layers, {bert['hidden_size']} "
      f"wide, {bert['vocab_size']:,} tokens"
    )
  if found := about.manifest():
    _, manifest = found
    entropy = manifest.counts.get("unigram_entropy")
  if description.is_held_out(run, about.record_files):
    evaluated = "held out"
  return Run(
    os.path.normpath(run_dir),
    train,
    metrics.read_jsonl(os.path.join(run_dir, metrics.EVAL_METRICS_FILE)),
    entropy,
    model,
    flags.get("input_file") or flags.get("train_file") or "",
    evaluated,
  )


def panels_of(runs: Sequence[Run]) -> dict[str, str]:
  """Key of a report or evaluation -> its panel's label, in order."""
  found = set().union(*(run.panels() for run in runs))
  labels = {key: label for key, label in _LABELS.items() if key in found}
  for key in sorted(found - _LABELS.keys()):
    labels[key] = key.replace("_", " ")
  return labels | _LAST


def _points(reports: list[dict], key: str) -> list[tuple]:
  """(update, value) of the reports that have a number."""
  return [(r["global_step"], r[key]) for r in reports if key in _keys([r])]


def _smoothed(points: list[tuple]) -> list[tuple]:
  """The mean over a 20th of the points around each."""
  steps, values = zip(*points, strict=True)
  window = np.ones(max(3, len(points) // 20))
  counts = np.convolve(np.ones(len(points)), window, "same")
  means = np.convolve(values, window, "same") / counts
  return list(zip(steps, means, strict=True))


def _draw(axis, points: list[tuple], **style) -> None:
  if points:
    axis.plot(*zip(*points, strict=True), **style)


def _draw_run(axis, key: str, run: Run, number: int | None) -> list[float]:
  """Draws a run's curves in a panel; returns the values that the scale shows.

  `number`: the run's place among several, which have a color each and share a
  legend; None: it is alone, and the panel's legend names its curves.
  """
  alone = number is None
  color = _TRAINING_COLOR if alone else f"C{number}"
  named = lambda label: label if alone else None
  curve = reports = _points(run.train, key)
  if key not in _LAST and len(reports) >= _SMOOTHED_FROM:
    _draw(axis, reports, color=color, lw=0.8, alpha=0.25)
    curve = _smoothed(reports)
  _draw(axis, curve, color=color, lw=1.4, label=named("training"))
  evaluations = _points(run.evaluations, key)
  _draw(
    axis, evaluations, marker="o", ms=3, ls="-" if alone else ":",
    color=_EVALUATION_COLOR if alone else color, label=named(run.evaluated),
  )  # fmt: skip
  points = reports + evaluations
  start = _START * max([step for step, _ in points], default=0)
  values = [value for step, value in points if step >= start]
  if key == _ENTROPY_PANEL and run.entropy:
    values.append(run.entropy)
    axis.axhline(
      run.entropy, ls="--", lw=1, color="black" if alone else color,
      label=named(_ENTROPY),
    )  # fmt: skip
  return values


def _draw_panel(axis, key: str, label: str, runs: Sequence[Run]) -> None:
  values: list[float] = []
  for number, run in enumerate(runs):
    if key in run.panels() | _LAST.keys():
      values += _draw_run(axis, key, run, None if len(runs) == 1 else number)
  if key not in _LAST and values:
    margin = 0.05 * (max(values) - min(values)) or 0.1
    axis.set_ylim(min(values) - margin, max(values) + margin)
  if key.endswith("accuracy"):
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
  if key == "tokens_per_second":
    axis.set_ylim(bottom=0.0)
  axis.set_ylabel(label)
  axis.grid(alpha=0.3)


def _drawable(text: str) -> str:
  """Text without formulas, and without bytes that are no UTF-8."""
  return text.encode(errors="replace").decode().replace("$", r"\$")


def _draw_legend(figure, runs: Sequence[Run]) -> None:
  """What colors and lines mean in a picture of several runs."""
  styles = []
  for number, run in enumerate(runs):
    name = f"{run.name}: {run.model}" if run.model else run.name
    styles.append((name, dict(color=f"C{number}", lw=2)))
  evaluated = " or ".join(sorted({run.evaluated for run in runs}))
  styles += [
    ("training", dict(color="grey", lw=1.4)),
    (evaluated, dict(color="grey", marker="o", ms=3, ls=":")),
  ]
  if any(run.entropy for run in runs):
    styles.append((_ENTROPY, dict(color="grey", ls="--", lw=1)))
  handles = [plt.Line2D([], [], **style) for _, style in styles]
  names = [_drawable(name) for name, _ in styles]
  figure.legend(handles, names, loc="outside lower center", ncols=2)


def plot(run_dirs: Sequence[str], output: str, title: str = "") -> None:
  """Draws the curves of runs; UserError for no reports or an unknown format."""
  runs = [read_run(run_dir) for run_dir in run_dirs]
  panels = panels_of(runs)
  rows = -(-len(panels) // _COLUMNS)
  figure, grid = plt.subplots(
    rows, _COLUMNS, sharex=True, figsize=(11, 3.3 * rows + 0.4),
    layout="constrained",
  )  # fmt: skip
  axes, empty = grid.flat[: len(panels)], grid.flat[len(panels) :]
  for axis, (key, label) in zip(axes, panels.items(), strict=True):
    _draw_panel(axis, key, label, runs)
  for axis in empty:
    axis.set_axis_off()
  for axis in axes[-_COLUMNS:]:  # the lowest of each column
    axis.set_xlabel("update")
    axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axis.tick_params(labelbottom=True)
  if len(runs) > 1:
    _draw_legend(figure, runs)
  else:
    axes[0].legend()
    run = runs[0]
    about = ", on ".join(filter(None, [run.model, run.data]))
    title = title or f"{run.name}\n{about}".strip()
  figure.suptitle(_drawable(title))
  try:
    figure.savefig(output, dpi=120)
  except ValueError as e:  # of the format that the name ends in
    raise errors.UserError(f"--output={output}: {e}") from e
  plt.close(figure)


@dataclasses.dataclass(frozen=True)
class Settings:
  """The picture; the names are the flags'."""

  # fmt: off
  output: str = setting("curve.png",
    "Picture to write: .png, .svg, .pdf and other formats by the name's end.")
  title: str = setting("",
    "Text above the curves. Default: folder, model and data of a single run.")
  # fmt: on


def main(settings: Settings, *run_dirs: str) -> None:
  """Draws the curves of runs."""
  os.makedirs(os.path.dirname(settings.output) or ".", exist_ok=True)
  plot(run_dirs, settings.output, settings.title)
  print(settings.output)


if __name__ == "__main__":
  run_with(Settings, main, arguments=None)
