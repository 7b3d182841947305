"""Files: written so that they appear only when they are whole, and hashed."""

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from typing import BinaryIO

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def atomic_write(path: str) -> Iterator[BinaryIO]:
  """Opens PATH.tmp, which replaces `path` after a block without an error."""
  try:
    with open(path + ".tmp", "wb") as f:
      yield f
    os.replace(path + ".tmp", path)
  except BaseException as e:
    with contextlib.suppress(FileNotFoundError):
      os.unlink(path + ".tmp")
    if isinstance(e, OSError) and e.errno in _FULL and e.filename is None:
      e.filename = path
    raise


def file_sha256(path: str) -> str:
  """The SHA-256 of a file's bytes, in hex."""
  with open(path, "rb") as f:
    return hashlib.file_digest(f, "sha256").hexdigest()
