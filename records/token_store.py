"""Text to token ids on disk: the first pass over a corpus, in parallel.

Workers tokenize pieces of text (corpus/text_files.py) into chunks, and
`StoreWriter` joins the chunks in order. So the store does not depend on the
number of workers, and memory holds a chunk.
"""

import contextlib
import dataclasses
import functools
import operator
import os
import zipfile
from collections.abc import Callable
from typing import BinaryIO

import numpy as np

from common import errors, files, json_files
from corpus import text_files
from corpus.text_files import Batch, Piece, TextFormat
from records import instances
from text_encoders import kinds
from text_encoders.base import Encoder, TokenizerInfo
from text_encoders.characters import letters_of
from workers.shared_work import make_chunks

CHUNK_BYTES = 2 << 20  # of text; a piece of a plain file is about one chunk


# Tokenizing -------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def load_tokenizer(info: TokenizerInfo) -> Encoder:
  """Loads the tokenizer at `info.file` once for all pieces of text."""
  loaded = kinds.KINDS[info.kind](info.file, info.do_lower_case)
  if info.sha256 != loaded.info().sha256:
    raise errors.UserError(
      f"{info.file} was changed while records were made with it: bring it "
      "back, or start again"
    )
  return loaded


def token_dtype(vocab_size: int) -> np.dtype:
  """The type of stored tokens: ids below the `continuation_bit`."""
  return np.dtype(np.uint16 if vocab_size <= 1 << 15 else np.uint32)


def continuation_bit(dtype: np.dtype) -> int:
  """The highest bit: set in tokens that continue the previous token's word."""
  return 1 << (8 * dtype.itemsize - 1)


def tokenize_piece(
  piece: Piece,
  text: TextFormat,
  info: TokenizerInfo,
  mark_words: bool,  # sets the `continuation_bit`
  chunk_file: Callable[[int], str],
  output: str,
) -> None:
  """Tokenizes one piece into its chunk files; runs in a worker."""
  batches = text_files.read_batches(piece, text)
  text_bytes = operator.attrgetter("bytes")
  chunks = text_files.gathered(batches, text_bytes, CHUNK_BYTES)
  tokenize = functools.partial(_tokenize_chunk, info, mark_words)
  make_chunks(output, chunk_file, chunks, tokenize)


def _tokenize_chunk(
  info: TokenizerInfo, mark_words: bool, chunk: list[Batch], path: str
) -> None:
  tokenizer = load_tokenizer(info)
  dtype = token_dtype(tokenizer.vocab_size)
  lines: list[str] = []
  text_bytes = bytes_on_disk = 0
  for batch in chunk:
    lines += batch.sentences
    text_bytes += batch.bytes
    bytes_on_disk += batch.bytes_on_disk
  # Some tokenizers must know that a sentence follows another.
  if tokenizer.joiner:
    for number in range(len(lines) - 1, 0, -1):
      if lines[number - 1] and lines[number]:
        lines[number] = tokenizer.joiner + lines[number]
  # Whole-word masks need the words' borders, which ids alone do not show.
  if mark_words:
    words = tokenizer.encode_words(lines)
    encoded = [word.ids for word in words]
    continues = [word.is_continuation for word in words]
  else:
    encoded, continues = tokenizer.encode_batch(lines), []
  none = np.zeros(0, np.int32)  # NumPy does not concatenate an empty list
  tokens = np.concatenate([none, *encoded]).astype(dtype)
  if continues:
    tokens[np.concatenate(continues)] |= continuation_bit(dtype)
  lengths = np.array(list(map(len, encoded)), np.int32)
  # A line without tokens is neither a sentence nor the end of a document.
  is_break = np.array([not line for line in lines], bool)
  with files.naming(path), open(path, "wb") as f:
    np.savez(
      f,
      tokens=tokens,
      lengths=lengths[lengths > 0],
      breaks=np.cumsum(lengths > 0)[is_break],  # sentences before each
      read=[text_bytes, bytes_on_disk, letters_of("".join(lines))],
    )


# The token store --------------------------------------------------------------

_TOKENS, _SENTENCES, _DOCUMENTS = "tokens", "sentences.i64", "documents.i64"
_STARTS = "starts.i64"  # documents of the text, before long ones are cut
COUNTS = "counts.json"  # written last
# A DataError empties the work folder (work_dir.py).
_REMEDY = "start the same command again"
_SCAN = 1 << 22  # tokens counted at once
_SCAN_DOCUMENTS = 1 << 18
_PARTS = 8  # a document longer than a block is cut into parts of a block


@dataclasses.dataclass
class CorpusCounts:
  """Counts of a tokenized corpus."""

  documents: int = 0
  cut_documents: int = 0  # documents longer than a block
  parts: int = 0  # documents and what longer ones are cut into
  sentences: int = 0
  tokens: int = 0
  unknown_tokens: int = 0
  letters: int = 0
  unknown_letters: int = 0  # in unknown words, which may be long, or left out
  text_bytes: int = 0
  unigram_entropy: float = 0.0  # nats, of the token distribution


