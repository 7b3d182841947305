"""A few faults of benchmarks/faults/fault_schedules.py, and what it notices."""

import dataclasses

import numpy as np
import pytest

from benchmarks.faults import fault_schedules, outcome
from benchmarks.faults.fault_schedules import Fault, Setting

ONE_RANK = Setting(ranks=1, accumulation=2, precision="fp16")
TWO_RANKS = Setting(ranks=2, accumulation=1, precision="fp32")


@pytest.fixture(scope="module")
def schedules(tmp_path_factory):
  return fault_schedules.Schedules(str(tmp_path_factory.mktemp("faults")))


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, setting, faults",
  [
    (
      "killed while saving, and a damaged checkpoint",
      ONE_RANK,
      [
        Fault("kill", moment="saving", updates=6),
        Fault("flip", updates=6, chance=0.1),
      ],
    ),
    # The other rank ends the run, by itself and with nothing left behind.
    (
      "a rank that no longer answers",
      TWO_RANKS,
      [Fault("stop", target=1, updates=7, delay=0.1)],
    ),
  ],
)
def test_the_results_do_not_know(schedules, name, setting, faults):
  result = schedules.run(name.replace(" ", "_"), setting, faults)
  assert result["problems"] == []
  assert (result["lost"], result["repeated"]) == (0, 0)
  assert len(result["struck"]) == len(faults) == result["starts"] - 1, result
  reports = schedules.reference(setting).reports.values()
  scales = {report["loss_scale"] for (report,) in reports}
  assert len(scales) > 3 or setting.precision == "fp32"  # it moves


def test_differences_are_told():
  """Of runs of eight updates of four records each."""
  updates = range(1, 9)
  want = outcome.Outcome(
    arrays={"bert/bias": np.zeros(3, np.float32), "step": np.int64(8)},
    reports={n: [{"global_step": n}] for n in updates},
    # Of one rank's one micro-batch.
    consumed={n: [[(0, [*range(4 * n, 4 * n + 4)], "masks")]] for n in updates},
    redone=[],
  )
  assert outcome.compare(want, want) == ([], 0, 0)

  def told(**changes):
    return outcome.compare(dataclasses.replace(want, **changes), want)

  array = np.nextafter(want.arrays["bert/bias"], np.float32(1))
  (line,), *_ = told(arrays={**want.arrays, "bert/bias": array})
  assert "bert/bias" in line
  (line,), *_ = told(reports={**want.reports, 7: 2 * want.reports[7]})
  assert "[7]" in line
  (line,), *_ = told(redone=["start 2: other records in update 3"])
  assert "update 3" in line
  # Update 5 is made of update 4's records.
  consumed = {**want.consumed, 5: want.consumed[4]}
  (line,), lost, repeated = told(consumed=consumed)
  assert "[5]" in line and lost == repeated == 4
