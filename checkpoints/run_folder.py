"""A run's folder: run.json describes the run, run.lock keeps others out."""

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import itertools
import os
import pathlib
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence

import tokenization
from common import json_files, settings
from common.console import tell
from common.errors import DataError, UserError
from common.files import file_sha256
from common.tensorflow_v1 import later as tf
from data import record_report, records
from model import bert_config

_MOST_SHOWN = 8  # items of a list
RUN_FILE = "run.json"
BERT_CONFIG_FLAG = "--bert_config_file"
LOCK_FILE = "run.lock"
EVAL_RESULTS_FILE = "eval_results.json"
TRAINING_RESULTS_FILE = "training_results.json"


@contextlib.contextmanager
def locked(folder: str, comm):
  """Rank 0 keeps other runs out of `folder` while its block runs.

  The system frees the lock however the process ends. In an elastic run rank 0
  of a later world may take over from one that hangs. At the end the file is
  removed, and a folder that was made for it.
  """
  if not comm.is_root:
    yield
    return
  path, was_there = os.path.join(folder, LOCK_FILE), os.path.isdir(folder)
  with contextlib.ExitStack() as files:
    f = None
    while f is None or not os.fstat(f.fileno()).st_nlink:
      # The previous run may have ended and removed the file: then again.
      os.makedirs(folder, exist_ok=True)
      f = files.enter_context(open(path, "a+", encoding="utf-8"))
      owned = _take(f, folder, comm)
    try:
      yield
    finally:
      if owned:
        os.unlink(path)
        if not was_there:
          with contextlib.suppress(OSError):  # it holds a run
            os.rmdir(folder)


def _take(f, folder: str, comm) -> bool:
  """False if another rank 0 of the same job holds the lock."""
  try:
    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as e:
    f.seek(0)
    holder, _, job = f.read().partition("\n")
    if comm.elastic and job == _job():
      return False
    raise UserError(
      f"--output_dir={folder} is in use by {holder or 'another run'}. Wait for "
      "it, stop it (SIGTERM saves), or use another --output_dir: also to "
      "evaluate its checkpoints meanwhile, given as --init_checkpoint"
    ) from e
  except OSError as e:
    tell(
      f"{folder}: cannot be locked ({e.strerror}); make sure that no other run "
      "uses it"
    )
  f.truncate(0)
  started = time.strftime("%Y-%m-%d %H:%M:%S")
  f.write(
    f"process {os.getpid()} on {socket.gethostname()} since {started}\n{_job()}"
  )
  f.flush()
  return True


def _job() -> str:
  """The same in all processes that one horovodrun started."""
  names = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
  return ":".join(os.environ.get(name, "") for name in names)


def versions() -> dict:
  """Versions that decide a run's numbers, with the source's git revision."""
  found = {"python": platform.python_version(), "tensorflow": tf.__version__}
  for name in ("horovod", "numpy", "tokenizers"):
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = None
  folder = os.path.dirname(os.path.abspath(__file__))
  command = ["git", "-C", folder, "describe", "--always", "--dirty"]
  try:
    done = subprocess.run(command, capture_output=True, text=True)
    found["git"] = done.stdout.strip() or None  # None: not a git checkout
  except OSError:
    found["git"] = None
  return found


def write_run_file(config, task) -> None:
  """Adds a run to run.json; `task` is its `train_loop.Task` or None."""
  run = {
    "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    "flags": config.as_dict(),
    "plan": dataclasses.asdict(task.plan) if task else None,
    "data": task.source.describe() if task else None,
    "versions": versions(),
    "devices": [d.name for d in tf.config.list_physical_devices()],
  }
  path = os.path.join(config.output_dir, RUN_FILE)
  json_files.write(path, {"runs": [*_runs(config.output_dir), run]})


