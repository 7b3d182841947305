"""Documents that are copies of others, or nearly so, in bounded memory.

A document is the set of its shingles, the 5-grams of its words, and two
documents are near-duplicates if their sets have a high Jaccard similarity: the
share of common shingles in all (Broder 1997, "On the resemblance and
containment of documents"). Pairs are found by MinHash with banding (Leskovec,
Rajaraman and Ullman, "Mining of Massive Datasets", chapter 3), and each is
verified exactly. So short bands, which find more pairs, cost no precision.

Each piece of a corpus has a folder with its signatures. `edges` connects the
documents of all pieces, which are numbered in their order, by part of a band's
keys, and `clusters` joins the edges.

Words are those of `comparable`, for near-duplicates and evaluation sets alike.
"""

import collections
import functools
import itertools
import operator
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse

from corpus import text_files

SHINGLE_WORDS = 5  # as FineWeb
EVALUATION_WORDS = 13  # as GPT-3 (arXiv:2005.14165, appendix C)
# A pair of similarity s has an equal key in one of b bands with the probability
# 1 - (1 - s^ROWS)^b: 98.8% at 0.6, 99.99% at 0.75 with all of them.
BANDS, ROWS = 32, 4
# Stop at the band where the expected miss rate falls below this.
_MISSED = 0.001
# Comparisons per document within a bucket, the documents of an equal key.
_COMPARED = 16

# The files of a piece. `_SIGNATURES` has rows, uint64 [BANDS + 3, n]: the keys
# of all bands, the number of shingles, a hash of all, and where they begin.
_SIGNATURES = "signatures.npy"
_OTHER_ROWS = range(BANDS, BANDS + 3)
_SHINGLES = "shingles"  # those of each document sorted and distinct
_SHINGLE_TYPE = np.dtype("<u4")
_READ_SHINGLES = 8 << 20  # at a time: 32 MB


class Ragged(NamedTuple):
  """Values of n texts: those of text i are [offsets[i], offsets[i + 1])."""

  values: np.ndarray
  offsets: np.ndarray  # int64 [n + 1]


# Words and n-grams of them --------------------------------------------------

_SEPARATOR = b"\0"
_NORMALIZED = bytes(
  byte if byte > 127 or chr(byte).isalnum() else 0 for byte in range(256)
).lower()
# Scripts without spaces between words, beside those of `_EAST_ASIAN_FIRST`:
# Thai and Lao, Burmese, Khmer, Tai and, of four bytes, rare Chinese.
_UNSPACED = re.compile(
  "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1950-\u1aaf\U00020000-\U0003ffff]"
)
# What NFKC makes of an accent that stands alone, in place of an apostrophe.
_LONE_ACCENT = re.compile("[ ][\u0300-\u036f]+")
# The first byte of three that are a Chinese, Japanese or Korean character.
_EAST_ASIAN_FIRST, _EAST_ASIAN_LAST = 0xE3, 0xED
_BLOCK_BYTES = 1 << 16  # what a core's cache holds as 64-bit numbers
# The bases of polynomials: odd, to have an inverse, otherwise arbitrary.
_BYTE_BASE, _WORD_BASE = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_BYTE_INVERSE = pow(_BYTE_BASE, -1, 1 << 64)


def _mixed(values: np.ndarray) -> np.ndarray:
  """Spreads uint64 values: the last step of MurmurHash3."""
  for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
    values = (values ^ (values >> np.uint64(33))) * np.uint64(factor)
  return values ^ (values >> np.uint64(33))


@functools.lru_cache(maxsize=2)
def _powers(base: int, log_count: int) -> np.ndarray:
  """uint64: base^0, base^1, ... modulo 2^64."""
  factors = np.full(1 << log_count, base, np.uint64)
  factors[0] = 1
  return np.multiply.accumulate(factors)


# What `_CHARACTERS` says of a character beside the code of what it becomes:
_CODE = (1 << 21) - 1
_UNKNOWN = 1 << 21  # nobody has asked yet
_UNSEEN = 1 << 22  # it becomes nothing
_ALONE = 1 << 23  # it is of `_UNSPACED`
_ABOVE = 1 << 24  # a mark of such scripts, which belongs to the one before
_IN_CONTEXT = 1 << 25  # what it becomes depends on its neighbours, or is long
_CHANGED = 1 << 26  # NFKC makes another of it
_CHARACTERS = np.full(sys.maxunicode + 1, _UNKNOWN, "<u4")
_BETWEEN_TEXTS = "\uffff"  # no character
_CHARACTERS[ord(_BETWEEN_TEXTS)] = ord(_BETWEEN_TEXTS)


