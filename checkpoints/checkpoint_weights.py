"""The weights of checkpoints, or their mean, without slots and other state."""

import collections
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from checkpoints import checkpoint_files, huggingface_folder
from checkpoints.checkpoint_files import Checkpoint, CheckpointError
from common.files import file_sha256
from config.optimizers import AVERAGE
from model import huggingface_config, huggingface_weights

STATE = re.compile(
  r"global_step|applied_updates|skipped_updates|beta[12]_power"
  r"|(training_state|loss_scale|spike_guard|averages)/.*"
)


class HuggingFaceWeights(Checkpoint):
  """The weights of a Hugging Face folder, under our names; all in memory."""

  def __init__(self, folder: str):
    self.path = folder
    known = huggingface_config.read_config(folder)
    self._values, tied = huggingface_weights.from_huggingface(
      huggingface_weights.read_tensors(folder), known, folder
    )
    self.shapes = {n: list(value.shape) for n, value in self._values.items()}
    self.left_out = [f"{name} (follows from the rest)" for name in tied]

  def __getitem__(self, name: str) -> np.ndarray:
    return self._values[name]


def open_checkpoint(path: str) -> Checkpoint:
  """The weights of a checkpoint's prefix or of a Hugging Face folder."""
  if huggingface_folder.is_folder(path):
    return HuggingFaceWeights(path)
  return Checkpoint(checkpoint_files.prefix_of(path))


def digest(path: str) -> str:
  """The same for equal weights, of a checkpoint or of a model's folder."""
  if huggingface_folder.is_folder(path):
    files = huggingface_weights.files(path)
  else:  # an index has a CRC of each tensor
    prefix = f"{path}/variables/variables" if os.path.isdir(path) else path
    files = [f"{prefix}.index"]
  return " ".join(file_sha256(file)[:16] for file in files)


class Weights(NamedTuple):
  """The weights of one model."""

  values: dict[str, np.ndarray]  # float32, by name
  left_out: list[str]  # what else the files have, as lines for people


def read(prefixes: Sequence[str], of_average: bool = False) -> Weights:
  """The mean of some checkpoints' weights, which must have equal shapes.

  `of_average`: of the averages that --average_updates keeps beside them.
  """
  checkpoints = [_open(prefix) for prefix in dict.fromkeys(prefixes)]
  first, *others = checkpoints
  shapes = _weight_shapes(first)
  for other in others:
    others_shapes = _weight_shapes(other)
    for name in sorted(shapes.keys() | others_shapes.keys()):
      here, there = shapes.get(name), others_shapes.get(name)
      if here != there:
        raise CheckpointError(
          f"{other.path}: {name} has shape {there} there, but {here} in "
          f"{first.path} (None: missing). Only checkpoints of one model have a "
          "mean"
        )
  values = {}
  for name in sorted(shapes):
    arrays = []
    for checkpoint in checkpoints:
      if of_average and f"{name}/{AVERAGE}" not in checkpoint.shapes:
        raise no_average(checkpoint.path)
      array = checkpoint[f"{name}/{AVERAGE}" if of_average else name]
      if array.dtype.kind in "iubSUO":
        raise CheckpointError(
          f"{checkpoint.path}: {name} is {array.dtype}, neither a weight nor "
          "known as training state"
        )
      arrays.append(array)
    # In float64, so that the mean of one array is its exact values.
    total, *more = arrays
    mean = sum(more, total.astype(np.float64)) / len(checkpoints)
    values[name] = mean.astype(np.float32)
  state, left_out = set[str](), list[str]()
  for checkpoint in checkpoints:
    state |= checkpoint.shapes.keys() - shapes.keys()
    left_out += checkpoint.left_out
  return Weights(values, _state_lines(state) + left_out)


def _open(prefix: str) -> Checkpoint:
  # A run of ours has a marker, which says whether the files are whole.
  step = checkpoint_files.step_of(prefix)
  if step is not None and os.path.exists(prefix + ".json"):
    folder = os.path.dirname(prefix)
    checkpoint_files.CheckpointFiles(folder, keep=1).check(step)
  return open_checkpoint(prefix)


def _weight_shapes(checkpoint: Checkpoint) -> dict[str, list]:
  """The shapes of weights alone."""
  weights = {}
  for name, shape in checkpoint.shapes.items():
    # A slot is named after its variable: VARIABLE/adam_m.
    is_slot = name.rpartition("/")[0] in checkpoint.shapes
    if not (is_slot or STATE.fullmatch(name)):
      weights[name] = shape
  return weights


def _state_lines(names) -> list[str]:
  """Counts slots by kind; names anything else."""
  kinds: collections.Counter[str] = collections.Counter()
  lines = []
  for name in sorted(names):
    owner, _, kind = name.rpartition("/")
    if owner and not STATE.fullmatch(name):
      kinds[kind] += 1
    else:
      lines.append(name)
  return [f"{n} slots {kind}" for kind, n in kinds.items()] + lines


def no_average(path: str) -> CheckpointError:
  """The error of a checkpoint whose averages are asked for."""
  return CheckpointError(
    f"{path}: it has no average of weights: its training had no "
    "--average_updates"
  )
