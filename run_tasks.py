"""Fine-tunes a model on several tasks with several seeds, and prints a table.

  python run_tasks.py runs/first --glue_dir=glue --output_dir=runs/first_glue
  python run_tasks.py runs/first --tasks=tasks.json --seeds=1,2,3,4,5 \\
    --output_dir=runs/first_tasks -- --learning_rate=1e-4 --num_train_epochs=5

MODEL is a run folder, a checkpoint's name or a Hugging Face folder. The JSON
file names tasks and the flags of run_classifier.py, or of another script:

  {"polarity": {"train_file": "train.tsv", "eval_file": "dev.tsv"},
   "squad": {"script": "run_squad.py", "train_file": "train-v1.1.json",
             "predict_file": "dev-v1.1.json"}}

Flags after -- are for all runs. A run's result is the evaluation of its best
checkpoint. The same command continues where it was stopped; tasks and seeds may
be added to it.
"""

import collections
import dataclasses
import glob
import hashlib
import itertools
import os
import pathlib
import statistics
from collections.abc import Sequence

from checkpoints import run_folder
from common import console, json_files, processes
from common.errors import DataError, UserError
from common.settings import in_group, run_with, setting
from data import tfrecord
from finetuning import task_file
from finetuning.classification import GLUE
from gradients.distributed import Comm
from interop import model_source
from training import next_steps

RESULTS_FILE = "results.jsonl"
_SETTINGS_FILE = "tasks.json"
_SCRIPTS = ("run_classifier.py", "run_squad.py")
# What each run gets from here.
_OWN = ("do_train", "do_eval", "init_checkpoint", "output_dir", "seed")
_what = in_group("What to do")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Which runs to make; the names are the flags'."""

  # fmt: off
  tasks: str | None = _what(None,
    "JSON file: the name of each task, and its flags.")
  glue_dir: str | None = _what(None,
    "Folder with folders of GLUE's tasks, such as CoLA and MRPC, which are "
    "tasks with their metrics. MNLI is evaluated on its matched part.")
  seeds: tuple = _what(("1", "2", "3"),
    "Seeds of the head's weights, of the order of examples and of dropout; a "
    "run each.")
  num_ranks: int = _what(1, "Horovod ranks of each run.", low=1)
  output_dir: str = setting(help=
    f"Folder for {RESULTS_FILE}, and for the run folders TASK/seed_SEED.")
  keep_models: bool = setting(False,
    "Keep the checkpoints of the runs. Otherwise they are removed when a run "
    "is evaluated.", group="Checkpoints and reports")
  given: model_source.Given = setting(
    model_source.NOTHING_GIVEN, group="Parts of the model")
  # fmt: on


def read_tasks(settings: Settings) -> dict[str, dict]:
  """Name -> flags of its script, and "script"; UserError if there are none."""
  found = {}
  if settings.glue_dir:
    for name in sorted(os.listdir(settings.glue_dir)):
      folder = os.path.join(settings.glue_dir, name)
      if name.lower() in GLUE and os.path.isdir(folder):
        found[name] = {"task_name": name, "data_dir": folder}
    if not found:
      raise UserError(f"--glue_dir={settings.glue_dir}: no task of GLUE in it")
  if settings.tasks:
    found |= _read_file(settings.tasks)
  if not found:
    raise UserError("no task: give --glue_dir, or --tasks with some, or both")
  return {
    name: {"script": _SCRIPTS[0], **given} for name, given in found.items()
  }


