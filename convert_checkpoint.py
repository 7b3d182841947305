"""Converts BERT checkpoints to and from Hugging Face, and to SavedModels.

  python convert_checkpoint.py --input=run/model.ckpt-7500 \\
    --vocab_file=vocab.txt --output=for_transformers
  python convert_checkpoint.py --input=bert-base-uncased --output=here
  python convert_checkpoint.py --to=tensorflow \\
    --input=run/model.ckpt-7000,run/model.ckpt-7500 --output=mean/model.ckpt
  python convert_checkpoint.py --to=saved_model --input=runs/first \\
    --output=served/first/1

The third command averages weights. The last one exports the best checkpoint of
a run by evaluation, or the checkpoint that --input names, for TensorFlow
Serving; its signatures are those of `inference`. PyTorch is not needed.

Optimizer slots, counters and other training state are left out. All that
predict.py needs beside weights and config (case, vocabulary, labels, lengths)
is written too: in Hugging Face's files where they have a place for it, and in
task.json.
"""

import dataclasses
import os
import tempfile
from typing import NamedTuple

import numpy as np

import mixed_precision
import tokenization
from common import json_files
from common.errors import DataError, UserError
from common.files import whole
from common.settings import run_with, setting
from finetuning import settled
from finetuning.settled import (
  CLASSIFIER,
  PRETRAINING,
  SQUAD,
  TASK_FILE,
  VOCABULARIES,
  saved_task,
)
from interop import (
  bert_tensors,
  inference,
  model_card,
  model_config,
  model_source,
  tokenizer_files,
)
from interop.tokenizer_files import VOCAB_FILE, Vocabulary
from model.bert_config import BertConfig
from training import checkpoint_files, checkpoint_weights, run_folder

HUGGINGFACE, TENSORFLOW = "huggingface", "tensorflow"
SAVED_MODEL = "saved_model"
# Keys of task.json about a run's files, not about the model.
_OF_FILES = ("vocabulary", "best_by", "exported_from")
_FLAGS = {file: flag for flag, file in VOCABULARIES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(model_source.Given):
  """What to convert; the names are the flags'."""

  # fmt: off
  input: tuple[str, ...] = setting((),
    "Hugging Face folder, or prefixes of TensorFlow checkpoints, for example "
    "OUTPUT_DIR/model.ckpt-1000; the mean of several is taken. With "
    "--to=saved_model one checkpoint, or a run folder.")
  output: str = setting(help=
    "New folder (TensorFlow Serving wants NAME/1, NAME/2, ...); with "
    "--to=tensorflow the prefix of a checkpoint, or a folder for "
    f"{model_source.CHECKPOINT_NAME}.")
  to: str | None = setting(None,
    "Format to write. Default: tensorflow for a Hugging Face folder, else "
    "huggingface.", choices=(HUGGINGFACE, TENSORFLOW, SAVED_MODEL))
  signatures: tuple[str, ...] = setting((),
    "Signatures to write with --to=saved_model: encoder, masked_lm, "
    "next_sentence, classifier, span. Default: all that the checkpoint has.")
  precision: str = setting("fp32",
    "Type of the matrix multiplications with --to=saved_model. Weights, inputs "
    "and outputs stay as they are.", choices=mixed_precision.TYPES)
  license: str = setting("unknown",
    "Licence of the weights, which a Hugging Face folder's README.md names, as "
    "apache-2.0 or cc-by-sa-4.0.")
  language: tuple[str, ...] = setting((),
    "Languages of the training text, which that README.md names, as en,de.")
  # fmt: on

  def __post_init__(self):
    object.__setattr__(self, "input", tuple(filter(None, self.input)))


class Model(NamedTuple):
  """A model that was read; `left_out` and `assumed` are lines for people."""

  values: dict[str, np.ndarray]  # float32, by our names
  config: BertConfig
  source: str  # the config's file
  task: dict  # as in task.json, without names of files; nothing is assumed
  vocabulary: Vocabulary | None
  left_out: list[str]
  assumed: list[str]
  named: frozenset[str] = frozenset()  # the heads that the config names


# Reading ----------------------------------------------------------------------


def read_folder(settings: Settings) -> Model:
  """The model of a Hugging Face folder."""
  (folder,) = settings.input
  source = os.path.join(folder, model_config.CONFIG_FILE)
  if settings.bert_config_file:
    raise UserError(
      f"--bert_config_file is for checkpoints; {source} is the config"
    )
  known = model_config.read_config(folder)
  values, tied = bert_tensors.from_theirs(
    bert_tensors.read_tensors(folder), known.config, folder
  )
  left_out = [f"{name} (follows from the rest)" for name in tied]
  left_out += [f"{key} of {source} (not known here)" for key in known.left_out]
  given = _vocabulary(settled.named_vocabulary(settings))
  found = tokenizer_files.read_vocabulary(folder)
  if given and found and not tokenizer_files.is_same(given, found):
    raise UserError(
      f"--{_FLAGS[given.file]}: another vocabulary than that of {folder}, "
      "which is the model's: leave the flag out"
    )
  task, assumed = _task_of_folder(settings, known, values)
  return Model(
    values,
    known.config,
    source,
    task,
    found or given,
    left_out,
    assumed,
    frozenset(known.heads or ()),
  )


def _vocabulary(files: dict[str, str]) -> Vocabulary | None:
  for flag, path in files.items():
    return tokenizer_files.read_file(path, VOCABULARIES[flag])
  return None


def _task_of_folder(
  settings: Settings, known: model_config.ReadConfig, values: dict
) -> tuple[dict, list[str]]:
  """The content of task.json, and lines about what is assumed."""
  (folder,) = settings.input
  saved, assumed, labels = saved_task(folder), [], None
  if (kind := _kind(values)) == CLASSIFIER:
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
    "do_lower_case": tokenizer_files.reads_lower_case(
      folder, settings.do_lower_case
    ),
    "max_seq_length": min(longest, most) if longest else None,
  }
  found = {key: value for key, value in found.items() if value is not None}
  for key, value in found.items():
    if key in saved and saved[key] != value:
      raise DataError(
        f"{folder}: {key} is {saved[key]!r} in {TASK_FILE}, but {value!r} by "
        f"{model_config.CONFIG_FILE}, the weights and the tokenizer: remove "
        f"{TASK_FILE}, or correct it"
      )
  task = {**found, **_of_model(saved)}
  lower, line = model_source.case(
    task.get("do_lower_case"),
    f"the tokenizer of {folder}",
    settings.do_lower_case,
    folder,
  )
  return (task if line else {**task, "do_lower_case": lower}), assumed + line


