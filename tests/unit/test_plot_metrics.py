"""What is drawn of run folders."""

import json
import os
import subprocess
import sys
import warnings

import matplotlib.image
import pytest
import runs

from common import errors
from tools import plot_metrics

PRETRAINING = {"masked_lm_loss": 9.0, "masked_lm_accuracy": 0.1}
PRETRAINING |= {"next_sentence_loss": 0.7, "next_sentence_accuracy": 0.5}


def write_lines(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder, train, held_out=()):
  """A run folder with reports at updates 10, 20 and evaluations at 0, 20."""
  folder.mkdir()
  common = {"learning_rate": 1e-3, "skipped": False, "tokens_per_second": 9.0}
  rows = [{"global_step": step, **common, **train} for step in (10, 20)]
  write_lines(folder / "metrics.jsonl", rows)
  if held_out:
    rows = [{"global_step": s, "examples": 9, **held_out} for s in (0, 20)]
    write_lines(folder / "eval_metrics.jsonl", rows)
  (folder / "run.json").write_text('{"runs": [{"data": null}]}')
  return str(folder)


def drawn(folders, tmp_path, monkeypatch):
  """The figure; the picture is checked to be one."""
  kept = []
  monkeypatch.setattr(plot_metrics.plt, "close", kept.append)
  plot_metrics.plot(folders, str(tmp_path / "curve.png"))
  height, width, _ = matplotlib.image.imread(tmp_path / "curve.png").shape
  assert width == 1320 and height > 500
  return kept[0]


def curves(figure):
  """Label of a panel -> colors of its curves and their points."""
  return {
    axis.get_ylabel(): [
      (line.get_color(), line.get_xydata().tolist()) for line in axis.lines
    ]
    for axis in figure.axes
    if axis.axison
  }


def legend(figure):
  return [text.get_text() for text in figure.legends[0].texts]


def test_a_run_of_pretraining(tmp_path, monkeypatch):
  """With model and data where its folder says them."""
  run = make_run(tmp_path / "a", {"loss": 9.7, **PRETRAINING}, PRETRAINING)
  figure = drawn([run], tmp_path, monkeypatch)
  assert list(curves(figure)) == [
    "masked words: loss (nats)", "masked words: right",
    "next sentence: loss (nats)", "next sentence: right", "learning rate",
    "tokens/s, all ranks",
  ]  # fmt: skip
  check_losses(figure)
  assert legend(figure) == [run, "evaluations"]
  bert = dict(num_hidden_layers=2, hidden_size=128, vocab_size=8192)
  flags = {"bert": bert, "input_file": "a*.rec"}
  made = {"plan": {"ranks": 1}, "flags": flags, "data": {"files": ["a.rec"]}}
  (tmp_path / "a" / "run.json").write_text(json.dumps({"runs": [made]}))
  assert legend(drawn([run], tmp_path, monkeypatch)) == [
    f"{run}, 2 layers, 128 wide, 8,192 tokens, on a*.rec",
    "evaluations",
  ]


def check_losses(figure):
  (_, training), (_, held_out) = curves(figure)["masked words: loss (nats)"]
  assert training == [[10, 9.0], [20, 9.0]]
  assert held_out == [[0, 9.0], [20, 9.0]]


def test_runs_of_other_kinds_share_a_picture(tmp_path, monkeypatch):
  """One without evaluations; each has a color and only its own panels."""
  squad = {"loss": 1.0, "exact_match": 80.0, "f1": 88.0, "best_f1": 89.0}
  folders = [
    make_run(tmp_path / "a", {"loss": 9.7, **PRETRAINING}, PRETRAINING),
    make_run(tmp_path / "b", {"loss": 1.5, "accuracy": 0.2}, squad),
    make_run(tmp_path / "c", {"loss": 2.5, "accuracy": 0.3}),
  ]
  figure = drawn(folders, tmp_path, monkeypatch)
  found = {
    label: [(color, points[-1]) for color, points in lines if points]
    for label, lines in curves(figure).items()
  }
  assert found["masked words: right"] == [("C0", [20, 0.1])] * 2
  assert found["loss"] == [
    ("C1", [20, 1.5]), ("C1", [20, 1.0]), ("C2", [20, 2.5])
  ]  # fmt: skip
  assert found["right"] == [("C1", [20, 0.2]), ("C2", [20, 0.3])]
  assert found["exact match"] == [("C1", [20, 80.0])]
  assert found["f1"] == [("C1", [20, 88.0])]
  assert len(found["learning rate"]) == len(found["tokens/s, all ranks"]) == 3
  assert len(found) == 10
  assert legend(figure) == [*folders, "evaluations"]


