"""Finds a trained model's parts: checkpoint, config, vocabulary, task.

A run folder, a checkpoint's prefix, a Hugging Face folder or an exported folder
(a SavedModel of convert_checkpoint.py) names a model.
"""

import dataclasses
import filecmp
import glob
import os
from typing import Any

import tokenization
from checkpoints import (
  checkpoint_files,
  description,
  huggingface_folder,
  metrics,
  run_start,
)
from checkpoints.description import Description
from checkpoints.model_files import TASK_FILE, VOCABULARIES
from common import settings
from common.errors import UserError
from common.files import file_sha256
from config import stages
from config.pretraining import (
  BEST_BY,
  PretrainingConfig,
  is_preset,
  read_bert,
  with_vocabulary,
)
from data import record_report, records
from finetuning import task_file
from gradients import distributed
from interop.given import NOTHING_GIVEN, Given, case
from model.bert_config import BertConfig
from model.tasks import PRETRAINING, SQUAD

CHECKPOINT_NAME = "bert_model.ckpt"  # in the folders that google/bert published
ANSWERABLE = "version_2_with_negative"
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
  notes: tuple[str, ...] = ()  # lines about what its files leave open

  @property
  def max_seq_length(self) -> int:
    """As in training, or the model's largest if that is not known."""
    most = self.bert.max_position_embeddings
    return self.task.get("max_seq_length", most)

  @property
  def known_task(self) -> dict:
    """Of `task` what is known, and about the model, not about a run's files."""
    known = {}
    for key, value in self.task.items():
      is_assumed = key == "do_lower_case" and self.assumed_case
      if not (is_assumed or key in description.OF_FILES):
        known[key] = value
    return known

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
    answers = assumed_answers(self.task, said_by)
    return [*self.notes, *self.assumed_case, *answers]

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
  chosen_file = description.named_vocabulary(given)
  path, chosen, folder = _locate(model)
  about = description.read(folder)
  said, said_by = about.task, os.path.join(folder, TASK_FILE)
  if not said:
    said_by, said = pretraining_task(about, given)
  config = _config(given.bert_config_file, about, path)
  lower = said.get("do_lower_case")
  if lower is None:
    lower, said_by = tokenization.published_case(path), path
  lower, assumed = case(lower, said_by, given.do_lower_case, path)
  return Source(
    path,
    chosen,
    config,
    {"task": PRETRAINING, **said, "do_lower_case": lower},
    _vocabulary(said, chosen_file, folder),
    folder,
    assumed,
    about.notes,
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
  found = {}
  for flag, name in (said.get("vocabulary") or VOCABULARIES).items():
    path = os.path.join(folder, name)
    if os.path.exists(path):
      found[flag] = path
  if not found and huggingface_folder.is_folder(folder):
    if written := huggingface_folder.vocabulary_file(folder):
      found["vocab_file"] = written
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


def configured(kind: type, flags) -> tuple[Any, list[str]]:
  """The config of a run by its flags, and lines for the log.

  Flags that are not given are what the files of the run that it resumes say, or
  those of the model that it starts from. Raises `UserError` if a given one
  contradicts them.
  """
  given = {name: flags[name].value for name in flags if flags[name].present}
  in_files = kind.found(flags)
  values = in_files | given
  if values.get("stages"):
    values |= stages.read(values["stages"])[0]  # what is read first
  run, lines, named = values.get("output_dir") or "", [], {}
  if branch := given.get("cooldown_from"):
    named["cooldown_from"] = run_start.cooldown(branch, run)
    lines.append(f"--cooldown_from={branch}: {named['cooldown_from']}")
    if not _is_model(run):
      run = os.path.dirname(named["cooldown_from"])
  resumes = checkpoint_files.has_begun(run)
  init = given.get("init_checkpoint")
  if init:
    init, told = _initial(init, run, resumes)
    named["init_checkpoint"] = init
    lines += told
  starts = bool(init) and not resumes
  origin = description.read(description.folder_of(init) if starts else run)
  defaults: dict[str, Any] = {}
  if kind is PretrainingConfig:
    learned, told = _learned(values, origin, starts, resumes)
    defaults |= learned
    lines += told
    if starts and values.get("input_file"):
      lines += other_text(init, values["input_file"])
  else:
    if starts:
      given_parts = {
        field.name: given[field.name]
        for field in dataclasses.fields(Given)
        if field.name in given
      }
      source = find(init, Given(**given_parts))
      defaults |= source.vocabulary
      if not source.assumed_case:
        defaults["do_lower_case"] = source.task["do_lower_case"]
      lines += source.assumed_case
    defaults |= _task_flags(kind, values | named, given)
  bert, told = _bert(kind, defaults | values, origin, starts, resumes, init)
  if bert:
    named["bert_config_file"] = bert
  config = settings.from_flags(kind, flags, defaults | in_files, named)
  return config, lines + told


def _initial(init: str, run: str, resumes: bool) -> tuple[str, list[str]]:
  """The name of the checkpoint of --init_checkpoint, and lines about it."""
  if not (os.path.dirname(init) or os.path.isdir(init)):
    init = os.path.join(os.curdir, init)
  if not os.path.isdir(init):
    return init, []
  began = None
  # A rank that joins an elastic run may find no checkpoint yet.
  if run and (resumes or distributed.is_elastic()):
    began = description.read(run).training
  path = (began and began["flags"].get("init_checkpoint")) or ""
  inside = path == init or path.startswith(os.path.join(init, ""))
  if resumes:  # from a checkpoint of its own
    if inside:
      return path, []
    line = (
      f"--init_checkpoint={init} is ignored: {run} holds a run that "
      f"{f'was started from {path}' if path else 'has begun'}"
    )
    return path or init, [line]
  chosen = "from which this run was started"
  if not (inside and (path == init or os.path.exists(f"{path}.index"))):
    path, chosen, _ = _locate(init)
  if _is_export(path):
    raise UserError(f"--init_checkpoint={init} is exported, no checkpoint")
  return path, [f"--init_checkpoint={init}: {path} ({chosen})"]


def _task_flags(kind: type, values: dict, given: dict) -> dict[str, Any]:
  """The flags that task.json of the model that binds a run sets."""
  folder = task_file.model_folder(values)
  task = description.read(folder).task
  defaults = kind.defaults(task, given)
  said = {f"--{name}": value for name, value in defaults.items()}
  flags = {f"--{name}": value for name, value in given.items()}
  scopes = description.scopes(values.get("do_train", False))
  description.agree({"task": kind.kind, **said}, flags, folder or "", scopes)
  return defaults


def _bert(
  kind: type,
  values: dict,
  origin: Description,
  starts: bool,
  resumes: bool,
  init: str | None,
) -> tuple[BertConfig | None, list[str]]:
  """The BERT config if no file is given that says all, and lines about it."""
  name, beside = values.get("bert_config_file"), origin.bert_file
  is_there = bool(starts or origin.folder) and os.path.exists(beside)
  binds = is_there and (starts or (resumes and is_preset(name)))
  if binds:
    _config(name, origin, init or origin.folder)
  if is_there and (not name or (binds and is_preset(name))):
    return origin.bert, [f"{description.BERT_FLAG}={beside}, as found"]
  if not is_preset(name):
    return None, []
  bert, rows = read_bert(name), _vocabulary_size(kind, values)
  said_by = "its file"
  if rows:
    bert, said_by = with_vocabulary(bert, rows), "the data's vocabulary"
  return bert, [
    f"{description.BERT_FLAG}={name}: vocabulary of {bert.vocab_size:,} from "
    f"{said_by}"
  ]


def _vocabulary_size(kind: type, values: dict) -> int | None:
  """The tokens of the data's vocabulary, if it is known."""
  if kind is not PretrainingConfig:
    return tokenization.load_tokenizer(
      values.get("vocab_file"),
      values.get("do_lower_case", True),
      values.get("spm_model_file"),
    ).vocab_size
  files = values.get("input_file")
  found = records.manifest_of(files) if files else None
  return found[1].tokenizer.vocab_size if found else None


def _learned(
  values: dict, origin: Description, starts: bool, resumes: bool
) -> tuple[dict, list[str]]:
  """--objective and --segment_ids where they are not given, and lines.

  They are the run's, else the records'. Another model's segment ids stay, and
  so does all that it learned if it is only evaluated; where no file says it, it
  is published, with segment ids. `UserError` for an evaluation with others.
  """
  trains = values.get("do_train") or values.get("dry_run")
  files = (not trains and values.get("eval_input_file")) or values.get(
    "input_file"
  )
  said, path, lines = origin.learned, origin.learned_from, []
  objective, given = values.get("objective"), values.get("segment_ids")
  if resumes and origin.training:
    flags = origin.training["flags"]
    objective = objective or flags.get("objective")
    if given is None and flags.get("objective") in (None, objective):
      given = flags.get("segment_ids")
  elif starts and not (objective or trains) and said.get("objective") == "mlm":
    objective = "mlm"
    lines.append(f"--objective=mlm, as {path} says")
  manifest = _manifest(files, objective)
  if not objective:
    objective = manifest.objective if manifest else records.OBJECTIVES[0]
  if not starts:
    return {"objective": objective, "segment_ids": given}, lines
  used = said.get("segment_ids", None if trains else True)
  if trains and said.get("objective", objective) != objective:
    used = None  # the default of another objective
  has_pairs = not manifest or manifest.has_pairs
  if given is None:
    given = used and has_pairs
    if given not in (None, description.uses_segments(objective, None)):
      by = f"{path} says" if "segment_ids" in said else "published models are"
      lines.append(f"--{'' if given else 'no'}segment_ids, as {by}")
  elif not trains and has_pairs and given != said.get("segment_ids", given):
    raise UserError(
      f"--{'' if given else 'no'}segment_ids: {path} says that the model was "
      f"trained {'with' if used else 'without'} them: leave the flag out"
    )
  return {"objective": objective, "segment_ids": given}, lines


def _manifest(
  files: str | None, objective: str | None
) -> records.Manifest | None:
  """Of the first record file; `UserError` for two kinds without `objective`."""
  paths = records.expand_patterns(files) if files else []
  found = records.find_manifests(paths)
  made_for = {manifest.objective: path for path, manifest in found.values()}
  if len(made_for) > 1 and not objective:
    kinds = " and ".join(
      f"{path} for {kind}" for kind, path in made_for.items()
    )
    raise UserError(
      f"{kinds}: give records of one kind, or --objective=mlm, which learns "
      "from both"
    )
  return found[paths[0]][1] if paths and paths[0] in found else None


def other_text(init: str, files: str) -> list[str]:
  """A line if records are of another vocabulary or case than a checkpoint."""
  found, folder = records.manifest_of(files), description.folder_of(init)
  if not found:
    return []
  made, model = found[1].tokenizer, description.read(folder)
  if before := model.tokenizer:
    digests, lower = {before.sha256}, before.do_lower_case
  else:
    paths = _vocabulary(model.task, {}, folder).values()
    digests = {file_sha256(path) for path in paths}
    lower = model.task.get("do_lower_case", tokenization.published_case(init))
  if digests <= {made.sha256} and lower in (None, made.do_lower_case):
    return []
  text = "other"
  if lower is not None:
    text = dataclasses.replace(made, do_lower_case=lower).case
  return [
    f"{found[0]}: the records are of {made.case} text with the vocabulary "
    f"{made.file}, the model of --init_checkpoint of {text} text or another "
    "vocabulary: its embeddings are of other words"
  ]


def _locate(model: str) -> tuple[str, str, str]:
  """Checkpoint or export, why this one, and the folder of its files."""
  if _is_export(model):
    return model, "exported", os.path.join(model, EXTRA_FOLDER)
  if huggingface_folder.is_folder(model):
    return model, "a Hugging Face folder", model
  if os.path.isdir(model):
    return *_find_checkpoint(model, description.read(model).task), model
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
    or huggingface_folder.is_folder(path)
    or bool(glob.glob(os.path.join(glob.escape(path), "*.ckpt*.index")))
  )


