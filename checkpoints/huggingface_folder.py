"""A Hugging Face folder, read where it is, as what our own files would say."""

import functools
import json
import os
import re
import tempfile

from common import json_files
from common.errors import DataError
from common.model_files import (
  CONFIG_FILE,
  TASK_FILE,
  TOKENIZER_CONFIG_FILE,
  TOKENIZER_FILE,
  VOCABULARIES,
)
from model import huggingface_config, huggingface_weights, tasks, weights
from model.bert_config import BertConfig

_OPTIONAL_BOOL = (bool, None)
_TOKENIZER_CONFIG = {
  "do_lower_case?": _OPTIONAL_BOOL,
  "tokenizer_class?": (str, None),
}
_TOKENIZER = {
  "normalizer?": (dict, None),
  "model?": {"type?": str, "vocab?": (dict, list)},
  "added_tokens?": ([{"id": int, "content": str}], None),
}
_MOST_TOKENS = 1 << 24
_REMEDY = "copy the model's files again"


def is_folder(path: str) -> bool:
  """Whether it is a folder as transformers writes them, and none of ours."""
  if not (path and os.path.isdir(path)):
    return False
  names = os.listdir(path)
  has_weights = any(
    name.startswith((huggingface_weights.WEIGHTS_FILE, "pytorch_model"))
    for name in names
  )
  is_theirs = huggingface_config.CONFIG_FILE in names
  return has_weights and is_theirs and CONFIG_FILE not in names


def read_bert(folder: str) -> BertConfig:
  """Raises an error for a model of another kind than google/bert's."""
  return huggingface_config.read_config(folder).config


def read_task(folder: str, saved: dict) -> tuple[dict, list[str]]:
  """What task.json says of such a model, and lines about what is assumed.

  `saved` is task.json's content if the folder has one. Raises `DataError` if it
  contradicts the weights or config.json.
  """
  known, notes = huggingface_config.read_config(folder), []
  theirs, shapes = huggingface_weights.read_shapes(folder), {}
  for weight in weights.weights(known.config):
    if weight.huggingface in theirs:
      shapes[weight.name] = theirs[weight.huggingface]
  in_files: dict = {"task": tasks.kind_of(shapes)}
  if outputs := shapes.get(tasks.LABELS.bias):
    labels = known.classifier_labels(outputs[0], folder)
    if labels is not None:
      in_files["labels"] = labels
    if known.architectures is None:
      notes.append(
        f"{folder}: {huggingface_config.CONFIG_FILE} names no architecture: "
        "the classifier is assumed to be one of whole texts"
      )
  for key, value in in_files.items():
    if saved.get(key, value) != value:
      raise DataError(
        f"{folder}: {key} is {saved[key]!r} in {TASK_FILE}, but {value!r} by "
        f"{huggingface_config.CONFIG_FILE} and the weights: remove "
        f"{TASK_FILE}, or correct it"
      )
  lower, lines = read_case(folder, saved)
  if lower is not None:
    in_files["do_lower_case"] = lower
  return {**saved, **in_files}, notes + lines


def read_case(folder: str, saved: dict) -> tuple[bool | None, list[str]]:
  """Whether the text is lower-cased: the first file that says it decides."""
  config = _read(folder, TOKENIZER_CONFIG_FILE, _TOKENIZER_CONFIG)
  normalizer = _read(folder, TOKENIZER_FILE, _TOKENIZER).get("normalizer") or {}
  match = re.search(r'"lowercase": (true|false)', json.dumps(normalizer))
  statements = {
    TASK_FILE: saved.get("do_lower_case"),
    TOKENIZER_CONFIG_FILE: config.get("do_lower_case"),
    TOKENIZER_FILE: match and match[1] == "true",
  }
  said = {f: lower for f, lower in statements.items() if lower is not None}
  if not said:
    return None, []
  first, lower = next(iter(said.items()))
  rules = {
    "tokenize_chinese_chars": True,
    "handle_chinese_chars": True,
    "strip_accents": lower,
  }
  read = {TOKENIZER_CONFIG_FILE: config}
  # transformers' BertTokenizer sets its own normalizer by the config.
  if not str(config.get("tokenizer_class")).startswith("Bert"):
    read[TOKENIZER_FILE] = (
      normalizer if said.get(TOKENIZER_FILE) == lower else {}
    )
  for file, content in read.items():
    for key, value in rules.items():
      if content.get(key) not in (None, value):
        raise DataError(
          f"{os.path.join(folder, file)}: {key} is {content[key]}, but "
          f"google/bert's tokenizer with do_lower_case={lower} has {value}: "
          "the text would become other tokens"
        )
  others = [file for file, other in said.items() if other != lower]
  return lower, [
    f"{folder}: do_lower_case={lower} as {first} says, against {other}"
    for other in others
  ]


def vocabulary_file(folder: str) -> str | None:
  """A vocab.txt with the tokens of a WordPiece tokenizer.json, if it is one.

  For this process only: it is removed at its end.
  """
  content = _read(folder, TOKENIZER_FILE, _TOKENIZER)
  model = content.get("model", {})
  ids = model.get("vocab", [])
  if model.get("type", "WordPiece") != "WordPiece" or isinstance(ids, list):
    return None
  for token in content.get("added_tokens") or ():
    ids[token["content"]] = token["id"]
  for number in ids.values():
    if type(number) is not int or not 0 <= number < _MOST_TOKENS:
      path = os.path.join(folder, TOKENIZER_FILE)
      raise DataError(f"{path}: {number!r} is no id of a token")
  lines = ["\n"] * (max(ids.values(), default=-1) + 1)  # blank without a token
  for token, number in ids.items():
    lines[number] = f"{token}\n"
  name = VOCABULARIES["vocab_file"]
  return os.path.join(_folder_with(name, "".join(lines)).name, name)


@functools.cache
def _folder_with(name: str, text: str) -> tempfile.TemporaryDirectory:
  """A folder that lasts as long as the process, with a file."""
  folder = tempfile.TemporaryDirectory(prefix="perseus-")
  with open(os.path.join(folder.name, name), "w", encoding="utf-8") as f:
    f.write(text)
  return folder


def _read(folder: str, name: str, form: dict) -> dict:
  """{} without the file."""
  path = os.path.join(folder, name)
  if not os.path.exists(path):
    return {}
  return json_files.read_own(path, _REMEDY, form)
