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
    """Starts at `begun` of `total` (0: not known), both in `unit`."""
    self._title, self._total, self._unit = title, total, unit
    self._begun = begun
    self._bar = tqdm.tqdm(
      desc=title,
      total=total or None,
      initial=begun,
      unit=unit,
      disable=not sys.stderr.isatty(),
      leave=False,
      bar_format="{desc}: {percentage:3.0f}%|{bar}| {n:,.1f} of {total:,.1f} "
      "{unit} [{elapsed}, {remaining} left, {rate_fmt}]"
      if total
      else None,
    )
    self._start = time.monotonic()
    self._next_line = self._start + _SECONDS

  def __enter__(self) -> "Progress":
    return self

  def __exit__(self, *_) -> None:
    self._bar.close()

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
    text = f"{self._title}: {done:,.1f}"
    if self._total:
      text += f" of {self._total:,.1f}"
    text += f" {self._unit}, {rate:,.2f} {self._unit}/s"
    if self._total and rate:
      text += f", {minutes((self._total - done) / rate)} left"
    print(text, file=sys.stderr, flush=True)
