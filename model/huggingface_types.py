"""transformers' model types in our terms: the keys of each, its tensors, heads.

From this table follow how config.json and tensors are read and written, and
which models are refused. Names and defaults are those of transformers'
configuration_*.py and modeling_*.py, https://github.com/huggingface/transformers.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from config.bert_config import KEYS_WITHOUT_EFFECT, BertConfig
from model import tasks
from model import weights as w
from model.tasks import LABELS, MASKED_LM, NEXT_SENTENCE, QUESTIONS, Head

_WORDS = "bert/embeddings/word_embeddings"
_LAYER = "bert/encoder/layer_"
_TRANSFORM = "cls/predictions/transform"

# The scope of a head's weights here -> transformers' module in most types.
_HEADS = {
  head.bias.removesuffix("output_bias").removesuffix("/"): head.module
  for head in tasks.HEADS
  if head.kind != tasks.PRETRAINING
}

_PAD = {"pad_token_id": "pad"}
_ENDS = {**_PAD, "bos_token_id": "cls", "eos_token_id": "sep"}


class Key(NamedTuple):
  """A key of config.json that says one of ours."""

  name: str
  default: Any  # transformers', which a file without the key means
  # Value in the file -> ours; None: the same. Of several values with one
  # meaning the first is written.
  values: dict | None = None

  def encode(self, value):
    """The file's value of ours; the default for one that has none there."""
    if self.values is None:
      return value
    for word, meaning in self.values.items():
      if meaning == value:
        return word
    return self.default

  def decode(self, value):
    """Our value of the file's; ValueError for one that we cannot be."""
    if self.values is None:
      return value
    if value not in [*self.values]:  # it may be a list, too
      known = ", ".join(self.values)
      raise ValueError(f"{self.name} is {value!r}, not one of {known}")
    return self.values[value]


# google/bert's gelu is the approximation by tanh, Hugging Face's the exact one.
_EXACT = {"gelu": "gelu_erf", "gelu_python": "gelu_erf"}
_ACTIVATIONS = _EXACT | {
  "relu": "relu", "tanh": "tanh", "linear": "linear", "silu": "silu",
  "swish": "silu", "gelu_new": "gelu", "gelu_fast": "gelu",
  "gelu_pytorch_tanh": "gelu", "gelu_python_tanh": "gelu",
  "gelu_accurate": "gelu",
}  # fmt: skip
_POOLINGS = {"cls": "cls", "mean": "mean"}
# "late" is the mean of a layer's outputs, which is its output of the mean.
_EURO_POOLINGS = {"bos": "cls", "mean": "mean", "late": "mean"}


def _keys(**keys) -> dict[str, Key]:
  """Our key -> `Key`, of (name there, default, values) or a default alone."""
  table = {}
  for name, value in keys.items():
    table[name] = Key(*value) if isinstance(value, tuple) else Key(name, value)
  return table


