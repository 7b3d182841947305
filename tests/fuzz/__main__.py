"""Damages input to everything that reads files or settings.

  python -m tests.fuzz --inputs=12000 --seed=1 [--readers=text,manifest]

An input is refused with one line that names the file or flag, or what is read
is right: as without the damage, or as an independent reader has it. Any other
error, the end of the process, a hang or much memory is a finding. Prints the
smallest input of each, and one line of JSON.
"""

import argparse
import concurrent.futures
import faulthandler
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback

import hypothesis
from absl import flags
from hypothesis import given, settings

from common.errors import UserError
from tests.fuzz.readers import READERS

HANG_SECONDS = 300
_MEMORY = 1 << 30  # bytes more than before the input
_ADDRESSES = 8 << 30  # for what asks for memory and does not touch it


def _status(name: str) -> int:
  """Bytes of a line of /proc/self/status."""
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  (line,) = [line for line in lines if line.startswith(name + ":")]
  return int(line.split()[1]) << 10


def check(reader, value) -> None:
  """Reads an input.

  Raises:
    AssertionError: it is refused in words that are not clear, or read wrong, or
      needs much memory.
  """
  pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
  before = _status("VmRSS")
  faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
  try:
    got = reader.read(value)
  except (UserError, OSError, flags.Error) as e:
    clear = "\n" not in str(e) and any(n in str(e) for n in reader.names)
    assert clear, f"unclear: {type(e).__name__}: {e}"
  else:
    assert reader.right(value, got), f"accepted: {got}"
  finally:
    faulthandler.cancel_dump_traceback_later()
  assert _status("VmHWM") - before < _MEMORY, "much memory"


def findings(name: str, count: int, seed: int, folder) -> tuple[int, list]:
  """(inputs read, errors) of one reader; `folder` is an empty one."""
  make, _ = READERS[name]
  reader, number = make(pathlib.Path(folder)), 0
  limits = resource.getrlimit(resource.RLIMIT_AS)
  resource.setrlimit(
    resource.RLIMIT_AS, (_status("VmSize") + _ADDRESSES, limits[1])
  )

  @hypothesis.seed(seed)
  @settings(
    max_examples=count,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
  )
  @given(reader.given)
  def read(value):
    nonlocal number
    number += 1
    check(reader, value)

  try:
    read()
  except BaseExceptionGroup as group:
    return number, list(group.exceptions)
  except Exception as e:
    return number, [e]
  finally:
    resource.setrlimit(resource.RLIMIT_AS, limits)
  return number, []


def _child(name: str, count: int, seed: int) -> dict:
  """`findings` of one reader in a process of its own."""
  words = ["--readers", name, "--inputs", str(count), "--seed", str(seed)]
  folder = tempfile.mkdtemp(prefix=f"fuzz_{name}_")
  done = subprocess.run(
    [sys.executable, "-m", "tests.fuzz", *words, "--folder", folder],
    capture_output=True,
    text=True,
  )
  if done.returncode == 0:
    shutil.rmtree(folder)
    print(done.stderr, end="", file=sys.stderr, flush=True)
    return json.loads(done.stdout)
  end = f"{name}: ended with status {done.returncode} at the input in {folder}"
  print(f"{done.stderr[-3000:]}\n{end}", file=sys.stderr, flush=True)
  return {"inputs": count, "findings": 1}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--inputs", type=int, default=12000)
  parser.add_argument("--seed", type=int, default=1)
  parser.add_argument("--readers", default=",".join(READERS))
  parser.add_argument(
    "--folder", help="Read in this process, with files there."
  )
  arguments = parser.parse_args()
  names = arguments.readers.split(",")
  if arguments.folder:
    total, errors = 0, []
    for name in names:
      folder = pathlib.Path(arguments.folder) / name
      folder.mkdir()
      count, found = findings(name, arguments.inputs, arguments.seed, folder)
      total += count
      for error in found:
        print(f"{name}:", file=sys.stderr)
        traceback.print_exception(error)
      errors += found
    print(json.dumps({"inputs": total, "findings": len(errors)}))
    return
  began, shares = time.monotonic(), {name: READERS[name][1] for name in names}
  total = sum(shares.values())
  line = {"inputs": 0, "findings": 0, "seed": arguments.seed, "readers": {}}
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
    running = {}
    for name, share in shares.items():
      count = max(1, round(arguments.inputs * share / total))
      running[name] = threads.submit(_child, name, count, arguments.seed)
    for name, child in running.items():
      result = child.result()
      line["inputs"] += result["inputs"]
      line["findings"] += result["findings"]
      if result["findings"]:
        line["readers"][name] = result["findings"]
  print(json.dumps({**line, "seconds": round(time.monotonic() - began)}))


if __name__ == "__main__":
  main()
