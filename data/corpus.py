"""Text to token ids on disk: the first pass over a corpus, in parallel.

One worker tokenizes each piece of the text (text_files.py) into chunk files;
`StoreWriter` joins the chunks in order. So the store does not depend on the
number of workers, and memory is bounded by a chunk. The store keeps a journal,
from which it resumes after a stop.
"""

import array
import dataclasses
import functools
import os

import numpy as np

import tokenization
from common import errors, json_files
from data import instances, text_files
from data.text_files import Piece, TextFormat

CHUNK_BYTES = 2 << 20  # of text; a piece of a plain file is about one chunk


# Tokenizing -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TokenizerSpec:
  """Names a tokenizer, which each worker loads once."""

  vocab_file: str | None
  spm_model_file: str | None
  do_lower_case: bool
  sha256: str  # a changed file of the same name is another tokenizer


@functools.lru_cache(maxsize=1)
def load_tokenizer(spec: TokenizerSpec) -> tokenization.Encoder:
  """The tokenizer, kept for the next piece with the words that it knows."""
  return tokenization.load_tokenizer(
    spec.vocab_file, spec.do_lower_case, spec.spm_model_file
  )


def token_dtype(vocab_size: int) -> np.dtype:
  """The type of stored tokens: ids below the `continuation_bit`."""
  return np.dtype(np.uint16 if vocab_size <= 1 << 15 else np.uint32)


def continuation_bit(dtype: np.dtype) -> int:
  """The highest bit: set in tokens that continue the previous token's word."""
  return 1 << (8 * dtype.itemsize - 1)


@dataclasses.dataclass(frozen=True)
class PieceTask:
  """All that a worker needs to tokenize one piece."""

  piece: Piece
  output: str  # writes OUTPUT.0, OUTPUT.1, ..., each atomically; OUTPUT.done
  first_chunk: int  # the store has those before it
  text: TextFormat
  tokenizer: TokenizerSpec
  mark_words: bool  # whether to set the `continuation_bit`

  @property
  def done_file(self) -> str:
    return self.output + ".done"

  def chunk_file(self, number: int) -> str:
    return f"{self.output}.{number}"


class Chunk:
  """Tokens of some text, and where its sentences and documents end."""

  def __init__(self, dtype: np.dtype):
    self._dtype = dtype  # of the tokens
    self._tokens = []
    self.lengths = array.array("i")  # of sentences
    # Sentences before which a document begins; may be the number of sentences.
    self.breaks = array.array("q")
    self.bytes = self.bytes_on_disk = 0

  def add(self, batch, tokenizer, mark_words: bool) -> None:
    """Tokenizes a `text_files.Batch`."""
    self.bytes += batch.bytes
    self.bytes_on_disk += batch.bytes_on_disk
    if mark_words:
      words = tokenizer.encode_words(batch.sentences)
      encoded = [w.ids for w in words]
    else:
      encoded = tokenizer.encode_batch(batch.sentences)
    for sentence, ids in zip(batch.sentences, encoded, strict=True):
      if len(ids):
        self.lengths.append(len(ids))
      elif not sentence:
        self.breaks.append(len(self.lengths))
      # A line of nothing but, say, control characters is neither.
    if not encoded:  # blank lines of JSON
      return
    tokens = np.concatenate(encoded).astype(self._dtype)
    if mark_words:
      continues = np.concatenate([w.is_continuation for w in words])
      tokens[continues] |= continuation_bit(self._dtype)
    self._tokens.append(tokens)

  def save(self, path: str) -> None:
    """Writes the chunk atomically."""
    with open(path + ".tmp", "wb") as f:
      np.savez(
        f,
        tokens=np.concatenate([np.zeros(0, self._dtype), *self._tokens]),
        lengths=np.array(self.lengths, np.int32),
        breaks=np.array(self.breaks, np.int64),
        read=np.array([self.bytes, self.bytes_on_disk]),
      )
    os.replace(path + ".tmp", path)


def tokenize_piece(task: PieceTask) -> None:
  """Tokenizes one piece into its chunk files; runs in a worker.

  Raises:
    DataError: the file or the tokenizer cannot be used.
  """
  tokenizer = load_tokenizer(task.tokenizer)
  dtype = token_dtype(tokenizer.vocab_size)
  number, chunk, size = 0, Chunk(dtype), 0
  for batch in text_files.read_batches(task.piece, task.text):
    size += batch.bytes
    if number >= task.first_chunk:
      chunk.add(batch, tokenizer, task.mark_words)
    # A plain piece may end with a line of any length.
    if size >= CHUNK_BYTES:
      if number >= task.first_chunk:
        chunk.save(task.chunk_file(number))
      number, chunk, size = number + 1, Chunk(dtype), 0
  if size and number >= task.first_chunk:
    chunk.save(task.chunk_file(number))
  open(task.done_file, "wb").close()


