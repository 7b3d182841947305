"""Converts BERT checkpoints to Hugging Face folders and back, without PyTorch.

  python convert_checkpoint.py --input=run/model.ckpt-7500 \\
    --vocab_file=vocab.txt --output=for_transformers
  python convert_checkpoint.py --input=bert-base-uncased --output=here
  python convert_checkpoint.py --to=tensorflow \\
    --input=run/model.ckpt-7000,run/model.ckpt-7500 --output=mean/model.ckpt

The last one averages weights. Optimizer slots, counters and what else belongs
to a training are left out. What predict.py needs beside weights and config
(case, vocabulary, labels, lengths) goes along, both ways: in Hugging Face's
files as far as they have a place for it, and in task.json.
"""

import dataclasses
import json
import os
import tempfile
from typing import NamedTuple

import numpy as np

import tokenization
from common import json_files
from common.errors import DataError, UserError
from common.settings import run_with, setting
from finetuning.finetune import TASK_FILE, saved_task
from interop import bert_tensors, model_config, model_source, tokenizer_files
from interop.model_source import CLASSIFIER, PRETRAINING, SQUAD
from interop.tokenizer_files import MODEL_FILE, VOCAB_FILE, Vocabulary
from model.bert_config import BertConfig
from training import checkpoint_files, checkpoint_weights, training_hooks

HUGGINGFACE, TENSORFLOW = "huggingface", "tensorflow"
CHECKPOINT_NAME = "bert_model.ckpt"  # google/bert's
BERT_CONFIG_FILE = model_source.CONFIG_FILE
# What task.json says of a run's files, and not of the model.
_OF_FILES = ("vocabulary", "best_by", "exported_from")
_FLAGS = {VOCAB_FILE: "vocab_file", MODEL_FILE: "spm_model_file"}


@dataclasses.dataclass(frozen=True)
class Settings:
  """What to convert; the names are the flags'."""

  # fmt: off
  input: tuple[str, ...] = setting(help=
    "Hugging Face folder, or prefixes of TensorFlow checkpoints, for example "
    "OUTPUT_DIR/model.ckpt-1000; the mean of several is taken.")
  output: str = setting(help=
    "With --to=huggingface a new folder; with --to=tensorflow the prefix of a "
    f"checkpoint, or a folder for {CHECKPOINT_NAME}.")
  to: str | None = setting(None,
    "Format to write. Default: the other one than that of --input.",
    choices=(HUGGINGFACE, TENSORFLOW))
  bert_config_file: str | None = setting(None,
    f"JSON file with the BERT config of checkpoints. Default: "
    f"{BERT_CONFIG_FILE} beside them.")
  vocab_file: str | None = setting(None,
    "WordPiece vocabulary. Default: the one that the run's task.json or "
    "records name, or vocab.txt beside the input.")
  spm_model_file: str | None = setting(None,
    "SentencePiece model, instead of --vocab_file. Default: spiece.model "
    "beside the input.")
  do_lower_case: bool | None = setting(None,
    "Whether the model is of lower-cased text. Default: what the input's "
    "tokenizer, task.json or records say; if nothing does, true is assumed.")
  # fmt: on
  # Names of a classifier's labels, by number, if the input has none.
  labels: tuple[str, ...] | None = None

  def __post_init__(self):
    object.__setattr__(self, "input", tuple(filter(None, self.input)))
    if not self.input:
      raise UserError("--input names nothing")


class Model(NamedTuple):
  """A model that was read."""

  values: dict[str, np.ndarray]  # float32, by our names
  config: BertConfig
  source: str  # where the config is from
  task: dict  # as task.json has it, but for names of files; nothing assumed
  vocabulary: Vocabulary | None
  left_out: list[str]  # lines for people
  assumed: list[str]  # as well
  lacking: tuple[str, ...] = ()  # heads that the config names


# -----------------------------------------------------------------------------
# Reading
# -----------------------------------------------------------------------------


def read_folder(settings: Settings) -> Model:
  """The model of a Hugging Face folder.

  Raises:
    UserError: it cannot be converted; the message says why.
  """
  (folder,) = settings.input
  source = os.path.join(folder, model_config.CONFIG_FILE)
  known = model_config.read_config(folder)
  config = known.config
  read = bert_tensors.from_theirs(
    bert_tensors.read_tensors(folder), config, folder
  )
  left_out = [f"{name} (follows from the rest)" for name in read.left_out]
  left_out += [f"{key} of {source} (not known here)" for key in known.left_out]
  task, assumed = _task_of_folder(settings, known, read.values)
  parts = bert_tensors.count_parts(read.values, config, folder)
  return Model(
    read.values,
    config,
    source,
    task,
    _given_vocabulary(settings, tokenizer_files.read_vocabulary(folder)),
    left_out,
    assumed,
    tuple(sorted((known.heads or set()) - set(parts))),
  )


