"""Text files to sentences: plain, compressed, JSON Lines; splits prose.

A line is a sentence, or prose that a language's rules split. Blank lines
separate documents; a record of a `.jsonl` file is a document. As in google/bert
the end of a file does not end a document, so files may be cut anywhere.

A plain UTF-8 file is read in pieces of `PIECE_BYTES`, any other as one piece (a
piece is what Hadoop calls an input split). Memory holds a batch of lines or one
JSON record at a time.
"""

import codecs
import contextlib
import dataclasses
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, NamedTuple

from common import errors, input_files, json_files
from common.input_files import MAX_RECORD_BYTES, Format
from corpus import prose

# Defaults and help of the flags that all commands with text have.
TEXT_FIELD = "text", "Field or column that holds a record's text."
ENCODING = (
  "utf-8",
  "Encoding of the text, any of Python's. Bytes that are not in it are an "
  "error.",
)
PIECE_BYTES = 2 << 20  # small enough that a small corpus occupies all workers
_BUFFER_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 20  # longer lines are cut
_BATCH_LINES, _BATCH_BYTES = 4096, 1 << 18
_PART_CHARS = 2048  # of another encoding, read at once

# JSON can spell halves of surrogate pairs and NUL, which are no text.
_NO_TEXT = re.compile("[\ud800-\udfff\0]")


def check_language(flag: str, code: str) -> None:
  """Raises `DataError` unless `code` may be an ISO 639-1 code."""
  if not re.fullmatch("[a-z]{2,3}", code):
    raise errors.DataError(
      f"--{flag}={code}: must be an ISO 639-1 code, as en or zh"
    )


@dataclasses.dataclass(frozen=True)
class TextFormat:
  """How text is read; DataError for an impossible language or encoding."""

  prose: str = ""  # ISO 639-1 code of its language; "": a line is a sentence
  # The field of a .jsonl record with its text; None: all its strings are text.
  text_field: str | None = "text"
  encoding: str = "utf-8"  # any of Python's

  def __post_init__(self):
    if self.prose:
      check_language("prose", self.prose)
    try:
      codecs.getincrementaldecoder(self.encoding)
      io.TextIOWrapper(io.BytesIO(), self.encoding)  # refuses base64 and such
    except (LookupError, ValueError) as e:
      raise errors.DataError(
        f"--encoding={self.encoding}: must be one of Python's text encodings, "
        f"as utf-16 ({e})"
      ) from e

  @property
  def is_utf8(self) -> bool:
    return codecs.lookup(self.encoding).name == "utf-8"


class Piece(NamedTuple):
  """The lines of a file that start at a byte in [start, end)."""

  path: str
  start: int
  end: float  # inf: the whole file, which can be read in order only
  format: Format = Format.TEXT
  field: str = ""  # of its records, in place of `TextFormat.text_field`


class Batch(NamedTuple):
  """Some lines of a piece."""

  sentences: list[str]  # stripped; "" ends a document
  bytes: int  # their text, as UTF-8
  bytes_on_disk: int  # about; fewer in a compressed file


def split_into_pieces(
  paths: Iterable[str], text: TextFormat = TextFormat()
) -> list[Piece]:
  """Pieces of all files, in order; DataError for one that cannot be read."""
  pieces = []
  for path, kind in input_files.formats_of(paths).items():
    # google/bert's reader takes any lines for sentences, also those of a table.
    if kind not in (Format.TEXT, Format.JSON_LINES):
      input_files.expect_plain([path], *input_files.COMPRESSED)
      raise errors.DataError(
        f"{path}: holds a table, or JSON with records of many lines, not text: "
        'write its texts to a file *.jsonl, a line {"text": "..."} for each '
        "document (--text_field names another field)"
      )
    pieces += pieces_of(Piece(path, 0, math.inf, kind), text)
  return pieces


def pieces_of(whole: Piece, text: TextFormat) -> list[Piece]:
  """Pieces of a file of lines; DataError for JSON lines of other fields."""
  pieces = [whole]
  with input_files.unpacked(whole.path) as (content, on_disk):
    size = on_disk.seek(0, io.SEEK_END)
  # Only plain bytes can be read from the middle, and only UTF-8 shows there
  # where a character begins.
  if content is on_disk and text.is_utf8:
    pieces = []
    for start in range(0, size, PIECE_BYTES):
      end = min(start + PIECE_BYTES, size)
      pieces.append(whole._replace(start=start, end=end))
  if whole.format is Format.JSON_LINES:
    next(records(pieces[0], text), None)
  return pieces


