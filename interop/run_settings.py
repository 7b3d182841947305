"""The settings of a run: its flags, and what its files or its model say."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from checkpoints import agreement, checkpoint_files, description, run_start
from checkpoints.description import Description
from common import errors, processes, settings
from common.errors import UserError
from common.files import file_sha256
from common.model_files import RUN_FILE
from config.bert_config import BertConfig, is_preset, read_bert
from config.pretraining import PretrainingConfig
from interop import model_source
from interop.model_source import NOTHING_GIVEN, Given, Located
from records import data_set, record_files, record_report
from records.record_files import RecordFiles
from text_encoders import kinds, tokenizer_files
from text_encoders.base import TokenizerInfo
from training import services


class Command:
  """The command line of a training, and on rank 0 the config that it gives."""

  def __init__(self, kind: type, flags, task: Callable | None = None):
    self._kind, self.flags, self._make_task = kind, flags, task
    self.config: Any = None
    self.task: Any = None  # of a fine-tuning, with its files read
    self.lines: list[str] = []  # for the log

  def configure(self) -> None:
    """Makes the config; raises `UserError` for wrong flags and files."""
    # Rank 0 alone does it: a moment later another checkpoint may be a folder's
    # newest.
    values = self._kind.read_flags(self.flags)
    self.config, self.lines = configured(self._kind, *values, self._read_data)

  def _read_data(self, config) -> None:
    """Raises `UserError` for wrong files of a config, but for checkpoints."""
    config.check_files()
    services.check_installed(config.report_to)
    if self._make_task:
      self.task = self._make_task(config)
      self.task.check()


def read_command(kind: type, task: Callable | None = None) -> Command:
  """The command line of a script, checked before TensorFlow is loaded.

  `task`: config -> `FinetuningTask`, whose files are read here, too.
  """
  # What is wrong ends the program with a line; so does a signal.
  errors.end_on_signals()
  with errors.in_a_line():
    command = Command(kind, settings.parse(kind), task)
    rank, _ = processes.started()
    if not rank:
      command.configure()
  return command


def run_finetuning(kind: type, task: Callable) -> None:
  """Runs the script of a fine-tuning; the arguments are `read_command`'s."""
  # Flags and files are checked first: TensorFlow takes seconds to load.
  command = read_command(kind, task)

  from finetuning import finetune

  finetune.start(command, task)


class Origin(NamedTuple):
  """What a run goes on from: a run, another run, a model, or nothing."""

  about: Description  # of that folder
  continues: bool  # a run, in its own folder or as a cooldown
  init: str | None = None  # the checkpoint of --init_checkpoint
  branch: str | None = None  # the checkpoint of --cooldown_from
  model: Located | None = None  # of --init_checkpoint, for a new run
  chosen: str = ""  # the checkpoint that a new run reads
  lines: tuple[str, ...] = ()  # for the log

  @property
  def stage(self) -> int:
    """The number of the stage in which a run continues."""
    training = self.about.training if self.continues else None
    return training["plan"].get("stage", {}).get("number", 0) if training else 0

  @property
  def saved_by(self) -> dict:
    """Flags of the start that made the newest checkpoint: others save none."""
    steps = checkpoint_files.CheckpointFiles(self.about.folder, 1).steps()
    return self.about.start_of(max(steps, default=None)).get("flags", {})


def configured(
  kind: type, flags: dict, in_files: dict, contents: dict,
  check: Callable[[Any], None] | None = None,
) -> tuple[Any, list[str]]:  # fmt: skip
  """The config of a run by `RunConfig.read_flags`, and lines for the log.

  Flags that are not given are what the files of the run that it resumes say, or
  those of the model that it starts from. Raises `UserError` if a given one
  contradicts them. `check` gets the config before a checkpoint is opened, which
  loads TensorFlow.
  """
  values = in_files | flags
  origin = find_origin(values.get("output_dir") or "", flags)
  if contents.get("stages"):
    # What is read first; the records of a stage that has ended may be gone.
    stage = contents["stages"][: 1 + origin.stage][-1]
    values |= stage
    if "input_file" in in_files:
      in_files = {**in_files, "input_file": stage["input_file"]}
  trains = is_training(values)
  held_out = None if trains else values.get("eval_input_file")
  files = held_out or values.get("input_file")
  records = record_files.find(files) if files else None
  if kind is PretrainingConfig:
    defaults, lines = _objective(values, trains, origin, records)
    if origin.model and records:
      lines += other_text(origin.model, records, values.get("other_vocabulary"))
  else:
    defaults, lines = _of_model(flags, origin)
    # The flags that task.json sets; a training may use another task's model.
    binds = origin.continues or (origin.model and not trains)
    inherits = binds or kind.inherits
    task = kind.defaults(origin.about.task if inherits else {}, flags)
    if not binds:
      for name in [*task]:
        fixed = agreement.FIXED.get(name)
        if name in flags or not fixed or fixed.scope != agreement.MODEL:
          del task[name]
    before = {"task": kind.kind, **task}
    scopes = agreement.scopes(trains)
    agreement.agree(before, flags, origin.about.folder, scopes)
    defaults |= task
  if origin.continues and not trains:
    # As the best checkpoint was chosen by.
    for name in ("average_updates", "evaluate_average"):
      defaults[name] = origin.saved_by.get(name, getattr(kind, name))
  bert, of_bert = _bert(kind, defaults | values, origin, records)
  named = {
    "bert_config_file": bert, "init_checkpoint": origin.init,
    "cooldown_from": origin.branch,
  }  # fmt: skip
  read = contents | {flag: value for flag, value in named.items() if value}
  # A flag counts most, then files that flags name, then the run or model.
  config = settings.make(kind, defaults | in_files | flags, read)
  if check:
    check(config)
  if origin.chosen and not checkpoint_files.hold(origin.chosen):
    return configured(kind, flags, in_files, contents, check)  # chooses again
  return config, [*origin.lines, *lines, *of_bert]


