"""Files that a command reads: what they hold, by their first bytes.

A name may not tell: compressed files go without their ending, and a clone
without Git LFS has pointers in the place of large files.
"""

import bz2
import collections
import contextlib
import enum
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, NamedTuple

from backports import zstd

from common import stores
from common.console import counted, tell
from common.errors import DataError, UserError, reason

# Files beside records and text, which a glob leaves out.
INDEX_SUFFIX = ".index"  # of a record file's index
SIDE_FILES = (INDEX_SUFFIX, ".json", ".tmp")
# Of Spark, Databricks and pyarrow, without an ending.
_MARKS = re.compile(r"_(SUCCESS|(common_)?metadata|(committed|started)_\d+)")

_HEAD = 265  # bytes: the mark of a tar archive ends there
_UNPACK, _CONVERT = "unpack it", "convert it to JSON lines, *.jsonl"


class Kind(NamedTuple):
  """What a file may hold."""

  name: str
  first: bytes  # a pattern of the first bytes
  remedy: str = _UNPACK
  ending: str = ""  # of the names of compressed files
  unpack: Callable | None = None  # opens them


PLAIN = Kind("plain", b"")
ZIP = Kind("a ZIP archive", rb"PK\x03\x04")
COMPRESSED = (
  Kind("gzip", rb"\x1f\x8b\x08", _UNPACK, ".gz", gzip.open),
  Kind("bzip2", rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", _UNPACK, ".bz2", bz2.open),
  Kind("xz", rb"\xfd7zXZ\0", _UNPACK, ".xz", lzma.open),
  Kind("zstd", rb"\(\xb5/\xfd|[P-_]\*M\x18", _UNPACK, ".zst", zstd.open),
)
# Prose may begin with PAR1, which is a gene.
PARQUET = Kind("Parquet", rb"PAR1[^ -~\s]", _CONVERT)
ARROW = Kind("Arrow", rb"ARROW1\0|\xff{4}", _CONVERT)
_KINDS = (
  *COMPRESSED,
  ZIP,
  Kind("lz4", rb"\x04\x22M\x18"),
  Kind("a 7-Zip archive", rb"7z\xbc\xaf"),
  Kind("a tar archive", rb"(?s).{257}ustar(\0|  \0)"),
  PARQUET,
  ARROW,
  Kind(
    "a Git LFS pointer",
    rb"version https://git-lfs\.github\.com/spec/v\d",
    "run `git lfs pull`",
  ),
  Kind("a git-annex pointer", rb"/annex/objects/\w+-", "run `git annex get`"),
  PLAIN,
)


class Format(enum.Enum):
  """How the content of a file is cut into texts."""

  EMPTY = enum.auto()
  TEXT = enum.auto()
  JSON_LINES = enum.auto()
  JSON = enum.auto()  # one value on many lines
  CSV = enum.auto()  # cells with commas or line ends are in quotes
  TSV = enum.auto()  # a line is a row, and quotes are text
  PARQUET = enum.auto()
  ARROW = enum.auto()


_BY_CONTENT = {PARQUET: Format.PARQUET, ARROW: Format.ARROW}
# Any other name says nothing, so the content tells text from JSON.
_BY_NAME = {
  ".txt": Format.TEXT,
  ".jsonl": Format.JSON_LINES,
  ".ndjson": Format.JSON_LINES,
  ".csv": Format.CSV,
  ".tsv": Format.TSV,
}
_MARK_OF_UTF8 = b"\xef\xbb\xbf"
MAX_RECORD_BYTES = 64 << 20  # longer records of JSON lines are an error
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)
_NOT_READABLE = (
  FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError
)  # fmt: skip


def is_of_system(error: Exception) -> bool:
  """Whether the machine is to blame, and not the content that it reads."""
  return isinstance(error, MemoryError) or bool(getattr(error, "errno", None))


def kind_of(f: io.BufferedReader, path: str, *wanted: Kind) -> Kind:
  """What an open file holds; DataError if neither plain nor of `wanted`."""
  head = f.peek(_HEAD)
  kind = next(kind for kind in _KINDS if re.match(kind.first, head))
  if kind not in (PLAIN, *wanted):
    raise DataError(f"{path}: holds {kind.name}: {kind.remedy}")
  return kind


@contextlib.contextmanager
def open_input(path: str, *wanted: Kind) -> Iterator[io.BufferedReader]:
  """Opens a file; DataError if it cannot, and as of `kind_of`."""
  try:
    f = open(stores.at(path).local(), "rb")
  except _NOT_READABLE as e:
    raise DataError(reason(e)) from e
  with f:
    kind_of(f, path, *wanted)
    yield f


def read(path: str) -> bytes:
  """The content; DataError as of `open_input`."""
  with open_input(path) as f:
    return f.read()


def expect_plain(paths: Iterable[str], *wanted: Kind) -> None:
  """As `open_input`, for files that a library opens."""
  for path in paths:
    with open_input(path, *wanted):
      pass


