"""Documents to training examples, as pure functions.

There are google/bert's pairs, [CLS] A [SEP] B [SEP], and sequences for masked
LM alone, [CLS] text [SEP]. Both are ranges of the corpus' tokens. What stands
before, between and after them is the tokenizer's template; see `Encoder`.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

_RANDOM_DOCUMENT_TRIES = 10  # google/bert's; then B is from the same document


class Documents(NamedTuple):
  """A tokenized corpus (any of the arrays may be memory-mapped).

  Sentence s is tokens[sentence_offsets[s]:sentence_offsets[s + 1]]; document d
  has sentences document_offsets[d] to document_offsets[d + 1] (exclusive).
  No sentence and no document is empty.
  """

  tokens: np.ndarray  # unsigned int [tokens], see token_store.token_dtype
  sentence_offsets: np.ndarray  # int64 [sentences + 1], into tokens
  document_offsets: np.ndarray  # int64 [documents + 1], into sentences


class Example(NamedTuple):
  """An example as ranges of the flat token array, one for each segment."""

  ranges: list[tuple[int, int]]
  is_random_next: bool = False  # of a pair: B is from elsewhere


def generator(random_seed: int, *key: int) -> np.random.Generator:
  """Random generator of `key`: other keys, longer ones too, have their own."""
  seed = np.random.SeedSequence(random_seed, spawn_key=key)
  return np.random.Generator(np.random.PCG64(seed))


def _randint(rng: np.random.Generator, low: int, high: int) -> int:
  """An integer in [low, high]; `rng.integers` takes ten times as long."""
  return low + int(rng.random() * (high - low + 1))


def truncated_lengths(
  length_a: int, length_b: int, max_num_tokens: int
) -> tuple[int, int]:
  """Lengths after google/bert's truncate_seq_pair; of equal ones B is cut."""
  half_a = max_num_tokens - max_num_tokens // 2
  length_a = min(length_a, max(half_a, max_num_tokens - length_b))
  return length_a, min(length_b, max_num_tokens - length_a)


def _truncate(
  start: int, end: int, length: int, rng: np.random.Generator
) -> tuple[int, int]:
  """Cuts a range to `length`; drops each token at a random end."""
  surplus = end - start - length
  if not surplus:
    return start, end
  # A coin for each token: their sum is what the loop takes from the front.
  front = int(rng.binomial(surplus, 0.5))
  return start + front, start + front + length


def _random_segment(
  documents: Documents, document: int, target_length: int, rng
) -> tuple[int, int]:
  """About `target_length` tokens of sentences at random in another document."""
  num_documents = len(documents.document_offsets) - 1
  for _ in range(_RANDOM_DOCUMENT_TRIES):
    other = _randint(rng, 0, num_documents - 1)
    if other != document:
      break
  first = int(documents.document_offsets[other])
  last = int(documents.document_offsets[other + 1])
  first = _randint(rng, first, last - 1)
  start = int(documents.sentence_offsets[first])
  # Whole sentences, at least one, until there are enough tokens.
  ends = documents.sentence_offsets[first + 1 : last + 1]
  enough = int(ends.searchsorted(start + target_length))
  return start, int(ends[min(enough, len(ends) - 1)])


def pairs_from_document(
  documents: Documents,
  document: int,
  max_num_tokens: int,
  short_seq_prob: float,
  rng: np.random.Generator,
) -> list[Example]:
  """Cuts one document into examples, in order (create_instances_from_document).

  Half of the time, and always after a single sentence, B is from another
  document and the next example begins after A. With probability
  `short_seq_prob` all examples are shorter. A and B have at least one token
  each and at most `max_num_tokens` together.
  """
  target = max_num_tokens
  if rng.random() < short_seq_prob:
    target = _randint(rng, 2, max_num_tokens)
  first = int(documents.document_offsets[document])
  last = int(documents.document_offsets[document + 1])
  # Gives Python's own integers, one at a time.
  offsets = documents.sentence_offsets[first : last + 1].data
  num_sentences = last - first
  pairs = []
  begin = end = 0  # the chunk: sentences begin to end (exclusive)
  while end < num_sentences:
    end += 1
    # Gather sentences until they fill a sequence, or the document ends.
    if end < num_sentences and offsets[end] - offsets[begin] < target:
      continue
    chunk = end - begin
    num_a = _randint(rng, 1, chunk - 1) if chunk >= 2 else 1
    # A is a random number of them; B is the others, or from elsewhere.
    a_start, a_end = offsets[begin], offsets[begin + num_a]
    is_random_next = chunk == 1 or rng.random() < 0.5
    if is_random_next:
      wanted = target - (a_end - a_start)
      b_start, b_end = _random_segment(documents, document, wanted, rng)
      end = begin + num_a  # the other sentences are put back
    else:
      b_start, b_end = a_end, offsets[end]
    length_a, length_b = truncated_lengths(
      a_end - a_start, b_end - b_start, max_num_tokens
    )
    a = _truncate(a_start, a_end, length_a, rng)
    b = _truncate(b_start, b_end, length_b, rng)
    pairs.append(Example([a, b], is_random_next))
    begin = end
  return pairs


def sequences(
  documents: Documents,
  chosen: Iterable[int],
  most: int,
  num_after: int,
  short_seq_prob: float,
  rng: np.random.Generator,
) -> list[Example]:
  """Cuts documents, one after another, into sequences that are full.

  A sequence is its documents' ranges of tokens, with the `num_after` special
  tokens that end a text after each: `most` tokens. The next one begins where it
  ends, even inside a sentence. With probability `short_seq_prob` a sequence is
  shorter.
  """
  examples: list[Example] = []
  # The room that is left in the last sequence goes on to the next document.
  room = 0
  for document in chosen:
    first, last = documents.document_offsets[document : document + 2].tolist()
    start = int(documents.sentence_offsets[first])
    end = int(documents.sentence_offsets[last])
    while start < end:
      if room < 1 + num_after:
        room = most
        if short_seq_prob and rng.random() < short_seq_prob:
          room = _randint(rng, 1 + num_after, room)
        examples.append(Example([]))
      stop = min(end, start + room - num_after)
      examples[-1].ranges.append((start, stop))
      room -= stop - start + num_after
      start = stop
  return examples


def join(
  texts: Sequence[np.ndarray], around: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
  """The tokens of [CLS] A [SEP] B [SEP] ..., and their segments.

  Both [n], without padding; the first like `texts`, the second uint8: 0 for A
  and [CLS], 1 for B and so on in turn, each with its [SEP]. `around` are the
  special tokens before all texts, and after each.
  """
  parts, ends = [around[0]], [len(around[0])]
  for text, after in zip(texts, around[1:], strict=True):
    parts += text, after
    ends.append(ends[-1] + len(text) + len(after))
  ids = np.concatenate(parts, dtype=texts[0].dtype, casting="unsafe")
  segments = np.zeros(len(ids), np.uint8)
  for number in range(1, len(texts), 2):
    segments[ends[number] : ends[number + 1]] = 1
  return ids, segments
