"""Which model binds a fine-tuning, and whether the task agrees with it."""

import os
from collections.abc import Callable

from checkpoints import agreement, checkpoint_files, run_folder, run_start
from checkpoints.description import Description
from common import json_files
from common.errors import UserError
from common.model_files import TASK_FILE
from config.bert_config import BertConfig
from model.tasks import PRETRAINING


def binding(config) -> Description | None:
  """What the trained model's folder says whose task.json binds a run, if any.

  It is the run folder if that has a checkpoint. To evaluate or predict, it may
  be the folder of --init_checkpoint; a training may use that for another task.
  """
  begun = checkpoint_files.has_begun(config.output_dir)
  is_free = config.do_train or not config.init_checkpoint
  return None if is_free and not begun else run_start.origin_of(config)


def check_length(max_seq_length: int, bert: BertConfig) -> None:
  """Raises `UserError` for a length that the model does not have."""
  most = bert.max_position_embeddings
  if not 4 <= max_seq_length <= most:
    raise UserError(
      f"--max_seq_length={max_seq_length}: must be 4 to the BERT config's "
      f"max_position_embeddings={most}"
    )


def kept_vocabulary(model: Description) -> dict[str, str]:
  """Flag -> path of a run folder's copy; {} without one."""
  names = model.task.get("vocabulary", {})
  return {flag: os.path.join(model.folder, names[flag]) for flag in names}


def check(config, describe: Callable[[], dict]) -> None:
  """Raises `UserError` if `describe()`, the task, contradicts the model."""
  model = binding(config)
  if not model:
    return
  is_finetuned = model.task.get("task", PRETRAINING) != PRETRAINING
  if not (is_finetuned or model.folder == config.output_dir):
    return  # an encoder of any origin
  before = {"task": PRETRAINING, **model.facts()}
  before |= agreement.of_vocabulary_files(kept_vocabulary(model))
  now = agreement.of_start({"bert": config.bert.to_dict()})
  now["task"] = config.kind
  if before["task"] == config.kind:
    now |= agreement.of_task(describe())
    now |= agreement.of_vocabulary_files(config.named_vocabulary())
  agreement.agree(before, now, model.folder, agreement.scopes(config.do_train))


def write(config, describe: Callable[[], dict]) -> None:
  """Writes task.json and a copy of the vocabulary, but not in a resumed run."""
  if not binding(config):
    run_folder.write_task(config.output_dir, describe(), config.tokenizer())


def add(folder: str, keys: dict) -> None:
  """Adds keys to a folder's task.json, or changes them."""
  path = os.path.join(folder, TASK_FILE)
  json_files.write(path, {**json_files.read(path, {}), **keys})
