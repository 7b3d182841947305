"""A model's weights as Hugging Face's tensors, and model.safetensors.

`huggingface_types` has the names. Hugging Face's dense kernels are [out, in],
ours [in, out], and a tensor may be several of ours, one below the other.
"""

import collections
import contextlib
import glob
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO

import numpy as np
import safetensors
import safetensors.numpy

from common import input_files, json_files
from common.errors import DataError
from config.bert_config import BertConfig
from model import weights as w
from model.huggingface_config import ReadConfig
from model.huggingface_types import nearest

WEIGHTS_FILE = "model.safetensors"

# Weights ----------------------------------------------------------------------


def count_parts(
  values: Mapping[str, np.ndarray],
  config: BertConfig,
  source: str,
  names: Mapping[str, str] | None = None,
) -> dict[str, int]:
  """Number of weights in each part; variables that are not BERT's do not count.

  Raises `DataError` for an incomplete part, no encoder, or another shape, by
  the weights' `names` in the source, which are ours if it is None.
  """
  counts, known = {}, w.weights(config)
  names = names or {weight.name: weight.name for weight in known}
  # A part is there whole or not at all; only the encoder must be there.
  for part in w.PARTS:
    wanted, missing = [], []
    for weight in known:
      if weight.part == part and weight.name in names:
        wanted.append(weight)
        if weight.name not in values:
          missing.append(names[weight.name])
    if len(missing) == len(wanted) and part != w.ENCODER:
      continue
    if missing:
      raise DataError(
        f"{source}: the {part} lacks {_some(dict.fromkeys(missing))}: is it "
        f"another config's (num_hidden_layers={config.num_hidden_layers})?"
      )
    labels = values[wanted[-1].name].shape[:1] or (None,)
    for weight in wanted:
      shape = list(values[weight.name].shape)
      expected = [labels[0] if n is None else n for n in weight.shape]
      if shape != expected:
        name = " in ".join(dict.fromkeys((weight.name, names[weight.name])))
        raise DataError(
          f"{source}: {name} is of shape {shape}, but the config makes it "
          f"{expected}: the config is another model's"
        )
    counts[part] = len(wanted)
  return counts


def _check_pooler(parts: Iterable[str], config: BertConfig, source: str):
  """Refuses a classifier of texts without the pooler that it reads."""
  if config.has_pooler and w.CLASSIFIER in parts and w.POOLER not in parts:
    raise DataError(
      f"{source}: has a classifier of texts, but not the pooler that it reads: "
      "copy all of the model's files again"
    )


def _some(names: Iterable[str]) -> str:
  names = list(names)
  more = f" and {len(names) - 3} more" if len(names) > 3 else ""
  return ", ".join(names[:3]) + more


def to_huggingface(
  values: Mapping[str, np.ndarray], config: BertConfig, source: str
) -> dict[str, np.ndarray]:
  """Our tensors by Hugging Face's names; `DataError` for those that have none.

  An encoder without a head has the names of, for example, BertModel.
  """
  heads = w.heads_of(config, values)
  kind = nearest(config, heads)
  tensors = kind.tensors(config, heads)
  _check_pooler(count_parts(values, config, source), config, source)
  removed = "" if {*heads} & {*kind.heads} else kind.base
  tensors_there, unknown = kind.constants(config), {*values}
  for name, of_tensor in tensors.items():
    if of_tensor[0].name in values:
      parts = []
      for weight in of_tensor:
        value, rows = values[weight.name], kind.rows(weight, config)
        part = value.T if weight.is_kernel else value
        parts.append(part if rows is None else part[rows])
        unknown.discard(weight.name)
      # safetensors writes the memory as it is, so it must be contiguous.
      whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
      tensors_there[name] = np.ascontiguousarray(whole)
  if unknown:
    raise DataError(
      f"{source}: Hugging Face's {kind.title} has no place for "
      f"{_some(sorted(unknown))}"
    )
  return {k.removeprefix(removed): v for k, v in tensors_there.items()}


