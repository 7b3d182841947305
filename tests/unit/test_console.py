"""Lines that say how far the work is."""

import io
import sys

from common import console


def test_lines_say_how_much_how_fast_and_how_long(monkeypatch, capsys):
  now = [0.0]
  monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
  with console.Progress("reading", 1500.0, "MB", 300.0) as progress:
    for now[0] in (1.0, 5.0, 6.0, 9.9, 11.0):
      progress.at(300.0 + 20.0 * now[0])
  assert capsys.readouterr().err.splitlines() == [
    "reading: 400 of 1,500 MB, 20.0 MB/s, 0:55 left",
    "reading: 520 of 1,500 MB, 20.0 MB/s, 0:49 left",
  ]


def test_nothing_done_has_no_rate(capsys):
  with console.Progress("reading", 10, "MB", seconds=0) as progress:
    progress.at(0)
  assert capsys.readouterr().err == "reading: 0 of 10 MB, 0.0 MB/s\n"


def test_a_terminal_has_one_line_that_is_rewritten(monkeypatch):
  terminal = io.StringIO()
  terminal.isatty = lambda: True
  monkeypatch.setattr(sys, "stderr", terminal)
  with console.Progress("reading", 10, "MB") as progress:
    progress.at(0, "none", now=True)
    progress.say("a file is empty")
    progress.at(0, "none so far", now=True)
    progress.at(0, "too soon")
  clear = "\r\x1b[K"
  assert terminal.getvalue() == (
    f"{clear}none{clear}a file is empty\nnone{clear}none so far{clear}"
  )


def test_time_as_people_write_it():
  assert [console.minutes(s) for s in (0, 65.9, 7200)] == [
    "0:00",
    "1:05",
    "2:00:00",
  ]
