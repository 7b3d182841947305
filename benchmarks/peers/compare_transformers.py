"""Times our training step against Hugging Face's, in turns on one machine.

  python -m benchmarks.peers.compare_transformers \\
    --transformers_python=.build/transformers/bin/python

Starts, for each precision, this project's step and that of the same model in
transformers, eager and compiled, as processes that run a round of updates when
told to, one after another, so that all see the machine in the same moods. A
model with layers of near tokens is also run as if all tokens were near, which
costs what the masked form does, and transformers' with logits of masked tokens
only. Prints one JSON line for each precision; a ratio is the median over rounds
of their time over ours.
"""

import argparse
import functools
import os
import statistics
import sys
import tempfile

from benchmarks import measuring
from benchmarks.peers import turns
from common import json_files
from config.bert_config import BertConfig, read_bert
from model import huggingface_config, tasks

UPDATES_PER_ROUND = 2


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--transformers_python", required=True)
  parser.add_argument("--bert_config_file", default="base")
  parser.add_argument("--precisions", default="fp32,bf16")
  parser.add_argument("--batch", type=int, default=8)
  parser.add_argument("--seq_length", type=int, default=128)
  parser.add_argument("--predictions", type=int, default=20)
  parser.add_argument("--rounds", type=int, default=5)
  return parser.parse_args()


def write_models(bert: BertConfig, most: int, folder: str) -> dict[str, str]:
  """Name -> config file: ours, the same as masked form, transformers'."""
  heads = [tasks.MASKED_LM, *[tasks.NEXT_SENTENCE] * bert.has_pooler]
  theirs = huggingface_config.to_their_config(bert, heads, folder)
  models = {"ours": ("bert_config.json", bert.to_dict())}
  models["theirs"] = (huggingface_config.CONFIG_FILE, theirs)
  if bert.global_attn_every_n_layers > 1:
    masked = {**bert.to_dict(), "local_attention": 2 * most}
    models["masked"] = ("masked.json", masked)
  paths = {}
  for name, (file, content) in models.items():
    paths[name] = os.path.join(folder, file)
    json_files.write(paths[name], content)
  return paths


def commands(arguments, precision: str, bert: BertConfig, paths: dict) -> dict:
  """Name -> command of each contender."""
  shared = [
    f"--precision={precision}",
    f"--updates_per_round={UPDATES_PER_ROUND}",
  ]
  step = [
    *(sys.executable, "-m", "benchmarks.step", "--serve", *shared),
    f"--objective={'pairs' if bert.has_pooler else 'mlm'}",
    f"--train_batch_size={arguments.batch}",
    f"--max_seq_length={arguments.seq_length}",
    f"--max_predictions_per_seq={arguments.predictions}",
    "--xla=layers",
  ]
  theirs = [
    arguments.transformers_python,
    *("benchmarks/peers/transformers_step.py", *shared),
    f"--model={os.path.dirname(paths['theirs'])}",
    f"--batch={arguments.batch}",
    f"--seq_length={arguments.seq_length}",
    f"--predictions={arguments.predictions}",
  ]
  contenders = {"ours": [*step, f"--bert_config_file={paths['ours']}"]}
  contenders |= {"eager": theirs, "compiled": [*theirs, "--compile"]}
  if "masked" in paths:
    contenders["masked"] = [*step, f"--bert_config_file={paths['masked']}"]
    contenders["sparse"] = [*theirs, "--sparse"]
  return contenders


def round_of(worker: turns.Worker) -> float:
  """Median seconds of a round's updates."""
  return statistics.median(worker.ask()["seconds"])


def compare(arguments, precision: str) -> dict:
  """Runs the rounds of one precision."""
  bert = read_bert(arguments.bert_config_file)
  with tempfile.TemporaryDirectory() as folder:
    paths = write_models(bert, arguments.seq_length, folder)
    contenders = commands(arguments, precision, bert, paths)
    with turns.workers(contenders) as workers:
      cases = {n: functools.partial(round_of, w) for n, w in workers.items()}
      seconds = measuring.in_turns(cases, arguments.rounds)
  ours = seconds["ours"]
  theirs = [s for n, s in seconds.items() if n not in ("ours", "masked")]
  better = list(map(min, *theirs))
  memory = {n: w.last_words["peak_memory_mb"] for n, w in workers.items()}
  return {
    **workers["eager"].about,
    **workers["ours"].last_words,
    "bert_config": os.path.basename(arguments.bert_config_file),
    **{f"seconds_{n}": measuring.median(s) for n, s in seconds.items()},
    **{f"memory_mb_{n}": mb for n, mb in memory.items()},
    **{
      f"ratio_{n}": measuring.median_ratio(s, ours)
      for n, s in seconds.items()
      if n != "ours"
    },
    "ratio_better": measuring.median_ratio(better, ours),
  }


if __name__ == "__main__":
  given = parse_arguments()
  for each in given.precisions.split(","):
    measuring.show(compare(given, each))
