"""Times the training step and prints one JSON line.

  python -m benchmarks.step --bert_config_file=configs/bert_base.json \\
    --train_batch_size=8 --max_seq_length=128 --precision=bf16
  horovodrun -np 2 python -m benchmarks.step ...

Takes every flag of run_pretraining.py. The batch is of random tokens, or the
first records of --input_file. The matmul rate is measured in the same
process, in turns with the updates and at the shapes of the model, and MFU is
the model's arithmetic, of which recomputation is no part, over that rate.
"""

import functools
import os

import numpy as np

import input_pipeline
import run_pretraining
from benchmarks import measuring
from benchmarks.peers import turns
from checkpoints import checkpointing
from common import console, settings
from common.tensorflow_v1 import tf
from config import record_shapes
from config.pretraining import PretrainingConfig
from gradients import distributed, moments
from model import model_flops
from training import plans, reporting, train_loop, training_run
from xla_patches import jit

FLAGS = tf.flags.FLAGS


def define_flags() -> None:
  """run_pretraining's flags, and how long to measure."""
  settings.define_flags(PretrainingConfig)
  flags = tf.flags
  flags.FLAGS.set_default("dry_run", True)
  flags.DEFINE_integer("rounds", 5, "Rounds to measure.", lower_bound=1)
  flags.DEFINE_integer(
    "updates_per_round", 4, "Updates of a round; the matmuls follow each."
  )
  flags.DEFINE_bool(
    "serve",
    False,
    "Run a round for each line on stdin and answer it with a JSON line, so "
    "that another program can measure something else in between.",
  )


class MatmulRate:
  """Times products of a model's shapes, a few milliseconds of each."""

  def __init__(self, matmuls: list, config: tf.ConfigProto):
    # Else products of the same factors would be computed once.
    options = config.graph_options
    options.optimizer_options.opt_level = tf.OptimizerOptions.L0
    options.rewrite_options.disable_meta_optimizer = True
    self.matmuls = matmuls
    self.flops = model_flops.total(matmuls)
    with tf.Graph().as_default():
      self._runs = [self._chain(m) for m in matmuls]
      self._session = tf.Session(config=config)
      self._session.run(tf.global_variables_initializer())

  @staticmethod
  def _chain(matmul):
    """(op that runs the product n times one after another, n)"""
    _, batch, m, k, n, transpose, dtype = matmul
    shapes = [[batch, m, k], [batch, k, n]]
    for which, shape in zip("ab", shapes, strict=True):
      if which == transpose:
        shape[1:] = shape[:0:-1]
    a, b = (
      tf.Variable(tf.random.normal(s[1:] if batch == 1 else s, dtype=dtype))
      for s in shapes
    )
    # Milliseconds of the device's work, beside which a launch is short.
    work, most = (1e12, 500) if jit.on_gpu() else (2e9, 50)
    repeats = max(1, min(most, round(work / matmul.flops)))
    done = tf.no_op()
    for _ in range(repeats):
      with tf.control_dependencies([done]):
        done = tf.matmul(
          a, b, transpose_a=transpose == "a", transpose_b=transpose == "b"
        ).op
    return done, repeats

  def __call__(self) -> float:
    """FLOP/s over one micro-batch's products."""
    seconds = 0.0
    for matmul, (op, repeats) in zip(self.matmuls, self._runs, strict=True):
      run = functools.partial(self._session.run, op)
      seconds += measuring.seconds_of(run) / repeats * matmul.times
    return self.flops / seconds


def first_batch(source, count: int, config=None) -> dict:
  """The first records of an `input_pipeline.Source`: as its `fake_batch`.

  `config` is for all sessions: the first one decides their threads.
  """
  with tf.Graph().as_default(), tf.Session(config=config) as session:
    numbers = tf.range(count, dtype=tf.int64) % len(source.set)
    epochs = tf.zeros_like(numbers)
    progress = tf.zeros([count], tf.float64)
    return session.run(source.columns(numbers, epochs, progress, seed=0))


