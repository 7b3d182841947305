"""Whether a run agrees with what its folder, or its model's, says.

Both sides are facts: name -> value. A setting is named as its field, a key of
the BERT config "bert.KEY"; `OTHERS` has the facts that are no settings.
run.json and task.json are read into the same names.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from common import json_files
from common.errors import UserError
from common.files import file_sha256
from config import bert_config
from model.tasks import CLASSIFIER, FINETUNED, PRETRAINING
from text_encoders.base import TokenizerInfo

BERT_FLAG = "--bert_config_file"
_BERT = "bert."
# Facts that are no settings -> their names for people.
OTHERS = {
  "task": "task",
  "labels": "labels",
  "pairs": "pairs of texts",
  "vocabulary": "vocabulary",
  "vocabulary_kind": "kind of vocabulary",
  "ranks": "ranks",
  "updates": "updates",
  "warmup_updates": "updates of warm-up",
  "record_files": "record files",
  "records": "records",
  "contents": "contents of records",
  "is_staged": "stages",
  "begun_stages": "stages that have begun",
  "lr_factor": "factor of --lr_scaling",
  "normalize": "vectors of length 1",
  "similarity": "similarity of vectors",
}
# Keys of task.json about a run's files, which no other run need have.
OF_FILES = ("vocabulary", "best_by", "exported_from")


def title(fact: str) -> str:
  """A fact's name for people: a flag, unless it is one of `OTHERS`."""
  if fact.startswith(_BERT):
    return f"{BERT_FLAG}: {fact.removeprefix(_BERT)}"
  return OTHERS.get(fact, f"--{fact}")


# What must agree: whatever uses the model, a training that resumes, or a stage
# that does.
MODEL, RUN, STAGE = "model", "run", "stage"
START = "start"  # before the plan of a training that resumes is made


class Fixed(NamedTuple):
  """How far a folder fixes a fact, and what to do about another value."""

  scope: str
  remedy: str
  kinds: Collection[str] = (PRETRAINING, *FINETUNED)


_SAME_MODEL = (
  "its model was trained with the former. Leave the flag out, or use another "
  "--output_dir (with a checkpoint as --init_checkpoint to keep its weights)"
)
_SAME_LABELS = (
  "its model was trained with the former. If these are other names of the same "
  "labels, write them into its task.json, or as id2label into its config.json; "
  "if not, train in another --output_dir"
)
_SAME_VOCABULARY = (
  "a model has one vocabulary. Make all records with the model's own, such as "
  "vocab.txt in its folder, and give no other one as a flag"
)
NEW_RUN = (
  "start a new run in another --output_dir (with --init_checkpoint to keep the "
  "weights)"
)
_SAME_RUN = f"give the former to resume it, or {NEW_RUN}"
# fmt: off
# The rows are refused in this order. A test walks them.
FIXED = {
  "task": Fixed(MODEL, _SAME_MODEL),
  "vocabulary_kind": Fixed(MODEL, _SAME_MODEL),
  "vocabulary": Fixed(MODEL, _SAME_VOCABULARY),
  "objective": Fixed(MODEL, _SAME_MODEL),
  "segment_ids": Fixed(MODEL, _SAME_MODEL),
  # What changes a model's answers.
  **dict.fromkeys(
    [f"{_BERT}{key}" for key in bert_config.model_keys()],
    Fixed(MODEL, _SAME_MODEL),
  ),
  **dict.fromkeys(
    (
      "do_lower_case", "max_seq_length", "regression", "multi_label", "pairs",
      "metrics", "doc_stride", "max_query_length", "version_2_with_negative",
      "pooling", "query_prompt", "document_prompt", "include_prompt",
      "query_length",
    ),
    Fixed(MODEL, _SAME_MODEL, FINETUNED),
  ),
  "labels": Fixed(MODEL, _SAME_LABELS, FINETUNED),
  **dict.fromkeys(
    (
      "text_column", "text_pair_column", "label_column", "label_columns",
      "label_separator", "word_column",
      "tokens_field", "tags_field", "n_best_size", "max_answer_length",
      "null_score_diff_threshold", "score_column", "simcse",
      "negative_columns",
    ),
    Fixed(RUN, _SAME_RUN, FINETUNED),
  ),
  **dict.fromkeys(("max_train_minutes", "is_staged"), Fixed(RUN, _SAME_RUN)),
  **dict.fromkeys(("cooldown_from", "begun_stages"), Fixed(START, _SAME_RUN)),
  **dict.fromkeys(
    ("seed", "shuffle_block_records", "records"), Fixed(STAGE, _SAME_RUN)),
  "lr_factor": Fixed(RUN, "to resume it as it was give {keep}"),
}
# fmt: on


def scopes(trains: bool) -> tuple[str, ...]:
  """What must agree with a model's folder before anything is read."""
  return (MODEL, RUN) if trains else (MODEL,)


