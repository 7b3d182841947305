"""The table of a BERT's heads: the facts of each that all other parts go by.

Its variables (`weights`, checkpoints, FLOPs), its names in transformers, and
the commands that train it and ask it derive from a row. What a head computes
and answers is in a module of its own, listed in `interop.heads`.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

# What a model is for, as task.json says.
PRETRAINING, CLASSIFIER = "pretraining", "classifier"
SQUAD, NER, EMBEDDER = "squad", "ner", "embedder"

# What an embedder's task.json can say: how a text's tokens become its vector,
# how vectors are compared, and which texts have a prompt of their own.
POOLINGS, SIMILARITIES = ("mean", "cls"), ("cosine", "dot")
SIDES = ("query", "document")
QUERY, DOCUMENT = SIDES


def is_cosine(task: Mapping) -> bool:
  """Whether the vectors of an embedder's task are compared by their cosine."""
  return task.get("similarity", SIMILARITIES[0]) == SIMILARITIES[0]


# The name of an input of the masked LM head: which tokens to predict.
POSITIONS = "masked_lm_positions"
# That of an embedder which leaves its prompt out of the mean: int32 [B, S], 1
# for the tokens that count.
POOLED = "pooled_mask"


class Head(NamedTuple):
  """What answers one kind of question: layers on the encoder, or none."""

  name: str  # for people
  bias: str  # a variable that only this head has; "": it has none
  kind: str
  signature: str  # in a SavedModel
  # What follows "For" in transformers' class of a model with this head only.
  architecture: str
  pipeline: str  # what Hugging Face's Hub calls the use of it
  reads_pooled: bool = False  # the pooled output, not every token's
  outputs: int | None = None  # for a text or token; None: labels, or tokens
  # Where transformers keeps the weights: BERT's classes, and most others'.
  module: str = "classifier"
  full_precision: bool = False  # the matmul is not in 16 bits
  script: str = ""  # trains it
  example: tuple[str, ...] = ("...",)  # arguments of predict.py

  @property
  def weights(self) -> str:
    """The name of the matrix [outputs, H] beside the bias."""
    return self.bias.replace("output_bias", "output_weights")


# fmt: off
MASKED_LM = Head(
  "masked LM head", "cls/predictions/output_bias", PRETRAINING, "masked_lm",
  "MaskedLM", "fill-mask", example=("... [MASK] ...",))
NEXT_SENTENCE = Head(
  "next sentence head", "cls/seq_relationship/output_bias", PRETRAINING,
  "next_sentence", "NextSentencePrediction", "feature-extraction",
  reads_pooled=True, outputs=2)
QUESTIONS = Head(
  "question answering head", "cls/squad/output_bias", SQUAD, "span",
  "QuestionAnswering", "question-answering", outputs=2, module="qa_outputs",
  full_precision=True, script="run_squad.py",
  example=("--question=...", "--context=..."))
LABELS = Head(
  "classifier", "output_bias", CLASSIFIER, "classifier",
  "SequenceClassification", "text-classification", reads_pooled=True,
  script="run_classifier.py")
TOKENS = Head(
  "token classifier", "cls/tokens/output_bias", NER, "token_classifier",
  "TokenClassification", "token-classification", script="run_ner.py")
EMBEDDING = Head(
  "embedding", "", EMBEDDER, "embedding", "", "sentence-similarity", outputs=0,
  script="run_embedder.py")
# fmt: on
# Those with variables. A model with several is for what the last of them does,
# if its task.json does not say that it is for what needs none.
HEADS = (NEXT_SENTENCE, MASKED_LM, QUESTIONS, LABELS, TOKENS)
BY_KIND = {head.kind: head for head in (*HEADS, EMBEDDING)}
FINETUNED = tuple(kind for kind in BY_KIND if kind != PRETRAINING)
LABELLED = TOKENS, LABELS  # whose rows are the labels of a task


def label_bias(variables: Collection[str]) -> str:
  """The bias of the head whose rows are labels; "" without one."""
  for head in LABELLED:
    if head.bias in variables:
      return head.bias
  return ""
