"""Messages and progress for people, on stderr."""

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence

_CLEAR = "\r\x1b[K"  # clears a terminal's line
_RECENT_SECONDS = 30.0

_progress_shows = False  # in the terminal's last line


def tell(*lines: str, end: str = "\n") -> None:
  """Prints lines on stderr; a broken pipe or a full disk stops no work.

  They replace a terminal's line of progress, which has no end.
  """
  global _progress_shows
  text = (_CLEAR if _progress_shows else "") + "\n".join(lines)
  # RuntimeError: a signal's handler prints while another line is being printed.
  with contextlib.suppress(OSError, RuntimeError):
    print(text, end=end, file=sys.stderr, flush=True)
  _progress_shows = bool(lines) and not end


def finish_output() -> None:
  """Writes what is printed; an error names standard output."""
  try:
    print(end="", flush=True)
  except OSError as e:
    # What is left in memory would fail again when Python ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    e.filename = "standard output"
    raise


def say(comm, *lines: str) -> None:
  """Prints lines on rank 0 of a `distributed.Comm`."""
  if comm.is_root and lines:
    tell(*lines)


def shown(value: float | None, form: str) -> str:
  """`value` in the format `form`; "-" for None."""
  return "-" if value is None else format(value, form)


def counted(number: int, noun: str, ending: str = "s") -> str:
  """1 file, 2 files: `ending` is that of several."""
  return f"{number:,} {noun}{ending if number != 1 else ''}"


def indented(lines: Iterable[str]) -> list[str]:
  """The lines below a title."""
  return [f"    {line}" for line in lines]


def minutes(seconds: float) -> str:
  """1:05 for 65 seconds, 2:00:00 for two hours."""
  whole, seconds = divmod(int(seconds), 60)
  hours, whole = divmod(whole, 60)
  start = f"{hours}:{whole:02}" if hours else f"{whole}"
  return f"{start}:{seconds:02}"


class Progress:
  """Progress: one line on a terminal, else a line with the time of day.

  The speed is that of about the last 30 seconds of work. With a
  `distributed.Comm` only rank 0 shows it.
  """

  def __init__(
    self, title: str, total: float, unit: str, begun: float = 0,
    seconds: float = 5.0, comm=None,
  ):  # fmt: skip
    self._shown = comm is None or comm.is_root
    self._title, self._total, self._unit = title, total, unit
    # Two digits at least, but pieces and records are whole numbers.
    is_part = isinstance(total, float) and total > 0
    self._digits = max(0, 2 - math.ceil(math.log10(total))) if is_part else 0
    self._done = begun
    self._work = self._worked = 0.0  # units and the seconds that they took
    self._tty = sys.stderr.isatty()
    self._every = 0.5 if self._tty else seconds
    self._last = time.monotonic()
    self._next = self._last + self._every

  def __enter__(self) -> "Progress":
    self.at(self._done, now=True)
    return self

  def __exit__(self, *_) -> None:
    if self._shown:
      tell(end="")

  def close(self) -> None:
    """Keeps the line on the terminal, which the end of a `with` clears."""
    global _progress_shows
    if _progress_shows:
      _progress_shows = False
      tell()

  def at(
    self, done: float, *fields: str, now: bool = False,
    seconds: float | None = None,
  ) -> None:  # fmt: skip
    """Shows `done` of the total, or `fields`, if a line is due or `now`.

    `seconds`: what the work since the last call took; None: all the time.
    """
    if not self._shown:
      return
    moment = time.monotonic()
    if seconds is None:
      seconds, self._last = moment - self._last, moment
    # Work and its seconds fade alike, so their ratio is a recent speed.
    kept = math.exp(-seconds / _RECENT_SECONDS)
    self._work = self._work * kept + done - self._done
    self._worked, self._done = self._worked * kept + seconds, done
    if moment < self._next and not now:
      return
    self._next = moment + self._every
    rate = self._work / self._worked if self._worked else 0.0
    form = f",.{self._digits}f"
    amounts = f"{done:{form}} of {self._total:{form}}"
    shown = [*fields] or [f"{self._title}: {amounts} {self._unit}"]
    if rate > 0:  # at the beginning nothing is known of the speed
      if not fields:
        digits = max(1, self._digits)
        shown.append(f"{rate:,.{digits}f} {self._unit}/s")
      shown.append(f"{minutes((self._total - done) / rate)} left")
    if self._tty:
      columns = shutil.get_terminal_size().columns - 1
      tell(fit(shown, columns)[:columns], end="")
    else:
      tell(fit([time.strftime("%H:%M:%S"), *shown]))


def fit(fields: Sequence[str], columns: int = 80) -> str:
  """A line of the fields; without the last but one, and so on, if too long."""
  while len(line := "  ".join(fields)) > columns and len(fields) > 3:
    fields = (*fields[:-2], fields[-1])
  return line