# The token store --------------------------------------------------------------

_TOKENS, _SENTENCES, _DOCUMENTS = "tokens", "sentences.i64", "documents.i64"
_STARTS = "starts.i64"  # of the text's documents, before long ones are cut
_JOURNAL, _COUNTS = "journal.json", "counts.json"
# A DataError empties the work folder (work_dir.py).
_REMEDY = "start the same command again"
_SCAN = 1 << 22  # tokens counted at once
_SCAN_DOCUMENTS = 1 << 18
_PARTS = 8  # of a block, that a document longer than a block is cut into


@dataclasses.dataclass(frozen=True)
class CorpusCounts:
  """What a corpus holds."""

  documents: int
  cut_documents: int  # documents longer than a block
  sentences: int
  tokens: int
  unknown_tokens: int
  text_bytes: int
  unigram_entropy: float  # nats, of the token distribution


def entropy(counts: np.ndarray) -> float:
  """Entropy in nats of a distribution given by counts, int [n]."""
  counts = counts[counts > 0].astype(np.float64)
  shares = counts / counts.sum()
  return float(-(shares * np.log(shares)).sum())


@dataclasses.dataclass
class _Journal:
  """What the store has so far, and what comes next."""

  piece: int = 0  # the next one
  chunk: int = 0  # the next one of that piece
  tokens: int = 0
  sentences: int = 0
  documents: int = 0
  # Whether the next sentence begins a document. Several blank lines, and those
  # at the start or the end, make no empty documents.
  at_break: bool = True
  text_bytes: int = 0
  bytes_on_disk: int = 0


