"""What a run folder says about its model; later runs must agree with it.

Only the start of a training writes task.json, the BERT config and a copy of the
vocabulary there.
"""

import dataclasses
import filecmp
import os
import shutil
from collections.abc import Callable, Sequence

from checkpoints import checkpoint_files
from common import json_files
from common.errors import DataError, UserError
from common.files import atomic_write
from common.settings import setting
from data import records
from model.bert_config import BertConfig
from training import training_run

TASK_FILE = "task.json"
PRETRAINING, CLASSIFIER, SQUAD = "pretraining", "classifier", "squad"
# Flag -> the name of such a vocabulary beside a published checkpoint.
VOCABULARIES = {"vocab_file": "vocab.txt", "spm_model_file": "spiece.model"}


def _is(*types) -> Callable:
  return lambda value: type(value) in types


def _texts(value) -> bool:
  return isinstance(value, list) and all(isinstance(v, str) for v in value)


# Checks of the values in task.json, which may lack any key.
_IS_VALID = {
  "task": lambda value: value in [PRETRAINING, CLASSIFIER, SQUAD],
  "objective": lambda value: value in [*records.OBJECTIVES],
  "vocabulary": lambda value: (
    isinstance(value, dict)
    and set(value) <= set(VOCABULARIES)
    and _texts([*value.values()])
  ),
  "best_by": lambda value: (
    isinstance(value, dict)
    and _texts(value.get("keys"))
    and isinstance(value.get("higher"), bool)
  ),
  "columns": lambda value: (
    isinstance(value, dict)
    and _texts([v for v in value.values() if v is not None])
  ),
  **dict.fromkeys(("labels", "metrics"), _texts),
  **dict.fromkeys(
    ("do_lower_case", "segment_ids", "version_2_with_negative"), _is(bool)
  ),
  **dict.fromkeys(
    ("max_seq_length", "doc_stride", "max_query_length", "n_best_size"),
    _is(int),
  ),
  "max_answer_length": _is(int),
  "null_score_diff_threshold": _is(int, float),
}  # fmt: skip


def saved_task(output_dir: str) -> dict:
  """The content of a run folder's task.json; {} without one."""
  path = os.path.join(output_dir or "", TASK_FILE)
  if not os.path.exists(path):
    return {}
  remedy = (
    "bring back the file that the training wrote, move it away, or give "
    "another folder"
  )
  found = json_files.read_own(path, remedy)
  if not isinstance(found, dict):
    raise DataError(f"{path}: not a task's description; {remedy}")
  for key, is_valid in _IS_VALID.items():
    if key in found and not is_valid(found[key]):
      raise DataError(
        f"{path}: not a task's description: {key} is {found[key]!r}; {remedy}"
      )
  return found


@dataclasses.dataclass(frozen=True)
class Given:
  """Flags that add what the model's files do not say, and contradict none."""

  # fmt: off
  bert_config_file: str | None = setting(None,
    "JSON file with the BERT config. Default: as found beside the model.")
  vocab_file: str | None = setting(None,
    "WordPiece vocabulary that the model was trained with. Default: as found "
    "beside the model or its training data.")
  spm_model_file: str | None = setting(None,
    "SentencePiece model that the model was trained with, instead of "
    "--vocab_file. Default: as found beside the model or its training data.")
  do_lower_case: bool | None = setting(None,
    "Lower-case the text, as uncased models expect. Default: as found beside "
    "the model, or else true.")
  # fmt: on


NOTHING_GIVEN = Given()


def model_folder(settings) -> str | None:
  """The folder of the trained model whose task.json binds the run, if any.

  It is the run folder if that has a checkpoint. To evaluate or predict, it may
  be the folder of --init_checkpoint; a training may use that for another task.
  `settings` may be the flags.
  """
  if not settings.output_dir:
    return None
  if checkpoint_files.has_begun(settings.output_dir):
    return settings.output_dir
  if settings.do_train or not settings.init_checkpoint:
    return None
  return os.path.dirname(settings.init_checkpoint)


def check_length(max_seq_length: int, bert: BertConfig) -> None:
  """Raises `UserError` for a length that the model does not have."""
  most = bert.max_position_embeddings
  if not 4 <= max_seq_length <= most:
    raise UserError(
      f"--max_seq_length={max_seq_length}: must be 4 to the BERT config's "
      f"max_position_embeddings={most}"
    )


def named_vocabulary(settings) -> dict[str, str]:
  """Flag -> file; {} if `settings` name none, `UserError` if they name two."""
  files = {flag: getattr(settings, flag) for flag in VOCABULARIES}
  if all(files.values()):
    raise UserError("give either --vocab_file or --spm_model_file, not both")
  return {flag: path for flag, path in files.items() if path}


