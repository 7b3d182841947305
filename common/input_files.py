"""Files that a command reads: what they hold, by their first bytes.

A name may not tell: compressed files go without their ending, and a clone
without Git LFS has pointers in the place of large files.
"""

import bz2
import contextlib
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, NamedTuple

from backports import zstd

from common import stores
from common.errors import DataError, reason

# Files beside records and text, which a glob leaves out.
INDEX_SUFFIX = ".index"  # of a record file's index
SIDE_FILES = (INDEX_SUFFIX, ".json", ".tmp")

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
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)


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
  except OSError as e:
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
        if path.endswith(other.ending):
          kind = other
    if not kind.unpack:
      yield on_disk, on_disk
      return
    try:
      with kind.unpack(on_disk) as raw, io.BufferedReader(raw) as content:
        kind_of(content, path)
        yield content, on_disk
    except _DAMAGED as e:
      raise DataError(f"{path}: not a whole {kind.name} file ({e})") from e


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
      if is_file and not is_beside:
        files.append(path)
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


def listed(names: str) -> list[str]:
  """The names of a comma-separated list."""
  return [name.strip() for name in names.split(",") if name.strip()]


def check_not_written(paths: Iterable[str], flag: str, *written: str) -> None:
  """DataError if one of `paths`, of `flag`, is a file that will be written."""
  outputs = {os.path.realpath(path) for path in written}
  for path in paths:
    if os.path.realpath(path) in outputs:
      raise DataError(
        f"{path} is of {flag}, and would be written: give another place to "
        "write to, or a narrower pattern"
      )