class StoreWriter:
  """Joins chunks into the token store of a folder, in order.

  Use as a context manager. `piece` and `chunk` name the next chunk; after a
  stop they are not 0.
  """

  def __init__(self, folder: str, vocab_size: int):
    self.folder, self._vocab_size = folder, vocab_size
    self._dtype = token_dtype(vocab_size)
    path = os.path.join(folder, _JOURNAL)
    self._journal = _Journal()
    if os.path.exists(path):
      self._journal = _Journal(**json_files.read_own(path, _REMEDY))
    j = self._journal
    # Drops what was written after the journal's last entry.
    self._tokens, self._sentences, self._starts = (
      self._open(name, size)
      for name, size in (
        (_TOKENS, j.tokens * self._dtype.itemsize),
        (_SENTENCES, 8 * (j.sentences + 1) if j.sentences else 0),
        (_STARTS, 8 * j.documents),
      )
    )
    if not j.sentences:
      self._sentences.write(np.zeros(1, np.int64).tobytes())

  def _open(self, name, size):
    path = os.path.join(self.folder, name)
    _check_size(path, size)
    if not os.path.exists(path):
      open(path, "wb").close()
    f = open(path, "r+b")
    f.truncate(size)
    f.seek(size)
    return f

  def __enter__(self) -> "StoreWriter":
    return self

  def __exit__(self, *_) -> None:
    for f in (self._tokens, self._sentences, self._starts):
      f.close()

  @property
  def piece(self) -> int:
    return self._journal.piece

  @property
  def chunk(self) -> int:
    return self._journal.chunk

  @property
  def bytes_on_disk(self) -> int:
    """About how many of the text files' bytes are in the store."""
    return self._journal.bytes_on_disk

  def append(self, path: str) -> None:
    """Appends the next chunk and deletes its file."""
    j = self._journal
    with np.load(path, allow_pickle=False) as chunk:
      tokens, lengths = chunk["tokens"], chunk["lengths"]
      starts = np.unique(chunk["breaks"])
      text_bytes, bytes_on_disk = chunk["read"].tolist()
    if j.at_break:
      starts = np.union1d(starts, [0])
    inside = starts[starts < len(lengths)]
    j.at_break = len(inside) < len(starts)
    ends = j.tokens + np.cumsum(lengths, dtype=np.int64)
    self._tokens.write(tokens.tobytes())
    self._sentences.write(ends.tobytes())
    self._starts.write((inside + j.sentences).astype(np.int64).tobytes())
    j.tokens += len(tokens)
    j.sentences += len(lengths)
    j.documents += len(inside)
    j.text_bytes += text_bytes
    j.bytes_on_disk += bytes_on_disk
    j.chunk += 1
    self._write_journal()
    os.unlink(path)

  def next_piece(self) -> None:
    """Ends the piece: it has no more chunks."""
    self._journal.piece += 1
    self._journal.chunk = 0
    self._write_journal()

  def _write_journal(self):
    for f in (self._tokens, self._sentences, self._starts):
      f.flush()
    json_files.write(
      os.path.join(self.folder, _JOURNAL), dataclasses.asdict(self._journal)
    )

  def finish(self, unk_id: int, block_tokens: int) -> CorpusCounts:
    """Completes the store.

    A document of more than `block_tokens` is cut at ends of sentences into
    parts of about an eighth of that: the second pass holds at least one
    document at a time.

    Raises:
      DataError: there is no sentence.
    """
    j = self._journal
    if not j.sentences:
      raise errors.DataError("the input holds no sentence: only blank lines")
    self._starts.write(np.array([j.sentences]).astype(np.int64).tobytes())
    # Closed, so that ranks on other machines see whole files too.
    self.__exit__()
    cut_documents = self._write_documents(block_tokens)
    counts = self._token_counts()
    result = CorpusCounts(
      documents=j.documents,
      cut_documents=cut_documents,
      sentences=j.sentences,
      tokens=j.tokens,
      unknown_tokens=int(counts[unk_id]),
      text_bytes=j.text_bytes,
      unigram_entropy=entropy(counts),
    )
    json_files.write(
      os.path.join(self.folder, _COUNTS),
      {**dataclasses.asdict(result), "vocab_size": self._vocab_size},
    )
    return result

  def _write_documents(self, block_tokens):
    """Writes where documents begin; returns how many were cut."""
    starts, sentences = (
      np.memmap(os.path.join(self.folder, name), np.int64, mode="r")
      for name in (_STARTS, _SENTENCES)
    )
    cut = 0
    with open(os.path.join(self.folder, _DOCUMENTS), "wb") as f:
      for i in range(0, self._journal.documents, _SCAN_DOCUMENTS):
        firsts = np.array(starts[i : i + _SCAN_DOCUMENTS + 1])
        long = np.flatnonzero(np.diff(sentences[firsts]) > block_tokens)
        cuts = [
          _cuts(sentences, *firsts[k : k + 2], block_tokens // _PARTS)
          for k in long
        ]
        begins = np.sort(np.concatenate([firsts[:-1], *cuts]))
        f.write(begins.tobytes())
        cut += len(long)
      f.write(starts[-1:].tobytes())
    return cut

  def _token_counts(self):
    """How often each id occurs, int64 [vocab_size]."""
    counts = np.zeros(self._vocab_size, np.int64)
    ids = continuation_bit(self._dtype) - 1
    with open(os.path.join(self.folder, _TOKENS), "rb") as f:
      while len(part := np.fromfile(f, self._dtype, _SCAN)):
        counts += np.bincount(part & ids, minlength=len(counts))
    return counts


def _cuts(sentence_offsets, first: int, last: int, size: int) -> np.ndarray:
  """Where parts of about `size` tokens begin, but the first: int64 [parts - 1].

  The document has the sentences `first` to `last` (exclusive).
  """
  offsets = sentence_offsets[first : last + 1]
  wanted = np.arange(offsets[0] + max(1, size), offsets[-1], max(1, size))
  places = first + np.unique(np.searchsorted(offsets, wanted))
  return places[places < last]


def _check_size(path: str, least: int) -> None:
  """Raises `DataError` if a file of the store has become shorter."""
  size = os.path.getsize(path) if os.path.exists(path) else 0
  if size < least:
    raise errors.DataError(
      f"{path}: {size} bytes, but {least} were written: it is damaged; "
      f"{_REMEDY}"
    )


def store_counts(folder: str) -> CorpusCounts | None:
  """What the store in a folder holds; None if it is not complete.

  Raises:
    DataError: it was complete, and is damaged.
  """
  path = os.path.join(folder, _COUNTS)
  if not os.path.exists(path):
    return None
  values = json_files.read_own(path, _REMEDY)
  token_bytes = token_dtype(values.pop("vocab_size")).itemsize
  counts = CorpusCounts(**values)
  for name, least in (
    (_TOKENS, token_bytes * counts.tokens),
    (_SENTENCES, 8 * (counts.sentences + 1)),
    (_DOCUMENTS, 8 * (counts.documents + 1)),
  ):
    _check_size(os.path.join(folder, name), least)
  return counts


def open_store(folder: str) -> instances.Documents:
  """The documents of a complete store, memory-mapped."""
  counts = json_files.read_own(os.path.join(folder, _COUNTS), _REMEDY)

  def load(name, dtype):
    # A plain view: indexing np.memmap itself is several times slower.
    return np.asarray(np.memmap(os.path.join(folder, name), dtype, mode="r"))

  return instances.Documents(
    tokens=load(_TOKENS, token_dtype(counts["vocab_size"])),
    sentence_offsets=load(_SENTENCES, np.int64),
    document_offsets=load(_DOCUMENTS, np.int64),
  )
