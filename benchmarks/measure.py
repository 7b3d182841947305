"""Measurements of one part of the project each, in one frame.

  python -m benchmarks.measure NAME [flags]      --tiny: with all sizes small

  checkpoint       how long a save holds training up, and a resume takes
  data             create_pretraining_data.py, beside google/bert's script
  input            reading records: alone, and beside the training step
  loss_curves      equal updates in every precision and XLA mode
  memory_estimate  what --dry_run estimates, beside a run's peak

All take the flags of run_pretraining.py; each function below says which of them
it reads. Every measurement prints JSON lines.
"""

import functools
import os
import pathlib
import re
import sys
import tempfile

import numpy as np

from benchmarks import fake_records, measuring, reading
from checkpoints import checkpoint_files, metrics, run_folder
from common import errors, json_files, settings
from common.tensorflow_v1 import tf
from config.pretraining import PretrainingConfig
from training import train_loop
from training.next_steps import flag_words, python

FLAGS = tf.flags.FLAGS


def train(run: str, **flags) -> tuple[list[dict], float]:
  """Trains in the folder `run` by run_pretraining.py.

  Returns:
    The reports of all updates so far, and the seconds of the whole command.
  """
  command = python(
    "run_pretraining.py", do_train=True, output_dir=run, log_every_steps=1,
    **flags,
  )  # fmt: skip
  seconds = measuring.seconds_of(functools.partial(measuring.run, command))
  path = os.path.join(run, metrics.METRICS_FILE)
  return metrics.read_jsonl(path), seconds


def text_and_vocabulary(folder: str) -> tuple[str, str]:
  """The files --text and --vocab_file; --tiny makes them of our pages."""
  if not FLAGS.tiny:
    if not FLAGS.text:
      raise errors.UserError("--text names the file of text to measure with")
    return FLAGS.text, FLAGS.vocab_file
  text, vocabulary = os.path.join(folder, "pages.txt"), f"{folder}/vocab.txt"
  page = pathlib.Path("README.md").read_text(encoding="utf-8")
  pathlib.Path(text).write_text(page, encoding="utf-8")
  learning = python(
    "tools.train_tokenizer", input_file=text, output_file=vocabulary,
    vocab_size=500,
  )  # fmt: skip
  measuring.run(learning)
  return text, vocabulary


def checkpoint(folder: str) -> None:
  """Trains on fake records, saves every 20th update, and goes on from there.

  Reads --bert_config_file (base), --train_batch_size (2) and --precision. All
  in seconds: `stall`, for which the slowest save held the training loop;
  `update`, a median while nothing is written, and while a save is written in
  the background; `saving`, what all updates between two saves took beyond that
  median; `resume`, from the start of the process to its first update.
  """
  bert, every, batch = fake_records.model("base"), measuring.size(20, 4), 2
  precision = FLAGS.precision
  run = f"{folder}/run"
  shared = dict(
    input_file=fake_records.of_model(folder, bert, 64, 128, 20),
    bert_config_file=bert, precision=precision,
    train_batch_size=batch, global_batch_size=batch, num_warmup_steps=0,
    save_checkpoints_steps=every, keep_checkpoints=1,
    lr_schedule="constant",
  )  # fmt: skip

  def start_seconds(updates: int) -> tuple[list[dict], dict, float]:
    reports, seconds = train(run, num_train_steps=updates, **shared)
    results = json_files.read(f"{run}/{run_folder.TRAINING_RESULTS_FILE}")
    return reports, results, seconds - results["seconds"]

  updates = 3 * every
  reports, results, fresh = start_seconds(updates)
  seconds = {
    r["global_step"]: batch / r["examples_per_second"] for r in reports
  }
  usual = measuring.median(seconds[n] for n in range(3, every + 1))
  writing = [s for n, s in seconds.items() if n > 2 and n % every in (1, 2)]
  between = sum(seconds[every + n] for n in range(1, every + 1))
  resumed = []
  for number in range(1, measuring.size(3, 1) + 1):
    resumed.append(round(start_seconds(updates + number)[2], 1))
  newest = f"{checkpoint_files.PREFIX}-{updates + len(resumed)}"
  data = os.path.getsize(f"{run}/{newest}.data-00000-of-00001")
  measuring.show(
    {
      "model": bert,
      "precision": precision,
      "batch": batch,
      "checkpoint_mb": round(data / 1e6),
      "saves": results["saves"],
      "stall": round(results["longest_save_stall_seconds"], 3),
      "update": round(usual, 3),
      "update_while_writing": measuring.median(writing, 3),
      "saving": round(between - usual * every, 2),
      "fresh_start": round(fresh, 1),
      "resume": resumed,
    }
  )