def _kind(values: dict) -> str:
  if "output_bias" in values:
    return CLASSIFIER
  return SQUAD if "cls/squad/output_bias" in values else PRETRAINING


def _of_model(task: dict) -> dict:
  return {k: v for k, v in task.items() if k not in _OF_FILES}


def read_checkpoints(settings: Settings) -> Model:
  """The model with the mean of the checkpoints' weights."""
  weights = checkpoint_weights.read(settings.input)
  first, *others = (
    _read_source(path, settings, weights) for path in settings.input
  )
  for path, other in zip(settings.input[1:], others, strict=True):
    differ = model_source.differences(first.config, other.config)
    keys = sorted(first.task.keys() | other.task.keys())
    differ += [k for k in keys if first.task.get(k) != other.task.get(k)]
    both = first.vocabulary, other.vocabulary
    if None not in both and both[0] != both[1]:
      differ.append("the vocabulary")
    if differ:
      raise UserError(
        f"{settings.input[0]} and {path} differ in {', '.join(differ)}: only "
        "checkpoints of one model have a mean"
      )
  return first


def _read_source(path: str, settings: Settings, weights) -> Model:
  """A checkpoint's model, but with `weights`."""
  source = model_source.find(path, settings)
  task = _of_model(source.task)
  if source.assumed_case:
    del task["do_lower_case"]
  if task["task"] == PRETRAINING:  # also where nothing names a task
    task["task"] = _kind(weights.values)
  return Model(
    weights.values,
    source.bert,
    settings.bert_config_file
    or os.path.join(os.path.dirname(path), model_source.CONFIG_FILE),
    task,
    _vocabulary(source.vocabulary),
    weights.left_out,
    source.assumed_case,
  )


# Writing ----------------------------------------------------------------------


