"""Documents that have much text in common, found in bounded memory.

A document is the set of its shingles: sequences of five words (Broder 1997, "On
the resemblance and containment of documents"). MinHash signatures, cut into
bands, propose pairs (Leskovec et al., "Mining of Massive Datasets", chapter 3),
and their exact Jaccard similarity decides.

Only for comparisons, ASCII is lower-cased, everything but letters, digits and
other scripts separates words, and a Chinese, Japanese or Korean character is a
word.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse

SHINGLE_WORDS = 5
EVALUATION_WORDS = 13  # GPT-3's, arXiv:2005.14165, appendix C
# A pair of similarity s shares a band with probability 1 - (1 - s^ROWS)^BANDS:
# 98.8% at 0.6, 99.99% at 0.75.
BANDS, ROWS = 32, 4
# Of documents with an equal band, those that later ones are compared with.
_REPRESENTATIVES = 16
# One more similar than this to a representative is none itself.
_SAME = 0.95

# The files of signatures: arrays as they are in memory.
_SHINGLES, _OFFSETS, _KEYS, _SETS = "shingles", "offsets", "bands", "sets"
_SPACE = ord(" ")
_NORMAL = bytes(
  ord(chr(byte).lower()) if byte > 127 or chr(byte).isalnum() else _SPACE
  for byte in range(128)
) + bytes(range(128, 256))
# First bytes of three that are a character of China, Japan or Korea in UTF-8.
_EAST_ASIAN = (0xE3, 0xED)


class Ragged(NamedTuple):
  """Values of n documents: [offsets[i], offsets[i + 1]) are document i's."""

  values: np.ndarray  # uint64 [m], or uint32
  offsets: np.ndarray  # int64 [n + 1]


# Words and sequences of them --------------------------------------------------

_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64
_STEP = 0xD6E8FEB86659FD93


def _mixed(values: np.ndarray) -> np.ndarray:
  """MurmurHash3's last step, for uint64."""
  for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
    values = values ^ (values >> np.uint64(33))
    values *= np.uint64(factor)
  return values ^ (values >> np.uint64(33))


@functools.lru_cache(2)
def _powers(base: int, log_size: int) -> np.ndarray:
  """base^0, base^1, ... modulo 2^64."""
  factors = np.full(1 << log_size, base, np.uint64)
  factors[0] = 1
  return np.multiply.accumulate(factors)


def _words(texts: Sequence[bytes]) -> Ragged:
  """A hash of each word."""
  joined = b" ".join([*texts, b""]).translate(_NORMAL)
  content = np.frombuffer(joined, np.uint8)
  is_letter = content != _SPACE
  is_east_asian = (content >= _EAST_ASIAN[0]) & (content <= _EAST_ASIAN[1])
  # A word begins after a space, and at and after an East Asian character.
  begins = is_letter.copy()
  begins[1:] &= ~is_letter[:-1]
  begins |= is_east_asian
  begins[3:] |= is_east_asian[:-3] & is_letter[3:]
  ends = is_letter.copy()
  ends[:-1] &= ~is_letter[1:] | begins[1:]
  first, last = np.flatnonzero(begins), np.flatnonzero(ends)
  # The bytes as a polynomial's coefficients. Differences of its prefix sums,
  # divided by the power of the place, do not depend on the place.
  log_size = len(content).bit_length()
  powers = _powers(_BASE, log_size)[: len(content)]
  sums = np.cumsum(content * powers, dtype=np.uint64)
  before = np.where(first > 0, sums[first - 1], np.uint64(0))
  inverse = _powers(pow(_BASE, -1, 1 << 64), log_size)
  hashes = _mixed((sums[last] - before) * inverse[first])
  text_ends = np.cumsum([len(text) + 1 for text in texts])
  counts = np.searchsorted(first, text_ends)
  return Ragged(hashes, np.concatenate([[0], counts]).astype(np.int64))