def _parted(
  weights: Sequence[w.Weight], tensor: np.ndarray, known: ReadConfig
) -> Iterator[tuple[str, np.ndarray]]:
  """Our weights of Hugging Face's tensor, by name."""
  # Theirs may join several of ours along its rows, which are our columns.
  rows = [weight.shape[1 if weight.is_kernel else 0] for weight in weights]
  parts = np.split(np.atleast_1d(tensor), np.cumsum(rows[:-1], dtype=int))
  for weight, part in zip(weights, parts, strict=True):
    columns = known.kind.rows(weight, known.config)
    # One of another shape is refused with the config that makes it so.
    if columns is not None and len(columns) == len(part):
      part = part[np.argsort(columns)]
    is_matrix = weight.is_kernel and part.ndim == 2
    yield weight.name, np.ascontiguousarray(part.T if is_matrix else part)


# Constants: 0, 1, 2, ... and zeros of earlier versions, RoFormer's sines.
_BUFFERS = (
  "embeddings.position_ids", "embeddings.token_type_ids",
  "encoder.embed_positions.weight",
)  # fmt: skip


def from_huggingface(
  tensors: Mapping[str, np.ndarray], known: ReadConfig, source: str
) -> tuple[dict[str, np.ndarray], list[str]]:
  """Our weights from Hugging Face's, and the names of tensors left out.

  Also reads an encoder's names (without, for example, "bert.") and old ones of
  layer norms.
  """
  kind, wanted = known.kind, known.tensors(tensors)
  named, left_out = _named(tensors, kind.base, {*wanted}, source)
  # Some writers save a tied tensor twice: both must have the same numbers.
  for tied, weight in kind.tied().items():
    if tied in named and tied not in wanted:
      value = named.pop(tied)
      if not np.array_equal(named.setdefault(weight, value), value):
        raise DataError(
          f"{source}: {tied} is not {weight}: a {kind.title} with words of its "
          "own for its answers cannot be converted"
        )
      left_out.append(tied)
  # Nor does transformers read it beside a classifier's own.
  if f"{kind.pooler}weight" in wanted:
    for name in sorted(named.keys() - wanted):
      if name.startswith(f"{kind.base}pooler."):
        left_out.append(name)
        del named[name]
  if unknown := sorted({*named} - {*wanted}):
    raise DataError(
      f"{source}: {_some(unknown)}: no weight of a {kind.title} of "
      f"{known.config.num_hidden_layers} layers"
    )
  values: dict[str, np.ndarray] = {}
  names: dict[str, str] = {}
  for name, of_tensor in wanted.items():
    names |= {weight.name: name for weight in of_tensor}
    if name in named:
      values |= _parted(of_tensor, named[name], known)
  counts = count_parts(values, known.config, source, names)
  _check_pooler(counts, known.config, source)
  return values, left_out


def _named(
  tensors: Mapping[str, np.ndarray], base: str, wanted: set[str], source: str
) -> tuple[dict[str, np.ndarray], list[str]]:
  """Weights by the names of a model with a head, and names of what is none."""
  named: dict[str, np.ndarray] = {}
  left_out, buffers = [], {base + name for name in _BUFFERS}
  is_bare = not any(name.startswith(base) for name in tensors)
  for name, value in tensors.items():
    # Conversions from TensorFlow once kept its names of layer norms.
    full = name.replace("LayerNorm.gamma", "LayerNorm.weight")
    full = full.replace("LayerNorm.beta", "LayerNorm.bias")
    if is_bare and base + full in wanted | buffers:
      full = base + full
    if full in named:
      raise DataError(f"{source}: {full} is there twice, also as {name}")
    if full in buffers:
      left_out.append(name)
    elif value.dtype != np.float32:
      raise DataError(
        f"{source}: {name} is {value.dtype}, not a float: a quantised model "
        "cannot be converted"
      )
    elif not np.isfinite(value).all():
      raise DataError(f"{source}: {name} holds values that are not finite")
    else:
      named[full] = value
  return named, left_out


# Files ------------------------------------------------------------------------


