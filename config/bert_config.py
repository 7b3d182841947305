"""BertConfig: the numbers that define a BERT model, and their checks."""

import copy
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from common import json_files
from common.errors import UserError

# Names that `layers.get_activation` knows. "gelu" is google/bert's, the tanh
# approximation; "gelu_erf" is the exact one, which Hugging Face calls "gelu".
ACTIVATION_NAMES = ("", "linear", "relu", "gelu", "tanh", "gelu_erf", "silu")

# Name -> file of the models of configs/.
PRESETS = {
  path.stem.removeprefix("bert_"): str(path)
  for path in sorted(pathlib.Path(__file__).parents[1].glob("configs/*.json"))
  if path.stem.startswith(("bert_", "modern_"))
}

# Keys of published multilingual and Chinese configurations that describe a
# pooler other than BertModel's and never had an effect on it.
KEYS_WITHOUT_EFFECT = (
  "directionality", "pooler_fc_size", "pooler_num_attention_heads",
  "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type",
)  # fmt: skip

# Sizes are int32 to TensorFlow; a graph of more layers is never built to the
# end; float32 weights of a larger deviation overflow in the first matmul.
_LARGEST_SIZE, _MOST_LAYERS = (1 << 31) - 1, 10_000


def _is_number(value) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)


def _size(most: int = _LARGEST_SIZE) -> tuple:
  """What values of a key are, and how people say that."""
  is_valid = lambda n: type(n) is int and 1 <= n <= most
  return is_valid, f"a positive int of at most {most}"


_PROBABILITY = (lambda p: _is_number(p) and 0.0 <= p < 1.0), "in [0, 1)"
_STDDEV = (lambda s: _is_number(s) and 0.0 < s <= 1e9), "> 0 and at most 1e9"
_POSITIVE = (lambda x: _is_number(x) and x > 0.0), "> 0"
_COUNT = (lambda n: type(n) is int and n >= 0), "an int, 0 or more"
_BOOL = (lambda b: isinstance(b, bool)), "a bool"


def _is_activation(name) -> bool:
  return name is None or callable(name) or str(name).lower() in ACTIVATION_NAMES


_ACTIVATION = _is_activation, f"one of {ACTIVATION_NAMES}"


def _one_of(*names: str) -> tuple:
  return (lambda name: name in names), f"one of {', '.join(names)}"


def _or_none(values: tuple) -> tuple:
  is_valid, wanted = values
  return (lambda value: value is None or is_valid(value)), f"null, or {wanted}"


_DROPOUT = _or_none(_PROBABILITY)


def _key(default, values, later=False, training=False):
  """A key of BertConfig, from which checks of other files derive theirs.

  `later`: google/bert does not know it; `training`: only training reads it.
  """
  metadata = dict(values=values, later=later, training=training)
  return dataclasses.field(default=default, metadata=metadata)


_later = functools.partial(_key, later=True)


