"""What to check and measure first on a machine with an NVIDIA GPU.

  benchmarks/gpu_day.sh --output=gpu_day.jsonl

In order of value, at most --minutes after the environment: the tests of kernels
and gradients; losses and norms of gradients beside the CPU's, in every
precision and mode, packed, too; a run that is stopped and resumed; speeds
beside what benchmarks/results/gpu_check.jsonl predicts; two ranks; the largest
micro-batch. Appends a JSON line for each item. The same command continues after
a cut; an item whose line is taken out is repeated. --tiny does all of it with a
small model, on a CPU in the GPU's place, too. Ends with status 1 if an item
failed.
"""

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from absl import app, flags

from benchmarks import measuring
from benchmarks.gpu import chips
from checkpoints import metrics
from common import json_files, processes
from common.nvidia import visible_gpus
from training.next_steps import python

FLAGS = flags.FLAGS
PREDICTED = "benchmarks/results/gpu_check.jsonl"
WORK_DIR = "runs/gpu_day"
# Of a loss or a norm from float32's on the CPU, over the first updates.
TOLERANCE = {"fp32": 2e-3, "bf16": 3e-2, "fp16": 2e-2}
UPDATES = 12
BEGAN = time.monotonic()


class Failed(Exception):
  """An item's command failed, or its numbers are not what they should be."""


@functools.cache
def gpus() -> list[str]:
  """The names of those that this process may use."""
  return visible_gpus("name")


def path(*names: str) -> str:
  return os.path.join(WORK_DIR, *names)


def seconds_left() -> float:
  return 60 * FLAGS.minutes - (time.monotonic() - BEGAN)


def command(words: list[str], **environment) -> str:
  """What a command prints and its messages, which a log has, too."""
  with (
    open(path("log.txt"), "a+", encoding="utf-8") as log,
    subprocess.Popen(
      words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
      env={**os.environ, **environment}, start_new_session=True,
    ) as process,
  ):  # fmt: skip
    try:
      found = process.communicate(timeout=max(1.0, seconds_left()))
    except BaseException:
      os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
      raise
    print(*words, *found, sep="\n", file=log)
  if process.returncode:
    raise Failed(f"status {process.returncode}; its messages: {log.name}")
  return "\n".join(found)


# What runs train on -----------------------------------------------------------


def make_records() -> dict:
  """Records of this project's own pages, in both forms."""
  text, vocabulary = path("text/train.txt"), path("vocab.txt")
  if not os.path.exists(vocabulary):
    pages = {"corpus": "docs/*.md,*.md", "output_dir": path("text")}
    command(python("tools.prepare_corpus", **pages))
    words = {"output_file": vocabulary, "vocab_size": 2000}
    command(python("tools.train_tokenizer", input_file=text, **words))
  for kind, more in (("rows", {}), ("packed", {"examples_per_record": 8})):
    making = python(
      "create_pretraining_data.py", input_file=text, vocab_file=vocabulary,
      output_file=path(kind, "train.tfrecord"), max_seq_length=64,
      max_predictions_per_seq=10, **more,
    )  # fmt: skip
    command(making)
  return {"megabytes": round(os.path.getsize(text) / 1e6, 2)}


def train(
  name: str, kind: str = "rows", ranks: int = 1, resumed=False, **given
) -> list[dict]:
  """The reports of a short training of bert_tiny, one for each update.

  Without dropout, which ranks draw apart. Settings of a name that begins with
  "cpu" see no GPU.
  """
  settings = {
    "do_train": True, "bert_config_file": "tiny", "output_dir": path(name),
    "input_file": path(kind, "train.tfrecord"), "global_batch_size": 32,
    "learning_rate": 1e-3, "num_train_steps": UPDATES, "num_warmup_steps": 2,
    "log_every_steps": 1, "bias_correction": True, "tf32": False,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "initial_loss_scale": 256.0,
  }  # fmt: skip
  if not resumed:
    shutil.rmtree(path(name), ignore_errors=True)
  hidden = {"CUDA_VISIBLE_DEVICES": ""} if name.startswith("cpu") else {}
  training = python("run_pretraining.py", **{**settings, **given})
  command(processes.horovodrun(ranks, training), **hidden)
  return metrics.read_jsonl(path(name, metrics.METRICS_FILE))


