"""Times our training step against Hugging Face's, in turns on one machine.

  python -m benchmarks.peers.compare_transformers \\
    --transformers_python=.build/transformers/bin/python

Starts, for each precision, this project's step and BertForPreTraining's, eager
and compiled, as processes that run a round of updates when told to, one after
another, so that all see the machine in the same moods. Prints one JSON line for
each precision; a ratio is the median over rounds of their time over ours.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = str(pathlib.Path(__file__).parents[2])


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--transformers_python", required=True)
  parser.add_argument("--bert_config_file", default="configs/bert_base.json")
  parser.add_argument("--precisions", default="fp32,bf16")
  parser.add_argument("--xla", default="layers")
  parser.add_argument("--batch", type=int, default=8)
  parser.add_argument("--seq_length", type=int, default=128)
  parser.add_argument("--predictions", type=int, default=20)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--updates_per_round", type=int, default=2)
  return parser.parse_args()


class Worker:
  """A process that answers each line with a JSON line."""

  def __init__(self, command):
    self._process = subprocess.Popen(
      command,
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      # A thread that waits for work must not take the other's cores.
      env={**os.environ, "OMP_WAIT_POLICY": "passive"},
    )
    self.about = self._answer()

  def _answer(self) -> dict:
    line = self._process.stdout.readline()
    if not line:
      raise SystemExit(
        f"error: {' '.join(self._process.args)} ended with status "
        f"{self._process.wait()}; its message is above"
      )
    return json.loads(line)

  def ask(self) -> dict:
    """The answer to a line."""
    self._process.stdin.write("go\n")
    self._process.stdin.flush()
    return self._answer()

  def round(self) -> float:
    """Median seconds of a round's updates."""
    return statistics.median(self.ask()["seconds"])

  def close(self) -> dict:
    """Ends the process; its last words, if any."""
    self._process.stdin.close()
    last = self._process.stdout.read().strip()
    self._process.wait()
    return json.loads(last) if last else {}


def commands(arguments, precision: str) -> dict:
  """Name -> command of each contender."""
  shapes = [
    f"--bert_config_file={arguments.bert_config_file}",
    f"--precision={precision}",
    f"--seq_length={arguments.seq_length}",
    f"--updates_per_round={arguments.updates_per_round}",
  ]
  theirs = [
    arguments.transformers_python,
    "benchmarks/peers/transformers_step.py",
    *shapes,
    f"--batch={arguments.batch}",
    f"--predictions={arguments.predictions}",
  ]
  ours = [
    sys.executable,
    "-m",
    "benchmarks.step",
    *[s.replace("--seq_length", "--max_seq_length") for s in shapes],
    f"--train_batch_size={arguments.batch}",
    f"--max_predictions_per_seq={arguments.predictions}",
    f"--xla={arguments.xla}",
    "--serve",
  ]
  return {"ours": ours, "eager": theirs, "compiled": [*theirs, "--compile"]}


def compare(arguments, precision: str) -> dict:
  """Runs the rounds of one precision."""
  workers = {}
  with contextlib.ExitStack() as stack:
    for name, command in commands(arguments, precision).items():
      print(f"starting {name}, {precision}", file=sys.stderr)
      workers[name] = Worker(command)
      stack.callback(workers[name].close)
    rounds = []
    for number in range(arguments.rounds):
      rounds.append({name: w.round() for name, w in workers.items()})
      seconds = "  ".join(f"{n} {s:.3f} s" for n, s in rounds[-1].items())
      print(f"round {number + 1}: {seconds}", file=sys.stderr)
    ours = workers["ours"].close()
    stack.pop_all()
    for name in ("eager", "compiled"):
      workers[name].close()
  median = lambda value: round(statistics.median(map(value, rounds)), 4)
  about = dict(workers["eager"].about)
  del about["ready"]
  return {
    **about,
    **ours,
    "seconds_ours": median(lambda r: r["ours"]),
    "seconds_eager": median(lambda r: r["eager"]),
    "seconds_compiled": median(lambda r: r["compiled"]),
    "ratio_eager": median(lambda r: r["eager"] / r["ours"]),
    "ratio_compiled": median(lambda r: r["compiled"] / r["ours"]),
    "ratio_better": median(
      lambda r: min(r["eager"], r["compiled"]) / r["ours"]
    ),
  }


def main() -> None:
  arguments = parse_arguments()
  for precision in arguments.precisions.split(","):
    print(json.dumps(compare(arguments, precision)), flush=True)


if __name__ == "__main__":
  main()
