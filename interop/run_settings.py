"""The settings of a run: its flags, and what its files or its model say."""

import dataclasses
import os
from typing import Any, NamedTuple

from checkpoints import agreement, checkpoint_files, description, run_start
from checkpoints.description import Description
from common import errors, input_files, processes, settings
from common.errors import UserError
from common.files import file_sha256
from config import stages
from config.bert_config import BertConfig, is_preset, read_bert
from config.pretraining import PretrainingConfig
from finetuning import task_file
from interop import model_source
from interop.model_source import NOTHING_GIVEN, Given
from records import data_set
from text_encoders import kinds, tokenizer_files
from training import services


class Command:
  """The command line of a training, and on rank 0 the config that it gives."""

  def __init__(self, kind: type, flags):
    self._kind, self.flags = kind, flags
    self.config: Any = None
    self.lines: list[str] = []  # for the log

  def configure(self) -> None:
    """Makes the config; raises `UserError` for what is wrong with files, too.

    Rank 0 alone does it: a moment later another checkpoint may be a folder's
    newest.
    """
    config, self.lines = configured(self._kind, self.flags)
    config.check_files()
    services.check_installed(config.report_to)
    self.config = config


def read_command(kind: type) -> Command:
  """The command line of a script, checked before TensorFlow is loaded.

  What is wrong ends the program with a line; so does a signal.
  """
  errors.leave_when_asked()
  with errors.in_a_line():
    command = Command(kind, settings.parse(kind))
    rank, _ = processes.started()
    if not rank:
      command.configure()
  return command


class Origin(NamedTuple):
  """What a run goes on from."""

  about: Description  # of its own folder, or of --init_checkpoint's
  resumes: bool  # it has a checkpoint of its own
  init: str | None  # the checkpoint of --init_checkpoint

  @property
  def starts(self) -> bool:
    """Whether it is a new run with the weights of another model."""
    return bool(self.init) and not self.resumes


def configured(kind: type, flags) -> tuple[Any, list[str]]:
  """The config of a run by its flags, and lines for the log.

  Flags that are not given are what the files of the run that it resumes say, or
  those of the model that it starts from. Raises `UserError` if a given one
  contradicts them.
  """
  given = settings.given(flags)
  in_files = kind.found(flags)
  values = in_files | given
  if values.get("stages"):
    values |= stages.read(values["stages"])[0]  # what is read first
  origin, named, lines = _origin(values.get("output_dir") or "", given)
  defaults: dict[str, Any] = {}
  if kind is PretrainingConfig:
    learned, told = _learned(values, origin)
    defaults |= learned
    if origin.starts and values.get("input_file"):
      told += other_text(named["init_checkpoint"], values["input_file"])
  else:
    defaults, told = _of_model(given, origin)
    defaults |= _task_flags(kind, values | named, given)
  lines += told
  bert, told = _bert(kind, defaults | values, origin)
  if bert:
    named["bert_config_file"] = bert
  config = settings.from_flags(kind, flags, defaults | in_files, named)
  # A run that still trains may have removed what was chosen: choose again.
  if not all(map(checkpoint_files.hold, _checkpoints(origin, named))):
    return configured(kind, flags)
  return config, lines + told


def _checkpoints(origin: Origin, named: dict) -> list[str]:
  """The other runs' checkpoints that a new run reads."""
  chosen = [named.get("cooldown_from"), origin.init if origin.starts else None]
  return [path for path in chosen if path and not os.path.isdir(path)]


def _origin(run: str, given: dict) -> tuple[Origin, dict, list[str]]:
  """What a run in the folder `run` goes on from, and the files it names.

  Returns lines about them, too.
  """
  named, lines = {}, []
  if branch := given.get("cooldown_from"):
    named["cooldown_from"] = run_start.cooldown(branch, run)
    lines.append(f"--cooldown_from={branch}: {named['cooldown_from']}")
    if not model_source.is_model(run):
      run = os.path.dirname(named["cooldown_from"])
  resumes = checkpoint_files.has_begun(run)
  init = given.get("init_checkpoint")
  if init:
    init, told = _initial(init, run, resumes)
    named["init_checkpoint"] = init
    lines += told
  is_new = init and not resumes
  about = description.read(description.folder_of(init) if is_new else run)
  return Origin(about, resumes, init), named, lines


def _of_model(given: dict, origin: Origin) -> tuple[dict, list[str]]:
  """Vocabulary and case of a new run's model, or of its words, and lines."""
  names = given.keys() & vars(NOTHING_GIVEN)
  parts = Given(**{name: given[name] for name in names})
  files = parts.named_vocabulary()
  if not origin.starts:
    if origin.resumes or not files:
      return {}, []
    encoder, lines = tokenizer_files.load(files, parts.do_lower_case)
    return {"do_lower_case": encoder.do_lower_case}, lines
  source = model_source.find(origin.init, parts)
  flags: dict[str, Any] = {**source.vocabulary}
  if not source.assumed_case:
    flags["do_lower_case"] = source.task["do_lower_case"]
  return flags, [*source.notes, *source.assumed_case]


