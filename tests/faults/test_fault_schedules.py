"""A few faults of benchmarks/faults/fault_schedules.py, and what it notices."""

import dataclasses

import numpy as np
import pytest

from benchmarks.faults import fault_schedules
from benchmarks.faults.fault_schedules import Fault, Setting


@pytest.fixture(scope="module")
def schedules(tmp_path_factory):
  return fault_schedules.Schedules(str(tmp_path_factory.mktemp("faults")))


ONE_RANK = Setting(ranks=1, accumulation=2, precision="fp16")


@pytest.mark.slow
def test_killed_while_saving_and_a_damaged_checkpoint(schedules):
  """With a moving loss scale."""
  faults = [
    Fault("kill", moment="saving", updates=6),
    Fault("flip", updates=6, chance=0.1),
  ]
  result = schedules.run("one", ONE_RANK, faults)
  assert result["problems"] == []
  assert (result["lost"], result["repeated"]) == (0, 0)
  assert result["starts"] == 3 and len(result["struck"]) == 2, result
  reports = schedules.reference(ONE_RANK).reports
  assert len({line.split('"loss_scale":')[1][:10] for line in reports}) > 3


@pytest.mark.slow
def test_a_rank_that_no_longer_answers(schedules):
  """The other ends the run, by itself and with nothing left behind."""
  setting = Setting(ranks=2, accumulation=1, precision="fp32")
  fault = Fault("stop", target=1, updates=7, delay=0.1)
  result = schedules.run("two", setting, [fault])
  assert result["problems"] == []
  assert (result["lost"], result["repeated"]) == (0, 0)
  assert result["starts"] == 2 and len(result["struck"]) == 1, result


def test_differences_are_told(schedules):
  want = schedules.reference(ONE_RANK)
  assert fault_schedules.compare(want, want) == ([], 0, 0)

  def told(**changes):
    return fault_schedules.compare(dataclasses.replace(want, **changes), want)

  name = "bert/embeddings/word_embeddings"
  array = want.arrays[name].copy()
  array[0, 0] = np.nextafter(array[0, 0], 1)
  (line,), *_ = told(arrays={**want.arrays, name: array})
  assert name in line
  (line,), *_ = told(reports=[*want.reports[:7], *want.reports[6:-1]])
  assert "missing [48], double [7]" in line
  # Update 5 is made of update 4's records.
  consumed = {**want.consumed, 5: want.consumed[4]}
  (line,), lost, repeated = told(consumed=consumed)
  assert "[5]" in line and lost == repeated == fault_schedules.GLOBAL_BATCH
