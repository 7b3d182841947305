"""Finds a trained model's parts: checkpoint, config, vocabulary, task.

A run folder, a checkpoint's prefix, a Hugging Face folder or an exported folder
(a SavedModel of convert_checkpoint.py) names a model.
"""

import dataclasses
import filecmp
import glob
import os
from collections.abc import Mapping
from typing import NamedTuple

from checkpoints import checkpoint_files, description, huggingface_folder
from checkpoints.agreement import OF_FILES
from checkpoints.description import Description
from checkpoints.metrics import BEST_BY, BestBy, best_evaluation, is_of_average
from checkpoints.sentence_folder import encoder_of
from common.errors import UserError
from common.model_files import TASK_FILE
from common.settings import in_group, setting
from config import stages
from config.bert_config import BertConfig, is_preset, read_bert
from model.tasks import PRETRAINING, SQUAD
from records import record_report
from text_encoders import kinds, tokenizer_files
from text_encoders.base import Encoder
from text_encoders.wordpiece import WordPieceEncoder

CHECKPOINT_NAME = "bert_model.ckpt"  # in the folders that google/bert published
ANSWERABLE = "version_2_with_negative"
# TensorFlow Serving's folder for files that the graph does not read.
EXTRA_FOLDER = "assets.extra"


@dataclasses.dataclass(frozen=True)
class Given(kinds.VocabularyFiles):
  """Flags that add what the model's files do not say, and contradict none."""

  whose_vocabulary = " that the model was trained with"
  default_vocabulary = (
    " Default: as found beside the model or its training data."
  )
  # fmt: off
  bert_config_file: str | None = setting(None,
    "JSON file with the BERT config. Default: as found beside the model.")
  do_lower_case: bool | None = in_group("Vocabulary")(None,
    "Lower-case the text, as uncased models expect. Default: as found beside "
    "the model, or else true.")
  # fmt: on


NOTHING_GIVEN = Given()


class Located(NamedTuple):
  """Where a model is."""

  path: str  # a checkpoint's prefix, or a folder
  chosen: str  # why this checkpoint
  about: Description  # of the folder with its files


@dataclasses.dataclass(frozen=True)
class Source:
  """The parts of a model."""

  path: str  # a checkpoint's prefix, or an exported folder
  chosen: str  # why this checkpoint
  bert: BertConfig
  # As in task.json; "task" and "do_lower_case" are always there.
  task: dict
  vocabulary: dict[str, str]  # flag -> file; {} if none was found
  about: Description  # of the folder with its task.json, if it has one
  assumed_case: list[str]  # a line about do_lower_case if no file says it
  notes: tuple[str, ...] = ()  # lines about what its files leave open

  @property
  def folder(self) -> str:
    """The folder with its files."""
    return self.about.folder

  @property
  def max_seq_length(self) -> int:
    """As in training, or the model's largest if that is not known."""
    return self.task.get("max_seq_length", self.bert.max_position_embeddings)

  @property
  def known_task(self) -> dict:
    """`task` without what is assumed, or about a run's files."""
    known = {}
    for key, value in self.task.items():
      is_assumed = key == "do_lower_case" and self.assumed_case
      if not (is_assumed or key in OF_FILES):
        known[key] = value
    return known

  @property
  def is_export(self) -> bool:
    return is_export(self.path)

  def lines(self) -> list[str]:
    """The checkpoint and what is assumed, for the console."""
    answers = assumed_answers(self.task, os.path.join(self.folder, TASK_FILE))
    title = f"{self.path} ({self.chosen})"
    return [title, *self.notes, *self.assumed_case, *answers]

  def tokenizer(self) -> Encoder:
    if not self.vocabulary:
      raise UserError(
        f"{self.path}: its vocabulary is neither beside it nor where its "
        f"training data was: give {kinds.VOCABULARY_FLAGS}"
      )
    return kinds.load_tokenizer(
      **self.vocabulary,
      do_lower_case=self.task["do_lower_case"],
      vocab_size=self.bert.vocab_size,
    )


