"""How often tokens of records stand one or two positions apart."""

import math
from collections.abc import Iterable

import numpy as np
from scipy import sparse

from common import console
from records import unigrams
from records.record_shape import RecordShape
from records.tfrecord import RecordSet

OFFSETS = (-2, -1, 1, 2)  # where a context word stands
MAX_CONTEXT_WORDS = 4096


def token_statistics(
  record_set: RecordSet, shape: RecordShape, vocab_size: int, special_ids: list
) -> tuple:
  """(log frequencies, [V] in nats, *`count`) of a sample: half a minute."""
  # At most ten million tokens or 200,000 records.
  most = max(1, min(200_000, 10_000_000 // shape.max_seq_length))
  in_a_row = min(100, math.ceil(most / 10))
  chosen = unigrams.numbers(record_set, most, in_a_row=in_a_row)
  with console.Progress("reading words", len(chosen), "records") as bar:
    features = dict.fromkeys(record_set.paths, shape.features())
    texts = unigrams.texts(record_set, chosen, features, bar.at)
    sequences = [ids.astype("int32") for ids in texts]
  console.tell("learning first embeddings from the words' neighbours ...")
  counts = unigrams.count([np.concatenate(sequences)], vocab_size, special_ids)
  log_frequencies = unigrams.log_frequencies(counts)
  return log_frequencies, *count(sequences, counts)


def count(sequences: Iterable[np.ndarray], counts: np.ndarray) -> tuple:
  """(ids [N] of context words, {offset: float32 [V, N]}, how often they stand).

  Context words are the N most frequent tokens by `counts`, [V]. Tokens with a
  count of 0 (absent, or special, as [SEP]) have no contexts, count as none, and
  keep apart what stands on their two sides. `sequences` are ids. Numbers are
  exact below 2^24.
  """
  vocab_size = len(counts)
  context_words = np.argsort(-counts, kind="stable")[:MAX_CONTEXT_WORDS]
  # The last entries are those of -1, which stands between sequences.
  columns = np.full(vocab_size + 1, -1, np.int32)
  columns[context_words] = np.arange(len(context_words))
  is_word = np.append(counts > 0, False)
  columns[~is_word] = -1
  apart = np.full(1, -1, np.int32)
  parts = [part for ids in sequences for part in (ids, apart)]
  ids = np.concatenate([apart, *parts], dtype=np.int32)
  neighbours = {}
  for offset in OFFSETS:
    far = abs(offset)
    before, after = np.arange(len(ids) - far), np.arange(far, len(ids))
    word, context = (before, after) if offset > 0 else (after, before)
    used = is_word[ids[word]] & (columns[ids[context]] >= 0)
    # A special token between the two keeps them apart.
    if far == 2:
      used &= is_word[ids[before + 1]]
    indices = ids[word[used]], columns[ids[context[used]]]
    ones = np.ones(len(indices[0]), np.float32)
    shape = vocab_size, len(context_words)
    neighbours[offset] = sparse.coo_array((ones, indices), shape=shape).tocsr()
  return context_words, neighbours