def ngram_hashes(texts: Sequence[bytes], size: int) -> Ragged:
  """uint64 hashes of the sequences of `size` words of each text, in order.

  A text of fewer words has one, of all its words.
  """
  words = _words(texts)
  counts = np.diff(words.offsets)
  # Shorter texts are filled with zeros.
  lengths = np.maximum(counts, size)
  begins = np.cumsum(lengths) - lengths
  filled = np.zeros(lengths.sum() + size - 1, np.uint64)
  shift = np.repeat(begins - words.offsets[:-1], counts)
  filled[np.arange(len(words.values)) + shift] = words.values
  total = len(filled) - size + 1
  hashes = np.zeros(total, np.uint64)
  for place in range(size):
    hashes *= np.uint64(_STEP)
    hashes += filled[place : place + total]
  # The last size - 1 places of a text begin none.
  numbers = lengths - size + 1
  is_within = np.ones(total, bool)
  for place in range(1, size):
    is_within[begins + lengths - place] = False
  offsets = np.concatenate([[0], np.cumsum(numbers)]).astype(np.int64)
  return Ragged(_mixed(hashes[is_within]), offsets)


def overlaps(texts: Sequence[bytes], ngrams: np.ndarray) -> np.ndarray:
  """bool [n]: which texts have one of the `ngrams`, sorted uint64 hashes.

  They are `ngram_hashes` of EVALUATION_WORDS words.
  """
  if not texts or not len(ngrams):
    return np.zeros(len(texts), bool)
  hashes, offsets = ngram_hashes(texts, EVALUATION_WORDS)
  places = np.minimum(np.searchsorted(ngrams, hashes), len(ngrams) - 1)
  return np.logical_or.reduceat(ngrams[places] == hashes, offsets[:-1])


# Signatures -------------------------------------------------------------------


def shingle_sets(texts: Sequence[bytes]) -> Ragged:
  """The distinct shingles of each text, sorted, as uint32."""
  hashes, offsets = ngram_hashes(texts, SHINGLE_WORDS)
  owners = np.repeat(np.arange(len(texts), dtype=np.uint64), np.diff(offsets))
  pairs = np.sort(owners << np.uint64(32) | hashes >> np.uint64(32))
  # np.unique does not sort, which is several times slower here.
  pairs = pairs[np.append(True, pairs[1:] != pairs[:-1])]
  offsets = np.searchsorted(pairs >> np.uint64(32), np.arange(len(texts) + 1))
  return Ragged(pairs.astype(np.uint32), offsets)


@functools.cache
def _functions() -> tuple[np.ndarray, np.ndarray]:
  """(odd factors, masks) of the hash functions: factor * (x ^ mask)."""
  random = np.random.Generator(np.random.PCG64(20))
  factors, masks = random.integers(
    1 << 32, size=(2, BANDS * ROWS), dtype=np.uint32
  )
  return factors | np.uint32(1), masks