def _task_of_folder(
  settings: Settings, known: model_config.ReadConfig, values: dict
) -> tuple[dict, list[str]]:
  """What a Hugging Face folder says of a model's task, and what is assumed."""
  (folder,) = settings.input
  saved, given = saved_task(folder), settings.do_lower_case
  model_source.check_task(saved, os.path.join(folder, TASK_FILE))
  found, assumed = {"task": _kind(values)}, []
  if found["task"] == CLASSIFIER:
    outputs = len(values["output_bias"])
    labels = known.classifier_labels(outputs, folder)
    if outputs == 1:
      found["labels"] = []
    elif labels != model_config.stand_ins(outputs):
      found["labels"] = labels
    if known.heads is None:
      assumed.append(
        f"{folder}: {model_config.CONFIG_FILE} names no architecture: the "
        "classifier is taken for one of whole texts"
      )
  lower = tokenizer_files.reads_lower_case(folder, given)
  if lower is not None:
    found["do_lower_case"] = lower
  # The most that a tokenizer makes is no length that was trained with, but
  # where task.json says one it is the same.
  longest = tokenizer_files.longest_text(folder)
  if longest is not None and "max_seq_length" in saved:
    most = known.config.max_position_embeddings
    found["max_seq_length"] = min(longest, most)
  task = _agreed(found, saved, folder)
  lower = task.get("do_lower_case")
  if lower is not None and given not in (None, lower):
    raise UserError(
      f"--do_lower_case={given}, but the tokenizer of {folder} has "
      f"do_lower_case={lower}: leave the flag out"
    )
  if lower is None and given is None:
    assumed.append(model_source.assumed_case(folder))
  elif lower is None:
    task["do_lower_case"] = given
  return task, assumed


def _given_vocabulary(
  settings: Settings, found: Vocabulary | None
) -> Vocabulary | None:
  """That of the flags, which must be the one of the input, if it has one."""
  given = None
  for name, flag in _FLAGS.items():
    if path := getattr(settings, flag):
      given = tokenizer_files.read_file(path, name)
  if given and found and not tokenizer_files.is_same(given, found):
    raise UserError(
      f"--{_FLAGS[given.file]}: another vocabulary than that of "
      f"{settings.input[0]}, which is the model's: leave the flag out"
    )
  return found or given


def _kind(values: dict) -> str:
  """What a model is for by its head, as task.json has it."""
  if "output_bias" in values:
    return CLASSIFIER
  return SQUAD if "cls/squad/output_bias" in values else PRETRAINING


def _agreed(found: dict, saved: dict, folder: str) -> dict:
  """What Hugging Face's files say, and what only task.json does.

  Raises:
    DataError: they contradict each other.
  """
  for key, value in found.items():
    if key in saved and saved[key] != value:
      raise DataError(
        f"{folder}: {key} is {saved[key]!r} in {TASK_FILE}, but {value!r} by "
        f"{model_config.CONFIG_FILE}, the weights and the tokenizer: remove "
        f"{TASK_FILE}, or set it right"
      )
  return {**found, **_of_model(saved)}


def _of_model(task: dict) -> dict:
  return {k: v for k, v in task.items() if k not in _OF_FILES}


def read_checkpoints(settings: Settings) -> Model:
  """The mean of some checkpoints' weights.

  Raises:
    UserError: they cannot be read, or are not of one model.
  """
  weights = checkpoint_weights.read(settings.input)
  given = model_source.Given(
    settings.bert_config_file,
    settings.vocab_file,
    settings.spm_model_file,
    settings.do_lower_case,
  )
  first, *others = (
    _read_source(path, given, weights) for path in settings.input
  )
  for path, other in zip(settings.input[1:], others, strict=True):
    _check_one_model(first, other, settings.input[0], path)
  return first


def _read_source(path: str, given: model_source.Given, weights) -> Model:
  """All about a checkpoint but its weights, for which `weights` stand."""
  source = model_source.find(path, given)
  task = _of_model(source.task)
  case = model_source.assumed_case(source.path)
  assumed = [case] if case in source.assumed else []
  if assumed:
    del task["do_lower_case"]
  if task["task"] == PRETRAINING:  # what is taken if nothing says it
    task["task"] = _kind(weights.values)
  vocabulary = None
  for name, flag in _FLAGS.items():
    if file := getattr(source, flag):
      vocabulary = tokenizer_files.read_file(file, name)
  config_file = given.bert_config_file or os.path.join(
    os.path.dirname(path), BERT_CONFIG_FILE
  )
  return Model(
    weights.values,
    source.bert,
    config_file,
    task,
    vocabulary,
    weights.left_out,
    assumed,
  )


