"""Damages input to everything that reads files or settings.

  make fuzz INPUTS=12000 SEED=1

An input is refused with one line that names the file or flag, or what is read
is right: as without the damage, or as an independent reader has it. Any other
error, the end of the process, a hang or much memory is a finding, and pytest
prints the smallest input of each. Without FUZZ_INPUTS there are a few inputs of
each reader.
"""

import faulthandler
import os
import pathlib
import resource

import hypothesis
import pytest
import runs
from absl import flags

from common.errors import UserError
from tests.fuzz.readers import READERS

INPUTS = int(os.environ.get("FUZZ_INPUTS", "0"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
MEMORY = 1 << 30  # bytes more than before the input
ADDRESSES = 8 << 30  # for what asks for memory and does not touch it


def status(name):
  """Bytes of a line of /proc/self/status."""
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  (line,) = [line for line in lines if line.startswith(name + ":")]
  return int(line.split()[1]) << 10


def check(reader, value):
  """Reads an input, which is refused in clear words or read right."""
  pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
  before = status("VmRSS")
  faulthandler.dump_traceback_later(runs.HANG_SECONDS, exit=True)
  try:
    got = reader.read(value)
  except (UserError, OSError, flags.Error) as e:
    clear = "\n" not in str(e) and any(n in str(e) for n in reader.names)
    assert clear, f"unclear: {type(e).__name__}: {e}"
  else:
    assert reader.right(value, got), f"accepted: {got}"
  finally:
    faulthandler.cancel_dump_traceback_later()
  assert status("VmHWM") - before < MEMORY, "much memory"


def fuzz(reader, count):
  """Checks so many inputs; raises what it finds, all kinds together."""
  limits = resource.getrlimit(resource.RLIMIT_AS)
  most = status("VmSize") + ADDRESSES
  resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
  read = hypothesis.given(reader.given)(lambda value: check(reader, value))
  how = hypothesis.settings(
    max_examples=count, database=None, deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
  )  # fmt: skip
  try:
    hypothesis.seed(SEED)(how(read))()
  finally:
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", READERS)
def test_damage_is_refused_or_does_no_harm(tmp_path, name):
  make, share = READERS[name]
  count = 60 * min(1, share)  # slow ones have a small share
  if INPUTS:
    count = INPUTS * share / sum(share for _, share in READERS.values())
  fuzz(make(tmp_path), max(1, round(count)))


def test_a_reader_that_is_wrong_is_found(tmp_path):
  """It takes what another one refuses, or ends with an error of its own."""
  made, _ = READERS["any.json"]
  for read in (lambda data: None, lambda data: data.decode("ascii")):
    with pytest.raises((AssertionError, ValueError, BaseExceptionGroup)):
      fuzz(made(tmp_path)._replace(read=read), 100)
