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

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from absl import flags

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


@contextlib.contextmanager
def busy_processes(count: int):
  """Has `count` processes count, which end with the block."""
  busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
  try:
    yield
  finally:
    for process in busy:
      process.kill()
      process.wait()


def matmul_seconds(ranks: int) -> float:
  """CPU seconds of the same products, the mean of so many processes at once."""
  started = [
    subprocess.Popen(
      [sys.executable, "-c", _MATMULS],
      stdout=subprocess.PIPE,
      env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    for _ in range(ranks)
  ]
  return statistics.mean(float(p.communicate()[0]) for p in started)


def train(paths: quickstart.Paths) -> dict:
  """Wall and CPU seconds of one training, from start to last evaluation."""
  with tempfile.TemporaryDirectory() as paths.pretrain:
    command = quickstart.pretraining_command(paths, _RANKS, FLAGS.updates)
    command.append("--eval_every_steps=0")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    process = subprocess.run(command, capture_output=True, text=True)
    wall = time.monotonic() - began
    # Of processes that have ended: not yet of the busy ones.
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
  if process.returncode:
    sys.exit(f"error: the training failed:\n{process.stderr[-3000:]}")
  cpu = sum(after[:2]) - sum(before[:2])  # user and system
  return {"wall_seconds": round(wall, 1), "cpu_seconds": round(cpu, 1)}


def main(_) -> None:
  paths = quickstart.Paths(FLAGS.folder)
  if not os.path.exists(paths.config):
    raise errors.UserError(
      f"--folder={FLAGS.folder}: no records of make pretrain there. Run it "
      "first, or name its OUTPUT_DIR"
    )
  ratios = {"wall": [], "cpu": [], "matmul_cpu": []}
  for number in range(FLAGS.rounds):
    runs = []
    for busy in (0, FLAGS.busy):
      with busy_processes(busy):
        matmul = round(matmul_seconds(_RANKS), 3)
        runs.append({"matmul_cpu_seconds": matmul, **train(paths)})
      line = {"round": number, "busy": busy, **runs[-1]}
      print(json.dumps(line), flush=True)
    quiet, loud = runs
    for name, values in ratios.items():
      values.append(loud[f"{name}_seconds"] / quiet[f"{name}_seconds"])
  summary = {
    f"{name}_ratio": round(statistics.median(values), 2)
    for name, values in ratios.items()
  }
  print(json.dumps({"busy": FLAGS.busy, "ranks": _RANKS, **summary}))


if __name__ == "__main__":
  flags.DEFINE_integer("busy", 3, "Busy processes.", lower_bound=1)
  flags.DEFINE_integer("rounds", 3, "Pairs of runs.", lower_bound=1)
  flags.DEFINE_integer("updates", 200, "Of a run.", lower_bound=1)
  flags.DEFINE_string("folder", "runs/quickstart", "`make pretrain`'s.")
  errors.run_main(main)