def _read_file(path: str) -> dict[str, dict]:
  tasks = json_files.read(path)
  if not isinstance(tasks, dict):
    raise DataError(f"{path}: not an object of tasks; see --help")
  for name, given in tasks.items():
    if not isinstance(given, dict):
      raise DataError(f"{path}: {name}: not an object of flags; see --help")
    if given.get("script", _SCRIPTS[0]) not in _SCRIPTS:
      raise DataError(
        f"{path}: {name}: script is {given['script']!r}, not one of "
        f"{', '.join(_SCRIPTS)}"
      )
    if not name or name != os.path.basename(name) or name.startswith("."):
      raise DataError(f"{path}: {name!r} cannot be the name of a folder")
    for flag, value in given.items():
      if flag in _OWN:
        raise DataError(f"{path}: {name}: {flag} is set by run_tasks.py")
      if not isinstance(value, (str, int, float)):
        raise DataError(
          f"{path}: {name}: {flag} is {value}, not a text, number or boolean"
        )
  return tasks


def read_seeds(texts: Sequence[str]) -> list[int]:
  """Different numbers; `UserError` if they are none."""
  if not texts or not all(text.strip().isdecimal() for text in texts):
    raise UserError(f"--seeds={','.join(texts)}: numbers, as 1,2,3")
  seeds = list(map(int, texts))
  if len(set(seeds)) < len(seeds):
    raise UserError(f"--seeds={','.join(texts)}: one is there twice")
  return seeds


def check_folder(folder: str, made_with: dict, tasks: dict) -> None:
  """Records what runs are made with; `UserError` if earlier ones differ.

  Those are the runs with results, and those that would resume: what failed at
  once may be mended.
  """
  path = os.path.join(folder, _SETTINGS_FILE)
  made = [
    line["task"]
    for line in json_files.read_lines(os.path.join(folder, RESULTS_FILE))
  ]
  saved = os.path.join(glob.escape(folder), "*", "seed_*", "model.ckpt-*.index")
  made += [pathlib.Path(name).parts[-3] for name in glob.glob(saved)]
  before: dict = {}
  if made and os.path.exists(path):
    before = json_files.read_own(path, "give another --output_dir")
  kept = {name: before[name] for name in before if name in (*made_with, *made)}
  for name, value in (*made_with.items(), *tasks.items()):
    if kept.setdefault(name, value) != value:
      raise UserError(
        f"{path}: earlier runs were made with {name} {kept[name]}, not "
        f"{value}: give that, or another --output_dir"
      )
  json_files.write(path, kept)


def files_digest(task: dict) -> str:
  """Of the files that flags name, name -> value, and of those in a folder."""
  made = hashlib.sha256()
  given = (str(task[name]) for name in sorted(task) if name != "script")
  for value in filter(None, given):
    inside = sorted(glob.glob(os.path.join(glob.escape(value), "*")))
    for path in filter(os.path.isfile, [value, *inside]):
      made.update(tfrecord.file_sha256(path).encode())
  return made.hexdigest()[:16]


def run(task: dict, seed: int, ranks: int, folder: str, more: list) -> dict:
  """Fine-tunes and evaluates; {metric: percent}, the choosing one first."""
  given = {name: value for name, value in task.items() if name != "script"}
  own = {"do_train": True, "do_eval": True, "seed": seed, "output_dir": folder}
  words = next_steps.given(given)
  command = [*next_steps.python(task["script"]), *words, *more]
  command += next_steps.given(own)
  os.makedirs(folder, exist_ok=True)
  end: collections.deque[str] = collections.deque(maxlen=5)
  log = os.path.join(folder, "log.txt")
  with open(log, "a", encoding="utf-8") as f:

    def keep(line):
      end.append(line)
      print(line, end="", file=f, flush=True)

    try:
      processes.run(folder, processes.horovodrun(ranks, command), keep)
    except UserError as e:
      said = "".join(end)
      raise UserError(f"a run failed; the end of {log}:\n{said}") from e
  read = lambda name: json_files.read(os.path.join(folder, name))
  results, about = read(run_folder.EVAL_RESULTS_FILE), read(task_file.TASK_FILE)
  if about["task"] == task_file.SQUAD:  # its metrics are percent already
    names = ("f1", "exact_match", "exact")  # SQuAD 1.1's, and 2.0's
    return {name: results[name] for name in names if name in results}
  return {name: 100 * results[name] for name in about["metrics"]}