def is_training(values: dict) -> bool:
  """Whether flags ask for a training, or its plan."""
  return bool(values.get("do_train") or values.get("dry_run"))


def find_origin(run: str, present: dict) -> Origin:
  """Finds what a run in the folder `run` goes on from, and reads it."""
  branch, init = present.get("cooldown_from"), present.get("init_checkpoint")
  begun = checkpoint_files.has_begun(run)
  if init and not (begun or branch):
    model = model_source.locate(init)
    if model_source.is_export(model.path):
      raise UserError(f"--init_checkpoint={init} is exported, no checkpoint")
    line = f"--init_checkpoint={init}: {model.path} ({model.chosen})"
    lines = (line,) if os.path.isdir(init) else ()
    return Origin(
      model.about, False, model.path, None, model, model.path, lines
    )
  folder = run
  if branch:
    branch = checkpoint_files.prefix_of(os.path.normpath(branch))
    if not (begun and os.path.exists(os.path.join(run, RUN_FILE))):
      folder = description.folder_of(branch)
  about, notes = description.read(folder), []
  if begun and not branch and about.training and is_training(present):
    # Without it a cooldown would go on as an ordinary run.
    branch = about.training["flags"].get("cooldown_from")
    notes += [f"--cooldown_from={branch}, as {run} began"] if branch else []
  elif branch:
    branch = run_start.cooldown(branch, about, folder == run)
    notes.append(f"--cooldown_from={present['cooldown_from']}: {branch}")
  if begun:
    init, ignored = _ignored(present, about)
    notes += ignored
  chosen = branch if branch and not begun else ""
  continues = begun or bool(branch)
  return Origin(about, continues, init, branch, None, chosen, tuple(notes))


def _ignored(present: dict, about: Description) -> tuple[str | None, list[str]]:
  """The checkpoint that a resumed run was started from; lines about flags."""
  # They mean nothing to it, but the same command must go on resuming it.
  was = about.training["flags"] if about.training else {}
  init, path = present.get("init_checkpoint"), was.get("init_checkpoint") or ""
  named, ignored = checkpoint_files.prefix_of(init) if init else None, []
  if init and path != named and not path.startswith(os.path.join(init, "")):
    ignored.append("init_checkpoint")
  for name in ("initial_weights", "rewarmup"):
    if name in present and present[name] != was.get(name, present[name]):
      ignored.append(name)
  lines = []
  start = f"was started from {path}" if path else "has begun"
  for name in ignored:
    lines.append(
      f"--{name}={agreement.shown(present[name])} is ignored: {about.folder} "
      f"holds a run that {start}"
    )
  return init and (path or named), lines


def _of_model(present: dict, origin: Origin) -> tuple[dict, list[str]]:
  """Vocabulary and case of a new run's model, or of its words, and lines."""
  names = present.keys() & vars(NOTHING_GIVEN)
  if origin.about.bert:  # `_bert` compares them
    names -= {"bert_config_file"}
  parts = Given(**{name: present[name] for name in names})
  if origin.model:
    source = model_source.parts_of(origin.model, parts)
    flags: dict[str, Any] = {**source.vocabulary}
    if not source.assumed_case:
      flags["do_lower_case"] = source.task["do_lower_case"]
    return flags, [*source.notes, *source.assumed_case]
  files = parts.named_vocabulary()
  if origin.continues or not files:
    return {}, []
  encoder, lines = tokenizer_files.load(files, parts.do_lower_case)
  return {"do_lower_case": encoder.do_lower_case}, lines