def data(folder: str) -> None:
  """Makes records in turns, with --google_bert=CHECKOUT by its script, too.

  Reads --text and --vocab_file. google/bert's script is one process and keeps
  all in memory, so it gets the first 2 MB. Seconds per MB, start included.
  """
  text, vocabulary = text_and_vocabulary(folder)
  ours, copies = python("create_pretraining_data.py"), "--dupe_factor=5"
  cases = {
    "static masks, 1 worker": [*ours, copies, "--num_workers=1"],
    "static masks, all cores": [*ours, copies],
    "dynamic masks, all cores": [*ours, "--dynamic_masks"],
  }
  texts = dict.fromkeys(cases, text)
  reference = "google/bert, static masks"
  if FLAGS.google_bert:
    script = google_bert_script(FLAGS.google_bert, folder)
    cases[reference] = [sys.executable, script, copies]
    texts[reference] = first_part(text, 2e6, f"{folder}/sample.txt")

  def seconds_per_mb(name: str) -> float:
    made = flag_words(
      dict(
        input_file=texts[name], vocab_file=vocabulary, max_seq_length=128,
        max_predictions_per_seq=20, output_file=f"{folder}/records.tfrecord",
      )
    )  # fmt: skip
    run = functools.partial(measuring.run, [*cases[name], *made])
    return measuring.seconds_of(run) / os.path.getsize(texts[name]) * 1e6

  timed = {name: functools.partial(seconds_per_mb, name) for name in cases}
  seconds = measuring.in_turns(timed, measuring.size(3, 1))
  for name, values in seconds.items():
    line = {"case": name, "seconds_per_mb": measuring.median(values)}
    if reference in seconds:
      ratio = measuring.median_ratio(seconds[reference], values, 1)
      line["times_google_bert"] = ratio
    measuring.show(line)


def first_part(path: str, wanted: float, output: str) -> str:
  """Writes the first whole documents of a text, `wanted` bytes of it."""
  with open(path, "rb") as f, open(output, "wb") as out:
    for line in f:
      out.write(line)
      if out.tell() >= wanted and not line.strip():
        break
  return output


def google_bert_script(checkout: str, folder: str) -> str:
  """Copies google/bert's script for TensorFlow 2's v1 API; returns its path."""
  for name in ("create_pretraining_data.py", "tokenization.py"):
    code = pathlib.Path(checkout, name).read_text(encoding="utf-8")
    code = code.replace(
      "import tensorflow as tf\n", "import tensorflow.compat.v1 as tf\n"
    )
    pathlib.Path(folder, name).write_text(code, encoding="utf-8")
  return os.path.join(folder, "create_pretraining_data.py")


# (precision, XLA mode) -> what it is compared with
VARIANTS = {
  ("fp32", "off"): ("fp32", "off"),
  ("fp32", "auto"): ("fp32", "off"),
  ("fp32", "layers"): ("fp32", "off"),
  ("fp32", "step"): ("fp32", "off"),
  ("bf16", "off"): ("fp32", "off"),
  ("bf16", "layers"): ("bf16", "off"),
  ("bf16", "step"): ("bf16", "off"),
  ("fp16", "off"): ("fp32", "off"),
  ("fp16", "layers"): ("fp16", "off"),
}


