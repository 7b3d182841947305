"""Times create_pretraining_data.py, beside google/bert's script.

  python -m benchmarks.data --input_file=train.txt --vocab_file=vocab.txt \\
    --google_bert=CHECKOUT

google/bert's script is one process, and keeps documents and examples in memory;
it gets the first --reference_mb of the text, since it takes seconds for each.
In turns, one JSON line a case: seconds per MB of text (medians), starting
Python included, and how many times as fast as theirs that is.
"""

import functools
import os
import pathlib
import sys
import tempfile

from absl import flags

from benchmarks import measuring
from common import errors
from training import next_steps

FLAGS = flags.FLAGS


def first_part(path: str, size: float, output: str) -> None:
  """The first lines of a text, `size` bytes, whole documents."""
  with open(path, "rb") as f, open(output, "wb") as out:
    for line in f:
      out.write(line)
      if out.tell() >= size and not line.strip():
        break


def google_bert(checkout: str, folder: str) -> str:
  """google/bert's script in `folder`, on TensorFlow 2's v1 API: its path."""
  for name in ("create_pretraining_data.py", "tokenization.py"):
    code = pathlib.Path(checkout, name).read_text(encoding="utf-8")
    code = code.replace(
      "import tensorflow as tf\n", "import tensorflow.compat.v1 as tf\n"
    )
    pathlib.Path(folder, name).write_text(code, encoding="utf-8")
  return os.path.join(folder, "create_pretraining_data.py")


def seconds_per_mb(command: list, text: str, output: str) -> float:
  """Of making records of a text."""
  given = next_steps.given(
    {
      "input_file": text,
      "vocab_file": FLAGS.vocab_file,
      "output_file": output,
      "max_seq_length": FLAGS.max_seq_length,
      "max_predictions_per_seq": FLAGS.max_predictions_per_seq,
    }
  )
  run = functools.partial(measuring.run, [*command, *given])
  return measuring.seconds_of(run) / os.path.getsize(text) * 1e6


def main(_) -> None:
  ours = next_steps.python("create_pretraining_data.py")
  copies = f"--dupe_factor={FLAGS.dupe_factor}"
  # Name -> command.
  cases = {
    "static masks, 1 worker": [*ours, copies, "--num_workers=1"],
    "static masks, all cores": [*ours, copies],
    "dynamic masks, all cores": [*ours, "--dynamic_masks"],
  }
  with tempfile.TemporaryDirectory() as folder:
    texts = dict.fromkeys(cases, FLAGS.input_file)
    theirs = "google/bert, static masks"
    if FLAGS.google_bert:
      script = google_bert(FLAGS.google_bert, folder)
      cases[theirs] = [sys.executable, script, copies]
      texts[theirs] = os.path.join(folder, "sample.txt")
      first_part(FLAGS.input_file, FLAGS.reference_mb * 1e6, texts[theirs])
    records = os.path.join(folder, "records.tfrecord")
    timed = {
      name: functools.partial(seconds_per_mb, command, texts[name], records)
      for name, command in cases.items()
    }
    seconds = measuring.in_turns(timed, FLAGS.rounds)
  for name, values in seconds.items():
    line = {"case": name, "seconds_per_mb": measuring.median(values)}
    if FLAGS.google_bert:
      ratio = measuring.median_ratio(seconds[theirs], values, 1)
      line["times_google_bert"] = ratio
    line["dupe_factor"] = 1 if "dynamic" in name else FLAGS.dupe_factor
    line["max_seq_length"] = FLAGS.max_seq_length
    measuring.show({**line, "rounds": FLAGS.rounds})


if __name__ == "__main__":
  flags.DEFINE_string("input_file", None, "Text.", required=True)
  flags.DEFINE_string("vocab_file", None, "Vocabulary.", required=True)
  flags.DEFINE_integer("max_seq_length", 128, "Of an example.")
  flags.DEFINE_integer("max_predictions_per_seq", 20, "Of an example.")
  flags.DEFINE_integer("dupe_factor", 5, "Copies with static masks.")
  flags.DEFINE_string("google_bert", None, "Folder of a google/bert checkout.")
  flags.DEFINE_float("reference_mb", 2.0, "Text for google/bert's script.")
  flags.DEFINE_integer("rounds", 3, "Of each case, in turns.", lower_bound=1)
  errors.run_main(main)
