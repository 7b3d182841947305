"""Finds a trained model's parts: checkpoint, config, vocabulary, task.

A run folder, a checkpoint's prefix, a Hugging Face folder or an exported folder
(a SavedModel of convert_checkpoint.py) names a model.
"""

import dataclasses
import filecmp
import glob
import os

import tokenization
from checkpoints import checkpoint_files, metrics, run_folder, run_start
from common.errors import UserError
from common.files import file_sha256
from config import stages
from config.pretraining import BEST_BY, is_preset, read_bert
from data import record_report, records
from finetuning import task_file
from finetuning.task_file import (
  NOTHING_GIVEN,
  PRETRAINING,
  SQUAD,
  TASK_FILE,
  Given,
  saved_task,
)
from gradients import distributed
from interop import hugging_face, tokenizer_files
from interop.hugging_face import CHECKPOINT_NAME
from model.bert_config import BertConfig
from training import training_run

ANSWERABLE = "version_2_with_negative"
CONFIG_FILE = training_run.CONFIG_FILE
# TensorFlow Serving's folder for files that the graph does not read.
EXTRA_FOLDER = "assets.extra"


@dataclasses.dataclass(frozen=True)
class Source:
  """The parts of a model."""

  path: str  # a checkpoint's prefix, or an exported folder
  chosen: str  # why this checkpoint
  bert: BertConfig
  # As in task.json; "task" and "do_lower_case" are always there.
  task: dict
  vocabulary: dict[str, str]  # flag -> file; {} if none was found
  folder: str  # with its task.json, if it has one
  assumed_case: list[str]  # a line about do_lower_case if no file says it

  @property
  def max_seq_length(self) -> int:
    """As in training, or the model's largest if that is not known."""
    most = self.bert.max_position_embeddings
    return self.task.get("max_seq_length", most)

  @property
  def is_export(self) -> bool:
    return _is_export(self.path)

  def lines(self) -> list[str]:
    """The checkpoint and what is assumed, for the console."""
    named = [] if self.is_export else [f"{self.path} ({self.chosen})"]
    return named + self.assumed()

  def assumed(self) -> list[str]:
    """Lines about what no file says."""
    said_by = os.path.join(self.folder, TASK_FILE)
    return self.assumed_case + assumed_answers(self.task, said_by)

  def tokenizer(self) -> tokenization.Encoder:
    if not self.vocabulary:
      raise UserError(
        f"{self.path}: its vocabulary is neither beside it nor where its "
        "training data was: give --vocab_file or --spm_model_file"
      )
    return tokenization.load_tokenizer(
      self.vocabulary.get("vocab_file"),
      self.task["do_lower_case"],
      self.vocabulary.get("spm_model_file"),
      self.bert.vocab_size,
    )


def find(model: str, given: Given = NOTHING_GIVEN) -> Source:
  """The parts of a model.

  Raises `UserError` if a part is missing, damaged, or contradicts `given`.
  """
  chosen_file = task_file.named_vocabulary(given)
  path, chosen, folder = _locate(model, given.do_lower_case)
  said, said_by = saved_task(folder), os.path.join(folder, TASK_FILE)
  if not said:
    said_by, said = _pretraining_task(folder, given)
  config = _config(given.bert_config_file, folder, path)
  lower = said.get("do_lower_case")
  if lower is None:
    lower, said_by = tokenization.published_case(path), path
  lower, assumed = task_file.case(lower, said_by, given.do_lower_case, path)
  return Source(
    path,
    chosen,
    config,
    {"task": PRETRAINING, **said, "do_lower_case": lower},
    _vocabulary(said, chosen_file, folder),
    folder,
    assumed,
  )


def assumed_answers(task: dict, said_by: str) -> list[str]:
  """A line if no file says whether questions may have no answer."""
  if task["task"] != SQUAD or ANSWERABLE in task:
    return []
  return [
    "every paragraph is assumed to answer its question, as in SQuAD 1.1: if "
    f"not, set {ANSWERABLE} to true in {said_by}"
  ]