def _bert(
  kind: type, values: dict, origin: Origin, records: RecordFiles | None
) -> tuple[BertConfig | None, list[str]]:
  """The BERT config if no file is given that says all, and lines about it."""
  name, about = values.get("bert_config_file"), origin.about
  bert, resumes = about.bert, origin.continues and is_preset(name)
  if bert and (not name or origin.model or resumes):
    model = origin.init or about.folder
    first = values if origin.model and is_training(values) else None
    config = model_source.read_config(name, about, model, first)
    if extended := config.differences(bert):
      return config, [
        f"{agreement.BERT_FLAG}={name} extends {about.bert_file} by other "
        f"{', '.join(extended)}"
      ]
    if name and not is_preset(name):
      return config, []
    return bert, [f"{agreement.BERT_FLAG}={about.bert_file}, as found"]
  if not is_preset(name):
    return None, []
  bert, rows = read_bert(name), None
  if kind is not PretrainingConfig:
    files = {flag: values.get(flag) for flag in kinds.BY_FLAG}
    rows = kinds.load_tokenizer(**files).vocab_size
  elif records and records.manifest:
    rows = records.manifest.tokenizer.vocab_size
  file = "the data's vocabulary" if rows else "its file"
  bert.vocab_size = rows or bert.vocab_size
  return bert, [
    f"{agreement.BERT_FLAG}={name}: vocabulary of {bert.vocab_size:,} from "
    f"{file}"
  ]


def _objective(
  values: dict, trains: bool, origin: Origin, records: RecordFiles | None
) -> tuple[dict, list[str]]:
  """--objective and --segment_ids where they are not given, and lines."""
  # They are the run's, else the records'.
  learned, lines = origin.about.learned, []
  objective, segments = values.get("objective"), values.get("segment_ids")
  if origin.continues and origin.about.training:
    flags = origin.about.training["flags"]
    objective = objective or flags.get("objective")
    if segments is None and flags.get("objective") in (None, objective):
      segments = flags.get("segment_ids")
  elif origin.model and not (objective or trains):
    if learned.get("objective") == "mlm":
      objective = "mlm"
      lines.append(f"--objective=mlm, as {origin.about.learned_from} says")
  manifest = records.manifest if records else None
  if records and not objective:
    kinds_of = {m.objective: path for path, m in records.manifests.values()}
    if len(kinds_of) > 1:
      both = [f"{path} for {name}" for name, path in kinds_of.items()]
      raise UserError(
        f"{' and '.join(both)}: give records of one kind, or --objective=mlm, "
        "which learns from both"
      )
  if not objective:
    objective = manifest.objective if manifest else data_set.OBJECTIVES[0]
  if origin.model:
    has_pairs = not manifest or manifest.has_pairs
    segments, notes = _segments(
      segments, objective, trains, has_pairs, origin.about
    )
    lines += notes
  return {"objective": objective, "segment_ids": segments}, lines


def _segments(
  segments: bool | None, objective: str, trains: bool, has_pairs: bool,
  about: Description,
) -> tuple[bool | None, list[str]]:  # fmt: skip
  """--segment_ids of a new run with the weights of another model, and lines.

  `UserError` for an evaluation with others than the model's.
  """
  # The model's stay, also where it is only evaluated. Where no file says them,
  # it is published, and has them.
  learned, path = about.learned, about.learned_from
  if segments is not None:
    if has_pairs and not trains:
      now = {"segment_ids": segments}
      agreement.agree(learned, now, path, (agreement.MODEL,))
    return segments, []
  used = learned.get("segment_ids", None if trains else True)
  if trains and learned.get("objective", objective) != objective:
    used = None  # the default of another objective
  segments = used and has_pairs
  if segments in (None, agreement.uses_segments(objective, None)):
    return segments, []
  by = f"{path} says" if "segment_ids" in learned else "published models are"
  return segments, [f"--{'' if segments else 'no'}segment_ids, as {by}"]


def other_text(
  model: Located, records: RecordFiles, is_meant: bool | None
) -> list[str]:
  """A line if records are of another vocabulary or case than a model.

  `UserError` unless this `is_meant`, by --other_vocabulary.
  """
  if not records.first:
    return []
  path, info = records.first[0], records.first[1].tokenizer
  about, files = model.about, dict[str, str]()
  before = about.tokenizer
  if before:
    digests, lower = {before.sha256}, before.do_lower_case
  else:
    files = model_source.find_vocabulary(about.task, {}, about.folder)
    digests = {file_sha256(file) for file in files.values()}
    published = tokenizer_files.published_case(model.path)
    lower = about.task.get("do_lower_case", published)
  if lower in (None, info.do_lower_case):
    if digests <= {info.sha256} or _has_the_tokens(files, path, info):
      return []
  line = (
    f"{path}: the records were made of {info.case} text with {info.file}, but "
    f"the model of --init_checkpoint, {model.path}, has another vocabulary or "
    "case: its embeddings are of other words"
  )
  if is_meant:
    return [line]
  own = " or ".join(files.values()) or "its vocabulary"
  raise UserError(
    f"{line}. Make records with {own}, leave --init_checkpoint out, or give "
    "--other_vocabulary if you mean it"
  )


def _has_the_tokens(
  files: dict[str, str], manifest: str, info: TokenizerInfo
) -> bool:
  """Whether a model's vocabulary is the records' in another file."""
  encoder = record_report.find_encoder(info, os.path.dirname(manifest), {})
  if not (files and encoder):
    return False
  own = kinds.load_tokenizer(**files, do_lower_case=info.do_lower_case)
  return (own.kind, own.tokens) == (encoder.kind, encoder.tokens)
