"""The token store to shards: the second pass over a corpus.

A worker makes a whole shard, so the bytes do not depend on the number of
workers. It holds, shuffles and packs one block of documents at a time.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from common import errors, json_files
from records import instances, masking, packing, tfrecord, token_store
from records.creation_settings import CreationSettings
from records.record_order import permute
from records.tf_example import encode_examples
from text_encoders.base import TokenizerInfo

RESULT_SUFFIX = ".result"  # of the file that says that a shard is whole
_ENCODE_ROWS = 256  # records encoded at once: amortizes NumPy's overhead
# Streams of random numbers, beside the documents', whose keys have two parts.
_SHUFFLE_STREAM, _SEQUENCE_STREAM = 2, 3


class ShardTask(NamedTuple):
  """All that a worker needs to make one shard."""

  store: str  # folder of the token store
  shard: int
  num_shards: int
  num_blocks: int  # of each shard
  settings: CreationSettings
  tokenizer: TokenizerInfo  # its file with its folder


@dataclasses.dataclass(frozen=True)
class ShardResult:
  """A finished shard and what it holds."""

  info: tfrecord.ShardInfo
  examples: int
  real_tokens: int
  masked_tokens: int  # 0 with dynamic masks
  random_next: int  # examples whose B is from another document

  @classmethod
  def load(cls, path: str) -> "ShardResult":
    values = json_files.read_own(path, "start the same command again")
    values["info"] = tfrecord.ShardInfo(**values["info"])
    return cls(**values)


def documents_of_block(
  documents: int, block: int, num_blocks: int, copy: int, random_seed: int
) -> np.ndarray:
  """The documents, int64 [d], ascending, whose copy `copy` is in a block.

  Copy c of the d-th document, in random order, is in block (c + d) % num_blocks
  of all shards. So a document's copies are in as many blocks as possible.
  """
  positions = np.arange((block - copy) % num_blocks, documents, num_blocks)
  return np.sort(permute(positions, documents, random_seed, 0))


class _Example(NamedTuple):
  ids: np.ndarray  # unsigned int [n], see token_store.token_dtype
  segments: np.ndarray  # uint8 [n], 0 and 1 in turn
  is_random_next: bool


def _rows(
  examples: list[_Example], packs: list[list[int]], settings: CreationSettings
) -> dict[str, np.ndarray]:
  """The features of a record for each of `packs`, without masks."""
  rows, size = len(packs), settings.max_seq_length
  tokens = np.zeros((rows, size), examples[0].ids.dtype)
  input_mask, segment_ids = np.zeros((2, rows, size), np.int32)
  labels = np.zeros((rows, settings.examples_per_record), np.int32)
  # Examples stand one after another in a row, numbered from 1.
  for row, pack in enumerate(packs):
    start = 0
    for index, number in enumerate(pack):
      ids, segments, is_random_next = examples[number]
      end = start + len(ids)
      tokens[row, start:end] = ids
      input_mask[row, start:end] = index + 1
      segment_ids[row, start:end] = segments
      labels[row, index] = is_random_next
      start = end
  # Whole-word masks need to know which tokens continue a word; records without
  # them have no such feature.
  bit = token_store.continuation_bit(tokens.dtype)
  features = {
    "input_ids": (tokens & (bit - 1)).astype(np.int32),
    "input_mask": input_mask,
    "segment_ids": segment_ids,
    "next_sentence_labels": labels,
  }
  if settings.do_whole_word_mask:
    features["is_continuation"] = ((tokens & bit) > 0).astype(np.int32)
  return features


def build_shard(task: ShardTask, output: str) -> None:
  """Makes one shard, and its `ShardResult` in `output`; runs in a worker."""
  documents = token_store.open_store(task.store)
  num_examples = real_tokens = masked_tokens = random_next = num_records = 0
  with tfrecord.shard_writer(output.removesuffix(RESULT_SUFFIX)) as writer:
    for block in range(task.num_blocks):
      examples = _block_examples(documents, block, task)
      num_examples += len(examples)
      for example in examples:
        real_tokens += len(example.ids)
        random_next += example.is_random_next
      for rows in _block_rows(examples, block, num_records, task):
        num_records += len(rows["input_ids"])
        if not task.settings.dynamic_masks:
          masked_tokens += int(rows["masked_lm_weights"].sum())
        for record in encode_examples(rows):
          writer.write(record)
    if not num_examples:
      raise errors.DataError(
        f"--num_shards={task.num_shards} is too many: shard {task.shard} gets "
        "no example; give fewer"
      )
  counts = num_examples, real_tokens, masked_tokens, random_next
  result = ShardResult(writer.info, *counts)
  json_files.write(output, dataclasses.asdict(result))


def _block_examples(
  documents: instances.Documents, block: int, task: ShardTask
) -> list[_Example]:
  settings = task.settings
  tokenizer = token_store.load_tokenizer(task.tokenizer)
  seed, is_mlm = settings.random_seed, settings.objective == "mlm"
  before, *afters = template = tokenizer.template(1 if is_mlm else 2)
  most, num_after = settings.max_seq_length - len(before), len(afters[0])
  pair_tokens = settings.max_seq_length - len(np.concatenate(template))
  short = settings.short_seq_prob
  count = len(documents.document_offsets) - 1
  number = task.shard + task.num_shards * block
  num_blocks = task.num_shards * task.num_blocks
  # All copies of the documents of this block, each cut in its own way.
  examples = []
  for copy in range(settings.dupe_factor):
    chosen = documents_of_block(count, number, num_blocks, copy, seed).tolist()
    cut: list[instances.Example] = []
    if settings.cross_documents:
      key = _SEQUENCE_STREAM, copy, task.shard, block
      rng = instances.generator(seed, *key)
      cut = instances.sequences(documents, chosen, most, num_after, short, rng)
    else:
      # A generator for each copy of each document: so neither the order of the
      # documents nor their shard matters.
      for document in chosen:
        rng = instances.generator(seed, copy, document)
        if is_mlm:
          cut += instances.sequences(
            documents, [document], most, num_after, short, rng
          )
        else:
          cut += instances.pairs_from_document(
            documents, document, pair_tokens, short, rng
          )
    for ranges, is_random_next in cut:
      # Each document of a sequence ends as the first one does.
      around = [before, *(afters * len(ranges) if is_mlm else afters)]
      texts = [documents.tokens[start:end] for start, end in ranges]
      ids, segments = instances.join(texts, around)
      examples.append(_Example(ids, segments, is_random_next))
  return examples


def _block_rows(
  examples: list[_Example], block: int, first: int, task: ShardTask
) -> Iterator[dict[str, np.ndarray]]:
  """A block's records as features; `first` is its first one's number."""
  settings = task.settings
  tokenizer = token_store.load_tokenizer(task.tokenizer)
  size, most = settings.max_seq_length, settings.max_predictions_per_seq
  masks = masking.MaskSettings(
    settings.masked_lm_prob, most, tokenizer.mask_id, tokenizer.vocab_size
  )
  limits = packing.Limits(size, most, settings.examples_per_record)
  # A record must have room for the tokens and the predictions of its examples.
  tokens = [len(example.ids) for example in examples]
  wanted = masking.num_to_predict(tokens, masks)
  key = _SHUFFLE_STREAM, task.shard, block
  rng = instances.generator(settings.random_seed, *key)
  packs = packing.pack(tokens, wanted.tolist(), limits, rng)
  for begin in range(0, len(packs), _ENCODE_ROWS):
    rows = _rows(examples, packs[begin : begin + _ENCODE_ROWS], settings)
    if not settings.dynamic_masks:
      # Masks depend on the record's number in its shard, not on the block.
      numbers = first + begin + np.arange(len(rows["input_ids"]))
      columns = rows["input_ids"], rows["input_mask"], rows["segment_ids"]
      keys = masking.record_keys(settings.random_seed, task.shard, numbers)
      continues = rows.pop("is_continuation", None)
      rows |= masking.mask_records(*columns, keys, masks, continues)._asdict()
    yield rows
