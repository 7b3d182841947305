"""Texts to vectors, by any model: an embedder, or a plain encoder's mean."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from common.console import tell
from common.errors import UserError
from finetuning import task_file
from finetuning.behaviour import INPUTS, Context
from finetuning.windows import encode_pair
from interop.heads import BEHAVIOURS
from interop.model_source import NOTHING_GIVEN, Given, Source, find
from model.tasks import DOCUMENT, EMBEDDER, EMBEDDING, QUERY, SIDES

_TOKENS = 4096  # of a run of the graph, with padding


class Embedder:
  """Makes vectors of texts, in batches of texts of like length."""

  def __init__(self, model, source: Source, max_seq_length: int | None = None):
    """`model` is an `inference.Model` with the signature of an embedder."""
    self._model, self.source = model, source
    self.task = source.task
    self.size = source.bert.hidden_size
    self.similarity = self.task.get("similarity", "cosine")
    self.cut = 0  # texts so far whose end was not read
    self._behaviour, self._contexts = BEHAVIOURS[EMBEDDING.signature], {}
    tokenizer, lengths = source.tokenizer(), {}
    lengths[QUERY] = max_seq_length or self.task.get("query_length")
    for side in SIDES:
      length = lengths.get(side) or max_seq_length or source.max_seq_length
      task_file.check_length(length, source.bert)
      self._contexts[side] = Context(tokenizer, self.task, length, side=side)

  def embed(self, texts: Sequence[str], side: str = DOCUMENT) -> np.ndarray:
    """float32 [n, d]: the vectors of texts, in their order.

    `side`: "query" or "document", whose prompt and length the texts have.
    """
    context, encoded = self._contexts[side], []
    prompted = [context.prompt + text for text in texts]
    for tokens in context.tokenizer.encode_batch(prompted):
      ids, _, cut = encode_pair(
        context.tokenizer, context.max_seq_length, tokens
      )
      encoded.append(ids)
      if cut and not self.cut:
        tell(
          f"texts of more than {len(ids)} tokens lose their end: the first "
          f"such text has {len(ids) + cut}"
        )
      self.cut += cut > 0
    vectors = np.empty([len(encoded), self.size], np.float32)
    # The longest first: what does not fit into memory fails at once.
    order = sorted(range(len(encoded)), key=lambda n: -len(encoded[n]))
    start = 0
    while start < len(order):
      rows = max(1, _TOKENS // len(encoded[order[start]]))
      batch = order[start : start + rows]
      vectors[batch] = self._run([encoded[n] for n in batch], context)
      start += rows
    return vectors

  def _run(self, ids: list[np.ndarray], context: Context) -> np.ndarray:
    """float32 [rows, d]; the first of `ids` is the longest."""
    masks = [np.ones_like(row) for row in ids]
    rows = dict(zip(INPUTS, (ids, masks), strict=False))
    rows |= self._behaviour.arrays(ids, context)
    padded = {n: np.zeros([len(ids), len(ids[0])], np.int32) for n in INPUTS}
    for name, values in rows.items():
      padded[name] = np.zeros_like(padded[INPUTS[0]])
      for target, row in zip(padded[name], values, strict=True):
        target[: len(row)] = row
    return self._model.run(EMBEDDING.signature, padded)["embedding"]

  def close(self) -> None:
    self._model.close()


def open_embedder(
  path: str,
  flags: Given = NOTHING_GIVEN,
  max_seq_length: int | None = None,
) -> Embedder:
  """The embedder of a model's name.

  That is a run folder of run_embedder.py, a folder of sentence-transformers, a
  SavedModel of one, or any other encoder, whose tokens' mean is the vector.
  """
  source = find(path, flags)
  if source.task["task"] != EMBEDDER:
    if source.is_export:
      raise UserError(
        f"{path}: this SavedModel is not of an embedder: name the run folder, "
        "or export a model that run_embedder.py trained"
      )
    task = {**source.task, "task": EMBEDDER}
    source = dataclasses.replace(source, task=task)
  from interop import inference  # it loads TensorFlow

  model = inference.open_model(source, [EMBEDDING.signature])
  return Embedder(model, source, max_seq_length)
