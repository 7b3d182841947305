"""One run at a time in a run folder."""

import contextlib
import fcntl
import os
import socket
import time

from common.errors import UserError
from training import training_hooks

FILE = "run.lock"


@contextlib.contextmanager
def held(folder: str, comm):
  """Keeps other runs out of `folder` while its block runs; on rank 0.

  The system frees it when the process ends, however it does. Under the elastic
  driver a later world's rank 0 may take over from one that was given up and is
  still there, stopped. Nothing is left behind: neither the file nor a folder
  that was made for it.

  Raises:
    UserError: another run is in it.
  """
  if not comm.is_root:
    yield
    return
  path, was_there = os.path.join(folder, FILE), os.path.isdir(folder)
  with contextlib.ExitStack() as files:
    f = None
    while f is None or not os.fstat(f.fileno()).st_nlink:
      # Again, if the run before ended and removed it just now.
      os.makedirs(folder, exist_ok=True)
      f = files.enter_context(open(path, "a+", encoding="utf-8"))
      owned = _take(f, folder, comm)
    try:
      yield
    finally:
      if owned:
        os.unlink(path)
        with contextlib.suppress(OSError):  # it holds a run
          if not was_there:
            os.rmdir(folder)


def _take(f, folder: str, comm) -> bool:
  """Whether the lock is this process' own; see `held`."""
  try:
    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as e:
    f.seek(0)
    holder, _, job = f.read().partition("\n")
    if comm.elastic and job == _job():
      return False
    raise UserError(
      f"--output_dir={folder} is in use by {holder or 'another run'}. Wait for "
      "it, stop it (SIGTERM saves), or use another --output_dir: also to "
      "evaluate its checkpoints meanwhile, given as --init_checkpoint"
    ) from e
  except OSError as e:
    training_hooks.tell(
      f"{folder}: cannot be locked ({e.strerror}); see to it that no other run "
      "uses it"
    )
  f.truncate(0)
  started = time.strftime("%Y-%m-%d %H:%M:%S")
  f.write(
    f"process {os.getpid()} on {socket.gethostname()} since {started}\n{_job()}"
  )
  f.flush()
  return True


def _job() -> str:
  """What all processes of one start of horovodrun have in common."""
  names = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
  return ":".join(os.environ.get(name, "") for name in names)
