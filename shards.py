"""Token files to shards: the second pass over a corpus.

A shard is made whole by one worker from its share of the documents, so the
bytes are the same for any number of workers.
"""

import dataclasses
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

import corpus
import instances
import masking
import packing
import records

_ENCODE_ROWS = 256  # records encoded at once: amortizes NumPy's overhead
_ORDER_FILE = "order.i64"
# Streams of chance besides the documents' own, see instances.document_rng.
_ORDER_STREAM, _SHUFFLE_STREAM = 1, 2


@dataclasses.dataclass(frozen=True)
class ExampleSettings:
  """The flags that decide the examples of a corpus."""

  do_whole_word_mask: bool
  max_seq_length: int
  max_predictions_per_seq: int
  random_seed: int
  dupe_factor: int
  masked_lm_prob: float
  short_seq_prob: float
  examples_per_record: int

  @property
  def limits(self) -> packing.Limits:
    """What a record has room for."""
    return packing.Limits(
      self.max_seq_length,
      self.max_predictions_per_seq,
      self.examples_per_record,
    )


def write_order(store: str, num_documents: int, random_seed: int) -> None:
  """Puts the documents' random order into the store, for all shards."""
  order = _stream_rng(random_seed, _ORDER_STREAM).permutation(num_documents)
  order.tofile(os.path.join(store, _ORDER_FILE))


@dataclasses.dataclass(frozen=True)
class ShardTask:
  """All that a worker needs to make one shard."""

  store: str  # folder of the token store
  path: str
  shard: int
  num_shards: int
  settings: ExampleSettings
  tokenizer: corpus.TokenizerSpec


@dataclasses.dataclass(frozen=True)
class ShardResult:
  """A finished shard and what it holds."""

  info: records.ShardInfo
  examples: int
  real_tokens: int
  masked_tokens: int
  random_next: int


def documents_of_shard(
  order: np.ndarray, shard: int, num_shards: int, copy: int
) -> np.ndarray:
  """The documents of which a shard holds copy number `copy`.

  The documents in random order are dealt out to `num_shards` blocks; copy c of
  block b goes to shard (b + c) % num_shards. So the copies of a document are
  spread over the shards as far as there are shards.

  Args:
    order: int64 [documents], a permutation.

  Returns:
    int64 [d], ascending, so that reading them goes forward through the file.
  """
  return np.sort(order[(shard - copy) % num_shards :: num_shards])


class _Example(NamedTuple):
  """One example, before it is put into a record."""

  masked: masking.MaskedTokens
  start_b: int  # where segment B begins
  is_random_next: bool


def _examples_of_document(
  documents: instances.Documents, document: int, copy: int, task: ShardTask
) -> Iterator[_Example]:
  """The examples of one copy of one document."""
  settings = task.settings
  tokenizer = corpus.load_tokenizer(task.tokenizer)
  rng = instances.document_rng(settings.random_seed, copy, document)
  mask_settings = masking.MaskSettings(
    settings.masked_lm_prob,
    settings.max_predictions_per_seq,
    tokenizer.mask_id,
    tokenizer.vocab_size,
  )
  span_settings = instances.SpanSettings(
    settings.max_seq_length, settings.short_seq_prob
  )
  spans = instances.spans_from_document(documents, document, span_settings, rng)
  for span in spans:
    ids = instances.join_segments(
      documents.tokens, span, tokenizer.cls_id, tokenizer.sep_id
    )
    start_b = span.a_end - span.a_start + 2
    maskable = np.ones(len(ids), bool)
    maskable[0] = maskable[start_b - 1] = maskable[-1] = False
    is_continuation = None
    if settings.do_whole_word_mask:
      is_continuation = tokenizer.is_continuation[ids]
    masked = masking.mask_tokens(
      ids, maskable, rng, mask_settings, is_continuation
    )
    yield _Example(masked, start_b, span.is_random_next)


def _encode(
  examples: list[_Example], packs: list[list[int]], limits: packing.Limits
) -> list[bytes]:
  """One record for each of `packs`, which are numbers of examples."""
  rows, s, p = len(packs), limits.max_seq_length, limits.max_predictions_per_seq
  f = {
    "input_ids": np.zeros((rows, s), np.int32),
    "input_mask": np.zeros((rows, s), np.int32),
    "segment_ids": np.zeros((rows, s), np.int32),
    "masked_lm_positions": np.zeros((rows, p), np.int32),
    "masked_lm_ids": np.zeros((rows, p), np.int32),
    "masked_lm_weights": np.zeros((rows, p), np.float32),
    "next_sentence_labels": np.zeros(
      (rows, limits.examples_per_record), np.int32
    ),
  }
  for row, pack in enumerate(packs):
    start = first = 0  # the next token's and the next masked token's place
    for place, number in enumerate(pack):
      (ids, positions, labels), start_b, is_random_next = examples[number]
      end, last = start + len(ids), first + len(positions)
      f["input_ids"][row, start:end] = ids
      f["input_mask"][row, start:end] = place + 1
      f["segment_ids"][row, start + start_b : end] = 1
      f["masked_lm_positions"][row, first:last] = positions + start
      f["masked_lm_ids"][row, first:last] = labels
      f["masked_lm_weights"][row, first:last] = 1.0
      f["next_sentence_labels"][row, place] = is_random_next
      start, first = end, last
  return records.encode_examples(f)


def build_shard(task: ShardTask) -> ShardResult:
  """Makes one shard, packed and shuffled; runs in a worker.

  Its examples are held in memory until they are written.
  """
  settings = task.settings
  documents = corpus.open_store(task.store)
  order = np.fromfile(os.path.join(task.store, _ORDER_FILE), np.int64)
  examples = []
  for copy in range(settings.dupe_factor):
    mine = documents_of_shard(order, task.shard, task.num_shards, copy)
    for document in mine.tolist():
      examples += _examples_of_document(documents, document, copy, task)
  if not examples:
    raise records.DataError(
      f"{task.num_shards} shards are too many: shard {task.shard} gets no "
      f"example of {len(order)} documents x {settings.dupe_factor} copies; "
      "give fewer --num_shards"
    )
  tokens = [len(example.masked.input_ids) for example in examples]
  masked = [len(example.masked.positions) for example in examples]
  packs = packing.pack(
    tokens,
    masked,
    settings.limits,
    _stream_rng(settings.random_seed, _SHUFFLE_STREAM, task.shard),
  )
  with records.ShardWriter(task.path) as writer:
    for begin in range(0, len(packs), _ENCODE_ROWS):
      rows = packs[begin : begin + _ENCODE_ROWS]
      for record in _encode(examples, rows, settings.limits):
        writer.write(record)
  return ShardResult(
    info=writer.info,
    examples=len(examples),
    real_tokens=sum(tokens),
    masked_tokens=sum(masked),
    random_next=sum(example.is_random_next for example in examples),
  )


def _stream_rng(random_seed: int, stream: int, number: int = 0):
  """An rng apart from those of the documents (their keys have two parts)."""
  seed = np.random.SeedSequence(random_seed, spawn_key=(stream, number, 0))
  return np.random.Generator(np.random.PCG64(seed))
