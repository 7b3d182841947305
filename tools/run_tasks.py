"""Fine-tunes a model on several tasks with several seeds, and prints a table.

  python -m tools.run_tasks runs/first --glue_dir=glue \\
    --output_dir=runs/first_glue
  python -m tools.run_tasks runs/first --tasks=tasks.json --seeds=1,2,3,4,5 \\
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
import itertools
import os
import pathlib
import shutil
import statistics
from collections.abc import Sequence

from checkpoints import checkpoint_files, checkpoint_weights, run_folder
from common import console, files, json_files, model_files, processes
from common.errors import DataError, UserError
from common.input_files import check_not_written
from common.settings import in_group, run_with, setting
from finetuning.classification import GLUE
from interop import model_source
from model.tasks import BY_KIND, FINETUNED, LABELS
from training import next_steps

RESULTS_FILE = "results.jsonl"
_SETTINGS_FILE = "tasks.json"
_MODEL_FOLDER = ".model"  # with the checkpoint of a run, which may remove it
_SCRIPTS = tuple(BY_KIND[kind].script for kind in FINETUNED)
_ANSWERS = ("exact", "exact_match")  # SQuAD's, of 2.0 and of 1.1, beside f1
# Flags that this command sets for each run.
_OWN = ("do_train", "do_eval", "init_checkpoint", "output_dir", "seed")
_OTHER_FOLDER = "another --output_dir"
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
  parts: model_source.Given = setting(
    model_source.NOTHING_GIVEN, group="Parts of the model")
  # fmt: on


def read_tasks(settings: Settings) -> dict[str, dict]:
  """Name -> flags of its script, and "script"; UserError if there are none."""
  tasks: dict[str, dict] = {}
  if settings.glue_dir:
    for name in sorted(os.listdir(settings.glue_dir)):
      folder = os.path.join(settings.glue_dir, name)
      if name.lower() in GLUE and os.path.isdir(folder):
        tasks[name] = {"task_name": name, "data_dir": folder}
  if settings.tasks:
    record = os.path.join(settings.output_dir, _SETTINGS_FILE)
    check_not_written([settings.tasks], "--tasks", record)
    in_file = json_files.read(settings.tasks, {})
    try:
      for name, flags in in_file.items():
        json_files.expect(flags, {"script?": _SCRIPTS}, name)
        for flag, value in flags.items():
          json_files.expect(value, (str, float, bool), f"{name}.{flag}")
        if not name or name.startswith(".") or os.sep in name:
          raise ValueError(f"{name!r} cannot be the name of a folder")
    except ValueError as e:
      raise DataError(f"{settings.tasks}: {e}; see --help") from e
    tasks |= in_file
  if not tasks:
    raise UserError(
      f"no task in --glue_dir={settings.glue_dir} or --tasks={settings.tasks}: "
      "give a folder with GLUE's, or a file with some, or both"
    )
  for name, flags in tasks.items():
    tasks[name] = {"script": LABELS.script, **flags}
  return tasks


def read_seeds(texts: Sequence[str]) -> list[int]:
  """Different numbers; `UserError` if they are none."""
  seeds = [int(text) for text in texts if text.strip().isdecimal()]
  if not seeds or len(set(seeds)) < len(texts):
    raise UserError(f"--seeds={','.join(texts)}: different numbers, as 1,2,3")
  return seeds


def begun_tasks(folder: str) -> set[str]:
  """The tasks that have results, or runs that would resume."""
  results = json_files.read_lines(os.path.join(folder, RESULTS_FILE))
  begun = {line["task"] for line in results}
  saved = os.path.join(glob.escape(folder), "*", "seed_*", "model.ckpt-*.index")
  for checkpoint in glob.glob(saved):
    begun.add(pathlib.Path(checkpoint).parts[-3])
  return begun


def record_settings(folder: str, shared: dict, tasks: dict) -> None:
  """Records what runs are made with; `UserError` if earlier ones differ.

  `shared`: what all runs have in common; `tasks`: each one's flags.
  """
  begun = begun_tasks(folder)  # what failed at once may be mended
  path = os.path.join(folder, _SETTINGS_FILE)
  now, fixed = {**shared, **tasks}, {}
  if begun and os.path.exists(path):
    for name, value in json_files.read_own(path, _OTHER_FOLDER, {}).items():
      if name in shared or name in begun:
        fixed[name] = value
  for name, value in fixed.items():
    if now.get(name, value) != value:
      raise UserError(
        f"{path}: earlier runs were made with {name} {value}, not {now[name]}: "
        f"give that, or {_OTHER_FOLDER}"
      )
  json_files.write(path, {**fixed, **now})


def keep(source: model_source.Source, folder: str) -> None:
  """Makes `folder` with a run's checkpoint and the files that describe it."""
  paths = glob.glob(glob.escape(source.path) + ".*")
  for name in (
    model_files.RUN_FILE, model_files.TASK_FILE, model_files.CONFIG_FILE
  ):  # fmt: skip
    path = os.path.join(source.folder, name)
    if os.path.exists(path):
      paths.append(path)
  with files.new_folder(folder) as new:
    if source.vocabulary:
      run_folder.copy_vocabulary(source.tokenizer(), new)
    for path in paths:
      copy = os.path.join(new, os.path.basename(path))
      # A hard link takes no room of its own, but not all disks have them.
      try:
        os.link(path, copy)
      except OSError:
        shutil.copyfile(path, copy)