def _vocabulary(said: dict, chosen: dict, folder: str) -> dict[str, str]:
  """Flag -> file; an error if the flags contradict the files found."""
  found = {
    flag: path
    for flag, name in (said.get("vocabulary") or task_file.VOCABULARIES).items()
    if os.path.exists(path := os.path.join(folder, name))
  }
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


def settle(flags) -> list[str]:
  """Gives a run's flags what the model says that it starts from or resumes.

  --init_checkpoint becomes the name of a checkpoint, and flags that are not
  given what is beside it. Returns lines for the log; raises `UserError` if a
  flag contradicts what is found.
  """
  names = [f.name for f in dataclasses.fields(Given) if f.name in flags]
  given = Given(**{n: flags[n].value for n in names if flags[n].present})
  folder, init, lines = flags.output_dir or "", flags.init_checkpoint or "", []
  data = flags.input_file if "input_file" in flags else None
  if "stages" in flags and flags.stages:
    data = stages.read(flags.stages)[0].get("input_file", data)
  if "cooldown_from" in flags and (named := flags.cooldown_from):
    path = run_start.cooldown(named, folder)
    flags["cooldown_from"].value = path
    lines.append(f"--cooldown_from={named}: {path}")
    folder = folder if _is_model(folder) else os.path.dirname(path)
  resumes = checkpoint_files.has_begun(folder)
  if init and not (os.path.dirname(init) or os.path.isdir(init)):
    init = flags["init_checkpoint"].value = os.path.join(os.curdir, init)
  if os.path.isdir(init):
    began = None
    # A rank that joins an elastic run may find no checkpoint yet.
    if folder and (resumes or distributed.is_elastic()):
      began = run_folder.last_training(folder)
    path = (began and began["flags"].get("init_checkpoint")) or ""
    inside = path.startswith(os.path.join(init, ""))
    if resumes and not (inside or hugging_face.is_conversion(path, init)):
      lines.append(
        f"--init_checkpoint={init} is ignored: {folder} holds a run that "
        f"{f'was started from {path}' if path else 'has begun'}"
      )
    if resumes:  # from a checkpoint of its own
      path = path or init
    else:
      chosen = "from which this run was started"
      if hugging_face.is_folder(init) or not (
        inside and os.path.exists(f"{path}.index")
      ):
        lower = given.do_lower_case
        if hugging_face.is_folder(init) and "do_lower_case" not in flags:
          lower, told = _case_of_records(init, data)
          lines += told
        path, chosen, _ = _locate(init, lower)
      if _is_export(path):
        raise UserError(f"--init_checkpoint={init} is exported, no checkpoint")
      lines.append(f"--init_checkpoint={init}: {path} ({chosen})")
    init = flags["init_checkpoint"].value = path
  if starts := bool(init) and not resumes:
    folder = os.path.dirname(init)
    if "vocab_file" in flags:
      source = find(init, given)
      found: dict = dict(source.vocabulary)
      if not source.assumed_case:
        found["do_lower_case"] = source.task["do_lower_case"]
      for name in found:
        if not flags[name].present:
          flags[name].value = found[name]
      lines += source.assumed_case
    else:
      lines += _learned(flags, folder, data)
      if data:
        lines += _other_text(init, data)
  beside, config = os.path.join(folder, CONFIG_FILE), given.bert_config_file
  if (starts or folder) and os.path.exists(beside):
    settled_preset = is_preset(config) and (starts or resumes)
    if starts or settled_preset:
      _config(config, folder, init)
    if not config or settled_preset:
      flags["bert_config_file"].value = beside
      lines.append(f"--bert_config_file={beside}, as found")
  return lines


def _case_of_records(
  folder: str, files: str | None
) -> tuple[bool | None, list[str]]:
  """The case of records, and a line, where a model's files disagree on it."""
  said = tokenizer_files.cases(folder)
  found = files and len({*said.values()}) > 1 and records.manifest_of(files)
  if not found:
    return None, []
  lower = found[1].tokenizer.do_lower_case
  line = f"--do_lower_case={lower}, as {found[0]} says: {', '.join(said)}"
  return lower, [line]


