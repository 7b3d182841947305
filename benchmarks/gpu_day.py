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
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from absl import app, flags

from benchmarks.gpu import chips
from checkpoints import metrics
from common import json_files, processes
from common.nvidia import visible_gpus
from training import next_steps

FLAGS = flags.FLAGS
PREDICTED = "benchmarks/results/gpu_check.jsonl"
# Of a loss or a norm from float32's on the CPU, over the first updates.
TOLERANCE = {"fp32": 2e-3, "bf16": 3e-2, "fp16": 2e-2}
UPDATES = 12
BEGAN = time.monotonic()


class Failed(Exception):
  """An item's command failed, or its numbers are not what they should be."""


def define_flags() -> None:
  flags.DEFINE_string("output", "gpu_day.jsonl", "Results.")
  flags.DEFINE_string("work_dir", "runs/gpu_day", "Where runs are made.")
  flags.DEFINE_float("minutes", 40.0, "Time for all of it.")
  flags.DEFINE_bool("tiny", False, "A small model, on any device.")


@functools.cache
def gpus() -> list[str]:
  """The names of those that this process may use."""
  return visible_gpus("name")


def path(*names: str) -> str:
  return os.path.join(FLAGS.work_dir, *names)


def command(words: list, **environment) -> list[str]:
  """The lines of a command's stdout, then of its messages; it gets a log."""
  with (
    open(path("log.txt"), "a+", encoding="utf-8") as log,
    subprocess.Popen(
      list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
      text=True, env={**os.environ, **environment}, start_new_session=True,
    ) as process,
  ):  # fmt: skip
    try:
      found = process.communicate(timeout=limit())
    except BaseException:
      os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
      raise
    print(*words, *found, sep="\n", file=log)
  if process.returncode:
    raise Failed(f"status {process.returncode}; its messages: {log.name}")
  return "\n".join(found).splitlines()


def limit() -> float:
  """Seconds that are left."""
  return max(1.0, 60 * FLAGS.minutes - (time.monotonic() - BEGAN))


def make_records() -> dict:
  """Records of this project's own pages, in both forms."""
  make = lambda script, **given: command(next_steps.python(script, **given))
  if not os.path.exists(path("vocab.txt")):
    make(
      "tools.prepare_corpus", corpus="docs/*.md,*.md", output_dir=path("text")
    )
    make(
      "tools.train_tokenizer", input_file=path("text/train.txt"),
      output_file=path("vocab.txt"), vocab_size=2000,
    )  # fmt: skip
  for kind, more in (("rows", {}), ("packed", {"examples_per_record": 8})):
    make(
      "create_pretraining_data.py", input_file=path("text/train.txt"),
      vocab_file=path("vocab.txt"), output_file=path(kind, "train.tfrecord"),
      max_seq_length=64, max_predictions_per_seq=10, **more,
    )  # fmt: skip
  return {"megabytes": round(os.path.getsize(path("text/train.txt")) / 1e6, 2)}


def train(name, ranks=1, cpu=False, resumed=False, **given) -> list[dict]:
  """The reports of a short training of bert_tiny, one for each update.

  Without dropout, which ranks draw apart.
  """
  settings = {
    "do_train": True, "bert_config_file": "tiny", "output_dir": path(name),
    "input_file": path("rows/train.tfrecord"), "global_batch_size": 32,
    "learning_rate": 1e-3, "num_train_steps": UPDATES, "num_warmup_steps": 2,
    "log_every_steps": 1, "bias_correction": True, "tf32": False,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "initial_loss_scale": 256.0,
  }  # fmt: skip
  words = next_steps.python("run_pretraining.py", **{**settings, **given})
  if not resumed:
    shutil.rmtree(path(name), ignore_errors=True)
  hidden = {"CUDA_VISIBLE_DEVICES": ""} if cpu else {}
  command(processes.horovodrun(ranks, words), **hidden)
  return metrics.read_jsonl(path(name, metrics.METRICS_FILE))


