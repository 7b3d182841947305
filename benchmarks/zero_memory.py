"""What ZeRO-1 saves in memory and costs in time, on ranks of one machine.

  python -m benchmarks.zero_memory --ranks=4 \\
    --step_flags="--bert_config_file=configs/bert_base.json ..."

Runs benchmarks/step.py with --zero=0 and --zero=1 in turns, one thread a rank.
Prints one JSON line a run, then what the formula says: of Adam's 8 bytes a
weight a rank keeps its share (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054, P_os).
"""

import json
import os
import shlex
import statistics
import subprocess
import sys

from absl import flags

from common import errors

FLAGS = flags.FLAGS
_SECONDS = 900.0  # of a run at most


def run(zero: int) -> dict:
  """benchmarks/step.py's line.

  Raises:
    UserError: it failed; with its last lines.
  """
  horovodrun = os.path.join(os.path.dirname(sys.executable), "horovodrun")
  process = subprocess.run(
    [
      *[horovodrun, "-np", str(FLAGS.ranks)],
      *[sys.executable, "-m", "benchmarks.step", "--num_threads=1"],
      *[f"--zero={zero}", *shlex.split(FLAGS.step_flags)],
    ],
    capture_output=True,
    text=True,
    timeout=_SECONDS,
  )
  lines = [s for s in process.stdout.splitlines() if '"optimizer_mb' in s]
  if process.returncode or not lines:
    last = "\n".join(process.stderr.splitlines()[-5:])
    raise errors.UserError(
      f"benchmarks/step.py ended with status {process.returncode}: {last}"
    )
  return {"zero": zero, **json.loads(lines[0][lines[0].index("{") :])}


def main(_) -> None:
  found = {0: [], 1: []}
  for number in range(FLAGS.rounds):
    for zero, results in found.items():
      results.append(run(zero))
      print(json.dumps({"round": number, **results[-1]}), flush=True)
  median = lambda zero, key: statistics.median(r[key] for r in found[zero])
  whole = median(0, "optimizer_mb")
  ratios = [
    there["seconds_median"] / here["seconds_median"]
    for here, there in zip(found[0], found[1], strict=True)
  ]
  summary = {
    "ranks": FLAGS.ranks,
    "optimizer_share": round(median(1, "optimizer_mb") / whole, 4),
    "seconds_ratio": round(statistics.median(ratios), 3),
    "saved_mb": median(0, "peak_memory_mb") - median(1, "peak_memory_mb"),
    "saved_mb_by_formula": round(whole * (1 - 1 / FLAGS.ranks), 1),
  }
  print(json.dumps(summary), flush=True)


if __name__ == "__main__":
  flags.DEFINE_integer("ranks", 4, "Horovod ranks.", lower_bound=2)
  flags.DEFINE_integer("rounds", 3, "Runs of each.", lower_bound=1)
  flags.DEFINE_string(
    "step_flags", None, "benchmarks/step.py's.", required=True
  )
  errors.run_main(main)
