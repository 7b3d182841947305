"""Where a trained model's parts are: checkpoint, config, vocabulary, task.

A model is named by a run folder, by a checkpoint's prefix, or by an exported
folder (a SavedModel of export_model.py).
"""

import dataclasses
import filecmp
import glob
import os

import tokenization
from common.errors import DataError, UserError
from common.settings import setting
from common.tensorflow_v1 import tf
from data import record_report, records
from finetuning.finetune import TASK_FILE, saved_task
from model.bert_config import BertConfig
from training import checkpoint_files, config, training_hooks

PRETRAINING, CLASSIFIER, SQUAD = "pretraining", "classifier", "squad"
ANSWERABLE = "version_2_with_negative"
CONFIG_FILE = "bert_config.json"
# A SavedModel's folder for what its graph does not read, by TensorFlow
# Serving's convention.
EXTRA_FOLDER = "assets.extra"
_THEIR_PREFIX = "bert_model.ckpt"  # in the folders that google/bert published
# The flag of each kind of vocabulary -> its name beside a checkpoint.
_BESIDE = {"vocab_file": "vocab.txt", "spm_model_file": "spiece.model"}
_TRAINING_ONLY = {
  "hidden_dropout_prob",
  "attention_probs_dropout_prob",
  "initializer_range",
}


@dataclasses.dataclass(frozen=True)
class Given:
  """What the flags say; None: as it is found beside the model.

  A flag adds what nothing beside the model says; it contradicts nothing.
  """

  # fmt: off
  bert_config_file: str | None = setting(None,
    "JSON file with the BERT config. Default: as found beside the model.")
  vocab_file: str | None = setting(None,
    "WordPiece vocabulary that the model was trained with. Default: as found "
    "beside the model or its training data.")
  spm_model_file: str | None = setting(None,
    "SentencePiece model that the model was trained with. Default: as found "
    "beside the model or its training data.")
  do_lower_case: bool | None = setting(None,
    "Lower-case the text. Default: as found beside the model, or else true.")
  # fmt: on


NOTHING_GIVEN = Given()


@dataclasses.dataclass(frozen=True)
class Source:
  """The parts of a model.

  Attributes:
    path: a checkpoint's prefix, or an exported folder.
    chosen: why this checkpoint, for a person.
    bert: the config.
    task: as task.json has it: "task", "do_lower_case", "max_seq_length" where
      something says it, and what the task's kind adds.
    vocab_file, spm_model_file: one of them, or neither if none was found.
    assumed: what nothing says, and was assumed, as lines for a person.
  """

  path: str
  chosen: str
  bert: BertConfig
  task: dict
  vocab_file: str | None = None
  spm_model_file: str | None = None
  assumed: tuple[str, ...] = ()

  @property
  def max_seq_length(self) -> int:
    """As in training, or the most that the model can if nothing says it."""
    most = self.bert.max_position_embeddings
    return self.task.get("max_seq_length", most)

  @property
  def is_export(self) -> bool:
    """Whether it is a SavedModel."""
    return _is_export(self.path)

  def tokenizer(self) -> tokenization.Encoder:
    """Makes the tokens that the model knows.

    Raises:
      UserError: there is no vocabulary.
      DataError: it has more tokens than the model.
    """
    if not (self.vocab_file or self.spm_model_file):
      raise UserError(
        f"{self.path}: its vocabulary is neither beside it nor where its "
        "training data was: give --vocab_file or --spm_model_file"
      )
    return tokenization.load_tokenizer(
      self.vocab_file,
      self.task["do_lower_case"],
      self.spm_model_file,
      self.bert.vocab_size,
    )