def _check_one_model(first: Model, other: Model, path, other_path) -> None:
  """Raises `UserError` for checkpoints that have no mean."""
  differ = model_source.differences(first.config, other.config)
  differ += sorted(
    key
    for key in first.task.keys() | other.task.keys()
    if first.task.get(key) != other.task.get(key)
  )
  both = first.vocabulary, other.vocabulary
  if None not in both and both[0] != both[1]:
    differ.append("the vocabulary")
  if differ:
    raise UserError(
      f"{path} and {other_path} differ in {', '.join(differ)}: only "
      "checkpoints of one model have a mean"
    )


# -----------------------------------------------------------------------------
# Writing
# -----------------------------------------------------------------------------


def write_folder(model: Model, settings: Settings) -> list[str]:
  """Writes a Hugging Face folder, whole or not at all.

  Returns:
    Its files, as lines for people.

  Raises:
    UserError: Hugging Face has no such model, or the folder is not empty.
  """
  folder = os.path.normpath(settings.output)
  if os.path.exists(folder) and (
    not os.path.isdir(folder) or os.listdir(folder)
  ):
    raise UserError(f"--output={folder} is there already, and not empty")
  tensors = bert_tensors.to_theirs(
    model.values, model.config, settings.input[0]
  )
  parts = bert_tensors.count_parts(
    model.values, model.config, settings.input[0]
  )
  bias = model.values.get("output_bias")
  config = model_config.to_their_config(
    model.config,
    parts,
    model.source,
    labels=None if bias is None else model.task.get("labels") or len(bias),
    pad_id=_pad_id(model),
  )
  parent = os.path.dirname(folder) or "."
  os.makedirs(parent, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=parent, prefix=".converting") as aside:
    made = os.path.join(aside, "made")
    os.mkdir(made)
    bert_tensors.write_tensors(made, tensors)
    model_config.write_config(made, config)
    json_files.write(os.path.join(made, TASK_FILE), _task_content(model))
    if model.vocabulary is not None:
      tokenizer_files.write_tokenizer(
        made,
        model.vocabulary,
        _lower_case(model),
        model.task.get("max_seq_length", model.config.max_position_embeddings),
      )
    os.replace(made, folder)
  return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]


def _lower_case(model: Model) -> bool:
  return model.task.get("do_lower_case", True)


def _task_content(model: Model) -> dict:
  """What task.json is to say."""
  file = model.vocabulary and model.vocabulary.file
  names = {_FLAGS[file]: file} if file else {}
  return dict(sorted({**model.task, "vocabulary": names}.items()))


def _pad_id(model: Model) -> int:
  """0, as of every SentencePiece model of ours, if no vocabulary says more."""
  if not model.vocabulary or model.vocabulary.file != VOCAB_FILE:
    return 0
  names = [line.strip() for line in model.vocabulary.content.split(b"\n")]
  pad = tokenization.PAD.encode()
  return names.index(pad) if pad in names else 0


def write_checkpoint(model: Model, settings: Settings) -> list[str]:
  """Writes a TensorFlow checkpoint, and beside it what belongs to its model.

  That is the config, the vocabulary and task.json, but this one not in the
  folder of the run that the weights are of, whose files say the same.

  Returns:
    The files, as lines for people.

  Raises:
    UserError: something else stands where one of them would.
  """
  prefix = settings.output
  if os.path.isdir(prefix) or prefix.endswith(os.sep):
    prefix = os.path.join(prefix, CHECKPOINT_NAME)
  folder = os.path.dirname(prefix) or "."
  beside = {BERT_CONFIG_FILE: model.config.to_json_string().encode()}
  if model.vocabulary:
    beside[model.vocabulary.file] = model.vocabulary.content
  task = json.dumps(_task_content(model), indent=2) + "\n"
  if not os.path.exists(os.path.join(folder, training_hooks.RUN_FILE)):
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
        f"{path} is there already and is another model's: give --output in "
        "another folder"
      )
  checkpoint_files.write_weights(prefix, model.values)
  for path in beside.keys() - there:
    with open(path + ".tmp", "wb") as f:
      f.write(beside[path])
    os.replace(path + ".tmp", path)
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


# -----------------------------------------------------------------------------
# Both
# -----------------------------------------------------------------------------


