"""config.json of a Hugging Face folder, and the same model in our terms."""

import json
import os
import reprlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

from common import json_files
from common.errors import DataError, UserError
from common.model_files import THEIR_CONFIG
from config.bert_config import BertConfig
from model.huggingface_types import TYPES, ModelType, nearest
from model.tasks import HEADS, LABELS, TOKENS, Head
from model.weights import Weight

# Keys without effect on the numbers, or known from others.
_WITHOUT_EFFECT = set(
  "_name_or_path architectures auto_map bos_token bos_token_id "
  "chunk_size_feed_forward classifier_dropout clf_pooling cls_token_id "
  "deterministic_flash_attn dtype eos_token eos_token_id finetuning_task "
  "gradient_checkpointing hidden_dropout id2label initializer_cutoff_factor "
  "label2id layer_norm_eps mask_token mask_token_id mlp_dropout model_type "
  "num_labels output_attentions output_hidden_states output_past pad_token "
  "pad_token_id return_dict torchscript use_bfloat16 "
  "position_embedding_type pretraining_tp problem_type reference_compile "
  "repad_logits_with_grad sep_token_id sparse_pred_ignore_index "
  "sparse_prediction tie_word_embeddings torch_dtype transformers_version "
  "use_cache".split()
)
# Of the keys with which `ModelType.read` computes.
_LAYERS = {f"{kind}_attention?": (dict, None) for kind in ("full", "sliding")}
_FORM = {
  "model_type?": (*TYPES,), "pad_token_id?": (int, None),
  "max_position_embeddings?": int, "global_attn_every_n_layers?": int,
  "layer_types?": ([str], None), "rope_parameters?": (_LAYERS, None),
  "sliding_window?": (range(1 << 30), None), "rope_scaling?": (dict, None),
}  # fmt: skip

_REGRESSION, _SINGLE_LABEL = "regression", "single_label_classification"
MULTI_LABEL = "multi_label_classification"


def to_huggingface_config(
  config: BertConfig,
  heads: Sequence[Head],
  source: str,
  labels: Sequence[str] = (),
  ids: dict[str, int] | None = None,
  multi_label: bool = False,
) -> dict:
  """config.json's content; `UserError` if Hugging Face has no such model.

  `ids` are those of the special tokens "pad", "cls", "sep" and "mask".
  """
  kind = nearest(config, heads)
  ids = ids or {}
  for key in kind.unsaid(config, heads, ids):
    raise UserError(
      f"{source}: {key} is {json.dumps(getattr(config, key))}, which Hugging "
      f"Face's {kind.title} cannot be{kind.why.get(key, '')}: with "
      "--to=tensorflow any model converts"
    )
  content = {
    "architectures": [kind.architecture(heads)],
    "model_type": kind.name,
    "pad_token_id": 0,
    **kind.write(config, ids),
    "torch_dtype": "float32",
    "use_cache": True,
  }
  if labels:
    if LABELS in heads:
      several = MULTI_LABEL if multi_label else _SINGLE_LABEL
      content["problem_type"] = _REGRESSION if len(labels) == 1 else several
    content["id2label"] = {str(i): label for i, label in enumerate(labels)}
    content["label2id"] = dict(zip(labels, range(len(labels)), strict=True))
  return content


def stand_ins(count: int) -> list[str]:
  """transformers' names of `count` labels without names."""
  return [f"LABEL_{i}" for i in range(count)]


class ReadConfig(NamedTuple):
  """A config.json in our terms."""

  kind: ModelType
  config: BertConfig
  labels: list[str] | None  # the classifier's names, by number
  left_out: list[str]  # keys that we do not know
  problem_type: str | None  # what the classifier was trained for
  architectures: list[str]  # all that it names

  def tensors(self, there: Collection[str]) -> dict[str, list[Weight]]:
    """The name of each tensor -> our weights that it is made of, in order.

    Where heads have one name, it is that of the architecture's head. Without
    one it is that of whole texts, if what reads them, a pooler, is `there`.
    """
    has_pooler = any(self.kind.pooler in name for name in there)
    of_texts = has_pooler or not self.config.has_pooler
    assumed = LABELS if of_texts else TOKENS
    heads, class_of = [*HEADS, assumed], self.kind.architecture
    named = [head for head in heads if class_of([head]) in self.architectures]
    return self.kind.tensors(self.config, heads + named)

  def labels_of(
    self, head: Head, outputs: int, source: str
  ) -> list[str] | None:
    """By number; [] for a regression, None if they have no names.

    Raises `DataError` if the config is not of a classifier with these outputs.
    """
    names = self.architectures
    if names and self.kind.architecture([head]) not in names:
      raise DataError(
        f"{source}: has a classifier, but {THEIR_CONFIG} names an architecture "
        "without one"
      )
    kinds = [_SINGLE_LABEL, MULTI_LABEL] if outputs > 1 else [_REGRESSION]
    if head is LABELS and self.problem_type not in (None, *kinds):
      raise DataError(
        f"{source}: problem_type is {self.problem_type!r} in {THEIR_CONFIG}, "
        f"with {outputs} outputs; known here are {_SINGLE_LABEL} and "
        f"{MULTI_LABEL} (several labels) and {_REGRESSION} (one output)"
      )
    if self.labels is not None and len(self.labels) != outputs:
      raise DataError(
        f"{source}: id2label of {THEIR_CONFIG} names {len(self.labels)} "
        f"labels, but the classifier has {outputs} outputs"
      )
    if head is LABELS and outputs == 1:
      return []
    return None if self.labels == stand_ins(outputs) else self.labels


def from_huggingface_config(content: dict, source: str) -> ReadConfig:
  """Our config; `UserError` if no model of ours is such a one."""
  try:
    json_files.expect(content, _FORM)
    kind = TYPES[content.get("model_type", "bert")]
    complete = kind.complete(content)
    values = kind.read(complete)
  except ValueError as e:
    raise UserError(f"{source}: {e}: this model cannot be converted") from e
  config = BertConfig.from_dict(values, source)
  known = kind.checked | {"head_dim": config.head_size}
  known |= kind.write(config, {})
  for name, default in kind.checked.items():
    value = complete.get(name, default)
    if value not in (None, known[name]):
      raise UserError(
        f"{source}: {name} is {reprlib.repr(value)}, not {known[name]!r}: this "
        "model cannot be converted"
      )
  names = content.get("architectures") or []
  names = names if isinstance(names, list) else [names]
  for name in names:
    if name not in kind.architectures():
      raise UserError(
        f"{source}: the architecture {name} is not one of "
        f"{', '.join(kind.architectures())}"
      )
  # What nothing here knows is reported: it may be what makes the model differ.
  read = {key.name for key in kind.keys.values()} | {*vars(config)}
  left_out = sorted({*content} - read - _WITHOUT_EFFECT - {*kind.checked})
  labels, problem_type = _labels(content, source), content.get("problem_type")
  return ReadConfig(kind, config, labels, left_out, problem_type, names)


def _labels(content: dict, source: str) -> list[str] | None:
  named = content.get("id2label")
  if named is None:
    return None
  try:
    labels = [str(named[str(number)]) for number in range(len(named))]
  except (TypeError, KeyError) as e:
    raise DataError(
      f"{source}: id2label does not name the labels 0, 1, 2, ..."
    ) from e
  if len(set(labels)) < len(labels):
    raise DataError(f"{source}: id2label has two labels of one name")
  return labels


def read_config(folder: str) -> ReadConfig:
  """Reads a folder's config.json."""
  path = os.path.join(folder, THEIR_CONFIG)
  return from_huggingface_config(json_files.read(path, {}), path)