# Items: each returns what its line says, or raises ----------------------------


def unit_tests(*names: str) -> dict:
  """Without TensorFloat-32."""
  files = [f"tests/unit/test_{name}.py" for name in names]
  words = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *files]
  said = command(words, NVIDIA_TF32_OVERRIDE="0")
  return {"tests": re.findall(".* passed.*", said)[-1]}


def check_equal(got: list, wanted: list, tolerance: float) -> dict:
  """Compares losses and gradient norms of all updates, relatively."""
  if len(got) != len(wanted):
    raise Failed(f"{len(got)} updates, not {len(wanted)}")
  differences = [
    abs(a[key] - b[key]) / abs(b[key])  # a TypeError if one is not finite
    for a, b in zip(got, wanted, strict=True)
    for key in ("loss", "grad_norm")
  ]
  largest = max(differences)
  if largest > tolerance:
    raise Failed(f"differs by {largest:.2e}, more than {tolerance}")
  return {"largest_difference": round(largest, 6)}


@functools.cache
def on_cpu(kind: str) -> list[dict]:
  """The reports of float32 on the CPU, on records of a `kind`."""
  return train(f"cpu_{kind}", kind, xla="off")


def compare(precision: str, mode: str, kind="rows", triton=False) -> dict:
  """Updates in a precision and mode beside the CPU's in float32."""
  name = f"{precision}_{mode}_{kind}" + "_triton" * triton
  got = train(name, kind, precision=precision, xla=mode, triton=triton)
  return check_equal(got, on_cpu(kind), TOLERANCE[precision])


