"""Every weight of a BERT: of this creation, FLOPs and conversion derive.

An encoder's dense layers are `dense_layers`, which the encoder makes and
`model_flops` counts. `weights` has all variables by their names, with those of
transformers' modeling_bert.py (https://github.com/huggingface/transformers).
"""

import re
from typing import NamedTuple

from model import tasks
from model.bert_config import BertConfig

ENCODER, POOLER = "encoder", "pooler"
MASKED_LM, NEXT_SENTENCE = tasks.MASKED_LM.name, tasks.NEXT_SENTENCE.name
CLASSIFIER, QUESTIONS = tasks.LABELS.name, tasks.QUESTIONS.name
PARTS = (ENCODER, POOLER, MASKED_LM, NEXT_SENTENCE, CLASSIFIER, QUESTIONS)

# The matmuls of a layer, by the scopes of their variables.
QUERY, KEY, VALUE = (f"attention/self/{n}" for n in ("query", "key", "value"))
ATTENDED = "attention/output/dense"
WIDE, NARROW = "intermediate/dense", "output/dense"


class DenseLayer(NamedTuple):
  """A dense layer inside of an encoder layer."""

  name: str
  inputs: int
  units: int
  # What tensor slices divide between them: "inputs" or "units".
  cut: str
  # Of `mixed_precision.Policy`, which has its type.
  part: str
  # Whether all tokens need it, also where only some are asked for.
  of_all_tokens: bool = False


def dense_layers(config: BertConfig) -> list[DenseLayer]:
  """The dense layers of one encoder layer, in order."""
  width, inner = config.hidden_size, config.intermediate_size
  return [
    DenseLayer(QUERY, width, width, "units", "attention"),
    DenseLayer(KEY, width, width, "units", "attention", of_all_tokens=True),
    DenseLayer(VALUE, width, width, "units", "attention", of_all_tokens=True),
    DenseLayer(ATTENDED, width, width, "inputs", "attention"),
    DenseLayer(WIDE, width, inner, "units", "feed_forward"),
    DenseLayer(NARROW, inner, width, "inputs", "feed_forward"),
  ]


class Weight(NamedTuple):
  """A variable under its name here and in Hugging Face's files."""

  part: str  # one of PARTS
  name: str
  shape: tuple  # None stands for the number of labels

  @property
  def is_kernel(self) -> bool:
    """Whether it is a dense layer's matrix, [in, out] here, [out, in] there."""
    return self.name.endswith("/kernel")

  @property
  def huggingface(self) -> str:
    name = self.name
    for pattern, replacement in _RENAMED:
      name = pattern.sub(replacement, name)
    return name


_RENAMED = (
  (re.compile(r"^cls/squad"), "qa_outputs"),
  (re.compile(r"^output_"), "classifier/output_"),
  (re.compile(r"/layer_"), "/layer/"),
  (re.compile(r"_embeddings$"), r"\g<0>/weight"),
  (re.compile(r"/(kernel|gamma|output_weights)$"), "/weight"),
  (re.compile(r"/(beta|output_bias)$"), "/bias"),
  (re.compile(r"/"), "."),
)


def weights(config: BertConfig) -> list[Weight]:
  """Every weight that a BERT may have, with all heads, in the graph's order."""
  width = config.hidden_size
  # The masked LM head's output weights are the word embeddings.
  words = ("word", config.vocab_size)
  positions = ("position", config.max_position_embeddings)
  segments = ("token_type", config.type_vocab_size)
  table: list[Weight] = []
  for name, rows in (words, positions, segments):
    embeddings = f"bert/embeddings/{name}_embeddings"
    table.append(Weight(ENCODER, embeddings, (rows, width)))
  table += _norm(ENCODER, "bert/embeddings", width)
  for number in range(config.num_hidden_layers):
    layer = f"bert/encoder/layer_{number}"
    for dense in dense_layers(config):
      name = f"{layer}/{dense.name}"
      table += _dense(ENCODER, name, dense.inputs, dense.units)
    for block in ("attention/output", "output"):
      table += _norm(ENCODER, f"{layer}/{block}", width)
  table += _dense(POOLER, "bert/pooler/dense", width, width)
  transform = "cls/predictions/transform"
  table += _dense(MASKED_LM, f"{transform}/dense", width, width)
  table += _norm(MASKED_LM, transform, width)
  table.append(Weight(MASKED_LM, tasks.MASKED_LM.bias, (config.vocab_size,)))
  for head, classes in (
    (tasks.NEXT_SENTENCE, 2),
    (tasks.LABELS, None),
    (tasks.QUESTIONS, 2),
  ):
    matrix = head.bias.replace("output_bias", "output_weights")
    table.append(Weight(head.name, matrix, (classes, width)))
    table.append(Weight(head.name, head.bias, (classes,)))
  return table


def _dense(part: str, scope: str, inputs: int, units: int) -> list[Weight]:
  return [
    Weight(part, f"{scope}/kernel", (inputs, units)),
    Weight(part, f"{scope}/bias", (units,)),
  ]


def _norm(part: str, scope: str, width: int) -> list[Weight]:
  return [
    Weight(part, f"{scope}/LayerNorm/gamma", (width,)),
    Weight(part, f"{scope}/LayerNorm/beta", (width,)),
  ]
