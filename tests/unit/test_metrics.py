"""Reports that survive a full disk and a kill."""

import resource

import pytest
import runs

from checkpoints import metrics
from common.errors import DataError


def report(step):
  return {"global_step": step, "loss": 1.0 / step}


def log_of(folder, resume_step=0):
  return metrics.MetricsLog(str(folder), "m.jsonl", resume_step, "train")


def steps(folder):
  found = metrics.read_jsonl(str(folder / "m.jsonl"))
  return [r["global_step"] for r in found]


def test_a_line_that_a_kill_cut_off_is_made_again(tmp_path):
  log = log_of(tmp_path)
  for step in (1, 2, 3):
    log.write(report(step))
  log.close()
  path = tmp_path / "m.jsonl"
  path.write_bytes(path.read_bytes()[:-5])
  assert steps(tmp_path) == [1, 2]
  log = log_of(tmp_path, resume_step=2)
  log.write(report(3))
  log.close()
  assert steps(tmp_path) == [1, 2, 3]
  assert path.read_bytes().count(b"\n") == 3


def test_a_full_disk_does_not_end_a_run_that_resumes(tmp_path):
  """Where no report is dropped, nothing is written."""
  log = log_of(tmp_path)
  log.write(report(1))
  log.close()
  with runs.small_files(1):
    log_of(tmp_path, resume_step=1).close()
  assert steps(tmp_path) == [1]


@pytest.mark.parametrize("line", ['{"global', "[]", "7", "null", '{"a": 1}'])
def test_another_damaged_line_is_named(tmp_path, line):
  (tmp_path / "m.jsonl").write_text(f'{{"global_step": 1}}\n{line}\n{{}}\n')
  with pytest.raises(DataError, match=r"m\.jsonl: line 2 does not belong"):
    log_of(tmp_path)


def test_no_space_for_reports_is_told_and_they_are_written_later(
  tmp_path, capsys
):
  """In between there are whole lines only."""
  size = len(metrics._line({"global_step": 1, "loss": 0.5}))
  log, counts = log_of(tmp_path), []
  for step in range(1, 7):
    is_full = step in (3, 4)
    with runs.small_files(2 * size + 9 if is_full else resource.RLIM_INFINITY):
      log.write({"global_step": step, "loss": 0.5})
    counts.append((tmp_path / "m.jsonl").read_text().count("\n"))
  log.close()
  assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
  assert counts == [1, 2, 2, 2, 5, 6]
  told = capsys.readouterr().err
  assert told.count("training continues and tries again") == 1
  assert told.count("TensorBoard gets no more of this run") == 1


def test_reports_that_never_found_space_are_an_error(tmp_path):
  log = log_of(tmp_path)
  with runs.small_files(10):
    log.write(report(1))
    with pytest.raises(DataError, match=r"m\.jsonl: 1 reports could not"):
      log.close()