def _is_export(path: str) -> bool:
  return os.path.exists(os.path.join(path, "saved_model.pb"))


def _config(given: str | None, about: Description, model: str) -> BertConfig:
  beside = about.bert_file
  configs = [bert for bert in (about.bert, given and read_bert(given)) if bert]
  if not configs:
    raise UserError(
      f"{model}: there is no {beside}: give --bert_config_file, the config "
      "that the model was trained with"
    )
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


def pretraining_task(about: Description, given: Given) -> tuple[str, dict]:
  """The file that says what a run learned of what records, and what it says."""
  path = about.learned_from if about.training else ""
  task, known = about.learned, about.tokenizer
  if not known:
    return path, task
  path = os.path.join(about.folder, description.RUN_FILE)
  task["do_lower_case"] = known.do_lower_case
  if found := about.manifest():
    task["max_seq_length"] = found[1].max_seq_length
  if description.named_vocabulary(given):
    files = given.vocab_file, given.spm_model_file
    record_report.find_encoder(known, about.folder, *files)
    return path, task
  vocabulary = about.vocabulary()
  if not vocabulary:
    raise UserError(
      f"{path}: the records were made with {known.file} of SHA-256 "
      f"{known.sha256}, which is not near: give --vocab_file or "
      "--spm_model_file"
    )
  return path, {**task, "vocabulary": vocabulary}
