"""Compiles the training step for GPUs that need not be there; what it costs.

  python -m benchmarks.gpu_check --gpus=h100,h200,a100 \\
    --bert_config_file=configs/bert_large.json --max_seq_length=512 \\
    --train_batch_size=32 --precision=bf16 --xla=step

Takes every flag of run_pretraining.py. The graph is made here; XLA compiles it
for each GPU in an environment of its own (1.9 GB), which the command tells how
to make. `--xla=step` is one program of forward, backward and update, `layers`
the pieces that XLA compiles and the ops that TensorFlow runs in between.

Prints a JSON line for each GPU: whether it compiles, peak memory with donated
weights (with --find_batch_size also the largest micro-batch that fits),
kernels, the bytes that they read and write, matmuls by type and library, large
masks, transposes and casts, and the examples/s that bandwidth and matmul peak
allow. Nothing is tuned on a device and no time is measured: half of that speed
is a good run.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import run_pretraining
from benchmarks.gpu import (
  chips,
  costs,
  export_hlo,
  placement,
  programs,
  training_graph,
)
from common.console import tell
from common.errors import UserError
from common.tensorflow_v1 import tf
from config.pretraining import PretrainingConfig
from data import record_shape
from gradients import distributed
from model import model_flops

FLAGS = tf.flags.FLAGS
ROOT = pathlib.Path(__file__).parents[1]
PYTHON = ".build/gpu_check/bin/python"
# Of a card's memory; CUDA, cuBLAS and fragments take the rest.
_USABLE = 0.95
# XLA pads the vocabulary, and makes a matmul of its bias' gradient.
_FLOPS_TOLERANCE = 0.005


def define_flags() -> None:
  """run_pretraining's flags, and for what to compile."""
  run_pretraining.define_flags()
  tf.flags.DEFINE_list("gpus", ["h100"], f"Of {', '.join(chips.CHIPS)}.")
  tf.flags.DEFINE_string("python", PYTHON, "Of the environment that compiles.")


def check_environment(python: str) -> None:
  if not os.path.exists(python):
    raise UserError(
      f"{python} is missing, which compiles for GPUs (1.9 GB): python -m venv "
      ".build/gpu_check && .build/gpu_check/bin/pip install --no-deps -r "
      "benchmarks/gpu/requirements-gpu-check.txt"
    )


def find_triton(python: str) -> None:
  """Lets --triton import Triton, if only that environment has it."""
  packages = pathlib.Path(python).parents[1].glob("lib/python*/site-packages")
  sys.path.extend(map(str, packages))


