"""BERT weights under Hugging Face's names, and model.safetensors.

`model.weights` has the names. Hugging Face's dense kernels are [out, in], ours
[in, out].
"""

import collections
import contextlib
import glob
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO

import numpy as np
import safetensors
import safetensors.numpy

from common import input_files, json_files
from common.errors import DataError
from model.bert_config import BertConfig
from model.weights import CLASSIFIER, ENCODER, PARTS, POOLER, weights

WEIGHTS_FILE = "model.safetensors"
_SHARDS_FILE = WEIGHTS_FILE + ".index.json"

# Weights ----------------------------------------------------------------------


def count_parts(
  values: Mapping[str, np.ndarray], config: BertConfig, source: str
) -> dict[str, int]:
  """Number of weights in each part; variables that are not BERT's do not count.

  Raises `DataError` for an incomplete part, no encoder, or another shape.
  """
  counts, known = {}, weights(config)
  for part in PARTS:
    wanted = [w for w in known if w.part == part]
    missing = [w.name for w in wanted if w.name not in values]
    if len(missing) == len(wanted) and part != ENCODER:
      continue
    if missing:
      raise DataError(
        f"{source}: the {part} lacks {_some(missing)}: is it another config's "
        f"(num_hidden_layers={config.num_hidden_layers})?"
      )
    labels = values[wanted[-1].name].shape[:1] or (None,)
    for weight in wanted:
      found = list(values[weight.name].shape)
      shape = [labels[0] if n is None else n for n in weight.shape]
      if found != shape:
        raise DataError(
          f"{source}: {weight.name} ({weight.huggingface}) is of shape "
          f"{found}, but the config makes it {shape}: the config is another "
          "model's"
        )
    counts[part] = len(wanted)
  return counts


def _check_pooler(parts: Iterable[str], source: str) -> None:
  """Refuses a classifier of tokens, which reads no pooler."""
  if CLASSIFIER in parts and POOLER not in parts:
    raise DataError(
      f"{source}: has a classifier, but no pooler: it classifies each token "
      "(as BertForTokenClassification does), and only classifiers of whole "
      "texts can be converted"
    )


def _some(names: Iterable[str]) -> str:
  names = list(names)
  more = f" and {len(names) - 3} more" if len(names) > 3 else ""
  return ", ".join(names[:3]) + more


def to_theirs(
  values: Mapping[str, np.ndarray], config: BertConfig, source: str
) -> dict[str, np.ndarray]:
  """Our tensors by Hugging Face's names; `DataError` for those that have none.

  An encoder without a head is named as BertModel names it, without "bert.".
  """
  parts = count_parts(values, config, source)
  _check_pooler(parts, source)
  known = {w.name: w for w in weights(config)}
  if unknown := sorted(set(values) - set(known)):
    raise DataError(
      f"{source}: Hugging Face's BERT has no place for {_some(unknown)}"
    )
  bare = not set(parts) - {ENCODER, POOLER}
  return {
    known[name].huggingface.removeprefix("bert." if bare else ""):
    # safetensors writes the memory as it is, so it must be contiguous.
    np.ascontiguousarray(value.T if known[name].is_kernel else value)
    for name, value in values.items()
  }


# Other names of a weight; transformers ties the two when it loads a model.
_TIED = {
  "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
  "cls.predictions.decoder.bias": "cls.predictions.bias",
}
# Constants that earlier versions saved: 0, 1, 2, ... and zeros.
_BUFFERS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")


def from_theirs(
  tensors: Mapping[str, np.ndarray], config: BertConfig, source: str
) -> tuple[dict[str, np.ndarray], list[str]]:
  """Our weights from Hugging Face's, and the names of tensors left out.

  Also reads BertModel's names (without "bert.") and old ones of layer norms.
  """
  named, left_out = {}, []
  bare = not any(name.startswith("bert.") for name in tensors)
  for name, value in tensors.items():
    full = name.replace("LayerNorm.gamma", "LayerNorm.weight")
    full = full.replace("LayerNorm.beta", "LayerNorm.bias")
    if bare and full.startswith(("embeddings.", "encoder.", "pooler.")):
      full = "bert." + full
    if full in named:
      raise DataError(f"{source}: {full} is there twice, also as {name}")
    if full in _BUFFERS:
      left_out.append(name)
    elif value.dtype != np.float32:
      raise DataError(
        f"{source}: {name} is {value.dtype}, not a float: a quantised model "
        "cannot be converted"
      )
    elif not np.isfinite(value).all():
      raise DataError(
        f"{source}: {name} holds values that are not finite: such a model "
        "cannot answer"
      )
    else:
      named[full] = value
  for tied, weight in _TIED.items():
    if tied in named:
      value = named.pop(tied)
      if not np.array_equal(named.setdefault(weight, value), value):
        raise DataError(
          f"{source}: {tied} is not {weight}, as it is in google/bert's masked "
          "LM head: it cannot be converted"
        )
      left_out.append(tied)
  known = {w.huggingface: w for w in weights(config)}
  if unknown := sorted(set(named) - set(known)):
    raise DataError(
      f"{source}: {_some(unknown)}: no weight of a google/bert model of "
      f"{config.num_hidden_layers} layers"
    )
  values = {
    w.name: np.ascontiguousarray(
      named[name].T if w.is_kernel and named[name].ndim == 2 else named[name]
    )
    for name, w in known.items()
    if name in named
  }
  _check_pooler(count_parts(values, config, source), source)
  return values, left_out


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
        tensors[name] = _array(**tensor)
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
  index = os.path.join(folder, _SHARDS_FILE)
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


def _array(dtype: str, shape: list, data: bytearray) -> np.ndarray:
  """Floats become float32, other types bytes that `from_theirs` refuses."""
  if dtype == "BF16":  # the upper half of a float32
    wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32).reshape(shape)
  if dtype in ("F16", "F32", "F64"):
    floats = np.frombuffer(data, f"<f{int(dtype[1:]) // 8}")
    return floats.astype(np.float32).reshape(shape)
  return np.frombuffer(data, np.uint8)


def write_tensors(folder: str, tensors: Mapping[str, np.ndarray]) -> None:
  """Writes model.safetensors into a folder; OSError if it cannot."""
  path = os.path.join(folder, WEIGHTS_FILE)
  metadata = {"format": "pt"}  # transformers does not read it without this
  try:
    safetensors.numpy.save_file(dict(tensors), path, metadata=metadata)
  except safetensors.SafetensorError as e:  # of a full disk, too
    raise OSError(f"{path}: {e}") from e