def find(model: str, flags: Given = NOTHING_GIVEN) -> Source:
  """The parts of a model.

  Raises `UserError` if a part is missing, damaged, or contradicts `flags`.
  """
  located = locate(model)
  if not checkpoint_files.hold(located.path):
    # The run that wrote it has removed it meanwhile: choose again. Once
    # held, it can be read even then.
    located = locate(model)
  return parts_of(located, flags)


def parts_of(located: Located, flags: Given = NOTHING_GIVEN) -> Source:
  """`find` of a model that is located."""
  path, chosen, about = located
  folder, named = about.folder, flags.named_vocabulary()
  task_file, task = os.path.join(folder, TASK_FILE), about.task
  if not task:
    task_file, task = pretraining_task(about, flags)
  config = read_config(flags.bert_config_file, about, path)
  files = find_vocabulary(task, named, folder)
  # Each file that says whether text is lower-cased; they must agree.
  cases: dict[str, bool | None] = {}
  beside = os.path.join(folder, WordPieceEncoder.usual_name)
  flag, words = next(iter(files.items()), (WordPieceEncoder.flag, beside))
  if not about.is_huggingface:
    cases[task_file] = task.get("do_lower_case")
    cases[path] = tokenizer_files.published_case(path)
  elif flag == WordPieceEncoder.flag:
    words = beside  # a flag may name an equal file elsewhere
  cases |= tokenizer_files.cases_by_file(words, kinds.BY_FLAG[flag])
  lower, assumed, lines = tokenizer_files.choose_case(
    cases, flags.do_lower_case, path
  )
  task = {"task": PRETRAINING, **task, "do_lower_case": lower}
  notes = (*about.notes, *lines)
  source = Source(path, chosen, config, task, files, about, assumed, notes)
  if files:
    tokenizer_files.compare(source.tokenizer(), words)
  return source


def assumed_answers(task: dict, task_file: str) -> list[str]:
  """A line if no file says whether questions may have no answer."""
  if task["task"] != SQUAD or ANSWERABLE in task:
    return []
  return [
    "every paragraph is assumed to answer its question, as in SQuAD 1.1: if "
    f"not, set {ANSWERABLE} to true in {task_file}"
  ]


def find_vocabulary(task: dict, named: dict, folder: str) -> dict[str, str]:
  """Flag -> file; an error if the `named` ones contradict the folder's."""
  files = huggingface_folder.vocabularies(folder, task)
  for flag, path in named.items():
    is_same = flag in files and filecmp.cmp(path, files[flag], shallow=False)
    if files and not is_same:
      raise UserError(
        f"--{flag}={path} is another vocabulary than "
        f"{' or '.join(files.values())}, which is the model's: leave the flag "
        "out"
      )
  if len(files) > 1 and not named:
    raise UserError(
      f"{' and '.join(files.values())}: only one is the model's: give "
      f"{kinds.VOCABULARY_FLAGS}"
    )
  return named or files


def locate(model: str) -> Located:
  """Finds the checkpoint or export that a name means; reads its folder."""
  path = folder = model = encoder_of(model)
  chosen = ""
  if is_export(model):
    chosen, folder = "exported", os.path.join(model, EXTRA_FOLDER)
  elif huggingface_folder.is_folder(model):
    chosen = "a Hugging Face folder"
  elif not os.path.isdir(model):
    path = checkpoint_files.prefix_of(model)
    if not (model and glob.glob(glob.escape(path) + ".*")):
      raise UserError(
        f"{model}: no such model. Name a run folder, a checkpoint (such as "
        "OUTPUT_DIR/model.ckpt-1000), a Hugging Face folder, or an exported "
        "one (convert_checkpoint.py --to=saved_model)"
      )
    chosen, folder = "as named", os.path.dirname(path)
  about = description.read(folder)
  if not chosen:
    path, chosen = _find_checkpoint(model, about.task)
  # Of a run in stages, an earlier checkpoint may be of a smaller model.
  step = checkpoint_files.step_of(path)
  return Located(path, chosen, dataclasses.replace(about, step=step))


