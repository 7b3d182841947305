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
import filecmp
import os
from collections.abc import Sequence

from checkpoints import checkpoint_weights, huggingface_folder, sentence_folder
from common.console import indented
from common.errors import UserError
from common.files import expect_new
from common.model_files import TASK_FILE
from common.settings import run_with, setting
from config.precision import TYPES
from interop import model_source, model_writing
from interop.model_writing import Model, task_differences
from model import huggingface_weights, tasks, weights
from text_encoders import kinds

HUGGINGFACE, TENSORFLOW = "huggingface", "tensorflow"
SAVED_MODEL = "saved_model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionSettings(model_source.Given):
  """What to convert; the names are the flags'."""

  # fmt: off
  output: str = setting(help=
    "New folder (TensorFlow Serving wants NAME/1, NAME/2, ...); with "
    "--to=tensorflow the prefix of a checkpoint, or a folder for "
    f"{model_source.CHECKPOINT_NAME}.")
  to: str | None = setting(None,
    "Format to write. Default: tensorflow for a Hugging Face folder, else "
    "huggingface.", choices=(HUGGINGFACE, TENSORFLOW, SAVED_MODEL))
  average: bool = setting(False,
    "Write the average of the weights that --average_updates of the training "
    "keeps in its checkpoints, in place of the weights. Not with "
    "--to=saved_model.")
  signatures: tuple[str, ...] = setting((),
    "Signatures to write with --to=saved_model: encoder, masked_lm, "
    "next_sentence, classifier, span, token_classifier, embedding. Default: "
    "all that the checkpoint has.")
  precision: str = setting("fp32",
    "Type of the matrix multiplications with --to=saved_model. Weights, inputs "
    "and outputs stay as they are.", choices=TYPES)
  license: str = setting("unknown",
    "Licence of the weights, which a Hugging Face folder's README.md names, as "
    "apache-2.0 or cc-by-sa-4.0.")
  language: tuple[str, ...] = setting((),
    "Languages of the training text, which that README.md names, as en,de.")
  # fmt: on


def read_model(settings: ConversionSettings, models: Sequence[str]) -> Model:
  """The model to convert, or the one with the mean of several's weights."""
  sources = []
  # One checkpoint under two names would count twice.
  named: dict[str, str] = {}
  for name in models:
    source = model_source.find(name, settings)
    sources.append(source)
    path = os.path.realpath(source.path)
    if path in named:
      raise UserError(
        f"{named[path]} and {name} are one checkpoint, {source.path}: name "
        "each once"
      )
    named[path] = name
  # Equal shapes are checked while reading, what else must agree is below.
  paths = [source.path for source in sources]
  mean = checkpoint_weights.read(paths, settings.average)
  first, *others = sources
  task = _task(first, mean.values)
  for path, other in zip(models[1:], others, strict=True):
    differ = first.bert.differences(other.bert)
    differ += task_differences(task, _task(other, mean.values))
    files = first.vocabulary.values(), other.vocabulary.values()
    for file, same in zip(*files, strict=False):
      if not filecmp.cmp(file, same, shallow=False):
        differ.append("the vocabulary")
    if differ:
      raise UserError(
        f"{models[0]} and {path} differ in {', '.join(differ)}: only "
        "checkpoints of one model have a mean"
      )
  more, average = tuple(paths[1:]), settings.average
  return Model(first, task, mean.values, mean.left_out, more, average)


def _task(source: model_source.Source, values: dict) -> dict:
  """A model's task, also where only its weights say it."""
  # A published checkpoint has no task.json: its heads say what it is for.
  task = source.known_task
  if task["task"] == tasks.PRETRAINING:
    task["task"] = weights.kind_of(source.bert, values)
  labels, bias = task.get("labels"), values.get(tasks.label_bias(values), ())
  if labels and len(bias) not in (0, len(labels)):
    raise UserError(
      f"{source.path}: {len(labels)} names of labels ({TASK_FILE} beside "
      f"it has them), but the classifier has {len(bias)}"
    )
  # No labels mean a regression, which has one output.
  if labels == [] and len(bias) > 1:
    del task["labels"]
  return task


