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
  options = ["-q", "-x", "--tb=short", "-p", "no:cacheprovider", "-m", which]
  for limit in (f"timeout={runs.HANG_SECONDS}", "exit_on_timeout=true"):
    options += ["-o", f"faulthandler_{limit}"]  # of one test
  process = runs.launch(["-m", "pytest", *options, folder], 2, timeout=None)
  lines = process.stdout.splitlines()
  said = "\n\n".join(
    "\n".join([line for line in lines if line.startswith(f"[{rank}]")][-60:])
    for rank in range(2)
  )
  assert process.returncode == 0, said + process.stderr[-3000:]
  # Both ran the same ones.
  ends = [line.partition(" passed") for line in lines if " passed" in line]
  counts = {before.split(":")[-1] for before, _, _ in ends}
  assert len(ends) == 2 and len(counts) == 1, said
  print(said)