class ModelType:
  """What all types have in common, and what each says."""

  name: str  # as model_type has it
  title: str  # for people
  classes: str  # how the names of its classes begin
  base: str  # how tensors of the encoder begin in a model with a head
  keys: dict[str, Key]  # by our name
  # The values of our keys that this type has always, where they are not BERT's.
  implied: dict[str, Any] = {}
  # What else has several words for one meaning, beside keys of ours.
  others: tuple[Key, ...] = ()
  # Special tokens whose ids config.json has.
  special: dict[str, str] = _PAD
  # Keys of which we know one value, if a file says more than null: the one that
  # `write` gives, or else this one, which is also that of a missing key.
  checked: dict[str, Any] = {
    "is_decoder": False, "add_cross_attention": False, "pruned_heads": {},
    "quantization_config": None, "rope_scaling": None,
    "partial_rotary_factor": 1.0,
  }  # fmt: skip
  why: dict[str, str] = {}  # our key -> what its values depend on, for people
  heads: tuple[Head, ...]
  body: tuple[str, ...]  # parts of `weights` that are no heads
  modules: dict[str, str]  # scope here -> module there
  pooler = "pooler."  # in names of what a classifier of texts reads
  decoder: str  # the module of the words' weights, which may be the embeddings

  # config.json

  def write(self, config: BertConfig, ids: dict[str, int]) -> dict:
    """What config.json says, but for heads; `ids` are of "pad", "cls" etc."""
    values = {**vars(config), **config.meaning()}
    content = {key.name: key.encode(values[k]) for k, key in self.keys.items()}
    for name, token in self.special.items():
      if token in ids:
        content[name] = ids[token]
    return content

  def complete(self, content: dict) -> dict:
    """A config.json with all of `keys`, in the words that `write` has.

    ValueError for a value that we cannot be.
    """
    keys = [*self.keys.values(), *self.others]
    content = {key.name: key.default for key in keys} | content
    for key in keys:
      if content[key.name] is not None:
        content[key.name] = key.encode(key.decode(content[key.name]))
    return content

  def read(self, content: dict) -> dict:
    """Our keys' values, of a config.json that is `complete`."""
    values = {k: key.decode(content[key.name]) for k, key in self.keys.items()}
    return {**self.implied, **values}

  def unsaid(
    self, config: BertConfig, heads: Sequence[Head], ids: dict[str, int]
  ) -> list[str]:
    """Our keys of which the written config.json says another model."""
    content = self.complete(self.write(config, ids))
    there = BertConfig(**self.read(content))
    keys = config.differences(there)
    # It also says whether all heads read through the masked LM head's layer.
    moves = config.shares_transform != there.shares_transform
    for head in heads:
      moved = moves and head.bias and head is not MASKED_LM
      if head.reads_pooled or moved:
        return keys
    return [key for key in keys if key != "classifier_pooling"]

  # Tensors

  def module(self, scope: str, layers: int) -> str:
    """The module that has what is in our `scope`."""
    raise NotImplementedError

  def tensors(
    self, config: BertConfig, heads: Sequence[Head]
  ) -> dict[str, list[w.Weight]]:
    """The name of each tensor -> our weights that it is made of, in order.

    A name that several heads have is the last one's.
    """
    # A tensor of several weights, as ModernBERT's Wqkv, has them one below the
    # other, in the order of the table.
    weights, tensors = w.weights(config), dict[str, list[w.Weight]]()
    parts = [head.name for head in heads if head in self.heads]
    for part in (*self.body, *parts):
      of_part = collections.defaultdict(list)
      for weight in weights:
        if weight.part == part:
          module = self.module(weight.scope, config.num_hidden_layers)
          of_part[f"{module}.{weight.role}"].append(weight)
      tensors.update(of_part)
    return tensors

  def rows(self, weight: w.Weight, config: BertConfig) -> np.ndarray | None:
    """Which of our columns each of the tensor's rows is; None: the same."""
    return None

  def constants(self, config: BertConfig) -> dict[str, np.ndarray]:
    """Tensors that no weight of ours is, by name."""
    return {}

  def tied(self) -> dict[str, str]:
    """A tensor -> the one that it equals, if the config does not untie it."""
    words, head = self.module(_WORDS, 0), self.module("cls/predictions", 0)
    return {
      f"{self.decoder}.weight": f"{words}.weight",
      f"{self.decoder}.bias": f"{head}.bias",
    }

  # Classes

  def architecture(self, heads: Sequence[Head]) -> str:
    """The class of a model with these heads: the last one's, if it has one."""
    heads = [head for head in heads if head in self.heads]
    if {*heads} == {MASKED_LM, NEXT_SENTENCE}:
      return f"{self.classes}ForPreTraining"
    use = f"For{heads[-1].architecture}" if heads else "Model"
    return f"{self.classes}{use}"

  def architectures(self) -> list[str]:
    """All that `architecture` can be."""
    every: list = [[], [NEXT_SENTENCE, MASKED_LM]]
    every += [[head] for head in self.heads]
    return [*dict.fromkeys(map(self.architecture, every))]