class Step:
  """The training step of run_pretraining.py on a batch that stays the same."""

  def __init__(self, config: PretrainingConfig, comm):
    self.config, self.comm = config, comm
    self.shape = record_shapes.of_patterns(config.input_file, config)
    self.plan = plans.of_run(config, None, comm.data_parallel.size)
    with training_run.graph(config):
      micro = self._micro_batch()
      state = checkpointing.TrainingState()
      ops = run_pretraining.training_step(
        config, self.shape, micro, state, self.plan, comm
      )
      self._accumulate, self._fetches = ops.accumulate, ops.fetches()
      self.session = tf.Session(
        config=training_run.session_config(config, comm)
      )
      self.session.run(
        [tf.global_variables_initializer(), tf.local_variables_initializer()]
      )

  @property
  def optimizer_mb(self) -> float:
    """Size of the moments that this rank has, in MB of 2^20 bytes."""
    with self.session.graph.as_default():
      slots = tf.get_collection(moments.SLOTS)
    return 4 * sum(slot.shape.num_elements() for slot in slots) / 2**20

  def _micro_batch(self):
    config, plan = self.config, self.plan
    if config.input_file:
      source = input_pipeline.open_records(config.input_file, config, self.comm)
      threads = distributed.session_config(self.comm)
      examples = first_batch(source, plan.micro_batch, threads)
    else:
      examples = input_pipeline.fake_batch(self.shape, plan.micro_batch)
    return input_pipeline.fixed_micro_batch(examples, plan.accumulation)

  def __call__(self) -> dict:
    """One update; its values."""
    for _ in range(self.plan.accumulation - 1):
      self.session.run(self._accumulate)
    return self.session.run(self._fetches)


class Measurement:
  """Rounds of updates with the matmul rate in between."""

  def __init__(self, step: Step, updates_per_round: int):
    """Runs two updates, which are not counted; `first` has the first's values.

    The peak of memory is taken then, before the products have theirs.
    """
    self.step, self._updates = step, updates_per_round
    self.first = step()
    step()
    self.peak_memory = reporting.peak_memory()
    config = step.config
    micro_batches = step.plan.ranks * step.plan.accumulation
    masked = round(self.first["sums"]["masked_lm_weight"] / micro_batches)
    matmuls = model_flops.of_run(
      config, step.plan.micro_batch, step.shape, masked
    )
    self.rate = MatmulRate(matmuls, distributed.session_config(step.comm))
    self.rate()
    self.seconds, self.rates = [], []

  def round(self) -> dict:
    """Seconds of this round's updates."""
    seconds = []
    for _ in range(self._updates):
      self.step.comm.gather(np.zeros(1))  # so that ranks begin together
      seconds.append(measuring.seconds_of(self.step))
      self.rates.append(self.rate())
    self.seconds += seconds
    return {"seconds": seconds}

  def result(self) -> dict:
    """What was measured, for one JSON line."""
    plan, config = self.step.plan, self.step.config
    slices = config.tensor_parallel
    flops = self.rate.flops * plan.accumulation / slices
    p10, median, p90 = map(float, np.percentile(self.seconds, [10, 50, 90]))
    rate = float(np.median(self.rates))
    sums = {name: float(s) for name, s in self.first["sums"].items()}
    return {
      "bert_config": os.path.basename(FLAGS.bert_config_file),
      "precision": config.precision,
      "xla": config.xla,
      "ranks": plan.ranks * slices,
      "tensor_parallel": slices,
      "micro_batch": plan.micro_batch,
      "accumulation": plan.accumulation,
      "seq_length": self.step.shape.max_seq_length,
      "predictions": self.step.shape.max_predictions_per_seq,
      "updates": len(self.seconds),
      "seconds_median": round(median, 5),
      "seconds_p10": round(p10, 5),
      "seconds_p90": round(p90, 5),
      "examples_per_second": round(sums["examples"] / median, 2),
      "tokens_per_second": round(sums["tokens"] / median, 1),
      **{name: round(mb) for name, mb in self.peak_memory.items()},
      "optimizer_mb": round(self.step.optimizer_mb, 1),
      "model_gflop": round(flops / 1e9, 2),
      "matmul_gflop_per_second": round(rate / 1e9, 1),
      "mfu": round(flops / median / rate, 4),
    }


def main(_) -> None:
  config = measuring.config_of(PretrainingConfig, FLAGS)
  comm = distributed.init(config.num_threads, config.tensor_parallel)
  measurement = Measurement(Step(config, comm), FLAGS.updates_per_round)
  losses = run_pretraining.losses(measurement.first["sums"])
  console.say(comm, f"first update: loss {losses['loss']}")
  if FLAGS.serve:
    turns.serve(measurement.round, first_loss=float(losses["loss"]))
  else:
    for _ in range(FLAGS.rounds):
      measurement.round()
  if comm.is_root:
    measuring.show(measurement.result())


if __name__ == "__main__":
  define_flags()
  train_loop.run_main(main)
