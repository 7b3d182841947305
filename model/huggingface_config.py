"""config.json of a Hugging Face BERT, and the same model in our terms.

The keys are those of transformers' configuration_bert.py
(https://github.com/huggingface/transformers).
"""

import json
import os
from collections.abc import Sequence
from typing import NamedTuple

from common import json_files
from common.errors import DataError, UserError
from model.bert_config import BertConfig, huggingface_keys
from model.tasks import HEADS, LABELS, MASKED_LM, NEXT_SENTENCE, Head

CONFIG_FILE = "config.json"

# google/bert's gelu is the approximation by tanh, Hugging Face's the exact one.
_ALIKE = {name: name for name in ("relu", "tanh", "linear")}
_TO_THEIR_ACTIVATION = _ALIKE | {
  "gelu": "gelu_new", "gelu_erf": "gelu", "": "linear",
}  # fmt: skip
_TO_OUR_ACTIVATION = _ALIKE | {
  "gelu": "gelu_erf", "gelu_python": "gelu_erf",
  "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu",
}  # fmt: skip

# Hugging Face's defaults where ours differ, for keys that a file leaves out.
_THEIR_DEFAULTS = dict(vocab_size=30522, hidden_act="gelu", type_vocab_size=2)

# Values in google/bert's models; the first stands for a missing key.
_ONLY = {
  "model_type": ("bert",),
  "layer_norm_eps": (1e-12,),
  "position_embedding_type": ("absolute", None),
  "is_decoder": (False,),
  "add_cross_attention": (False,),
  "pruned_heads": ({}, None),
  "quantization_config": (None,),
}

# Keys without effect on the numbers, or known from the weights.
_WITHOUT_EFFECT = set(
  "_name_or_path architectures bos_token_id classifier_dropout dtype "
  "eos_token_id gradient_checkpointing id2label label2id pad_token_id "
  "problem_type tie_word_embeddings torch_dtype transformers_version "
  "use_cache".split()
)

_ENCODER_ONLY, _PRETRAINED = "BertModel", "BertForPreTraining"
_ARCHITECTURES = [_ENCODER_ONLY, _PRETRAINED]
_ARCHITECTURES += [head.architecture for head in HEADS]

_REGRESSION, _SINGLE_LABEL = "regression", "single_label_classification"


def architecture_of(heads: Sequence[Head]) -> str:
  """transformers' class of a model with `tasks.heads_of` it."""
  if {*heads} == {MASKED_LM, NEXT_SENTENCE}:
    return _PRETRAINED
  return heads[-1].architecture if heads else _ENCODER_ONLY


def to_their_config(
  config: BertConfig,
  heads: Sequence[Head],
  source: str,
  labels: int | list[str] | None = None,
  pad_id: int = 0,
) -> dict:
  """config.json's content; `UserError` if Hugging Face has no such BERT."""
  for key in config.keys_beyond_bert():
    raise UserError(
      f"{source}: {key} is {json.dumps(getattr(config, key))}; Hugging Face's "
      "BERT has no such key, so it would give other numbers"
    )
  known = {}
  for key, name in huggingface_keys().items():
    if name is not None:
      known[name] = getattr(config, key)
  content = {
    "architectures": [architecture_of(heads)],
    "model_type": "bert",
    **known,
    "hidden_act": _TO_THEIR_ACTIVATION[str(config.hidden_act or "").lower()],
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "absolute",
    "pad_token_id": pad_id,
    "torch_dtype": "float32",
    "use_cache": True,
  }
  if labels is not None:
    labels = stand_ins(labels) if isinstance(labels, int) else labels
    content["problem_type"] = _SINGLE_LABEL if len(labels) > 1 else _REGRESSION
    content["id2label"] = {str(i): label for i, label in enumerate(labels)}
    content["label2id"] = {label: i for i, label in enumerate(labels)}
  return content