def _learned(flags, folder: str, files: str | None) -> list[str]:
  """Gives --objective and --segment_ids what a model learned, and lines.

  Where no file says it, it is published, with segment ids. `UserError` for an
  evaluation with others.
  """
  path, said = _said(folder)
  trains = flags.do_train or flags.dry_run
  files = (not trains and flags.eval_input_file) or files
  found = records.manifest_of(files) if files else None
  wanted, lines = flags.objective, []
  if not (wanted or trains) and said.get("objective") == "mlm":
    wanted = flags["objective"].value = "mlm"
    lines.append(f"--objective=mlm, as {path} says")
  wanted = wanted or (found[1].objective if found else records.OBJECTIVES[0])
  used = said.get("segment_ids", None if trains else True)
  if trains and said.get("objective", wanted) != wanted:
    used = None  # the default of another objective
  has_pairs, given = not found or found[1].has_pairs, flags["segment_ids"]
  if given.present:
    if (
      not trains
      and has_pairs
      and given.value != said.get("segment_ids", given.value)
    ):
      raise UserError(
        f"--{'' if given.value else 'no'}segment_ids: {path} says that the "
        f"model was trained {'with' if used else 'without'} them: leave the "
        "flag out"
      )
    return lines
  given.value = used and has_pairs
  if given.value not in (None, run_folder.uses_segments(wanted, None)):
    by = f"{path} says" if "segment_ids" in said else "published models are"
    lines.append(f"--{'' if given.value else 'no'}segment_ids, as {by}")
  return lines


def _said(folder: str) -> tuple[str, dict]:
  """The file that says what a model learned, and what it says.

  That is "objective" and "segment_ids", as in task.json.
  """
  run = run_folder.last_training(folder)
  if not run:
    return os.path.join(folder, TASK_FILE), saved_task(folder)
  # An older run does not say; None: as its records, in Python code's runs.
  objective = run["flags"].get("objective", records.OBJECTIVES[0])
  segments = run["flags"].get("segment_ids")
  said = {"segment_ids": segments}
  if objective:
    segments = run_folder.uses_segments(objective, segments)
    said = {"objective": objective, "segment_ids": segments}
  path = os.path.join(folder, run_folder.RUN_FILE)
  return path, {key: value for key, value in said.items() if value is not None}


def _other_text(init: str, files: str) -> list[str]:
  """A line if records are of another vocabulary or case than a checkpoint."""
  found, folder = records.manifest_of(files), os.path.dirname(init)
  if not found:
    return []
  made, before = found[1].tokenizer, run_folder.tokenizer(folder)
  if before:
    digests, lower = {before[1].sha256}, before[1].do_lower_case
  else:
    said = saved_task(folder)
    paths = _vocabulary(said, {}, folder).values()
    digests = {file_sha256(path) for path in paths}
    lower = said.get("do_lower_case", tokenization.published_case(init))
  if digests <= {made.sha256} and lower in (None, made.do_lower_case):
    return []
  case = "other"
  if lower is not None:
    case = dataclasses.replace(made, do_lower_case=lower).case
  return [
    f"{found[0]}: the records are of {made.case} text with the vocabulary "
    f"{made.file}, the model of --init_checkpoint of {case} text or another "
    "vocabulary: its embeddings are of other words"
  ]


def _locate(model: str, do_lower_case: bool | None) -> tuple[str, str, str]:
  """Checkpoint or export, why this one, and the folder of its files."""
  if _is_export(model):
    return model, "exported", os.path.join(model, EXTRA_FOLDER)
  if hugging_face.is_folder(model):
    folder, chosen = hugging_face.converted(model, do_lower_case)
    return os.path.join(folder, CHECKPOINT_NAME), chosen, folder
  if os.path.isdir(model):
    return *_find_checkpoint(model, saved_task(model)), model
  if not (model and glob.glob(glob.escape(model) + ".*")):
    raise UserError(
      f"{model}: no such model. Name a run folder, a checkpoint (such as "
      "OUTPUT_DIR/model.ckpt-1000), a Hugging Face folder, or an exported one "
      "(convert_checkpoint.py --to=saved_model)"
    )
  return model, "as named", os.path.dirname(model)


