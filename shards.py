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
import tf_example
import tfrecord

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
  dynamic_masks: bool

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

  info: tfrecord.ShardInfo
  examples: int
  real_tokens: int
  masked_tokens: int  # 0 with masks drawn on reading
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
  """One example, before it is put into a record and masked."""

  ids: np.ndarray  # int32 [n]
  start_b: int  # where segment B begins
  is_random_next: bool


def _examples_of_document(
  documents: instances.Documents, document: int, copy: int, task: ShardTask
) -> Iterator[_Example]:
  """The examples of one copy of one document."""
  settings = task.settings
  tokenizer = corpus.load_tokenizer(task.tokenizer)
  rng = instances.document_rng(settings.random_seed, copy, document)
  span_settings = instances.SpanSettings(
    settings.max_seq_length, settings.short_seq_prob
  )
  spans = instances.spans_from_document(documents, document, span_settings, rng)
  for span in spans:
    ids = instances.join_segments(
      documents.tokens, span, tokenizer.cls_id, tokenizer.sep_id
    )
    yield _Example(ids, span.a_end - span.a_start + 2, span.is_random_next)


def _rows(
  examples: list[_Example], packs: list[list[int]], limits: packing.Limits
) -> dict[str, np.ndarray]:
  """The features of a record for each of `packs`, without masks."""
  rows, s = len(packs), limits.max_seq_length
  f = {
    "input_ids": np.zeros((rows, s), np.int32),
    "input_mask": np.zeros((rows, s), np.int32),
    "segment_ids": np.zeros((rows, s), np.int32),
    "next_sentence_labels": np.zeros(
      (rows, limits.examples_per_record), np.int32
    ),
  }
  for row, pack in enumerate(packs):
    start = 0
    for place, number in enumerate(pack):
      ids, start_b, is_random_next = examples[number]
      end = start + len(ids)
      f["input_ids"][row, start:end] = ids
      f["input_mask"][row, start:end] = place + 1
      f["segment_ids"][row, start + start_b : end] = 1
      f["next_sentence_labels"][row, place] = is_random_next
      start = end
  return f


def _with_masks(
  f: dict[str, np.ndarray], first: int, task: ShardTask
) -> dict[str, np.ndarray]:
  """`_rows` with masks, or with what is needed to draw them on reading.

  Args:
    first: the number of the first row's record in the shard.
  """
  settings, tokenizer = task.settings, corpus.load_tokenizer(task.tokenizer)
  is_continuation = None
  if settings.do_whole_word_mask:
    is_continuation = tokenizer.is_continuation[f["input_ids"]]
  if settings.dynamic_masks:
    if is_continuation is not None:
      f["is_continuation"] = is_continuation.astype(np.int32)
    return f
  numbers = np.arange(first, first + len(f["input_ids"]))
  masked = masking.mask_records(
    f["input_ids"],
    f["input_mask"],
    f["segment_ids"],
    masking.record_keys(settings.random_seed, task.shard, numbers),
    mask_settings(settings, tokenizer.mask_id, tokenizer.vocab_size),
    is_continuation,
  )
  return {
    **f,
    "input_ids": masked.input_ids,
    "masked_lm_positions": masked.positions,
    "masked_lm_ids": masked.labels,
    "masked_lm_weights": masked.weights,
  }


def mask_settings(
  settings: ExampleSettings, mask_id: int, vocab_size: int
) -> masking.MaskSettings:
  """What the masks of these examples depend on."""
  return masking.MaskSettings(
    settings.masked_lm_prob,
    settings.max_predictions_per_seq,
    mask_id,
    vocab_size,
  )


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
  tokens = [len(example.ids) for example in examples]
  wanted = masking.num_to_predict(tokens, mask_settings(settings, 0, 0))
  packs = packing.pack(
    tokens,
    wanted.tolist(),
    settings.limits,
    _stream_rng(settings.random_seed, _SHUFFLE_STREAM, task.shard),
  )
  masked = 0
  with tfrecord.ShardWriter(task.path) as writer:
    for begin in range(0, len(packs), _ENCODE_ROWS):
      rows = _rows(
        examples, packs[begin : begin + _ENCODE_ROWS], settings.limits
      )
      rows = _with_masks(rows, begin, task)
      if not settings.dynamic_masks:
        masked += int(rows["masked_lm_weights"].sum())
      for record in tf_example.encode_examples(rows):
        writer.write(record)
  return ShardResult(
    info=writer.info,
    examples=len(examples),
    real_tokens=sum(tokens),
    masked_tokens=masked,
    random_next=sum(example.is_random_next for example in examples),
  )


def _stream_rng(random_seed: int, stream: int, number: int = 0):
  """An rng apart from those of the documents (their keys have two parts)."""
  seed = np.random.SeedSequence(random_seed, spawn_key=(stream, number, 0))
  return np.random.Generator(np.random.PCG64(seed))
