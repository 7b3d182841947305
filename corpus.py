"""Text files to token files: the first pass over a corpus, in parallel.

Text is one sentence a line with blank lines between documents, plain or .gz.
As in google/bert the end of a file is no end of a document, so a corpus may be
cut into files anywhere; end a file with a blank line to separate them.

A plain file is read in pieces of `PIECE_BYTES`, a .gz file as one piece, each
by one worker; the parent puts the results together in order. So the outcome
does not depend on the number of workers, and memory is bounded by a piece.
"""

import array
import dataclasses
import functools
import gzip
import itertools
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np

import instances
import records
import tokenization

PIECE_BYTES = 2 << 20  # small enough that a small corpus occupies all workers
_BATCH_LINES = 4096

# -----------------------------------------------------------------------------
# Reading text
# -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Piece:
  """Lines of a file that start at a byte from `start` to `end` (exclusive)."""

  path: str
  start: int
  end: int | None  # None: the whole of a .gz file


def is_gzip(path: str) -> bool:
  """Whether a file is taken for gzip-compressed, by its name."""
  return path.endswith(".gz")


def split_into_pieces(paths: Iterable[str]) -> list[Piece]:
  """Pieces of all files, in order.

  Raises:
    DataError: a file is empty or cannot be read.
  """
  pieces = []
  for path in paths:
    size = os.path.getsize(path)
    if not size:
      raise records.DataError(f"{path}: the file is empty")
    if not os.access(path, os.R_OK):
      raise records.DataError(f"{path}: no permission to read it")
    if is_gzip(path):
      pieces.append(Piece(path, 0, None))
      continue
    for start in range(0, size, PIECE_BYTES):
      pieces.append(Piece(path, start, min(start + PIECE_BYTES, size)))
  return pieces


def _raw_lines(piece: Piece) -> Iterator[bytes]:
  if piece.end is None:
    try:
      with gzip.open(piece.path, "rb") as f:
        yield from f
    except (gzip.BadGzipFile, EOFError, zlib.error) as e:
      raise records.DataError(
        f"{piece.path}: not a whole gzip file ({e})"
      ) from e
    return
  with open(piece.path, "rb", buffering=1 << 20) as f:
    position = piece.start
    if position:
      # The line that runs over the boundary belongs to the piece before.
      f.seek(position - 1)
      position += len(f.readline()) - 1
    while position < piece.end:
      line = f.readline()
      if not line:
        return
      position += len(line)
      yield line


def read_lines(paths: Iterable[str]) -> Iterator[str]:
  """All lines of some files as text, without the space around them.

  Raises:
    DataError: a file is empty or cannot be read.
  """
  for piece in split_into_pieces(paths):
    for line in _raw_lines(piece):
      yield tokenization.convert_to_unicode(line).strip()


# -----------------------------------------------------------------------------
# Tokenizing
# -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TokenizerSpec:
  """Names a tokenizer, for a worker to load it once."""

  vocab_file: str | None
  spm_model_file: str | None
  do_lower_case: bool
  sha256: str  # so that a changed file of the same name is loaded anew


@functools.lru_cache(maxsize=1)
def load_tokenizer(spec: TokenizerSpec) -> tokenization.Encoder:
  """The tokenizer, kept for the next piece (and with it its known words)."""
  return tokenization.load_tokenizer(
    spec.vocab_file, spec.do_lower_case, spec.spm_model_file
  )


@dataclasses.dataclass(frozen=True)
class TokenizedPiece:
  """One piece's tokens (int32, in a file) and where sentences end."""

  tokens_file: str
  lengths: np.ndarray  # int32 [sentences]
  breaks: np.ndarray  # int64 [b]: sentences before which a document may start
  token_counts: np.ndarray  # int64 [vocab_size]
  bytes: int
  bad_lines: int  # lines that are not UTF-8


