"""The table of all weights of a BERT.

Variable creation, FLOP counts and conversion derive from it.

An encoder's dense layers are `dense_layers`, which the encoder makes and
`model_flops` counts. `weights` has all variables by their names, of which
`huggingface_types` makes transformers'.
"""

from collections.abc import Collection
from typing import NamedTuple

from config.bert_config import BertConfig
from model import tasks

ENCODER, POOLER = "encoder", "pooler"
# The masked LM head's dense layer and norm, where other heads read them, too.
TRANSFORM = "transform of heads"
MASKED_LM, NEXT_SENTENCE = tasks.MASKED_LM.name, tasks.NEXT_SENTENCE.name
CLASSIFIER, QUESTIONS = tasks.LABELS.name, tasks.QUESTIONS.name
TOKEN_CLASSIFIER = tasks.TOKENS.name
PRETRAINED_PARTS = (ENCODER, POOLER, TRANSFORM, MASKED_LM, NEXT_SENTENCE)
_OTHER_HEADS = [head for head in tasks.HEADS if head.kind != tasks.PRETRAINING]
PARTS = (*PRETRAINED_PARTS, *(head.name for head in _OTHER_HEADS))

# The matmuls of a layer, by the scopes of their variables.
QUERY, KEY, VALUE = (f"attention/self/{n}" for n in ("query", "key", "value"))
ATTENDED = "attention/output/dense"
WIDE, GATE, NARROW = "intermediate/dense", "intermediate/gate", "output/dense"


class DenseLayer(NamedTuple):
  """A dense layer inside of an encoder layer."""

  name: str
  inputs: int
  units: int
  # What tensor slices divide between them, "inputs" or "units": units of what
  # begins a block, inputs of what ends it, so that a block sums once.
  cut: str
  # Of `mixed_precision.Policy`, which has its type.
  part: str
  has_bias: bool
  # Whether all tokens need it, also where only some are asked for.
  of_all_tokens: bool = False


def dense_layers(config: BertConfig) -> list[DenseLayer]:
  """The dense layers of one encoder layer, in order."""
  width, inner = config.hidden_size, config.intermediate_size
  keys = config.key_value_heads * config.head_size
  attention: dict = dict(part="attention", has_bias=config.attention_bias)
  feed_forward: dict = dict(part="feed_forward", has_bias=config.mlp_bias)
  # The last layer computes queries of few tokens, but keys and values of all.
  layers = [
    DenseLayer(QUERY, width, width, "units", **attention),
    DenseLayer(KEY, width, keys, "units", **attention, of_all_tokens=True),
    DenseLayer(VALUE, width, keys, "units", **attention, of_all_tokens=True),
    DenseLayer(ATTENDED, width, width, "inputs", **attention),
    DenseLayer(WIDE, width, inner, "units", **feed_forward),
  ]
  if config.gated:
    layers.append(DenseLayer(GATE, width, inner, "units", **feed_forward))
  layers.append(DenseLayer(NARROW, inner, width, "inputs", **feed_forward))
  return layers


class Weight(NamedTuple):
  """A variable that a model of a config may have."""

  part: str  # one of PARTS
  name: str
  shape: tuple  # None stands for the number of labels

  @property
  def is_kernel(self) -> bool:
    """Whether it is a dense layer's matrix, [in, out] here, [out, in] there."""
    return self.name.endswith("/kernel")

  @property
  def scope(self) -> str:
    """The module that it belongs to; a table of embeddings is one itself."""
    scope, _, variable = self.name.rpartition("/")
    return scope if variable in _ROLES else self.name

  @property
  def role(self) -> str:
    """What it is in its module, in PyTorch's words."""
    return _ROLES.get(self.name.rpartition("/")[2], "weight")


_ROLES = {
  **dict.fromkeys(("kernel", "gamma", "output_weights"), "weight"),
  **dict.fromkeys(("bias", "beta", "output_bias"), "bias"),
}


def weights(config: BertConfig) -> list[Weight]:
  """Every weight that a BERT may have, with all heads, in the graph's order."""
  width = config.hidden_size
  # Embeddings, then layers, the pooler and the heads.
  words, table = (config.vocab_size, width), []
  for name, rows in embedding_tables(config):
    embeddings = f"bert/embeddings/{name}_embeddings"
    table.append(Weight(ENCODER, embeddings, (rows, width)))
  if config.embedding_norm or config.pre_layer_norm:
    table += _norm(ENCODER, "bert/embeddings", config)
  for number in range(config.num_hidden_layers):
    layer = f"bert/encoder/layer_{number}"
    for dense in dense_layers(config):
      name = f"{layer}/{dense.name}"
      table += _dense(ENCODER, name, dense.inputs, dense.units, dense.has_bias)
    for block in ("attention/output", "output"):
      table += _norm(ENCODER, f"{layer}/{block}", config)
  if config.has_pooler:
    table += _dense(POOLER, "bert/pooler/dense", width, width)
  if config.mlm_head:
    scope, has_bias = "cls/predictions/transform", config.classifier_bias
    part = TRANSFORM if config.shares_transform else MASKED_LM
    table += _dense(part, f"{scope}/dense", width, width, has_bias)
    table += _norm(part, scope, config)
  if not config.tie_word_embeddings:
    table.append(Weight(MASKED_LM, "cls/predictions/output_weights", words))
  if config.decoder_bias:
    table.append(Weight(MASKED_LM, tasks.MASKED_LM.bias, words[:1]))
  for head in (tasks.NEXT_SENTENCE, *_OTHER_HEADS):
    table.append(Weight(head.name, head.weights, (head.outputs, width)))
    table.append(Weight(head.name, head.bias, (head.outputs,)))
  return table


def heads_of(
  config: BertConfig, variables: Collection[str]
) -> list[tasks.Head]:
  """The heads that these variables have, in the order of `tasks.HEADS`."""
  last = {weight.part: weight.name for weight in weights(config)}
  # A masked LM head without weights of its own is where it can be computed.
  last.setdefault(MASKED_LM, last.get(TRANSFORM, last[ENCODER]))
  return [head for head in tasks.HEADS if last[head.name] in variables]


def kind_of(config: BertConfig, variables: Collection[str]) -> str:
  """What a model with these variables is for."""
  heads = heads_of(config, variables)
  return heads[-1].kind if heads else tasks.PRETRAINING


def embedding_tables(config: BertConfig) -> list[tuple[str, int]]:
  """What has embeddings, which are added up, and its rows."""
  tables = [("word", config.vocab_size)]
  if config.position_type == "absolute":
    rows = config.position_offset + config.max_position_embeddings
    tables.append(("position", rows))
  if config.type_vocab_size:
    tables.append(("token_type", config.type_vocab_size))
  return tables


def _dense(part, scope, inputs: int, units: int, has_bias=True) -> list[Weight]:
  layer = [Weight(part, f"{scope}/kernel", (inputs, units))]
  if has_bias:
    layer.append(Weight(part, f"{scope}/bias", (units,)))
  return layer


def _norm(part: str, scope: str, config: BertConfig) -> list[Weight]:
  width = (config.hidden_size,)
  norm = [Weight(part, f"{scope}/LayerNorm/gamma", width)]
  if config.norm_bias:
    norm.append(Weight(part, f"{scope}/LayerNorm/beta", width))
  return norm