def _folded(text: str) -> str:
  """Text without case and compatible forms."""
  # Case folding can undo what NFKC has composed.
  folded = unicodedata.normalize("NFKC", text).casefold()
  return _LONE_ACCENT.sub(" ", unicodedata.normalize("NFKC", folded))


def _becomes(character: str) -> str:
  """A letter, digit or mark itself, nothing, or a NUL in place of all else."""
  kind, code = unicodedata.category(character), ord(character)
  # Seen by nobody: soft hyphens, joiners, variants of a glyph, and what only
  # makes a word longer.
  if kind == "Cf" or 0xFE00 <= code <= 0xFE0F or code in (0x034F, 0x0640):
    return ""
  # 0x02B9 begins the letters that look like quotes.
  is_part = kind[0] in "LNM" and not 0x02B9 <= code <= 0x02FF
  return character if is_part else "\0"


def _entry(character: str) -> int:
  """What `_CHARACTERS` says of a character."""
  compatible = unicodedata.normalize("NFKC", character)
  folded, entry = _folded(character), 0
  text = "".join(map(_becomes, folded))
  if not text:
    entry = _UNSEEN
  elif len(text) == 1:
    entry = ord(text)
  elif text.strip("\0"):
    entry = _IN_CONTEXT
  # NFKC may join marks, and Korean's vowels, to the one before.
  for one in (character, compatible[0]):
    if unicodedata.category(one)[0] == "M" or "\u1100" <= one <= "\u11ff":
      entry |= _IN_CONTEXT
  if compatible != character:
    entry |= _CHANGED
  if _UNSPACED.fullmatch(folded):
    entry |= _ALONE
  if (
    "\u0e00" <= folded < "\u1ab0" and unicodedata.category(folded[0])[0] == "M"
  ):
    entry |= _ABOVE
  return entry


def _entries(text: str) -> tuple[np.ndarray, np.ndarray]:
  """uint32 [n], [n]: the characters' codes, and what `_CHARACTERS` says."""
  codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
  for code in set(codes[_CHARACTERS[codes] == _UNKNOWN].tolist()):
    _CHARACTERS[code] = _entry(chr(code))
  return codes, _CHARACTERS[codes]


def _comparable(text: str) -> bytes:
  """The words of a text, as of `comparable`."""
  codes, entries = _entries(text)
  has = np.bitwise_or.reduce(entries)
  if has & _IN_CONTEXT:
    # NFKC is fast where it finds nothing to change.
    for code in set(codes[(entries & _CHANGED) > 0].tolist()):
      text = text.replace(chr(code), unicodedata.normalize("NFKC", chr(code)))
    codes, entries = _entries(_folded(text))
    has = np.bitwise_or.reduce(entries)
  is_seen = (entries & _UNSEEN) == 0
  words = entries[is_seen] & _CODE
  if has & _ALONE:
    # A mark goes on with a word if a word's first character is among the marks
    # before it, or is what they follow.
    numbers = np.arange(len(entries))
    is_alone, is_above = (entries & _ALONE) > 0, (entries & _ABOVE) > 0
    first = np.maximum.accumulate(np.where(is_alone, numbers, -2))
    base = np.maximum.accumulate(np.where(is_above, -1, numbers))
    goes_on = is_above & (np.append(-2, first[:-1]) >= base)
    begins = is_alone & ~goes_on
    ends = (begins | goes_on) & ~np.append(goes_on[1:], False)
    last = np.cumsum(0 + begins + is_seen + ends)
    spaced = np.zeros(last[-1], "<u4")
    spaced[(last - ends - 1)[is_seen]] = words
    words = spaced
  return words.tobytes().decode("utf-32-le").encode()


