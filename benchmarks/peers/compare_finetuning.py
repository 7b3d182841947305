"""Times our fine-tuning against Hugging Face's, in turns on one machine.

  python -m benchmarks.peers.compare_finetuning \\
    --transformers_python=.build/transformers/bin/python --task=squad \\
    --train_file=train.json --transformers_model=FOLDER --checkpoint=PREFIX

The same encoder in two formats: a folder that transformers loads, and what
convert_checkpoint.py makes of it (with bert_config.json and vocab.txt beside
it). Both train in bf16 on their own shuffled batches of about 32 examples, ours
packed, theirs padded to the longest of a batch. Prints one JSON line:
examples/s of each, and the median over rounds of ours over theirs.
"""

import argparse
import functools
import os
import sys

from benchmarks import measuring
from benchmarks.peers import turns

BATCH = 32


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--transformers_python", required=True)
  parser.add_argument("--transformers_model", required=True)
  parser.add_argument("--checkpoint", required=True)
  parser.add_argument("--task", choices=["classifier", "squad"], required=True)
  parser.add_argument("--train_file", required=True)
  parser.add_argument("--max_seq_length", type=int, default=128)
  parser.add_argument("--rounds", type=int, default=7)
  return parser.parse_args()


def commands(arguments) -> dict:
  """Name -> command of each contender."""
  shared = [
    f"--train_file={os.path.abspath(arguments.train_file)}",
    f"--max_seq_length={arguments.max_seq_length}",
    "--precision=bf16",
  ]
  beside = os.path.dirname(os.path.abspath(arguments.checkpoint))
  ours = [
    *(sys.executable, "-m", "benchmarks.peers.finetune_step"),
    *(arguments.task, *shared),
    *("--do_train", "--output_dir=unused", "--bias_correction"),
    f"--train_batch_size={BATCH}",
    f"--init_checkpoint={os.path.abspath(arguments.checkpoint)}",
    f"--bert_config_file={beside}/bert_config.json",
    f"--vocab_file={beside}/vocab.txt",
  ]
  theirs = [
    arguments.transformers_python,
    *("benchmarks/peers/transformers_finetune.py", "--serve", *shared),
    f"--task={arguments.task}",
    f"--batch={BATCH}",
    f"--model={os.path.abspath(arguments.transformers_model)}",
  ]
  return {"ours": ours, "theirs": theirs}


def round_of(worker: turns.Worker) -> float:
  """Examples/s of a round's updates."""
  answer = worker.ask()
  return sum(answer["examples"]) / sum(answer["seconds"])


def main() -> None:
  arguments = parse_arguments()
  with turns.workers(commands(arguments)) as workers:
    cases = {n: functools.partial(round_of, w) for n, w in workers.items()}
    speeds = measuring.in_turns(cases, arguments.rounds)
  measuring.show(
    {
      "task": arguments.task,
      "precision": "bf16",
      "max_seq_length": arguments.max_seq_length,
      "batch": BATCH,
      **workers["ours"].about,
      **workers["theirs"].about,
      **{
        f"examples_per_second_{name}": measuring.median(of_rounds, 3)
        for name, of_rounds in speeds.items()
      },
      "ratio": measuring.median_ratio(*speeds.values(), 3),
    }
  )


if __name__ == "__main__":
  main()