class _Bert(ModelType):
  name, title, classes, base = "bert", "BERT", "Bert", "bert."
  keys = _keys(
    vocab_size=30522, hidden_size=768, num_hidden_layers=12,
    num_attention_heads=12, intermediate_size=3072,
    hidden_act=("hidden_act", "gelu", _ACTIVATIONS), hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1, max_position_embeddings=512,
    type_vocab_size=2, initializer_range=0.02,
    norm_eps=("layer_norm_eps", 1e-12),
  )  # fmt: skip
  checked = {**ModelType.checked, "position_embedding_type": "absolute"}
  heads: tuple[Head, ...] = tasks.HEADS
  body: tuple[str, ...] = w.ENCODER, w.POOLER, w.TRANSFORM
  modules = _HEADS
  decoder = "cls.predictions.decoder"

  def write(self, config, ids):
    return {
      "position_embedding_type": "absolute",
      **super().write(config, ids),
      # A model without segments is none of these.
      "type_vocab_size": max(1, config.type_vocab_size),
    }

  def read(self, content):
    values = super().read(content)
    for key in KEYS_WITHOUT_EFFECT:
      if key in content:
        values[key] = content[key]
    return values

  def module(self, scope, layers):
    name = scope.replace("/layer_", "/layer.").replace("/", ".")
    if name.startswith("bert."):
      name = self.base + name.removeprefix("bert.")
    return self.modules.get(scope, name)


class _Roberta(_Bert):
  """Its positions begin after the id of [PAD].

  Its classifier of texts has the layer in itself that is BERT's pooler.
  """

  name, title, classes, base = "roberta", "RoBERTa", "Roberta", "roberta."
  keys = _Bert.keys | _keys(
    vocab_size=50265, hidden_act=("hidden_act", "gelu", _EXACT),
    position_offset=("pad_token_id", 1),
  )  # fmt: skip
  special = _ENDS
  why = {"position_offset": " (it is the id of [PAD] plus 1)"}
  heads = MASKED_LM, QUESTIONS, LABELS, tasks.TOKENS
  modules = {
    f"{_TRANSFORM}/dense": "lm_head.dense",
    f"{_TRANSFORM}/LayerNorm": "lm_head.layer_norm",
    "cls/predictions": "lm_head",
    **_HEADS,
  }
  pooler = "classifier.dense."
  decoder = "lm_head.decoder"

  def tensors(self, config, heads):
    moved = {w.CLASSIFIER: "classifier.out_proj."}
    if heads and heads[-1] is LABELS:
      moved[w.POOLER] = self.pooler
    tensors = {}
    for name, weights in super().tensors(config, heads).items():
      module, _, role = name.rpartition(".")
      tensors[moved.get(weights[0].part, f"{module}.") + role] = weights
    return tensors

  def write(self, config, ids):
    # RoBERTa's positions count from the id of [PAD] plus 1, and its table has
    # rows for those that no token has.
    pad = max(0, config.position_offset - 1)
    content = super().write(config, {"pad": pad, **ids})
    content["max_position_embeddings"] += content["pad_token_id"] + 1
    return content

  def read(self, content):
    values = super().read(content)
    values["position_offset"] = 1 + (values["position_offset"] or 0)
    values["max_position_embeddings"] -= values["position_offset"]
    return values


