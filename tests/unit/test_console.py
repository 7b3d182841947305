"""Lines that say how far the work is."""

import io
import sys

import pytest

from common import console


def test_numbers_as_people_write_them():
  files = [console.counted(n, "file") for n in (0, 1, 1000)]
  assert files == ["0 files", "1 file", "1,000 files"]
  assert console.counted(2, "micro-batch", "es") == "2 micro-batches"
  times = {0: "0:00", 65.9: "1:05", 7200: "2:00:00"}
  assert {seconds: console.minutes(seconds) for seconds in times} == times


@pytest.fixture
def now(monkeypatch):
  """The time, which tests set; the time of day stands still."""
  now = [0.0]
  monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
  monkeypatch.setattr(console.time, "strftime", lambda form: "23:59:59")
  return now


def a_terminal(monkeypatch, columns=80):
  terminal = io.StringIO()
  terminal.isatty = lambda: True
  monkeypatch.setattr(sys, "stderr", terminal)
  monkeypatch.setenv("COLUMNS", str(columns))
  return terminal


def test_lines_say_when_how_much_how_fast_and_how_long(now, capsys):
  """What is not begun has no end."""
  with console.Progress("reading", 1500.0, "MB", 300.0) as progress:
    for now[0] in (1.0, 5.0, 6.0, 9.9, 11.0):
      progress.at(300.0 + 20.0 * now[0])
  console.Progress("reading", 2, "pieces", seconds=0).at(0)
  with console.Progress("reading", 0.04, "MB") as progress:
    progress.at(0.01, seconds=2.0, now=True)
  assert capsys.readouterr().err.splitlines() == [
    "23:59:59  reading: 300 of 1,500 MB",
    "23:59:59  reading: 400 of 1,500 MB  20.0 MB/s  0:55 left",
    "23:59:59  reading: 520 of 1,500 MB  20.0 MB/s  0:49 left",
    "23:59:59  reading: 0 of 2 pieces",
    "23:59:59  reading: 0.000 of 0.040 MB",
    "23:59:59  reading: 0.010 of 0.040 MB  0.005 MB/s  0:06 left",
  ]


def left(progress, capsys, *work, **more):
  progress.at(*work, now=True, **more)
  return capsys.readouterr().err.split("  ")[-1].strip()


def test_the_end_is_told_by_recent_work(now, capsys):
  """100 slow units are forgotten after 100 fast ones."""
  progress = console.Progress("training", 1000, "updates")
  for step in range(1, 101):
    progress.at(step, seconds=10.0)
  assert left(progress, capsys, 100, seconds=0.0) == "2:30:00 left"
  for step in range(101, 201):
    progress.at(step, seconds=1.0)
  whole, seconds = left(progress, capsys, 200, seconds=0.0)[:-5].split(":")
  assert 800 < 60 * int(whole) + int(seconds) < 1200


def test_what_is_no_work_does_not_move_the_end(now, capsys):
  """An evaluation takes the clock on, and no seconds of work."""
  progress = console.Progress("training", 100, "updates", 1)
  assert left(progress, capsys, 1, seconds=0.0) == "training: 1 of 100 updates"
  now[0] = 500.0
  assert left(progress, capsys, 2, seconds=2.0) == "3:16 left"
  now[0] = 900.0
  assert left(progress, capsys, 3, seconds=2.0) == "3:14 left"


def test_a_line_that_is_too_long_loses_words_from_its_end(now, capsys):
  progress = console.Progress("training", 10, "updates")
  progress.at(1, "a" * 30, "b" * 25, "c" * 20, now=True, seconds=1.0)
  (line,) = capsys.readouterr().err.splitlines()
  assert line == f"23:59:59  {'a' * 30}  {'b' * 25}  0:09 left"


def test_a_terminal_has_one_line_that_is_rewritten(now, monkeypatch):
  """The last one can stay."""
  terminal = a_terminal(monkeypatch)
  with console.Progress("reading", 10, "MB") as progress:
    progress.at(0, "none", now=True)
    console.tell("a file is empty")
    console.tell("another")
    progress.at(0, "none so far", now=True)
    progress.at(0, "too soon")
  last = console.Progress("reading", 10, "MB")
  last.at(10, "all", now=True)
  last.close()
  console.tell("done")
  clear = "\r\x1b[K"
  assert terminal.getvalue() == (
    f"reading: 0 of 10 MB{clear}none"
    f"{clear}a file is empty\nanother\nnone so far{clear}"
    "all\ndone\n"
  )


def test_a_narrow_terminal_has_no_second_line(now, monkeypatch):
  terminal = a_terminal(monkeypatch, columns=20)
  console.Progress("reading", 10, "MB").at(3, now=True)
  assert terminal.getvalue() == "reading: 3 of 10 MB"
