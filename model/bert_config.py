"""BertConfig: the numbers that define a BERT model, and their checks."""

import copy
import dataclasses
import json
from collections.abc import Callable

from common import json_files

# Names that `layers.get_activation` knows. "gelu" is google/bert's, the tanh
# approximation; "gelu_erf" is the exact one, which Hugging Face calls "gelu".
ACTIVATION_NAMES = ("", "linear", "relu", "gelu", "tanh", "gelu_erf")

# Keys of published multilingual and Chinese configurations that describe a
# pooler other than BertModel's and never had an effect on it.
_KEYS_WITHOUT_EFFECT = (
  "directionality", "pooler_fc_size", "pooler_num_attention_heads",
  "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type",
)  # fmt: skip

# Sizes are int32 to TensorFlow; a graph of more layers is never built to the
# end; float32 weights of a larger deviation overflow in the first matmul.
_LARGEST_SIZE, _MOST_LAYERS, _LARGEST_STDDEV = (1 << 31) - 1, 10_000, 1e9


def _is_number(value) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)


def _size(most: int = _LARGEST_SIZE) -> tuple:
  """What values of a key are, and how people say that."""
  is_valid = lambda n: type(n) is int and 1 <= n <= most
  return is_valid, f"a positive int of at most {most}"


_PROBABILITY = (lambda p: _is_number(p) and 0.0 <= p < 1.0), "in [0, 1)"
_STDDEV = (
  lambda s: _is_number(s) and 0.0 < s <= _LARGEST_STDDEV,
  f"> 0 and at most {_LARGEST_STDDEV:g}",
)
_BOOL = (lambda b: isinstance(b, bool)), "a bool"
_ACTIVATION = (
  lambda act: (
    act is None
    or callable(act)
    or (isinstance(act, str) and act.lower() in ACTIVATION_NAMES)
  ),
  f"one of {ACTIVATION_NAMES}",
)

# What a trained model becomes with another value of a key: one of other
# weights, so that its checkpoint does not fit, or one with other answers.
SHAPE, RESULT = "shape", "result"
_THE_SAME = "the same"


def _key(default, values, changes=None, huggingface=_THE_SAME):
  """A key of BertConfig, from which checks of other files derive theirs.

  `changes` is SHAPE, RESULT, or None for what only training reads.
  `huggingface` is the key in config.json; None if Hugging Face's BERT has the
  default only.
  """
  metadata = dict(values=values, changes=changes, huggingface=huggingface)
  return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(eq=False)
class BertConfig:
  """google/bert's JSON keys, which `validate` checks, not the constructor."""

  vocab_size: int = _key(dataclasses.MISSING, _size(), SHAPE)  # V
  hidden_size: int = _key(768, _size(), SHAPE)  # H
  num_hidden_layers: int = _key(12, _size(_MOST_LAYERS), SHAPE)
  num_attention_heads: int = _key(12, _size(), RESULT)  # N; must divide H
  intermediate_size: int = _key(3072, _size(), SHAPE)  # I
  # One of `ACTIVATION_NAMES` or a function; also in the masked LM head.
  hidden_act: str | Callable | None = _key("gelu", _ACTIVATION, RESULT)
  # For embeddings and layer outputs.
  hidden_dropout_prob: float = _key(0.1, _PROBABILITY)
  attention_probs_dropout_prob: float = _key(0.1, _PROBABILITY)
  # Tokens of the longest sequence.
  max_position_embeddings: int = _key(512, _size(), SHAPE)
  type_vocab_size: int = _key(16, _size(), SHAPE)  # segment ids
  # Standard deviation of the truncated normal initializer.
  initializer_range: float = _key(0.02, _STDDEV)
  # The residual is the sum before the layer norm, not after it
  # (https://arxiv.org/abs/2002.04745). Both kinds have the same variables.
  pre_layer_norm: bool = _key(False, _BOOL, RESULT, huggingface=None)

  @classmethod
  def from_dict(cls, json_object, source="the BERT configuration"):
    """A checked BertConfig; ValueError names `source` and the problem."""
    config = cls(json_object.get("vocab_size"))
    known = [*config.__dict__, *_KEYS_WITHOUT_EFFECT]
    unknown = sorted(set(json_object) - set(known))
    if unknown:
      raise ValueError(
        f"{source}: unknown key(s) {', '.join(unknown)}; "
        f"known keys are {', '.join(sorted(known))}"
      )
    config.__dict__.update(json_object)
    config.validate(source)
    return config

  @classmethod
  def from_json_file(cls, json_file):
    """A checked BertConfig; ValueError names the file."""
    return cls.from_dict(json_files.read(json_file, {}), source=str(json_file))

  def validate(self, source="the BERT configuration"):
    """Raises ValueError, beginning with `source`, for an impossible value."""
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      is_valid, wanted = field.metadata["values"]
      if not is_valid(value):
        raise ValueError(f"{source}: {field.name} is {value!r}, not {wanted}")
    if self.hidden_size % self.num_attention_heads:
      raise ValueError(
        f"{source}: hidden_size {self.hidden_size} is not a multiple of "
        f"num_attention_heads {self.num_attention_heads}"
      )

  def differences(self, other: "BertConfig") -> list[str]:
    """Keys that differ and make another model; training's may differ."""
    keys = keys_that_change(SHAPE, RESULT)
    return [k for k in keys if getattr(self, k) != getattr(other, k)]

  def to_dict(self):
    """A dictionary from which `from_dict` makes an equal configuration."""
    return copy.deepcopy(self.__dict__)

  def to_json_string(self):
    """JSON text with sorted keys and a newline at its end."""
    return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"


def keys_that_change(*what: str) -> list[str]:
  """Keys of which another value changes a trained model's SHAPE or RESULT."""
  fields = dataclasses.fields(BertConfig)
  return [f.name for f in fields if f.metadata["changes"] in what]


def huggingface_keys() -> dict[str, str | None]:
  """Each key's name in Hugging Face's config.json; None if it has none."""
  names = {}
  for field in dataclasses.fields(BertConfig):
    name = field.metadata["huggingface"]
    names[field.name] = field.name if name == _THE_SAME else name
  return names