class _RoFormer(_Bert):
  """Rotary positions, of which it turns neighbours where we turn halves.

  Its classifier of texts is another one than BERT's.
  """

  name, title, classes, base = "roformer", "RoFormer", "RoFormer", "roformer."
  keys = _Bert.keys | _keys(vocab_size=50000, max_position_embeddings=1536)
  implied = {"position_type": "rotary"}
  checked = {
    **ModelType.checked, "embedding_size": None, "rotary_value": False,
  }  # fmt: skip
  heads = MASKED_LM, QUESTIONS, tasks.TOKENS
  body = w.ENCODER, w.TRANSFORM

  def write(self, config, ids):
    content = super().write(config, ids)
    del content["position_embedding_type"]
    return {**content, "embedding_size": config.hidden_size}

  def rows(self, weight, config):
    if not weight.scope.endswith((w.QUERY, w.KEY)):
      return None
    units = np.arange(config.hidden_size).reshape(-1, 2, config.head_size // 2)
    return units.swapaxes(1, 2).ravel()

  def constants(self, config):
    positions = np.arange(config.max_position_embeddings)
    exponents = np.arange(0, config.head_size, 2) / config.head_size
    angles = np.outer(positions, 10000.0**-exponents)
    sines = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return {f"{self.base}encoder.embed_positions.weight": sines.astype("f4")}


_FULL, _SLIDING = "full_attention", "sliding_attention"  # types of layers
_PLAIN = {"rope_type": "default"}  # rotary positions without a scale


def _rope(rope: dict | None, theta) -> dict:
  """Rotary positions with what is not said, by the newer name of their type."""
  rope = {"rope_theta": theta, **(rope or {})}
  kind = rope.pop("type", _PLAIN["rope_type"])
  return {"rope_type": kind, **rope}


class _PreNorm(ModelType):
  """Rotary positions, gates, and a norm before each block."""

  implied: dict[str, Any] = {
    "position_type": "rotary", "pre_layer_norm": True, "gated": True,
    "type_vocab_size": 0, "hidden_dropout_prob": 0.0,
  }  # fmt: skip
  base = "model."
  body = w.ENCODER, w.TRANSFORM
  layer: dict[str, str]  # a layer's scope here -> its module there
  norms: tuple[str, str]  # before a layer's attention, and after the last one
  checked = {**ModelType.checked, "head_dim": None, "rope_parameters": None}

  def complete(self, content):
    content = super().complete(content)
    # A scaling of this type is none.
    if _rope(content.get("rope_scaling"), None) == _rope({}, None):
      content["rope_scaling"] = None
    return content

  def module(self, scope, layers):
    if scope in self.modules:
      return self.modules[scope]
    number, _, part = scope.removeprefix(_LAYER).partition("/")
    if part != "output/LayerNorm":
      return f"model.layers.{number}.{self.layer[part]}"
    # Our layers end with the norm that the next one begins with there.
    (first, last), following = self.norms, int(number) + 1
    return f"model.layers.{following}.{first}" if following < layers else last


class _ModernBert(_PreNorm):
  """Layers and wavelengths have keys that transformers 4 reads, and 5."""

  name, title, classes = "modernbert", "ModernBERT", "ModernBert"
  keys = _keys(
    vocab_size=50368, hidden_size=768, num_hidden_layers=22,
    num_attention_heads=12, intermediate_size=1152,
    hidden_act=("hidden_activation", "gelu", _ACTIVATIONS),
    max_position_embeddings=8192, initializer_range=0.02,
    attention_output_dropout=("attention_dropout", 0.0),
    attention_probs_dropout_prob=("attention_dropout", 0.0),
    embedding_dropout=0.0, global_rope_theta=160000.0, local_rope_theta=10000.0,
    global_attn_every_n_layers=3, local_attention=128, attention_bias=False,
    norm_bias=False, norm_eps=1e-5, mlp_bias=False, classifier_bias=False,
    classifier_pooling=("classifier_pooling", "cls", _POOLINGS),
    tie_word_embeddings=True, decoder_bias=True,
  )  # fmt: skip
  implied = {**_PreNorm.implied, "scaled_initializer": True}
  special = {**_ENDS, "cls_token_id": "cls", "sep_token_id": "sep"}
  others = (Key("classifier_activation", "gelu", _ACTIVATIONS),)
  checked = _PreNorm.checked | {
    "classifier_activation": "gelu", "layer_types": None,
    "sliding_window": None,
  }  # fmt: skip
  heads = MASKED_LM, QUESTIONS, LABELS, tasks.TOKENS
  modules = {
    _WORDS: "model.embeddings.tok_embeddings",
    "bert/embeddings/LayerNorm": "model.embeddings.norm",
    f"{_TRANSFORM}/dense": "head.dense",
    f"{_TRANSFORM}/LayerNorm": "head.norm",
    "cls/predictions": "decoder",
    **dict.fromkeys(_HEADS, "classifier"),
  }
  layer = {
    **dict.fromkeys((w.QUERY, w.KEY, w.VALUE), "attn.Wqkv"),
    w.ATTENDED: "attn.Wo",
    "attention/output/LayerNorm": "mlp_norm",
    **dict.fromkeys((w.WIDE, w.GATE), "mlp.Wi"),
    w.NARROW: "mlp.Wo",
  }
  norms = "attn_norm", "model.final_norm"
  decoder = "decoder"

  def write(self, config, ids):
    content = super().write(config, ids)
    layers = range(config.num_hidden_layers)
    return {
      **content,
      "embedding_dropout": config.dropout_after("embedding"),
      "classifier_activation": content["hidden_activation"],
      "layer_types": [
        _SLIDING if config.is_local(layer) else _FULL for layer in layers
      ],
      "rope_parameters": {
        _FULL: {**_PLAIN, "rope_theta": config.global_rope_theta},
        _SLIDING: {**_PLAIN, "rope_theta": config.local_rope_theta},
      },
    }

  def complete(self, content):
    """In the keys of transformers 4, where the file has those of 5, too."""
    content = super().complete(content)
    if types := content.get("layer_types"):
      # Where only the first layer is full, the older key alone knows n.
      every = max(len(types), content["global_attn_every_n_layers"])
      if _FULL in types[1:]:
        every = types.index(_FULL, 1)
      content["global_attn_every_n_layers"] = every
    # transformers 5 reads it also where it contradicts the older key.
    window = content.pop("sliding_window", None)
    if window is not None:
      content["local_attention"] = 2 * window or 1
    ropes = content.get("rope_parameters") or {}
    full = _rope(ropes.get(_FULL), content["global_rope_theta"])
    # To transformers 4, null is the wavelength of the other layers.
    theta = content["local_rope_theta"] or full["rope_theta"]
    sliding = _rope(ropes.get(_SLIDING), theta)
    content["rope_parameters"] = {**ropes, _FULL: full, _SLIDING: sliding}
    content["global_rope_theta"] = full["rope_theta"]
    return {**content, "local_rope_theta": sliding["rope_theta"]}


class _EuroBert(_PreNorm):
  """Its words have a bias if its layers have."""

  name, title, classes = "eurobert", "EuroBERT", "EuroBert"
  keys = _keys(
    vocab_size=128256, hidden_size=768, num_hidden_layers=12,
    num_attention_heads=12, num_key_value_heads=None, intermediate_size=3072,
    hidden_act=("hidden_act", "silu", _ACTIVATIONS),
    max_position_embeddings=8192, initializer_range=0.02,
    attention_probs_dropout_prob=("attention_dropout", 0.0),
    global_rope_theta=("rope_theta", 10000.0), attention_bias=False,
    norm_eps=("rms_norm_eps", 1e-5), decoder_bias=("mlp_bias", False),
    mlp_bias=False,
    classifier_pooling=("classifier_pooling", "late", _EURO_POOLINGS),
    tie_word_embeddings=False,
  )  # fmt: skip
  implied = {
    **_PreNorm.implied, "norm": "rms", "norm_bias": False,
    "embedding_norm": False, "mlm_head": False, "attention_output_dropout": 0.0,
  }  # fmt: skip
  special = {**_ENDS, "mask_token_id": "mask"}
  heads = MASKED_LM, tasks.TOKENS
  modules = {
    _WORDS: "model.embed_tokens",
    "cls/tokens": "classifier",
    "bert/embeddings/LayerNorm": "model.layers.0.input_layernorm",
    "cls/predictions": "lm_head",
  }
  layer = {
    w.QUERY: "self_attn.q_proj", w.KEY: "self_attn.k_proj",
    w.VALUE: "self_attn.v_proj", w.ATTENDED: "self_attn.o_proj",
    "attention/output/LayerNorm": "post_attention_layernorm",
    w.WIDE: "mlp.gate_proj", w.GATE: "mlp.up_proj", w.NARROW: "mlp.down_proj",
  }  # fmt: skip
  norms = "input_layernorm", "model.norm"
  decoder = "lm_head"

  def write(self, config, ids):
    return {
      **super().write(config, ids),
      "head_dim": config.head_size,
      "rope_parameters": {**_PLAIN, "rope_theta": config.global_rope_theta},
    }

  def complete(self, content):
    content = super().complete(content)
    rope = _rope(content.get("rope_parameters"), content["rope_theta"])
    theta = rope["rope_theta"]
    return {**content, "rope_parameters": rope, "rope_theta": theta}


_TYPES = _Bert(), _Roberta(), _RoFormer(), _ModernBert(), _EuroBert()
TYPES = {kind.name: kind for kind in _TYPES}


def nearest(config: BertConfig, heads: Sequence[Head]) -> ModelType:
  """The type that says most of a model."""
  return min(_TYPES, key=lambda kind: len(kind.unsaid(config, heads, {})))


def lacks(config: BertConfig, head: Head, ids: dict[str, int]) -> str:
  """What the nearest type lacks of a model with this head; "" if nothing."""
  kind = nearest(config, [head])
  keys = []
  for key in kind.unsaid(config, [head], ids):
    keys.append(key + kind.why.get(key, ""))
  # Any type has a model without a head, for what needs no weights.
  if head.bias and head not in kind.heads:
    keys.append(f"this {head.name}")
  return f"{kind.title} lacks {', '.join(keys)}" if keys else ""
