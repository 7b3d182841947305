"""Files by name: on the disk, or in a store that fsspec reaches by a URL.

`at(name)` has the same methods for both. What is read of a store is copied to a
cache, which the processes of a machine share. The URL stays the file's name.
"""

import contextlib
import fcntl
import glob
import hashlib
import io
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from common import files
from common.errors import UserError, reason

_URL = re.compile(r"[a-z][a-z0-9+.:-]*://")
_nothing_there = contextlib.suppress(FileNotFoundError)
# What tells that an object has changed: the names of S3 and Azure, GCS, HTTP,
# SFTP and disks, memory (fsspec.implementations, s3fs, gcsfs, adlfs).
_VERSIONS = (
  "ETag etag md5Hash Content-MD5 Digest LastModified Last-Modified "
  "last_modified mtime created"
).split()


def _cached(facts: str) -> str:
  """The path in the cache of what has these facts."""
  user_cache = os.path.expanduser("~/.cache/perseus-bert")
  folder = os.environ.get("PERSEUS_CACHE") or user_cache
  return os.path.join(folder, hashlib.sha256(facts.encode()).hexdigest()[:32])


class OnDisk(NamedTuple):
  """A file, or a pattern of files, of this machine."""

  name: str

  def is_file(self) -> bool:
    return os.path.isfile(self.name)

  def exists(self) -> bool:
    """Whether there is a file, or something else in its place."""
    return os.path.lexists(self.name)

  def matches(self) -> dict[str, bool]:
    """The names that the pattern matches: whether each is a file."""
    paths = sorted(glob.glob(self.name, recursive=True))
    return {path: os.path.isfile(path) for path in paths}

  def state(self) -> list:
    """[bytes, what is another value when it has changed]."""
    status = os.stat(self.name)
    return [status.st_size, status.st_mtime_ns]

  def local(self) -> str:
    """A file of this machine with the content."""
    return self.name

  def work_folder(self) -> str:
    """A folder of this machine for work on the file."""
    return self.name + ".unfinished"

  def take(self, source: str) -> None:
    """Moves a file of this machine here, where it appears when it is whole.

    FileNotFoundError without the file.
    """
    os.replace(source, self.name)

  def write(self, content: bytes) -> None:
    """Replaces the file by one with this content, when it is whole."""
    files.write(self.name, content)

  def remove(self) -> None:
    """Deletes the file, if it is there."""
    with _nothing_there:
      os.unlink(self.name)


class InStore(NamedTuple):
  """A file, or a pattern of files, of a store; a UserError names its URL."""

  name: str

  @contextlib.contextmanager
  def _store(self) -> Iterator[tuple[Any, str]]:
    """(the store, the object's name in it)."""
    try:
      import fsspec

      store, name = fsspec.core.url_to_fs(self.name)
      # It remembers lists of objects, which other machines change.
      store.invalidate_cache()
      yield store, name
    except ImportError as e:
      raise UserError(
        f"{self.name}: {e}: pip install -r requirements/stores.txt"
      ) from e
    except Exception as e:  # of types that only the store knows
      raise UserError(
        f"{self.name}: {type(e).__name__}: {reason(e)}: start the same command "
        "again when the store works"
      ) from e

  def is_file(self) -> bool:
    with self._store() as (store, name), _nothing_there:
      return store.info(name)["type"] == "file"
    return False

  exists = is_file  # a store has no folders

  def matches(self) -> dict[str, bool]:
    matches = {}
    with self._store() as (store, name):
      # A store's own names may lack the host of a URL (sftp, webhdfs).
      folder, inside = map(_folder_of, (self.name.rstrip("/"), name))
      for path, facts in sorted(store.glob(name, detail=True).items()):
        url = folder + path.removeprefix(inside)
        matches[url] = facts["type"] == "file"
    return matches

  def state(self) -> list:
    with self._store() as (store, name):
      facts = store.info(name)
    # Some servers of HTTP tell nothing but the size, or not even that.
    versions = filter(None, map(facts.get, _VERSIONS))
    return [facts["size"] or 0, str(next(versions, ""))]

  def local(self) -> str:
    """A copy in the cache, which is made again when the object has changed."""
    size, version = self.state()
    path = _cached(f"{self.name} {size} {version}")
    path += f"-{os.path.basename(self.name)[-100:]}"
    if os.path.exists(path):
      return path
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".tmp", "ab") as copy:
      # Another process of this machine may be making the copy.
      fcntl.flock(copy, fcntl.LOCK_EX)
      if os.path.exists(path):
        return path
      with self._store() as (store, name), files.naming(copy.name):
        store.get_file(name, copy.name)
      if size and size != os.path.getsize(copy.name):
        raise UserError(f"{self.name}: not all {size} bytes came: start again")
      os.replace(copy.name, path)
    return path

  def work_folder(self) -> str:
    return _cached(self.name) + ".unfinished"

  def take(self, source: str) -> None:
    with open(source, "rb") as f:
      self.write(f)
    os.unlink(source)

  def write(self, content: bytes | BinaryIO) -> None:
    source = io.BytesIO(content) if isinstance(content, bytes) else content
    # It makes no folder: a bucket of a wrong name would be made, too. The
    # object of a transaction appears when the whole of it has been sent.
    with self._store() as (store, name):
      with store.transaction, store.open(name, "wb") as target:
        shutil.copyfileobj(source, target, 16 << 20)

  def remove(self) -> None:
    with self._store() as (store, name), _nothing_there:
      store.rm_file(name)


def _folder_of(pattern: str) -> str:
  """The folder, with its slash, before the first mark of a pattern."""
  return "".join(re.split(r"[*?[]", pattern)[0].rpartition("/")[:2])


def path_of(name: str) -> str:
  """A file's name, of a URL without its query, as ?download=true."""
  return name.partition("?")[0] if _URL.match(name) else name


def beside(name: str, ending: str) -> str:
  """A file's name with an ending, which a URL's query follows."""
  path = path_of(name)
  return path + ending + name.removeprefix(path)


def at(name: str) -> OnDisk | InStore:
  """The file of a name or URL."""
  return InStore(name) if _URL.match(name) else OnDisk(name)