def _initial(init: str, run: str, resumes: bool) -> tuple[str, list[str]]:
  """The name of the checkpoint of --init_checkpoint, and lines about it."""
  if not os.path.isdir(init):
    init = checkpoint_files.prefix_of(init)
    if not resumes:
      model_source.locate(init)
    return init, []
  began = description.read(run).training if resumes else None
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
    path, chosen, _ = model_source.locate(init)
  if model_source.is_export(path):
    raise UserError(f"--init_checkpoint={init} is exported, no checkpoint")
  return path, [f"--init_checkpoint={init}: {path} ({chosen})"]


def _task_flags(kind: type, values: dict, given: dict) -> dict[str, Any]:
  """The flags that task.json of the model that binds a run sets."""
  folder = task_file.model_folder(values)
  task = description.read(folder).task
  defaults = kind.defaults(task, given)
  scopes = agreement.scopes(values.get("do_train", False))
  before = {"task": kind.kind, **defaults}
  agreement.agree(before, given, folder or "", scopes)
  return defaults


def _bert(
  kind: type, values: dict, origin: Origin
) -> tuple[BertConfig | None, list[str]]:
  """The BERT config if no file is given that says all, and lines about it."""
  name, about = values.get("bert_config_file"), origin.about
  bert = about.bert if origin.starts or about.folder else None
  binds = bert and (origin.starts or (origin.resumes and is_preset(name)))
  if binds:
    model_source.read_config(name, about, origin.init or about.folder)
  if bert and (not name or (binds and is_preset(name))):
    return bert, [f"{agreement.BERT_FLAG}={about.bert_file}, as found"]
  if not is_preset(name):
    return None, []
  bert, rows = read_bert(name), _vocabulary_size(kind, values)
  said_by = "its file"
  if rows:
    said_by = "the data's vocabulary"
    bert = BertConfig.from_dict({**bert.to_dict(), "vocab_size": rows})
  return bert, [
    f"{agreement.BERT_FLAG}={name}: vocabulary of {bert.vocab_size:,} from "
    f"{said_by}"
  ]


def _vocabulary_size(kind: type, values: dict) -> int | None:
  """The tokens of the data's vocabulary, if it is known."""
  if kind is not PretrainingConfig:
    files = {flag: values.get(flag) for flag in kinds.BY_FLAG}
    return kinds.load_tokenizer(**files).vocab_size
  files = values.get("input_file")
  found = data_set.manifest_of(files) if files else None
  return found[1].tokenizer.vocab_size if found else None


def _learned(values: dict, origin: Origin) -> tuple[dict, list[str]]:
  """--objective and --segment_ids where they are not given, and lines.

  They are the run's, else the records'. Another model's segment ids stay, and
  so does all that it learned if it is only evaluated; where no file says it, it
  is published, with segment ids. `UserError` for an evaluation with others.
  """
  trains = values.get("do_train") or values.get("dry_run")
  files = (not trains and values.get("eval_input_file")) or values.get(
    "input_file"
  )
  about, lines = origin.about, []
  said, path = about.learned, about.learned_from
  objective, given = values.get("objective"), values.get("segment_ids")
  if origin.resumes and about.training:
    flags = about.training["flags"]
    objective = objective or flags.get("objective")
    if given is None and flags.get("objective") in (None, objective):
      given = flags.get("segment_ids")
  elif origin.starts and not (objective or trains):
    if said.get("objective") == "mlm":
      objective = "mlm"
      lines.append(f"--objective=mlm, as {path} says")
  manifest = _manifest(files, objective)
  if not objective:
    objective = manifest.objective if manifest else data_set.OBJECTIVES[0]
  if not origin.starts:
    return {"objective": objective, "segment_ids": given}, lines
  used = said.get("segment_ids", None if trains else True)
  if trains and said.get("objective", objective) != objective:
    used = None  # the default of another objective
  has_pairs = not manifest or manifest.has_pairs
  if given is None:
    given = used and has_pairs
    if given not in (None, agreement.uses_segments(objective, None)):
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
) -> data_set.Manifest | None:
  """Of the first record file; `UserError` for two kinds without `objective`."""
  paths = input_files.expand_patterns(files) if files else []
  found = data_set.find_manifests(paths)
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
  found, folder = data_set.manifest_of(files), description.folder_of(init)
  if not found:
    return []
  made, model = found[1].tokenizer, description.read(folder)
  if before := model.tokenizer:
    digests, lower = {before.sha256}, before.do_lower_case
  else:
    paths = model_source.find_vocabulary(model.task, {}, folder).values()
    digests = {file_sha256(path) for path in paths}
    lower = model.task.get(
      "do_lower_case", tokenizer_files.published_case(init)
    )
  if digests <= {made.sha256} and lower in (None, made.do_lower_case):
    return []
  text = "other"
  if lower is not None:
    text = dataclasses.replace(made, do_lower_case=lower).case
  return [
    f"{found[0]}: the records were made of {made.case} text with {made.file}, "
    f"but the model of --init_checkpoint, of {text} text, has another "
    "vocabulary or case: its embeddings are of other words"
  ]
