"""What a folder says about its model.

run.json says how the model was trained, task.json what it is for. The BERT
config and the vocabulary stand beside them, or the records' manifest names it.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from checkpoints import agreement, huggingface_folder
from common import input_files, json_files, stores
from common.errors import DataError
from common.model_files import CONFIG_FILE, RUN_FILE, TASK_FILE, THEIR_CONFIG
from config import stages
from config.bert_config import BertConfig
from model import huggingface_config
from model.tasks import FINETUNED, POOLINGS, PRETRAINING, SIDES, SIMILARITIES
from records import data_set, record_report
from text_encoders import kinds
from text_encoders.base import TokenizerInfo

# A start that only evaluates has neither a plan nor data.
_START = {
  "flags?": {
    "objective?": (*data_set.OBJECTIVES, None), "stages?": ([dict], None),
  },
  "resumed?": bool,
  "plan?": ({"updates?": int, "stage?": {"number": int}}, None),
  "data?": ({"files": [str], "tokenizer?": (data_set.TOKENIZER, None)}, None),
  "versions?": dict,
}  # fmt: skip
_RUNS = {"runs": [_START]}
_TASK = {
  "task?": (PRETRAINING, *FINETUNED), "objective?": data_set.OBJECTIVES,
  "segment_ids?": bool, "do_lower_case?": bool, "max_seq_length?": int,
  "vocabulary?": {f"{flag}?": str for flag in kinds.VOCABULARIES},
  "best_by?": {"keys": [str], "higher": bool},
  "columns?": {"text?": str, "text_pair?": (str, None), "label?": str},
  "labels?": [str], "metrics?": [str], "label_names?": [str],
  "multi_label?": bool, "label_separator?": str, "label_columns?": [str],
  "label_threshold?": float,
  "tokens_field?": str, "tags_field?": str, "word_column?": int,
  "label_column?": (int, None), "doc_stride?": int, "max_query_length?": int,
  "n_best_size?": int, "max_answer_length?": int,
  "version_2_with_negative?": bool, "null_score_diff_threshold?": float,
  "pooling?": POOLINGS, "normalize?": bool, "include_prompt?": bool,
  "prompts?": {f"{side}?": str for side in SIDES}, "similarity?": SIMILARITIES,
  "matryoshka_dims?": [int], "query_length?": int, "simcse?": bool,
  "text_column?": str, "text_pair_column?": str, "score_column?": (str, None),
  "negative_columns?": [str],
}  # fmt: skip


# Flags that count when a run begins, and do nothing to a start that resumes it.
ORIGIN = (
  "init_checkpoint", "initial_weights", "cooldown_from", "rewarmup",
  "other_vocabulary",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Description:
  """What the files of one folder say; without a file its part is empty."""

  folder: str
  starts: tuple[dict, ...]  # of run.json, the oldest first
  task: dict  # task.json's content, or what a Hugging Face folder says of it
  notes: tuple[str, ...] = ()  # lines about what its files leave open
  # The update whose checkpoint is meant; None: all that the run makes.
  step: int | None = None

  @property
  def training(self) -> dict | None:
    """The newest start that trained: one that only evaluates has no plan."""
    return self.start_of(None) or None

  def start_of(self, step: int | None) -> dict:
    """The start that made update `step`, or the newest; {} if none trained."""
    trainings = [start for start in self.starts if start.get("plan")]
    # The last that fits: later ones found nothing left, or made later updates.
    for start in reversed(trainings):
      if step is None or start.get("first_update", 0) < max(1, step):
        return start
    return trainings[-1] if trainings else {}

  @property
  def is_huggingface(self) -> bool:
    return huggingface_folder.is_folder(self.folder)

  @property
  def bert_file(self) -> str:
    """The BERT config's file, whether or not it is there."""
    name = THEIR_CONFIG if self.is_huggingface else CONFIG_FILE
    return os.path.join(self.folder, name)

  @functools.cached_property
  def bert(self) -> BertConfig | None:
    """The file's, or that of `step`'s stage; `UserError` if it is damaged."""
    if self.is_huggingface:
      return huggingface_config.read_config(self.folder).config
    if not (self.folder and os.path.exists(self.bert_file)):
      return None
    bert = BertConfig.from_json_file(self.bert_file)
    start = {} if self.step is None else self.start_of(self.step)
    stage = (start.get("plan") or {}).get("stage", {}).get("number", 0)
    items = start.get("flags", {}).get("stages") or ()
    for item in items[stage : stage + 1]:
      bert = stages.model_of(bert, item)
      bert.validate(f"{self.bert_file}, in stage {stage + 1}")
    return bert

  @property
  def learned(self) -> dict:
    """The known ones of "objective" and "segment_ids", as in task.json."""
    flags = self.training["flags"] if self.training else self.task
    known, segments = {}, flags.get("segment_ids")
    if flags.get("objective"):
      known["objective"] = flags["objective"]
      if self.training:
        segments = agreement.uses_segments(flags["objective"], segments)
    if segments is not None:
      known["segment_ids"] = segments
    return known

  @property
  def learned_from(self) -> str:
    """The file that says what the model `learned`."""
    return os.path.join(self.folder, RUN_FILE if self.training else TASK_FILE)

  @property
  def data(self) -> dict:
    """What the training up to `step` read, as in run.json, or {}."""
    data = self.start_of(self.step).get("data")
    for start in reversed(self.starts):  # of a start without a plan
      data = data or start["data"]
    return data or {}

  @property
  def tokenizer(self) -> TokenizerInfo | None:
    """The tokenizer of the records of `data`."""
    known = self.data.get("tokenizer")
    return TokenizerInfo(**known) if known else None

  @property
  def _data_of_stages(self) -> list[dict]:
    """What the training's stages read, the last one's first."""
    # Of a stage that was started several times the last start counts.
    by_stage = {}
    for start in self.starts:
      if start.get("data"):
        stage = (start.get("plan") or {}).get("stage") or {}
        by_stage[stage.get("number", 0)] = start["data"]
    return [by_stage[number] for number in sorted(by_stage, reverse=True)]

  @property
  def record_files(self) -> list[str]:
    """The record files of all stages as named, the last one's first."""
    names: dict[str, None] = {}
    for data in self._data_of_stages:
      names |= dict.fromkeys(data["files"])
    return [*names]

  def _where_read(self, data: dict) -> Iterator[tuple[list[str], dict]]:
    """(files, their manifests) wherever those that a run read may be now."""
    # Names in run.json may be relative to any folder above it. Files of these
    # names may have become others: manifests tell.
    above = [*map(str, pathlib.Path(os.path.abspath(self.folder)).parents), ""]
    for folder in above:
      paths = [os.path.join(folder, file) for file in data["files"]]
      manifests = data_set.find_manifests(paths)
      known = data.get("contents"), data_set.digest(paths, manifests)
      if None in known or known[0] == known[1]:
        yield paths, manifests

  def records_now(self) -> list[str]:
    """Where `record_files` are now; [] if one is not there, or is another."""
    now: dict[str, None] = {}
    for data in self._data_of_stages:
      for paths, _ in self._where_read(data):
        if all(stores.at(path).is_file() for path in paths):
          now |= dict.fromkeys(paths)
          break
      else:
        return []
    return [*now]

  def manifest(self) -> tuple[str, data_set.Manifest] | None:
    """(path, manifest) of `data`, or None."""
    known = self.tokenizer
    for paths, manifests in self._where_read(self.data) if self.data else ():
      listing = manifests.get(paths[0]) if paths else None
      # Nor is one of another vocabulary or case its own.
      if listing and (not known or known.is_like(listing[1].tokenizer)):
        return listing
    return None

  def vocabulary(self) -> dict[str, str]:
    """Flag -> file of `tokenizer`: beside the model, or near the records."""
    known, listing = self.tokenizer, self.manifest()
    if not known:
      return {}
    beside = [os.path.dirname(listing[0])] if listing else []
    path = record_report.find_vocabulary(known, *beside, self.folder)
    flag = kinds.KINDS[known.kind].flag
    return {flag: os.path.abspath(path)} if path else {}

  def facts(self) -> dict[str, Any]:
    """What `agreement.agree` compares, by the fields of settings."""
    # run.json has the BERT config that was trained; a folder without it, such
    # as google/bert's, has a file.
    training, known = self.training, {}
    if training:
      known = agreement.of_start(
        training["flags"], training["plan"], training["data"]
      )
    elif self.bert:
      known = agreement.of_start({"bert": self.bert.to_dict()})
    return known | agreement.of_task(self.task)