def convert(settings: Settings) -> list[str]:
  """Converts.

  Returns:
    What was converted, left out and missing, and where everything is, as lines
    for people.

  Raises:
    UserError: it cannot be done; the message says why.
  """
  config_file = os.path.join(settings.input[0], model_config.CONFIG_FILE)
  theirs = len(settings.input) == 1 and os.path.exists(config_file)
  to = settings.to or (TENSORFLOW if theirs else HUGGINGFACE)
  if theirs and to == HUGGINGFACE:
    raise UserError(
      f"--input={settings.input[0]} is a Hugging Face folder: nothing to "
      f"convert to --to={HUGGINGFACE}"
    )
  if theirs and settings.bert_config_file:
    raise UserError(
      f"--bert_config_file is for checkpoints; {config_file} is the config"
    )
  if settings.vocab_file and settings.spm_model_file:
    raise UserError("give either --vocab_file or --spm_model_file")
  model = read_folder(settings) if theirs else read_checkpoints(settings)
  model = with_answers(with_labels(model, settings))
  check_vocabulary(model, settings)
  write = write_folder if to == HUGGINGFACE else write_checkpoint
  return report(model, settings, write(model, settings))


def with_labels(model: Model, settings: Settings) -> Model:
  """`model` with the labels that the settings give.

  No labels are said of one number alone: of a classifier they are not known.

  Raises:
    UserError: the input has others, or the classifier another number.
  """
  labels, bias = model.task.get("labels"), model.values.get("output_bias")
  if settings.labels:
    if labels and labels != list(settings.labels):
      raise UserError(
        f"labels {settings.labels}, but those of {settings.input[0]} are "
        f"{labels}"
      )
    labels = list(settings.labels)
    model = model._replace(task={**model.task, "labels": labels})
  if bias is not None and len(bias) > 1 and labels == []:
    task = {k: v for k, v in model.task.items() if k != "labels"}
    model = model._replace(task=task)
  if bias is not None and labels and len(labels) != len(bias):
    raise UserError(
      f"{settings.input[0]}: {len(labels)} names of labels ({TASK_FILE} beside "
      f"it has them), but the classifier has {len(bias)}"
    )
  return model


def with_answers(model: Model) -> Model:
  """`model` with what is assumed of one that answers questions."""
  if model.task["task"] != SQUAD or model_source.ANSWERABLE in model.task:
    return model
  return model._replace(
    assumed=[*model.assumed, model_source.assumed_answers(TASK_FILE)]
  )


def check_vocabulary(model: Model, settings: Settings) -> None:
  """Raises `DataError` for a vocabulary that is larger than the model's."""
  if not model.vocabulary:
    return
  rows = tokenizer_files.size(model.vocabulary)
  given = settings.vocab_file or settings.spm_model_file
  if rows > model.config.vocab_size:
    raise DataError(
      f"{given or model.vocabulary.file + ' of ' + settings.input[0]}: has "
      f"{rows} tokens, but the model's vocab_size is "
      f"{model.config.vocab_size}: it is another model's"
    )


def report(model: Model, settings: Settings, files: list[str]) -> list[str]:
  """What happened, for people."""
  counts = bert_tensors.count_parts(
    model.values, model.config, settings.input[0]
  )
  known = {w.ours for w in bert_tensors.weights(model.config)}
  others = sorted(set(model.values) - known)
  converted = [f"{part}: {n} weights" for part, n in counts.items()]
  converted += [f"{name} (not BERT's, kept)" for name in others]
  missing = [part for part in bert_tensors.PARTS[:4] if part not in counts]
  missing += [
    f"{part} (which {model_config.CONFIG_FILE} names)"
    for part in model.lacking
    if part not in missing
  ]
  if not model.vocabulary:
    missing.append(
      f"{VOCAB_FILE} (give --vocab_file or --spm_model_file for a tokenizer)"
    )
  mean = len(settings.input) > 1
  lines = [
    f"the mean of {len(settings.input)} checkpoints" if mean else "converted",
    *_indented(converted),
    f"left out: {len(model.left_out)}",
    *_indented(model.left_out),
    f"missing in the input: {len(missing)}",
    *_indented(missing),
  ]
  if model.assumed:
    lines += [f"assumed: {len(model.assumed)}", *_indented(model.assumed)]
  lines.append(f"text for it: --do_lower_case={_lower_case(model)}")
  if labels := model.task.get("labels"):
    lines.append(f"labels by number: {', '.join(labels)}")
  return [*lines, "written:", *_indented(files)]


def _indented(lines: list[str]) -> list[str]:
  return [f"    {line}" for line in lines]


def main(settings: Settings) -> None:
  print("\n".join(convert(settings)))


if __name__ == "__main__":
  run_with(Settings, main)
