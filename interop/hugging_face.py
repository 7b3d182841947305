"""Hugging Face folders as our models: read, written, and cached for reuse."""

import contextlib
import fcntl
import glob
import hashlib
import os
import re
import tempfile
from typing import NamedTuple

import numpy as np

from checkpoints import checkpoint_files, description
from checkpoints.description import (
  CLASSIFIER,
  PRETRAINING,
  SQUAD,
  TASK_FILE,
  VOCABULARIES,
)
from common import json_files
from common.errors import DataError, UserError
from common.files import atomic_write, file_sha256
from interop import bert_tensors, model_config, tokenizer_files
from interop.given import NOTHING_GIVEN, Given, case
from interop.tokenizer_files import Vocabulary
from model.bert_config import BertConfig

CHECKPOINT_NAME = "bert_model.ckpt"  # in the folders that google/bert published
_FLAG_OF = {file: flag for flag, file in VOCABULARIES.items()}


class Model(NamedTuple):
  """A model that was read; `left_out` and `assumed` are lines for people."""

  path: str  # where it was read
  values: dict[str, np.ndarray]  # float32, by our names
  config: BertConfig
  source: str  # the config's file
  task: dict  # as in task.json, without names of files; nothing is assumed
  vocabulary: Vocabulary | None
  left_out: list[str]
  assumed: list[str]
  named: frozenset[str] = frozenset()  # the heads that the config names
  chosen: str = ""  # why this checkpoint of a run
  others: tuple[str, ...] = ()  # with which its weights are a mean


def is_folder(path: str) -> bool:
  """Whether it is a folder as transformers writes them, and none of ours."""
  theirs, ours = model_config.CONFIG_FILE, description.CONFIG_FILE
  exists = lambda name: os.path.exists(os.path.join(path, name))
  return exists(theirs) and not exists(ours)


def read_folder(folder: str, flags: Given) -> Model:
  """The model of a Hugging Face folder."""
  source = os.path.join(folder, model_config.CONFIG_FILE)
  if flags.bert_config_file:
    raise UserError(
      f"--bert_config_file is for checkpoints; {source} is the config"
    )
  known = model_config.read_config(folder)
  values, tied = bert_tensors.from_theirs(
    bert_tensors.read_tensors(folder), known.config, folder
  )
  left_out = [f"{name} (follows from the rest)" for name in tied]
  left_out += [f"{key} of {source} (not known here)" for key in known.left_out]
  given = vocabulary(description.named_vocabulary(flags))
  found = tokenizer_files.read_vocabulary(folder)
  if given and found and not tokenizer_files.is_same(given, found):
    raise UserError(
      f"--{_FLAG_OF[given.file]}: another vocabulary than that of {folder}, "
      "which is the model's: leave the flag out"
    )
  task, assumed = _task_of_folder(folder, flags.do_lower_case, known, values)
  return Model(
    folder,
    values,
    known.config,
    source,
    task,
    found or given,
    left_out,
    assumed,
    frozenset(known.heads or ()),
  )


def vocabulary(files: dict[str, str]) -> Vocabulary | None:
  """The content of a `named_vocabulary`."""
  for flag, path in files.items():
    return tokenizer_files.read_file(path, VOCABULARIES[flag])
  return None


