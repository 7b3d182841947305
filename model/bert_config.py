"""BertConfig: the numbers that define a BERT model, and their checks."""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator

from common import json_files
from common.tensorflow_v1 import tf

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
_SIZES = (
  "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
  "intermediate_size", "max_position_embeddings", "type_vocab_size",
)  # fmt: skip


def _is_number(value) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclasses.dataclass(eq=False)
class BertConfig:
  """google/bert's JSON keys, which `validate` checks, not the constructor."""

  vocab_size: int  # V
  hidden_size: int = 768  # H
  num_hidden_layers: int = 12
  num_attention_heads: int = 12  # N; must divide H
  intermediate_size: int = 3072  # I
  # One of `ACTIVATION_NAMES` or a function; also in the masked LM head.
  hidden_act: str | Callable | None = "gelu"
  hidden_dropout_prob: float = 0.1  # for embeddings and layer outputs
  attention_probs_dropout_prob: float = 0.1
  max_position_embeddings: int = 512  # tokens of the longest sequence
  type_vocab_size: int = 16  # segment ids
  initializer_range: float = 0.02  # stddev of the truncated normal initializer
  # The residual is the sum before the layer norm, not after it
  # (https://arxiv.org/abs/2002.04745). Both kinds have the same variables.
  pre_layer_norm: bool = False

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
    with tf.gfile.GFile(json_file, "rb") as reader:
      text = reader.read()
    try:
      json_object = json_files.parse(text)
    except ValueError as error:
      raise ValueError(f"{json_file}: not JSON: {error}") from error
    if not isinstance(json_object, dict):
      raise ValueError(f"{json_file}: not a JSON object")
    return cls.from_dict(json_object, source=str(json_file))

  def validate(self, source="the BERT configuration"):
    """Raises ValueError, beginning with `source`, for an impossible value."""
    for problem in self._problems():
      raise ValueError(f"{source}: {problem}")

  def _problems(self) -> Iterator[str]:
    for key in _SIZES:
      value = getattr(self, key)
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        yield f"{key} is {value!r}, not a positive int"
      most = _MOST_LAYERS if key == "num_hidden_layers" else _LARGEST_SIZE
      if value > most:
        yield f"{key} is {value}, more than {most}"
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
      value = getattr(self, key)
      if not _is_number(value) or not 0.0 <= value < 1.0:
        yield f"{key} is {value!r}, not in [0, 1)"
    stddev = self.initializer_range
    if not _is_number(stddev) or not 0.0 < stddev <= _LARGEST_STDDEV:
      yield (
        f"initializer_range is {stddev!r}, not > 0 and at most "
        f"{_LARGEST_STDDEV:g}"
      )
    if self.hidden_size % self.num_attention_heads:
      yield (
        f"hidden_size {self.hidden_size} is not a multiple of "
        f"num_attention_heads {self.num_attention_heads}"
      )
    if not isinstance(self.pre_layer_norm, bool):
      yield f"pre_layer_norm is {self.pre_layer_norm!r}, not a bool"
    act = self.hidden_act
    named = isinstance(act, str) and act.lower() in ACTIVATION_NAMES
    if not (named or act is None or callable(act)):
      yield f"hidden_act is {act!r}, not one of {ACTIVATION_NAMES}"

  def to_dict(self):
    """A dictionary from which `from_dict` makes an equal configuration."""
    return copy.deepcopy(self.__dict__)

  def to_json_string(self):
    """JSON text with sorted keys and a newline at its end."""
    return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"
