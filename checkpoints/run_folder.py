"""A run's folder: what a start writes, and the lock that keeps others out."""

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import time

from checkpoints import description
from common import json_files
from common import tensorflow_v1 as later
from common.errors import UserError
from common.files import file_sha256, lock, write
from records import record_report
from text_encoders import kinds
from text_encoders.base import Encoder, config_beside

EVAL_RESULTS_FILE = "eval_results.json"
TRAINING_RESULTS_FILE = "training_results.json"


def is_written(config) -> bool:
  """Whether a run writes into its folder: an evaluation does where it may."""
  if config.do_train or config.do_predict:
    return True
  folder = config.output_dir
  return not os.path.isdir(folder) or os.access(folder, os.W_OK)


@contextlib.contextmanager
def locked(folder: str, comm=None, is_written: bool = True):
  """Rank 0 keeps other runs out of `folder`, if it writes there, in its block.

  Without `comm` there is no other rank.
  """
  if (comm and not comm.is_root) or not is_written:
    yield
    return
  # The system frees the lock however the process ends. In an elastic run rank 0
  # of a later world may take over from one that hangs. At the end the file is
  # removed, and a folder that was made for it.
  path = os.path.join(folder, "run.lock")
  is_new = not os.path.isdir(folder)
  with contextlib.ExitStack() as files:
    f = None
    while f is None or not os.fstat(f.fileno()).st_nlink:
      # The previous run may have ended and removed the file: then again.
      os.makedirs(folder, exist_ok=True)
      f = files.enter_context(open(path, "a+", encoding="utf-8"))
      is_held = _take(f, folder, comm)
    try:
      yield
    finally:
      if is_held:
        os.unlink(path)
      if is_held and is_new:
        with contextlib.suppress(OSError):  # it holds a run
          os.rmdir(folder)


def _take(f, folder: str, comm) -> bool:
  """False if another rank 0 of the same job holds the lock."""
  try:
    lock(f, folder)
  except UserError as e:
    f.seek(0)
    holder, _, job = f.read().partition("\n")
    if comm and comm.elastic and job == _job():
      return False
    raise UserError(
      f"--output_dir={folder} is in use by {holder or 'another run'}. Wait for "
      "it, stop it (SIGTERM saves), or use another --output_dir: also to "
      "evaluate its checkpoints meanwhile, given as --init_checkpoint"
    ) from e
  f.truncate(0)
  started, host = time.strftime("%Y-%m-%d %H:%M:%S"), socket.gethostname()
  f.write(f"process {os.getpid()} on {host} since {started}\n{_job()}")
  f.flush()
  return True


def _job() -> str:
  """The same in all processes that one horovodrun started."""
  names = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
  return ":".join(os.environ.get(name, "") for name in names)


def versions() -> dict:
  """Versions that decide a run's numbers, with the source's git revision."""
  version: dict = {"python": platform.python_version()}
  version["tensorflow"] = later.tf.__version__
  for name in ("horovod", "numpy", "tokenizers"):
    version[name] = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      version[name] = importlib.metadata.version(name)
  folder = os.path.dirname(os.path.abspath(__file__))
  command = ["git", "-C", folder, "describe", "--always", "--dirty"]
  version["git"] = None  # without git, or in no checkout
  with contextlib.suppress(OSError):
    done = subprocess.run(command, capture_output=True, text=True)
    version["git"] = done.stdout.strip() or None
  return version


def write_start(config, task, step: int, resumed: bool) -> None:
  """Adds a start after update `step` to run.json; a training's BERT config.

  `task` is its `train_loop.Task`, or None; `resumed`: the run went on.
  """
  if task:
    path = os.path.join(config.output_dir, description.CONFIG_FILE)
    json_files.write(path, config.bert.to_dict())
  before, flags = description.read(config.output_dir), config.as_dict()
  if resumed:
    last = before.training or {"flags": {}}
    flags = description.of_one_run(flags, last["flags"])
  start = {
    "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    "first_update": step,
    "resumed": resumed,  # else starts before it have saved nothing
    "command": sys.argv[1:],  # as typed; the flags are what came of it
    "flags": flags,
    "plan": dataclasses.asdict(task.plan) if task else None,
    "data": task.source.describe() if task else None,
    "versions": versions(),
    "devices": [d.name for d in later.tf.config.list_physical_devices()],
  }
  path = os.path.join(config.output_dir, description.RUN_FILE)
  json_files.write(path, {"runs": [*before.starts, start]})


def keep_vocabulary(config, manifests: dict) -> None:
  """Copies the vocabulary of a training's records into its folder."""
  # It is near the records, or beside the model that the run starts from.
  start = description.folder_of(config.init_checkpoint)
  for manifest_path, manifest in manifests.values():
    info = manifest.tokenizer
    folders = [os.path.dirname(manifest_path)]
    if start:
      folders.append(start)
    path = record_report.find_vocabulary(info, *folders)
    copy = os.path.join(config.output_dir, os.path.basename(info.file))
    # One that is there may be of a start that saved nothing.
    is_there = os.path.exists(copy) and file_sha256(copy) == info.sha256
    if path and not is_there:
      encoder = kinds.KINDS[info.kind](path, info.do_lower_case)
      copy_vocabulary(encoder, config.output_dir)
      json_files.write(config_beside(copy), encoder.config())


def write_task(folder: str, task: dict, encoder: Encoder) -> None:
  """Writes task.json with a copy of the encoder's file."""
  name = copy_vocabulary(encoder, folder)
  content = {**task, "vocabulary": {encoder.flag: name}}
  json_files.write(os.path.join(folder, description.TASK_FILE), content)


def copy_vocabulary(encoder: Encoder, folder: str) -> str:
  """Copies an encoder's files, unless they are there; the vocabulary's name."""
  name = os.path.basename(encoder.file)
  if os.path.realpath(encoder.file) != os.path.realpath(f"{folder}/{name}"):
    for file, content in encoder.files(name).items():
      write(os.path.join(folder, file), content)
  return name