def tokenize_piece(
  piece: Piece, tokens_file: str, spec: TokenizerSpec
) -> TokenizedPiece:
  """Tokenizes one piece; runs in a worker.

  Args:
    piece: what to read.
    tokens_file: int32 tokens are written there.
    spec: the tokenizer.

  Raises:
    DataError: the file or the tokenizer does not do.
  """
  tokenizer = load_tokenizer(spec)
  lengths, breaks = array.array("i"), array.array("q")
  counts = np.zeros(tokenizer.vocab_size, np.int64)
  num_bytes = bad_lines = 0
  raw_lines = _raw_lines(piece)
  with open(tokens_file, "wb") as out:
    while batch := list(itertools.islice(raw_lines, _BATCH_LINES)):
      num_bytes += sum(map(len, batch))
      lines = []
      for raw in batch:
        try:
          lines.append(raw.decode().strip())
        except UnicodeDecodeError:
          bad_lines += 1
          lines.append(raw.decode("utf-8", "ignore").strip())
      encoded = tokenizer.encode_batch(lines)
      for line, ids in zip(lines, encoded, strict=True):
        if len(ids):
          lengths.append(len(ids))
        elif not line:
          breaks.append(len(lengths))
        # A line of nothing but, say, control characters is neither.
      flat = np.concatenate(encoded)
      counts += np.bincount(flat, minlength=len(counts))
      out.write(flat.tobytes())
  return TokenizedPiece(
    tokens_file=tokens_file,
    lengths=np.array(lengths, np.int32),
    breaks=np.array(breaks, np.int64),
    token_counts=counts,
    bytes=num_bytes,
    bad_lines=bad_lines,
  )


# -----------------------------------------------------------------------------
# The token store
# -----------------------------------------------------------------------------

_TOKENS, _SENTENCES, _DOCUMENTS = "tokens.i32", "sentences.i64", "documents.i64"


@dataclasses.dataclass(frozen=True)
class CorpusCounts:
  """What a corpus holds."""

  documents: int
  sentences: int
  tokens: int
  unknown_tokens: int
  bad_lines: int  # lines with bytes that are not UTF-8, which were dropped
  text_bytes: int
  unigram_entropy: float  # nats, of the token distribution


def entropy(counts: np.ndarray) -> float:
  """Entropy in nats of a distribution given by counts, int [n]."""
  counts = counts[counts > 0].astype(np.float64)
  shares = counts / counts.sum()
  return float(-(shares * np.log(shares)).sum())


def write_store(
  folder: str,
  pieces: Iterable[TokenizedPiece],
  unk_id: int,
  on_piece: Callable[[TokenizedPiece], None] = lambda piece: None,
) -> CorpusCounts:
  """Joins tokenized pieces, in order, into one store on disk.

  The pieces' own files are deleted as they are used up.

  Args:
    folder: where the store's files go.
    pieces: in the order of the text.
    unk_id: id of [UNK], for the count.
    on_piece: told of each piece, for progress.

  Raises:
    DataError: there is no sentence.
  """
  num_tokens = num_sentences = bad_lines = text_bytes = 0
  token_counts = 0
  starts = [np.zeros(1, np.int64)]  # sentences with which documents start
  with (
    open(os.path.join(folder, _TOKENS), "wb") as tokens,
    open(os.path.join(folder, _SENTENCES), "wb") as sentences,
  ):
    sentences.write(np.zeros(1, np.int64).tobytes())
    for piece in pieces:
      with open(piece.tokens_file, "rb") as f:
        shutil.copyfileobj(f, tokens, 1 << 20)
      os.unlink(piece.tokens_file)
      ends = num_tokens + np.cumsum(piece.lengths, dtype=np.int64)
      sentences.write(ends.tobytes())
      starts.append(np.unique(piece.breaks) + num_sentences)
      num_tokens += int(piece.lengths.sum())
      num_sentences += len(piece.lengths)
      token_counts = token_counts + piece.token_counts
      bad_lines += piece.bad_lines
      text_bytes += piece.bytes
      on_piece(piece)
  if not num_sentences:
    raise records.DataError("the input holds no sentence: only blank lines")
  starts.append(np.array([num_sentences]))
  # Blank lines in a row, at the start or at the end make no document.
  document_offsets = np.unique(np.concatenate(starts))
  document_offsets.tofile(os.path.join(folder, _DOCUMENTS))
  return CorpusCounts(
    documents=len(document_offsets) - 1,
    sentences=num_sentences,
    tokens=num_tokens,
    unknown_tokens=int(token_counts[unk_id]),
    bad_lines=bad_lines,
    text_bytes=text_bytes,
    unigram_entropy=entropy(token_counts),
  )


def open_store(folder: str) -> instances.Documents:
  """The documents of a store, memory-mapped."""

  def load(name, dtype):
    # A plain view: indexing np.memmap itself is several times slower.
    return np.asarray(np.memmap(os.path.join(folder, name), dtype, mode="r"))

  return instances.Documents(
    tokens=load(_TOKENS, np.int32),
    sentence_offsets=load(_SENTENCES, np.int64),
    document_offsets=load(_DOCUMENTS, np.int64),
  )
