"""What each way to communicate less is worth on a slow network.

  sudo .venv/bin/python -m benchmarks.network.slow_network \\
    --gbit=1,10 --rounds=3

Times benchmarks/step.py with BERT-Base (--step_flags has others) on two hosts
of `hosts.py`, one thread and one micro-batch of 2 x 128 tokens each.
Every case runs once a round, in turns, and is put in relation to `plain` of the
same round: Horovod's optimizer as its documentation has it. Prints one JSON
line a run, then medians as a table. --megabytes has lines of
network/allreduce.py besides: with both `scaling_model` knows the machine.
"""

import collections
import os
import pathlib
import shlex
import sys
from typing import NamedTuple

from absl import flags

from benchmarks import measuring
from benchmarks.network import hosts
from common import errors

FLAGS = flags.FLAGS
_ROOT = str(pathlib.Path(__file__).parents[2])
_SECONDS = 1200.0  # of a run at most

_STEP = (
  "benchmarks.step",
  "--bert_config_file=configs/bert_base.json",
  "--train_batch_size=2",
  "--max_seq_length=128",
  "--max_predictions_per_seq=20",
  "--num_threads=1",
  "--rounds=1",
)


class Case(NamedTuple):
  """Flags of the step, and Horovod's cycle in ms; None: as runs have it."""

  flags: tuple
  cycle: int | None = None


_OVERLAP = ("--xla=layers",)
_BF16 = (*_OVERLAP, "--precision=bf16")
_LOW_RANK = ("--powersgd_rank=16", "--allreduce_groups=1")
_MANY = ("--num_accumulation_steps=8",)
CASES = {
  # Each gradient when it is there, fused by Horovod, which asks each ms.
  "plain": Case(("--xla=off", "--allreduce_groups=0"), cycle=1),
  "groups": Case(_OVERLAP),
  "float16": Case((*_OVERLAP, "--fp16_allreduce")),
  "zero": Case((*_OVERLAP, "--zero=1")),
  "8 micro-batches": Case((*_OVERLAP, *_MANY)),
  "powersgd": Case((*_OVERLAP, *_LOW_RANK)),
  "bf16": Case(_BF16),
  "bf16 + float16": Case((*_BF16, "--fp16_allreduce")),
  "bf16 + float16 + 8 micro-batches": Case(
    (*_BF16, "--fp16_allreduce", *_MANY)
  ),
  "bf16 + powersgd": Case((*_BF16, *_LOW_RANK)),
  "bf16 + powersgd + 8 micro-batches": Case((*_BF16, *_LOW_RANK, *_MANY)),
}


def define_flags() -> None:
  flags.DEFINE_list(
    "gbit", ["1", "10"], "Gbit/s of each host's cable; 0: as fast as can be."
  )
  flags.DEFINE_list("cases", list(CASES), "Which; `plain` is always there.")
  flags.DEFINE_integer("rounds", 3, "Of all cases.", lower_bound=1)
  flags.DEFINE_integer("updates", 4, "Of each run.", lower_bound=1)
  flags.DEFINE_integer(
    "hosts", 2, "How many; 1: no network.", lower_bound=1, upper_bound=4
  )
  flags.DEFINE_string("step_flags", "", "More flags of benchmarks/step.py.")
  flags.DEFINE_list(
    "megabytes",
    [],
    "Sizes to run network/allreduce.py with, in the first round.",
  )


def launch(bed, words, **environment) -> list[dict]:
  """The JSON lines that a benchmark prints, with one rank on each host."""
  process = bed.run(
    [
      os.path.join(os.path.dirname(sys.executable), "horovodrun"),
      *("-np", str(len(bed.names))),
      *("-H", ",".join(f"{name}:1" for name in bed.names)),
      *("--disable-cache", "--network-interfaces", hosts.NIC),
      *(sys.executable, "-m", *words),
    ],
    timeout=_SECONDS,
    cwd=_ROOT,
    env={**os.environ, **environment},
  )
  lines = measuring.json_lines(process.stdout)
  if not lines:
    raise errors.UserError(f"{shlex.join(words)}: {process.stderr[-3000:]}")
  return lines


def run(bed, case: Case) -> dict:
  """What step.py says of a case."""
  more = [
    f"--updates_per_round={FLAGS.updates}",
    *shlex.split(FLAGS.step_flags),
  ]
  cycle = {"HOROVOD_CYCLE_TIME": str(case.cycle)} if case.cycle else {}
  (line,) = launch(bed, [*_STEP, *case.flags, *more], **cycle)
  return line


def main(_) -> None:
  names = dict.fromkeys(["plain", *FLAGS.cases])
  ratios = collections.defaultdict(list)
  with hosts.Testbed(FLAGS.hosts) as bed:
    for number in range(FLAGS.rounds):
      for gbit in map(float, FLAGS.gbit):
        bed.set_rate(gbit or None)
        rates = {"gbit": gbit, "gbit_measured": bed.measure()}
        for size in FLAGS.megabytes if number == 0 else ():
          tool = "benchmarks.network.allreduce", "--repeats=5"
          for line in launch(bed, [*tool, f"--megabytes={size}"]):
            measuring.show(rates | line)
        plain = None
        for name in names:
          result = run(bed, CASES[name])
          plain = plain or result["examples_per_second"]
          ratio = result["examples_per_second"] / plain
          ratios[gbit, name].append(ratio)
          of_case = {"case": name, "ratio": round(ratio, 3)}
          measuring.show({"round": number, **rates, **of_case, **result})
  measuring.tell(f"examples/s over plain, median of {FLAGS.rounds} rounds")
  for (gbit, name), found in ratios.items():
    ratio = measuring.median(found, 2)
    measuring.tell(f"{gbit:5g} Gbit/s  {ratio:6.2f}  {name}")


if __name__ == "__main__":
  define_flags()
  errors.run_main(main)
