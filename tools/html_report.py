"""Runs as one HTML page: curves, results, plan, data, examples and settings."""

import base64
import html
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence

from checkpoints import metrics, run_folder
from common import files, json_files
from data import record_report, records

# The colours are the browser's own, light or dark; the picture stays on white.
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word; }
img { width: 100%; background: white; border-radius: 6px; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
caption, summary { text-align: left; font-weight: 600; padding: .5rem 0; }
td, th { padding: .2rem 1.5rem .2rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid color-mix(in srgb, CanvasText 20%, Canvas);
  font-weight: normal; }
details td { overflow-wrap: anywhere; }
td { font-variant-numeric: tabular-nums; }
pre { white-space: pre-wrap; font-size: 14px; }
.tables { display: flex; flex-wrap: wrap; align-items: start; gap: 0 4rem; }
"""
_PER_CENT = ("accuracy", "padding")
_MOST_EXAMPLES = 3


def write(run_dirs: Sequence[str], output: str, title: str, plot: Callable):
  """Writes the page; `plot` is `plot_metrics.plot`."""
  with tempfile.TemporaryDirectory() as aside:
    picture = os.path.join(aside, "curves.svg")
    plot(run_dirs, picture, title)
    with open(picture, "rb") as f:
      image = base64.b64encode(f.read()).decode()
  title = html.escape(title or ", ".join(map(os.path.normpath, run_dirs)))
  page = [
    '<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8">',
    '<meta name="viewport" content="width=device-width">',
    f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>",
    '<img alt="losses, accuracies, learning rate and speed over updates" '
    f'src="data:image/svg+xml;base64,{image}">',
    *(part for run_dir in run_dirs for part in _run(run_dir)),
    "</html>\n",
  ]
  with files.whole(output) as f:
    f.write("\n".join(page).encode(errors="replace"))


def _run(run_dir: str) -> Iterator[str]:
  path = lambda name: os.path.join(run_dir, name)
  yield f"<h2>{html.escape(os.path.normpath(run_dir))}</h2>"
  evaluations = metrics.read_jsonl(path(metrics.EVAL_METRICS_FILE))
  seen = [*evaluations[:1], *evaluations[1:][-1:]]  # the first, the last
  yield _table(
    "Evaluation",
    [
      (key, *(results.get(key) for results in seen))
      for key in (seen[-1] if seen else ())
      if key not in ("global_step", metrics.EVALUATION_SET)
    ],
    ["", *(f"update {results['global_step']:,}" for results in seen)],
  )
  yield '<div class="tables">'
  speed = path(run_folder.TRAINING_RESULTS_FILE)
  if os.path.exists(speed):
    yield _table(
      "The last training", json_files.read_own(speed, "remove it").items()
    )
  run = run_folder.last_training(run_dir) or {}
  plan = dict(run.get("plan") or {})
  stage = plan.pop("stage", None) or {}
  if stage.get("count", 1) > 1:
    plan |= {"stage": stage["number"] + 1, "stages": stage["count"]}
  yield _table("Plan", plan.items())
  data = run.get("data") or {}
  names = data.get("files", [])
  found = run_folder.manifest(run_dir)
  if found:
    made = found[1]
    vocabulary = made.tokenizer
    rows = [*made.counts.items(), *made.settings.items()]
    rows += [("vocabulary", f"{vocabulary.kind}, {vocabulary.vocab_size:,}")]
    rows += [("lower case", vocabulary.do_lower_case)]
    yield _table("Data", rows)
  flags = dict(run.get("flags") or {})
  yield _table("Model", flags.pop("bert", {}).items())
  yield "</div>"
  if names and "input_file" in flags:
    text = html.escape(_examples(run_dir, names[0]))
    yield f"<details open><summary>Examples</summary><pre>{text}</pre>"
    yield "</details>"
  about = {
    "started": run.get("started"), **run.get("versions", {}),
    "devices": run.get("devices"), "records": data.get("records"),
    "files": names,
  }  # fmt: skip
  for title, values in (("All settings", flags), ("Versions, files", about)):
    table = _table("", run_folder.flat(values, "{}").items())
    yield f"<details><summary>{title}</summary>{table}</details>"


def _examples(run_dir: str, name: str) -> str:
  """Examples of the run's records as text, or that `name` is gone."""
  paths = run_folder.training_records(run_dir)
  found = records.find_manifest(paths[0]) if paths else None
  if not found:
    return f"{name} is not there any more, or has no manifest."
  made, folder = found[1], os.path.dirname(found[0])
  encoder = record_report.find_encoder(made.tokenizer, folder, None, None)
  about = made.features(), made.mask_settings(), encoder
  examples = record_report.examples(paths, *about, made.has_pairs)
  shown = itertools.islice(examples, _MOST_EXAMPLES)
  return "\n\n".join([record_report.legend(*about), *shown])


def _table(caption: str, rows: Iterable, heads: Sequence[str] = ()) -> str:
  """Each row: a key and its values. "" without rows."""
  cells = lambda row: "".join(f"<td>{_shown(row[0], v)}" for v in row[1:])
  lines = [
    f"<tr><th>{html.escape(row[0].replace('_', ' '))}</th>{cells(row)}"
    for row in rows
  ]
  top = "".join(f"<th>{html.escape(head)}" for head in heads)
  return (
    f"<table><caption>{caption}</caption>{top and f'<tr>{top}'}"
    f"{''.join(lines)}</table>"
    if lines
    else ""
  )


def _shown(key: str, value) -> str:
  if value is None or value in ([], ""):
    text = "-"
  elif isinstance(value, bool):
    text = "yes" if value else "no"
  elif isinstance(value, (list, tuple)):
    text = ", ".join(map(str, value))
  elif isinstance(value, int):
    text = str(value) if "seed" in key else f"{value:,}"
  elif isinstance(value, float):
    text = f"{value:.1%}" if key.endswith(_PER_CENT) else f"{value:.5g}"
  else:
    text = str(value)
  return html.escape(text)
