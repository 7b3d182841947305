"""Times our training step against Hugging Face's, in turns on one machine.

  python -m benchmarks.peers.compare \\
    --transformers_python=.build/transformers/bin/python

Compares this project's step and that of the same model in transformers, eager
and compiled. A model with local attention is also run as if every token were
local, which costs what the masked form does, and transformers' with logits of
masked tokens only. Each side is a process that runs a round of updates when
told to, one after another, so that all see the machine in the same moods.
Prints one JSON line for each precision; a ratio is the median over rounds.
"""

import os
import statistics
import sys
import tempfile

from absl import flags

from benchmarks import measuring
from benchmarks.peers import turns
from common import errors, json_files, model_files
from config.bert_config import BertConfig, read_bert
from model import huggingface_config, tasks

FLAGS = flags.FLAGS
TRANSFORMERS_SIDE = "benchmarks/peers/transformers_updates.py"


def define_flags() -> None:
  flags.DEFINE_string(
    "transformers_python", None, "Python that has transformers.", required=True
  )
  flags.DEFINE_bool("tiny", False, "Small sizes, to see that it works.")
  flags.DEFINE_integer("rounds", 5, "Rounds of each side.", lower_bound=1)
  flags.DEFINE_string("bert_config_file", "base", "Model of `step`.")
  flags.DEFINE_list("precisions", ["fp32", "bf16"], "Precisions of `step`.")
  flags.DEFINE_integer("batch", 8, "Micro-batch of `step`.")
  flags.DEFINE_integer("max_seq_length", 128, "Tokens of an example.")
  flags.DEFINE_integer("predictions", 20, "Masked tokens of an example.")


def write_models(bert: BertConfig, most: int, folder: str) -> dict[str, str]:
  """Writes the configs of both sides; returns name -> path.

  `masked` is our model with local attention that reaches `most` tokens: all.
  """
  heads = [tasks.MASKED_LM, *[tasks.NEXT_SENTENCE] * bert.has_pooler]
  theirs = huggingface_config.to_huggingface_config(bert, heads, folder)
  models = {"ours": ("bert_config.json", bert.to_dict())}
  models["transformers"] = (model_files.THEIR_CONFIG, theirs)
  if bert.global_attn_every_n_layers > 1:
    masked = {**bert.to_dict(), "local_attention": 2 * most}
    models["masked"] = ("masked.json", masked)
  paths = {}
  for name, (file, content) in models.items():
    paths[name] = os.path.join(folder, file)
    json_files.write(paths[name], content)
  return paths


def step_commands(precision: str, bert: BertConfig, paths: dict) -> dict:
  """Name -> command of each side of `step`."""
  shared = [f"--precision={precision}", "--updates_per_round=2"]
  ours = [
    *(sys.executable, "-m", "benchmarks.step", "--serve", *shared),
    f"--objective={'mlm_nsp' if bert.has_pooler else 'mlm'}",
    f"--train_batch_size={FLAGS.batch}",
    f"--max_seq_length={FLAGS.max_seq_length}",
    f"--max_predictions_per_seq={FLAGS.predictions}",
    "--xla=layers",
  ]
  theirs = [
    *(FLAGS.transformers_python, TRANSFORMERS_SIDE),
    *(*shared, f"--model={os.path.dirname(paths['transformers'])}"),
    f"--batch={FLAGS.batch}",
    f"--max_seq_length={FLAGS.max_seq_length}",
    f"--predictions={FLAGS.predictions}",
  ]
  sides = {"ours": [*ours, f"--bert_config_file={paths['ours']}"]}
  sides |= {"eager": theirs, "compiled": [*theirs, "--compile"]}
  if "masked" in paths:
    sides["masked"] = [*ours, f"--bert_config_file={paths['masked']}"]
    sides["sparse"] = [*theirs, "--sparse"]
  if FLAGS.tiny:  # compiling takes a minute
    del sides["compiled"]
  return sides


def compare(commands: dict) -> dict:
  """Runs all rounds; what a JSON line says."""
  with turns.workers(commands) as workers:
    cases = {
      name: lambda worker=worker: statistics.median(worker.ask()["seconds"])
      for name, worker in workers.items()
    }
    seconds = measuring.in_turns(cases, measuring.size(FLAGS.rounds, 1))
  ours = seconds.pop("ours")
  others = [s for name, s in seconds.items() if name != "masked"]
  better = [min(of_round) for of_round in zip(*others, strict=True)]
  line = {"seconds_ours": measuring.median(ours)}
  for name, of_rounds in seconds.items():
    line |= workers[name].about
    line[f"seconds_{name}"] = measuring.median(of_rounds)
    line[f"ratio_{name}"] = measuring.median_ratio(of_rounds, ours)
  for name, worker in workers.items():
    if memory := worker.last_words.get("peak_memory_mb"):
      line[f"memory_mb_{name}"] = memory
  return {**line, "ratio_better": measuring.median_ratio(better, ours)}


def main(_) -> None:
  if FLAGS.tiny:
    FLAGS.bert_config_file, FLAGS.batch = "tiny", 2
    FLAGS.max_seq_length, FLAGS.predictions = 16, 3
  bert = read_bert(FLAGS.bert_config_file)
  for precision in FLAGS.precisions:
    with tempfile.TemporaryDirectory() as folder:
      paths = write_models(bert, FLAGS.max_seq_length, folder)
      line = compare(step_commands(precision, bert, paths))
    measuring.show(
      {
        "bert_config": os.path.basename(FLAGS.bert_config_file),
        "precision": precision,
        "micro_batch": FLAGS.batch,
        "seq_length": FLAGS.max_seq_length,
        "predictions": FLAGS.predictions,
        **line,
      }
    )


if __name__ == "__main__":
  define_flags()
  errors.run_main(main)
