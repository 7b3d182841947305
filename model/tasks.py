"""What a BERT can be for: the one table of its heads.

To add a task, enter its head here, its weights in `model.weights`, its outputs
in `interop.inference` and its answers in `interop.predictions`.
"""

from collections.abc import Collection
from typing import NamedTuple

# What a model is for, as task.json says.
PRETRAINING, CLASSIFIER = "pretraining", "classifier"
SQUAD, NER = "squad", "ner"


class Head(NamedTuple):
  """Layers on the encoder that answer one kind of question."""

  name: str  # for people
  bias: str  # a variable that only this head has
  kind: str
  signature: str  # of `interop.inference`
  reads_pooled: bool  # the pooled output of the first token, not all tokens
  # What follows "For" in transformers' class of a model with this head only.
  architecture: str
  pipeline: str  # what Hugging Face's Hub calls the use of it
  outputs: int | None = None  # for a text or token; None: labels, or words

  @property
  def weights(self) -> str:
    """The name of the matrix [outputs, H] beside the bias."""
    return self.bias.replace("output_bias", "output_weights")


# The signatures' input of a masked LM head: which tokens to predict.
POSITIONS = "masked_lm_positions"

MASKED_LM = Head(
  "masked LM head", "cls/predictions/output_bias", PRETRAINING, "masked_lm",
  False, "MaskedLM", "fill-mask",
)  # fmt: skip
NEXT_SENTENCE = Head(
  "next sentence head", "cls/seq_relationship/output_bias", PRETRAINING,
  "next_sentence", True, "NextSentencePrediction", "feature-extraction", 2,
)  # fmt: skip
QUESTIONS = Head(
  "question answering head", "cls/squad/output_bias", SQUAD, "span", False,
  "QuestionAnswering", "question-answering", 2,
)  # fmt: skip
LABELS = Head(
  "classifier", "output_bias", CLASSIFIER, "classifier", True,
  "SequenceClassification", "text-classification",
)  # fmt: skip
TOKENS = Head(
  "token classifier", "cls/tokens/output_bias", NER, "token_classifier", False,
  "TokenClassification", "token-classification",
)  # fmt: skip
# Of a model with several the last one decides what the model is for.
HEADS = (NEXT_SENTENCE, MASKED_LM, QUESTIONS, LABELS, TOKENS)
LABELLED = (TOKENS, LABELS)  # their rows are a task's labels
BY_KIND = {head.kind: head for head in HEADS}
FINETUNED = tuple(kind for kind in BY_KIND if kind != PRETRAINING)


def label_bias(variables: Collection[str]) -> str:
  """The bias of the head whose rows are labels; "" without one."""
  return next((h.bias for h in LABELLED if h.bias in variables), "")