def read_batches(piece: Piece, text: TextFormat) -> Iterator[Batch]:
  """The sentences of a piece; DataError names the line of bad text."""
  with _opened(piece, text) as (f, on_disk):
    lines, before = _raw_lines(f, piece), 0
    size_of = lambda line: len(line[1])
    for batch in gathered(lines, size_of, _BATCH_BYTES, _BATCH_LINES):
      left = sum(map(size_of, batch))
      for sentences in _sentences(piece, batch, text):
        size = min(left - 1, sum(map(len, sentences)))
        yield Batch(sentences, size, size if f is on_disk else 0)
        left -= size
      # The rest is line ends and the like: at least one byte.
      now = left if f is on_disk else on_disk.tell() - before
      yield Batch([], left, now)
      before += now


def gathered(
  items: Iterable, size_of: Callable, size: int, most: float = math.inf
) -> Iterator[list]:
  """Lists of successive items, each full at `size` or at `most` items."""
  batch, total = [], 0
  for item in items:
    batch.append(item)
    total += size_of(item)
    if total >= size or len(batch) >= most:
      yield batch
      batch, total = [], 0
  if batch:
    yield batch


def read_lines(
  paths: Iterable[str], text: TextFormat = TextFormat()
) -> Iterator[str]:
  """All `Batch.sentences` of some files; raises as `read_batches`."""
  for piece in split_into_pieces(paths, text):
    for batch in read_batches(piece, text):
      yield from batch.sentences


def offset_lines(piece: Piece, text: TextFormat) -> Iterator[tuple[int, str]]:
  """(offset of its first byte, stripped line) of each line, or its parts."""
  with _opened(piece, text) as (f, _):
    # A part of a long line may be blank without being a blank line.
    at_start = True
    for offset, raw in _raw_lines(f, piece):
      line = _decoded(raw, offset, piece, text).strip()
      is_whole = at_start and raw.endswith(b"\n")
      if line or is_whole:
        yield offset, line
      at_start = raw.endswith(b"\n")


def table_lines(path: str, text: TextFormat) -> Iterator[str]:
  """The lines of a file with their ends, uncut; DataError names a bad one."""
  piece, offset = Piece(path, 0, math.inf), 0
  with _opened(piece, text) as (f, _):
    while line := f.readline(MAX_RECORD_BYTES):
      yield _decoded(line, offset, piece, text)
      offset += len(line)


def utf8_lines(lines: Iterable[bytes], name: str) -> Iterator[str]:
  """Lines of the file `name` as text; DataError for one that is not UTF-8."""
  for number, line in enumerate(lines, 1):
    try:
      yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as e:
      raise errors.DataError(
        f"{name}: line {number}: not UTF-8 (0x{line[e.start]:02x}): convert "
        "the text to UTF-8"
      ) from e


@contextlib.contextmanager
def _opened(
  piece: Piece, text: TextFormat
) -> Iterator[tuple[BinaryIO, BinaryIO]]:
  """(the text in UTF-8, the file on disk) of a piece."""
  with input_files.unpacked(piece.path) as (f, on_disk):
    if text.is_utf8:
      yield f, on_disk
      return
    try:
      with io.BufferedReader(_InUtf8(f, text.encoding)) as recoded:
        yield recoded, on_disk
    except UnicodeError as e:  # no byte order mark
      raise _wrong_encoding(f"{piece.path}: line 1", text.encoding, e) from e


class _InUtf8(io.RawIOBase):
  """Text of another encoding, read as UTF-8, in which wrong bytes are wrong."""

  def __init__(self, f: BinaryIO, encoding: str):
    # They become half of a surrogate pair, which UTF-8 refuses.
    half = lambda e: ("\ud800", e.end)  # type: ignore[attr-defined]
    codecs.register_error("half", half)
    self._text = io.TextIOWrapper(f, encoding, "half", newline="\n")
    self._ready = b""

  def readable(self) -> bool:
    return True

  def readinto(self, buffer) -> int:
    if not self._ready:
      part = self._text.readline(_PART_CHARS)
      self._ready = part.encode(errors="surrogatepass")
    size = min(len(buffer), len(self._ready))
    buffer[:size] = self._ready[:size]
    self._ready = self._ready[size:]
    return size


def _wrong_encoding(where: str, encoding: str, e: ValueError):
  return errors.DataError(
    f"{where}: not text in {encoding} ({e}): name the file's encoding by "
    "--encoding, as utf-16-le or latin-1"
  )