def _task_of_folder(
  folder: str,
  given_case: bool | None,
  known: model_config.ReadConfig,
  values: dict,
) -> tuple[dict, list[str]]:
  """The content of task.json, and lines about what is assumed."""
  saved, assumed, labels = dict(description.read(folder).task), [], None
  if (kind := kind_of(values)) == CLASSIFIER:
    labels = known.classifier_labels(len(values["output_bias"]), folder)
    if known.heads is None:
      assumed.append(
        f"{folder}: {model_config.CONFIG_FILE} names no architecture: the "
        "classifier is assumed to be one of whole texts"
      )
  # A tokenizer's limit may differ from the training's length, but where
  # task.json has that length, the two are equal.
  longest = "max_seq_length" in saved and tokenizer_files.longest_text(folder)
  most = known.config.max_position_embeddings
  found = {
    "task": kind,
    "labels": labels,
    "do_lower_case": tokenizer_files.reads_lower_case(folder, given_case),
    "max_seq_length": min(longest, most) if longest else None,
  }
  found = {key: value for key, value in found.items() if value is not None}
  saved.pop("do_lower_case", None)  # it was read with the tokenizer's
  for key, value in found.items():
    if key in saved and saved[key] != value:
      raise DataError(
        f"{folder}: {key} is {saved[key]!r} in {TASK_FILE}, but {value!r} by "
        f"{model_config.CONFIG_FILE}, the weights and the tokenizer: remove "
        f"{TASK_FILE}, or correct it"
      )
  task = {**found, **of_model(saved)}
  said, said_by = task.get("do_lower_case"), f"the tokenizer of {folder}"
  lower, line = case(said, said_by, given_case, folder)
  return (task if line else {**task, "do_lower_case": lower}), assumed + line


def kind_of(values: dict) -> str:
  """The task of a model with these weights."""
  if "output_bias" in values:
    return CLASSIFIER
  return SQUAD if "cls/squad/output_bias" in values else PRETRAINING


def of_model(task: dict) -> dict:
  """What a task.json says about the model, not about a run's files."""
  return {k: v for k, v in task.items() if k not in description.OF_FILES}


def task_differences(task: dict, other: dict) -> list[str]:
  """Keys that differ; what an older task.json does not say does not."""
  newer = ("objective", "segment_ids")
  return [
    key
    for key in sorted(task.keys() | other.keys())
    if task.get(key) != other.get(key)
    and not (key in newer and None in (task.get(key), other.get(key)))
  ]


def task_content(model: Model) -> dict:
  """task.json's content."""
  file = model.vocabulary and model.vocabulary.file
  names = {_FLAG_OF[file]: file} if file else {}
  return dict(sorted({**model.task, "vocabulary": names}.items()))


def write_checkpoint(model: Model, prefix: str) -> list[str]:
  """Writes a TensorFlow checkpoint with config, vocabulary and task.json.

  The folder of the weights' own run gets no task.json: its files say the same.
  Raises `UserError` if a file exists with another content. Returns lines.
  """
  if os.path.isdir(prefix) or prefix.endswith(os.sep):
    prefix = os.path.join(prefix, CHECKPOINT_NAME)
  folder = os.path.dirname(prefix) or "."
  beside = {description.CONFIG_FILE: model.config.to_json_string().encode()}
  if model.vocabulary:
    beside[model.vocabulary.file] = model.vocabulary.content
  if not os.path.exists(os.path.join(folder, description.RUN_FILE)):
    task = json_files.text(task_content(model), indent=2) + "\n"
    beside[TASK_FILE] = task.encode()
  elif not os.path.samefile(folder, os.path.dirname(model.path) or "."):
    raise UserError(
      f"--output={prefix}: {folder} is the folder of another run: give "
      "--output in another folder"
    )
  beside = {os.path.join(folder, n): content for n, content in beside.items()}
  there = {path for path in beside if os.path.exists(path)}
  for path in there:
    if not _is_same(path, beside[path], model):
      raise UserError(
        f"{path} already exists and is another model's: give --output in "
        "another folder"
      )
  checkpoint_files.write_weights(prefix, model.values)
  for path in beside.keys() - there:
    with atomic_write(path) as f:
      f.write(beside[path])
  return [f"{prefix} (for --init_checkpoint)", *sorted(beside)]


def _is_same(path: str, content: bytes, model: Model) -> bool:
  """Whether a file holds this content, or says the same in other words."""
  with open(path, "rb") as f:
    if f.read() == content:
      return True
  if os.path.basename(path) == TASK_FILE:
    said = of_model(description.read(os.path.dirname(path)).task)
    return not task_differences(said, model.task)
  try:
    return BertConfig.from_json_file(path).to_dict() == model.config.to_dict()
  except ValueError:
    return False


