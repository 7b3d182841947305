"""Text files to sentences: plain, .gz, .zst and JSON Lines; prose split.

A sentence is a line, and documents are apart by blank lines; in `.jsonl` files
a document is a record's text. As in google/bert the end of a file is no end of
a document, so a corpus may be cut into files anywhere. With a language, lines
are prose and are split into sentences by its rules.

A plain file is read in pieces of `PIECE_BYTES`, a compressed one as one piece;
all that is in memory at a time is a batch of lines.
"""

import codecs
import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import os
import re
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

import errors
import tokenization

PIECE_BYTES = 2 << 20  # small enough that a small corpus occupies all workers
_BUFFER_BYTES = 1 << 20
# A longer line is taken for several, a longer JSON record is an error.
MAX_LINE_BYTES = 1 << 20
MAX_RECORD_BYTES = 64 << 20
_BATCH_LINES, _BATCH_BYTES = 4096, 1 << 18

# What ends a line that goes on in the next one of wrapped prose.
_GOES_ON = tuple(",;，、；")
_HEADLINE = 20  # Chinese characters: what is shorter was not wrapped


@dataclasses.dataclass(frozen=True)
class TextFormat:
  """How text is read.

  Raises:
    DataError: `prose` cannot be the code of a language.

  Attributes:
    prose: ISO 639-1 code of the language by whose rules lines are split into
      sentences; "": a line is a sentence.
    text_field: of a .jsonl record, holds its text.
  """

  prose: str = ""
  text_field: str = "text"

  def __post_init__(self):
    if self.prose and not re.fullmatch("[a-z]{2,3}", self.prose):
      raise errors.DataError(
        f"--prose={self.prose}: must be an ISO 639-1 code, as en or zh"
      )


@dataclasses.dataclass(frozen=True)
class Piece:
  """Lines of a file that start at a byte from `start` to `end` (exclusive)."""

  path: str
  start: int
  end: int | None  # None: the whole of a compressed file


class Batch(NamedTuple):
  """Some lines of a piece."""

  sentences: list[str]  # stripped; "" ends a document
  bytes: int  # of text
  bad_lines: int  # lines that are not UTF-8
  bytes_on_disk: int  # about; less than `bytes` of a compressed file


def is_compressed(path: str) -> bool:
  """Whether a file is taken for compressed, by its name."""
  return path.endswith((".gz", ".zst"))


def is_jsonl(path: str) -> bool:
  """Whether a file is taken for JSON Lines, by its name."""
  stem = os.path.splitext(path)[0] if is_compressed(path) else path
  return stem.endswith((".jsonl", ".ndjson"))


def split_into_pieces(paths: Iterable[str]) -> list[Piece]:
  """Pieces of all files, in order.

  Raises:
    DataError: a file is empty or cannot be read.
  """
  pieces = []
  for path in paths:
    size = os.path.getsize(path)
    if not size:
      raise errors.DataError(f"{path}: the file is empty")
    if not os.access(path, os.R_OK):
      raise errors.DataError(f"{path}: no permission to read it")
    if is_compressed(path):
      pieces.append(Piece(path, 0, None))
      continue
    for start in range(0, size, PIECE_BYTES):
      pieces.append(Piece(path, start, min(start + PIECE_BYTES, size)))
  return pieces


def read_batches(piece: Piece, text: TextFormat) -> Iterator[Batch]:
  """The sentences of a piece, in order.

  Raises:
    DataError: the file is damaged, or a record is no JSON or has no text.
  """
  parse = _json_sentences if is_jsonl(piece.path) else _text_sentences
  with _opened(piece) as (f, on_disk):
    lines = _raw_lines(f, piece)
    before = 0
    while batch := _next_lines(lines):
      place, line = batch[0]
      if not place:
        batch[0] = place, _without_mark(line, piece.path)
      sentences, bad_lines = parse(piece.path, batch, text)
      size = sum(len(line) for _, line in batch)
      size += len(line) - len(batch[0][1])
      if f is on_disk:
        yield Batch(sentences, size, bad_lines, size)
      else:
        now = on_disk.tell()
        yield Batch(sentences, size, bad_lines, now - before)
        before = now


def _next_lines(lines):
  """Some of the lines, [] at their end."""
  batch, size = [], 0
  for item in itertools.islice(lines, _BATCH_LINES):
    batch.append(item)
    size += len(item[1])
    if size >= _BATCH_BYTES:
      break
  return batch


def read_lines(
  paths: Iterable[str], text: TextFormat = TextFormat()
) -> Iterator[str]:
  """All sentences of some files; see `Batch.sentences`.

  Raises:
    DataError: a file is empty, cannot be read, or is not what it should be.
  """
  for piece in split_into_pieces(paths):
    for batch in read_batches(piece, text):
      yield from batch.sentences


# -----------------------------------------------------------------------------
# Lines
# -----------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(piece: Piece) -> Iterator[tuple[BinaryIO, BinaryIO]]:
  """(the text, the file on the disk) of a piece."""
  with open(piece.path, "rb", buffering=_BUFFER_BYTES) as on_disk:
    if piece.end is not None:
      yield on_disk, on_disk
      return
    # Here, since not everyone has such files.
    from backports import zstd

    is_gzip = piece.path.endswith(".gz")
    opener = gzip.open if is_gzip else zstd.open
    try:
      with opener(on_disk, "rb") as raw, io.BufferedReader(raw) as f:
        yield f, on_disk
    except (gzip.BadGzipFile, EOFError, zlib.error, zstd.ZstdError) as e:
      raise errors.DataError(
        f"{piece.path}: not a whole {'gzip' if is_gzip else 'zstd'} file ({e})"
      ) from e


