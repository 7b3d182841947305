"""What a run folder says of its model, which later runs hold to.

task.json, the BERT config and a copy of the vocabulary are written when a
training starts, and by nothing else.
"""

import filecmp
import os
import shutil
from collections.abc import Callable, Sequence

from common import json_files
from common.errors import DataError, UserError
from model.bert_config import BertConfig
from training import checkpoint_files, training_run

TASK_FILE = "task.json"
VOCABULARIES = ("vocab_file", "spm_model_file")


def saved_task(output_dir: str) -> dict:
  """What a run folder's task.json says; {} without one."""
  path = os.path.join(output_dir or "", TASK_FILE)
  if not os.path.exists(path):
    return {}
  remedy = "move it away, or give another folder"
  found = json_files.read_own(path, remedy)
  if not isinstance(found, dict) or not all(
    isinstance(found.get(name) or {}, dict)
    for name in ("columns", "vocabulary")
  ):
    raise DataError(f"{path}: not a task's description; {remedy}")
  return found


def model_folder(settings) -> str | None:
  """The folder of the trained model that a run starts from, if it does.

  What task.json says there is settled. It is the run folder once there is a
  checkpoint, and where nothing is trained that of --init_checkpoint; a training
  from --init_checkpoint may be of another task.

  Args:
    settings: the flags, or a `finetune.FinetuningConfig`.
  """
  if not settings.output_dir:
    return None
  files = checkpoint_files.CheckpointFiles(settings.output_dir, keep=1)
  if files.steps() or files.without_marker():
    return settings.output_dir
  if settings.do_train or not settings.init_checkpoint:
    return None
  return os.path.dirname(settings.init_checkpoint)


def kept_vocabulary(folder: str) -> dict:
  """Flag -> path, of the copy that a run folder has; {} without one."""
  names = saved_task(folder).get("vocabulary", {})
  return {flag: os.path.join(folder, name) for flag, name in names.items()}


def check(config, describe: Callable[[], dict]) -> None:
  """Compares the settings with those of the model that the run starts from.

  Args:
    config: a `finetune.FinetuningConfig`.
    describe: makes what task.json would say of this run.

  Raises:
    UserError: they contradict them, or the model is not of such a task.
  """
  folder = model_folder(config)
  if folder is None:
    return
  saved = saved_task(folder)
  own = folder == config.output_dir
  if not (saved or own):
    return  # a checkpoint of any origin
  if saved.get("task") != config.kind:
    raise UserError(
      f"{'--output_dir' if own else '--init_checkpoint'}={folder} holds a run "
      f"of {saved.get('task', 'pre-training')}, this is {config.kind}: use "
      "another --output_dir (and a checkpoint as --init_checkpoint to keep its "
      "weights)"
    )
  path, about = os.path.join(folder, TASK_FILE), describe()
  free = () if config.do_train else config.usual_flags
  compare(config.flags_of(about), config.flags_of(saved), free, path)
  if "labels" in saved and saved["labels"] != about.get("labels"):
    raise _contradiction(
      f"the labels are {_shown(about['labels'])}", path, saved["labels"]
    )
  _check_vocabulary(config, folder)
  _check_bert(config, os.path.join(folder, training_run.CONFIG_FILE))


def compare(here: dict, saved: dict, free: Sequence[str], path: str) -> None:
  """Compares values of flags, by name, with those that a file has.

  Args:
    here: of this run; none of other flags.
    saved: of the file.
    free: names of those that may have another value, if they have one.
    path: the file.

  Raises:
    UserError: one contradicts.
  """
  for name, value in here.items():
    was = saved.get(name, value)
    if value != was and (name not in free or None in (value, was)):
      raise _contradiction(f"--{name}={_shown(value)}", path, was)


def _check_bert(config, path: str) -> None:
  if not os.path.exists(path):
    return
  try:
    made = BertConfig.from_json_file(path).to_dict()
  except ValueError as e:
    raise UserError(str(e)) from e
  here = config.bert.to_dict()
  for name, value in made.items():
    if here[name] != value:
      raise UserError(
        f"--bert_config_file has {name}={here[name]}, but the model was "
        f"trained with {value}: give --bert_config_file={path}"
      )


def _check_vocabulary(config, folder: str) -> None:
  kept = kept_vocabulary(folder)
  for flag in VOCABULARIES:
    given = getattr(config, flag)
    if given and kept and not _alike(given, kept.get(flag)):
      (path,) = kept.values()
      raise UserError(
        f"--{flag}={given} is not the vocabulary {path} that the model was "
        "trained with: leave the flag out, or train in another --output_dir"
      )


def _alike(given: str, kept: str | None) -> bool:
  """Whether two files say the same; one that is not there contradicts none."""
  if kept is None or not (os.path.exists(given) and os.path.exists(kept)):
    return kept is not None
  return filecmp.cmp(given, kept, shallow=False)


def _contradiction(what: str, path: str, saved) -> UserError:
  return UserError(
    f"{what}, but {path} says that the model was trained with {_shown(saved)}: "
    "give the same (or leave the flag out), or train in another --output_dir"
  )


def _shown(value) -> str:
  """A flag's value as it is given; of many the first."""
  if not isinstance(value, list):
    return str(value)
  return ",".join(value[:10]) + (",..." if len(value) > 10 else "")


def write(config, describe: Callable[[], dict]) -> None:
  """task.json and a copy of the vocabulary, so that the folder is enough.

  What is there of a model that the training goes on with stays as it is.

  Args:
    config: a `finetune.FinetuningConfig`.
    describe: makes what task.json says beside the vocabulary.
  """
  if model_folder(config):
    return
  vocabulary = {}
  for name in VOCABULARIES:
    if path := getattr(config, name):
      vocabulary[name] = os.path.basename(path)
      copy = os.path.join(config.output_dir, vocabulary[name])
      if os.path.realpath(copy) != os.path.realpath(path):
        shutil.copyfile(path, copy + ".tmp")
        os.replace(copy + ".tmp", copy)
  json_files.write(
    os.path.join(config.output_dir, TASK_FILE),
    {**describe(), "vocabulary": vocabulary},
  )
