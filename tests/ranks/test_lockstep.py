"""The tests of lockstep/, on two ranks at once."""

import pytest
import runs


@pytest.mark.parametrize(
  "which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)]
)
def test_two_ranks(tmp_path, monkeypatch, which):
  monkeypatch.setenv("LOCKSTEP_FOLDER", str(tmp_path))
  # Slices wait for each other many times an update.
  monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
  folder = f"{runs.ROOT}/tests/ranks/lockstep"
  options = ["-q", "-x", "-p", "no:cacheprovider", "-m", which]
  process = runs.launch(["-m", "pytest", *options, folder], ranks=2)
  said = process.stdout[-12000:]
  assert process.returncode == 0, said + process.stderr[-3000:]
  # Both ran the same ones.
  ends = [line for line in said.splitlines() if " passed" in line]
  counts = {line.partition(" passed")[0].split()[-1] for line in ends}
  assert len(ends) == 2 and len(counts) == 1, said
  print(said)