def difference(got: list, wanted: list) -> float:
  """The largest relative one of losses and gradient norms."""
  if len(got) != len(wanted):
    raise Failed(f"{len(got)} updates, not {len(wanted)}")
  pairs = [
    (a[key], b[key])
    for a, b in zip(got, wanted, strict=True)
    for key in ("loss", "grad_norm")
  ]
  if any(None in pair for pair in pairs):
    raise Failed("a loss or a norm is not finite")
  return max(abs(a - b) / abs(b) for a, b in pairs)


def unit_tests(*names: str) -> Callable:
  """Tests of kernels, layers and gradients; without TensorFloat-32."""

  def item() -> dict:
    lines = command(
      [sys.executable, "-m", "pytest", "-q", "-m", "not slow"]
      + [f"tests/unit/test_{name}.py" for name in names],
      NVIDIA_TF32_OVERRIDE="0",
    )
    return {"tests": next(x for x in lines[::-1] if " passed" in x)}

  return item


@functools.cache
def on_cpu(kind: str) -> list[dict]:
  """The reports of float32 on the CPU, on records of a `kind`."""
  records = path(kind, "train.tfrecord")
  return train(f"cpu_{kind}", cpu=True, xla="off", input_file=records)


def compare(
  precision: str, mode: str, kind: str = "rows", triton: bool = False
) -> Callable:
  """Updates in a precision and mode beside the CPU's in float32."""

  def item() -> dict:
    records = path(kind, "train.tfrecord")
    name = f"{precision}_{mode}_{kind}" + "_triton" * triton
    given = dict(precision=precision, xla=mode, triton=triton)
    got = train(name, input_file=records, **given)
    found = difference(got, on_cpu(kind))
    if found > TOLERANCE[precision]:
      raise Failed(f"differs by {found:.2%} from float32 on the CPU")
    return {"largest_difference": round(found, 6)}

  return item