def write_folder(model: Model, settings: Settings) -> list[str]:
  """Writes a Hugging Face folder, whole or not at all; returns its files."""
  folder = os.path.normpath(settings.output)
  if os.path.exists(folder) and (
    not os.path.isdir(folder) or os.listdir(folder)
  ):
    raise UserError(f"--output={folder} already exists and is not empty")
  about = model.values, model.config, settings.input[0]
  tensors = bert_tensors.to_theirs(*about)
  outputs = len(model.values.get("output_bias", ()))
  config = model_config.to_their_config(
    model.config,
    bert_tensors.count_parts(*about),
    model.source,
    (model.task.get("labels") or outputs) if outputs else None,
    _pad_id(model),
  )
  parent = os.path.dirname(folder) or "."
  os.makedirs(parent, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=parent, prefix=".converting") as aside:
    made = os.path.join(aside, "made")
    os.mkdir(made)
    bert_tensors.write_tensors(made, tensors)
    json_files.write(os.path.join(made, model_config.CONFIG_FILE), config)
    json_files.write(os.path.join(made, TASK_FILE), _task_content(model))
    model_card.write(
      os.path.join(made, model_card.CARD_FILE),
      folder,
      settings.input,
      config,
      model.task,
      sum(value.size for value in model.values.values()),
      settings.license,
      settings.language,
    )
    if model.vocabulary is not None:
      tokenizer_files.write_tokenizer(
        made,
        model.vocabulary,
        model.task.get("do_lower_case", True),
        model.task.get("max_seq_length", model.config.max_position_embeddings),
      )
    os.replace(made, folder)
  return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]


def _task_content(model: Model) -> dict:
  file = model.vocabulary and model.vocabulary.file
  names = {_FLAGS[file]: file} if file else {}
  return dict(sorted({**model.task, "vocabulary": names}.items()))


def _pad_id(model: Model) -> int:
  """[PAD]'s; 0, as in all our SentencePiece models, if it is not found."""
  pad = tokenization.PAD.encode()
  names = [pad]
  if model.vocabulary and model.vocabulary.file == VOCAB_FILE:
    names = model.vocabulary.lines()
  return names.index(pad) if pad in names else 0


def write_checkpoint(model: Model, settings: Settings) -> list[str]:
  """Writes a TensorFlow checkpoint with config, vocabulary and task.json.

  The folder of the weights' own run gets no task.json: its files say the same.
  Raises `UserError` if a file exists with another content. Returns lines.
  """
  prefix = settings.output
  if os.path.isdir(prefix) or prefix.endswith(os.sep):
    prefix = os.path.join(prefix, model_source.CHECKPOINT_NAME)
  folder = os.path.dirname(prefix) or "."
  beside = {model_source.CONFIG_FILE: model.config.to_json_string().encode()}
  if model.vocabulary:
    beside[model.vocabulary.file] = model.vocabulary.content
  if not os.path.exists(os.path.join(folder, run_folder.RUN_FILE)):
    task = json_files.text(_task_content(model), indent=2) + "\n"
    beside[TASK_FILE] = task.encode()
  elif not os.path.samefile(folder, os.path.dirname(settings.input[0]) or "."):
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
    with whole(path) as f:
      f.write(beside[path])
  return [f"{prefix} (for --init_checkpoint)", *sorted(beside)]


def _is_same(path: str, content: bytes, model: Model) -> bool:
  """Whether a file holds this content, or says the same in other words."""
  with open(path, "rb") as f:
    if f.read() == content:
      return True
  if os.path.basename(path) == TASK_FILE:
    return _of_model(saved_task(os.path.dirname(path))) == model.task
  try:
    return BertConfig.from_json_file(path).to_dict() == model.config.to_dict()
  except ValueError:
    return False


def export(settings: Settings) -> list[str]:
  """Writes a checkpoint as a SavedModel; returns lines for people."""
  if len(settings.input) > 1:
    raise UserError(
      f"--to={SAVED_MODEL} exports one checkpoint: write the mean with "
      f"--to={TENSORFLOW} first"
    )
  source = model_source.find(settings.input[0], settings)
  if source.is_export:
    raise UserError(f"{source.path}: exported already; name a checkpoint")
  model = inference.open_checkpoint(
    source, settings.signatures, settings.precision
  )
  difference = inference.export(model, source, settings.output)
  lines = source.lines()
  for name in model.names():
    signature = model.signatures[name]
    lines.append(f"  {name}: {', '.join(sorted(signature.inputs))}")
    lines.append(f"    -> {', '.join(sorted(signature.outputs))}")
  model.close()
  return [
    *lines,
    f"serving_default is {model.names()[-1]}",
    f"{settings.output} is written: opened again, its answers differ by "
    f"at most {difference:.1g}",
  ]


