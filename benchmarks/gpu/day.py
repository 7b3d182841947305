"""What to check and measure on a machine with an NVIDIA GPU, in 40 minutes.

  python -m benchmarks.gpu.day --output=gpu_day.jsonl

Runs with the Python that starts it; benchmarks/gpu/day.sh makes an environment
before. In order of value: the GPU is there and computes; losses and gradient
norms beside the CPU's, in every precision and mode; repeated and resumed runs;
speeds beside transformers'; real runs with a profile; kernels' tests.
What does not measure runs side by side.

Appends a JSON line for each item, at once; what an item printed is in
runs/gpu_day/logs. The same command continues after a cut; an item whose line is
taken out is repeated. --tiny does all of it with a small model, on a CPU in the
GPU's place, too. Ends with status 1 if an item failed.
"""

import concurrent.futures
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from absl import app, flags

from benchmarks import fake_records, measuring
from benchmarks.peers import compare, turns
from checkpoints import metrics
from common import json_files
from common.nvidia import visible_gpus
from config import execution
from config.bert_config import read_bert
from training.next_steps import python

FLAGS = flags.FLAGS
WORK_DIR = "runs/gpu_day"
# Of a loss or a norm from float32's on the CPU, over the first updates.
TOLERANCE = {"fp32": 2e-3, "tf32": 1e-2, "bf16": 3e-2, "fp16": 2e-2}
UPDATES = 12
BEGAN = time.monotonic()
_item = threading.local()  # `log` and `end` of the item that this thread does
_on_cpu = threading.Lock()


class Failed(Exception):
  """An item's command failed, or its numbers are not what they should be."""


class Item(NamedTuple):
  """A thing to do; it returns what its line says, or raises."""

  do: Callable[[], dict]
  seconds: float = 150.0  # at most
  alone: bool = False  # it measures, or the rest is in vain without it


# Names of those that this process may use.
gpus = functools.cache(functools.partial(visible_gpus, "name"))


def path(*names: str) -> str:
  return os.path.join(WORK_DIR, *names)


def seconds_left() -> float:
  return 60 * FLAGS.minutes - (time.monotonic() - BEGAN)


def command(words: list[str], **environment) -> str:
  """What a command prints and its messages, which the item's log has, too."""
  with subprocess.Popen(
    words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    env={**os.environ, **environment}, start_new_session=True,
  ) as process:  # fmt: skip
    try:
      printed, _ = process.communicate(timeout=_item.end - time.monotonic())
    except BaseException:
      os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
      printed, _ = process.communicate()
      raise
    finally:
      print(*words, printed, sep="\n", file=_item.log, flush=True)
  if process.returncode:
    raise Failed(f"status {process.returncode}: {printed.strip()[-700:]}")
  return printed


# What runs train on -----------------------------------------------------------


def make_records() -> dict:
  """Records of this project's own pages, in both forms."""
  text, vocabulary = path("text/train.txt"), path("vocab.txt")
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
  name: str, kind: str = "rows", launched: int = 0, resumed=False,
  environment: dict | None = None, **given,
) -> list[dict]:  # fmt: skip
  """The reports of a short training of bert_tiny, one for each update.

  Without dropout, which ranks draw apart. Settings of a name that begins with
  "cpu" see no GPU. horovodrun starts as many ranks as are `launched`.
  """
  settings = {
    "do_train": True, "bert_config_file": "tiny", "output_dir": path(name),
    "input_file": path(kind, "train.tfrecord"), "global_batch_size": 32,
    "learning_rate": 1e-3, "num_train_steps": UPDATES, "num_warmup_steps": 2,
    "log_every_steps": 1, "bias_correction": True, "tf32": False,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "initial_loss_scale": 256.0, "precision": "fp32",
  }  # fmt: skip
  if not resumed:
    shutil.rmtree(path(name), ignore_errors=True)
  hidden = {"CUDA_VISIBLE_DEVICES": ""} if name.startswith("cpu") else {}
  words = python("run_pretraining.py", **{**settings, **given})
  if launched:  # by module: the launcher may be elsewhere than Python
    launcher = [sys.executable, "-m", "horovod.runner.launch"]
    words = [*launcher, "-np", str(launched), *words]
  command(words, **hidden, **environment or {})
  return metrics.read_jsonl(path(name, metrics.METRICS_FILE))


