"""Converts BERT checkpoints to Hugging Face folders and back, without PyTorch.

  python convert_checkpoint.py --input=run/model.ckpt-7500 \\
    --vocab_file=vocab.txt --output=for_transformers
  python convert_checkpoint.py --input=bert-base-uncased --output=here
  python convert_checkpoint.py --to=tensorflow \\
    --input=run/model.ckpt-7000,run/model.ckpt-7500 --output=mean/model.ckpt

The last one averages weights. Optimizer slots, counters and what else belongs
to a training are left out.
"""

import dataclasses
import os
import tempfile
from typing import NamedTuple

import numpy as np
from absl import flags

import errors
import tokenization
from errors import DataError, UserError
from finetuning import finetune
from huggingface import bert_tensors, model_config, tokenizer_files
from huggingface.tokenizer_files import Vocabulary
from model.bert_config import BertConfig
from training import checkpoint_files, checkpoint_weights

HUGGINGFACE, TENSORFLOW = "huggingface", "tensorflow"
CHECKPOINT_NAME = "bert_model.ckpt"  # google/bert's
BERT_CONFIG_FILE = "bert_config.json"
VOCAB_FILE = tokenizer_files.VOCAB_FILE


@dataclasses.dataclass(frozen=True)
class Settings:
  """What to convert; fields are named like the flags.

  Attributes:
    input: prefixes of checkpoints, of which the mean is taken, or one folder.
    output: a folder for HUGGINGFACE, a prefix or a folder for TENSORFLOW.
    to: HUGGINGFACE, TENSORFLOW, or None for the other one than the input's.
    bert_config_file: of checkpoints; None: bert_config.json beside the first.
    vocab_file: None: vocab.txt beside the first input, if it is there.
    spm_model_file: a SentencePiece model instead; beside it: spiece.model.
    do_lower_case: None: what the input says, or else true.
    labels: names of a classifier's labels, by number.
  """

  input: tuple[str, ...]
  output: str
  to: str | None = None
  bert_config_file: str | None = None
  vocab_file: str | None = None
  spm_model_file: str | None = None
  do_lower_case: bool | None = None
  labels: tuple[str, ...] | None = None


class Model(NamedTuple):
  """A model that was read."""

  values: dict[str, np.ndarray]  # float32, by our names
  config: BertConfig
  source: str  # where the config is from
  vocabulary: Vocabulary | None
  do_lower_case: bool | None  # None: the input does not say
  labels: list[str] | None
  left_out: list[str]  # lines for people


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
  config, labels, keys = model_config.read_config(folder)
  read = bert_tensors.from_theirs(
    bert_tensors.read_tensors(folder), config, folder
  )
  left_out = [f"{name} (follows from the rest)" for name in read.left_out]
  left_out += [f"{key} of {source} (not known here)" for key in keys]
  return Model(
    read.values,
    config,
    source,
    tokenizer_files.read_vocabulary(folder),
    tokenizer_files.reads_lower_case(folder),
    labels if "output_bias" in read.values else None,
    left_out,
  )


def read_checkpoints(settings: Settings) -> Model:
  """The mean of some checkpoints' weights.

  Raises:
    UserError: they cannot be read, or are not of one shape.
  """
  weights = checkpoint_weights.read(settings.input)
  config, source = _config_of(settings)
  first = settings.input[0]
  bert_tensors.count_parts(weights.values, config, first)
  folder = os.path.dirname(first)
  task = finetune.saved_task(folder)  # of a run_classifier.py or run_squad.py
  return Model(
    weights.values,
    config,
    source,
    _vocabulary_of(folder, task),
    task.get("do_lower_case"),
    task.get("labels") or None,
    weights.left_out,
  )


