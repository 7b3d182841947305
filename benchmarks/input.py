"""Times reading: alone, and what it adds to the training step.

  python -m benchmarks.input --bert_config_file=configs/bert_tiny.json \\
    --input_file='records/train*.tfrecord' --train_batch_size=64

Takes every flag of run_pretraining.py. Prints a JSON line with records/s of
reading, checking, parsing and masking, with nothing else to do; and one with
the seconds of an update on batches that are read meanwhile beside those of the
same update on one batch that stays. All in turns in one process; medians over
rounds.

How a data set larger than memory is read shows in a control group, for example

  systemd-run --scope -p MemoryMax=1G python -m benchmarks.input \\
    --shuffle_block_records=512 --updates_per_round=0 ...
"""

import functools
import math
import os

import numpy as np

import input_pipeline
from benchmarks import measuring
from benchmarks.step import MatmulRate, Step
from common import settings
from common.tensorflow_v1 import tf
from config.pretraining import PretrainingConfig
from gradients import distributed
from model import model_flops
from records import record_order
from training import plans, train_loop

FLAGS = tf.flags.FLAGS


def define_flags() -> None:
  """run_pretraining's flags, and what to measure."""
  settings.define_flags(PretrainingConfig)
  flags = tf.flags
  flags.FLAGS.set_default("dry_run", True)
  flags.DEFINE_integer("rounds", 20, "Rounds to measure.", lower_bound=1)
  flags.DEFINE_integer("records_per_round", 20000, "Of reading alone.")
  flags.DEFINE_integer(
    "updates_per_round",
    16,
    "Of each kind of step, best a multiple of the updates that are read at "
    "once, which are 1024 records; 0: no steps.",
  )


def training_batches(config: PretrainingConfig, plan, comm):
  """(files, `input_pipeline.Batches`) of a training run."""
  source = input_pipeline.open_records(config.input_file, config, comm)
  block = config.shuffle_block_records
  order = record_order.Order(len(source.set), config.seed, block)
  return source.paths, input_pipeline.training_batches(
    source, order, plan, comm
  )


def median_of(name: str, values: np.ndarray) -> dict:
  """The median and its 95% interval, whatever the values' distribution.

  The number of values below the median is binomial: n / 2 +- sqrt(n) / 2.
  """
  values, n = np.sort(values), len(values)
  low = max(0, math.floor(n / 2 - math.sqrt(n)))
  high = n - 1 - low
  return {
    name: round(float(np.median(values)), 4),
    f"{name}_95": [round(float(values[i]), 4) for i in (low, high)],
  }


class Reading:
  """Batches of a training run, and nothing done with them."""

  def __init__(self, config: PretrainingConfig, comm):
    """Reads from the start of the stream."""
    self._block = config.shuffle_block_records
    self._plan = plans.of_run(config, None, comm.size)
    with tf.Graph().as_default():
      self._paths, batches = training_batches(config, self._plan, comm)
      everything = tf.group(*batches.next.batch)
      session = tf.Session(config=distributed.session_config(comm))
      batches.start(session, 0)
    self._read = functools.partial(session.run, everything)
    self._rates = []

  def round(self) -> None:
    """Reads on from where the last round ended."""
    batches = -(-FLAGS.records_per_round // self._plan.micro_batch)
    seconds = sum(measuring.seconds_of(self._read) for _ in range(batches))
    self._rates.append(batches * self._plan.micro_batch / seconds)

  def result(self) -> dict:
    """What was measured, for one JSON line."""
    p10, median, p90 = map(round, np.percentile(self._rates, [10, 50, 90]))
    return {
      "shuffle_block_records": self._block,
      "ranks": self._plan.ranks,
      "micro_batch": self._plan.micro_batch,
      "files_mb": round(sum(map(os.path.getsize, self._paths)) / 1e6),
      "rounds": len(self._rates),
      "records_per_second": median,
      "records_per_second_p10": p10,
      "records_per_second_p90": p90,
    }


class ReadingStep(Step):
  """The training step on batches that are read as it trains."""

  def __init__(self, config: PretrainingConfig, comm):
    super().__init__(config, comm)
    self._start(self.session, 0)

  def _micro_batch(self):
    _, batches = training_batches(self.config, self.plan, self.comm)
    self._start = batches.start
    return batches.next


class Steps:
  """The step on batches that are read and on one that stays, in turns."""

  def __init__(self, config: PretrainingConfig, comm):
    """Runs one update of each, which is not counted."""
    self._fixed = Step(config, comm)
    self._reading = ReadingStep(config, comm)
    self._fixed()
    self._reading()
    matmuls = model_flops.of_run(
      config, self._fixed.plan.micro_batch, self._fixed.shape
    )
    self._rate = MatmulRate(matmuls, distributed.session_config(comm))
    self._fixed_seconds, self._read_seconds, self._rates = [], [], []

  def round(self) -> None:
    """Updates on the fixed batch, then on those that are read."""
    updates = FLAGS.updates_per_round
    for step, seconds in (
      (self._fixed, self._fixed_seconds),
      (self._reading, self._read_seconds),
    ):
      # The mean: of the updates that are read at once, one pays for all.
      taken = sum(measuring.seconds_of(step) for _ in range(updates))
      seconds.append(taken / updates)
    self._rates.append(self._rate())

  def result(self) -> dict:
    """What was measured, for one JSON line.

    `read_over_fixed` is of each round's two turns; `fixed_over_fixed`, of the
    fixed turns of a round and the one before, is what the noise alone does.
    """
    fixed, read = np.array(self._fixed_seconds), np.array(self._read_seconds)
    config, plan = self._fixed.config, self._fixed.plan
    return {
      "bert_config": os.path.basename(FLAGS.bert_config_file),
      "precision": config.precision,
      "ranks": plan.ranks,
      "micro_batch": plan.micro_batch,
      "accumulation": plan.accumulation,
      "seq_length": self._fixed.shape.max_seq_length,
      "examples_per_record": self._fixed.shape.examples_per_record,
      "dynamic_masks": self._fixed.shape.masks is not None,
      "rounds": len(read),
      "seconds_read": measuring.median(read, 5),
      "seconds_fixed": measuring.median(fixed, 5),
      **median_of("read_over_fixed", read / fixed),
      **median_of("fixed_over_fixed", fixed[1:] / fixed[:-1]),
      "matmul_gflop_per_second": round(np.median(self._rates) / 1e9, 1),
    }


def main(_) -> None:
  config = PretrainingConfig.from_flags(FLAGS)
  comm = distributed.init(config.num_threads)
  cases = [Reading(config, comm)]
  if FLAGS.updates_per_round:
    cases.append(Steps(config, comm))
  for _ in range(FLAGS.rounds):
    for case in cases:
      case.round()
  for case in cases if comm.is_root else ():
    measuring.show(case.result())


if __name__ == "__main__":
  define_flags()
  train_loop.run_main(main)
