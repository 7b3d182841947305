"""Files and folders that appear when they are whole; locks; hashes."""

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
from collections.abc import Iterator
from typing import BinaryIO

from common.console import tell
from common.errors import UserError


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
  """An error of the system in the block that names no file names `path`."""
  try:
    yield
  except OSError as e:
    if e.errno and e.filename is None:
      e.filename = path
    raise


@contextlib.contextmanager
def atomic_write(path: str) -> Iterator[BinaryIO]:
  """Opens PATH.tmp, which replaces `path` after a block without an error."""
  try:
    with naming(path), open(path + ".tmp", "wb") as f:
      yield f
    os.replace(path + ".tmp", path)
  except BaseException:
    with contextlib.suppress(FileNotFoundError):
      os.unlink(path + ".tmp")
    raise


def expect_new(path: str) -> None:
  """UserError if a folder of --output has something in it."""
  if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
    raise UserError(
      f"--output={path} already exists and is not empty: give a new folder, or "
      "remove that one"
    )


@contextlib.contextmanager
def new_folder(path: str) -> Iterator[str]:
  """An empty folder, which becomes `path` after a block without an error."""
  expect_new(path)
  with folder_aside(path) as aside:
    yield aside
    os.replace(aside, path)


@contextlib.contextmanager
def folder_aside(path: str) -> Iterator[str]:
  """An empty folder for what is moved to `path`, or beside it, when whole.

  UserError if another process works in it.
  """
  aside = os.path.normpath(path) + ".unfinished"
  os.makedirs(aside, exist_ok=True)
  with contextlib.ExitStack() as at_end:
    opened = os.open(aside, os.O_RDONLY)
    at_end.callback(os.close, opened)
    lock(opened, aside)
    at_end.callback(shutil.rmtree, aside, ignore_errors=True)
    # What a killed start left, because the name follows from `path`.
    for item in os.scandir(aside):
      shutil.rmtree(item) if item.is_dir() else os.unlink(item)
    yield aside


def lock(opened: BinaryIO | int, folder: str) -> None:
  """Keeps other processes out of `folder` until a file of it is closed.

  UserError if another process keeps this one out.
  """
  try:
    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as e:
    raise UserError(
      f"{folder}: another process works there; wait for it or end it"
    ) from e
  except OSError as e:  # a file system without locks
    _tell_once(
      f"{folder}: cannot be locked ({e.strerror}); make sure that no other "
      "process works there"
    )


_tell_once = functools.cache(tell)


def write(path: str, content: bytes) -> None:
  """Replaces a file by one with this content."""
  with atomic_write(path) as f:
    f.write(content)


def sync(path: str) -> None:
  """Makes a file, or the renames in a folder, survive a loss of power."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def file_sha256(path: str) -> str:
  """The SHA-256 of a file's bytes, in hex."""
  with open(path, "rb") as f:
    return hashlib.file_digest(f, "sha256").hexdigest()