def _is_model(path: str) -> bool:
  """Whether a folder has a model itself."""
  return (
    _is_export(path)
    or hugging_face.is_folder(path)
    or bool(glob.glob(os.path.join(glob.escape(path), "*.ckpt*.index")))
  )


def _is_export(path: str) -> bool:
  return os.path.exists(os.path.join(path, "saved_model.pb"))


def _config(given: str | None, folder: str, model: str) -> BertConfig:
  beside = os.path.join(folder, CONFIG_FILE)
  paths = [beside] if os.path.exists(beside) else []
  paths += [given] if given else []
  if not paths:
    raise UserError(
      f"{model}: there is no {beside}: give --bert_config_file, the config "
      "that the model was trained with"
    )
  configs = [read_bert(path) for path in paths]
  if is_preset(given):
    configs[-1].vocab_size = configs[0].vocab_size
  if differ := configs[0].differences(configs[-1]):
    raise UserError(
      f"--bert_config_file={given} and {beside}, which is the model's, differ "
      f"in {', '.join(differ)}: leave the flag out"
    )
  return configs[-1]


def _find_checkpoint(model: str, task: dict) -> tuple[str, str]:
  """Prefix and reason: the best by evaluation if it exists, else the newest."""
  files = checkpoint_files.CheckpointFiles(model, keep=1)
  steps = files.steps()
  if not steps:
    theirs = os.path.join(model, CHECKPOINT_NAME)
    newest = files.without_marker()
    own = glob.glob(os.path.join(glob.escape(model), "*.ckpt*.index"))
    if newest is None and len(own) == 1:
      theirs = own[0].removesuffix(".index")
    if newest is None and not os.path.exists(theirs + ".index"):
      inside = [os.path.join(glob.escape(model), n) for n in ("*", "*/*")]
      paths = sorted(path for names in inside for path in glob.glob(names))
      models = sorted(p.removesuffix(".index") for p in own)
      if models:
        said = "holds several checkpoints: name one, "
      elif models := list(filter(_is_model, paths)):
        said = "holds no model: did you mean "
      else:
        raise UserError(
          f"{model} holds no model: there is no checkpoint (NAME.ckpt*.index) "
          "in it. Name the --output_dir of a training that has saved one"
        )
      raise UserError(f"{model} {said}{' or '.join(models)}?")
    return (newest, "the newest") if newest else (theirs, "the only one")
  by: metrics.BestBy | None = None if task else BEST_BY
  if saved := task.get("best_by"):  # older runs do not say
    by = metrics.BestBy(tuple(saved["keys"]), saved["higher"])
  best = by and metrics.best_evaluation(model, steps[0], by)
  step = best if best in steps else steps[0]
  files.check(step)
  chosen = "the best by evaluation" if best in steps else "the newest"
  return files.prefix(step), chosen


def _pretraining_task(folder: str, given) -> tuple[str, dict]:
  """What a run's records were, and the file that says it; ("", {}) if none."""
  known, found = run_folder.tokenizer(folder), run_folder.manifest(folder)
  path, task = _said(folder) if run_folder.last_training(folder) else ("", {})
  if not known:
    return path, task
  path, info = known
  task["do_lower_case"] = info.do_lower_case
  if found:
    path, manifest = found
    task["max_seq_length"] = manifest.max_seq_length
  if task_file.named_vocabulary(given):
    files = given.vocab_file, given.spm_model_file
    record_report.find_encoder(info, folder, *files)
    return path, task
  file = record_report.find_vocabulary(info, os.path.dirname(path), folder)
  if not file:
    raise UserError(
      f"{path}: the records were made with {info.file} of SHA-256 "
      f"{info.sha256}, which is not near: give --vocab_file or --spm_model_file"
    )
  flag = "spm_model_file" if info.kind == "sentencepiece" else "vocab_file"
  return path, {**task, "vocabulary": {flag: os.path.abspath(file)}}
