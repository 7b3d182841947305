"""Messages and progress for people, on stderr."""

import contextlib
import sys
import time

_CLEAR = "\r\x1b[K"  # of a terminal's line


def tell(*lines: str, end: str = "\n") -> None:
  """Prints lines on stderr; a broken pipe or a full disk stops no work."""
  # RuntimeError: a signal's handler prints while another line is being printed.
  with contextlib.suppress(OSError, RuntimeError):
    print(*lines, sep="\n", end=end, file=sys.stderr, flush=True)


def say(comm, *lines: str) -> None:
  """Prints lines on rank 0 of a `distributed.Comm`."""
  if comm.is_root and lines:
    tell(*lines)


def shown(value: float | None, form: str) -> str:
  """`value` in the format `form`; "-" for None."""
  return "-" if value is None else format(value, form)


def minutes(seconds: float) -> str:
  """1:05 for 65 seconds, 2:00:00 for two hours."""
  whole, seconds = divmod(int(seconds), 60)
  hours, whole = divmod(whole, 60)
  start = f"{hours}:{whole:02}" if hours else f"{whole}"
  return f"{start}:{seconds:02}"


class Progress:
  """Progress: one line on a terminal, else a line every `seconds`."""

  def __init__(
    self,
    title: str,
    total: float,
    unit: str,
    begun: float = 0,
    seconds: float = 5.0,
  ):
    self._title, self._total, self._unit = title, total, unit
    self._begun, self._line = begun, ""
    self._tty = sys.stderr.isatty()
    self._every = 0.5 if self._tty else seconds
    self._start = time.monotonic()
    self._next = self._start + self._every

  def __enter__(self) -> "Progress":
    return self

  def __exit__(self, *_) -> None:
    if self._line:
      tell(_CLEAR, end="")

  def close(self) -> None:
    """Keeps the line on the terminal, which the end of a `with` clears."""
    if self._line:
      tell()

  def say(self, line: str) -> None:
    """Prints a line above the progress line."""
    tell((_CLEAR if self._line else "") + line)
    if self._line:
      tell(self._line, end="")

  def at(self, done: float, text: str | None = None, now: bool = False) -> None:
    """Shows `done` of the total, or `text`, if a line is due or `now`."""
    moment = time.monotonic()
    if moment < self._next and not now:
      return
    self._next = moment + self._every
    rate = (done - self._begun) / max(moment - self._start, 1e-9)
    text = text or (
      f"{self._title}: {done:,.0f} of {self._total:,.0f} {self._unit}, "
      f"{rate:,.1f} {self._unit}/s"
    )
    if rate:
      text += f", {minutes((self._total - done) / rate)} left"
    if self._tty:
      self._line = text
      tell(_CLEAR + text, end="")
    else:
      tell(text)
