"""Predictions for texts: words, labels, answers, entities, embeddings."""

import collections
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from common.console import tell
from common.errors import DataError
from finetuning import task_file
from finetuning.behaviour import INPUTS, Behaviour, Context, Input
from interop.heads import BEHAVIOURS, ENCODER, MASKED_LM, NEXT_SENTENCE
from interop.model_source import NOTHING_GIVEN, Given, Source, find
from model.tasks import POOLINGS
from text_encoders.base import MASK

_LIKE_MASKS = re.compile(r"(?i:\[mask\]|<\|?mask\|?>)")
_BATCH = 16  # sequences in one run of the graph


class Prediction(NamedTuple):
  """An answer, as JSON holds it and as people read it."""

  answer: dict
  lines: list[str]


class Predictor:
  """Makes the kind of predictions that a model is for."""

  def __init__(
    self,
    model,
    source: Source,
    top_k: int = 5,
    embedding: str | None = None,
    max_seq_length: int | None = None,
  ):
    """`model` is an `inference.Model`; the rest are predict.py's flags."""
    self._model, self._embedding = model, embedding
    length = max_seq_length or source.task.get("query_length")
    length = length or source.max_seq_length
    task_file.check_length(length, source.bert)
    self._context = Context(
      source.tokenizer(), source.task, length, top_k, embedding or POOLINGS[0]
    )
    # A pre-trained model has several uses, and the input says which is meant. A
    # fine-tuned one, and a request for vectors, have one for all inputs.
    self._only: Behaviour | None = None
    last = BEHAVIOURS[model.names()[-1]]
    if embedding:
      self._only = BEHAVIOURS[ENCODER]
    elif last.signature not in (ENCODER, NEXT_SENTENCE, MASKED_LM):
      self._only = last
      last.check(self._context)

  def close(self) -> None:
    self._model.close()

  def parse(self, line: str) -> Input:
    """Reads a line as `Behaviour.parse`."""
    return (self._only or BEHAVIOURS[ENCODER]).parse(line)

  def predict(self, inputs: Sequence[Input]) -> list[Prediction]:
    """Predictions in order; `UserError` for an input that does not fit."""
    # Inputs of one head share its runs of the graph, then go to their places.
    groups, names = collections.defaultdict(list), self._model.names()
    for number, one in enumerate(inputs):
      text = f"{one.text} {one.pair or ''}"
      masks = self._context.tokenizer.masks
      other = _LIKE_MASKS.search(masks.sub("", text))
      if other and MASKED_LM in names and not self._embedding:
        tell(
          f"{one.text[:60]!r}: {other[0]} is read as text: for a word to find "
          f"write {MASK}"
        )
      # A text with a mask is for the masked LM head, whatever else it is.
      name = ENCODER
      if masks.search(text):
        name = MASKED_LM
      elif one.pair and NEXT_SENTENCE in names:
        name = NEXT_SENTENCE
      behaviour = self._only or BEHAVIOURS[name]
      kinds = behaviour.reads(self._context)
      if one.kind not in kinds:
        raise DataError(
          f"{one.text[:60]!r}: this model reads {' and '.join(kinds)}"
        )
      groups[behaviour].append(number)
    predictions: dict[int, Prediction] = {}
    for behaviour, numbers in groups.items():
      run = functools.partial(self._run, behaviour)
      group = [inputs[number] for number in numbers]
      answers = behaviour.answers(group, self._context, run)
      for number, answer in zip(numbers, answers, strict=True):
        predictions[number] = Prediction(answer, behaviour.lines(answer))
    return [prediction for _, prediction in sorted(predictions.items())]

  def answers(self, texts: Iterable) -> list[dict]:
    """The answer for each text, as --json has it: for code and for tables.

    Two texts in a tuple are a pair, texts in a list the words of one text.
    """
    inputs = []
    texts = [texts] if isinstance(texts, str) else texts
    for number, text in enumerate(texts, 1):
      parts = [text] if isinstance(text, str) else text
      is_words = isinstance(text, list) and len(text) > 0
      is_pair = isinstance(text, tuple) and len(text) == 2
      if not (isinstance(text, str) or is_pair or is_words) or not all(
        isinstance(part, str) and part.strip() for part in parts
      ):
        raise DataError(
          f"text {number} is {text!r}: give a str, two in a tuple, or words in "
          "a list, not empty"
        )
      inputs.append(
        Input(" ".join(parts), words=parts) if is_words else Input(*parts)
      )
    return [prediction.answer for prediction in self.predict(inputs)]

  def _run(self, behaviour: Behaviour, examples: Sequence) -> Iterator[dict]:
    """Implements `behaviour.Run`."""
    for start in range(0, len(examples), _BATCH):
      _, ids, segments, *_ = zip(*examples[start : start + _BATCH], strict=True)
      masks = [np.ones_like(row) for row in ids]
      rows = dict(zip(INPUTS, (ids, masks, segments), strict=True))
      rows |= behaviour.arrays(ids, self._context)
      outputs = self._model.run(behaviour.signature, padded(rows))
      for row in range(len(ids)):
        yield {name: value[row] for name, value in outputs.items()}


def padded(rows: dict[str, Sequence]) -> dict[str, np.ndarray]:
  """A signature's inputs, int32 [B, S], of each one's B rows of any length."""
  arrays = {}
  for name, values in rows.items():
    arrays[name] = np.zeros([len(values), max(map(len, values))], np.int32)
    for target, row in zip(arrays[name], values, strict=True):
      target[: len(row)] = row
  return arrays


def load(
  model: str | Source, flags: Given = NOTHING_GIVEN, **settings
) -> Predictor:
  """The predictor of a model, by name or found, with `Predictor`'s settings."""
  source = find(model, flags) if isinstance(model, str) else model
  from interop import inference  # it loads TensorFlow

  return Predictor(inference.open_model(source), source, **settings)
