"""Converts BERT checkpoints to and from Hugging Face, and to SavedModels.

  python convert_checkpoint.py runs/first --output=for_transformers
  python convert_checkpoint.py bert-base-uncased --output=here/
  python convert_checkpoint.py --to=tensorflow --output=mean/model.ckpt \\
    runs/first/model.ckpt-7000 runs/first/model.ckpt-7500
  python convert_checkpoint.py --to=saved_model runs/first \\
    --output=served/first/1

Of a run folder the best checkpoint by evaluation is taken, or else the newest.
The third command averages weights. The last one is for TensorFlow Serving; its
signatures are those of `inference`. PyTorch is not needed.

Optimizer slots, counters and other training state are left out. All that
predict.py needs beside weights and config (case, vocabulary, labels, lengths)
is written too: in Hugging Face's files where they have a place for it, and in
task.json.
"""

import dataclasses
import os
import tempfile

import mixed_precision
import tokenization
from checkpoints import checkpoint_weights, description
from checkpoints.description import PRETRAINING, TASK_FILE
from common import json_files
from common.errors import UserError
from common.settings import run_with, setting
from interop import (
  bert_tensors,
  hugging_face,
  inference,
  model_card,
  model_config,
  model_source,
  tokenizer_files,
)
from interop.hugging_face import Model
from interop.tokenizer_files import VOCAB_FILE
from model import weights

HUGGINGFACE, TENSORFLOW = "huggingface", "tensorflow"
SAVED_MODEL = "saved_model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(model_source.Given):
  """What to convert; the names are the flags'."""

  # fmt: off
  input: tuple[str, ...] = setting((),
    "Models to convert, instead of naming them as arguments: a run folder "
    "(its best checkpoint by evaluation, else the newest), a checkpoint's "
    "name, for example OUTPUT_DIR/model.ckpt-1000, or a Hugging Face folder. "
    "The mean of several checkpoints is taken.")
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


# Reading ----------------------------------------------------------------------


def read_checkpoints(settings: Settings) -> Model:
  """The model with the mean of the checkpoints' weights."""
  sources = [model_source.find(path, settings) for path in settings.input]
  paths = [os.path.realpath(source.path) for source in sources]
  for at, path in enumerate(paths):
    if path in paths[:at]:
      raise UserError(
        f"{settings.input[paths.index(path)]} and {settings.input[at]} are one "
        f"checkpoint, {sources[at].path}: name each once"
      )
  mean = checkpoint_weights.read([source.path for source in sources])
  first, *others = (_of_source(s, settings, mean) for s in sources)
  for path, other in zip(settings.input[1:], others, strict=True):
    differ = first.config.differences(other.config)
    differ += hugging_face.task_differences(first.task, other.task)
    both = first.vocabulary, other.vocabulary
    if None not in both and both[0] != both[1]:
      differ.append("the vocabulary")
    if differ:
      raise UserError(
        f"{settings.input[0]} and {path} differ in {', '.join(differ)}: only "
        "checkpoints of one model have a mean"
      )
  return first._replace(others=tuple(other.path for other in others))


def _of_source(source, settings: Settings, mean) -> Model:
  """A checkpoint's model, but with the weights of the `mean`."""
  task = hugging_face.of_model(source.task)
  if source.assumed_case:
    del task["do_lower_case"]
  if task["task"] == PRETRAINING:  # also where nothing names a task
    task["task"] = hugging_face.kind_of(mean.values)
  return Model(
    source.path,
    mean.values,
    source.bert,
    settings.bert_config_file
    or os.path.join(source.folder, description.CONFIG_FILE),
    task,
    hugging_face.vocabulary(source.vocabulary),
    mean.left_out,
    source.assumed_case,
    chosen=source.chosen,
  )


# Writing ----------------------------------------------------------------------


def write_folder(model: Model, settings: Settings) -> list[str]:
  """Writes a Hugging Face folder, whole or not at all; returns its files."""
  folder = os.path.normpath(settings.output)
  if os.path.exists(folder) and (
    not os.path.isdir(folder) or os.listdir(folder)
  ):
    raise UserError(
      f"--output={folder} already exists and is not empty: give a new folder"
    )
  about = model.values, model.config, model.path
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
    json_files.write(
      os.path.join(made, TASK_FILE), hugging_face.task_content(model)
    )
    model_card.write(
      os.path.join(made, model_card.CARD_FILE),
      folder,
      [model.path, *model.others],
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
        model.task.get("segment_ids", True)
        and model.config.type_vocab_size > 1,
      )
    os.replace(made, folder)
  return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]


def _pad_id(model: Model) -> int:
  """[PAD]'s; 0, as in all our SentencePiece models, if it is not found."""
  pad = tokenization.PAD.encode()
  names = [pad]
  if model.vocabulary and model.vocabulary.file == VOCAB_FILE:
    names = model.vocabulary.lines()
  return names.index(pad) if pad in names else 0


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
    raise UserError("nothing to convert is named: give a run folder")
  theirs = len(settings.input) == 1 and hugging_face.is_folder(
    settings.input[0]
  )
  to = settings.to or (TENSORFLOW if theirs else HUGGINGFACE)
  if theirs and to == HUGGINGFACE:
    raise UserError(
      f"{settings.input[0]} is a Hugging Face folder: nothing to convert"
    )
  if to != HUGGINGFACE and (settings.license != "unknown" or settings.language):
    raise UserError(f"--license and --language are for --to={HUGGINGFACE}")
  if to == SAVED_MODEL:
    return export(settings)
  if settings.signatures or settings.precision != "fp32":
    raise UserError(f"--signatures and --precision are for --to={SAVED_MODEL}")
  model = (
    hugging_face.read_folder(settings.input[0], settings)
    if theirs
    else read_checkpoints(settings)
  )
  model.assumed.extend(model_source.assumed_answers(model.task, TASK_FILE))
  hugging_face.check(model, settings)
  return report(
    model,
    settings,
    write_folder(model, settings)
    if to == HUGGINGFACE
    else hugging_face.write_checkpoint(model, settings.output),
  )


def report(model: Model, settings: Settings, files: list[str]) -> list[str]:
  """What was converted, for people."""
  counts = bert_tensors.count_parts(model.values, model.config, model.path)
  known = {w.name for w in weights.weights(model.config)}
  converted = [f"{part}: {n} weights" for part, n in counts.items()]
  others = sorted(set(model.values) - known)
  converted += [f"{name} (not BERT's, kept)" for name in others]
  missing = [part for part in weights.PARTS[:4] if part not in counts]
  missing += [
    f"{part} (which {model_config.CONFIG_FILE} names)"
    for part in sorted(model.named - set(counts) - set(missing))
  ]
  if not model.vocabulary:
    missing.append(
      f"{VOCAB_FILE} (give --vocab_file or --spm_model_file for a tokenizer)"
    )
  count = len(settings.input)
  lines = [
    f"the mean of {count} checkpoints"
    if count > 1
    else f"converted {model.path}{model.chosen and f' ({model.chosen})'}"
  ]
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
  if inputs and settings.input:
    raise UserError(
      f"{inputs[0]} and --input={settings.input[0]}: give one of the two"
    )
  given = dataclasses.replace(settings, input=inputs or settings.input)
  print("\n".join(convert(given)))


if __name__ == "__main__":
  run_with(Settings, main, arguments=-1)