class StoreWriter(contextlib.AbstractContextManager):
  """Writes chunks to the token store of an empty folder, in their order."""

  def __init__(self, folder: str, vocab_size: int):
    self.folder, self._vocab_size = folder, vocab_size
    self._dtype = token_dtype(vocab_size)
    self._counts = CorpusCounts()
    self._at_break = True  # the next sentence begins a document
    self._files = {}
    for name in (_TOKENS, _SENTENCES, _STARTS):
      self._files[name] = open(os.path.join(folder, name), "wb")
    self._write(_SENTENCES, [0])

  def _write(self, name, values):
    self._files[name].write(np.asarray(values, np.int64).tobytes())

  def __exit__(self, *_) -> None:
    for f in self._files.values():
      f.close()

  def append(self, path: str) -> int:
    """Appends the next chunk; returns the bytes on disk of its text."""
    try:
      with np.load(path, allow_pickle=False) as chunk:
        tokens, lengths = chunk["tokens"], chunk["lengths"]
        starts = np.unique(chunk["breaks"])
        text_bytes, bytes_on_disk, letters = chunk["read"].tolist()
    except (EOFError, ValueError, KeyError, zipfile.BadZipFile) as e:
      raise errors.DataError(f"{path}: damaged ({e}); {_REMEDY}") from e
    # A chunk may end inside a document, which goes on in the next one.
    if self._at_break:
      starts = np.union1d(starts, [0])
    inside = starts[starts < len(lengths)]
    self._at_break = len(inside) < len(starts)
    counts = self._counts
    self._files[_TOKENS].write(tokens.tobytes())
    self._write(_SENTENCES, counts.tokens + np.cumsum(lengths, dtype=np.int64))
    self._write(_STARTS, inside + counts.sentences)
    counts.tokens += len(tokens)
    counts.sentences += len(lengths)
    counts.documents += len(inside)
    counts.letters += letters
    counts.text_bytes += text_bytes
    return bytes_on_disk

  def finish(self, tokenizer: Encoder, block_tokens: int) -> CorpusCounts:
    """Completes the store.

    The second pass holds whole documents in memory, so those of more than
    `block_tokens` are cut, between sentences, into about eighths of a block.
    """
    counts, path = self._counts, functools.partial(os.path.join, self.folder)
    if not counts.sentences:
      raise errors.DataError("the input holds no sentence: only blank lines")
    self._write(_STARTS, [counts.sentences])
    # Closed, so that workers on other machines see whole files too.
    self.__exit__()
    with files.naming(path(_DOCUMENTS)), open(path(_DOCUMENTS), "wb") as f:
      self._write_documents(f, block_tokens)
    # Counts of all tokens, and what follows from them.
    of_tokens = np.zeros(self._vocab_size, np.int64)
    ids = continuation_bit(self._dtype) - 1
    with open(path(_TOKENS), "rb") as f:
      while len(part := np.fromfile(f, self._dtype, _SCAN)):
        of_tokens += np.bincount(part & ids, minlength=len(of_tokens))
    spelt = int(of_tokens @ tokenizer.letters)
    counts.unknown_tokens = int(of_tokens[tokenizer.unk_id])
    counts.unknown_letters = max(0, counts.letters - spelt)
    shares = of_tokens[of_tokens > 0] / counts.tokens
    counts.unigram_entropy = float(-(shares * np.log(shares)).sum())
    # This file comes last: with it the store is complete.
    facts = dataclasses.asdict(counts) | {"vocab_size": self._vocab_size}
    json_files.write(path(COUNTS), facts)
    return counts

  def _write_documents(self, f: BinaryIO, block_tokens: int) -> None:
    """Writes where documents, and the parts of long ones, begin."""
    starts = _mapped(self.folder, _STARTS, np.int64)
    offsets = _mapped(self.folder, _SENTENCES, np.int64)
    size = max(1, block_tokens // _PARTS)
    # Some documents at a time: the numbers of all may exceed memory.
    for i in range(0, len(starts) - 1, _SCAN_DOCUMENTS):
      firsts = np.array(starts[i : i + _SCAN_DOCUMENTS + 1])
      long = np.flatnonzero(np.diff(offsets[firsts]) > block_tokens)
      begins = [firsts[:-1]]
      for k in long:
        # Before the sentences that begin `size` tokens apart, about.
        first, last = firsts[k : k + 2]
        tokens = offsets[first : last + 1]
        wanted = np.arange(tokens[0] + size, tokens[-1], size)
        cuts = first + np.unique(np.searchsorted(tokens, wanted))
        begins.append(cuts[cuts < last])
      parts = np.sort(np.concatenate(begins))
      f.write(parts.tobytes())
      self._counts.parts += len(parts)
      self._counts.cut_documents += len(long)
    f.write(starts[-1:].tobytes())


def read_counts(folder: str) -> CorpusCounts:
  """The counts of a complete store; DataError if it is damaged."""
  values = json_files.read_own(os.path.join(folder, COUNTS), _REMEDY)
  token_bytes = token_dtype(values.pop("vocab_size")).itemsize
  counts = CorpusCounts(**values)
  for name, least in (
    (_TOKENS, token_bytes * counts.tokens),
    (_SENTENCES, 8 * (counts.sentences + 1)),
    (_DOCUMENTS, 8 * (counts.parts + 1)),
  ):
    path = os.path.join(folder, name)
    size = os.path.getsize(path) if os.path.exists(path) else 0
    if size < least:
      raise errors.DataError(
        f"{path}: {size} bytes, but {least} were written: it is damaged; "
        f"{_REMEDY}"
      )
  return counts


def open_store(folder: str) -> instances.Documents:
  """The documents of a complete store, memory-mapped."""
  counts = json_files.read_own(os.path.join(folder, COUNTS), _REMEDY)
  return instances.Documents(
    tokens=_mapped(folder, _TOKENS, token_dtype(counts["vocab_size"])),
    sentence_offsets=_mapped(folder, _SENTENCES, np.int64),
    document_offsets=_mapped(folder, _DOCUMENTS, np.int64),
  )


def _mapped(folder: str, name: str, dtype) -> np.ndarray:
  # A plain view: indexing np.memmap itself is several times slower.
  return np.asarray(np.memmap(os.path.join(folder, name), dtype, mode="r"))