def agree(
  before: Mapping,
  now: Mapping,
  folder: str,
  scopes: Collection[str] = (MODEL, RUN, STAGE),
  keep: str = "",
) -> list[str]:
  """Lines about what changed; `UserError` for what `folder` has fixed.

  `keep`: the flags that keep what several of them decide, for the remedy.
  """
  changed = {}
  # A fact that only one side has is not known, and changes nothing.
  for fact, value in now.items():
    if fact in before and before[fact] != value:
      values = f"{shown(before[fact])} -> {shown(value)}"
      changed[fact] = f"{title(fact)} {values}"
  # The order of `FIXED`: what explains most is refused first.
  kind = before.get("task", PRETRAINING)
  for fact, fixed in FIXED.items():
    if fact in changed and fixed.scope in scopes and kind in fixed.kinds:
      remedy = fixed.remedy.format(keep=keep)
      raise UserError(f"{folder}: {changed[fact]}: {remedy}")
  return [*changed.values()]


# Facts ------------------------------------------------------------------------


def uses_segments(objective: str | None, segment_ids: bool | None) -> bool:
  """Whether a model learns second segments, by its training's two flags."""
  return objective != "mlm" if segment_ids is None else segment_ids


def by_field(settings: Mapping) -> Iterator[tuple[str, Any]]:
  """(field, value) of settings that are nested as in run.json."""
  # As a file would have them: then a tuple equals the list that was written.
  for name, value in json_files.parse(json_files.text(settings)).items():
    if name == "bert":  # whose file leaves keys out
      for key, number in bert_config.complete(value).items():
        yield f"{_BERT}{key}", number
    elif isinstance(value, dict):
      yield from by_field(value)
    else:
      yield name, value


def of_start(
  flags: Mapping, plan: Mapping | None = None, data: Mapping | None = None
) -> dict[str, Any]:
  """Facts of a start of a run, as run.json has it."""
  known = dict(by_field(flags))
  if known.get("objective"):
    # What the model learned counts, not whether the flag was written.
    used = uses_segments(known["objective"], known.get("segment_ids"))
    known["segment_ids"] = used
  else:  # as the records say, of a run that Python code started
    known.pop("objective", None)
    known.pop("segment_ids", None)
  if "stages" in flags:
    known["is_staged"] = "given" if flags["stages"] else "none"
  for name in ("ranks", "updates", "warmup_updates"):
    if plan and name in plan:
      known[name] = plan[name]
  if data:
    known["record_files"] = [*data["files"]]
    for name in ("records", "contents"):
      if data.get(name):
        known[name] = data[name]
    if data.get("tokenizer"):
      known["vocabulary"] = vocabulary(TokenizerInfo(**data["tokenizer"]))
  return known


def of_task(task: Mapping) -> dict[str, Any]:
  """Facts of a task.json."""
  known: dict[str, Any] = {}
  for key, value in task.items():
    if key == "columns":
      known |= {f"{name}_column": column for name, column in value.items()}
      known["pairs"] = bool(value.get("text_pair"))
    elif key == "prompts":
      known |= {f"{side}_prompt": prompt for side, prompt in value.items()}
    elif key == "matryoshka_dims":  # as its flag
      known[key] = [str(size) for size in value]
    elif key not in OF_FILES:
      known[key] = value
  if task.get("task") == CLASSIFIER:
    known["multi_label"] = task.get("multi_label", False)
    if "labels" in task:
      known["regression"] = not task["labels"]
  return known


def of_vocabulary_files(files: Mapping[str, str]) -> dict[str, str]:
  """Facts of a `named_vocabulary`: flag -> file."""
  known = {}
  for flag, path in files.items():
    known["vocabulary_kind"] = f"--{flag}"
    if os.path.exists(path):
      known["vocabulary"] = f"SHA-256 {file_sha256(path)[:12]}"
  return known


def vocabulary(info: TokenizerInfo) -> str:
  """All that decides a text's tokens."""
  return f"{info.case} {info.kind} of SHA-256 {info.sha256[:12]}"


def agree_on_tokens(
  before: TokenizerInfo | None, now: TokenizerInfo | None, files: str
) -> None:
  """Raises `UserError` unless `files` have the same tokens; None: unknown."""
  if before and now:
    was = {"vocabulary": vocabulary(before)}
    agree(was, {"vocabulary": vocabulary(now)}, files, (MODEL,))


_MOST_SHOWN = 10  # items of a list


def shown(value) -> str:
  """A value as it is written in a command."""
  if isinstance(value, list):
    more = ["..."] if len(value) > _MOST_SHOWN else []
    return ",".join([*map(str, value[:_MOST_SHOWN]), *more]) or "(empty)"
  if isinstance(value, bool):
    return str(value).lower()
  return "(not given)" if value is None else str(value)