def check(model: Model, given: Given = NOTHING_GIVEN) -> None:
  """Raises an error for labels or a vocabulary of another model."""
  labels, bias = model.task.get("labels"), model.values.get("output_bias", ())
  if labels and "output_bias" in model.values and len(bias) != len(labels):
    raise UserError(
      f"{model.path}: {len(labels)} names of labels ({TASK_FILE} beside "
      f"it has them), but the classifier has {len(bias)}"
    )
  if labels == [] and len(bias) > 1:
    del model.task["labels"]  # []: a regression; so the names are not known
  if not model.vocabulary:
    return
  rows, most = tokenizer_files.size(model.vocabulary), model.config.vocab_size
  file = f"{model.vocabulary.file} of {model.path}"
  if rows > most:
    raise DataError(
      f"{given.vocab_file or given.spm_model_file or file}: has {rows} "
      f"tokens, but the model's vocab_size is {most}: it is another model's"
    )


# The cache --------------------------------------------------------------------

_CACHE = ".perseus"  # in the folder, or else in the user's cache
_READ = ("*.json", "*.safetensors", *VOCABULARIES.values())


def _keys(folder: str) -> dict[bool | None, str]:
  """--do_lower_case -> the name of the conversion of these files."""
  root = glob.escape(folder)
  paths = sorted(path for n in _READ for path in glob.glob(f"{root}/{n}"))
  content = "".join(
    f"{os.path.basename(path)} {file_sha256(path)}" for path in paths
  )
  return {
    lower: hashlib.sha256(f"1 {lower}{content}".encode()).hexdigest()[:16]
    for lower in (None, False, True)
  }


def is_conversion(checkpoint: str, folder: str) -> bool:
  """Whether a checkpoint is what `converted` makes of a Hugging Face folder."""
  key = os.path.basename(os.path.dirname(checkpoint))
  # Not every name is worth reading the weights.
  named = re.fullmatch(r"[0-9a-f]{16}", key) and is_folder(folder)
  return bool(named) and key in _keys(folder).values()


def converted(
  folder: str, do_lower_case: bool | None = None
) -> tuple[str, str]:
  """(folder with the model as our checkpoint, how it came there).

  It is made once for files of this content, and by one process at a time.
  `do_lower_case` is the flag's.
  """
  key = _keys(folder)[do_lower_case]
  home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  for place in (os.path.join(folder, _CACHE), os.path.join(home, "perseus")):
    made = os.path.join(place, key)
    with contextlib.ExitStack() as stack:
      if not os.path.isdir(made):
        try:
          os.makedirs(place, exist_ok=True)
          lock = open(os.path.join(place, "lock"), "a")
          stack.enter_context(lock)
          aside = tempfile.TemporaryDirectory(dir=place, prefix=".making")
          new = os.path.join(stack.enter_context(aside), key)
        except OSError as e:
          trouble = e
          continue
        with contextlib.suppress(OSError):  # a file system without locks
          fcntl.flock(lock, fcntl.LOCK_EX)
      if os.path.isdir(made):
        return made, f"of the Hugging Face folder {folder}, converted before"
      model = read_folder(folder, Given(do_lower_case=do_lower_case))
      check(model)
      os.mkdir(new)
      write_checkpoint(model, os.path.join(new, CHECKPOINT_NAME))
      try:
        os.rename(new, made)
      except OSError:
        if not os.path.isdir(made):  # another host was not faster
          raise
      return made, f"of the Hugging Face folder {folder}, converted now"
  raise UserError(
    f"{folder}: is a Hugging Face folder, and its conversion cannot be kept: "
    f"{trouble}. Set XDG_CACHE_HOME to a folder that can be written, or use "
    "convert_checkpoint.py"
  )