def test_the_start_does_not_squeeze_the_rest(tmp_path, monkeypatch):
  """Nor is noise drawn as strongly as the mean around it."""
  run = make_run(tmp_path / "a", PRETRAINING, {**PRETRAINING})
  losses = [50.0 if step == 1 else 5.0 + step % 2 for step in range(1, 101)]
  rows = [
    {"global_step": n, "masked_lm_loss": loss, "masked_lm_accuracy": 0.25}
    for n, loss in enumerate(losses, 1)
  ]
  write_lines(tmp_path / "a" / "metrics.jsonl", rows)
  figure = drawn([run], tmp_path, monkeypatch)
  axis = figure.axes[0]
  assert axis.get_ylim()[1] < 10.0
  faint, mean, _ = axis.lines
  assert faint.get_ydata().tolist() == losses and faint.get_alpha() < 0.5
  assert mean.get_alpha() is None and 5 <= min(mean.get_ydata()[10:]) < 6
  assert mean.get_ydata()[-1] == pytest.approx(5.5, abs=0.2)
  format = figure.axes[1].yaxis.get_major_formatter()
  assert format(0.25) == "25.0%"


JUPYTERS = "module://matplotlib_inline.backend_inline"


def test_pictures_need_no_tensorflow_and_no_window(tmp_path):
  """Nor does what the command imports, whatever the environment names."""
  (tmp_path / "tensorflow.py").write_text("raise ImportError('loaded')\n")
  run = make_run(tmp_path / "a", PRETRAINING, PRETRAINING)
  path = f"{tmp_path}:{runs.ROOT}"
  done = subprocess.run(
    [sys.executable, "-m", "tools.plot_metrics", run, "--output=c.png"],
    cwd=tmp_path, capture_output=True, text=True,
    env={**os.environ, "PYTHONPATH": path, "MPLBACKEND": JUPYTERS},
  )  # fmt: skip
  assert (done.stdout, done.returncode) == ("c.png\n", 0), done.stderr


def test_the_name_says_the_format(tmp_path):
  """And what cannot be a picture makes none."""
  run = make_run(tmp_path / "a", PRETRAINING)
  plot_metrics.plot([run], str(tmp_path / "curve.SVG"))
  assert "<svg" in (tmp_path / "curve.SVG").read_text()
  (tmp_path / "b").mkdir()
  for folders, output, words in (
    ([run, str(tmp_path / "b")], "c.png", "no metrics.jsonl with reports"),
    ([run], "c.xyz", r"--output=\S*c\.xyz: .*png"),
    ([run], "curve", r"--output=\S*curve: .*png"),
  ):
    with pytest.raises(errors.UserError, match=words):
      plot_metrics.plot(folders, f"{tmp_path}/{output}")
    assert not (tmp_path / output).exists()


def test_a_page_has_results_and_settings(tmp_path):
  run = make_run(tmp_path / "a<b", PRETRAINING, {"masked_lm_loss": 2.25})
  start = {
    "data": None,
    "plan": {"updates": 20},
    "flags": {"train_batch_size": 77},
  }
  (tmp_path / "a<b/run.json").write_text(json.dumps({"runs": [start]}))
  plot_metrics.plot([run], str(tmp_path / "curve.html"))
  page = (tmp_path / "curve.html").read_text()
  for row in ("masked_lm_loss<td>2.25", "train_batch_size<td>77", "a&lt;b"):
    assert row in page


def test_what_has_no_number_is_not_drawn(tmp_path, monkeypatch):
  """Null in a report, also in the last one; NaN as older runs wrote it."""
  run = make_run(tmp_path / "a", PRETRAINING, PRETRAINING)
  for name in ("metrics.jsonl", "eval_metrics.jsonl"):
    with open(tmp_path / "a" / name, "a", encoding="utf-8") as f:
      for step, value in ((30, None), (40, float("nan"))):
        numbers = dict.fromkeys([*PRETRAINING, "tokens_per_second"], value)
        f.write(json.dumps({"global_step": step, **numbers}) + "\n")
  figure = drawn([run], tmp_path, monkeypatch)
  check_losses(figure)
  speeds = curves(figure)["tokens/s, all ranks"]
  assert len(curves(figure)) == 6
  assert speeds[0][1] == [[10, 9.0], [20, 9.0]]


def test_a_folder_of_any_name_is_drawn(tmp_path, monkeypatch):
  """With bytes that are no text, a formula that is none, and no such glyph."""
  run = make_run(
    tmp_path / os.fsdecode(b"\xff $\\x$ \xf0\x9f\x99\x82"), PRETRAINING
  )
  other = make_run(tmp_path / "other", PRETRAINING)
  output = tmp_path / "new" / "curve.png"
  with warnings.catch_warnings(record=True) as warned:
    warnings.filterwarnings("ignore", "Glyph")  # pytest has its own filters
    plot_metrics.main(plot_metrics.Settings(output=str(output)), run)
    plot_metrics.plot([run, other], str(tmp_path / "c.png"))
  assert not warned and output.exists()