def comparable(texts: Sequence[bytes]) -> list[bytes]:
  """The words of texts in UTF-8, as a reader compares them, with NULs between.

  Letters have no case, compatible forms are one (NFKC), and whatever is no
  letter, digit or mark is between words, as all quotes, dashes and spaces are.
  In scripts without spaces between words a character is a word; of Chinese,
  Japanese and Korean, which have no NULs between, `_words` knows it.
  """
  words, others = [], []
  for number, text in enumerate(texts):
    words.append(text.translate(_NORMALIZED))
    if not text.isascii():
      others.append(number)
  size_of = lambda number: len(texts[number])
  # Calls of NumPy and of NFKC are fewer for many texts together.
  for numbers in text_files.gathered(others, size_of, _BLOCK_BYTES):
    some = []
    for number in numbers:
      some.append(texts[number].decode().replace(_BETWEEN_TEXTS, " "))
    joined = _comparable(_BETWEEN_TEXTS.join(some))
    parts = joined.split(_BETWEEN_TEXTS.encode())
    for number, part in zip(numbers, parts, strict=True):
      words[number] = part
  return words


def _words(texts: Sequence[bytes]) -> Ragged:
  """A uint64 hash of each word of each text, in order."""
  texts = comparable(texts)
  content = _SEPARATOR.join([*texts, b""])
  firsts, hashes = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
  begin = 0
  while begin < len(content):
    # A word never goes on in the next block.
    end = content.find(_SEPARATOR, begin + _BLOCK_BYTES) + 1 or len(content)
    block = np.frombuffer(content, np.uint8, end - begin, begin)
    # A word begins after a separator, and at and after an East Asian character,
    # which has three bytes.
    is_letter = block > 0
    is_east_asian = (block >= _EAST_ASIAN_FIRST) & (block <= _EAST_ASIAN_LAST)
    is_begin = is_letter.copy()
    is_begin[1:] &= ~is_letter[:-1]
    is_begin |= is_east_asian
    is_begin[3:] |= is_east_asian[:-3] & is_letter[3:]
    begins = np.flatnonzero(is_begin)
    firsts.append(begins + begin)
    # A word's hash is a polynomial modulo 2^64 whose coefficients are its
    # bytes: the difference of two prefix sums, because bytes between words are
    # 0. It is divided by the power at the word's offset.
    log_count = len(block).bit_length()
    terms = block * _powers(_BYTE_BASE, log_count)[: len(block)]
    sums = np.cumsum(terms)
    differences = np.diff(sums[begins] - terms[begins], append=sums[-1:])
    inverses = _powers(_BYTE_INVERSE, log_count)[begins]
    hashes.append(_mixed(differences * inverses))
    begin = end
  sizes = np.array([len(text) + 1 for text in texts], np.int64)
  text_begins = np.cumulative_sum(sizes, include_initial=True)
  offsets = np.searchsorted(np.concatenate(firsts), text_begins)
  return Ragged(np.concatenate(hashes), offsets)


def ngram_hashes(texts: Sequence[bytes], size: int) -> Ragged:
  """uint64 hashes of the n-grams of `size` words of each UTF-8 text, in order.

  A text of fewer words, or none, has one hash of all its words.
  """
  words = _words(texts)
  counts = np.diff(words.offsets)
  # Shorter texts are padded by words of hash 0.
  lengths = np.maximum(counts, size)
  begins = np.cumulative_sum(lengths, include_initial=True)
  filled = np.zeros(begins[-1], np.uint64)
  shifts = np.repeat(begins[:-1] - words.offsets[:-1], counts)
  filled[np.arange(len(words.values)) + shifts] = words.values

  # An n-gram's hash is a polynomial of its words' hashes, so order counts.
  numbers = lengths - size + 1
  offsets = np.cumulative_sum(numbers, include_initial=True)
  shifts = np.repeat(begins[:-1] - offsets[:-1], numbers)
  indices = np.arange(offsets[-1]) + shifts  # of the first words
  hashes = np.zeros(len(indices), np.uint64)
  for _ in range(size):
    hashes *= np.uint64(_WORD_BASE)
    hashes += filled[indices]
    indices += 1
  return Ragged(_mixed(hashes), offsets)


def overlaps(texts: Sequence[bytes], ngrams: np.ndarray) -> np.ndarray:
  """bool [n]: which texts have one of `ngrams`, sorted `ngram_hashes`."""
  hashes, offsets = ngram_hashes(texts, EVALUATION_WORDS)
  # Sorted values are looked up several times faster, and few are in `ngrams`.
  wanted = np.sort(hashes)
  left = np.searchsorted(ngrams, wanted)
  common = wanted[left < np.searchsorted(ngrams, wanted, "right")]
  matches = np.flatnonzero(np.isin(hashes, common))
  is_overlap = np.zeros(len(texts), bool)
  is_overlap[np.searchsorted(offsets, matches, "right") - 1] = True
  return is_overlap