def _runs(output_dir: str) -> list[dict]:
  path = os.path.join(output_dir, RUN_FILE)
  if not os.path.exists(path):
    return []
  remedy = "move it away, or give another folder"
  found = json_files.read_own(path, remedy)
  made = isinstance(found, dict) and found.get("runs")
  if not isinstance(made, list) or not all(isinstance(r, dict) for r in made):
    raise DataError(f"{path}: not a run's record; {remedy}")
  return made


def last_training(output_dir: str, key: str = "plan") -> dict | None:
  """The newest run with a value of `key`: an evaluation alone has none."""
  runs = (run for run in reversed(_runs(output_dir)) if run.get(key))
  return next(runs, None)


def _training_data(output_dir: str) -> list[dict]:
  """What the training's stages read, the last one's first."""
  found = {}
  for run in _runs(output_dir):
    if run.get("data"):
      stage = (run.get("plan") or {}).get("stage") or {}
      found[stage.get("number", 0)] = run["data"]
  return [found[number] for number in sorted(found, reverse=True)]


def training_files(output_dir: str) -> list[str]:
  """The record files of the training's stages, the last one's first."""
  files = (data["files"] for data in _training_data(output_dir))
  return [*dict.fromkeys(itertools.chain(*files))]


def shared(evaluated: Sequence[str], trained: Sequence[str]) -> list[str]:
  """The files to evaluate on that are files that are trained on."""
  known = set(map(os.path.realpath, trained))
  return [path for path in evaluated if os.path.realpath(path) in known]


def is_held_out(run: dict, trained: Sequence[str]) -> bool | None:
  """Whether a run of run.json evaluates on no file that it has `trained` on.

  None if that is not known: its files are not there, or it is a fine-tuning.
  """
  flags = run.get("flags", {})
  if "eval_input_file" not in flags:
    return None
  patterns = flags["eval_input_file"] or ""
  try:
    evaluated = records.expand_patterns(patterns) if patterns else []
    return bool(evaluated) and not shared(evaluated, trained)
  except DataError:
    return None


def _places(folder: str) -> list[str]:
  """Folders that names in run.json may be relative to: those above it."""
  above = pathlib.Path(os.path.abspath(folder)).parents
  return [*map(str, above), ""]


def training_records(folder: str) -> list[str]:
  """Where the files of `training_files` are now.

  [] if one is not there, or if by its manifest others are there by now.
  """
  stages = _training_data(folder)
  for place in _places(folder):
    each = [[os.path.join(place, f) for f in data["files"]] for data in stages]
    paths = [*dict.fromkeys(itertools.chain(*each))]
    if all(map(os.path.isfile, paths)) and all(map(_as_read, each, stages)):
      return paths
  return []


def _as_read(paths: list[str], data: dict) -> bool:
  """Whether files are those that a run read, as far as that is known."""
  said = data.get("contents")  # older runs do not say
  found = records.digest(paths, records.find_manifests(paths))
  return None in (said, found) or said == found


def manifest(folder: str) -> tuple[str, records.Manifest] | None:
  """(path, manifest) of the records that the newest training read, or None.

  One of other records, or of another vocabulary or case, is not theirs.
  """
  known = _tokenizer(folder)
  data = (last_training(folder, "data") or {"data": {}})["data"]
  files, contents = data.get("files", []), data.get("contents")
  for place in _places(folder):
    paths = [os.path.join(place, file) for file in files]
    manifests = records.find_manifests(paths)
    if contents not in (None, records.digest(paths, manifests)):
      continue
    found = manifests.get(paths[0]) if paths else None
    if found and (not known or known.is_like(found[1].tokenizer)):
      return found
  return None


def _tokenizer(folder: str) -> tokenization.TokenizerInfo | None:
  run = last_training(folder, "data")
  known = run and run["data"].get("tokenizer")  # older runs do not say
  return tokenization.TokenizerInfo(**known) if known else None