def loss_curves(folder: str) -> None:
  """Trains the same updates in all `VARIANTS` and compares the losses.

  Reads --bert_config_file and --input_file. A line has the largest relative
  difference of means over 10 updates.
  """
  window, (steps, batch) = 10, measuring.size((200, 32), (20, 4))
  bert = fake_records.model("tiny")
  files = FLAGS.input_file or fake_records.of_model(folder, bert, 64, 128, 20)
  variants = {
    v: r for v, r in VARIANTS.items() if not FLAGS.tiny or "off" in v[1]
  }
  curves = {}
  for precision, mode in variants:
    reports, _ = train(
      f"{folder}/{precision}_{mode}", bert_config_file=bert, input_file=files,
      train_batch_size=batch, learning_rate=1e-3, num_train_steps=steps,
      num_warmup_steps=steps // 10, bias_correction=True, precision=precision,
      xla=mode,
    )  # fmt: skip
    losses = np.array([report["loss"] for report in reports])
    whole = losses[: len(losses) // window * window]
    curves[precision, mode] = whole.reshape(-1, window).mean(1)
  for variant, reference in variants.items():
    losses = curves[variant]
    difference = np.abs(losses / curves[reference] - 1.0).max()
    measuring.show(
      {
        "precision": variant[0],
        "xla": variant[1],
        "reference": ", ".join(reference),
        "updates": window * len(losses),
        "last_window_loss": round(float(losses[-1]), 4),
        "largest_difference": round(float(difference), 6),
      }
    )


# BERT config, sequence, predictions, micro-batch, --recompute, --precision
SHAPES = (
  ("tiny", 128, 20, 256, "", "fp32"),
  ("tiny", 512, 76, 48, "layer", "bf16"),
  ("mini", 128, 20, 128, "", "bf16"),
  ("mini", 512, 76, 32, "gelu,attention,layer_norm", "fp32"),
  ("base", 128, 20, 24, "attention", "fp32"),
  ("base", 512, 76, 10, "layer", "bf16"),
)


def memory_estimate(folder: str) -> None:
  """Runs a dry run and then a training of each of `SHAPES`."""
  shapes = measuring.size(SHAPES, (("tiny", 32, 5, 8, "", "fp32"),))
  for number, shape in enumerate(shapes):
    bert, length, masked, batch, recompute, precision = shape
    flags = dict(
      bert_config_file=bert, max_seq_length=length, train_batch_size=batch,
      max_predictions_per_seq=masked, recompute=recompute, precision=precision,
      num_train_steps=4, num_warmup_steps=1,
    )  # fmt: skip
    plan = python("run_pretraining.py", dry_run=True, **flags)
    totals = re.findall(r"^ +total +([\d,]+)$", measuring.run(plan), re.M)
    estimate = int(totals[0].replace(",", ""))
    records = fake_records.of_model(folder, bert, 4 * batch, length, masked)
    # Two checkpoints are saved: a peak of a real run has these copies, too.
    reports, _ = train(
      f"{folder}/run{number}", input_file=records, save_checkpoints_steps=2,
      **flags,
    )  # fmt: skip
    peak = reports[-1]["peak_memory_mb"]
    measuring.show(
      {
        "bert": bert,
        "length": length,
        "predictions": masked,
        "batch": batch,
        "recompute": recompute,
        "precision": precision,
        "estimate_mb": estimate,
        "run_mb": round(peak),
        "error": round(estimate / peak - 1, 3),
      }
    )


MEASUREMENTS = {
  "checkpoint": checkpoint,
  "data": data,
  "input": reading.measure,
  "loss_curves": loss_curves,
  "memory_estimate": memory_estimate,
}


def main(argv: list[str]) -> None:
  with tempfile.TemporaryDirectory() as folder:
    MEASUREMENTS[argv[1]](folder)


if __name__ == "__main__":
  if len(sys.argv) < 2 or sys.argv[1] not in MEASUREMENTS:
    sys.exit(__doc__)
  settings.define_flags(PretrainingConfig)
  flags = tf.flags
  FLAGS.set_default("dry_run", True)
  FLAGS.set_default("bert_config_file", None)
  flags.DEFINE_bool("tiny", False, "Small sizes, to see that it works.")
  flags.DEFINE_string("text", None, "Text to make records of.")
  flags.DEFINE_string("vocab_file", None, "WordPiece vocabulary of the text.")
  flags.DEFINE_string("google_bert", None, "Folder of a google/bert checkout.")
  train_loop.run_main(main, 1)
