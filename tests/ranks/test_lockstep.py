"""The tests of lockstep/, on two or three ranks at once."""

import pytest
import runs

FOLDER = f"{runs.ROOT}/tests/ranks/lockstep"
OF_THREE = f"{FOLDER}/test_three_ranks.py"
OF_ANY = f"{FOLDER}/test_compared_texts.py"


@pytest.mark.parametrize(
  "which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
  "ranks, tests",
  [(2, [f"--ignore={OF_THREE}", FOLDER]), (3, [OF_THREE, OF_ANY])],
)
def test_ranks_together(tmp_path, monkeypatch, ranks, tests, which):
  monkeypatch.setenv("LOCKSTEP_FOLDER", str(tmp_path))
  # Slices wait for each other many times an update.
  monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
  options = ["-q", "-x", "--tb=short", "-p", "no:cacheprovider", "-m", which]
  for limit in (f"timeout={runs.HANG_SECONDS}", "exit_on_timeout=true"):
    options += ["-o", f"faulthandler_{limit}"]  # of one test
  process = runs.launch(["-m", "pytest", *options, *tests], ranks, timeout=None)
  lines = process.stdout.splitlines()
  said = "\n\n".join(
    "\n".join([line for line in lines if line.startswith(f"[{rank}]")][-60:])
    for rank in range(ranks)
  )
  assert process.returncode == 0, said + process.stderr[-3000:]
  # All ran the same ones.
  ends = [line.partition(" passed") for line in lines if " passed" in line]
  counts = {before.split(":")[-1] for before, _, _ in ends}
  assert len(ends) == ranks and len(counts) == 1, said
  print(said)