def find(model: str, given: Given = NOTHING_GIVEN) -> Source:
  """The parts of the model that a user named.

  Args:
    model: a run folder, a checkpoint's prefix or an exported folder.
    given: what is not found beside it.

  Raises:
    UserError: there is no such model, a part of it is missing or damaged, or
      `given` is not what is found.
  """
  if given.vocab_file and given.spm_model_file:
    raise UserError("give --vocab_file or --spm_model_file, not both")
  if _is_export(model):
    folder = os.path.join(model, EXTRA_FOLDER)
    path, chosen, said = model, "exported", saved_task(folder)
  else:
    folder = model if os.path.isdir(model) else os.path.dirname(model)
    said = saved_task(folder)
    path, chosen = _find_checkpoint(model, said)
  said_by = os.path.join(folder, TASK_FILE)
  if not said:
    said_by, said = _pretraining_task(folder, given)
  check_task(said, said_by)
  config = _config(given.bert_config_file, folder, path)
  lower, assumed = _case(said, said_by, given.do_lower_case, path)
  if said.get("task") == SQUAD and ANSWERABLE not in said:
    assumed += (assumed_answers(said_by),)
  vocabulary = _vocabulary(said, given, folder)
  return Source(
    path,
    chosen,
    config,
    {
      "task": PRETRAINING,
      **said,
      "do_lower_case": lower,
    },
    vocabulary.get("vocab_file"),
    vocabulary.get("spm_model_file"),
    assumed,
  )


def _case(
  said: dict, said_by: str, given: bool | None, path: str
) -> tuple[bool, tuple[str, ...]]:
  """do_lower_case, and what was assumed."""
  lower = said.get("do_lower_case")
  if lower is None:
    lower, said_by = tokenization.published_case(path), path
  if lower is None and given is None:
    return True, (assumed_case(path),)
  if lower is not None and given not in (None, lower):
    raise UserError(
      f"--do_lower_case={given}, but the model was trained on "
      f"{'lower-cased' if lower else 'cased'} text ({said_by}): leave the flag "
      "out"
    )
  return given if lower is None else lower, ()


def assumed_case(model: str) -> str:
  """The line about a model of which nothing says the case."""
  return (
    f"{model}: nothing says whether it is of lower-cased text: assumed "
    "--do_lower_case; give --nodo_lower_case if it is cased"
  )


def assumed_answers(said_by: str) -> str:
  """The line about a model of which nothing says that it may not answer."""
  return (
    "every paragraph is taken to answer its question, as in SQuAD 1.1: if not, "
    f"set {ANSWERABLE} to true in {said_by}"
  )


def _vocabulary(said: dict, given: Given, folder: str) -> dict[str, str]:
  """Flag -> file, of the one vocabulary; {} if there is none."""
  names = said.get("vocabulary") or _BESIDE
  found = {
    flag: path
    for flag, name in names.items()
    if os.path.exists(path := os.path.join(folder, name))
  }
  chosen = {flag: getattr(given, flag) for flag in _BESIDE}
  chosen = {flag: path for flag, path in chosen.items() if path}
  for flag, path in chosen.items():
    if found and not (
      flag in found and filecmp.cmp(path, found[flag], shallow=False)
    ):
      raise UserError(
        f"--{flag}={path} is another vocabulary than "
        f"{' or '.join(found.values())}, which is the model's: leave the flag "
        "out"
      )
  if len(found) > 1 and not chosen:
    raise UserError(
      f"{' and '.join(found.values())}: only one is the model's: give "
      "--vocab_file or --spm_model_file"
    )
  return chosen or found


def _is_export(path: str) -> bool:
  return os.path.exists(os.path.join(path, "saved_model.pb"))


def check_task(said: dict, said_by: str) -> None:
  """Raises `DataError` for what a task.json of ours never says."""
  labels, vocabulary = said.get("labels", []), said.get("vocabulary", {})
  fits = (
    said.get("task", PRETRAINING) in (PRETRAINING, CLASSIFIER, SQUAD)
    and isinstance(said.get("do_lower_case", True), bool)
    and type(said.get("max_seq_length", 1)) is int
    and isinstance(vocabulary, dict)
    and isinstance(labels, list)
    and all(isinstance(v, str) for v in [*vocabulary.values(), *labels])
  )
  if not fits:
    raise DataError(
      f"{said_by}: not a task's description; move it away, or give another "
      "folder"
    )


