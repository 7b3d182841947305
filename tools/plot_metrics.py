"""Draws the curves of one or more runs from their folders as one picture.

  python -m tools.plot_metrics --output=curve.png runs/first runs/second
  python -m tools.plot_metrics --output=report.html runs/first

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
import matplotlib.backend_bases
import matplotlib.ticker
import numpy as np

from checkpoints import metrics, run_folder
from common import errors
from common.settings import run_with, setting
from tools import html_report

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
  train: list  # reports
  evaluations: list  # their results
  entropy: float | None  # nats, of its records' tokens
  model: str  # in words; "" if run.json does not say
  data: str  # as model
  evaluated: (
    str  # "held out" if the evaluations' files are not those of training
  )

  def panels(self) -> set:
    shown = {k for k in _keys(self.train) if k.endswith(("loss", "accuracy"))}
    if "masked_lm_loss" in shown:
      shown -= {"loss"}  # the sum of two losses with panels of their own
    found = _keys(self.evaluations) - {"global_step", "examples"}
    return shown | {key for key in found if not key.startswith("best_")}


def _keys(reports: list) -> set:
  """Keys that have a number that can be drawn in one of the reports."""
  return {
    key
    for report in reports
    for key, value in report.items()
    if type(value) in (int, float) and math.isfinite(value)
  }


def read_run(run_dir: str) -> Run:
  """Reads a run folder; `UserError` if it has no reports."""
  read = lambda name: metrics.read_jsonl(os.path.join(run_dir, name))
  train = read(metrics.METRICS_FILE)
  if not train:
    inside = os.path.join(glob.escape(run_dir), "*", metrics.METRICS_FILE)
    runs = " or ".join(map(os.path.dirname, sorted(glob.glob(inside))))
    raise errors.UserError(
      f"{run_dir}: no {metrics.METRICS_FILE} with reports: "
      + (f"did you mean {runs}?" if runs else "name a training's --output_dir")
    )
  found = run_folder.manifest(run_dir)
  run = run_folder.last_training(run_dir) or {}
  flags = run.get("flags", {})
  bert, counts = flags.get("bert"), found[1].counts if found else {}
  return Run(
    os.path.normpath(run_dir),
    train,
    read(metrics.EVAL_METRICS_FILE),
    counts.get("unigram_entropy"),
    "BERT of {num_hidden_layers} layers, {hidden_size} wide, {vocab_size:,} "
    "tokens".format(**bert)
    if bert
    else "",
    flags.get("input_file") or flags.get("train_file") or "",
    "held out"
    if run_folder.is_held_out(run, run_folder.training_files(run_dir))
    else "evaluation",
  )


def panels_of(runs: Sequence[Run]) -> dict:
  """Key of a report or evaluation -> its panel's label, in order."""
  found = set().union(*(run.panels() for run in runs))
  keys = [key for key in _LABELS if key in found]
  keys += sorted(found - _LABELS.keys())
  return {key: _LABELS.get(key, key.replace("_", " ")) for key in keys} | _LAST


def _points(reports: list, key: str) -> list[tuple]:
  """(update, value) of the reports that have a number."""
  return [(r["global_step"], r[key]) for r in reports if key in _keys([r])]


def _draw(axis, points: list[tuple], **style) -> None:
  if points:
    axis.plot(*zip(*points, strict=True), **style)


