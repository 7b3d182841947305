"""Which model binds a fine-tuning, and whether the task agrees with it.

Only the start of a training writes task.json, the BERT config and a copy of the
vocabulary into its folder.
"""

import os
from collections.abc import Callable

from checkpoints import agreement, checkpoint_files, description, run_folder
from common.errors import UserError
from config.bert_config import BertConfig
from model.tasks import PRETRAINING


def model_folder(settings) -> str | None:
  """The folder of the trained model whose task.json binds the run, if any.

  It is the run folder if that has a checkpoint. To evaluate or predict, it may
  be the folder of --init_checkpoint; a training may use that for another task.
  `settings` are a config, or values of its flags.
  """
  values = settings if isinstance(settings, dict) else vars(settings)
  folder, init = values.get("output_dir"), values.get("init_checkpoint")
  if not folder or checkpoint_files.has_begun(folder):
    return folder
  is_free = values.get("do_train") or not init
  return None if is_free else description.folder_of(init)


def check_length(max_seq_length: int, bert: BertConfig) -> None:
  """Raises `UserError` for a length that the model does not have."""
  most = bert.max_position_embeddings
  if not 4 <= max_seq_length <= most:
    raise UserError(
      f"--max_seq_length={max_seq_length}: must be 4 to the BERT config's "
      f"max_position_embeddings={most}"
    )


def kept_vocabulary(folder: str) -> dict[str, str]:
  """Flag -> path of the run folder's copy; {} without one."""
  names = description.read(folder).task.get("vocabulary", {})
  return {flag: os.path.join(folder, name) for flag, name in names.items()}


def check(config, describe: Callable[[], dict]) -> None:
  """Raises `UserError` if `describe()`, the task, contradicts the model."""
  folder = model_folder(config)
  if folder is None:
    return
  model = description.read(folder)
  if not (model.task or folder == config.output_dir):
    return  # a checkpoint of any origin
  facts_of = agreement.of_vocabulary_files
  before = {"task": PRETRAINING, **model.facts()}
  before |= facts_of(kept_vocabulary(folder))
  now = agreement.of_start({"bert": config.bert.to_dict()})
  now["task"] = config.kind
  if before["task"] == config.kind:
    now |= agreement.of_task(describe())
    now |= facts_of(config.named_vocabulary())
  scopes = agreement.scopes(config.do_train)
  agreement.agree(before, now, folder, scopes)


def write(config, describe: Callable[[], dict]) -> None:
  """Writes task.json and a copy of the vocabulary, but not in a resumed run."""
  if not model_folder(config):
    run_folder.write_task(config.output_dir, describe(), config.tokenizer())