# Is it correct? ---------------------------------------------------------------


def device() -> dict:
  """`matmul_rates` in a process of its own: the GPU is free afterwards."""
  printed = command([sys.executable, "-m", "benchmarks.gpu.day", "--device"])
  return measuring.json_lines(printed)[-1]


def matmul_rates() -> dict:
  """TFLOP/s of bf16 products on the GPU; a CPU will do where there is none."""
  from common.tensorflow_v1 import tf

  devices = tf.config.list_physical_devices("GPU")
  if gpus() and not devices:
    sys.exit("TensorFlow sees no GPU: TF_CPP_MIN_LOG_LEVEL=0 says why")
  size, repeats = 8192 if devices else 256, 50
  line = {"tensorflow": tf.__version__}
  for name, jit in (("tflops", False), ("tflops_xla", True)):
    with tf.Graph().as_default(), tf.Session() as session:
      a = tf.Variable(tf.random.normal([size, size], dtype=tf.bfloat16))

      def chain(b, a=a):
        for _ in range(repeats):  # each waits for the one before
          b = tf.matmul(a, b) * tf.constant(0.01, tf.bfloat16)
        return tf.reduce_sum(tf.cast(b, tf.float32))

      done = (tf.function(chain, jit_compile=True) if jit else chain)(a)
      session.run(tf.global_variables_initializer())
      run = functools.partial(session.run, done)
      seconds = min(measuring.seconds_of(run) for _ in range(6)) / repeats
    line[name] = round(2 * size**3 / seconds / 1e12, 3)
  return line


def unit_tests(name: str) -> dict:
  """Runs tests of kernels on the GPU, without TensorFloat-32."""
  file = f"tests/unit/test_{name}.py"
  testing = [sys.executable, "-m", "pytest", "-q", "-W", "default"]
  # A session of a test takes no more of the GPU than it needs.
  shared = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}
  words = [*testing, "-m", "not slow", file]
  printed = command(words, NVIDIA_TF32_OVERRIDE="0", **shared)
  return {"tests": re.findall(".* passed.*", printed)[-1]}


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
  return {"largest_difference": float(f"{largest:.2g}")}


def on_cpu(kind: str) -> list[dict]:
  """The reports of float32 on the CPU, on records of a `kind`."""
  with _on_cpu:  # the first that asks makes them
    name = f"cpu_{kind}"
    reports = path(name, metrics.METRICS_FILE)
    if os.path.exists(reports) and len(metrics.read_jsonl(reports)) == UPDATES:
      return metrics.read_jsonl(reports)
    return train(name, kind, xla="off")


def beside_cpu(precision: str, mode: str, kind="rows") -> dict:
  """Updates in a precision and mode beside the CPU's in float32."""
  name = f"{precision}_{mode}_{kind}"
  given = {"precision": precision, "xla": mode}
  if precision == "tf32":
    given |= {"precision": "fp32", "tf32": True}
  reports = train(name, kind, **given)
  return check_equal(reports, on_cpu(kind), TOLERANCE[precision])


