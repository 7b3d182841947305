"""What a training costs on a machine that others use, too.

  python -m benchmarks.faults.busy_machine --busy=3 --rounds=3

Runs `make pretrain`'s training on two ranks alone and beside so many busy
processes of one thread each, in turns. Prints one JSON line a run, then the
medians of busy over quiet of the same round. CPU seconds are user and system of
all of the training's processes.

The same instructions take more CPU seconds where others use the caches, the
other half of a core or the host of a virtual machine. Before each training as
many processes as ranks multiply the same matrices: matmul_cpu_ratio is what a
busy machine adds to them, and so to any program.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from absl import flags

from benchmarks import measuring
from common import errors
from tools import quickstart

FLAGS = flags.FLAGS
_RANKS = 2
_MATMULS = """
import time, numpy as np
a = np.ones([512, 512], np.float32)
a @ a
began = time.process_time()
for _ in range(400): a @ a
print(time.process_time() - began)
"""
# Ends with its parent, too, however that ends.
_BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:
  for _ in range(10**6): pass
"""


def matmul_seconds() -> float:
  """CPU seconds of the same products, the mean of a process for each rank."""
  started = [
    subprocess.Popen(
      [sys.executable, "-c", _MATMULS],
      stdout=subprocess.PIPE,
      env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    for _ in range(_RANKS)
  ]
  return statistics.mean(float(p.communicate()[0]) for p in started)


def train() -> dict:
  """Wall and CPU seconds of one training, from start to last evaluation."""
  paths = quickstart.Paths(FLAGS.folder)
  with tempfile.TemporaryDirectory() as paths.pretrain:
    command = quickstart.pretraining_command(paths, _RANKS, FLAGS.updates)
    # Of processes that have ended: not yet of the busy ones.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    measuring.run([*command, "--eval_every_steps=0"])
    wall = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
  cpu = sum(after[:2]) - sum(before[:2])  # user and system
  return {"wall_seconds": round(wall, 1), "cpu_seconds": round(cpu, 1)}


def run_beside(busy: int) -> dict:
  """One training beside so many busy processes."""
  others = [
    subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(busy)
  ]
  try:
    line = {"busy": busy, "matmul_cpu_seconds": round(matmul_seconds(), 3)}
    line |= train()
  finally:
    for process in others:
      process.kill()
      process.wait()
  measuring.show(line)
  return line


def main(_) -> None:
  rounds = [
    (run_beside(0), run_beside(FLAGS.busy)) for _ in range(FLAGS.rounds)
  ]
  summary = {"busy": FLAGS.busy, "ranks": _RANKS}
  for name in ("wall", "cpu", "matmul_cpu"):
    key = f"{name}_seconds"
    ratios = [loud[key] / quiet[key] for quiet, loud in rounds]
    summary[f"{name}_ratio"] = measuring.median(ratios, 2)
  measuring.show(summary)


if __name__ == "__main__":
  flags.DEFINE_integer("busy", 3, "Busy processes.", lower_bound=1)
  flags.DEFINE_integer("rounds", 3, "Pairs of runs.", lower_bound=1)
  flags.DEFINE_integer("updates", 200, "Of a run.", lower_bound=1)
  flags.DEFINE_string("folder", "runs/quickstart", "`make pretrain`'s.")
  errors.run_main(main)