def run(task: dict, seed: int, ranks: int, folder: str, more: list) -> dict:
  """Fine-tunes and evaluates; {metric: percent}, the choosing one first."""
  flags = {**task}
  command = next_steps.python(flags.pop("script"), **flags) + more
  # The last of equal flags counts, so these come after all others.
  command += next_steps.flag_words(
    {"do_train": True, "do_eval": True, "seed": seed, "output_dir": folder}
  )
  os.makedirs(folder, exist_ok=True)
  end: collections.deque[str] = collections.deque(maxlen=5)
  log = os.path.join(folder, "log.txt")
  with files.naming(log), open(log, "a", encoding="utf-8") as f:

    def keep(line):
      end.append(line)
      print(line, end="", file=f, flush=True)

    try:
      processes.run(folder, processes.horovodrun(ranks, command), keep)
    except UserError as e:
      raise UserError(f"a run failed; the end of {log}:\n{''.join(end)}") from e
  results = json_files.read(os.path.join(folder, run_folder.EVAL_RESULTS_FILE))
  about = json_files.read(os.path.join(folder, model_files.TASK_FILE))
  best = [*about["best_by"]["keys"], *(n for n in _ANSWERS if n in results)]
  return {name: 100 * results[name] for name in about.get("metrics") or best}


def table(results: Sequence[dict]) -> list[str]:
  """Lines with mean and standard deviation over seeds of each metric."""
  values: dict = {}
  for result in results:
    for metric, value in result["metrics"].items():
      values.setdefault((result["task"], metric), []).append(value)
  firsts: dict = {}  # task -> the values of its first metric
  for (task, _), by_seed in values.items():
    firsts.setdefault(task, by_seed)
  # With different seeds for each task there is no mean over the tasks.
  if len(firsts) > 1 and len(set(map(len, firsts.values()))) == 1:
    by_seed = zip(*firsts.values(), strict=True)
    means = [statistics.mean(results) for results in by_seed]
    values[f"mean of {len(firsts)} tasks", "first metrics"] = means
  width = 2 + max(len(task) for task, _ in values)
  form = f"{{:<{width}}}{{:<16}}{{:>8}}{{:>11}}{{:>7}}"
  lines = [form.format("", "metric", "mean", "deviation", "seeds")]
  for (task, metric), by_seed in values.items():
    mean, deviation = f"{statistics.mean(by_seed):.2f}", ""
    if len(by_seed) > 1:
      deviation = f"{statistics.stdev(by_seed):.2f}"
    lines.append(form.format(task, metric, mean, deviation, len(by_seed)))
  return lines


def main(settings: Settings, model: str, *more: str) -> None:
  """Makes the runs that are missing, one after the other, and the table."""
  tasks, seeds = read_tasks(settings), read_seeds(settings.seeds)
  flags = set().union(*tasks.values())
  for word in more:
    flags.add(word.lstrip("-").partition("=")[0].removeprefix("no"))
  for flag in flags.intersection(_OWN):
    raise UserError(f"--{flag} is set by tools.run_tasks: leave it out")
  # All runs start from one copy, because a training that goes on may remove
  # the checkpoint meanwhile. Without a run it binds nothing.
  kept = os.path.join(settings.output_dir, _MODEL_FOLDER)
  has_runs = os.path.isdir(kept) and begun_tasks(settings.output_dir)
  chosen = kept if has_runs else model
  source = model_source.find(chosen, settings.parts)
  if source.is_export:
    raise UserError(f"{model} is exported: give the run folder it came from")
  console.tell(*source.lines())
  words = [*next_steps.flag_words(dataclasses.asdict(settings.parts)), *more]
  shared = {
    "model": os.path.normpath(model),
    "model's SHA-256": checkpoint_weights.digest(source.path),
    "flags": " ".join(words),
    "num_ranks": settings.num_ranks,
  }
  with run_folder.locked(settings.output_dir):
    record_settings(settings.output_dir, shared, tasks)
    if chosen != kept and checkpoint_files.step_of(source.path) is not None:
      shutil.rmtree(kept, ignore_errors=True)
      keep(source, kept)
      source = model_source.find(kept, settings.parts)
    words.insert(0, f"--init_checkpoint={source.path}")
    results = _run_missing(settings, tasks, seeds, words)
  path = os.path.join(settings.output_dir, RESULTS_FILE)
  print("", *table(results), "", path, sep="\n")


def _run_missing(settings, tasks: dict, seeds: list, words: list) -> list[dict]:
  """Makes the runs without a result; the results of all tasks and seeds."""
  path = os.path.join(settings.output_dir, RESULTS_FILE)
  results = {}
  for result in json_files.read_lines(path):
    results[result["task"], result["seed"]] = result
  wanted = [*itertools.product(tasks, seeds)]
  for name, seed in wanted:
    if (name, seed) in results:
      continue
    folder = os.path.join(settings.output_dir, name, f"seed_{seed}")
    console.tell(f"{name}, seed {seed}: see {folder}/log.txt")
    metrics = run(tasks[name], seed, settings.num_ranks, folder, words)
    results[name, seed] = {"task": name, "seed": seed, "metrics": metrics}
    json_files.append_line(path, results[name, seed])
    shown = [f"{metric} {value:.2f}" for metric, value in metrics.items()]
    console.tell(f"  {'  '.join(shown)}")
    if not settings.keep_models:
      # "checkpoint" is TensorFlow's list of them.
      for pattern in ("model.ckpt-*", "checkpoint"):
        for file in glob.glob(os.path.join(glob.escape(folder), pattern)):
          os.remove(file)
  return [results[key] for key in wanted]


if __name__ == "__main__":
  run_with(Settings, main, arguments=None)
