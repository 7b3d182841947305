"""What recipes reach in fixed times: held-out loss, grammar, and how soon.

  python -m benchmarks.time_to_quality --text=runs/quickstart \\
    --arms=arms.json --minutes=4,10 --seeds=1,2,3 --output_dir=runs/ttq

--text is a folder with corpus/train.txt, corpus/heldout.txt and vocab.txt. An
arm of the JSON file is a recipe; the first one, or --only's, is the baseline:

  {"pairs": {"bert_config": {"hidden_size": 128, ...},
             "records": {"max_seq_length": 32, "dupe_factor": 10},
             "train": {"global_batch_size": 96, "learning_rate": 0.002}},
   "alone": {..., "records": {"objective": "mlm", ...},
             "stages": [{"records": {"max_seq_length": 32}, ...}]}}

`records` are flags of create_pretraining_data.py, `train` of
run_pretraining.py; a stage's records add to the arm's.

Every run has the whole time for itself, --max_train_minutes, in which its rate
falls to its end; arms take turns. All are evaluated with 15%
masked: `loss_N` on the same held-out tokens, full sequences of N, segment ids
0, which suits arms that train so; `loss_own` on held-out records of the arm's
own kind. Text is lower-cased as the arm's records are: a cased arm's losses are
of other tokens. One JSON line a run, in results.jsonl; a second call makes what
is missing there, of these recipes, this text, these evaluations and this
machine. A run that diverged has a line without losses.

The tables have means and standard deviations over seeds; those of the same
tokens have the time in which an arm reaches the baseline's loss of the longest
budget: interpolated in log(minutes) between budgets, with a 90% interval from
2,000 draws of Student's t around each mean.
"""

import collections
import contextlib
import hashlib
import itertools
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time

import numpy as np
from absl import app, flags

from benchmarks import measuring
from checkpoints import metrics, run_folder
from common import input_files, json_files, processes
from common.files import file_sha256
from training import divergence
from training.next_steps import python
from workers.pool import available_cores

FLAGS = flags.FLAGS
RESULTS = "results.jsonl"


def define_flags() -> None:
  """Defines the flags."""
  flags.DEFINE_string("text", None, "Folder of the text.", required=True)
  flags.DEFINE_string("arms", None, "JSON file of recipes.", required=True)
  flags.DEFINE_string("output_dir", None, "Where to work.", required=True)
  flags.DEFINE_list("minutes", ["10"], "Budgets.")
  flags.DEFINE_list("seeds", ["1", "2", "3"], "Seeds.")
  flags.DEFINE_list(
    "only", [], "Arms to run, the baseline first. Default: all of --arms."
  )
  flags.DEFINE_integer("num_ranks", 2, "Ranks of each run.")
  flags.DEFINE_list("eval_lengths", ["32"], "Tokens of held-out records.")
  flags.DEFINE_string("pairs", None, "For tools.evaluate_grammar.")
  flags.DEFINE_integer("sample", 200, "Pairs of a paradigm.")


def run(command: list, log: str, unless: str = "") -> float:
  """Seconds of a command; its output goes to `log`.

  Exits if it fails, unless there is then a file `unless`.
  """
  began = time.monotonic()
  with open(log, "a", encoding="utf-8") as f:
    print(*command, file=f, flush=True)
    failed = subprocess.run(command, stdout=f, stderr=f).returncode
    if failed and not os.path.exists(unless):
      sys.exit(f"{command[0]} failed: see the end of {log}")
  return time.monotonic() - began


def text_file(name: str) -> str:
  """A file of --text."""
  return os.path.join(FLAGS.text, name)


def made_records(part: str, settings: dict) -> str:
  """The pattern of records of corpus/`part`.txt, which are made once."""
  digest = digest_of(part, settings)
  folder = os.path.join(FLAGS.output_dir, "records", digest)
  if not os.path.exists(f"{folder}/{part}.manifest.json"):
    given = {
      "input_file": text_file(f"corpus/{part}.txt"),
      "vocab_file": text_file("vocab.txt"),
      "output_file": f"{folder}/{part}.tfrecord",
      **settings,
    }
    command = python("create_pretraining_data.py", **given)
    run(command, os.path.join(FLAGS.output_dir, "records.log"))
  return f"{folder}/{part}*.tfrecord"


