"""Where a trained model's parts are: checkpoint, config, vocabulary, task.

A model is named by a run folder, by a checkpoint's prefix, or by an exported
folder (a SavedModel of export_model.py).
"""

import dataclasses
import glob
import os
from typing import NamedTuple

import records
import tokenization
from errors import DataError, UserError
from finetuning.finetune import TASK_FILE, saved_task
from model.bert_config import BertConfig
from pretraining_data import record_report
from tensorflow_v1 import tf
from training import checkpoint_files, pretraining_config, training_hooks

PRETRAINING = "pretraining"
CONFIG_FILE = "bert_config.json"
# A SavedModel's folder for what its graph does not read, by TensorFlow
# Serving's convention.
EXTRA_FOLDER = "assets.extra"
# Names in the folders that google/bert published.
_THEIR_PREFIX, _THEIR_VOCABULARY = "bert_model.ckpt", "vocab.txt"


class Given(NamedTuple):
  """What the flags say; None: as it is found beside the model."""

  bert_config_file: str | None = None
  vocab_file: str | None = None
  spm_model_file: str | None = None
  do_lower_case: bool | None = None


NOTHING_GIVEN = Given()


@dataclasses.dataclass(frozen=True)
class Source:
  """The parts of a model.

  Attributes:
    path: a checkpoint's prefix, or an exported folder.
    chosen: why this checkpoint, for a person.
    bert: the config.
    task: as task.json has it: "task", "max_seq_length", "do_lower_case",
      and what the task's kind adds.
    vocab_file, spm_model_file: one of them, or neither if none was found.
  """

  path: str
  chosen: str
  bert: BertConfig
  task: dict
  vocab_file: str | None = None
  spm_model_file: str | None = None

  @property
  def is_export(self) -> bool:
    """Whether it is a SavedModel."""
    return _is_export(self.path)

  def tokenizer(self) -> tokenization.Encoder:
    """Makes the tokens that the model knows.

    Raises:
      UserError: there is no vocabulary.
      DataError: it has more tokens than the model.
    """
    if not (self.vocab_file or self.spm_model_file):
      raise UserError(
        f"{self.path}: its vocabulary is neither beside it nor where its "
        "training data was: give --vocab_file or --spm_model_file"
      )
    tokenization.validate_case_matches_checkpoint(
      self.task["do_lower_case"], self.path
    )
    return tokenization.load_tokenizer(
      self.vocab_file,
      self.task["do_lower_case"],
      self.spm_model_file,
      self.bert.vocab_size,
    )


def find(model: str, given: Given = NOTHING_GIVEN) -> Source:
  """The parts of the model that a user named.

  Args:
    model: a run folder, a checkpoint's prefix or an exported folder.
    given: wins over what is found beside it.

  Raises:
    UserError: there is no such model, or a part of it is missing or damaged.
  """
  if given.vocab_file and given.spm_model_file:
    raise UserError("give --vocab_file or --spm_model_file, not both")
  if _is_export(model):
    folder = os.path.join(model, EXTRA_FOLDER)
    path, chosen, task = model, "exported", saved_task(folder)
  else:
    folder = model if os.path.isdir(model) else os.path.dirname(model)
    task = saved_task(folder)
    path, chosen = _find_checkpoint(model, task)
  task = task or _pretraining_task(folder, given)
  config = _config(given.bert_config_file, folder, path)
  task = {
    "task": PRETRAINING,
    "do_lower_case": True,
    "max_seq_length": config.max_position_embeddings,
    **task,
  }
  if given.do_lower_case is not None:
    task["do_lower_case"] = given.do_lower_case
  _check_task(task, folder)
  vocabulary = {
    name: os.path.join(folder, path)
    for name, path in task.get("vocabulary", {}).items()
  }
  if given.vocab_file or given.spm_model_file:
    vocabulary = {
      "vocab_file": given.vocab_file,
      "spm_model_file": given.spm_model_file,
    }
  elif not vocabulary:
    beside = os.path.join(folder, _THEIR_VOCABULARY)
    vocabulary = {"vocab_file": beside if os.path.exists(beside) else None}
  return Source(
    path,
    chosen,
    config,
    task,
    vocabulary.get("vocab_file"),
    vocabulary.get("spm_model_file"),
  )


def _is_export(path: str) -> bool:
  return os.path.exists(os.path.join(path, "saved_model.pb"))


