"""Reading records: alone, and what it adds to the training step.

`python -m benchmarks.measure input` runs it, with run_pretraining.py's flags.
How a data set larger than memory is read shows in a control group:

  systemd-run --scope -p MemoryMax=1G python -m benchmarks.measure input \\
    --input_file='records/train*' --shuffle_block_records=512
"""

import functools
import math
import os

import numpy as np

import input_pipeline
from benchmarks import fake_records, measuring
from benchmarks.step import MatmulRate, Step
from common.tensorflow_v1 import tf
from config.pretraining import PretrainingConfig
from gradients import distributed
from model import model_flops
from records import record_order
from training import plans

FLAGS = tf.flags.FLAGS


def training_batches(config: PretrainingConfig, plan, comm):
  """The `input_pipeline.Batches` of a training run."""
  source = input_pipeline.open_records(config.input_file, config, comm)
  block = config.shuffle_block_records
  order = record_order.Order(len(source.set), config.seed, block)
  return input_pipeline.training_batches(source, order, plan, comm)


def median_of(name: str, values: np.ndarray) -> dict:
  """The median and its 95% interval, whatever the values' distribution.

  The number of values below the median is binomial: n / 2 +- sqrt(n) / 2.
  """
  values, n = np.sort(values), len(values)
  low = max(0, math.floor(n / 2 - math.sqrt(n)))
  interval = [round(float(values[i]), 4) for i in (low, n - 1 - low)]
  return {name: round(float(np.median(values)), 4), f"{name}_95": interval}


class ReadingStep(Step):
  """The training step on batches that are read as it trains."""

  def __init__(self, config: PretrainingConfig, comm):
    super().__init__(config, comm)
    self._start(self.session, 0)

  def _micro_batch(self):
    batches = training_batches(self.config, self.plan, self.comm)
    self._start = batches.start
    return batches.next


def read_alone(config: PretrainingConfig, comm, rounds: int) -> dict:
  """Records/s of reading, checking, parsing and masking, nothing besides."""
  plan = plans.of_run(config, None, comm.size)
  with tf.Graph().as_default():
    batches = training_batches(config, plan, comm)
    everything = tf.group(*batches.next.batch)
    session = tf.Session(config=distributed.session_config(comm))
    batches.start(session, 0)
  read = functools.partial(session.run, everything)
  count, rates = -(-measuring.size(20_000, 200) // plan.micro_batch), []
  for _ in range(rounds):
    seconds = sum(measuring.seconds_of(read) for _ in range(count))
    rates.append(count * plan.micro_batch / seconds)
  p10, median, p90 = map(round, np.percentile(rates, [10, 50, 90]))
  return {
    "shuffle_block_records": config.shuffle_block_records,
    "micro_batch": plan.micro_batch,
    "records_per_second": median,
    "records_per_second_p10": p10,
    "records_per_second_p90": p90,
  }


def read_beside_step(config: PretrainingConfig, comm, rounds: int) -> dict:
  """Seconds of an update on batches that are read, and on one that stays.

  `read_over_fixed` compares both of a round. `fixed_over_fixed` compares the
  fixed ones of two rounds: so much is noise.
  """
  fixed_step, reading_step = Step(config, comm), ReadingStep(config, comm)
  matmuls = model_flops.of_run(
    config, fixed_step.plan.micro_batch, fixed_step.shape
  )
  rate = MatmulRate(matmuls, distributed.session_config(comm))
  steps = {"fixed": fixed_step, "read": reading_step}
  seconds, rates = {name: [] for name in steps}, []
  # Records are read 1024 at once: the mean over a multiple of such updates.
  updates = measuring.size(16, 2)
  for step in steps.values():
    step()
  for _ in range(rounds):
    for name, step in steps.items():
      total = sum(measuring.seconds_of(step) for _ in range(updates))
      seconds[name].append(total / updates)
    rates.append(rate())
  fixed, read = np.array(seconds["fixed"]), np.array(seconds["read"])
  return {
    "bert_config": os.path.basename(FLAGS.bert_config_file),
    "precision": config.precision,
    "micro_batch": fixed_step.plan.micro_batch,
    "seq_length": fixed_step.shape.max_seq_length,
    "examples_per_record": fixed_step.shape.examples_per_record,
    "dynamic_masks": fixed_step.shape.masks is not None,
    "rounds": rounds,
    "seconds_read": measuring.median(read, 5),
    "seconds_fixed": measuring.median(fixed, 5),
    **median_of("read_over_fixed", read / fixed),
    **median_of("fixed_over_fixed", fixed[1:] / fixed[:-1]),
    "matmul_gflop_per_second": round(np.median(rates) / 1e9, 1),
  }


def measure(folder: str) -> None:
  """Reads --input_file as a training of all its flags would, on one rank."""
  if not FLAGS.input_file:
    shape = measuring.size((4096, 128, 20), (64, 16, 3))
    FLAGS.input_file = fake_records.of_model(
      folder, fake_records.model("tiny"), *shape
    )
    FLAGS.max_seq_length, FLAGS.max_predictions_per_seq = shape[1:]
  FLAGS.bert_config_file = fake_records.model("tiny")
  config = measuring.config_of(PretrainingConfig, FLAGS)
  comm = distributed.init(config.num_threads)
  measuring.show(read_alone(config, comm, measuring.size(20, 2)))
  measuring.show(read_beside_step(config, comm, measuring.size(20, 4)))
