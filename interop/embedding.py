"""Texts to vectors, by any model: an embedder, or a plain encoder's mean."""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np

from common.console import tell
from common.errors import UserError
from corpus.text_files import gathered
from finetuning import sides, task_file
from finetuning.behaviour import Input
from interop.heads import BEHAVIOURS
from interop.model_source import Source, find
from interop.predictions import Prediction, padded
from model import tasks
from model.tasks import DOCUMENT, EMBEDDER, EMBEDDING, POOLED, QUERY, SIDES
from retrieval import nearest

_TOKENS = 4096  # about so many of a run of the graph
_WIDTH = 94  # characters of a text that is shown


class Embedder:
  """Makes vectors of texts, in batches of texts of like length."""

  def __init__(self, model, source: Source, max_seq_length: int | None = None):
    """`model` is an `inference.Model` with the signature of an embedder."""
    self._model, self.source = model, source
    self.size = source.bert.hidden_size
    self.is_cosine = tasks.is_cosine(source.task)
    self.cut = 0  # texts so far whose end was not read
    self._sides, tokenizer = {}, source.tokenizer()
    lengths = {QUERY: source.task.get("query_length")}
    for side in SIDES:
      length = max_seq_length or lengths.get(side) or source.max_seq_length
      task_file.check_length(length, source.bert)
      self._sides[side] = sides.of_task(source.task, side, tokenizer, length)

  def embed(
    self, texts: str | Sequence[str], side: str = DOCUMENT
  ) -> np.ndarray:
    """float32 [n, d]: the vectors of texts, in their order; a str is one.

    `side`: "query" or "document", whose prompt and length the texts have.
    """
    encoded, texts = [], [texts] if isinstance(texts, str) else texts
    for ids, cut in self._sides[side].encode(texts):
      encoded.append(ids)
      if cut and not self.cut:
        tell(
          f"texts of more than {len(ids)} tokens lose their end: the first "
          f"such text has {len(ids) + cut}"
        )
      self.cut += cut > 0
    vectors = np.empty([len(encoded), self.size], np.float32)
    size_of = lambda number: len(encoded[number])
    # The longest first: what does not fit into memory fails at once.
    order = sorted(range(len(encoded)), key=size_of, reverse=True)
    for batch in gathered(order, size_of, _TOKENS):
      pooled = self._sides[side].pooled
      vectors[batch] = self._run([encoded[n] for n in batch], pooled)
    return vectors

  def _run(self, ids: list[np.ndarray], pooled: slice) -> np.ndarray:
    """float32 [rows, d]."""
    masks = [np.ones_like(row) for row in ids]
    arrays = padded({"input_ids": ids, "input_mask": masks})
    mask = arrays["input_mask"]
    arrays["segment_ids"], weights = np.zeros_like(mask), np.zeros_like(mask)
    weights[:, pooled] = mask[:, pooled]
    arrays[POOLED] = weights
    return self._model.run(EMBEDDING.signature, arrays)["embedding"]

  def close(self) -> None:
    self._model.close()


class NearestTexts:
  """Answers texts by the nearest of others, as a `Predictor` does."""

  def __init__(self, embedder: Embedder, texts: Mapping[int, str], top_k: int):
    """`texts`: those to find, by the number that an answer has for each."""
    self._embedder, self._top_k, self._texts = embedder, top_k, [*texts.items()]
    self._vectors = embedder.embed([*texts.values()], DOCUMENT)
    self.parse = BEHAVIOURS[EMBEDDING.signature].parse
    self.close = embedder.close

  def predict(self, inputs: Sequence[Input]) -> list[Prediction]:
    """The nearest texts for each input, the nearest first."""
    queries = self._embedder.embed([one.text for one in inputs], QUERY)
    results = nearest.top_k(
      queries, self._vectors, self._top_k, self._embedder.is_cosine
    )
    predictions = []
    for one, scores, numbers in zip(inputs, *results, strict=True):
      answers, lines = [], [one.text]
      for score, number in zip(scores.tolist(), numbers, strict=True):
        line, text = self._texts[number]
        answers.append({"line": line, "similarity": score, "text": text})
        first, *rest = textwrap.wrap(text, _WIDTH)
        lines.append(f"  {score:.3f}  {first}{' [...]' * bool(rest)}")
      answer = {"text": one.text, "nearest": answers}
      predictions.append(Prediction(answer, lines))
    return predictions


def open_embedder(
  model: str | Source, max_seq_length: int | None = None
) -> Embedder:
  """The embedder of a model, by name or found.

  That is a run folder of run_embedder.py, a folder of sentence-transformers, a
  SavedModel of one, or any other encoder, whose tokens' mean is the vector.
  """
  source = find(model) if isinstance(model, str) else model
  if source.task["task"] != EMBEDDER:
    if source.is_export:
      raise UserError(
        f"{source.path}: this SavedModel is of no embedder: name the model "
        "that it was made of, or export one of run_embedder.py"
      )
    task = {**source.task, "task": EMBEDDER}
    source = dataclasses.replace(source, task=task)
  from interop import inference  # it loads TensorFlow

  opened = inference.open_model(source, [EMBEDDING.signature])
  return Embedder(opened, source, max_seq_length)