def is_export(path: str) -> bool:
  """Whether it is a SavedModel."""
  return os.path.exists(os.path.join(path, "saved_model.pb"))


def read_config(
  name: str | None, about: Description, model: str, stage: Mapping | None = None
) -> BertConfig:
  """The config of a file or preset, or of a folder; they must agree.

  A new training, which has the keys of its first `stage`, may extend it.
  """
  config = read_bert(name) if name else about.bert
  if not config:
    raise UserError(
      f"{model}: there is no {about.bert_file}: give --bert_config_file, the "
      "config that the model was trained with"
    )
  if not about.bert:
    return config
  if is_preset(name):
    config.vocab_size = about.bert.vocab_size
  # Keys of training alone may differ, such as dropout.
  begins = stages.model_of(config, stage or {})
  differ = about.bert.differences(begins)
  if differ and not (stage is not None and begins.extends(about.bert)):
    raise UserError(
      f"--bert_config_file={name} and {about.bert_file}, which is the "
      f"model's, differ in {', '.join(differ)}: leave the flag out, or train "
      "another model in another folder"
    )
  return config


def _find_checkpoint(model: str, task: dict) -> tuple[str, str]:
  """Prefix and reason: the best by evaluation if it exists, else the newest."""
  files = checkpoint_files.CheckpointFiles(model, keep=1)
  steps = files.steps()
  if not steps:
    return _find_published(model, files.without_marker())
  by = BestBy.of_task(task) if task else BEST_BY
  step, chosen = steps[0], "the newest"
  best = by and best_evaluation(model, steps[0], by)
  if best in steps:
    step, chosen = best, "the best by evaluation"
    if is_of_average(model, best):
      chosen += " of its average of weights: convert_checkpoint.py --average"
  files.check(step)
  return files.prefix(step), chosen


def _find_published(model: str, newest: str | None) -> tuple[str, str]:
  """As `_find_checkpoint`, in a folder that no run of ours wrote."""
  if newest:
    return newest, "the newest"
  indices = glob.glob(os.path.join(glob.escape(model), "*.ckpt*.index"))
  prefixes = sorted(path.removesuffix(".index") for path in indices)
  published = os.path.join(model, CHECKPOINT_NAME)
  if published in prefixes:
    prefixes = [published]
  if len(prefixes) == 1:
    return prefixes[0], "the only one"
  if prefixes:
    raise UserError(
      f"{model} holds several checkpoints: name {' or '.join(prefixes)}"
    )
  # The folder may hold folders of models, such as runs/.
  models: list[str] = []
  for names in ("*", "*/*"):
    for path in sorted(glob.glob(os.path.join(glob.escape(model), names))):
      checkpoints = os.path.join(glob.escape(path), "*.ckpt*.index")
      is_others = is_export(path) or huggingface_folder.is_folder(path)
      if is_others or glob.glob(checkpoints):
        models.append(path)
  hint = "name the --output_dir of a training that has saved a checkpoint"
  if models:
    hint = f"did you mean {' or '.join(models)}?"
  raise UserError(f"{model} holds no model: {hint}")


def pretraining_task(about: Description, flags: Given) -> tuple[str, dict]:
  """The file that says what a run learned of what records, and what it says."""
  path = about.learned_from if about.training else ""
  task, info = about.learned, about.tokenizer
  if not info:
    return path, task
  path = os.path.join(about.folder, description.RUN_FILE)
  task["do_lower_case"] = info.do_lower_case
  manifest = about.manifest()
  if manifest:
    task["max_seq_length"] = manifest[1].max_seq_length
  # A run that pre-trains has no task.json: its records' manifest says it.
  files = flags.named_vocabulary()
  if files:
    record_report.find_encoder(info, about.folder, files)
    return path, task
  task["vocabulary"] = about.vocabulary()
  if not task["vocabulary"]:
    raise UserError(
      f"{path}: the records were made with {info.file} of SHA-256 "
      f"{info.sha256}, which is not near: give {kinds.VOCABULARY_FLAGS}"
    )
  return path, task
