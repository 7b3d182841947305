"""A Hugging Face folder, read where it is, as what our own files would say."""

import contextlib
import os

from checkpoints import sentence_folder
from common.errors import DataError
from common.model_files import CONFIG_FILE, TASK_FILE, THEIR_CONFIG
from config.bert_config import BertConfig
from model import huggingface_config, huggingface_weights, tasks, weights
from text_encoders import base, kinds, tokenizer_files, tokenizer_folder
from text_encoders.tokenizer_json import HuggingFaceEncoder
from text_encoders.wordpiece import WordPieceEncoder


def is_folder(path: str) -> bool:
  """Whether it is a folder as transformers writes them, and none of ours."""
  if not os.path.isdir(path):
    return False
  names = os.listdir(path)
  if THEIR_CONFIG not in names or CONFIG_FILE in names:
    return False
  weights_files = huggingface_weights.WEIGHTS_FILE, "pytorch_model"
  return any(name.startswith(weights_files) for name in names)


def vocabularies(folder: str, task: dict) -> dict[str, str]:
  """Flag -> file, of all that a folder has and that its model may mean."""
  wordpiece, huggingface = WordPieceEncoder.flag, HuggingFaceEncoder.flag
  names = task.get("vocabulary") or kinds.VOCABULARIES
  if is_folder(folder):
    name = HuggingFaceEncoder.usual_name
    if not os.path.exists(os.path.join(folder, name)):
      name = tokenizer_folder.VOCABULARY_FILE  # RoBERTa's, with its merges
    names = {**names, huggingface: name}
  files: dict[str, str] = {}
  for flag, name in names.items():
    path = os.path.join(folder, name)
    if os.path.exists(path):
      files[flag] = path
  if len(files) > 1 and huggingface in files:
    # It stands beside the other kinds, too: it counts where they do not.
    if wordpiece in files and not tokenizer_files.fits(files[wordpiece]):
      del files[wordpiece]
    else:
      del files[huggingface]
  return files


def _inputs_of_others(
  folder: str, task: str, bert: BertConfig, tokenizer: str | None
) -> dict[str, bool]:
  """What others train on as their tokenizer gives it, if it gives nothing."""
  lacks = {}
  if task == tasks.NER:
    lacks["space_before_words"] = False
  if bert.type_vocab_size > 1:
    with contextlib.suppress(DataError):  # who opens it says what is wrong
      config = tokenizer_files.read(folder, base.TOKENIZER_CONFIG_FILE)
      names = config.get("model_input_names")
      gives = not names or "token_type_ids" in names
      if gives and tokenizer:
        gives = tokenizer_folder.has_segments(tokenizer_folder.read(tokenizer))
      if not gives:
        lacks["segment_ids"] = False
  return lacks


def read_task(folder: str, saved: dict) -> tuple[dict, list[str]]:
  """What task.json says of such a model, and lines about what is assumed.

  `saved` is task.json's content if the folder has one. Raises `DataError` if it
  contradicts the weights or config.json.
  """
  # The task follows from the weights: which heads there are, of what shape.
  known, notes = huggingface_config.read_config(folder), []
  tensors, shapes = huggingface_weights.read_shapes(folder), dict[str, list]()
  for name, of_tensor in known.tensors(tensors).items():
    if name in tensors:
      shapes |= {weight.name: tensors[name] for weight in of_tensor}
  in_files: dict = {"task": weights.kind_of(known.config, shapes)}
  if known.left_out:
    notes.append(
      f"{folder}: keys of {THEIR_CONFIG} are not known, and have no effect "
      f"here: {', '.join(known.left_out)}"
    )
  positions = known.config.max_position_embeddings
  embedder, lines = sentence_folder.read_task(folder, positions)
  in_files |= embedder
  notes += lines
  for head in tasks.LABELLED:
    if head.bias not in shapes:
      continue
    labels = known.labels_of(head, shapes[head.bias][0], folder)
    if labels is not None:
      in_files["labels"] = labels
    if head is tasks.LABELS and known.problem_type:
      is_several = known.problem_type == huggingface_config.MULTI_LABEL
      if is_several or "multi_label" in saved:
        in_files["multi_label"] = is_several
    if not known.architectures:
      architecture = known.kind.architecture([head])
      notes.append(
        f"{folder}: {THEIR_CONFIG} names no architecture: the classifier is "
        f"assumed to be that of {architecture}"
      )
  tokenizer = vocabularies(folder, saved).get(HuggingFaceEncoder.flag)
  if not saved:
    in_files |= _inputs_of_others(
      folder, in_files["task"], known.config, tokenizer
    )
  for key, value in in_files.items():
    if saved.get(key, value) != value:
      raise DataError(
        f"{folder}: {key} is {saved[key]!r} in {TASK_FILE}, but {value!r} by "
        f"{THEIR_CONFIG} and the weights: remove {TASK_FILE}, or correct it"
      )
  # No file need say the case: what is only assumed is left to the caller, and
  # a tokenizer.json alone says it where it is read.
  words = os.path.join(folder, WordPieceEncoder.usual_name)
  is_read = os.path.exists(words)
  if is_read or not tokenizer:
    cases = tokenizer_files.cases_by_file(words)
    lower, assumed, _ = tokenizer_files.choose_case(cases, None, folder)
    if not assumed:
      in_files["do_lower_case"] = lower
  return {**saved, **in_files}, notes