def tokenizer(folder: str) -> tuple[str, tokenization.TokenizerInfo] | None:
  """(file that names it, tokenizer) of the newest training's records."""
  if known := _tokenizer(folder):
    return os.path.join(folder, RUN_FILE), known
  found = manifest(folder)
  return (found[0], found[1].tokenizer) if found else None


def keep_vocabulary(folder: str, manifests: dict) -> None:
  """Copies the vocabulary of a training's records into its folder."""
  for path, made in manifests.values():
    found = record_report.find_vocabulary(made.tokenizer, os.path.dirname(path))
    copy = os.path.join(folder, os.path.basename(made.tokenizer.file))
    # One that is there may be of a start that saved nothing.
    if found and not (
      os.path.exists(copy) and file_sha256(copy) == made.tokenizer.sha256
    ):
      shutil.copyfile(found, f"{copy}.tmp")
      os.replace(f"{copy}.tmp", copy)


def flat(settings: dict, form: str = "--{}") -> dict:
  """Name for people -> value, of settings that are nested as in run.json."""
  found: dict = {}
  for name, value in json_files.parse(json_files.text(settings)).items():
    if isinstance(value, dict):
      inner = f"{BERT_CONFIG_FLAG}: {{}}" if name == "bert" else form
      found |= flat(value, inner)
    else:
      found[form.format(name)] = value
  return found


def _shown(value) -> str:
  """A setting's value as it is written in a command."""
  if isinstance(value, list):
    more = ["..."] if len(value) > _MOST_SHOWN else []
    return ",".join([*map(str, value[:_MOST_SHOWN]), *more]) or "(empty)"
  if isinstance(value, bool):
    return str(value).lower()
  return "(not given)" if value is None else str(value)


def uses_segments(objective: str | None, segment_ids: bool | None) -> bool:
  """Whether a model learns second segments, by its training's two flags."""
  return objective != "mlm" if segment_ids is None else segment_ids


def check_model(before: dict, flags: dict) -> None:
  """Raises `UserError` if `flags` make another model than those of `before`.

  Both are nested as in run.json.
  """
  keys = bert_config.keys_that_change(bert_config.SHAPE, bert_config.RESULT)
  old = {"--objective": records.OBJECTIVES[0], **flat(before["flags"])}
  new = flat(flags)
  for one in (old, new):
    if objective := one.get("--objective"):
      given = one.get("--segment_ids")
      one["--segment_ids"] = uses_segments(objective, given)
  names = ("--objective", "--segment_ids")
  for name in (*names, *(f"{BERT_CONFIG_FLAG}: {key}" for key in keys)):
    # None: as the records say, of a run that Python code started.
    known = None not in (old.get(name), new.get(name))
    if known and old[name] != new[name]:
      raise UserError(
        f"{name} {_shown(old[name])} -> {_shown(new[name])}: the run in this "
        "folder is of the former model. Give its setting, or use another "
        "--output_dir (with this folder as --init_checkpoint to evaluate "
        "another objective)"
      )


def changes_since(before: dict, config, plan, data: dict) -> list[str]:
  """How the run's settings differ from those of `before`, a run.json.

  A flag that an older version did not have was at its default there.
  """
  declared = settings.settings_of(type(config))
  defaults = {one.name: one.default for one in declared if not one.required}
  old = flat(defaults) | flat(before["flags"]) | before["plan"]
  new = flat(config.as_dict())
  for name in ("ranks", "updates", "warmup_updates"):
    new[name] = getattr(plan, name)
  read = before.get("data") or {}
  old["record files"], new["record files"] = read.get("files"), data["files"]
  if read.get("contents"):  # older runs do not say
    old["contents of records"] = read["contents"]
    new["contents of records"] = data.get("contents")
  changed = {
    name: f"{_shown(old[name])} -> {_shown(value)}"
    for name, value in new.items()
    if old.get(name, value) != value
  }
  if "--initial_weights" in changed:
    changed["--initial_weights"] += ", without effect: the run has begun"
  return [f"{name} {values}" for name, values in changed.items()]
