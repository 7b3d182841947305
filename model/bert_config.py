"""BertConfig: the numbers that define a BERT model, and their checks."""

import copy
import json

from common import json_files
from common.tensorflow_v1 import tf

# Names that `layers.get_activation` knows. "gelu" is google/bert's, the tanh
# approximation; "gelu_erf" is the exact one, which Hugging Face calls "gelu".
ACTIVATION_NAMES = ("", "linear", "relu", "gelu", "tanh", "gelu_erf")

# Keys of published multilingual and Chinese configurations that describe a
# pooler other than BertModel's and never had an effect on it.
_KEYS_WITHOUT_EFFECT = (
  "directionality",
  "pooler_fc_size",
  "pooler_num_attention_heads",
  "pooler_num_fc_layers",
  "pooler_size_per_head",
  "pooler_type",
)

# Sizes are int32 to TensorFlow; a graph of more layers is never built to the
# end; float32 weights of a larger deviation overflow in the first matmul.
_LARGEST_SIZE, _MOST_LAYERS, _LARGEST_STDDEV = (1 << 31) - 1, 10_000, 1e9


def _is_number(value) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)


class BertConfig:
  """The numbers that define a BERT model; google/bert's JSON keys."""

  def __init__(
    self,
    vocab_size,
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    intermediate_size=3072,
    hidden_act="gelu",
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
    max_position_embeddings=512,
    type_vocab_size=16,
    initializer_range=0.02,
    pre_layer_norm=False,
  ):
    """Stores its arguments as they are; `validate` checks them.

    Args:
      vocab_size: int, V.
      hidden_size: int, H.
      num_hidden_layers: int, layers of the encoder.
      num_attention_heads: int, N; must divide H.
      intermediate_size: int, I.
      hidden_act: name for `get_activation`, or a function, applied to the
        intermediate layer and in the masked LM head.
      hidden_dropout_prob: float in [0, 1), for embeddings and layer outputs.
      attention_probs_dropout_prob: float in [0, 1).
      max_position_embeddings: int, the longest sequence.
      type_vocab_size: int, number of segment ids.
      initializer_range: float, stddev of the truncated normal initializer.
      pre_layer_norm: bool, see `encoder.LayerConfig`.
    """
    self.vocab_size = vocab_size
    self.hidden_size = hidden_size
    self.num_hidden_layers = num_hidden_layers
    self.num_attention_heads = num_attention_heads
    self.hidden_act = hidden_act
    self.intermediate_size = intermediate_size
    self.hidden_dropout_prob = hidden_dropout_prob
    self.attention_probs_dropout_prob = attention_probs_dropout_prob
    self.max_position_embeddings = max_position_embeddings
    self.type_vocab_size = type_vocab_size
    self.initializer_range = initializer_range
    self.pre_layer_norm = pre_layer_norm

  @classmethod
  def from_dict(cls, json_object, source="the BERT configuration"):
    """A checked BertConfig from a dictionary.

    Args:
      json_object: dict with `vocab_size` and any other keys of the constructor.
      source: str, where the dictionary is from, for error messages.

    Raises:
      ValueError: a key is unknown or a value impossible.
    """
    config = cls(vocab_size=None)
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
    """A checked BertConfig from a JSON file.

    Raises:
      ValueError: as `from_dict`, or the file is not JSON; it names the file.
    """
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
    for key in (
      "vocab_size",
      "hidden_size",
      "num_hidden_layers",
      "num_attention_heads",
      "intermediate_size",
      "max_position_embeddings",
      "type_vocab_size",
    ):
      value = getattr(self, key)
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{source}: {key} is {value!r}, not a positive int")
      most = _MOST_LAYERS if key == "num_hidden_layers" else _LARGEST_SIZE
      if value > most:
        raise ValueError(f"{source}: {key} is {value}, more than {most}")
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
      value = getattr(self, key)
      if not _is_number(value) or not 0.0 <= value < 1.0:
        raise ValueError(f"{source}: {key} is {value!r}, not in [0, 1)")
    stddev = self.initializer_range
    if not _is_number(stddev) or not 0.0 < stddev <= _LARGEST_STDDEV:
      raise ValueError(
        f"{source}: initializer_range is {stddev!r}, not > 0 and at most "
        f"{_LARGEST_STDDEV:g}"
      )
    if self.hidden_size % self.num_attention_heads:
      raise ValueError(
        f"{source}: hidden_size {self.hidden_size} is not a multiple of "
        f"num_attention_heads {self.num_attention_heads}"
      )
    if not isinstance(self.pre_layer_norm, bool):
      raise ValueError(
        f"{source}: pre_layer_norm is {self.pre_layer_norm!r}, not a bool"
      )
    act = self.hidden_act
    named = isinstance(act, str) and act.lower() in ACTIVATION_NAMES
    if not (named or act is None or callable(act)):
      raise ValueError(
        f"{source}: hidden_act is {act!r}, not one of {ACTIVATION_NAMES}"
      )

  def to_dict(self):
    """A dictionary from which `from_dict` makes an equal configuration."""
    return copy.deepcopy(self.__dict__)

  def to_json_string(self):
    """`to_dict` as JSON text, keys sorted, with a newline at its end."""
    return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"
