"""Draws the curves of one or more runs from their folders as one picture.

  python -m tools.plot_metrics --output=curve.png runs/first runs/second

The picture has a panel for each loss and metric of the runs, one for the
learning rate and one for the speed. An .html file has the runs' results and
settings below it. Each run has a color: a line for what its
training reported (faint, beside its moving mean), dots for its evaluations.
"""

import dataclasses
import html
import io
import json
import os
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from checkpoints import description, metrics
from common import files
from common.errors import UserError
from common.settings import run_with, setting

os.environ["MPLBACKEND"] = "Agg"  # Jupyter names one that .venv lacks
import matplotlib.pyplot as plt
import matplotlib.ticker

warnings.filterwarnings("ignore", "Glyph")  # that the font lacks

# Panels that follow those of `metrics.LABELS` and of other metrics.
_LAST = {
  "learning_rate": "learning rate",
  "tokens_per_second": "tokens/s, all ranks",
}
_COLUMNS = 2
_SMOOTHED_FROM = 20  # points of a curve
_HEAD = '<!DOCTYPE html>\n<meta charset="utf-8"><title>Curves</title>\n'
# The first updates, as a share of all, do not count for the scale: their
# losses are far above the rest.
_START = 0.05
_EVALUATION: dict = {"marker": "o", "ms": 3, "ls": ":"}
_ENTROPY: dict = {"ls": "--", "lw": 1}


class Run(NamedTuple):
  """The curves of a run folder."""

  about: str  # its folder, model and data
  train: list[dict]  # reports
  evaluations: list[dict]
  entropy: float | None  # nats, of its records' tokens
  settings: dict  # of its newest training


def read_run(run_dir: str) -> Run:
  """Reads a run folder; `UserError` if it has no reports."""
  train = metrics.reports_of(run_dir)
  if not train:
    raise UserError(
      f"{run_dir}: no {metrics.METRICS_FILE} with reports: name a training's "
      "--output_dir"
    )
  evaluations = metrics.evaluations(run_dir)
  for report in (*train, *evaluations):
    if "masked_lm_loss" in report:
      report.pop("loss", None)  # the sum of two with panels of their own
  about, entropy = [os.path.normpath(run_dir)], None
  described = description.read(run_dir)
  flags = (described.training or {}).get("flags", {})
  bert = flags.get("bert")
  if bert:
    about.append(
      f"{bert['num_hidden_layers']} layers, {bert['hidden_size']} "
      f"wide, {bert['vocab_size']:,} tokens"
    )
  data = flags.get("input_file") or flags.get("train_file")
  if data:
    about.append(f"on {data}")
  manifest = described.manifest()
  if manifest:
    entropy = manifest[1].counts.get("unigram_entropy")
  return Run(", ".join(about), train, evaluations, entropy, flags)


def panels_of(runs: Sequence[Run]) -> dict[str, str]:
  """Key of a report or evaluation -> its panel's label, in order."""
  keys = set()
  for run in runs:
    for report in run.train:
      keys |= {key for key in report if key.endswith(("loss", "accuracy"))}
    for results in run.evaluations:
      keys |= {key for key in results if not key.startswith("best_")}
  keys -= {"global_step", "examples"}
  keys -= {metrics.EVALUATION_SET, metrics.EVALUATED_WEIGHTS}
  labels = {}
  for key in (*metrics.LABELS, *sorted(keys - metrics.LABELS.keys())):
    if key in keys:
      labels[key] = metrics.LABELS.get(key, key.replace("_", " "))
  return labels | _LAST


