"""Finds a trained model's parts: checkpoint, config, vocabulary, task.

A run folder, a checkpoint's prefix or an exported folder (a SavedModel of
convert_checkpoint.py) names a model.
"""

import dataclasses
import filecmp
import glob
import os
import pathlib

import tokenization
from common.errors import UserError
from common.settings import setting
from common.tensorflow_v1 import tf
from data import record_report, records
from finetuning import settled
from finetuning.settled import PRETRAINING, SQUAD, TASK_FILE, saved_task
from model.bert_config import BertConfig
from training import checkpoint_files, metrics, run_folder, training_run
from training.config import BEST_BY

ANSWERABLE = "version_2_with_negative"
CONFIG_FILE = training_run.CONFIG_FILE
# TensorFlow Serving's folder for files that the graph does not read.
EXTRA_FOLDER = "assets.extra"
CHECKPOINT_NAME = "bert_model.ckpt"  # in the folders that google/bert published
_TRAINING_ONLY = {
  "hidden_dropout_prob",
  "attention_probs_dropout_prob",
  "initializer_range",
}


@dataclasses.dataclass(frozen=True)
class Given:
  """Flags that add what the model's files do not say, and contradict none."""

  # fmt: off
  bert_config_file: str | None = setting(None,
    "JSON file with the BERT config. Default: as found beside the model.")
  vocab_file: str | None = setting(None,
    "WordPiece vocabulary that the model was trained with. Default: as found "
    "beside the model or its training data.")
  spm_model_file: str | None = setting(None,
    "SentencePiece model that the model was trained with, instead of "
    "--vocab_file. Default: as found beside the model or its training data.")
  do_lower_case: bool | None = setting(None,
    "Lower-case the text, as uncased models expect. Default: as found beside "
    "the model, or else true.")
  # fmt: on


NOTHING_GIVEN = Given()


@dataclasses.dataclass(frozen=True)
class Source:
  """The parts of a model."""

  path: str  # a checkpoint's prefix, or an exported folder
  chosen: str  # why this checkpoint
  bert: BertConfig
  # As in task.json; "task" and "do_lower_case" are always there.
  task: dict
  vocabulary: dict[str, str]  # flag -> file; {} if none was found
  folder: str  # with its task.json, if it has one
  assumed_case: list[str]  # a line about do_lower_case if no file says it

  @property
  def max_seq_length(self) -> int:
    """As in training, or the model's largest if that is not known."""
    most = self.bert.max_position_embeddings
    return self.task.get("max_seq_length", most)

  @property
  def is_export(self) -> bool:
    return _is_export(self.path)

  def lines(self) -> list[str]:
    """The checkpoint and what is assumed, for the console."""
    named = [] if self.is_export else [f"{self.path} ({self.chosen})"]
    return named + self.assumed()

  def assumed(self) -> list[str]:
    """Lines about what no file says."""
    task_file = os.path.join(self.folder, TASK_FILE)
    return self.assumed_case + assumed_answers(self.task, task_file)

  def tokenizer(self) -> tokenization.Encoder:
    if not self.vocabulary:
      raise UserError(
        f"{self.path}: its vocabulary is neither beside it nor where its "
        "training data was: give --vocab_file or --spm_model_file"
      )
    return tokenization.load_tokenizer(
      self.vocabulary.get("vocab_file"),
      self.task["do_lower_case"],
      self.vocabulary.get("spm_model_file"),
      self.bert.vocab_size,
    )


def find(model: str, given: Given = NOTHING_GIVEN) -> Source:
  """The parts of a model: a run folder, a checkpoint's prefix or an export.

  Raises `UserError` if a part is missing, damaged, or contradicts `given`.
  """
  chosen_file = settled.named_vocabulary(given)
  if is_export := _is_export(model):
    folder = os.path.join(model, EXTRA_FOLDER)
  else:
    folder = model if os.path.isdir(model) else os.path.dirname(model)
  said, said_by = saved_task(folder), os.path.join(folder, TASK_FILE)
  path, chosen = model, "exported"
  if not is_export:
    path, chosen = _find_checkpoint(model, said)
  if not said:
    said_by, said = _pretraining_task(folder, given)
  config = _config(given.bert_config_file, folder, path)
  lower = said.get("do_lower_case")
  if lower is None:
    lower, said_by = tokenization.published_case(path), path
  lower, assumed = case(lower, said_by, given.do_lower_case, path)
  return Source(
    path,
    chosen,
    config,
    {"task": PRETRAINING, **said, "do_lower_case": lower},
    _vocabulary(said, chosen_file, folder),
    folder,
    assumed,
  )


def case(
  said: bool | None, said_by: str, given: bool | None, model: str
) -> tuple[bool, list[str]]:
  """do_lower_case by files or else by the flag, and a line if it is assumed."""
  if said is None and given is not None:
    return given, []
  if said is None:
    return True, [
      f"{model}: nothing says whether it is of lower-cased text: assumed "
      "--do_lower_case; give --nodo_lower_case if it is cased"
    ]
  if given not in (None, said):
    raise UserError(
      f"--do_lower_case={given}, but the model was trained on "
      f"{'lower-cased' if said else 'cased'} text ({said_by}): leave the flag "
      "out"
    )
  return said, []