def _raw_lines(f: BinaryIO, piece: Piece) -> Iterator[tuple[int, bytes]]:
  """(offset of its first byte, line) for each line of a piece."""
  position = 0
  if piece.start:
    # The line that crosses the boundary belongs to the previous piece.
    position, part = f.seek(piece.start - 1), b"-"
    while part and position < piece.end and not part.endswith(b"\n"):
      part = f.readline(MAX_LINE_BYTES)
      position += len(part)
  is_json = piece.format is Format.JSON_LINES
  limit = MAX_RECORD_BYTES if is_json else MAX_LINE_BYTES
  # A line belongs to the piece in which it starts, in all of its parts.
  rest, at_start = b"", True
  while not at_start or position < piece.end:
    line = rest + f.readline(limit - len(rest))
    if not line:
      return
    rest, at_start = b"", line.endswith(b"\n")
    if len(line) >= limit and not at_start:
      if is_json:
        raise errors.DataError(
          f"{piece.path}: the record at byte {position} is longer than "
          f"{limit >> 20} MB: is there one a line?"
        )
      # It is cut after a space, or else between characters.
      length = line.rfind(b" ", len(line) // 2) + 1
      if not length:
        # The last character may be incomplete: it starts in the last four
        # bytes, at one that is no continuation (0b10xxxxxx).
        length = len(line)
        for index in range(max(1, len(line) - 4), len(line)):
          if line[index] & 0xC0 != 0x80:
            length = index
      line, rest = line[:length], line[length:]
    yield position, line
    position += len(line)


def _decoded(line: bytes, offset: int, piece: Piece, text: TextFormat) -> str:
  """The line at an offset as text; DataError for a wrong byte."""
  try:
    if b"\0" in line:
      raise ValueError("a NUL character, which no text has")
    return line.decode("utf-8" if offset else "utf-8-sig")
  except ValueError as e:
    raise _wrong_encoding(_where(piece, text, offset), text.encoding, e) from e


def _where(piece: Piece, text: TextFormat, offset: int) -> str:
  """FILE: line N, of the line at an offset, for messages."""
  number = 1
  with _opened(piece, text) as (f, _):
    left = offset
    while left and (part := f.read(min(left, _BUFFER_BYTES))):
      number += part.count(b"\n")
      left -= len(part)
  return f"{piece.path}: line {number}"


def _sentences(
  piece: Piece, batch: list[tuple[int, bytes]], text: TextFormat
) -> Iterator[list[str]]:
  """Lists of the sentences of some lines, with "" between documents."""
  if piece.format is not Format.JSON_LINES:
    lines = [_decoded(raw, at, piece, text).strip() for at, raw in batch]
    yield list(prose.sentences(lines, text.prose))
    return
  # Each record is a document, which may be too long for one list.
  for offset, raw in batch:
    decoded = _decoded(raw, offset, piece, text).strip()
    if not decoded:
      continue
    record = parse_record(piece, offset, decoded, text)
    lines_of_text = lines_of(record[field_of(piece, text)])
    sentences = filter(None, prose.sentences(lines_of_text, text.prose))
    yield [""]
    yield from gathered(sentences, len, _BATCH_BYTES, _BATCH_LINES)
    yield [""]


def field_of(piece: Piece, text: TextFormat) -> str | None:
  """The field of the piece's records that holds text; None: all do."""
  return piece.field or text.text_field


def flag_of(piece: Piece, text: TextFormat) -> str:
  """`field_of` as the command names it, for messages."""
  return (
    f"FILES:{piece.field}" if piece.field else f"--text_field={text.text_field}"
  )


def records(piece: Piece, text: TextFormat) -> Iterator[tuple[int, dict]]:
  """(offset, record) of JSON lines."""
  for offset, line in offset_lines(piece, text):
    if line:
      yield offset, parse_record(piece, offset, line, text)


def parse_record(
  piece: Piece, offset: int, line: str, text: TextFormat
) -> dict:
  """The JSON object on the line at an offset; its text may be null."""
  record: dict = {}
  field = field_of(piece, text)
  try:
    record = json_files.parse(line, {}, strict=False)
    json_files.expect(record, {} if field is None else {field: (str, None)})
    return record
  except ValueError as e:
    fields = f"; it has the fields {', '.join(record)}" if record else ""
    raise errors.DataError(
      f"{_where(piece, text, offset)}: no JSON object with text in its field "
      f"{flag_of(piece, text)}: {str(e)[:200]}{fields[:200]}"
    ) from e


def only_text(value: str) -> str:
  """Leaves out what is no text, though JSON and tables can hold it."""
  return _NO_TEXT.sub("", value)


def lines_of(text: str | None) -> Iterator[str]:
  """Stripped lines of the text; long ones are cut, at a space if possible."""
  limit = prose.MAX_PARAGRAPH
  for line in only_text(text or "").split("\n"):
    while len(line) > limit:
      length = line.rfind(" ", limit // 2, limit) + 1 or limit
      yield line[:length].strip()
      line = line[length:]
    yield line.strip()
