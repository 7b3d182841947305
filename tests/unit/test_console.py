"""Progress lines where stderr is no terminal."""

import re

from common import progress


def test_lines_say_how_much_how_fast_and_how_long(monkeypatch, capsys):
  now = [0.0]
  monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
  with progress.Progress("reading", 1500.0, "MB", 300.0) as bar:
    for now[0] in (1.0, 5.0, 6.0, 9.9, 11.0):
      bar.at(300.0 + 20.0 * now[0])
  assert capsys.readouterr().err.splitlines() == [
    "reading: 400 of 1,500 MB, 20.0 MB/s, 00:55 left",
    "reading: 520 of 1,500 MB, 20.0 MB/s, 00:49 left",
  ]


def test_nothing_done_has_no_rate(monkeypatch, capsys):
  monkeypatch.setattr(progress, "_SECONDS", 0)
  with progress.Progress("reading", 10, "MB") as bar:
    bar.at(0)
  assert re.fullmatch(
    r"reading: 0 of 10 MB, 0.0 MB/s\n", capsys.readouterr().err
  )