def assumed_answers(task: dict, said_by: str) -> list[str]:
  """A line if no file says whether questions may have no answer."""
  if task["task"] != SQUAD or ANSWERABLE in task:
    return []
  return [
    "every paragraph is assumed to answer its question, as in SQuAD 1.1: if "
    f"not, set {ANSWERABLE} to true in {said_by}"
  ]


def _vocabulary(said: dict, chosen: dict, folder: str) -> dict[str, str]:
  """Flag -> file; an error if the flags contradict the files found."""
  found = {
    flag: path
    for flag, name in (said.get("vocabulary") or settled.VOCABULARIES).items()
    if os.path.exists(path := os.path.join(folder, name))
  }
  for flag, path in chosen.items():
    if found and not (
      flag in found and filecmp.cmp(path, found[flag], shallow=False)
    ):
      raise UserError(
        f"--{flag}={path} is another vocabulary than "
        f"{' or '.join(found.values())}, which is the model's: leave the flag "
        "out"
      )
  if len(found) > 1 and not chosen:
    raise UserError(
      f"{' and '.join(found.values())}: only one is the model's: give "
      "--vocab_file or --spm_model_file"
    )
  return chosen or found


def _is_export(path: str) -> bool:
  return os.path.exists(os.path.join(path, "saved_model.pb"))


def _config(given: str | None, folder: str, model: str) -> BertConfig:
  beside = os.path.join(folder, CONFIG_FILE)
  paths = [beside] if os.path.exists(beside) else []
  paths += [given] if given else []
  if not paths:
    raise UserError(
      f"{model}: there is no {beside}: give --bert_config_file, the config "
      "that the model was trained with"
    )
  configs = [_read_config(path) for path in paths]
  if differ := differences(configs[0], configs[-1]):
    raise UserError(
      f"--bert_config_file={given} and {beside}, which is the model's, differ "
      f"in {', '.join(differ)}: leave the flag out"
    )
  return configs[-1]


def differences(config: BertConfig, other: BertConfig) -> list[str]:
  """Keys that differ and change a model's answers."""
  ours, theirs = config.to_dict(), other.to_dict()
  return [
    key
    for key in BertConfig(vocab_size=0).to_dict()
    if key not in _TRAINING_ONLY and ours[key] != theirs[key]
  ]


def _read_config(path: str) -> BertConfig:
  try:
    return BertConfig.from_json_file(path)
  except (ValueError, tf.errors.OpError) as e:
    message = getattr(e, "message", None) or str(e)
    raise UserError(message if path in message else f"{path}: {message}") from e


def _find_checkpoint(model: str, task: dict) -> tuple[str, str]:
  """Prefix and reason: the best by evaluation if it exists, else the newest."""
  if not os.path.isdir(model):
    if not glob.glob(glob.escape(model) + "*"):
      raise UserError(
        f"{model}: no such model. Name a run folder, a checkpoint (such as "
        "OUTPUT_DIR/model.ckpt-1000), or an exported folder "
        "(convert_checkpoint.py --to=saved_model)"
      )
    return model, "as named"
  files = checkpoint_files.CheckpointFiles(model, keep=1)
  steps = files.steps()
  if not steps:
    theirs = os.path.join(model, CHECKPOINT_NAME)
    newest = files.without_marker()
    if newest is None and not os.path.exists(theirs + ".index"):
      raise UserError(
        f"{model}: neither a checkpoint nor an exported model is in this folder"
      )
    return (newest, "the newest") if newest else (theirs, "the only one")
  by: metrics.BestBy | None = None if task else BEST_BY
  if saved := task.get("best_by"):  # older runs do not say
    by = metrics.BestBy(tuple(saved["keys"]), saved["higher"])
  best = by and metrics.best_evaluation(model, steps[0], by)
  step = best if best in steps else steps[0]
  files.check(step)
  chosen = "the best by evaluation" if best in steps else "the newest"
  return files.prefix(step), chosen


def _pretraining_task(folder: str, given) -> tuple[str, dict]:
  """(manifest of the training records, what it says); ("", {}) without one."""
  found = manifest_of_run(folder)
  if not found:
    return "", {}
  path, manifest = found
  info = manifest.tokenizer
  task = {
    "max_seq_length": manifest.max_seq_length,
    "do_lower_case": info.do_lower_case,
  }
  if settled.named_vocabulary(given):
    files = given.vocab_file, given.spm_model_file
    record_report.find_encoder(info, folder, *files)
    return path, task
  file = record_report.find_vocabulary(info, os.path.dirname(path), folder)
  if not file:
    raise UserError(
      f"{path}: the records were made with {info.file} of SHA-256 "
      f"{info.sha256}, which is not near: give --vocab_file or --spm_model_file"
    )
  flag = "spm_model_file" if info.kind == "sentencepiece" else "vocab_file"
  return path, {**task, "vocabulary": {flag: os.path.abspath(file)}}


def manifest_of_run(folder: str) -> tuple[str, records.Manifest] | None:
  """The manifest of the records that run.json names.

  Names are relative to where the training started: tries here and all parents.
  """
  above = map(str, pathlib.Path(os.path.abspath(folder)).parents)
  for file in run_folder.trained_on(folder)[:1]:
    for place in ("", *above):
      if found := records.find_manifest(os.path.join(place, file)):
        return found
  return None