def _config(given: str | None, folder: str, model: str) -> BertConfig:
  beside = os.path.join(folder, CONFIG_FILE)
  if not os.path.exists(beside):
    if not given:
      raise UserError(
        f"{model}: there is no {beside}: give --bert_config_file, the config "
        "that the model was trained with"
      )
    return _read_config(given)
  config = _read_config(beside)
  other = _read_config(given) if given else config
  if differ := differences(config, other):
    raise UserError(
      f"--bert_config_file={given} and {beside}, which is the model's, differ "
      f"in {', '.join(differ)}: leave the flag out"
    )
  return other


def differences(config: BertConfig, other: BertConfig) -> list[str]:
  """The keys that would make one model's answers the other's."""
  ours, theirs = config.to_dict(), other.to_dict()
  return [
    key
    for key in BertConfig(vocab_size=0).to_dict()
    if key not in _TRAINING_ONLY and ours[key] != theirs[key]
  ]


def _read_config(path: str) -> BertConfig:
  try:
    return BertConfig.from_json_file(path)
  except (ValueError, tf.errors.OpError) as e:
    message = getattr(e, "message", None) or str(e)
    raise UserError(message if path in message else f"{path}: {message}") from e


def _find_checkpoint(model: str, task: dict) -> tuple[str, str]:
  """A checkpoint's prefix, and why it was chosen.

  Of a run folder it is the best by evaluation, if that is known and there, or
  the newest.
  """
  if not os.path.isdir(model):
    if not glob.glob(glob.escape(model) + "*"):
      raise UserError(
        f"{model}: no such model. Name a run folder, a checkpoint (such as "
        "OUTPUT_DIR/model.ckpt-1000), or a folder of export_model.py"
      )
    return model, "as named"
  files = checkpoint_files.CheckpointFiles(model, keep=1)
  steps = files.steps()
  if not steps:
    theirs = os.path.join(model, _THEIR_PREFIX)
    newest = files.without_marker()
    if newest is None and not os.path.exists(theirs + ".index"):
      raise UserError(
        f"{model}: neither a checkpoint nor an exported model is in this folder"
      )
    return (newest, "the newest") if newest else (theirs, "the only one")
  by = _best_by(task)
  best = by and training_hooks.best_evaluation(model, steps[0], by)
  step = best if best in steps else steps[0]
  files.check(step)
  chosen = "the best by evaluation" if best in steps else "the newest"
  return files.prefix(step), chosen


def _best_by(task: dict) -> training_hooks.BestBy | None:
  if not task:
    return config.BEST_BY
  found = task.get("best_by")  # older runs do not say
  return found and training_hooks.BestBy(tuple(found["keys"]), found["higher"])


def _pretraining_task(folder: str, given: Given) -> tuple[str, dict]:
  """(manifest of a run folder's records, what it says); ("", {}) without one.

  Raises:
    DataError: the vocabulary given is another than that of the records.
  """
  found = _manifest_of_run(folder)
  if not found:
    return "", {}
  path, manifest = found
  info = manifest.tokenizer
  task = {
    "max_seq_length": manifest.max_seq_length,
    "do_lower_case": info.do_lower_case,
  }
  if given.vocab_file or given.spm_model_file:
    record_report.find_encoder(
      info, folder, given.vocab_file, given.spm_model_file
    )
    return path, task
  vocabulary = record_report.find_vocabulary(
    info, os.path.dirname(path), folder
  )
  if not vocabulary:
    raise UserError(
      f"{path}: the records were made with {info.file} of SHA-256 "
      f"{info.sha256}, which is not near: give --vocab_file or --spm_model_file"
    )
  name = "spm_model_file" if info.kind == "sentencepiece" else "vocab_file"
  return path, {**task, "vocabulary": {name: os.path.abspath(vocabulary)}}


def _manifest_of_run(folder: str) -> tuple[str, records.Manifest] | None:
  """That of the records of a pre-training run, which run.json names.

  They are named from where the training was started: that is looked for from
  here and from the folders that the run folder is in.
  """
  if not os.path.exists(os.path.join(folder, training_hooks.RUN_FILE)):
    return None
  places, above = [""], os.path.abspath(folder)
  while above != (above := os.path.dirname(above)):
    places.append(above)
  for file in training_hooks.trained_on(folder)[:1]:
    for place in places:
      if found := records.find_manifest(os.path.join(place, file)):
        return found
  return None
