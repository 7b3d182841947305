"""How far a long operation is, on stderr."""

import sys
import time

import tqdm

_SECONDS = 5  # between lines where stderr is no terminal


def minutes(seconds: float) -> str:
  """1:05 for 65 seconds, 2:00:00 for two hours."""
  return tqdm.tqdm.format_interval(seconds)


class Progress:
  """A bar on a terminal, a line every few seconds elsewhere.

  Use as a context manager.
  """

  def __init__(self, title: str, total: float, unit: str, begun: float = 0):
    """Starts at `begun` of `total`, both in `unit`."""
    self._title, self._total, self._unit = title, total, unit
    self._begun = begun
    self._bar = tqdm.tqdm(
      desc=title,
      total=total,
      initial=begun,
      unit=unit,
      disable=not sys.stderr.isatty(),
      leave=False,
      bar_format="{desc}: {percentage:3.0f}%|{bar}| {n:,.0f} of {total:,.0f} "
      "{unit}, {rate_fmt}, {remaining} left",
    )
    self._start = time.monotonic()
    self._next_line = self._start + _SECONDS

  def __enter__(self) -> "Progress":
    return self

  def __exit__(self, *_) -> None:
    self._bar.close()

  def say(self, line: str) -> None:
    """Writes a line, above the bar if there is one."""
    tqdm.tqdm.write(line, file=sys.stderr)

  def at(self, done: float) -> None:
    """Shows that so much is done."""
    if not self._bar.disable:
      self._bar.update(done - self._bar.n)
      return
    now = time.monotonic()
    if now < self._next_line:
      return
    self._next_line = now + _SECONDS
    rate = (done - self._begun) / (now - self._start)
    print(
      f"{self._title}: {done:,.0f} of {self._total:,.0f} {self._unit}, "
      f"{rate:,.1f} {self._unit}/s"
      + (f", {minutes((self._total - done) / rate)} left" if rate else ""),
      file=sys.stderr,
      flush=True,
    )