def resume() -> dict:
  """A run in two parts and one in a single part, equal to the last bit."""
  given = {"deterministic": True, "precision": "bf16"}
  whole = train("whole", **given)
  train("parts", save_checkpoints_steps=UPDATES // 2, **given)
  for name in os.listdir(path("parts")):
    if f"ckpt-{UPDATES}" in name:  # as if it had been killed before
      os.remove(path("parts", name))
  parts = train("parts", resumed=True, **given)
  if found := difference(parts, whole):
    raise Failed(f"a resumed run differs by {found:.2e}")
  return {"largest_difference": 0.0}


def shape(model: str, length: int, batch: int) -> dict:
  if FLAGS.tiny:
    model, length, batch = "tiny", min(length, 64), 4
  predictions = max(3, length * 80 // 512)
  return {
    "bert_config_file": f"configs/bert_{model}.json", "max_seq_length": length,
    "train_batch_size": batch, "max_predictions_per_seq": predictions,
  }  # fmt: skip


def speed(
  model: str, length: int, batch: int, mode: str, triton: bool
) -> Callable:
  """Examples/s, and the share of the prediction's."""

  def item() -> dict:
    given = shape(model, length, batch)
    words = next_steps.python(
      "benchmarks.step", precision="bf16", xla=mode, triton=triton, **given
    )
    found = [x for x in command(words) if x.startswith('{"bert_config"')]
    line = json.loads(found[-1])
    predicted = prediction(given, mode, triton)
    rate = (predicted or {}).get("roofline_examples_per_second")
    share = rate and round(line["examples_per_second"] / rate, 3)
    return {**line, "predicted": rate, "share": share}

  return item


def prediction(given: dict, mode: str, triton: bool) -> dict | None:
  """The newest line of gpu_check.jsonl for this GPU and shape."""
  chip = next(
    (c for c in chips.CHIPS if gpus() and c in gpus()[0].lower()), None
  )
  wanted = {
    "gpu": chip, "xla": mode, "precision": "bf16",
    "micro_batch": given["train_batch_size"],
    "bert_config": os.path.basename(given["bert_config_file"]),
    "seq_length": given["max_seq_length"],
    "predictions": given["max_predictions_per_seq"],
  }  # fmt: skip
  lines = json_files.read_lines(PREDICTED)
  return next(
    (
      x
      for x in lines[::-1]
      if wanted.items() <= x.items()
      and x.get("triton", False) == triton
      and not x.get("deterministic")
    ),
    None,
  )


def largest(model: str, length: int) -> Callable:
  """The largest micro-batch of a dry run."""

  def item() -> dict:
    given = shape(model, length, 4)
    words = next_steps.python(
      "run_pretraining.py", dry_run=True, find_batch_size=True,
      precision="bf16", num_train_steps=100, num_warmup_steps=10, **given,
    )  # fmt: skip
    wanted = r"largest micro-batch: --train_batch_size=(\d+)"
    found = re.findall(wanted, "\n".join(command(words)))
    if not found:
      raise Failed("the dry run names no largest micro-batch")
    return {"largest_micro_batch": int(found[-1])}

  return item


def two_ranks() -> dict:
  """Two ranks beside one, with the same global batch."""
  if gpus() and len(gpus()) < 2:
    return {"left_out": "NCCL wants a GPU for each rank; there is one"}
  found = difference(train("two", ranks=2), train("one"))
  if found > TOLERANCE["fp32"]:
    raise Failed(f"two ranks differ by {found:.2%} from one")
  return {"largest_difference": round(found, 6)}


def items() -> dict:
  """Name -> function, the most valuable first."""
  found = {"records": make_records}
  names = ("modeling", "mixed_precision", "optimization", "jit")
  found["kernels"] = unit_tests(*names)
  for precision, mode in (
    ("fp32", "layers"), ("bf16", "layers"), ("bf16", "step"),
    ("fp16", "layers"), ("fp32", "off"),
  ):  # fmt: skip
    found[f"{precision} {mode}"] = compare(precision, mode)
  found["packed"] = compare("bf16", "layers", "packed")
  found["triton kernels"] = unit_tests("triton_kernels")
  found["triton"] = compare("bf16", "layers", "packed", triton=True)
  found["triton step"] = compare("bf16", "step", triton=True)
  found["resume"] = resume
  for model, length, batch in (
    ("large", 128, 64), ("base", 128, 64), ("large", 512, 32), ("base", 512, 32)
  ):  # fmt: skip
    for mode, triton in (("layers", False), ("layers", True), ("step", False)):
      name = f"{model} {length} {mode}" + " triton" * triton
      found[name] = speed(model, length, batch, mode, triton)
  found["two ranks"] = two_ranks
  found["largest"] = largest("large", 512)
  return found


def main(_) -> None:
  os.makedirs(FLAGS.work_dir, exist_ok=True)
  done = {line["item"]: line for line in json_files.read_lines(FLAGS.output)}
  device = ", ".join(gpus()) or "CPU"
  if device == "CPU" and not FLAGS.tiny:
    sys.exit("no NVIDIA GPU is seen (nvidia-smi): --tiny tries it on a CPU")
  for name, item in items().items():
    if name in done and (name != "records" or os.path.exists(path("rows"))):
      continue
    if limit() <= 1.0:
      print(f"{FLAGS.minutes:g} minutes are over: the same command continues")
      break
    began = time.monotonic()
    line = {"item": name, "device": device, "ok": True}
    try:
      line |= item()
    except subprocess.TimeoutExpired:
      print(f"{name}: cut; the same command continues with it")
      break
    except Exception as e:
      line |= {"ok": False, "error": f"{type(e).__name__}: {e}"[:300]}
    line["wall_seconds"] = round(time.monotonic() - began, 1)
    if name not in done:
      json_files.append_line(FLAGS.output, line)
    done[name] = line
    print(json_files.text(line), flush=True)
  failed = [name for name, line in done.items() if not line["ok"]]
  print(f"{len(done)} of {len(items())} items; failed: {failed or 'none'}")
  sys.exit(bool(failed))


if __name__ == "__main__":
  define_flags()
  app.run(main)