def export(settings: ConversionSettings, models: Sequence[str]) -> list[str]:
  """Writes a checkpoint as a SavedModel; returns lines for people."""
  if len(models) > 1 or settings.average:
    raise UserError(
      f"--to={SAVED_MODEL} exports one checkpoint's weights: write the mean or "
      f"the average with --to={TENSORFLOW} first"
    )
  source = model_source.find(models[0], settings)
  if source.is_export:
    raise UserError(f"{source.path}: exported already; name a checkpoint")
  from interop import inference  # it loads TensorFlow

  flags = settings.signatures, settings.precision
  model = inference.open_checkpoint(source, *flags)
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


def convert(settings: ConversionSettings, *models: str) -> list[str]:
  """Converts; returns lines for people: what was converted, and the files."""
  folder = sentence_folder.encoder_of(models[0])
  from_huggingface = huggingface_folder.is_folder(folder)
  to = settings.to or (TENSORFLOW if from_huggingface else HUGGINGFACE)
  if to != HUGGINGFACE and (settings.license != "unknown" or settings.language):
    raise UserError(f"--license and --language are for --to={HUGGINGFACE}")
  if to != TENSORFLOW:
    expect_new(settings.output)
  if to == SAVED_MODEL:
    return export(settings, models)
  if settings.signatures or settings.precision != "fp32":
    raise UserError(f"--signatures and --precision are for --to={SAVED_MODEL}")
  model = read_model(settings, models)
  if to == TENSORFLOW:
    files = model_writing.write_checkpoint(model, settings.output)
  else:
    files = model_writing.write_folder(
      model, settings.output, settings.license, settings.language
    )
  return report(model, files)


def report(model: Model, files: list[str]) -> list[str]:
  """What was converted, for people."""
  source, values = model.source, model.values
  counts = huggingface_weights.count_parts(values, source.bert, source.path)
  parts, others = set(), set(values)
  for weight in weights.weights(source.bert):
    parts.add(weight.part)
    others.discard(weight.name)
  # Variables beside BERT's weights are kept under their own names.
  converted = [f"{part}: {n} weights" for part, n in counts.items()]
  converted += [f"{name} (not BERT's, kept)" for name in sorted(others)]
  lacking = parts - counts.keys()
  missing = [part for part in weights.PRETRAINED_PARTS if part in lacking]
  if not source.vocabulary:
    flags = kinds.VOCABULARY_FLAGS
    missing.append(f"the vocabulary (give {flags} for a tokenizer)")
  answers = model_source.assumed_answers(model.task, TASK_FILE)
  assumed = [*source.notes, *source.assumed_case, *answers]
  title = f"converted {source.path} ({source.chosen})"
  if model.others:
    title = f"the mean of {1 + len(model.others)} checkpoints"
  if model.is_average:
    title += ", of each the average of weights"
  lines = [title, *indented(converted)]
  lines += [f"left out: {len(model.left_out)}", *indented(model.left_out)]
  lines += [f"not in the checkpoint: {len(missing)}", *indented(missing)]
  if assumed:
    lines += [f"assumed: {len(assumed)}", *indented(assumed)]
  lower = source.task["do_lower_case"]
  lines.append(f"case of its text: --do_lower_case={lower}")
  labels = model.task.get("labels")
  if labels:
    lines.append(f"labels by number: {', '.join(labels)}")
  return [*lines, "written:", *indented(files)]


def main(settings: ConversionSettings, *models: str) -> None:
  """Converts a model, or the mean of several."""
  print("\n".join(convert(settings, *models)))


if __name__ == "__main__":
  run_with(ConversionSettings, main, arguments=None)
