"""Writes a model: as a Hugging Face folder, or as a TensorFlow checkpoint."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from checkpoints import agreement, description, sentence_folder
from checkpoints.checkpoint_files import write_weights
from common import files, input_files, json_files
from common.errors import UserError
from common.model_files import CONFIG_FILE, RUN_FILE, TASK_FILE, THEIR_CONFIG
from config.bert_config import BertConfig
from interop import model_card
from interop.model_source import CHECKPOINT_NAME, Source
from model import huggingface_config, huggingface_weights, tasks
from model.weights import heads_of
from text_encoders import kinds, tokenizer_files
from text_encoders.base import MASK, Encoder


class Model(NamedTuple):
  """A model and its weights, which may be the mean of several checkpoints'."""

  source: Source  # of the first checkpoint
  task: dict  # as in task.json, but for names of files
  values: dict[str, np.ndarray]  # float32, by our names
  left_out: list[str]  # what else the checkpoints have, as lines for people
  others: tuple[str, ...] = ()  # the other checkpoints
  is_average: bool = False  # of what a training keeps beside the weights

  @property
  def vocabulary(self) -> dict[str, bytes]:
    """The name beside a published model -> the file's content; {} without."""
    if not self.source.vocabulary:
      return {}
    encoder = self.source.tokenizer()
    return encoder.files(encoder.usual_name)

  @property
  def task_content(self) -> dict:
    """task.json's content."""
    names = {flag: kinds.VOCABULARIES[flag] for flag in self.source.vocabulary}
    return dict(sorted({**self.task, "vocabulary": names}.items()))


def task_differences(task: dict, other: dict) -> list[str]:
  """The keys that differ between two files' tasks."""
  # An older task.json does not say these, which is no difference.
  newer, differing = ("objective", "segment_ids"), []
  facts, others = agreement.of_task(task), agreement.of_task(other)
  # Each training has its own columns and threshold, and the first one's stay.
  ignored = {"label_threshold", "matryoshka_dims"}
  for fact, fixed in agreement.FIXED.items():
    if fixed.scope != agreement.MODEL:
      ignored.add(fact)
  for key in sorted((facts.keys() | others.keys()) - ignored):
    values = facts.get(key), others.get(key)
    if values[0] != values[1] and not (key in newer and None in values):
      differing.append(key)
  return differing


def write_checkpoint(model: Model, prefix: str) -> list[str]:
  """Writes a TensorFlow checkpoint with config, vocabulary and task.json.

  The folder of the weights' own run gets no task.json: its files say the same.
  Raises `UserError` if the folder has files of another model. Returns lines.
  """
  if os.path.isdir(prefix) or prefix.endswith(os.sep):
    prefix = os.path.join(prefix, CHECKPOINT_NAME)
  folder = os.path.dirname(prefix) or "."
  own = description.folder_of(model.source.path) or "."
  beside = {CONFIG_FILE: model.source.bert.to_json_string().encode()}
  beside |= model.vocabulary
  if not os.path.exists(os.path.join(folder, RUN_FILE)):
    task = json_files.text(model.task_content, indent=2) + "\n"
    beside[TASK_FILE] = task.encode()
  elif not os.path.samefile(folder, own):
    raise UserError(
      f"--output={prefix}: {folder} is the folder of another run: give "
      "--output in another folder"
    )
  new = {}
  for name, content in beside.items():
    path = os.path.join(folder, name)
    if not os.path.exists(path):
      new[path] = content
    elif not _is_same(path, content, model):
      raise UserError(
        f"{path} already exists and is another model's: give --output in "
        "another folder"
      )
  write_weights(prefix, model.values, new)
  paths = sorted(os.path.join(folder, name) for name in beside)
  return [f"{prefix} (for --init_checkpoint)", *paths]


def _is_same(path: str, content: bytes, model: Model) -> bool:
  """Whether a file holds this content, or says the same in other words."""
  folder, name = os.path.split(path)
  if name not in (CONFIG_FILE, TASK_FILE):
    return input_files.read(path) == content
  about = description.read(folder)
  if name == CONFIG_FILE:
    bert = about.bert
    return bert is not None and not bert.differences(model.source.bert)
  return not task_differences(about.task, model.task)


def write_folder(
  model: Model, folder: str, licence: str, languages: Sequence[str]
) -> list[str]:
  """Writes a Hugging Face folder, whole or not at all; returns its files."""
  source, bert = model.source, model.source.bert
  encoder = source.tokenizer() if source.vocabulary else None
  outputs = len(model.values.get(tasks.label_bias(model.values), ()))
  labels = model.task.get("labels") or huggingface_config.stand_ins(outputs)
  # What Hugging Face cannot say is refused before anything is written.
  config = huggingface_config.to_huggingface_config(
    bert, heads_of(bert, model.values), source.path, labels if outputs else (),
    encoder.special_ids() if encoder else None,
    model.task.get("multi_label", False),
  )  # fmt: skip
  tensors = huggingface_weights.to_huggingface(model.values, bert, source.path)
  with files.new_folder(folder) as aside:
    huggingface_weights.write_tensors(aside, tensors)
    json_files.write(os.path.join(aside, THEIR_CONFIG), config)
    json_files.write(os.path.join(aside, TASK_FILE), model.task_content)
    model_card.write(
      os.path.join(aside, model_card.CARD_FILE),
      os.path.basename(os.path.abspath(folder)), model, config,
      encoder.special["mask"] if encoder else MASK, licence, languages,
    )  # fmt: skip
    if encoder:
      for file, content in model.vocabulary.items():
        files.write(os.path.join(aside, file), content)
      write_tokenizer(aside, encoder, model.task, bert)
    if model.task["task"] == tasks.EMBEDDER:
      length = model.source.max_seq_length
      sentence_folder.write(aside, model.task, bert.hidden_size, length)
  return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]


def write_tokenizer(
  folder: str, encoder: Encoder, task: dict, bert: BertConfig
) -> None:
  """Writes the tokenizer of a model as transformers reads it."""
  if task.get("task") == tasks.NER and task.get("space_before_words", True):
    encoder = encoder.with_space_before()
  length = task.get("max_seq_length", bert.max_position_embeddings)
  has_segments = bert.type_vocab_size > 1
  pairs = task.get("segment_ids", True) and has_segments
  tokenizer_files.write_tokenizer(folder, encoder, length, pairs, has_segments)