def resume() -> dict:
  """A run in two parts and one in a single part, equal to the last bit."""
  given = {"deterministic": True, "precision": "bf16"}
  whole = train("whole", **given)
  train("parts", save_checkpoints_steps=UPDATES // 2, **given)
  for name in os.listdir(path("parts")):
    if f"ckpt-{UPDATES}" in name:  # as if it had been killed before
      os.remove(path("parts", name))
  return check_equal(train("parts", resumed=True, **given), whole, 0.0)


def two_ranks() -> dict:
  """Two ranks beside one, with the same global batch."""
  if len(gpus()) == 1:
    return {"left_out": "NCCL wants a GPU for each rank; there is one"}
  return check_equal(train("two", ranks=2), train("one"), TOLERANCE["fp32"])


def shape(model: str, length: int, batch: int) -> dict:
  if FLAGS.tiny:
    model, length, batch = "tiny", min(length, 64), 4
  return {
    "bert_config_file": f"configs/bert_{model}.json",
    "max_seq_length": length,
    "train_batch_size": batch,
    "max_predictions_per_seq": max(3, length * 80 // 512),
  }


def speed(model: str, length: int, batch: int, mode: str, triton=False) -> dict:
  """Examples/s, and the share of the prediction's."""
  given = shape(model, length, batch)
  how = {"precision": "bf16", "xla": mode, "triton": triton}
  step = python("benchmarks.step", **given, **how)
  line = measuring.json_lines(command(step))[-1]
  rate = predicted_rate(given, how)
  share = rate and round(line["examples_per_second"] / rate, 3)
  return {**line, "predicted": rate, "share": share}


def predicted_rate(given: dict, how: dict) -> float | None:
  """Of the newest line of gpu_check.jsonl for this GPU and shape."""
  name = " ".join(gpus()[:1]).lower()
  wanted = {
    "gpu": next((chip for chip in chips.CHIPS if chip in name), None),
    "bert_config": os.path.basename(given["bert_config_file"]),
    "micro_batch": given["train_batch_size"],
    "seq_length": given["max_seq_length"],
    "predictions": given["max_predictions_per_seq"],
    "deterministic": False,
    **how,
  }
  rate = None
  for line in json_files.read_lines(PREDICTED):
    line = {"triton": False, "deterministic": False, **line}
    if wanted.items() <= line.items():
      rate = line.get("roofline_examples_per_second")
  return rate


def largest(model: str, length: int) -> dict:
  """The largest micro-batch of a dry run."""
  planning = python(
    "run_pretraining.py", dry_run=True, find_batch_size=True,
    precision="bf16", num_train_steps=100, num_warmup_steps=10,
    **shape(model, length, 4),
  )  # fmt: skip
  wanted = r"largest micro-batch: --train_batch_size=(\d+)"
  return {"largest_micro_batch": int(re.findall(wanted, command(planning))[-1])}


def items() -> dict[str, Callable]:
  """Name -> what is done, the most valuable first."""
  do = functools.partial
  names = ("modeling", "mixed_precision", "optimization", "jit")
  found = {
    "records": make_records,
    "kernels": do(unit_tests, *names),
    "fp32 layers": do(compare, "fp32", "layers"),
    "bf16 layers": do(compare, "bf16", "layers"),
    "bf16 step": do(compare, "bf16", "step"),
    "fp16 layers": do(compare, "fp16", "layers"),
    "fp32 off": do(compare, "fp32", "off"),
    "packed": do(compare, "bf16", "layers", "packed"),
    "triton kernels": do(unit_tests, "triton_kernels"),
    "triton": do(compare, "bf16", "layers", "packed", triton=True),
    "triton step": do(compare, "bf16", "step", triton=True),
    "resume": resume,
  }
  for model, length, batch in (
    ("large", 128, 64), ("base", 128, 64), ("large", 512, 32), ("base", 512, 32)
  ):  # fmt: skip
    of_shape = do(speed, model, length, batch)
    name = f"{model} {length}"
    found[f"{name} layers"] = do(of_shape, "layers")
    found[f"{name} layers triton"] = do(of_shape, "layers", triton=True)
    found[f"{name} step"] = do(of_shape, "step")
  found["two ranks"] = two_ranks
  found["largest"] = do(largest, "large", 512)
  return found


def main(_) -> None:
  os.makedirs(WORK_DIR, exist_ok=True)
  done = {line["item"]: line for line in json_files.read_lines(FLAGS.output)}
  device = ", ".join(gpus()) or "CPU"
  if device == "CPU" and not FLAGS.tiny:
    sys.exit("no NVIDIA GPU is seen (nvidia-smi): --tiny tries it on a CPU")
  if not os.path.exists(path("packed")):
    done.pop("records", None)
  for name, item in items().items():
    if name in done:
      continue
    began = time.monotonic()
    line = {"item": name, "device": device, "ok": True}
    try:
      line |= item()
    except Exception as e:
      line |= {"ok": False, "error": f"{type(e).__name__}: {e}"[:300]}
    if seconds_left() < 0:
      print(f"{FLAGS.minutes:g} minutes are over: the same command continues")
      break
    line["wall_seconds"] = round(time.monotonic() - began, 1)
    json_files.append_line(FLAGS.output, line)
    done[name] = line
    print(json_files.text(line), flush=True)
  failed = [name for name, line in done.items() if not line["ok"]]
  print(f"{len(done)} of {len(items())} items; failed: {failed or 'none'}")
  sys.exit(bool(failed))


if __name__ == "__main__":
  flags.DEFINE_string("output", "gpu_day.jsonl", "Results.")
  flags.DEFINE_float("minutes", 40.0, "Time for all of it.")
  flags.DEFINE_bool("tiny", False, "A small model, on any device.")
  app.run(main)