@contextlib.contextmanager
def unpacked(path: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
  """(content, file on disk), the same for a plain file; DataError if damaged.

  The content, or else the name, tells how it is compressed.
  """
  with open(stores.at(path).local(), "rb") as on_disk:
    kind = kind_of(on_disk, path, *COMPRESSED)
    if kind is PLAIN:
      # A damaged file may have lost its first bytes, but not its name.
      for other in COMPRESSED:
        if stores.path_of(path).endswith(other.ending):
          kind = other
    if not kind.unpack:
      yield on_disk, on_disk
      return
    try:
      with kind.unpack(on_disk) as raw, io.BufferedReader(raw) as content:
        kind_of(content, path)
        yield content, on_disk
    except _DAMAGED as e:
      if is_of_system(e):
        raise
      raise DataError(f"{path}: not a whole {kind.name} file ({e})") from e


def ending(path: str) -> str:
  """The end of a name without a URL's query and without a compression's."""
  stem, end = os.path.splitext(stores.path_of(path).lower())
  packed = [kind.ending for kind in COMPRESSED]
  return os.path.splitext(stem)[1] if end in packed else end


def format_of(path: str) -> Format:
  """The format of a file, for all commands; DataError if it cannot be read."""
  readable = (*COMPRESSED, *_BY_CONTENT)
  with open_input(path, *readable) as f:
    kind = kind_of(f, path, *readable)
    if kind in _BY_CONTENT:
      return _BY_CONTENT[kind]
    if not f.peek(1):
      return Format.EMPTY
  with unpacked(path) as (content, _):
    head = content.read(_HEAD)
    named = _BY_NAME.get(ending(path))
    if named or not head:
      return named if head and named else Format.EMPTY
    if head.removeprefix(_MARK_OF_UTF8).lstrip().startswith(b"{"):
      rest = content.readline(MAX_RECORD_BYTES)
      line = (head + rest).removeprefix(_MARK_OF_UTF8).lstrip().split(b"\n")[0]
      with contextlib.suppress(ValueError, RecursionError):
        json.loads(line)
        return Format.JSON_LINES
  return Format.JSON if ending(path) == ".json" else Format.TEXT


def formats_of(paths: Iterable[str]) -> dict[str, Format]:
  """The formats of files that are not empty; tells how many are.

  DataError if all are, because that is most likely a mistake.
  """
  formats: dict[str, Format] = {}
  empty = []
  for path in paths:
    form = format_of(path)
    if form is Format.EMPTY:
      empty.append(path)
    else:
      formats[path] = form
  if empty and not formats:
    raise DataError(f"{empty[0]}: the file is empty")
  if empty:
    tell(f"{counted(len(empty), 'empty file')} passed over: {empty[0]} ...")
  return formats


def expand_patterns(patterns: str) -> list[str]:
  """Files of a comma-separated list of names and globs, sorted, once each.

  The order, which numbers the records, depends on the names alone. A name of an
  existing file is no glob. Globs leave out `SIDE_FILES`. DataError
  for an item that matches no file.
  """
  paths: set[str] = set()
  for name in listed(patterns):
    if stores.at(name).is_file():
      paths.add(name)
      continue
    matches, files = stores.at(name).matches(), []
    for path, is_file in matches.items():
      # A glob such as *.json asks for them itself.
      is_beside = path.endswith(SIDE_FILES) and not name.endswith(SIDE_FILES)
      is_beside |= bool(_MARKS.fullmatch(os.path.basename(path)))
      if is_file and not is_beside:
        files.append(path)
    if within := not files and name in matches and _files_within(name):
      raise DataError(f"{name}: is a folder: name its files, as {within}")
    if matches and not files:
      raise DataError(
        f"{name}: matches {min(matches)}, which is a folder, a link to nothing "
        "or a file beside records: name files exactly"
      )
    if not files:
      raise DataError(f"{name}: no such file (from {patterns!r})")
    paths.update(files)
  if not paths:
    raise DataError(f"no input files in {patterns!r}")
  return sorted(paths)


def _files_within(folder: str) -> str:
  """A glob of the files in a folder with the most frequent ending, or ""."""
  for pattern in ("*", "**/*"):
    within = stores.at(os.path.join(folder, pattern)).matches()
    endings: collections.Counter[str] = collections.Counter()
    for path, is_file in within.items():
      endings[os.path.splitext(path)[1]] += is_file
    if any(endings.values()):
      return os.path.join(folder, pattern + endings.most_common(1)[0][0])
  return ""


def listed(names: str) -> list[str]:
  """The names of a comma-separated list."""
  return [name.strip() for name in names.split(",") if name.strip()]


def check_not_written(paths: Iterable[str], flag: str, *written: str) -> None:
  """DataError if one of `paths`, of `flag`, is a file that will be written.

  UserError if a folder is where a file will be, which is known before any work.
  """
  for path in written:
    if os.path.isdir(path) or not os.path.basename(path):
      raise UserError(f"{path} is a folder: give another name to write")
  outputs = {os.path.realpath(path) for path in written}
  for path in paths:
    if os.path.realpath(path) in outputs:
      raise DataError(
        f"{path} is of {flag}, and would be written: give another place to "
        "write to, or a narrower pattern"
      )
