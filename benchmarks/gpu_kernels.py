"""Which ops of the training step a GPU runs, and what crosses the bus.

  python -m benchmarks.gpu_kernels --bert_config_file=base \\
    --train_batch_size=64 --max_seq_length=128 --precisions=bf16
  horovodrun -np 2 python -m benchmarks.gpu_kernels ...

Needs no GPU: benchmarks/gpu/kernels.txt has the kernels that TensorFlow's GPU
wheel registers. Builds the graph of an update with one micro-batch in every
mode, precision and optimizer. Prints a table and a JSON line for each, and ends
with status 1 if a layer has an op without a kernel.
"""

import collections
import dataclasses
import itertools
import json
import os
import sys

import run_pretraining
from benchmarks.gpu import placement, training_graph
from common import console
from common.tensorflow_v1 import tf
from config.pretraining import PretrainingConfig
from data import record_shape
from gradients import distributed

FLAGS = tf.flags.FLAGS


def define_flags() -> None:
  """run_pretraining's flags, and what to go through."""
  run_pretraining.define_flags()
  for name, values in (
    ("modes", "off,layers,step"),
    ("precisions", "fp32,bf16,fp16"),
    ("optimizers", "adamw,lamb"),
  ):
    tf.flags.DEFINE_list(name, values, f"The {name} to go through.")


def count(config, comm) -> dict:
  """What a GPU launches and copies in a micro-batch, for one JSON line."""
  placed = placement.Placement(training_graph.build(config, comm))
  programs = sum(map(placement.is_program, placed.launched))
  missing = collections.Counter(
    f"{op.type} {op.inputs[0].dtype.name if op.inputs else ''}".strip()
    for op in placed.without_kernel
  )
  megabytes = lambda ts: round(sum(map(placement.size, ts)) / 1e6, 1)
  return {
    "micro_batch": config.train_batch_size,
    "seq_length": record_shape.of_run(config.input_file, config).max_seq_length,
    "xla": config.xla,
    "precision": config.precision,
    "optimizer": config.optimizer.optimizer,
    "ranks": comm.size,
    "zero": config.allreduce.zero,
    "launches": len(placed.launched),
    "programs": programs,
    "to_device": len(placed.to_device),
    "to_host": len(placed.to_host),
    "to_device_mb": megabytes(placed.to_device),
    "to_host_mb": megabytes(placed.to_host),
    "without_kernel": dict(missing.most_common()),
    "without_kernel_in_layers": len(placed.per_layer()),
  }


def cases(config):
  """`config` in each mode, precision and optimizer."""
  for mode, precision, optimizer in itertools.product(
    FLAGS.modes, FLAGS.precisions, FLAGS.optimizers
  ):
    yield dataclasses.replace(
      config,
      xla=mode,
      precision=precision,
      optimizer=dataclasses.replace(config.optimizer, optimizer=optimizer),
    )


# Of the table: a name of a JSON line, and the width of its column.
_COLUMNS = {
  "xla": 6, "precision": 9, "optimizer": 9, "launches": 8, "programs": 8,
  "to_device": 9, "to_host": 7, "to_device_mb": 12, "to_host_mb": 10,
}  # fmt: skip


def row(values: dict) -> str:
  return " ".join(f"{values[n]:>{width}}" for n, width in _COLUMNS.items())


def main(_) -> None:
  config = PretrainingConfig.from_flags(FLAGS)
  comm = distributed.init(config.num_threads, config.tensor_parallel)
  console.say(comm, row({name: name for name in _COLUMNS}))
  lacking = 0
  for case in cases(config):
    name = os.path.basename(FLAGS.bert_config_file)
    line = {"bert_config": name, **count(case, comm)}
    console.say(comm, row(line))
    if comm.is_root:
      print(json.dumps(line), flush=True)
    lacking += line["without_kernel_in_layers"]
  if lacking:
    sys.exit("error: ops of layers have no GPU kernel: see without_kernel")


if __name__ == "__main__":
  define_flags()
  training_graph.run_main(main)