def _smoothed(points: list[tuple]) -> list[tuple]:
  """The mean over a 20th of the points around each."""
  steps, values = zip(*points, strict=True)
  window = np.ones(max(3, len(points) // 20))
  counts = np.convolve(np.ones(len(points)), window, "same")
  means = np.convolve(values, window, "same") / counts
  return list(zip(steps, means, strict=True))


def _draw_panel(axis, key: str, runs: Sequence[Run]) -> None:
  alone, values = len(runs) == 1, []
  for number, run in enumerate(runs):
    if key not in run.panels() | _LAST.keys():
      continue
    color = _TRAINING_COLOR if alone else f"C{number}"
    points = reported = _points(run.train, key)
    if key not in _LAST and len(points) >= _SMOOTHED_FROM:
      _draw(axis, points, color=color, lw=0.8, alpha=0.25)
      points = _smoothed(points)
    _draw(
      axis, points, color=color, lw=1.4, label="training" if alone else None
    )
    evaluations = _points(run.evaluations, key)
    _draw(
      axis, evaluations, marker="o", ms=3, ls="-" if alone else ":",
      color=_EVALUATION_COLOR if alone else color,
      label=run.evaluated if alone else None,
    )  # fmt: skip
    if key == _ENTROPY_PANEL and run.entropy:
      values.append(run.entropy)
      axis.axhline(
        run.entropy, ls="--", lw=1, color="black" if alone else color,
        label=_ENTROPY if alone else None,
      )  # fmt: skip
    found = reported + evaluations
    start = _START * max([step for step, _ in found], default=0)
    values += [value for step, value in found if step >= start]
  if key not in _LAST and values:
    margin = 0.05 * (max(values) - min(values)) or 0.1
    axis.set_ylim(min(values) - margin, max(values) + margin)
  if key.endswith("accuracy"):
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))


def _drawable(text: str) -> str:
  """Text without formulas, and without bytes that are no UTF-8."""
  return text.encode(errors="replace").decode().replace("$", r"\$")


def _legend(figure, axes, runs: Sequence[Run]) -> None:
  if len(runs) == 1:
    axes[0].legend()
    return
  name = lambda run: ": ".join(filter(None, [run.name, run.model]))
  evaluated = " or ".join(sorted({run.evaluated for run in runs}))
  styles = [
    *((name(run), dict(color=f"C{n}", lw=2)) for n, run in enumerate(runs)),
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
  known = set(matplotlib.backend_bases.FigureCanvasBase.filetypes)
  known -= {"pgf"}  # which needs LaTeX
  if os.path.splitext(output)[1][1:].lower() not in known:
    raise errors.UserError(
      f"--output={output}: the name must end in a known format: "
      f"{', '.join(f'.{name}' for name in sorted(known))}"
    )
  runs = [read_run(run_dir) for run_dir in run_dirs]
  panels = panels_of(runs)
  rows = -(-len(panels) // _COLUMNS)
  figure, axes = plt.subplots(
    rows, _COLUMNS, sharex=True, figsize=(11, 3.3 * rows + 0.4),
    layout="constrained",
  )  # fmt: skip
  axes = list(axes.flat)
  for axis, (key, label) in zip(axes, panels.items(), strict=False):
    _draw_panel(axis, key, runs)
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)
    if key == "tokens_per_second":
      axis.set_ylim(bottom=0.0)
  for axis in axes[len(panels) :]:
    axis.set_axis_off()
  for axis in axes[max(0, len(panels) - _COLUMNS) : len(panels)]:
    axis.set_xlabel("update")
    axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axis.tick_params(labelbottom=True)
  _legend(figure, axes, runs)
  if len(runs) == 1 and not title:
    about = ", on ".join(filter(None, [runs[0].model, runs[0].data]))
    title = f"{runs[0].name}\n{about}".strip()
  figure.suptitle(_drawable(title))
  figure.savefig(output, dpi=120)
  plt.close(figure)


@dataclasses.dataclass(frozen=True)
class Settings:
  """The picture; the names are the flags'."""

  # fmt: off
  output: str = setting("curve.png",
    "Picture to write: .png, .svg, .pdf and other formats by the name's end. "
    ".html is a page with the picture, results, plan, data, examples and "
    "settings.")
  title: str = setting("",
    "Text above the curves. Default: folder, model and data of a single run.")
  # fmt: on


def main(settings: Settings, *run_dirs: str) -> None:
  """Draws the curves of runs."""
  os.makedirs(os.path.dirname(settings.output) or ".", exist_ok=True)
  if settings.output.lower().endswith(".html"):
    html_report.write(run_dirs, settings.output, settings.title, plot)
  else:
    plot(run_dirs, settings.output, settings.title)
  print(settings.output)


if __name__ == "__main__":
  run_with(Settings, main, arguments=None)