def stand_ins(count: int) -> list[str]:
  """transformers' names of `count` labels without names."""
  return [f"LABEL_{i}" for i in range(count)]


class ReadConfig(NamedTuple):
  """A config.json in our terms."""

  config: BertConfig
  labels: list[str] | None  # the classifier's names, by number
  left_out: list[str]  # keys that we do not know
  problem_type: str | None = None  # what the classifier was trained for
  architectures: list[str] | None = None  # None: it names none

  def classifier_labels(self, outputs: int, source: str) -> list[str] | None:
    """By number; [] for a regression, None if they have no names.

    Raises `DataError` if the config is not of a classifier with these outputs.
    """
    if self.architectures and LABELS.architecture not in self.architectures:
      raise DataError(
        f"{source}: has a classifier, but {CONFIG_FILE} names an architecture "
        "without one"
      )
    kind = _SINGLE_LABEL if outputs > 1 else _REGRESSION
    if self.problem_type not in (None, kind):
      raise DataError(
        f"{source}: problem_type is {self.problem_type!r} in {CONFIG_FILE}, "
        f"with {outputs} outputs; known here are {_SINGLE_LABEL} (one of "
        f"several labels) and {_REGRESSION} (one output)"
      )
    if self.labels is not None and len(self.labels) != outputs:
      raise DataError(
        f"{source}: id2label of {CONFIG_FILE} names {len(self.labels)} labels, "
        f"but the classifier has {outputs} outputs"
      )
    if outputs == 1:
      return []
    return None if self.labels == stand_ins(outputs) else self.labels


def from_their_config(content: dict, source: str) -> ReadConfig:
  """Our config; `UserError` if the model is not of google/bert's kind."""
  for key, allowed in _ONLY.items():
    value = content.get(key, allowed[0])
    if value not in allowed:
      raise UserError(
        f"{source}: {key} is {value!r}; only {allowed[0]!r} is google/bert's, "
        "and only such a model can be converted"
      )
  names = content.get("architectures") or []
  names = names if isinstance(names, list) else [names]
  for name in names:
    if name not in _ARCHITECTURES:
      raise UserError(
        f"{source}: the architecture {name} is not one of "
        f"{', '.join(_ARCHITECTURES)}"
      )
  to_ours = {name: key for key, name in huggingface_keys().items() if name}
  known = {  # pooler_...: of published Chinese and multilingual configs
    key
    for key in content
    if key in to_ours or key == "directionality" or key.startswith("pooler_")
  }
  values = dict(_THEIR_DEFAULTS)
  for key in known:
    values[to_ours.get(key, key)] = content[key]
  act = values["hidden_act"]
  if act not in list(_TO_OUR_ACTIVATION):
    raise UserError(
      f"{source}: hidden_act is {act!r}, not one of "
      f"{', '.join(_TO_OUR_ACTIVATION)}"
    )
  values["hidden_act"] = _TO_OUR_ACTIVATION[act]
  left_out = set(content) - known - _WITHOUT_EFFECT - set(_ONLY)
  return ReadConfig(
    BertConfig.from_dict(values, source),
    _labels(content, source),
    sorted(left_out),
    content.get("problem_type"),
    names or None,
  )


def _labels(content: dict, source: str) -> list[str] | None:
  named = content.get("id2label")
  if named is None:
    return None
  numbers = [str(i) for i in range(len(named))] if type(named) is dict else None
  if numbers is None or set(named) != set(numbers):
    raise DataError(f"{source}: id2label does not name the labels 0, 1, 2, ...")
  labels = [str(named[i]) for i in numbers]
  if len(set(labels)) < len(labels):
    raise DataError(f"{source}: id2label has two labels of one name")
  return labels


def read_config(folder: str) -> ReadConfig:
  """Reads a folder's config.json."""
  path = os.path.join(folder, CONFIG_FILE)
  return from_their_config(json_files.read(path, {}), path)
