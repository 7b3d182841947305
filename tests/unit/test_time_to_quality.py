"""The table of benchmarks/time_to_quality.py."""

from benchmarks import time_to_quality


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
