"""Work that ends at a chosen call, as if the process was killed there."""

import contextlib
import itertools
import os

import pytest


class Stopped(BaseException):
  """Stands for the end of the process."""


def stop_after(patch, module, name, calls):
  """Lets `module.name` be called so often; returns [calls left]."""
  original, left = getattr(module, name), [calls]

  def counted(*arguments, **named):
    left[0] -= 1
    if left[0] < 0:
      raise Stopped
    return original(*arguments, **named)

  patch.setattr(module, name, counted)
  return left


def stopped_at_files(make, every=1):
  """Calls make(number), stopped at file 0, `every`, ..., until it completes.

  Every file appears by os.replace, so that is where it is stopped. Yields each
  number after the stop.
  """
  for number in itertools.count(0, every):
    with pytest.MonkeyPatch.context() as patch:
      left = stop_after(patch, os, "replace", number)
      with contextlib.suppress(Stopped):
        make(number)
    if left[0] >= 0:
      return
    yield number