# The command ------------------------------------------------------------------


def convert(settings: Settings) -> list[str]:
  """Converts; returns lines for people: what was converted, and the files."""
  if not settings.input:
    raise UserError("--input names nothing")
  config_file = os.path.join(settings.input[0], model_config.CONFIG_FILE)
  theirs = len(settings.input) == 1 and os.path.exists(config_file)
  to = settings.to or (TENSORFLOW if theirs else HUGGINGFACE)
  if theirs and to != TENSORFLOW:
    first = "nothing to" if to == HUGGINGFACE else "first --to=tensorflow, then"
    raise UserError(
      f"--input={settings.input[0]} is a Hugging Face folder: {first} convert "
      f"to --to={to}"
    )
  if to != HUGGINGFACE and (settings.license != "unknown" or settings.language):
    raise UserError(f"--license and --language are for --to={HUGGINGFACE}")
  if to == SAVED_MODEL:
    return export(settings)
  if settings.signatures or settings.precision != "fp32":
    raise UserError(f"--signatures and --precision are for --to={SAVED_MODEL}")
  model = read_folder(settings) if theirs else read_checkpoints(settings)
  model.assumed.extend(model_source.assumed_answers(model.task, TASK_FILE))
  check(model, settings)
  write = write_folder if to == HUGGINGFACE else write_checkpoint
  return report(model, settings, write(model, settings))


def check(model: Model, settings: Settings) -> None:
  """Raises an error for labels or a vocabulary of another model."""
  labels, bias = model.task.get("labels"), model.values.get("output_bias", ())
  if labels and "output_bias" in model.values and len(bias) != len(labels):
    raise UserError(
      f"{settings.input[0]}: {len(labels)} names of labels ({TASK_FILE} beside "
      f"it has them), but the classifier has {len(bias)}"
    )
  if labels == [] and len(bias) > 1:
    del model.task["labels"]  # []: a regression; so the names are not known
  if not model.vocabulary:
    return
  rows, most = tokenizer_files.size(model.vocabulary), model.config.vocab_size
  file = f"{model.vocabulary.file} of {settings.input[0]}"
  if rows > most:
    raise DataError(
      f"{settings.vocab_file or settings.spm_model_file or file}: has {rows} "
      f"tokens, but the model's vocab_size is {most}: it is another model's"
    )


def report(model: Model, settings: Settings, files: list[str]) -> list[str]:
  """What was converted, for people."""
  source = settings.input[0]
  counts = bert_tensors.count_parts(model.values, model.config, source)
  known = {w.ours for w in bert_tensors.weights(model.config)}
  converted = [f"{part}: {n} weights" for part, n in counts.items()]
  others = sorted(set(model.values) - known)
  converted += [f"{name} (not BERT's, kept)" for name in others]
  missing = [part for part in bert_tensors.PARTS[:4] if part not in counts]
  missing += [
    f"{part} (which {model_config.CONFIG_FILE} names)"
    for part in sorted(model.named - set(counts) - set(missing))
  ]
  if not model.vocabulary:
    missing.append(
      f"{VOCAB_FILE} (give --vocab_file or --spm_model_file for a tokenizer)"
    )
  count = len(settings.input)
  lines = [f"the mean of {count} checkpoints" if count > 1 else "converted"]
  lines += _indented(converted)
  for title, found in (
    ("left out", model.left_out),
    ("missing in the input", missing),
    ("assumed", model.assumed),
  ):
    if found or title != "assumed":
      lines += [f"{title}: {len(found)}", *_indented(found)]
  lower = model.task.get("do_lower_case", True)
  lines.append(f"the model's text: --do_lower_case={lower}")
  if labels := model.task.get("labels"):
    lines.append(f"labels by number: {', '.join(labels)}")
  return [*lines, "written:", *_indented(files)]


def _indented(lines: list[str]) -> list[str]:
  return [f"    {line}" for line in lines]


def main(settings: Settings, *inputs: str) -> None:
  """Converts what is named as words, or else by --input."""
  given = dataclasses.replace(settings, input=inputs or settings.input)
  print("\n".join(convert(given)))


if __name__ == "__main__":
  run_with(Settings, main)