def _vocabulary_of(folder: str, task: dict) -> Vocabulary | None:
  """That of a run folder, or what stands beside a checkpoint, if any."""
  names = task.get("vocabulary", {})
  for key, kind in (
    ("vocab_file", VOCAB_FILE),
    ("spm_model_file", tokenizer_files.MODEL_FILE),
  ):
    if key in names:
      return tokenizer_files.read_file(os.path.join(folder, names[key]), kind)
  return tokenizer_files.read_vocabulary(folder)


def _config_of(settings: Settings) -> tuple[BertConfig, str]:
  """The checkpoints' config, and its file."""
  folders = [os.path.dirname(prefix) for prefix in settings.input]
  beside = [os.path.join(folder, BERT_CONFIG_FILE) for folder in folders]
  path = settings.bert_config_file or beside[0]
  if not os.path.exists(path):
    raise UserError(f"{path} is not there: give --bert_config_file")
  try:
    config = BertConfig.from_json_file(path)
    for other in () if settings.bert_config_file else beside[1:]:
      if os.path.exists(other):
        theirs = BertConfig.from_json_file(other)
        if theirs.to_dict() != config.to_dict():
          raise UserError(
            f"{path} and {other} differ: only checkpoints of one config have "
            "a mean; if they do, give --bert_config_file"
          )
  except ValueError as e:
    raise UserError(str(e)) from e
  return config, path


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
  labels = settings.labels or model.labels
  if bias is not None and labels and len(labels) != len(bias):
    raise UserError(
      f"{len(labels)} names of labels, but the classifier has {len(bias)}"
    )
  config = model_config.to_their_config(
    model.config,
    parts,
    model.source,
    labels=None if bias is None else list(labels or ()) or len(bias),
    pad_id=_pad_id(model),
  )
  parent = os.path.dirname(folder) or "."
  os.makedirs(parent, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=parent, prefix=".converting") as aside:
    made = os.path.join(aside, "made")
    os.mkdir(made)
    bert_tensors.write_tensors(made, tensors)
    model_config.write_config(made, config)
    if model.vocabulary is not None:
      tokenizer_files.write_tokenizer(
        made,
        model.vocabulary,
        model.do_lower_case,
        model.config.max_position_embeddings,
      )
    os.replace(made, folder)
  return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]


def _pad_id(model: Model) -> int:
  """0, as of every SentencePiece model of ours, if no vocabulary says more."""
  if not model.vocabulary or model.vocabulary.file != VOCAB_FILE:
    return 0
  names = [line.strip() for line in model.vocabulary.content.split(b"\n")]
  pad = tokenization.PAD.encode()
  return names.index(pad) if pad in names else 0


def write_checkpoint(model: Model, settings: Settings) -> list[str]:
  """Writes a TensorFlow checkpoint with its config and vocabulary beside it.

  Returns:
    The files, as lines for people.

  Raises:
    UserError: something else stands where one of them would.
  """
  prefix = settings.output
  if os.path.isdir(prefix) or prefix.endswith(os.sep):
    prefix = os.path.join(prefix, CHECKPOINT_NAME)
  folder = os.path.dirname(prefix) or "."
  config_file = os.path.join(folder, BERT_CONFIG_FILE)
  beside = {config_file: model.config.to_json_string().encode()}
  if model.vocabulary:
    vocab_file = os.path.join(folder, model.vocabulary.file)
    beside[vocab_file] = model.vocabulary.content
  there = {path for path in beside if os.path.exists(path)}
  for path in there:
    if not _is_same(path, beside[path], model.config):
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


def _is_same(path: str, content: bytes, config: BertConfig) -> bool:
  """Whether a file holds this content, or this config in other words."""
  with open(path, "rb") as f:
    if f.read() == content:
      return True
  try:
    return BertConfig.from_json_file(path).to_dict() == config.to_dict()
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
  model = read_folder(settings) if theirs else read_checkpoints(settings)
  model = with_tokenizer(model, settings, to)
  write = write_folder if to == HUGGINGFACE else write_checkpoint
  return report(model, settings, write(model, settings))