def _bands(shingles: Ragged) -> np.ndarray:
  """uint64 [BANDS, n]: equal where all minima of a band are."""
  begins = shingles.offsets[:-1]
  keys = np.zeros((BANDS, len(begins)), np.uint64)
  for number, (factor, mask) in enumerate(zip(*_functions(), strict=True)):
    hashes = (shingles.values ^ mask) * factor
    band = keys[number // ROWS]
    band *= np.uint64(_STEP)
    band += np.minimum.reduceat(hashes, begins)
  return _mixed(keys)


def write_signatures(texts: Sequence[bytes], folder: str) -> None:
  """Writes what `edges` reads of some documents."""
  if texts:
    shingles = shingle_sets(texts)
    keys = _bands(shingles)
    spread = _mixed(shingles.values.astype(np.uint64))
    sets = np.add.reduceat(spread, shingles.offsets[:-1])
  else:
    shingles = Ragged(np.zeros(0, np.uint32), np.zeros(1, np.int64))
    keys, sets = np.zeros((BANDS, 0), np.uint64), np.zeros(0, np.uint64)
  for name, array in (
    (_SHINGLES, shingles.values),
    (_OFFSETS, shingles.offsets),
    (_KEYS, keys),
    (_SETS, sets),
  ):
    array.tofile(os.path.join(folder, name))


# Pairs and clusters -----------------------------------------------------------


def _load(folder: str, name: str, dtype, begin=0, count=-1) -> np.ndarray:
  """Values of a file of signatures; mapped ones would count as memory."""
  path, size = os.path.join(folder, name), np.dtype(dtype).itemsize
  return np.fromfile(path, dtype, count, offset=begin * size)


class _Documents:
  """The shingles of documents in many folders, read as they are needed."""

  def __init__(self, folders: Sequence[str]):
    self._folders = folders
    self._offsets = [_load(folder, _OFFSETS, np.int64) for folder in folders]
    self._firsts = np.cumsum([0, *(len(one) - 1 for one in self._offsets)])
    self._shingles = functools.lru_cache(4 * _REPRESENTATIVES)(self._read)

  def _read(self, number: int) -> np.ndarray:
    folder = int(np.searchsorted(self._firsts, number, "right")) - 1
    place = number - self._firsts[folder]
    begin, end = self._offsets[folder][place : place + 2].tolist()
    path = self._folders[folder]
    return _load(path, _SHINGLES, np.uint32, begin, end - begin)

  def similarity(self, one: int, other: int) -> float:
    """The Jaccard similarity of two documents."""
    a, b = self._shingles(one), self._shingles(other)
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / (len(a) + len(b) - common)


def edges(
  folders: Sequence[str], band: int, part: int, parts: int, threshold: float
) -> np.ndarray:
  """int64 [m, 2]: pairs of documents of Jaccard similarity >= threshold.

  The documents of all `folders` of `write_signatures` are numbered in order.
  These are pairs with equal keys in a band, of a part of the keys; those of all
  bands and parts connect all duplicates.
  """
  empty = np.zeros(0, np.uint64)
  keys, sets, numbers, first = [empty], [empty], [empty.astype(np.int64)], 0
  for folder in folders:
    hashes = _load(folder, _SETS, np.uint64)
    count = len(hashes)
    row = _load(folder, _KEYS, np.uint64, band * count, count)
    ours = np.flatnonzero(row % np.uint64(parts) == part)
    keys.append(row[ours])
    sets.append(hashes[ours])
    numbers.append(first + ours)
    first += count
  groups = _Groups(
    np.concatenate(keys), np.concatenate(sets), np.concatenate(numbers)
  )
  documents = _Documents(folders)
  pairs = [
    pair
    for members in groups
    for pair in _similar(members.tolist(), documents, threshold)
  ]
  near = np.array(pairs, np.int64).reshape(-1, 2)
  return np.concatenate([groups.equal, near]) if band == 0 else near


class _Groups:
  """Documents with equal keys; of those with equal sets only the first."""

  def __init__(self, keys: np.ndarray, sets: np.ndarray, numbers: np.ndarray):
    order = np.lexsort((numbers, sets, keys))
    keys, sets, numbers = keys[order], sets[order], numbers[order]
    is_new = np.ones(len(keys), bool)
    is_new[1:] = (keys[1:] != keys[:-1]) | (sets[1:] != sets[:-1])
    firsts = np.maximum.accumulate(np.where(is_new, np.arange(len(keys)), 0))
    # Pairs of documents with equal sets.
    self.equal = np.stack([numbers[firsts], numbers], axis=1)[~is_new]
    keys, numbers = keys[is_new], numbers[is_new]
    order = np.lexsort((numbers, keys))
    self._keys, self._numbers = keys[order], numbers[order]

  def __iter__(self) -> Iterator[np.ndarray]:
    """Two or more numbers, ascending."""
    borders = np.flatnonzero(self._keys[1:] != self._keys[:-1]) + 1
    begins = np.concatenate([[0], borders, [len(self._keys)]])
    for i in np.flatnonzero(np.diff(begins) > 1):
      yield self._numbers[begins[i] : begins[i + 1]]


def _similar(
  members: list[int], documents: _Documents, threshold: float
) -> Iterator[tuple[int, int]]:
  """Pairs among documents with equal keys; linear in their number."""
  representatives: list[int] = []
  for member in members:
    closest = 0.0
    for other in representatives:
      similarity = documents.similarity(other, member)
      closest = max(closest, similarity)
      if similarity >= threshold:
        yield other, member
    if closest < _SAME:
      representatives = [*representatives, member][-_REPRESENTATIVES:]


def clusters(number: int, pairs: np.ndarray) -> np.ndarray:
  """int64 [number]: the first document of each one's connected component."""
  ones = np.ones(len(pairs), np.int8)
  graph = scipy.sparse.coo_matrix(
    (ones, (pairs[:, 0], pairs[:, 1])), (number, number)
  )
  _, labels = scipy.sparse.csgraph.connected_components(graph, directed=False)
  _, firsts = np.unique(labels, return_index=True)
  return firsts[labels].astype(np.int64)