def _raw_lines(f: BinaryIO, piece: Piece) -> Iterator[tuple[int, bytes]]:
  """(the byte at which it starts, the line) of a piece's lines."""
  position = _first_line(f, piece)
  limit = MAX_RECORD_BYTES if is_jsonl(piece.path) else MAX_LINE_BYTES
  rest, at_start = b"", True
  while not at_start or piece.end is None or position < piece.end:
    line = rest + f.readline(limit - len(rest))
    if not line:
      return
    rest, at_start = b"", line.endswith(b"\n")
    if len(line) >= limit and not at_start:
      if is_jsonl(piece.path):
        raise errors.DataError(
          f"{piece.path}: the record at byte {position} is longer than "
          f"{limit >> 20} MB: is this JSON Lines, one record a line?"
        )
      length = _cut_at(line)
      line, rest = line[:length], line[length:]
    yield position, line
    position += len(line)


def _without_mark(line: bytes, path: str) -> bytes:
  """A file's first line without UTF-8's byte order mark.

  Raises:
    DataError: it has another encoding's.
  """
  # UTF-32's little-endian mark begins with UTF-16's.
  marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
  if line.startswith(marks):
    raise errors.DataError(
      f"{path}: its byte order mark is that of UTF-16 or UTF-32: convert it to "
      "UTF-8, for example by iconv"
    )
  return line.removeprefix(codecs.BOM_UTF8)


def _first_line(f: BinaryIO, piece: Piece) -> int:
  """Goes to the first line that starts in the piece; returns its place."""
  if not piece.start:
    return 0
  # The line that runs over the boundary belongs to the piece before.
  position = f.seek(piece.start - 1)
  while position < piece.end:
    part = f.readline(MAX_LINE_BYTES)
    position += len(part)
    if not part or part.endswith(b"\n"):
      break
  return position


def _cut_at(line: bytes) -> int:
  """Where to cut a line: behind a space if there is one, else a character."""
  space = line.rfind(b" ", len(line) // 2)
  if space >= 0:
    return space + 1
  # The last character may be cut off: it starts in the last four bytes.
  for length in range(len(line) - 1, max(0, len(line) - 5), -1):
    if line[length] & 0xC0 != 0x80:
      return length
  return len(line)


# -----------------------------------------------------------------------------
# Sentences
# -----------------------------------------------------------------------------


def _decoded(line: bytes) -> tuple[str, bool]:
  """(text, whether bytes that are not UTF-8 were dropped)."""
  try:
    return line.decode().strip(), False
  except UnicodeDecodeError:
    return line.decode("utf-8", "ignore").strip(), True


def _text_sentences(path, batch, text):
  """(sentences with "" between documents, bad lines) of plain lines."""
  del path
  decoded = [_decoded(line) for _, line in batch]
  lines = [line for line, _ in decoded]
  if text.prose:
    lines = split_prose(lines, text.prose)
  return lines, sum(bad for _, bad in decoded)


def _json_sentences(path, batch, text):
  """As `_text_sentences`, of JSON records: each is a document."""
  sentences, bad_lines = [], 0
  for place, line in batch:
    if not line.strip():
      continue
    document, bad = _record_text(path, place, line, text.text_field)
    bad_lines += bad
    lines = [part.strip() for part in document.split("\n")]
    if text.prose:
      lines = split_prose(lines, text.prose)
    sentences.append("")
    sentences.extend(filter(None, lines))
    sentences.append("")
  return sentences, bad_lines


def _record_text(path, place, line, field):
  """(text, whether bytes were dropped) of one JSON record."""
  decoded, bad = _decoded(line)
  try:
    record = json.loads(decoded)
  except (ValueError, RecursionError) as e:
    raise errors.DataError(
      f"{path}: the record at byte {place} is not JSON: {e}"
    ) from e
  value = record.get(field) if isinstance(record, dict) else None
  if not isinstance(value, str):
    has = ", ".join(map(str, record)) if isinstance(record, dict) else "none"
    raise errors.DataError(
      f"{path}: the record at byte {place} has no text in a field {field!r} "
      f"(its fields: {has[:200]}); name the one with the text by --text_field"
    )
  # JSON can spell half of a surrogate pair, which is no text.
  return value.encode("utf-8", "ignore").decode(), bad


def split_prose(lines: Iterable[str], language: str) -> list[str]:
  """Lines of prose, each a paragraph or wrapped, to sentences.

  A line goes on in the next one if it ends in a comma or the like, or if it
  ends without any punctuation and the next one starts with a small letter, or
  with a Chinese one after a Chinese line too long for a headline.

  Args:
    lines: stripped; "" ends a document, and is kept.
    language: see `tokenization.split_sentences`.
  """
  paragraphs: list[str] = []
  for line in lines:
    if paragraphs and line and paragraphs[-1]:
      joint = _joint(paragraphs[-1], line)
      if joint is not None:
        paragraphs[-1] += joint + line
        continue
    paragraphs.append(line)
  sentences = []
  for paragraph in paragraphs:
    if paragraph:
      sentences += tokenization.split_sentences(paragraph, language)
    else:
      sentences.append("")
  return sentences


def _joint(line: str, following: str) -> str | None:
  """What stands between two lines of one sentence; None if they are of two."""
  is_chinese = tokenization.is_chinese_char
  between = "" if is_chinese(following[0]) else " "
  if line.endswith(_GOES_ON):
    return between
  if unicodedata.category(line[-1])[0] not in "LN":
    return None
  if is_chinese(line[-1]):
    goes_on = is_chinese(following[0]) and len(line) >= _HEADLINE
    return "" if goes_on else None
  return " " if following[0].islower() else None
