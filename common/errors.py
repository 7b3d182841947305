"""How programs end: by errors that the user can mend, or as they are asked."""

import contextlib
import errno
import functools
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from absl import app

from common import command_line, console
from common.console import tell

# Exit status of a run that a signal stopped, after it saved (EX_TEMPFAIL).
STOPPED_STATUS = 75
STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT]
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
  STOP_SIGNALS.append(signal.SIGHUP)


class UserError(ValueError):
  """Input or settings that cannot be used.

  The message names the file, the record or the flag, the numbers that disagree
  and what to do. Entry points show it as one line, without a traceback.
  """


class DataError(UserError):
  """Input that cannot be used."""


@contextlib.contextmanager
def needing(requirements: str, what: str) -> Iterator[None]:
  """UserError if a package that the block imports for `what` is missing."""
  try:
    yield
  except ImportError as e:
    raise UserError(
      f"{what}: {e}: pip install -r requirements/{requirements}.txt"
    ) from e


# What to do about what the system says; TensorFlow repeats its words.
_RIGHTS = "name another file or folder, or change its permissions"
_REMEDIES = {
  os.strerror(errno.ENOSPC): "make room there",
  os.strerror(errno.EDQUOT): "make room there",
  os.strerror(errno.EFBIG): "allow larger files there (ulimit -f)",
  os.strerror(errno.EROFS): _RIGHTS,
  os.strerror(errno.EACCES): _RIGHTS,
  os.strerror(errno.EISDIR): "name a file in it",
  "surrogates not allowed": "names must be UTF-8: rename it",
  "Unable to convert element to UTF-8": "names must be UTF-8: rename it",
}
# What TensorFlow says before the reason: the place in the graph.
_IN_GRAPH = re.compile(r"(?s)Graph exec[^\n]*\s+(Detected .*?\nNode:[^\n]*\n)?")


def remedy(error: BaseException) -> str:
  """What to do about an error that the system reports; "" for another."""
  message = str(error)
  for words, what_to_do in _REMEDIES.items():
    if words in message:
      return what_to_do
  return ""


def reason(error: BaseException) -> str:
  """What the system or TensorFlow says: file, reason and remedy, in a line."""
  text = _IN_GRAPH.sub("", getattr(error, "message", str(error)), count=1)
  text = text.strip().partition("\n")[0] or repr(error)
  if isinstance(error, UnicodeEncodeError):  # which shows no name
    sign = re.escape(error.object[error.start])
    text = re.findall(f".*{sign}.*", error.object)[0]
  elif isinstance(error, OSError) and error.strerror:
    text = ": ".join(filter(None, [error.filename, error.strerror]))
  return ": ".join(filter(None, [text, remedy(error)]))


def end_on_signals() -> None:
  """From now on a signal ends the program: for when nothing is to be saved."""
  for number in STOP_SIGNALS:
    signal.signal(number, _leave)


def _leave(number, _) -> None:
  # horovodrun may ask again, when another rank has ended, and a terminal that
  # is closed asks several times; a second Ctrl-C ends this one at once.
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  signal.signal(signal.SIGHUP, signal.SIG_IGN)
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  _tell_stopped(number)
  sys.exit(STOPPED_STATUS)


def end_as_decided() -> None:
  """From now on signals are ignored, for the exit status is decided.

  Python's end would restore what they do by default, which ends the process.
  """
  for number in STOP_SIGNALS:
    if signal.getsignal(number) is _leave:  # no second Ctrl-C
      signal.signal(number, signal.SIG_IGN)


@functools.cache  # another thread tells it, too
def _tell_stopped(number: int) -> None:
  name = signal.Signals(number).name
  ranks = int(os.environ.get("HOROVOD_SIZE") or 1)
  if number == signal.SIGTERM and ranks > 1:
    # Of several ranks the launcher knows whether another one has failed.
    tell(f"{name}: stopped")
  else:
    tell(f"{name}: stopped as asked: the same command completes it")


@contextlib.contextmanager
def leaving_in_c() -> Iterator[None]:
  """After `end_on_signals`, signals end also a block that waits in C code.

  Python's handlers run only when the C code returns, but the byte that Python
  writes for each signal comes at once, and a thread waits for it.
  """
  if signal.getsignal(signal.SIGTERM) is not _leave:
    yield
    return
  reader, writer = os.pipe()

  def watch():
    while number := os.read(reader, 1):
      if ord(number) in STOP_SIGNALS:
        _tell_stopped(ord(number))
        os._exit(STOPPED_STATUS)

  os.set_blocking(writer, False)
  before = signal.set_wakeup_fd(writer)
  watcher = threading.Thread(target=watch, daemon=True)
  watcher.start()
  try:
    yield
  finally:
    signal.set_wakeup_fd(before)
    os.close(writer)
    watcher.join()
    os.close(reader)


@contextlib.contextmanager
def in_a_line() -> Iterator[None]:
  """A block whose errors that a user can mend end the program with a line."""
  # What the terminal's encoding lacks is shown as an escape.
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):  # None if it is closed
      stream.reconfigure(errors="backslashreplace")
  try:
    try:
      yield
    finally:
      console.finish_output()
  except KeyboardInterrupt:
    _tell_stopped(signal.SIGINT)
    sys.exit(STOPPED_STATUS)
  except Exception as e:
    if not (isinstance(e, (UserError, OSError)) or remedy(e)):
      raise  # a bug
    text = str(e) if isinstance(e, UserError) else reason(e)
    tell(f"{os.path.basename(sys.argv[0])}: error: {text}")
    sys.exit(1)


def check_words(words: list[str], arguments: int | None) -> None:
  """Raises `UserError` for another number of words that are no flags.

  `arguments`: how many there must be; None: at least one.
  """
  if arguments is None and not words:
    raise UserError("no file or folder is named; see --help")
  if arguments not in (None, len(words)):
    raise UserError(
      f"{len(words)} arguments that are not flags ({' '.join(words[:3])}), "
      f"expected {arguments}; is a glob unquoted? See --help"
    )


def run_main(
  main: Callable[[list], None],
  arguments: int | None = 0,
  parser: Callable[[list[str]], list[str]] = command_line.read,
) -> None:
  """absl's app.run, but what a user can mend is one line, and status 1.

  `main` gets argv: the program, then the words of `check_words`.
  """

  def with_arguments(argv):
    check_words(argv[1:], arguments)
    main(argv)

  with in_a_line():
    app.run(with_arguments, flags_parser=parser)