# Makes model.safetensors of a folder's pytorch_model*.bin; it has all heads.
_FROM_PYTORCH = (
  "import pathlib, sys, torch, safetensors.torch as s; "
  "f = pathlib.Path(sys.argv[1]); "
  's.save_file({k: v.clone().contiguous() for p in f.glob("pytorch_model*.bin")'
  ' for k, v in torch.load(p, "cpu", weights_only=True).items()}, '
  f'f / "{WEIGHTS_FILE}", {{"format": "pt"}})'
)


def read_tensors(folder: str) -> dict[str, np.ndarray]:
  """The tensors of model.safetensors, or of its shards; floats are float32."""
  tensors: dict[str, np.ndarray] = {}
  for path in files(folder):
    with _opened(path) as f:
      for name, tensor in safetensors.deserialize(f.read()):
        data, kind, shape = tensor["data"], tensor["dtype"], tensor["shape"]
        array = np.frombuffer(data, np.uint8)  # not floats, so refused
        if kind == "BF16":  # the upper half of a float32
          wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
          array = wide.view(np.float32).reshape(shape)
        elif kind in ("F16", "F32", "F64"):
          floats = np.frombuffer(data, f"<f{int(kind[1:]) // 8}")
          array = floats.astype(np.float32).reshape(shape)
        tensors[name] = array
  return tensors


def read_shapes(folder: str) -> dict[str, list[int]]:
  """Name -> shape, as `read_tensors`, of which only headers are read."""
  shapes: dict[str, list[int]] = {}
  for path in files(folder):
    with _opened(path), safetensors.safe_open(path, "np") as f:
      for name in f.keys():  # noqa: SIM118 (it is no dict)
        shapes[name] = f.get_slice(name).get_shape()
  return shapes


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
  """A file of weights; an error of its content becomes one that names it."""
  with input_files.open_input(path) as f:
    try:
      yield f
    except (safetensors.SafetensorError, ValueError) as e:
      raise DataError(f"{path}: damaged ({e}). Copy it again") from e


def files(folder: str) -> list[str]:
  """The files with the tensors; `DataError` if there are none, or others."""
  whole = os.path.join(folder, WEIGHTS_FILE)
  if os.path.exists(whole):
    return [whole]
  index = os.path.join(folder, WEIGHTS_FILE + ".index.json")
  if not os.path.exists(index):
    # What the command would be given.
    bins = glob.glob(os.path.join(glob.escape(folder), "pytorch_model*.bin"))
    input_files.expect_plain(bins, input_files.ZIP)
    command = shlex.join(["python", "-c", _FROM_PYTORCH, folder])
    raise DataError(
      f"{folder}: has no {WEIGHTS_FILE}. Copy it, or make it of "
      "pytorch_model.bin, in an environment with torch, numpy and safetensors: "
      f"{command}"
    )
  # The index says in which shard each tensor is.
  names_by_file = collections.defaultdict(set)
  try:
    for name, file in json_files.read(index)["weight_map"].items():
      names_by_file[os.path.basename(file)].add(name)
  except (KeyError, TypeError, AttributeError) as e:
    raise DataError(f"{index}: not an index of weights ({e!r})") from e
  paths = []
  for file, names in sorted(names_by_file.items()):
    path = os.path.join(folder, file)
    with _opened(path), safetensors.safe_open(path, "np") as f:
      differ = names.symmetric_difference(f.keys())
    if differ:
      raise DataError(
        f"{path}: {_some(sorted(differ))}: in it or in {index}, but not in "
        "both. Copy all of the model's files again"
      )
    paths.append(path)
  return paths


def write_tensors(folder: str, tensors: Mapping[str, np.ndarray]) -> None:
  """Writes model.safetensors into a folder; OSError if it cannot."""
  path = os.path.join(folder, WEIGHTS_FILE)
  metadata = {"format": "pt"}  # transformers does not read it without this
  try:
    safetensors.numpy.save_file(dict(tensors), path, metadata=metadata)
  except safetensors.SafetensorError as e:  # of a full disk, too
    raise OSError(f"{path}: {e}") from e
