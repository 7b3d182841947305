"""Token files to shards: the second pass over a corpus.

A shard is made whole by one worker from its share of the documents, so the
bytes are the same for any number of workers.
"""

import dataclasses
import os

import numpy as np

import corpus
import instances
import masking
import records

_ENCODE_ROWS = 256  # examples encoded at once: amortizes NumPy's overhead
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


class _ExampleBuffer:
  """Rows of features, encoded when there are enough of them."""

  def __init__(self, max_seq_length: int, max_predictions_per_seq: int):
    self._shape = (max_seq_length, max_predictions_per_seq)
    self.encoded: list[bytes] = []
    self.real_tokens = self.masked_tokens = self.random_next = 0
    self._clear()

  def _clear(self) -> None:
    s, p = self._shape
    self._rows = 0
    self._features = {
      "input_ids": np.zeros((_ENCODE_ROWS, s), np.int32),
      "input_mask": np.zeros((_ENCODE_ROWS, s), np.int32),
      "segment_ids": np.zeros((_ENCODE_ROWS, s), np.int32),
      "masked_lm_positions": np.zeros((_ENCODE_ROWS, p), np.int32),
      "masked_lm_ids": np.zeros((_ENCODE_ROWS, p), np.int32),
      "masked_lm_weights": np.zeros((_ENCODE_ROWS, p), np.float32),
      "next_sentence_labels": np.zeros((_ENCODE_ROWS, 1), np.int32),
    }

  def add(self, masked: masking.MaskedTokens, start_b: int, is_random: bool):
    row, f = self._rows, self._features
    n, k = len(masked.input_ids), len(masked.positions)
    f["input_ids"][row, :n] = masked.input_ids
    f["input_mask"][row, :n] = 1
    f["segment_ids"][row, start_b:n] = 1
    f["masked_lm_positions"][row, :k] = masked.positions
    f["masked_lm_ids"][row, :k] = masked.labels
    f["masked_lm_weights"][row, :k] = 1.0
    f["next_sentence_labels"][row, 0] = is_random
    self.real_tokens += n
    self.masked_tokens += k
    self.random_next += is_random
    self._rows += 1
    if self._rows == _ENCODE_ROWS:
      self.flush()

  def flush(self) -> None:
    rows = {name: v[: self._rows] for name, v in self._features.items()}
    self.encoded.extend(records.encode_examples(rows))
    self._clear()


def _add_document(
  buffer: _ExampleBuffer,
  documents: instances.Documents,
  document: int,
  copy: int,
  task: ShardTask,
) -> None:
  """Puts the examples of one copy of one document into the buffer."""
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
    buffer.add(masked, start_b, span.is_random_next)


def build_shard(task: ShardTask) -> ShardResult:
  """Makes one shard, shuffled; runs in a worker.

  The shard is held in memory until it is written.
  """
  settings = task.settings
  documents = corpus.open_store(task.store)
  order = np.fromfile(os.path.join(task.store, _ORDER_FILE), np.int64)
  buffer = _ExampleBuffer(
    settings.max_seq_length, settings.max_predictions_per_seq
  )
  for copy in range(settings.dupe_factor):
    mine = documents_of_shard(order, task.shard, task.num_shards, copy)
    for document in mine.tolist():
      _add_document(buffer, documents, document, copy, task)
  buffer.flush()
  if not buffer.encoded:
    raise records.DataError(
      f"{task.num_shards} shards are too many: shard {task.shard} gets no "
      f"example of {len(order)} documents x {settings.dupe_factor} copies; "
      "give fewer --num_shards"
    )
  shuffle = _stream_rng(settings.random_seed, _SHUFFLE_STREAM, task.shard)
  with records.ShardWriter(task.path) as writer:
    for i in shuffle.permutation(len(buffer.encoded)).tolist():
      writer.write(buffer.encoded[i])
  return ShardResult(
    info=writer.info,
    real_tokens=buffer.real_tokens,
    masked_tokens=buffer.masked_tokens,
    random_next=buffer.random_next,
  )


def _stream_rng(random_seed: int, stream: int, number: int = 0):
  """An rng apart from those of the documents (their keys have two parts)."""
  seed = np.random.SeedSequence(random_seed, spawn_key=(stream, number, 0))
  return np.random.Generator(np.random.PCG64(seed))
