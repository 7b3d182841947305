"""A few inputs of `make fuzz` for each reader."""

import json
import subprocess
import sys

import pytest
import runs

from tests.fuzz import __main__ as fuzz

FLAGS = ("run_flags", "bert_config", "config_json", "data_flags")


@pytest.mark.parametrize("name", sorted({*fuzz.READERS} - {*FLAGS}))
def test_damage_is_refused_or_does_no_harm(tmp_path, name):
  most = round(
    60 * min(1, fuzz.READERS[name][1])
  )  # slow ones have a small share
  count, errors = fuzz.findings(name, most, 1, tmp_path)
  for error in errors:
    raise error
  assert count >= most / 2


@pytest.mark.parametrize("names", [",".join(FLAGS[:-1]), FLAGS[-1]])
def test_flags_are_refused_or_right(tmp_path, names):
  """In a process of their own: two commands define the same flags."""
  words = ["--inputs=60", "--readers", names, "--folder", str(tmp_path)]
  done = subprocess.run(
    [sys.executable, "-m", "tests.fuzz", *words],
    cwd=runs.ROOT, capture_output=True, text=True, timeout=runs.HANG_SECONDS,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-3000:]
  assert json.loads(done.stdout)["findings"] == 0, done.stderr[-3000:]


def test_a_reader_that_is_wrong_is_found(tmp_path, monkeypatch):
  """It takes what another one refuses, or ends with an error of its own."""
  made, share = fuzz.READERS["any.json"]
  for read in (lambda data: None, lambda data: data.decode("ascii")):
    reader = lambda folder, read=read: made(folder)._replace(read=read)
    monkeypatch.setitem(fuzz.READERS, "any.json", (reader, share))
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    assert fuzz.findings("any.json", 100, 1, folder)[1]
