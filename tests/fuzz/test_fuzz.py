"""A few inputs of `make fuzz` for each reader."""

import json
import subprocess
import sys

import pytest
import runs

from tests.fuzz import __main__ as fuzz

FEW = {"create": 5, "pipeline": 5, "tokenizer": 10, "resume": 15}
FEW |= {"resume_foreign": 15, "init_checkpoint": 15}
FLAGS = ("run_flags", "bert_config", "config_json", "data_flags")


@pytest.mark.parametrize("name", sorted({*fuzz.READERS} - {*FLAGS}))
def test_damage_is_refused_or_does_no_harm(tmp_path, name):
  count, errors = fuzz.findings(name, FEW.get(name, 60), 1, tmp_path)
  for error in errors:
    raise error
  assert count >= FEW.get(name, 60) / 2


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
  made, share = fuzz.READERS["json_file"]
  for read in (lambda data: None, lambda data: data.decode("ascii")):
    reader = lambda folder, read=read: made(folder)._replace(read=read)
    monkeypatch.setitem(fuzz.READERS, "json_file", (reader, share))
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    assert fuzz.findings("json_file", 100, 1, folder)[1]
