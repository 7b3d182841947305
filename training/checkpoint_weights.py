"""The weights of TensorFlow checkpoints, or their mean, without training state.

Training state are optimizer slots, counters, the loss scale and the position in
the data.
"""

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from training import checkpoint_files
from training.checkpoint_files import CheckpointError

_STATE = re.compile(
  r"global_step|applied_updates|skipped_updates|(training_state|loss_scale)/.*"
  r"|beta[12]_power"
)


class Weights(NamedTuple):
  """The weights of one model."""

  values: dict[str, np.ndarray]  # float32, by name
  left_out: list[str]  # the state, as lines for people


def read(prefixes: Sequence[str]) -> Weights:
  """The mean of some checkpoints' weights.

  Raises:
    CheckpointError: one cannot be read or is not finite, or they are not of
      one shape.
  """
  readers = {prefix: _open(prefix) for prefix in prefixes}
  first, *others = prefixes
  shapes = _weight_shapes(readers[first])
  for prefix in others:
    found = _weight_shapes(readers[prefix])
    names = sorted(
      n for n in shapes.keys() | found.keys() if shapes.get(n) != found.get(n)
    )
    if names:
      raise CheckpointError(
        f"{prefix}: {names[0]} is of shape {found.get(names[0])} there, but "
        f"{shapes.get(names[0])} in {first} (None: missing); {len(names)} "
        "weights differ. Only checkpoints of one model have a mean"
      )
  values = {
    name: _mean([_tensor(r, name, p) for p, r in readers.items()])
    for name in sorted(shapes)
  }
  names = {n for r in readers.values() for n in r.get_variable_to_shape_map()}
  return Weights(values, _state_lines(names - shapes.keys()))


def _open(prefix: str):
  """A reader of a checkpoint that is whole.

  Raises:
    CheckpointError: there is none, or it is damaged.
  """
  folder, name = os.path.split(prefix)
  if os.path.isdir(prefix):
    found = sorted(n for n in os.listdir(prefix) if n.endswith(".index"))
    example = os.path.join(prefix, found[-1][: -len(".index")]) if found else ""
    raise CheckpointError(
      f"{prefix} is a folder without config.json, so not one of Hugging "
      "Face's; of a checkpoint give the name without .index"
      + (f", for example {example}" if found else "")
    )
  own = re.fullmatch(rf"{re.escape(checkpoint_files.PREFIX)}-(\d+)", name)
  if own and os.path.exists(prefix + ".json"):
    checkpoint_files.CheckpointFiles(folder, 1).check(int(own[1]))
  return checkpoint_files.open_reader(prefix)


def _weight_shapes(reader) -> dict[str, list]:
  """Shapes of weights; a slot is named after its variable: VARIABLE/adam_m."""
  shapes = reader.get_variable_to_shape_map()
  return {
    name: shape
    for name, shape in shapes.items()
    if not _STATE.fullmatch(name) and name.rpartition("/")[0] not in shapes
  }


def _tensor(reader, name: str, prefix: str) -> np.ndarray:
  try:
    value = np.asarray(reader.get_tensor(name))
  except checkpoint_files.READ_ERRORS as e:
    raise CheckpointError(
      f"{prefix}: damaged: {name} ({str(e).splitlines()[0]})"
    ) from e
  if value.dtype.kind in "iubSUO":
    raise CheckpointError(
      f"{prefix}: {name} is {value.dtype}, neither a weight nor known as "
      "training state"
    )
  if not np.isfinite(value.astype(np.float32)).all():
    raise CheckpointError(
      f"{prefix}: {name} holds values that are not finite: use an earlier "
      "checkpoint"
    )
  return value


def _mean(values: list[np.ndarray]) -> np.ndarray:
  """float32; the mean of one array is its exact values."""
  if len(values) == 1:
    return values[0].astype(np.float32)
  total = values[0].astype(np.float64)
  for value in values[1:]:
    total += value
  return (total / len(values)).astype(np.float32)


def _state_lines(names) -> list[str]:
  """What was left out: slots by kind, anything else by name."""
  kinds, lines = {}, []
  for name in sorted(names):
    owner, _, kind = name.rpartition("/")
    if owner and not _STATE.fullmatch(name):
      kinds[kind] = kinds.get(kind, 0) + 1
    else:
      lines.append(name)
  return [f"{n} slots {kind}" for kind, n in kinds.items()] + lines
