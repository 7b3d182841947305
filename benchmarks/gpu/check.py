"""What the training step would do on GPUs that need not be there.

  python -m benchmarks.gpu.check --count --bert_config_file=base \\
    --train_batch_size=64 --max_seq_length=128 --precision=bf16
  python -m benchmarks.gpu.check --gpus=h100,h200,a100 --xla=step \\
    --bert_config_file=configs/bert_large.json --train_batch_size=32

Takes every flag of run_pretraining.py; the graph is made here.

--count lays it out over the kernels that TensorFlow's GPU wheel registers
(kernels.txt), in each mode of --xla: a JSON line says which ops a GPU runs in
an update of one micro-batch, and what crosses the bus. Under horovodrun it has
the ops of several ranks. Status 1 if an op of a layer has no kernel.

Without it XLA compiles the step for each GPU in an environment of its own (1.9
GB), which the command tells how to make, as one program (`--xla=step`). A JSON
line has peak memory with donated weights, kernels, the bytes that they read and
write, matmuls by type and library, and the examples/s that bandwidth and matmul
peak allow. Nothing is tuned on a device and no time is measured: half of that
speed is a good run.
"""

import collections
import dataclasses
import os
import pathlib
import sys
import tempfile

from benchmarks import measuring
from benchmarks.gpu import chips, costs, hlo, placement, training_graph
from common import settings
from common.console import tell
from common.errors import UserError
from common.tensorflow_v1 import tf
from config import execution, record_shapes
from config.pretraining import PretrainingConfig
from gradients import distributed
from model import model_flops

FLAGS = tf.flags.FLAGS
PYTHON = ".build/gpu_check/bin/python"
COMPILE = pathlib.Path(__file__).with_name("compile_hlo.py")
# XLA pads the vocabulary, and makes a matmul of its bias' gradient.
_FLOPS_TOLERANCE = 0.005


def compiled(chip: chips.Chip, module: bytes, python: str) -> dict:
  """The line of compile_hlo.py, and "text" if it compiled."""
  environment = dict(os.environ)
  if FLAGS.deterministic:  # as TensorFlow then asks of XLA
    before = os.environ.get("XLA_FLAGS", "")
    environment["XLA_FLAGS"] = f"{before} --xla_gpu_deterministic_ops=true"
  with tempfile.TemporaryDirectory() as folder:
    target, path = (pathlib.Path(folder, n) for n in ("t.txtpb", "step.hlo"))
    target.write_text(chip.text_proto(), encoding="ascii")
    path.write_bytes(module)
    command = [python, COMPILE, f"--target={target}", path]
    printed = measuring.run(command, env=environment)
    (line,) = measuring.json_lines(printed)
    if "error" not in line:
      line["text"] = path.with_suffix(".txt").read_text(encoding="utf-8")
  return line


def describe(module: bytes, chip: chips.Chip, flops: float, size: int) -> dict:
  """The part of a JSON line that depends on the GPU."""
  line = compiled(chip, module, FLAGS.python)
  if "error" in line:
    return {"compiles": False, "error": line["error"]}
  kernels = [*costs.Module(line["text"]).kernels()]
  counted = sum(kernel.flops for kernel in kernels)
  assert abs(counted / flops - 1.0) < _FLOPS_TOLERANCE, (counted, flops)
  seconds = sum(kernel.seconds(chip) for kernel in kernels)
  peak = line["arguments"] + line["temporary"]
  peak += line["results"] - line["donated"]  # the same memory
  return {
    "compiles": True,
    "compile_seconds": round(line["seconds"]),
    "peak_memory_gb": round(peak / 1e9, 2),
    **costs.summary(kernels),
    "roofline_ms": round(1e3 * seconds, 3),
    "model_teraflop": round(flops / 1e12, 4),
    "roofline_examples_per_second": round(size / seconds, 1),
  }


def count(config: PretrainingConfig, comm) -> dict:
  """What a GPU launches and copies in a micro-batch, for one JSON line."""
  placed = placement.Placement(training_graph.build(config, comm))
  missing = collections.Counter(
    f"{op.type} {op.inputs[0].dtype.name if op.inputs else ''}".strip()
    for op in placed.without_kernel
  )
  in_layers = [
    op for op in placed.without_kernel if placement.PER_LAYER.search(op.name)
  ]
  megabytes = {
    name: round(sum(map(placement.size, tensors)) / 1e6, 1)
    for name, tensors in (
      ("to_device_mb", placed.to_device), ("to_host_mb", placed.to_host)
    )
  }  # fmt: skip
  return {
    "micro_batch": config.train_batch_size,
    "seq_length": record_shapes.of_patterns(
      config.input_file, config
    ).max_seq_length,
    "xla": config.xla,
    "precision": config.precision,
    "optimizer": config.optimizer.optimizer,
    "ranks": comm.size,
    "zero": config.allreduce.zero,
    "launches": len(placed.launched),
    "programs": sum(map(placement.is_program, placed.launched)),
    "to_device": len(placed.to_device),
    "to_host": len(placed.to_host),
    **megabytes,
    "without_kernel": dict(missing.most_common()),
    "without_kernel_in_layers": len(in_layers),
  }


def count_modes(config: PretrainingConfig) -> None:
  """Prints a line for each mode of --xla."""
  comm = distributed.init(config.num_threads, config.tensor_parallel)
  lacking = 0
  for mode in (m for m in execution.MODES if m != "auto"):
    line = count(dataclasses.replace(config, xla=mode), comm)
    lacking += line["without_kernel_in_layers"]
    if comm.is_root:
      name = os.path.basename(FLAGS.bert_config_file)
      measuring.show({"bert_config": name, **line})
  if lacking:
    sys.exit("error: ops of layers have no GPU kernel: see without_kernel")


def main(_) -> None:
  config = measuring.config_of(PretrainingConfig, FLAGS)
  if FLAGS.count:
    count_modes(config)
    return
  if config.xla != "step":
    raise UserError("what compiles as one program is --xla=step; see --help")
  if not os.path.exists(FLAGS.python):
    raise UserError(
      f"{FLAGS.python} is missing, which compiles for GPUs (1.9 GB): python -m "
      "venv .build/gpu_check && .build/gpu_check/bin/pip install --no-deps -r "
      "benchmarks/gpu/requirements-check.txt"
    )
  shape = record_shapes.of_patterns(config.input_file, config)
  size = config.train_batch_size
  flops = model_flops.total(model_flops.of_run(config, size, shape))
  tell("making the graph ...")
  with training_graph.beside_gpu():
    module = hlo.whole_step(config)
  for name in FLAGS.gpus:
    tell(f"compiling for {name} ...")
    line = {
      "gpu": name,
      "bert_config": os.path.basename(FLAGS.bert_config_file),
      "precision": config.precision,
      "xla": config.xla,
      "deterministic": config.deterministic,
      "micro_batch": size,
      "seq_length": shape.max_seq_length,
      "predictions": shape.max_predictions_per_seq,
    }
    line |= describe(module, chips.CHIPS[name], flops, size)
    measuring.show(line)


if __name__ == "__main__":
  settings.define_flags(PretrainingConfig)
  tf.flags.DEFINE_bool("count", False, "Count ops and copies, in all modes.")
  tf.flags.DEFINE_list("gpus", ["h100"], f"Some of {', '.join(chips.CHIPS)}.")
  tf.flags.DEFINE_string("python", PYTHON, "The environment that compiles.")
  training_graph.run_main(main)