def _points(reports: list[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
  """Updates and values of the reports that have a number."""
  points = [(report["global_step"], report.get(key)) for report in reports]
  steps, values = np.array(points, float).reshape(-1, 2).T
  known = np.isfinite(values)  # None is NaN
  return steps[known], values[known]


def _draw_run(axis, key: str, run: Run, color: str) -> np.ndarray:
  """Draws a run's curves in a panel; returns the values the scale shows."""
  steps, values = _points(run.train, key)
  mean = values
  if key not in _LAST and len(values) >= _SMOOTHED_FROM:
    axis.plot(steps, values, color=color, lw=0.8, alpha=0.25)
    # The mean over a 20th of the points around each.
    window = np.ones(max(3, len(values) // 20))
    counts = np.convolve(np.ones(len(values)), window, "same")
    mean = np.convolve(values, window, "same") / counts
  axis.plot(steps, mean, color=color, lw=1.4)
  evaluated, results = _points(run.evaluations, key)
  axis.plot(evaluated, results, color=color, **_EVALUATION)
  # The scale shows what comes after the start, evaluations too.
  steps = np.append(steps, evaluated)
  shown = np.append(values, results)[steps >= _START * steps.max(initial=0)]
  if key == "masked_lm_loss" and run.entropy:
    axis.axhline(run.entropy, color=color, **_ENTROPY)
    shown = np.append(shown, run.entropy)
  return shown


def _draw_panel(axis, key: str, label: str, runs: Sequence[Run]) -> None:
  values = np.array([])
  for number, run in enumerate(runs):
    values = np.append(values, _draw_run(axis, key, run, f"C{number}"))
  if key not in _LAST and values.size:
    margin = 0.05 * np.ptp(values) or 0.1
    axis.set_ylim(values.min() - margin, values.max() + margin)
  if key.endswith("accuracy"):
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
  if key == "tokens_per_second":
    axis.set_ylim(bottom=0.0)
  axis.set_ylabel(label)
  axis.grid(alpha=0.3)


def _drawable(text: str) -> str:
  """Text without formulas, and without bytes that are no UTF-8."""
  return text.encode(errors="replace").decode().replace("$", r"\$")


def page_of(runs: Sequence[Run], picture: str) -> bytes:
  """An .html file: an .svg's content, and each run's result and settings."""
  lines = [_HEAD, picture[picture.index("<svg") :]]
  for run in runs:
    lines.append(f"<h2>{html.escape(run.about)}</h2>")
    last = (run.evaluations or run.train)[-1]
    for title, values in (("Result", last), ("Settings", run.settings)):
      lines.append(f"<h3>{title}</h3><table>")
      for name, value in values.items():
        text = html.escape(json.dumps(value, ensure_ascii=False))
        lines.append(f"<tr><td>{html.escape(name)}<td>{text}")
      lines.append("</table>")
  return "\n".join(lines).encode(errors="replace")


def plot(run_dirs: Sequence[str], output: str, title: str = "") -> None:
  """Draws the curves of runs; UserError for no reports or unknown formats."""
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
  # The legend names the runs by color, and what is drawn of each by style.
  styles: dict[str, dict] = {}
  for number, run in enumerate(runs):
    styles[run.about] = {"color": f"C{number}"}
  styles["evaluations"] = {"color": "grey", **_EVALUATION}
  if any(run.entropy for run in runs):
    name = "unigram entropy (frequencies alone)"
    styles[name] = {"color": "grey", **_ENTROPY}
  handles = [plt.Line2D([], [], **style) for style in styles.values()]
  names = [_drawable(name) for name in styles]
  figure.legend(handles, names, loc="outside lower center")
  figure.suptitle(_drawable(title))
  page = io.BytesIO() if output.endswith(".html") else None
  form = "svg" if page else output.rpartition(".")[2]
  try:
    with files.naming(output):
      figure.savefig(page or output, format=form, dpi=120)
  except ValueError as e:  # of the format that the name ends in
    raise UserError(f"--output={output}: {e}") from e
  if page:
    files.write(output, page_of(runs, page.getvalue().decode()))
  plt.close(figure)


@dataclasses.dataclass(frozen=True)
class Settings:
  """The picture; the names are the flags'."""

  # fmt: off
  output: str = setting("curve.png",
    "Picture to write: .png, .svg, .pdf, .html and others by the name's end.")
  title: str = setting("", "Text above the curves.")
  # fmt: on


def main(settings: Settings, *run_dirs: str) -> None:
  """Draws the curves of runs."""
  os.makedirs(os.path.dirname(settings.output) or ".", exist_ok=True)
  plot(run_dirs, settings.output, settings.title)
  print(settings.output)


if __name__ == "__main__":
  run_with(Settings, main, arguments=None)
