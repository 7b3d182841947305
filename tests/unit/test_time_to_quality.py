"""benchmarks/time_to_quality.py: its table, and the lines it is made of."""

import types

from benchmarks import time_to_quality
from common import json_files


def line(arm, budget, minutes, seed, loss):
  return {
    "arm": arm, "budget": budget, "minutes": minutes, "seed": seed,
    "loss_32": loss,
  }  # fmt: skip


BASELINE = [line("theirs", 60.0, 56.5, seed, 6.0) for seed in (1, 2)]


def cells(lines):
  """Of the row of "ours"; the baseline's last one."""
  title, _, *rows = time_to_quality.table(
    [*BASELINE, *lines], "loss_32", "theirs"
  )
  assert title.count("|") == rows[0].count("|")
  theirs, ours = ([c.strip() for c in row.split("|")[1:-1]] for row in rows)
  assert theirs[0] == "theirs" and theirs[-1] == "56.5 min"
  assert "(2, 56.5 min)" in theirs[-2]
  return ours


def test_a_curve_that_begins_below_the_baseline_took_at_most_its_first_time():
  ours = cells([line("ours", 5.0, 5.0, seed, 5.5) for seed in (1, 2)])
  assert ours[1] == "5.500 ± 0.000 (2)"
  assert ours[-1] == "≤ 5.0 min (≤ 5.0 min to ≤ 5.0 min)"


def test_times_are_interpolated_in_their_logarithms():
  """7 nats after 4 minutes, 5 after 16: 6 after 8."""
  points = [(4.0, 7.0), (16.0, 5.0)]
  ours = cells([line("ours", t, t, 1, loss) for t, loss in points])
  assert ours[-1] == "8.0 min"
  ours = cells([line("ours", t, t, 1, loss + 2) for t, loss in points])
  assert ours[-1] == "not reached"


def test_an_interval_is_as_wide_as_few_seeds_make_it():
  """Of two seeds: Student's t with 1 degree of freedom, 6.3 errors at 90%."""
  points = [(4.0, 7.0), (4.0, 7.2), (16.0, 5.0), (16.0, 5.2)]
  made = [line("ours", t, t, n % 2, x) for n, (t, x) in enumerate(points)]
  best, low, high = (
    float(word) for word in cells(made)[-1].replace("(", "").split() if
    word[0].isdigit()
  )  # fmt: skip
  assert best == 8.6
  # 0.1 nats times 1.64, the normal's, would be 7.7 to 9.6 minutes.
  assert 4.0 < low < 7.0 and 10.5 < high < 16.0


def test_a_run_that_diverged_has_a_line_without_losses(tmp_path, monkeypatch):
  for name in ("vocab.txt", "corpus/train.txt", "corpus/heldout.txt"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("a\n")
  folder = tmp_path / "run"
  (folder / "run").mkdir(parents=True)
  bad = folder / "run" / "nonfinite.json"
  bad.write_text("{}")  # of an earlier start

  def train(command, log, unless=""):
    assert unless == str(bad) and not bad.exists()
    json_files.write(unless, {"update": 7})
    return 1.0

  made_records = lambda *_: "records"
  monkeypatch.setattr(time_to_quality, "run", train)
  monkeypatch.setattr(time_to_quality, "made_records", made_records)
  given = types.SimpleNamespace(
    text=str(tmp_path), output_dir=str(tmp_path), num_ranks=1,
    eval_lengths=["32"], pairs=None, sample=1,
  )  # fmt: skip
  monkeypatch.setattr(time_to_quality, "FLAGS", given)
  arm = {"bert_config": {}, "records": {}}
  made = time_to_quality.train(arm, 1.0, 1, str(folder))
  assert made == {"diverged": True, "updates": 7}
  monkeypatch.setattr(time_to_quality, "train", lambda *_: dict(made))
  written = time_to_quality.measure("ours", arm, 1.0, 1)
  assert written["diverged"] and written["cores"] >= 1
  assert not [name for name in written if name.startswith("loss")]
  ours = cells([line("ours", 5.0, 5.0, 1, 5.5), written | {"budget": 5.0}])
  assert ours[1] == "5.500 (1, 1 diverged)"
  title = time_to_quality.table(
    [*BASELINE, {"arm": "theirs", "budget": 90.0, "diverged": True}],
    "loss_32", "theirs",
  )[0]  # fmt: skip
  assert "time to" not in title  # its longest budget has no loss


def test_held_out_text_has_the_case_of_the_arms_records(monkeypatch):
  monkeypatch.setattr(time_to_quality, "made_records", lambda _, given: given)
  for given in ({}, {"do_lower_case": False}):
    arm = {"records": {**given, "max_seq_length": 32}}
    made = time_to_quality.heldout("128", arm)
    assert made["max_seq_length"] == 128
    assert made.get("do_lower_case") == given.get("do_lower_case")