def case(
  said: bool | None, said_by: str, given: bool | None, model: str
) -> tuple[bool, list[str]]:
  """do_lower_case by files or else by the flag, and a line if it is assumed."""
  if said is None and given is not None:
    return given, []
  if said is None:
    return True, [
      f"{model}: nothing says whether it is of lower-cased text: assumed "
      "--do_lower_case; give --nodo_lower_case if it is cased"
    ]
  if given not in (None, said):
    raise UserError(
      f"--do_lower_case={given}, but the model was trained on "
      f"{'lower-cased' if said else 'cased'} text ({said_by}): leave the flag "
      "out"
    )
  return said, []


def kept_vocabulary(folder: str) -> dict[str, str]:
  """Flag -> path of the run folder's copy; {} without one."""
  names = saved_task(folder).get("vocabulary", {})
  return {flag: os.path.join(folder, name) for flag, name in names.items()}


def check(config, describe: Callable[[], dict]) -> None:
  """Raises `UserError` if `describe()`, the task, contradicts the model."""
  folder = model_folder(config)
  if folder is None:
    return
  saved = saved_task(folder)
  own = folder == config.output_dir
  if not (saved or own):
    return  # a checkpoint of any origin
  if saved.get("task") != config.kind:
    raise UserError(
      f"{'--output_dir' if own else '--init_checkpoint'}={folder} holds a run "
      f"of {saved.get('task', 'pre-training')}, this is {config.kind}: use "
      "another --output_dir (and a checkpoint as --init_checkpoint to keep its "
      "weights)"
    )
  path, about = os.path.join(folder, TASK_FILE), describe()
  free = () if config.do_train else config.usual_flags
  compare(config.flags_of(about), config.flags_of(saved), free, path)
  if "labels" in saved and saved["labels"] != about.get("labels"):
    raise _contradiction(
      f"the labels are {_shown(about['labels'])}", path, saved["labels"]
    )
  kept = kept_vocabulary(folder)
  for flag, given in named_vocabulary(config).items() if kept else ():
    copy = kept.get(flag)
    # A missing file contradicts nothing.
    exist = copy and os.path.exists(given) and os.path.exists(copy)
    if not copy or (exist and not filecmp.cmp(given, copy, shallow=False)):
      raise UserError(
        f"--{flag}={given} is not the vocabulary {' or '.join(kept.values())} "
        "that the model was trained with: leave the flag out, or train in "
        "another --output_dir"
      )
  _check_bert(config, os.path.join(folder, training_run.CONFIG_FILE))


def compare(here: dict, saved: dict, free: Sequence[str], path: str) -> None:
  """Raises `UserError` if values differ; in `free` only if one is None."""
  for name, value in here.items():
    was = saved.get(name, value)
    if value != was and (name not in free or None in (value, was)):
      raise _contradiction(f"--{name}={_shown(value)}", path, was)


def _check_bert(config, path: str) -> None:
  if not os.path.exists(path):
    return
  try:
    trained = BertConfig.from_json_file(path)
  except ValueError as e:
    raise UserError(str(e)) from e
  for name in trained.differences(config.bert):
    raise UserError(
      f"--bert_config_file has {name}={getattr(config.bert, name)}, but the "
      f"model was trained with {getattr(trained, name)}: give "
      f"--bert_config_file={path}"
    )


def _contradiction(what: str, path: str, saved) -> UserError:
  return UserError(
    f"{what}, but {path} says that the model was trained with {_shown(saved)}: "
    "give the same (or leave the flag out), or train in another --output_dir"
  )


def _shown(value) -> str:
  if not isinstance(value, list):
    return str(value)
  return ",".join(value[:10]) + (",..." if len(value) > 10 else "")


def write(config, describe: Callable[[], dict]) -> None:
  """Writes task.json and a copy of the vocabulary, but not in a resumed run."""
  if not model_folder(config):
    write_task(config.output_dir, describe(), named_vocabulary(config))


def write_task(folder: str, task: dict, files: dict[str, str]) -> None:
  """Writes task.json with copies of a `named_vocabulary`."""
  vocabulary = {flag: os.path.basename(path) for flag, path in files.items()}
  for flag, path in files.items():
    copy = os.path.join(folder, vocabulary[flag])
    if os.path.realpath(copy) != os.path.realpath(path):
      with open(path, "rb") as original, atomic_write(copy) as f:
        shutil.copyfileobj(original, f)
  content = {**task, "vocabulary": vocabulary}
  json_files.write(os.path.join(folder, TASK_FILE), content)