NOTHING = Description("", (), {})


def of_one_run(flags: dict, first: dict) -> dict:
  """The flags of a start that resumes, with those of `ORIGIN` as at `first`."""
  kept = {}
  for name, value in flags.items():
    if name not in ORIGIN:
      kept[name] = value
    elif name in first:
      kept[name] = first[name]
  return kept


def read(folder: str) -> Description:
  """What a folder says; "" is none. Raises `DataError` for a damaged file."""
  remedy = (
    "bring back the file that the training wrote, move it away, or give "
    "another folder"
  )
  contents: list[dict] = []
  for name, form in ((RUN_FILE, _RUNS), (TASK_FILE, _TASK)):
    path = os.path.join(folder, name)
    is_there = bool(folder) and os.path.exists(path)
    contents.append(json_files.read_own(path, remedy, form) if is_there else {})
  run, task = contents
  # Older versions wrote flags of `ORIGIN` also as a resumed run was given them,
  # and not which starts resumed it: those after the first one's update.
  starts, first = list[dict](), dict[str, Any]()
  for start in run.get("runs", ()):
    # From here on each start has these keys.
    start = {"flags": {}, "plan": None, "data": None, **start}
    step = start.get("first_update", 0)
    is_later = first.get("first_update", 0) < step
    if start["plan"] and first and start.get("resumed", is_later):
      start["flags"] = of_one_run(start["flags"], first["flags"])
    elif start["plan"]:
      first = start
    starts.append(start)
  notes: list[str] = []
  if huggingface_folder.is_folder(folder):
    task, notes = huggingface_folder.read_task(folder, task)
  return Description(folder, tuple(starts), task, tuple(notes))


def folder_of(checkpoint: str | None) -> str:
  """The folder that says what a checkpoint is: itself, if it is a folder."""
  if checkpoint and os.path.isdir(checkpoint):
    return checkpoint
  return os.path.dirname(checkpoint or "")


def shared(evaluated: Sequence[str], trained: Sequence[str]) -> list[str]:
  """The files to evaluate on that are files that are trained on."""
  known = set(map(os.path.realpath, trained))
  return [path for path in evaluated if os.path.realpath(path) in known]


def is_held_out(start: dict, trained: Sequence[str]) -> bool | None:
  """Whether a start evaluates on no file that was `trained` on.

  None if that is not known: its files are not there, or it is a fine-tuning.
  """
  flags = start.get("flags", {})
  if "eval_input_file" not in flags:
    return None
  patterns = flags["eval_input_file"] or ""
  try:
    evaluated = input_files.expand_patterns(patterns) if patterns else []
    return bool(evaluated) and not shared(evaluated, trained)
  except DataError:
    return None
