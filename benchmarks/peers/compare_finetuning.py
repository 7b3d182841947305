"""Times our fine-tuning against Hugging Face's, in turns on one machine.

  python -m benchmarks.peers.compare_finetuning \\
    --transformers_python=.build/transformers/bin/python --task=squad \\
    --train_file=train.json --transformers_model=FOLDER --checkpoint=PREFIX

The same encoder in two formats: a folder that transformers loads, and what
convert_checkpoint.py makes of it (with bert_config.json and vocab.txt beside
it). Both train on their own shuffled batches of about 32 examples, ours packed,
theirs padded to the longest of a batch. Prints one JSON line: examples/s of
each, and the median over rounds of ours over theirs.
"""

import argparse
import json
import os
import statistics
import sys

from benchmarks.peers.compare_transformers import Worker


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--transformers_python", required=True)
  parser.add_argument("--transformers_model", required=True)
  parser.add_argument("--checkpoint", required=True)
  parser.add_argument("--task", choices=["classifier", "squad"], required=True)
  parser.add_argument("--train_file", required=True)
  parser.add_argument("--max_seq_length", type=int, default=128)
  parser.add_argument("--batch", type=int, default=32)
  parser.add_argument("--precision", default="bf16")
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--updates_per_round", type=int, default=5)
  return parser.parse_args()


def commands(arguments) -> dict:
  """Name -> command of each contender."""
  shared = [
    f"--train_file={os.path.abspath(arguments.train_file)}",
    f"--max_seq_length={arguments.max_seq_length}",
    f"--precision={arguments.precision}",
    f"--updates_per_round={arguments.updates_per_round}",
  ]
  beside = os.path.dirname(os.path.abspath(arguments.checkpoint))
  ours = [
    sys.executable, "-m", "benchmarks.peers.finetune_step",
    arguments.task, *shared,
    "--do_train", "--output_dir=unused", "--bias_correction",
    f"--train_batch_size={arguments.batch}",
    f"--init_checkpoint={os.path.abspath(arguments.checkpoint)}",
    f"--bert_config_file={beside}/bert_config.json",
    f"--vocab_file={beside}/vocab.txt",
  ]  # fmt: skip
  theirs = [
    arguments.transformers_python, "benchmarks/peers/transformers_finetune.py",
    "--serve", *shared, f"--task={arguments.task}",
    f"--batch={arguments.batch}",
    f"--model={os.path.abspath(arguments.transformers_model)}",
  ]  # fmt: skip
  return {"ours": ours, "theirs": theirs}


def speed(answer: dict, batch: int) -> float:
  """Examples/s of a round; theirs are full batches."""
  examples = answer.get("examples", [batch] * len(answer["seconds"]))
  return sum(examples) / sum(answer["seconds"])


def main() -> None:
  arguments = parse_arguments()
  workers = {}
  for name, command in commands(arguments).items():
    print(f"starting {name}", file=sys.stderr)
    workers[name] = Worker(command)
  rounds = []
  for number in range(arguments.rounds):
    rounds.append(
      {n: speed(w.ask(), arguments.batch) for n, w in workers.items()}
    )
    said = "  ".join(f"{n} {s:.1f} examples/s" for n, s in rounds[-1].items())
    print(f"round {number + 1}: {said}", file=sys.stderr)
  median = lambda value: round(statistics.median(map(value, rounds)), 3)
  about = {
    name: worker.about[name]
    for worker in workers.values()
    for name in ("torch", "transformers", "tensorflow", "git")
    if name in worker.about
  }
  result = {
    "task": arguments.task,
    "precision": arguments.precision,
    "max_seq_length": arguments.max_seq_length,
    "batch": arguments.batch,
    **about,
    "examples_per_second_ours": median(lambda r: r["ours"]),
    "examples_per_second_theirs": median(lambda r: r["theirs"]),
    "ratio": median(lambda r: r["ours"] / r["theirs"]),
  }
  for worker in workers.values():
    worker.close()
  print(json.dumps(result), flush=True)


if __name__ == "__main__":
  main()
