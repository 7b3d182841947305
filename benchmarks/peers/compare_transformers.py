"""Times our training step against Hugging Face's, in turns on one machine.

  python -m benchmarks.peers.compare_transformers \\
    --transformers_python=.build/transformers/bin/python

Starts, for each precision, this project's step and BertForPreTraining's, eager
and compiled, as processes that run a round of updates when told to, one after
another, so that all see the machine in the same moods. Prints one JSON line for
each precision; a ratio is the median over rounds of their time over ours.
"""

import argparse
import functools
import statistics
import sys

from benchmarks import measuring
from benchmarks.peers import turns

SEQ_LENGTH, PREDICTIONS, UPDATES_PER_ROUND = 128, 20, 2


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--transformers_python", required=True)
  parser.add_argument("--bert_config_file", default="configs/bert_base.json")
  parser.add_argument("--precisions", default="fp32,bf16")
  parser.add_argument("--batch", type=int, default=8)
  parser.add_argument("--rounds", type=int, default=5)
  return parser.parse_args()


def commands(arguments, precision: str) -> dict:
  """Name -> command of each contender."""
  shared = [
    f"--bert_config_file={arguments.bert_config_file}",
    f"--precision={precision}",
    f"--updates_per_round={UPDATES_PER_ROUND}",
  ]
  ours = [
    *(sys.executable, "-m", "benchmarks.step", "--serve", *shared),
    f"--train_batch_size={arguments.batch}",
    f"--max_seq_length={SEQ_LENGTH}",
    f"--max_predictions_per_seq={PREDICTIONS}",
    "--xla=layers",
  ]
  theirs = [
    arguments.transformers_python,
    *("benchmarks/peers/transformers_step.py", *shared),
    f"--batch={arguments.batch}",
    f"--seq_length={SEQ_LENGTH}",
    f"--predictions={PREDICTIONS}",
  ]
  return {"ours": ours, "eager": theirs, "compiled": [*theirs, "--compile"]}


def round_of(worker: turns.Worker) -> float:
  """Median seconds of a round's updates."""
  return statistics.median(worker.ask()["seconds"])


def compare(arguments, precision: str) -> dict:
  """Runs the rounds of one precision."""
  with turns.workers(commands(arguments, precision)) as workers:
    cases = {n: functools.partial(round_of, w) for n, w in workers.items()}
    seconds = measuring.in_turns(cases, arguments.rounds)
  ours, eager, compiled = seconds.values()
  better = list(map(min, eager, compiled))
  return {
    **workers["eager"].about,
    **workers["ours"].last_words,
    **{f"seconds_{n}": measuring.median(s) for n, s in seconds.items()},
    "ratio_eager": measuring.median_ratio(eager, ours),
    "ratio_compiled": measuring.median_ratio(compiled, ours),
    "ratio_better": measuring.median_ratio(better, ours),
  }


if __name__ == "__main__":
  given = parse_arguments()
  for each in given.precisions.split(","):
    measuring.show(compare(given, each))