def case_of(arm: dict) -> dict:
  """The flag of an arm's records about case, if it is given."""
  name, given = "do_lower_case", arm.get("records", {})
  return {name: given[name]} if name in given else {}


def heldout(length: str, arm: dict) -> str:
  """Full sequences of held-out text; evaluations always mask the same 15%."""
  settings = {"objective": "mlm", "dynamic_masks": True, **case_of(arm)}
  settings |= {"max_seq_length": int(length), "examples_per_record": 8}
  settings["max_predictions_per_seq"] = int(0.15 * int(length)) + 1
  return made_records("heldout", settings)


def bert_config(arm: dict, folder: str) -> str:
  """The arm's config with the text's vocabulary, as a file in `folder`."""
  with open(text_file("vocab.txt"), encoding="utf-8") as f:
    size = sum(1 for _ in f)
  path = os.path.join(folder, "bert_config.json")
  os.makedirs(folder, exist_ok=True)
  json_files.write(path, {"vocab_size": size, **arm["bert_config"]})
  return path


def train(arm: dict, minutes: float, seed: int, folder: str) -> dict:
  """Trains an arm; its results, and the "model": a checkpoint or run folder.

  A run that diverged has none.
  """
  config, log = bert_config(arm, folder), os.path.join(folder, "log.txt")
  model = os.path.join(folder, "run")
  given = {"precision": precision_of(arm), "save_checkpoints_steps": 0}
  given |= arm.get("train", {})
  if "stages" in arm:
    items = [dict(item) for item in arm["stages"]]
    for item in items:
      own = item.pop("records", {})
      item["input_file"] = made_records("train", {**arm["records"], **own})
    given["stages"] = os.path.join(folder, "stages.json")
    json_files.write(given["stages"], items)
  else:
    given["input_file"] = made_records("train", arm["records"])
  given |= {"do_train": True, "bert_config_file": config, "output_dir": model}
  given |= {"max_train_minutes": minutes, "seed": seed}
  command = python("run_pretraining.py", **given)
  bad = os.path.join(model, divergence.FILE)
  with contextlib.suppress(FileNotFoundError):  # of an earlier start
    os.remove(bad)
  run(processes.horovodrun(FLAGS.num_ranks, command), log, unless=bad)
  if os.path.exists(bad):
    return {"diverged": True, "updates": json_files.read(bad)["update"]}
  ended = os.path.join(model, run_folder.TRAINING_RESULTS_FILE)
  if not json_files.read(ended)["out_of_time"]:
    sys.exit(f"{model} ended before its {minutes:g} minutes: see {ended}")
  reports = metrics.read_jsonl(os.path.join(model, metrics.METRICS_FILE))
  return {"model": model, "updates": reports[-1]["global_step"]}


def own_heldout(arm: dict) -> str:
  """Held-out records of the arm's kind, of its last stage."""
  settings = {**arm.get("records", {})}
  for item in arm.get("stages", [])[-1:]:
    settings |= item.get("records", {})
  settings |= {"dynamic_masks": True, "dupe_factor": 1}
  return made_records("heldout", settings)


def evaluate(arm: dict, model: str, config: str, folder: str) -> dict:
  """Losses (nats) and accuracies, and grammar, of a model."""
  found, log = {}, os.path.join(folder, "log.txt")
  sets = {length: heldout(length, arm) for length in FLAGS.eval_lengths}
  for name, files in {**sets, "own": own_heldout(arm)}.items():
    given = {
      "do_eval": True, "input_file": files, "bert_config_file": config,
      "init_checkpoint": model, "output_dir": f"{folder}/eval_{name}",
    }  # fmt: skip
    if name != "own":
      given["objective"] = "mlm"
    else:
      names = ("objective", "segment_ids")
      given |= {n: arm["train"][n] for n in names if n in arm.get("train", {})}
    run(python("run_pretraining.py", **given), log)
    results = json_files.read(f"{folder}/eval_{name}/eval_results.json")
    found[f"loss_{name}"] = results["masked_lm_loss"]
    found[f"accuracy_{name}"] = results["masked_lm_accuracy"]
  if FLAGS.pairs:
    given = {
      "pairs": FLAGS.pairs, "sample": FLAGS.sample,
      "vocab_file": text_file("vocab.txt"), "bert_config_file": config,
      "output": os.path.join(folder, "grammar.json"), **case_of(arm),
    }  # fmt: skip
    run(python("tools.evaluate_grammar", model, **given), log)
    found["grammar"] = json_files.read(given["output"])["accuracy"]
  return found