def compiled(chip, modules: dict, python: str) -> dict:
  """Name of a module -> the line of compile_hlo.py, and "text" if compiled."""
  with tempfile.TemporaryDirectory() as folder:
    target = pathlib.Path(folder, "target.txtpb")
    target.write_text(chip.text_proto(), encoding="ascii")
    paths = {}
    for name, module in modules.items():
      paths[name] = pathlib.Path(folder, f"{name}.hlo")
      paths[name].write_bytes(module)
    script = ROOT / "benchmarks/gpu/compile_hlo.py"
    command = [python, script, f"--target={target}", *paths.values()]
    environment = dict(os.environ)
    if FLAGS.deterministic:  # as TensorFlow then asks of XLA
      given = os.environ.get("XLA_FLAGS", "")
      environment["XLA_FLAGS"] = f"{given} --xla_gpu_deterministic_ops=true"
    done = subprocess.run(
      command, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
      raise UserError(f"{script.name} failed: {done.stderr[-2000:]}")
    found = map(json.loads, done.stdout.splitlines())
    lines = dict(zip(modules, found, strict=True))
    for name, line in lines.items():
      if "error" not in line:
        text = paths[name].with_suffix(".txt").read_text(encoding="utf-8")
        line["text"] = text
    return lines


def peak_memory(line: dict) -> int:
  """Bytes; donated arguments are results, too."""
  return (
    line["arguments"] + line["results"] - line["donated"] + line["temporary"]
  )


class Step:
  """--xla=step: the whole update as one program."""

  def __init__(self, config: PretrainingConfig):
    self._config = config
    self.modules = {"step": self._export(config)}

  @staticmethod
  def _export(config) -> bytes:
    with training_graph.beside_gpu():
      return export_hlo.export(config)[0]

  def describe(self, chip, lines: dict, python: str) -> tuple[list, dict]:
    """Kernels, and what else a line says."""
    peak = peak_memory(lines["step"])
    more = {"peak_memory_gb": round(peak / 1e9, 2)}
    if self._config.find_batch_size:
      more["largest_micro_batch"] = self._largest(chip, peak, python)
    return [*costs.Module(lines["step"]["text"]).kernels()], more

  def _largest(self, chip, peak: int, python: str) -> int:
    """The micro-batch that takes 95 to 100% of what is usable.

    A larger one takes less memory an example, so that steps in proportion come
    near from below.
    """
    size, tried = self._config.train_batch_size, {}
    while size and size not in tried:
      if tried:
        tell(f"compiling micro-batch {size} ...")
        peak = self._peak(size, chip, python)
      tried[size] = share = peak / (_USABLE * chip.memory)
      if not 0.95 < share <= 1.0:
        size = int(size / share)
    return max((n for n, share in tried.items() if share <= 1.0), default=0)

  def _peak(self, size: int, chip, python: str) -> int:
    config = dataclasses.replace(self._config, train_batch_size=size)
    line = compiled(chip, {"step": self._export(config)}, python)
    if "error" in line["step"]:
      raise UserError(f"micro-batch {size}: {line['step']['error']}")
    return peak_memory(line["step"])


class Layers:
  """--xla=layers: programs, and TensorFlow's ops around them."""

  def __init__(self, config: PretrainingConfig):
    fetches = training_graph.build(config, distributed.Comm())
    self._placed = placement.Placement(fetches)
    self.modules = programs.export(self._placed)

  def describe(self, chip, lines: dict, python: str) -> tuple[list, dict]:
    """Kernels, and what else a line says."""
    modules = {n: costs.Module(line["text"]) for n, line in lines.items()}
    return [*programs.kernels(self._placed, modules)], {
      "launches": len(self._placed.launched),
      "programs": sum(map(placement.is_program, self._placed.launched)),
      "different_programs": len(modules),
    }


def describe(case, chip, flops: float, size: int, python: str) -> dict:
  """The part of a JSON line that depends on the GPU."""
  lines = compiled(chip, case.modules, python)
  if errors := [line["error"] for line in lines.values() if "error" in line]:
    return {"compiles": False, "errors": errors[:3]}
  kernels, more = case.describe(chip, lines, python)
  line = costs.summary(kernels, chip)
  seconds = sum(kernel.seconds(chip) for kernel in kernels)
  counted = sum(kernel.flops for kernel in kernels)
  assert abs(counted / flops - 1.0) < _FLOPS_TOLERANCE, (counted, flops)
  return {
    "compiles": True,
    "compile_seconds": round(sum(line["seconds"] for line in lines.values())),
    **more,
    **line,
    "model_teraflop": round(flops / 1e12, 4),
    "roofline_examples_per_second": round(size / seconds, 1),
  }


def main(_) -> None:
  config = PretrainingConfig.from_flags(FLAGS)
  check_environment(FLAGS.python)
  find_triton(FLAGS.python)
  cases = {"step": Step, "layers": Layers}
  if config.xla not in cases:
    raise UserError(f"--xla={config.xla}: want {' or '.join(cases)}")
  for name in FLAGS.gpus:
    if name not in chips.CHIPS:
      raise UserError(f"--gpus={name}: not one of {', '.join(chips.CHIPS)}")
  shape = record_shape.of_run(config.input_file, config)
  size = config.train_batch_size
  flops = model_flops.total(config.matmuls(size, shape))
  tell("making the graph ...")
  case = cases[config.xla](config)
  for name in FLAGS.gpus:
    tell(f"compiling {len(case.modules)} programs for {name} ...")
    line = {
      "gpu": name,
      "bert_config": os.path.basename(FLAGS.bert_config_file),
      "precision": config.precision,
      "xla": config.xla,
      "triton": config.triton,
      "deterministic": config.deterministic,
      "micro_batch": size,
      "seq_length": shape.max_seq_length,
      "predictions": shape.max_predictions_per_seq,
    }
    line |= describe(case, chips.CHIPS[name], flops, size, FLAGS.python)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
  define_flags()
  training_graph.run_main(main)
