"""Which ops of the training step a GPU runs, and what crosses the bus.

  python -m benchmarks.gpu_kernels --bert_config_file=base \\
    --train_batch_size=64 --max_seq_length=128 --precision=bf16
  horovodrun -np 2 python -m benchmarks.gpu_kernels ...

Takes every flag of run_pretraining.py, and goes through the modes of --xla.
Needs no GPU: benchmarks/gpu/kernels.txt has the kernels that TensorFlow's GPU
wheel registers. Prints a JSON line for each mode about an update with one
micro-batch, and ends with status 1 if a layer has an op without a kernel.
"""

import collections
import dataclasses
import os
import sys

from benchmarks import measuring
from benchmarks.gpu import placement, training_graph
from common import settings
from common.tensorflow_v1 import tf
from config import execution
from config.pretraining import PretrainingConfig
from gradients import distributed
from records import record_shape

FLAGS = tf.flags.FLAGS
MODES = [mode for mode in execution.MODES if mode != "auto"]


def count(config, comm) -> dict:
  """What a GPU launches and copies in a micro-batch, for one JSON line."""
  placed = placement.Placement(training_graph.build(config, comm))
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
    "programs": sum(map(placement.is_program, placed.launched)),
    "to_device": len(placed.to_device),
    "to_host": len(placed.to_host),
    "to_device_mb": megabytes(placed.to_device),
    "to_host_mb": megabytes(placed.to_host),
    "without_kernel": dict(missing.most_common()),
    "without_kernel_in_layers": len(placed.per_layer()),
  }


def main(_) -> None:
  config = PretrainingConfig.from_flags(FLAGS)
  comm = distributed.init(config.num_threads, config.tensor_parallel)
  lacking = 0
  for mode in MODES:
    line = count(dataclasses.replace(config, xla=mode), comm)
    lacking += line["without_kernel_in_layers"]
    if comm.is_root:
      name = os.path.basename(FLAGS.bert_config_file)
      measuring.show({"bert_config": name, **line})
  if lacking:
    sys.exit("error: ops of layers have no GPU kernel: see without_kernel")


if __name__ == "__main__":
  settings.define_flags(PretrainingConfig)
  training_graph.run_main(main)
