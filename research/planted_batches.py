"""Bad batches planted in a training, at rates that rise to divergence.

  taskset -c 0 python research/planted_batches.py --input_file='RECORDS*' \\
    --eval_input_file=HELD_OUT --bert_config_file=CONFIG --rates=1,2,4,8,16 \\
    --seeds=10 --output_dir=runs/planted > planted.jsonl

A bad batch has one record of random tokens in all its places. Each line is a
run: its arm, rate and seed, whether it diverged (it ended with a loss above
that of the words' frequencies, or with an error), and its held-out loss.
"""

import dataclasses
import itertools
import json
import os
import shutil
import sys

import numpy as np
from absl import app, flags

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import input_pipeline
import run_pretraining
from common import settings
from common.errors import UserError
from common.tensorflow_v1 import tf
from config.pretraining import PretrainingConfig
from gradients.distributed import Comm
from interop import run_settings

flags.DEFINE_string("rates", "1", "Factors of --learning_rate.")
flags.DEFINE_integer("seeds", 3, "Runs of each arm.")
flags.DEFINE_string("planted", "0,10", "Numbers of bad batches.")
flags.DEFINE_string("arms", "plain,guard,stable_adamw,all", "Of ARMS.")
flags.DEFINE_float("unigram_entropy", 7.0, "Above this loss a run diverged.")
FLAGS = flags.FLAGS

# Settings of the optimizer by arm, and z-loss.
ARMS = {
  "plain": ({}, 0.0),
  "guard": ({"spike_deviations": 6.0}, 0.0),
  "stable_adamw": ({"optimizer": "stable_adamw"}, 0.0),
  "all": ({"optimizer": "stable_adamw", "spike_deviations": 6.0}, 1e-4),
}


def plant(updates: set[int], read, update_rows) -> None:
  """Makes batches `updates`, counted from 0, bad; none if it is empty.

  `read` and `update_rows` are the pipeline's own.
  """
  bad = -1  # instead of a record's number, which is never negative

  def planted_rows(plan, order, comm, first, count=1, share=0.0):
    rows = update_rows(plan, order, comm, first, count, share)
    of_row = first + np.repeat(rows.update, plan.micro_batch)
    numbers = np.where(np.isin(of_row, list(updates)), bad, rows.numbers)
    return rows._replace(numbers=numbers)

  def planted_read(source, numbers):
    serialized = read(source, np.maximum(numbers, 0))
    for place in np.flatnonzero(numbers == bad):
      example = tf.train.Example.FromString(serialized[0])
      ids = example.features.feature["input_ids"].int64_list.value
      inside = len(ids) - 2
      # The same rare words in every place of a batch.
      rare = np.random.default_rng(0).integers(2000, 8000, inside)
      ids[1:-1] = rare.tolist()
      serialized[place] = example.SerializeToString()
    return serialized

  input_pipeline.update_rows = planted_rows
  input_pipeline.Source.read = planted_read


def run(config, arm: str, rate: float, seed: int, planted: int) -> dict:
  """One training with its evaluation."""
  folder = os.path.join(FLAGS.output_dir, "run")
  shutil.rmtree(folder, ignore_errors=True)
  optimizer, z_loss = ARMS[arm]
  config = dataclasses.replace(
    config,
    output_dir=folder,
    seed=seed,
    learning_rate=config.learning_rate * rate,
    optimizer=dataclasses.replace(config.optimizer, **optimizer),
    z_loss=z_loss,
  )
  result = {"arm": arm, "rate": rate, "seed": seed, "planted": planted}
  try:
    ended = run_pretraining.pretrain(config, Comm())
  except (UserError, ArithmeticError) as error:
    return {**result, "diverged": True, "error": str(error)[:100]}
  loss = ended["evaluation"]["masked_lm_loss"]
  with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8") as f:
    last = json.loads(f.readlines()[-1])
  diverged = not loss < FLAGS.unigram_entropy
  skipped = last["skipped_updates"]
  return {**result, "diverged": diverged, "loss": loss, "skipped": skipped}


def main(argv) -> None:
  del argv
  values = PretrainingConfig.read_flags(FLAGS)
  config, _ = run_settings.configured(
    PretrainingConfig, *values, lambda config: config.check_files()
  )
  read, rows = input_pipeline.Source.read, input_pipeline.update_rows
  rates = [float(rate) for rate in FLAGS.rates.split(",")]
  counts = [int(count) for count in FLAGS.planted.split(",")]
  seeds = range(1, FLAGS.seeds + 1)
  for seed, rate, planted in itertools.product(seeds, rates, counts):
    # After the first 100 updates, which the guard does not judge.
    rng = np.random.default_rng(seed)
    places = rng.choice(np.arange(120, config.num_train_steps - 20), planted)
    plant(set(places.tolist()), read, rows)
    for arm in FLAGS.arms.split(","):
      print(json.dumps(run(config, arm, rate, seed, planted)), flush=True)


if __name__ == "__main__":
  settings.define_flags(PretrainingConfig)
  app.run(main)