@dataclasses.dataclass(eq=False)
class BertConfig:
  """google/bert's JSON keys, which `validate` checks, not the constructor."""

  vocab_size: int = _key(dataclasses.MISSING, _size())  # V
  hidden_size: int = _key(768, _size())  # H
  num_hidden_layers: int = _key(12, _size(_MOST_LAYERS))
  num_attention_heads: int = _key(12, _size())  # N; must divide H
  intermediate_size: int = _key(3072, _size())  # I
  # One of `ACTIVATION_NAMES` or a function; also in the masked LM head.
  hidden_act: str | Callable | None = _key("gelu", _ACTIVATION)
  # For embeddings and layer outputs.
  hidden_dropout_prob: float = _key(0.1, _PROBABILITY, training=True)
  attention_probs_dropout_prob: float = _key(0.1, _PROBABILITY, training=True)
  # Tokens of the longest sequence.
  max_position_embeddings: int = _key(512, _size())
  # Segment ids; of 0 there are no embeddings.
  type_vocab_size: int = _key(16, _COUNT)
  # Standard deviation of the truncated normal initializer.
  initializer_range: float = _key(0.02, _STDDEV, training=True)
  # The residual is the sum before the layer norm, not after it
  # (https://arxiv.org/abs/2002.04745). Both kinds have the same variables.
  pre_layer_norm: bool = _later(False, _BOOL)

  # What follows is of later encoders; each key goes with all others.

  # "rotary": queries and keys are rotated by an angle for each position
  # (https://arxiv.org/abs/2104.09864), and there are no embeddings of it.
  position_type: str = _later("absolute", _one_of("absolute", "rotary"))
  # Rows of that table before the first token's.
  position_offset: int = _later(0, _COUNT)
  # The longest wavelength of rotary positions is 2 pi times it, in layers that
  # attend to all tokens, and in those of local attention.
  global_rope_theta: float = _later(10000.0, _POSITIVE)
  local_rope_theta: float = _later(10000.0, _POSITIVE)
  # Layers 0, n, 2 n, ... attend to all tokens, the others to those at most
  # local_attention // 2 away.
  global_attn_every_n_layers: int = _later(1, _size())
  local_attention: int = _later(128, _size())
  # Heads of keys and values, each for as many of queries (grouped-query
  # attention, https://arxiv.org/abs/2305.13245); null: num_attention_heads.
  num_key_value_heads: int | None = _later(None, _or_none(_size()))
  attention_bias: bool = _later(True, _BOOL)
  # "rms" divides by the root mean square (https://arxiv.org/abs/1910.07467).
  norm: str = _later("layer", _one_of("layer", "rms"))
  norm_bias: bool = _later(True, _BOOL)
  norm_eps: float = _later(1e-12, _POSITIVE)
  # Whether the first layer's residual is normalized.
  embedding_norm: bool = _later(True, _BOOL)
  # The activation times a second product (https://arxiv.org/abs/2002.05202).
  gated: bool = _later(False, _BOOL)
  mlp_bias: bool = _later(True, _BOOL)
  # In the masked LM head: a dense layer with a bias and a norm before the
  # words' weights; these are the word embeddings; a bias for each word.
  mlm_head: bool = _later(True, _BOOL)
  classifier_bias: bool = _later(True, _BOOL)
  tie_word_embeddings: bool = _later(True, _BOOL)
  decoder_bias: bool = _later(True, _BOOL)
  # What heads read of a whole text: "pooler", a dense layer and tanh on the
  # first token's output. With "cls", that output itself, and "mean", the mean
  # of all tokens' outputs, there is no such layer, and fine-tuned heads read
  # through the masked LM head's dense layer and norm, if it has them.
  classifier_pooling: str = _later("pooler", _one_of("pooler", "cls", "mean"))
  # Dropout of embeddings and after attention; null: hidden_dropout_prob.
  embedding_dropout: float | None = _later(None, _DROPOUT, training=True)
  attention_output_dropout: float | None = _later(None, _DROPOUT, training=True)
  # Whether the deviation of what ends a block is initializer_range over the
  # square root of 2 num_hidden_layers.
  scaled_initializer: bool = _later(False, _BOOL, training=True)

  @classmethod
  def from_dict(cls, json_object, source="the BERT configuration"):
    """A checked BertConfig; `UserError`, a ValueError, names `source`."""
    # Not by keywords: a key that is missing or unknown has a line of its own.
    config = cls(json_object.get("vocab_size"))
    known = [*config.__dict__, *KEYS_WITHOUT_EFFECT]
    unknown = sorted(set(json_object) - set(known))
    if unknown:
      raise UserError(
        f"{source}: unknown key(s) {', '.join(unknown)}; "
        f"known keys are {', '.join(sorted(known))}"
      )
    config.__dict__.update(json_object)
    config.validate(source)
    return config

  @classmethod
  def from_json_file(cls, json_file):
    """A checked BertConfig; `UserError`, a ValueError, names the file."""
    return cls.from_dict(json_files.read(json_file, {}), source=str(json_file))

  def validate(self, source="the BERT configuration"):
    """Raises `UserError`, beginning with `source`, for an impossible value."""
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      is_valid, wanted = field.metadata["values"]
      if not is_valid(value):
        raise UserError(f"{source}: {field.name} is {value!r}, not {wanted}")
    for key, factor in (
      ("hidden_size", "num_attention_heads"),
      ("num_attention_heads", "num_key_value_heads"),
    ):
      value, of = getattr(self, key), getattr(self, factor)
      if of and value % of:
        raise UserError(
          f"{source}: {key} {value} is not a multiple of {factor} {of}"
        )
    if self.position_type == "rotary" and self.head_size % 2:
      raise UserError(
        f"{source}: rotary positions turn pairs of numbers, but heads have "
        f"{self.head_size}: change hidden_size or num_attention_heads"
      )

  @property
  def head_size(self) -> int:
    """D, the numbers of an attention head."""
    return self.hidden_size // self.num_attention_heads

  @property
  def key_value_heads(self) -> int:
    return self.num_key_value_heads or self.num_attention_heads

  def with_dropout(
    self, hidden: float | None, attention_probs: float | None
  ) -> "BertConfig":
    """The same model with these rates of dropout; None leaves what it has."""
    config = copy.deepcopy(self)
    if hidden is not None:
      # Null: embeddings and what follows attention have the same rate.
      config.hidden_dropout_prob = hidden
      config.embedding_dropout = config.attention_output_dropout = None
    if attention_probs is not None:
      config.attention_probs_dropout_prob = attention_probs
    return config

  def dropout_after(self, part: str) -> float:
    """The rate of dropout after `part`: "embedding" or "attention_output"."""
    dropout = getattr(self, f"{part}_dropout")
    return self.hidden_dropout_prob if dropout is None else dropout

  @property
  def has_pooler(self) -> bool:
    """Whether a layer of its own makes a text's output of a token's."""
    return self.classifier_pooling == "pooler"

  @property
  def pools_all_tokens(self) -> bool:
    return self.classifier_pooling == "mean"

  @property
  def shares_transform(self) -> bool:
    """Whether all heads read through the masked LM head's dense layer."""
    return self.mlm_head and not self.has_pooler

  def is_local(self, layer: int) -> bool:
    """Whether layer number `layer`, from 0, has local attention."""
    return layer % self.global_attn_every_n_layers > 0

  def meaning(self) -> dict[str, Any]:
    """The keys that make the model, with equal values for equal meanings."""
    # A null stands for the value of another key, or for no activation.
    values = {key: getattr(self, key) for key in model_keys()}
    if not callable(self.hidden_act):
      values["hidden_act"] = (self.hidden_act or "linear").lower()
    values["num_key_value_heads"] = self.key_value_heads
    # Half of it is on each side of a token.
    values["local_attention"] = max(1, self.local_attention // 2 * 2)
    unused: list[str] = []
    if self.global_attn_every_n_layers == 1:
      unused += "local_attention", "local_rope_theta"
    if self.position_type == "rotary":
      unused.append("position_offset")
    else:
      unused += "global_rope_theta", "local_rope_theta"
    if not self.mlm_head:
      unused.append("classifier_bias")
    return values | {key: getattr(BertConfig, key) for key in unused}

  def differences(self, other: "BertConfig") -> list[str]:
    """Keys that differ and make another model; training's may differ."""
    mine, others = self.meaning(), other.meaning()
    return [key for key in mine if mine[key] != others[key]]

  def extends(self, other: "BertConfig") -> bool:
    """Whether only rotary angles or lengths differ, which have no weights."""
    keys = {"global_rope_theta", "local_rope_theta", "max_position_embeddings"}
    is_rotary = self.position_type == other.position_type == "rotary"
    return is_rotary and keys.issuperset(self.differences(other))

  def to_dict(self):
    """A dictionary from which `from_dict` makes an equal configuration."""
    # google/bert refuses keys that it does not know: they are in it only where
    # they say anything.
    values = copy.deepcopy(self.__dict__)
    for field in dataclasses.fields(self):
      if field.metadata["later"] and values[field.name] == field.default:
        del values[field.name]
    return values

  def to_json_string(self):
    """JSON text with sorted keys and a newline at its end."""
    return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"


def model_keys() -> list[str]:
  """Keys of which another value changes a trained model's shape or answers."""
  fields = dataclasses.fields(BertConfig)
  return [field.name for field in fields if not field.metadata["training"]]


def complete(values: dict) -> dict:
  """All keys of `to_dict` or of a JSON file, by their `meaning`."""
  config = BertConfig(vocab_size=0)
  vars(config).update(values)
  return {**vars(config), **config.meaning()}


def is_preset(name: str | None) -> bool:
  """Whether a --bert_config_file is a preset's name, and no file's."""
  return name in PRESETS and not os.path.isfile(name)


def read_bert(path: str) -> BertConfig:
  """The BERT config of a file, or of a preset with its file's vocab_size."""
  path = PRESETS[path] if is_preset(path) else path
  try:
    return BertConfig.from_json_file(path)
  except ValueError as e:
    presets = f"; or a preset: {', '.join(PRESETS)}"
    known = "" if os.path.exists(path) else presets
    raise UserError(f"--bert_config_file: {e}{known}") from e