# Signatures -------------------------------------------------------------------


def _band_keys(shingles: np.ndarray, begins: np.ndarray) -> np.ndarray:
  """uint64 [BANDS, n], equal where all minima of a band are.

  The set of text i begins at begins[i]. Hash function j of a shingle x is
  (x ^ masks[j]) * factors[j] modulo 2^32.
  """
  keys = np.zeros((BANDS, len(begins)), np.uint64)
  # The same on all machines, as workers compare their files.
  random = _mixed(np.arange(1, 1 + 2 * BANDS * ROWS, dtype=np.uint64))
  masks, factors = random.astype(np.uint32).reshape(2, -1)
  for j, (mask, factor) in enumerate(zip(masks, factors | 1, strict=True)):
    hashes = (shingles ^ mask) * factor
    keys[j // ROWS] *= np.uint64(_WORD_BASE)
    keys[j // ROWS] += np.minimum.reduceat(hashes, begins)
  return _mixed(keys)


def write_signatures(texts: Sequence[bytes], folder: str) -> None:
  """Writes the signatures of a piece's documents, in UTF-8, to its folder."""
  # The distinct shingles of each text: sorted pairs (text, upper half of hash).
  hashes, offsets = ngram_hashes(texts, SHINGLE_WORDS)
  half = np.uint64(32)
  owners = np.repeat(np.arange(len(texts), dtype=np.uint64), np.diff(offsets))
  pairs = np.sort(owners << half | hashes >> half)
  pairs = pairs[differs(pairs[np.newaxis])]
  shingles = pairs.astype(_SHINGLE_TYPE)  # drops the text's number
  bounds = np.arange(len(texts) + 1, dtype=np.uint64) << half
  offsets = np.searchsorted(pairs, bounds)
  begins, sizes = offsets[:-1], np.diff(offsets)
  signatures = np.zeros((_OTHER_ROWS.stop, len(texts)), np.uint64)
  if texts:
    spread = _mixed(shingles.astype(np.uint64))
    signatures[:BANDS] = _band_keys(shingles, begins)
    signatures[_OTHER_ROWS] = sizes, np.add.reduceat(spread, begins), begins
  shingles.tofile(os.path.join(folder, _SHINGLES))
  np.save(os.path.join(folder, _SIGNATURES), signatures)


# Pairs and clusters -----------------------------------------------------------


def edges(
  folders: Sequence[str], band: int, part: int, parts: int, threshold: float
) -> np.ndarray:
  """int64 [m, 2]: pairs (earlier, later) of near-duplicates, by their numbers.

  Their Jaccard similarity is >= `threshold`. The pairs of all bands (0 to
  BANDS - 1) and all parts of their keys (0 to parts - 1) connect the
  near-duplicates: each pair with the probability at `BANDS`, and as `_connect`
  compares. Bands that a high threshold does not need give none.
  """
  if (1 - threshold**ROWS) ** band <= _MISSED:  # by the bands before this one
    return np.zeros((0, 2), np.int64)
  table = _read_part(folders, band, part, parts)
  is_new_key, is_new_set = differs(table[:1]), differs(table[:3])
  numbers = table[3].astype(np.int64)
  firsts = numbers[is_new_set][np.cumsum(is_new_set) - 1]
  copies = np.stack([firsts, numbers], axis=1)[~is_new_set]

  # Of equal sets only the first is compared, if another has its key.
  table, is_new_key = table[:, is_new_set], is_new_key[is_new_set]
  table = table[:, ~(is_new_key & np.append(is_new_key, True)[1:])]
  shingles = _read_shingles(folders, table)
  members = zip(table[0].tolist(), table[3].tolist(), shingles, strict=True)
  pairs: list[tuple[int, int]] = []
  for _, group in itertools.groupby(members, operator.itemgetter(0)):
    pairs += _connect(group, threshold)
  similar = np.sort(np.array(pairs, np.int64).reshape(-1, 2), axis=1)
  # Equal sets are equal in every band.
  return np.concatenate([copies, similar]) if band == 0 else similar


def _read_part(
  folders: Sequence[str], band: int, part: int, parts: int
) -> np.ndarray:
  """uint64 [6, m]: the documents whose keys in a band belong to a part.

  Rows, by which they are sorted: the key, the number of shingles, a hash of
  all, the document's number, its piece, and where its shingles begin there.
  """
  tables, first = [np.zeros((6, 0), np.uint64)], 0
  for piece, folder in enumerate(folders):
    signatures = np.load(os.path.join(folder, _SIGNATURES), mmap_mode="r")
    in_part = np.flatnonzero(signatures[band] % np.uint64(parts) == part)
    table = np.empty((6, len(in_part)), np.uint64)
    table[[0, 1, 2, 5]] = signatures[[band, *_OTHER_ROWS]][:, in_part]
    table[3], table[4] = first + in_part, piece
    tables.append(table)
    first += signatures.shape[1]
  joined = np.concatenate(tables, axis=1)
  return joined[:, np.lexsort(joined[::-1])]


def differs(rows: np.ndarray) -> np.ndarray:
  """bool [m]: which columns of [k, m] differ from the one before; 0 does."""
  differ = (rows[:, 1:] != rows[:, :-1]).any(axis=0)
  return np.append(True, differ)[: rows.shape[1]]


def _read_shingles(
  folders: Sequence[str], table: np.ndarray
) -> Iterator[np.ndarray]:
  """The shingles of `_read_part`'s documents; a few are in memory at a time."""
  sizes, pieces, begins = table[[1, 4, 5]].astype(np.int64)
  # Not mapped: mapped pages count as memory.
  item = _SHINGLE_TYPE.itemsize
  reads = np.cumsum(sizes) // _READ_SHINGLES
  borders = np.flatnonzero(np.diff(reads)) + 1
  for read in np.split(np.arange(len(reads)), borders):
    shingles = {}
    for piece in np.unique(pieces[read]):
      of_piece = read[pieces[read] == piece]
      with open(os.path.join(folders[piece], _SHINGLES), "rb") as f:
        for i in of_piece[np.argsort(begins[of_piece])]:
          content = os.pread(f.fileno(), item * sizes[i], item * begins[i])
          shingles[i] = np.frombuffer(content, _SHINGLE_TYPE)
    for i in read:
      yield shingles.pop(i)


def _connect(
  group: Iterable[tuple[int, int, np.ndarray]], threshold: float
) -> Iterator[tuple[int, int]]:
  """Pairs that connect documents (key, number, shingles) of a bucket."""
  # They come by size, because only those of about one size can be similar. Each
  # is compared with the last `_COMPARED` before it, but not with a cluster that
  # it has joined. So the time is linear in the size of the bucket.
  last: collections.deque = collections.deque(maxlen=_COMPARED)
  cluster: dict[int, int] = {}  # of each number
  for _, number, shingles in group:
    joined = {number}
    for other, others in reversed(last):
      if cluster[other] in joined or _similarity(others, shingles) < threshold:
        continue
      joined.add(cluster[other])
      yield other, number
    last.append((number, shingles))
    cluster[number] = number
    for other, _ in last:
      if cluster[other] in joined:
        cluster[other] = number


def _similarity(shingles: np.ndarray, others: np.ndarray) -> float:
  """The Jaccard similarity of two sorted sets."""
  # A stable sort merges the two, which are sorted.
  both = np.sort(np.concatenate([shingles, others]), kind="stable")
  common = np.count_nonzero(both[1:] == both[:-1])
  return common / (len(both) - common)


def similarity(one: bytes, other: bytes) -> float:
  """The Jaccard similarity of two texts in UTF-8."""
  hashes, offsets = ngram_hashes([one, other], SHINGLE_WORDS)
  own, others = np.split(hashes, offsets[1:2])
  return _similarity(np.unique(own), np.unique(others))


def clusters(num_documents: int, pairs: np.ndarray) -> np.ndarray:
  """int64 [n]: the first of those that `pairs`, int64 [m, 2], connect."""
  ones, shape = np.ones(len(pairs), bool), (num_documents, num_documents)
  graph = scipy.sparse.coo_array((ones, pairs.T), shape=shape)
  components = scipy.sparse.csgraph.connected_components
  count, labels = components(graph, directed=False)
  firsts = np.empty(count, np.int64)
  # Of several values for one index, the last one stays.
  firsts[labels[::-1]] = np.arange(num_documents)[::-1]
  return firsts[labels]