def digest_of(*values) -> str:
  """Digest of settings and the text: results of others do not count."""
  found = hashlib.sha256(json.dumps(values).encode())
  for name in ("vocab.txt", "corpus/train.txt", "corpus/heldout.txt"):
    with open(text_file(name), "rb") as f:
      found.update(f.read())
  return found.hexdigest()[:12]


def precision_of(arm: dict) -> str:
  """In which an arm is trained."""
  return arm.get("train", {}).get("precision", "auto")


def machine(arm: dict) -> dict:
  """What the speed of an arm's run depends on."""
  with open("/proc/cpuinfo", encoding="utf-8") as f:
    names = re.findall(r"^model name\s*:\s*(.+)$", f.read(), re.MULTILINE)
  return {
    "cpu": names[0] if names else platform.machine(),
    "ranks": FLAGS.num_ranks,
    "cores": available_cores(),
    "precision": precision_of(arm),
  }


def digest_of_run(arm: dict) -> str:
  """Digest of all that decides a result but budget, seed and our code."""
  files = input_files.expand_patterns(FLAGS.pairs) if FLAGS.pairs else []
  pairs = list(map(file_sha256, files))
  given = [FLAGS.eval_lengths, FLAGS.sample]
  return digest_of(arm, machine(arm), given, pairs)


def measure(name: str, arm: dict, budget: float, seed: int) -> dict:
  """One run and its evaluation: a line of the results."""
  digest = digest_of_run(arm)
  folder = os.path.join(
    FLAGS.output_dir, "runs", f"{name}-{budget:g}-{seed}-{digest}"
  )
  # Of 1024 x 1024 in float32, by all cores.
  a = np.ones([1024, 1024], np.float32)
  products = [measuring.seconds_of(lambda: a @ a) for _ in range(10)]
  product = statistics.median(products[1:])
  line = {
    "arm": name,
    "digest": digest,
    "budget": budget,
    "seed": seed,
    **machine(arm),
    "git": run_folder.versions()["git"],
    "matmul_gflop_per_second": round(2 * 1024**3 / product / 1e9, 1),
    "minutes": budget,
  }
  made = train(arm, budget, seed, folder)
  model = made.pop("model", None)
  if model is None:
    return {**line, **made}
  config = os.path.join(folder, "bert_config.json")
  return {**line, **made, **evaluate(arm, model, config, folder)}


def time_to(target: float, minutes, losses) -> float:
  """Minutes at which the curve reaches `target`; inf if it does not.

  A curve that begins below the target counts as its first budget: at most.
  """
  for i, loss in enumerate(losses):
    if loss <= target:
      if not i:
        return minutes[0]
      share = (losses[i - 1] - target) / (losses[i - 1] - loss)
      logs = np.log(minutes[i - 1 : i + 1])
      return float(np.exp(logs[0] + share * (logs[1] - logs[0])))
  return float("inf")


def curves(lines: list, key: str) -> dict:
  """Arm -> {budget -> its values over seeds, [(minutes, value), ...]}."""
  found: dict = {}
  for line in lines:
    if isinstance(line.get(key), float):  # null or none: it diverged
      by_time = found.setdefault(line["arm"], {})
      pair = (line["minutes"], line[key])
      by_time.setdefault(line["budget"], []).append(pair)
  return found