def with_tokenizer(model: Model, settings: Settings, to: str) -> Model:
  """`model` with the vocabulary and the case that the settings give.

  Raises:
    UserError: the vocabulary is larger than the model's, or none for it.
  """
  if settings.vocab_file and settings.spm_model_file:
    raise UserError("give either --vocab_file or --spm_model_file")
  vocabulary, lower = model.vocabulary, settings.do_lower_case
  if settings.vocab_file:
    vocabulary = tokenizer_files.read_file(settings.vocab_file, VOCAB_FILE)
  if settings.spm_model_file:
    vocabulary = tokenizer_files.read_file(
      settings.spm_model_file, tokenizer_files.MODEL_FILE
    )
  if vocabulary:
    rows = tokenizer_files.size(vocabulary)
    given = settings.vocab_file or settings.spm_model_file
    if rows > model.config.vocab_size:
      raise DataError(
        f"{given or vocabulary.file + ' of ' + settings.input[0]}: has "
        f"{rows} tokens, but the model's vocab_size is "
        f"{model.config.vocab_size}: it is another model's"
      )
  if lower is None:
    lower = model.do_lower_case
  if model.do_lower_case not in (None, lower):
    raise UserError(
      f"--do_lower_case={lower}, but the tokenizer of {settings.input[0]} has "
      f"do_lower_case={model.do_lower_case}"
    )
  if lower is None and to == HUGGINGFACE:
    lower = True
  try:
    tokenization.validate_case_matches_checkpoint(
      bool(lower), settings.input[0] if to == HUGGINGFACE else None
    )
  except ValueError as e:
    raise UserError(str(e)) from e
  return model._replace(vocabulary=vocabulary, do_lower_case=lower)


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
  if model.do_lower_case is not None:
    lines.append(f"text for it: --do_lower_case={model.do_lower_case}")
  if model.labels:
    lines.append(f"labels by number: {', '.join(model.labels)}")
  return [*lines, "written:", *_indented(files)]


def _indented(lines: list[str]) -> list[str]:
  return [f"    {line}" for line in lines]


def main(_) -> None:
  values = flags.FLAGS.flag_values_dict()
  names = {f.name for f in dataclasses.fields(Settings)} - {"labels"}
  given = {name: values[name] for name in names}
  given["input"] = tuple(path for path in given["input"] if path)
  if not given["input"]:
    raise UserError("--input names nothing")
  print("\n".join(convert(Settings(**given))))


def define_flags() -> None:
  """The flags, which are the fields of `Settings`."""
  flags.DEFINE_list(
    "input",
    None,
    "A Hugging Face folder, or prefixes of TensorFlow checkpoints, for example "
    "OUTPUT_DIR/model.ckpt-1000; of several the mean is taken.",
    required=True,
  )
  flags.DEFINE_string(
    "output",
    None,
    "A new folder with --to=huggingface; with --to=tensorflow the prefix of a "
    f"checkpoint, or a folder for {CHECKPOINT_NAME}.",
    required=True,
  )
  flags.DEFINE_enum(
    "to",
    None,
    [HUGGINGFACE, TENSORFLOW],
    "What to write. Default: the other one than --input.",
  )
  flags.DEFINE_string(
    "bert_config_file",
    None,
    f"Of checkpoints. Default: {BERT_CONFIG_FILE} beside the first.",
  )
  flags.DEFINE_string(
    "vocab_file",
    None,
    "The WordPiece vocabulary. Default: vocab.txt beside the input.",
  )
  flags.DEFINE_string(
    "spm_model_file",
    None,
    "The SentencePiece model instead. Default: spiece.model beside the input.",
  )
  flags.DEFINE_bool(
    "do_lower_case",
    None,
    "Whether the model is of lower-cased text. Default: what the input's "
    "tokenizer does, or true.",
  )


if __name__ == "__main__":
  define_flags()
  errors.run_main(main)