def repeat() -> dict:
  """--deterministic, twice and in two parts: equal to the last bit."""
  given = {"deterministic": True, "precision": "bf16"}
  whole = train("whole", **given)
  check_equal(train("again", **given), whole, 0.0)
  train("parts", save_checkpoints_steps=UPDATES // 2, **given)
  for name in os.listdir(path("parts")):
    if f"ckpt-{UPDATES}" in name:  # as if it had been killed before
      os.remove(path("parts", name))
  return check_equal(train("parts", resumed=True, **given), whole, 0.0)


def two_ranks() -> dict:
  """Two ranks, which share a GPU if there is one, beside one rank."""
  shared = {"CUDA_VISIBLE_DEVICES": "0"} if len(gpus()) == 1 else {}
  two = train("two", launched=2, environment=shared)
  return check_equal(two, train("one"), TOLERANCE["fp32"])


def nccl() -> dict:
  """Horovod with NCCL: one rank trains, saves, resumes and evaluates."""
  if not FLAGS.nccl_horovod:
    return {"left_out": "--nccl_horovod names no folder"}
  paths = f"{FLAGS.nccl_horovod}{os.pathsep}{os.environ['PYTHONPATH']}"
  given = {
    "environment": {"PYTHONPATH": paths}, "launched": 1,
    "eval_input_file": path("rows", "train.tfrecord"), "do_eval": True,
    "max_eval_steps": 4,
  }  # fmt: skip
  train("nccl", num_train_steps=UPDATES // 2, **given)
  return {"updates": len(train("nccl", resumed=True, **given))}


def fine_tune() -> dict:
  """A classifier learns, answers alike on the CPU, and is exported."""
  tuned, exported = path("tuned"), path("served")
  for folder in (tuned, exported):
    shutil.rmtree(folder, ignore_errors=True)
  # The task: is there code in a line of our pages?
  with open(path("text/train.txt"), encoding="utf-8") as f:
    lines = [line.strip() for line in f if line.strip() and "\t" not in line]
  rows = [f"{line}\t{'code' if '`' in line else 'prose'}\n" for line in lines]
  for name, part in (("train", rows[:1000]), ("eval", rows[1000:1200])):
    with open(path(f"{name}.tsv"), "w", encoding="utf-8") as f:
      f.writelines(["sentence\tlabel\n", *part])
  train("tuned_from")
  training = python(
    "run_classifier.py", do_train=True, do_eval=True, output_dir=tuned,
    init_checkpoint=path("tuned_from"), max_seq_length=64, num_train_epochs=3,
    learning_rate=1e-3, train_file=path("train.tsv"),
    eval_file=path("eval.tsv"),
  )  # fmt: skip
  command(training)
  asking = python("predict.py", tuned, "run `make env` first .", "they train .")
  answers = [
    re.findall("^  .*%", command(asking, **hidden), re.M)
    for hidden in ({}, {"CUDA_VISIBLE_DEVICES": ""})
  ]
  if answers[0] != answers[1] or len(answers[0]) != 2:
    raise Failed(f"GPU and CPU answer {answers}")
  exporting = {"to": "saved_model", "output": os.path.join(exported, "1")}
  command(python("convert_checkpoint.py", tuned, **exporting))
  return json_files.read(os.path.join(tuned, "eval_results.json"))


# Is it fast? ------------------------------------------------------------------


def shape(model: str, length: int, batch: int) -> dict:
  if FLAGS.tiny:
    model, length, batch = model.split("_")[0] + "_tiny", min(length, 64), 4
  return {
    "bert_config_file": f"configs/{model}.json",
    "max_seq_length": length,
    "train_batch_size": batch,
    "max_predictions_per_seq": max(3, length * 80 // 512),
  }


# transformers' step, by the name of a contender; others are modes of ours.
TRANSFORMERS = {
  "eager": (),
  "compiled": ("--compile",),
  "compiled masked": ("--compile", "--sparse"),
}


def contender(of_shape: tuple, name: str) -> list[str]:
  """The command of transformers' step, or of ours in a mode of XLA."""
  given = shape(*of_shape)
  bert = read_bert(given["bert_config_file"])
  if name not in TRANSFORMERS:
    objective = "mlm_nsp" if bert.has_pooler else "mlm"
    how = dict(precision="bf16", objective=objective, xla=name, serve=True)
    return python("benchmarks.step", **given, **how)
  folder = path(f"transformers_{of_shape[0]}_{of_shape[1]}")
  os.makedirs(folder, exist_ok=True)
  compare.write_models(bert, of_shape[1], folder)
  return [
    FLAGS.transformers_python, compare.TRANSFORMERS_SIDE,
    f"--model={folder}", "--precision=bf16",
    f"--batch={given['train_batch_size']}",
    f"--max_seq_length={given['max_seq_length']}",
    f"--predictions={given['max_predictions_per_seq']}", *TRANSFORMERS[name],
  ]  # fmt: skip


def speed(of_shape: tuple, names: tuple, rounds: int = 5) -> dict:
  """Milliseconds of an update and examples/s of each, measured in turns."""
  workers = {
    name: turns.Worker(contender(of_shape, name), messages=_item.log)
    for name in names
  }
  kill = lambda: [worker.kill() for worker in workers.values()]
  killer = threading.Timer(_item.end - time.monotonic(), kill)
  killer.start()
  # All compile beside each other; one that cannot has ended and is left out.
  running = {name: w for name, w in workers.items() if w.about}
  seconds = {name: [] for name in running}
  for _, (name, worker) in itertools.product(range(rounds), running.items()):
    seconds[name] += worker.ask().get("seconds", [])
  for worker in workers.values():
    worker.close()
  killer.cancel()
  batch = shape(*of_shape)["train_batch_size"]
  ended = {"error": "it was not ready, or ended: see the log"}
  lines = dict.fromkeys(names, ended)
  for name, worker in running.items():
    if seconds[name]:
      median = measuring.median(seconds[name], 6)
      lines[name] = {
        "milliseconds": round(1e3 * median, 2),
        "examples_per_second": round(batch / median, 1),
        **worker.about,
        **worker.last_words,
      }
  if not any(seconds.values()):
    raise Failed("none was ready: see the log")
  return {**shape(*of_shape), **lines}


def real_run(model: str, length: int, batch: int, **how) -> dict:
  """A training run on records, with a profile of a few updates."""
  given = shape(model, length, batch)
  name = f"run_{model}_{length}" + "".join(f"_{h}" for h in how.values())
  shutil.rmtree(path(name), ignore_errors=True)
  given |= {"precision": "bf16", "num_train_steps": 60, **how}
  given["num_warmup_steps"] = 10
  sizes = given["max_seq_length"], given["max_predictions_per_seq"]
  records = fake_records.of_model(
    WORK_DIR, given["bert_config_file"], 2048, *sizes
  )
  training = python(
    "run_pretraining.py", do_train=True, input_file=records,
    output_dir=path(name), profile_steps="40,43", log_every_steps=10, **given,
  )  # fmt: skip
  command(training)
  last = metrics.read_jsonl(path(name, metrics.METRICS_FILE))[-1]
  wanted = (
    "examples_per_second", "model_tflops_per_second", "mfu", "input_seconds",
    "seconds", "step_seconds", "gpu_peak_memory_mb", "peak_memory_mb",
  )  # fmt: skip
  return {key: last[key] for key in wanted if key in last}


# All of it --------------------------------------------------------------------

BASE_128, BASE_512 = ("bert_base", 128, 64), ("bert_base", 512, 32)
LARGE_128, LARGE_512 = ("bert_large", 128, 64), ("bert_large", 512, 32)
MODERN_1024 = ("modern_base", 1024, 16)
TESTED = ("mixed_precision", "optimization", "modeling", "jit")


def items() -> dict[str, Item]:
  """Name -> what is done, the most valuable first."""
  do, layers, masked = functools.partial, "layers", "compiled masked"
  first = [
    *[("bf16", mode, "packed") for mode in execution.MODES],
    *[("fp32", mode, "rows") for mode in execution.MODES],
    *itertools.product(("fp16", "tf32"), (layers, "step"), ("rows",)),
  ]
  every = itertools.product(TOLERANCE, execution.MODES, ("rows", "packed"))
  compared = {
    " ".join(case): Item(do(beside_cpu, *case))
    for case in dict.fromkeys([*first, *every])
  }
  tests = {f"tests {n}": Item(do(unit_tests, n), 200) for n in TESTED}
  rest = [n for n in compared if tuple(n.split()) not in first]
  measured = {
    "base 128": (BASE_128, (layers, "step", masked), 110),
    "large 512": (LARGE_512, (layers, masked), 110),
    "base 128 others": (BASE_128, ("off", "eager", "compiled"), 80),
    "base 512": (BASE_512, (layers, masked), 110),
    "large 128": (LARGE_128, (layers, masked), 110),
    "modern 1024": (MODERN_1024, (layers, masked), 110),
    "large 512 step": (LARGE_512, ("step",), 300),
  }
  return {
    "device": Item(device, 90, alone=True),
    "records": Item(make_records, alone=True),
    **{name: item for name, item in compared.items() if name not in rest},
    "repeat": Item(repeat, 240),
    "two ranks": Item(two_ranks),
    "nccl": Item(nccl),
    "fine-tune": Item(fine_tune, 200),
    "run base 128": Item(do(real_run, *BASE_128, xla=layers), alone=True),
    "run large 512": Item(do(real_run, *LARGE_512, xla=layers), alone=True),
    **{
      name: Item(do(speed, of_shape, names), limit, alone=True)
      for name, (of_shape, names, limit) in measured.items()
    },
    **tests,
    **{name: compared[name] for name in rest},
  }


def line_of(name: str, item: Item) -> dict | None:
  """Does an item; None if the time is over."""
  if seconds_left() < 0:
    return None
  began = time.monotonic()
  _item.end = began + min(item.seconds, seconds_left())
  line = {"item": name, "device": ", ".join(gpus()) or "CPU", "ok": True}
  log = path("logs", name.replace(" ", "_") + ".txt")
  with open(log, "w", encoding="utf-8") as _item.log:
    try:
      line |= item.do()
    except Exception as e:
      line |= {"ok": False, "error": f"{type(e).__name__}: {e}"[:500]}
  if seconds_left() < 0 and not line["ok"]:
    return None
  line["wall_seconds"] = round(time.monotonic() - began, 1)
  json_files.append_line(FLAGS.output, line)
  print(json_files.text(line), flush=True)
  return line


def main(_) -> None:
  if FLAGS.device:
    measuring.show(matmul_rates())
    return
  os.makedirs(path("logs"), exist_ok=True)
  done = {line["item"]: line for line in json_files.read_lines(FLAGS.output)}
  if not gpus() and not FLAGS.tiny:
    sys.exit("no NVIDIA GPU is seen (nvidia-smi): --tiny tries it on a CPU")
  if not os.path.exists(path("packed")):
    done.pop("records", None)
  chosen = FLAGS.only or items()
  todo = {n: i for n, i in items().items() if n in chosen and n not in done}
  with concurrent.futures.ThreadPoolExecutor(FLAGS.side_by_side) as pool:
    by_kind = itertools.groupby(todo.items(), lambda pair: pair[1].alone)
    for alone, group in by_kind:
      pairs = list(group)
      make = map if alone else pool.map
      for line in make(line_of, *zip(*pairs, strict=True)):
        if line:
          done[line["item"]] = line
          if line["item"] == "device" and not line["ok"]:
            sys.exit("the GPU cannot be used: see the line above")
  failed = [name for name, line in done.items() if not line["ok"]]
  print(f"{len(done)} of {len(items())} items; failed: {failed or 'none'}")
  sys.exit(bool(failed))


if __name__ == "__main__":
  flags.DEFINE_string("output", "gpu_day.jsonl", "Results.")
  flags.DEFINE_float("minutes", 40.0, "Time for all of it.")
  flags.DEFINE_integer("side_by_side", 8, "Items at once that do not measure.")
  flags.DEFINE_string("nccl_horovod", "", "Folder of a Horovod with NCCL.")
  flags.DEFINE_string(
    "transformers_python", sys.executable, "Python that has transformers."
  )
  flags.DEFINE_list("only", [], "Items to do. Default: all.")
  flags.DEFINE_bool("device", False, "Measure products only: one JSON line.")
  flags.DEFINE_bool("tiny", False, "A small model, on any device.")
  app.run(main)