def table(lines: list, key: str, baseline: str | None) -> list[str]:
  """Rows of Markdown; without a `baseline` no time to it."""
  found, rng = curves(lines, key), np.random.default_rng(0)
  times = sorted({t for by_time in found.values() for t in by_time})
  titles = [key, *(f"{t:g} min" for t in times)]
  budgets = [line["budget"] for line in lines if line["arm"] == baseline]
  target = found.get(baseline, {}).get(max(budgets, default=0))
  lost = collections.Counter(
    (line["arm"], line["budget"]) for line in lines if line.get("diverged")
  )
  if target:
    titles.append("time to the baseline's, 90% interval")
  rows = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
  for arm, by_time in found.items():
    cells = [
      arm, *(shown(t, by_time.get(t, []), lost[arm, t]) for t in times)
    ]  # fmt: skip
    if target:
      took = statistics.mean(minutes for minutes, _ in target)
      cells.append(
        reached(by_time, target, rng) if arm != baseline else minutes_of(took)
      )
    rows.append(f"| {' | '.join(cells)} |")
  return rows


def shown(budget: float, pairs: list, diverged: int = 0) -> str:
  """Mean and standard deviation, the number of seeds, another time."""
  lost = f", {diverged} diverged" if diverged else ""
  if not pairs:
    return lost[2:]
  minutes, values = zip(*pairs, strict=True)
  spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
  took = statistics.mean(minutes)
  other = f", {took:.1f} min" if abs(took - budget) > 0.05 else ""
  return f"{statistics.mean(values):.3f}{spread} ({len(values)}{other}{lost})"


def reached(by_time: dict, baseline: list, rng) -> str:
  """The time to the baseline's mean, and its interval."""
  each = [by_time[t] for t in sorted(by_time)]
  minutes = [statistics.mean(m for m, _ in pairs) for pairs in each]
  losses = [[loss for _, loss in pairs] for pairs in each]
  target = [loss for _, loss in baseline]
  best = time_to(np.mean(target), minutes, [np.mean(v) for v in losses])
  at_most = lambda t: f"{'≤ ' if t == minutes[0] else ''}{minutes_of(t)}"
  if min(map(len, [target, *losses])) < 2:
    return at_most(best)

  def drawn(values):
    error = statistics.stdev(values) / len(values) ** 0.5
    return np.mean(values) + error * rng.standard_t(len(values) - 1)

  times = [
    time_to(drawn(target), minutes, [drawn(v) for v in losses])
    for _ in range(2000)
  ]
  low, high = np.quantile(times, [0.05, 0.95], method="nearest")
  return f"{at_most(best)} ({at_most(low)} to {at_most(high)})"


def minutes_of(value: float) -> str:
  """A time for people."""
  return f"{value:.1f} min" if math.isfinite(value) else "not reached"


def main(_) -> None:
  """Makes the runs that are missing, then the tables."""
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends its commands
  os.makedirs(FLAGS.output_dir, exist_ok=True)
  results = os.path.join(FLAGS.output_dir, RESULTS)
  arms = json_files.read(FLAGS.arms)
  chosen = FLAGS.only or list(arms)
  budgets = sorted(map(float, FLAGS.minutes))
  digests = {name: digest_of_run(arm) for name, arm in arms.items()}
  names = ("arm", "digest", "budget", "seed")

  def key(line):
    return tuple(line[n] for n in names)

  made = set(map(key, json_files.read_lines(results)))
  seeds = map(int, FLAGS.seeds)
  for seed, budget, name in itertools.product(seeds, budgets, chosen):
    wanted = dict(zip(names, (name, digests[name], budget, seed), strict=True))
    if key(wanted) in made:
      continue
    line = measure(name, arms[name], budget, seed)
    made.add(key(line))
    json_files.append_line(results, line)
    print(json_files.text(line), flush=True)
  lines = [
    line
    for line in json_files.read_lines(results)
    if digests.get(line["arm"]) == line["digest"]
  ]
  if len({line.get("git") for line in lines}) > 1:
    print("\nThese lines are of several versions of the code: see their git.")
  for name in FLAGS.eval_lengths:
    print("", *table(lines, f"loss_{name}", chosen[0]), sep="\n")
  for key in ("loss_own", *(["grammar"] if FLAGS.pairs else [])):
    print("", *table(lines, key, None), sep="\n")
  print(f"\n{results}")


if __name__ == "__main__":
  define_flags()
  app.run(main)