def table(lines: Sequence[dict]) -> list[str]:
  """Lines with mean and standard deviation over seeds of each metric."""
  values: dict = collections.defaultdict(lambda: collections.defaultdict(list))
  for line in lines:
    for metric, value in line["metrics"].items():
      values[line["task"]][metric].append(value)
  rows = [
    (task, metric, found)
    for task, metrics in values.items()
    for metric, found in metrics.items()
  ]
  if len(values) > 1:
    chosen = [next(iter(metrics.values())) for metrics in values.values()]
    if len({len(found) for found in chosen}) == 1:
      means = list(map(statistics.mean, zip(*chosen, strict=True)))
      rows.append((f"mean of {len(chosen)} tasks", "first metrics", means))
  width = 2 + max(len(task) for task, _, _ in rows)
  return [
    f"{'':<{width}}{'metric':<16}{'mean':>8}{'deviation':>11}{'seeds':>7}",
    *(
      f"{task:<{width}}{metric:<16}{statistics.mean(found):>8.2f}"
      + (f"{statistics.stdev(found):>11.2f}" if found[1:] else f"{'':>11}")
      + f"{len(found):>7}"
      for task, metric, found in rows
    ),
  ]


def main(given: Settings, model: str, *more: str) -> None:
  """Makes the runs that are missing, one after the other, and the table."""
  tasks, seeds = read_tasks(given), read_seeds(given.seeds)
  for word in more:
    name = word.lstrip("-").partition("=")[0].removeprefix("no")
    if name in _OWN or not word.startswith("-"):
      raise UserError(
        f"{word}: after -- are flags of the runs, and not "
        f"{', '.join(f'--{one}' for one in _OWN)}"
      )
  source = model_source.find(model, given.given)
  parts = dataclasses.asdict(given.given).items()
  more = (
    *next_steps.given({n: value for n, value in parts if value is not None}),
    *more,
  )
  if source.is_export:
    raise UserError(f"{model} is exported: give the run folder it came from")
  console.tell(*source.lines())
  with open(f"{source.path}.index", "rb") as f:  # it has a CRC of each tensor
    digest = hashlib.sha256(f.read()).hexdigest()[:16]
  made_with = {
    "model's SHA-256": digest,
    "flags": " ".join(more),
    "flags' files' SHA-256": files_digest(
      {word: word.partition("=")[2] for word in more}
    ),
    "num_ranks": given.num_ranks,
  }
  more = (f"--init_checkpoint={source.path}", *more)
  with run_folder.locked(given.output_dir, Comm()):
    known = {
      name: {**task, "files' SHA-256": files_digest(task)}
      for name, task in tasks.items()
    }
    check_folder(given.output_dir, made_with, known)
    path = os.path.join(given.output_dir, RESULTS_FILE)
    done = {
      (one["task"], one["seed"]): one for one in json_files.read_lines(path)
    }
    wanted = [*itertools.product(tasks, seeds)]
    for name, seed in wanted:
      folder = os.path.join(given.output_dir, name, f"seed_{seed}")
      if (name, seed) not in done:
        console.tell(f"{name}, seed {seed}: see {folder}/log.txt")
        found = run(tasks[name], seed, given.num_ranks, folder, [*more])
        line = {"task": name, "seed": seed, "metrics": found}
        json_files.append_line(path, line)
        done[name, seed] = line
        shown = (f"{metric} {value:.2f}" for metric, value in found.items())
        console.tell(f"  {'  '.join(shown)}")
        if not given.keep_models:
          _remove_checkpoints(folder)
  print("", *table([done[key] for key in wanted]), "", path, sep="\n")


def _remove_checkpoints(folder: str) -> None:
  inside = glob.escape(folder)
  for file in glob.glob(f"{inside}/model.ckpt-*") + glob.glob(
    f"{inside}/checkpoint"  # TensorFlow's list of them
  ):
    os.remove(file)


if __name__ == "__main__":
  run_with(Settings, main, arguments=None)