def _check_task(task: dict, folder: str) -> None:
  """Raises `DataError` for what a task.json of ours never says."""
  labels, vocabulary = task.get("labels", []), task.get("vocabulary", {})
  fits = (
    task["task"] in (PRETRAINING, "classifier", "squad")
    and isinstance(task["do_lower_case"], bool)
    and type(task["max_seq_length"]) is int
    and isinstance(vocabulary, dict)
    and isinstance(labels, list)
    and all(isinstance(v, str) for v in [*vocabulary.values(), *labels])
  )
  if not fits:
    raise DataError(
      f"{os.path.join(folder, TASK_FILE)}: not a task's description; move it "
      "away, or give another folder"
    )


def _config(given: str | None, folder: str, model: str) -> BertConfig:
  path = given or os.path.join(folder, CONFIG_FILE)
  if not given and not os.path.exists(path):
    raise UserError(
      f"{model}: there is no {path}: give --bert_config_file, the config that "
      "the model was trained with"
    )
  try:
    return BertConfig.from_json_file(path)
  except (ValueError, tf.errors.OpError) as e:
    message = getattr(e, "message", None) or str(e)
    raise UserError(message if path in message else f"{path}: {message}") from e


def _find_checkpoint(model: str, task: dict) -> tuple[str, str]:
  """A checkpoint's prefix, and why it was chosen.

  Of a run folder it is the best by evaluation, if that is known and there, or
  the newest.
  """
  if not os.path.isdir(model):
    if not glob.glob(glob.escape(model) + "*"):
      raise UserError(
        f"{model}: no such model. Name a run folder, a checkpoint (such as "
        "OUTPUT_DIR/model.ckpt-1000), or a folder of export_model.py"
      )
    return model, "as named"
  files = checkpoint_files.CheckpointFiles(model, keep=1)
  steps = files.steps()
  if not steps:
    theirs = os.path.join(model, _THEIR_PREFIX)
    newest = files.without_marker()
    if newest is None and not os.path.exists(theirs + ".index"):
      raise UserError(
        f"{model}: neither a checkpoint nor an exported model is in this folder"
      )
    return (newest, "the newest") if newest else (theirs, "the only one")
  by = _best_by(task)
  best = by and training_hooks.best_evaluation(model, steps[0], by)
  step = best if best in steps else steps[0]
  files.check(step)
  chosen = "the best by evaluation" if best in steps else "the newest"
  return files.prefix(step), chosen


def _best_by(task: dict) -> training_hooks.BestBy | None:
  if not task:
    return pretraining_config.BEST_BY
  found = task.get("best_by")  # older runs do not say
  return found and training_hooks.BestBy(tuple(found["keys"]), found["higher"])


def _pretraining_task(folder: str, given: Given) -> dict:
  """What the manifest of a run folder's records says; {} if it is not found.

  Raises:
    DataError: the vocabulary given is another than that of the records.
  """
  found = _manifest_of_run(folder)
  if not found:
    return {}
  path, manifest = found
  info = manifest.tokenizer
  task = {
    "max_seq_length": manifest.max_seq_length,
    "do_lower_case": info.do_lower_case,
  }
  if given.vocab_file or given.spm_model_file:
    record_report.find_encoder(
      info, folder, given.vocab_file, given.spm_model_file
    )
    return task
  vocabulary = record_report.find_vocabulary(
    info, os.path.dirname(path), folder
  )
  if not vocabulary:
    raise UserError(
      f"{path}: the records were made with {info.file} of SHA-256 "
      f"{info.sha256}, which is not near: give --vocab_file or --spm_model_file"
    )
  name = "spm_model_file" if info.kind == "sentencepiece" else "vocab_file"
  return {**task, "vocabulary": {name: os.path.abspath(vocabulary)}}


def _manifest_of_run(folder: str) -> tuple[str, records.Manifest] | None:
  """That of the records of a pre-training run, which run.json names.

  They are named from where the training was started: that is looked for from
  here and from the folders that the run folder is in.
  """
  if not os.path.exists(os.path.join(folder, training_hooks.RUN_FILE)):
    return None
  places, above = [""], os.path.abspath(folder)
  while above != (above := os.path.dirname(above)):
    places.append(above)
  for file in training_hooks.trained_on(folder)[:1]:
    for place in places:
      if found := records.find_manifest(os.path.join(place, file)):
        return found
  return None
