"""Damaged input to everything that reads files or settings: what comes of it?

  python -m benchmarks.fuzz --inputs=12000 --seed=1
  python -m benchmarks.fuzz --reader=manifest --case=17      one input, shown

Each reader gets files that the project itself wrote, damaged at random (bits,
cuts, splices, values of other types and sizes; also behind checksums that were
computed anew, so that what lies under them is reached), or flags of any value.
Each input is read in a worker process, which ends with it if it crashes, hangs
(20 s) or takes too much memory (1 GB more). What can come of it:

  refused    an error for the user, one line that names the file or flag
  harmless   accepted, and what was read is right: as without the damage, or
             still valid by checks that are written here, apart from the reader
  unclear    an error for the user that does not name what is wrong
  silent     accepted, but not right
  crash      any other error, or the end of the process
  hang, memory

The last five are findings. One JSON line: the counts, and the cases of findings
by reader, which --reader and --case show again for the same --seed.
"""

import collections
import json
import os
import queue
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

import numpy as np
from absl import flags

from benchmarks import fuzz_readers
from common import errors

FINDINGS = ("unclear", "silent", "crash", "hang", "memory")
_LIMIT_SECONDS = 20
_START_SECONDS = 120
_MEMORY = 1 << 30  # more than before the input
_ADDRESSES = 8 << 30  # a net below it: allocations that touch nothing


def define_flags() -> None:
  flags.DEFINE_integer("inputs", 12000, "How many, over all.", lower_bound=1)
  flags.DEFINE_integer("seed", 1, "Of all chance.", lower_bound=0)
  flags.DEFINE_enum("reader", None, list(fuzz_readers.READERS), "Only this.")
  flags.DEFINE_integer("case", None, "Only this input, here, and shown.")
  flags.DEFINE_integer("num_workers", 2, "Processes.", lower_bound=1)


# -----------------------------------------------------------------------------
# A worker
# -----------------------------------------------------------------------------


def _status(name: str) -> int:
  """Bytes of a line of /proc/self/status."""
  with open("/proc/self/status", encoding="ascii") as f:
    (line,) = [line for line in f if line.startswith(name + ":")]
  return int(line.split()[1]) << 10


def _forget_peak() -> int:
  """Makes VmHWM count anew; returns what is resident."""
  with open("/proc/self/clear_refs", "w", encoding="ascii") as f:
    f.write("5")
  return _status("VmRSS")


def is_clear(message: str, mentions) -> bool:
  """Whether a message is one line that names what is wrong."""
  return "\n" not in message and any(name in message for name in mentions)


def outcome(reader) -> tuple[str, str]:
  """Reads and judges what is damaged: (what came of it, why)."""
  before = _forget_peak()
  try:
    result = reader.read()
  except (errors.UserError, OSError, flags.Error) as e:
    kind = "refused" if is_clear(str(e), reader.mentions()) else "unclear"
    why = f"{type(e).__name__}: {e}"
  except MemoryError:
    kind, why = "memory", traceback.format_exc()
  except BaseException as e:  # of native code some are no Exception
    if isinstance(e, KeyboardInterrupt):
      raise
    kind, why = "crash", traceback.format_exc()
  else:
    wrong = reader.wrong(result)
    kind, why = ("silent", wrong) if wrong else ("harmless", "")
  if kind in ("refused", "harmless") and _status("VmHWM") - before > _MEMORY:
    return "memory", f"{_status('VmHWM') - before >> 20} MB more; {why}"
  return kind, why


def case_rng(name: str, seed: int, case: int) -> np.random.Generator:
  """The chance of one input."""
  number = list(fuzz_readers.READERS).index(name)
  return np.random.default_rng([seed, number, case])


def work(name: str, seed: int) -> None:
  """Case numbers from stdin, outcomes to stdout."""
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # nothing else may write there
  with tempfile.TemporaryDirectory() as folder:
    reader = fuzz_readers.READERS[name](folder)
    size = _status("VmSize") + _ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
      case, *told = line.split()
      reader.damage(case_rng(name, seed, int(case)))
      if told:
        print(f"the input: {reader.describe()}", file=sys.stderr, flush=True)
      print(json.dumps(outcome(reader)), file=answers, flush=True)


class Worker:
  """A process that reads one reader's inputs."""

  def __init__(self, name: str, seed: int):
    self._log = tempfile.TemporaryFile()
    self._folder = tempfile.mkdtemp()
    self._process = subprocess.Popen(
      [sys.executable, "-m", "benchmarks.fuzz", "--worker", name, str(seed)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._log,
      # A worker that is killed leaves its files behind: here.
      env={**os.environ, "TMPDIR": self._folder},
    )
    if self._answer(_START_SECONDS) != "ready":
      raise errors.UserError(f"{name}: no worker starts: {self.last_words()}")

  def _answer(self, seconds: float) -> str | None:
    """A line, "" if the process ended, None if it takes too long."""
    out = self._process.stdout
    if not select.select([out], [], [], seconds)[0]:
      return None
    return out.readline().decode().rstrip("\n")

  def last_words(self) -> str:
    """The end of its stderr."""
    self._log.seek(0)
    return self._log.read()[-4000:].decode(errors="replace")

  def ask(self, case: int, told: str = "") -> tuple[str, str]:
    """What comes of an input; a crash or hang ends the worker."""
    try:
      self._process.stdin.write(f"{case} {told}\n".encode())
      self._process.stdin.flush()
    except BrokenPipeError:
      return "crash", self.last_words()
    answer = self._answer(_LIMIT_SECONDS)
    if answer:
      return tuple(json.loads(answer))
    if answer is None:
      return "hang", f"{_LIMIT_SECONDS} s: {self._stack()}"
    status = self._process.wait()
    name = signal.Signals(-status).name if status < 0 else f"exit {status}"
    return "crash", f"{name}: {self.last_words()}"

  def _stack(self) -> str:
    """Where it is, by faulthandler."""
    self._process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    return self.last_words()

  def has_ended(self) -> bool:
    return self._process.poll() is not None

  def close(self) -> None:
    self._process.kill()
    self._process.wait()
    self._log.close()
    shutil.rmtree(self._folder, ignore_errors=True)


# -----------------------------------------------------------------------------
# All of them
# -----------------------------------------------------------------------------


def cases_of(inputs: int, names: list[str]) -> dict[str, int]:
  """How many inputs each reader gets: by its weight, all together `inputs`."""
  weights = [fuzz_readers.READERS[name].weight for name in names]
  ends = np.rint(np.cumsum(weights) / sum(weights) * inputs).astype(int)
  return dict(zip(names, np.diff(ends, prepend=0).tolist(), strict=True))


def run_reader(name: str, seed: int, count: int) -> list[tuple[str, str]]:
  """The outcomes of a reader's inputs, in order."""
  got, worker = [], None
  try:
    for case in range(count):
      worker = worker or Worker(name, seed)
      got.append(worker.ask(case))
      if got[-1][0] in ("hang", "memory") or worker.has_ended():
        worker.close()
        worker = None
  finally:
    if worker:
      worker.close()
  return got


def run_all(seed: int, counts: dict[str, int], num_workers: int) -> dict:
  """reader -> outcomes."""
  names, results = queue.Queue(), {}
  for name in sorted(counts, key=lambda n: -fuzz_readers.READERS[n].cost):
    names.put(name)

  def take():
    while True:
      try:
        name = names.get_nowait()
      except queue.Empty:
        return
      results[name] = run_reader(name, seed, counts[name])
      found = collections.Counter(kind for kind, _ in results[name])
      print(f"{name}: {dict(found)}", file=sys.stderr, flush=True)

  threads = [threading.Thread(target=take) for _ in range(num_workers)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  if missing := set(counts) - set(results):
    raise errors.UserError(f"no results of {', '.join(sorted(missing))}")
  return {name: results[name] for name in counts}


def summary(results: dict, seed: int, seconds: float) -> dict:
  """Counts by reader and outcome, and the cases of findings."""
  kinds = {n: [kind for kind, _ in got] for n, got in results.items()}
  total = collections.Counter(kind for got in kinds.values() for kind in got)
  return {
    "inputs": sum(total.values()),
    "seed": seed,
    "seconds": round(seconds),
    "findings": sum(total[kind] for kind in FINDINGS),
    **total,
    "readers": {n: dict(collections.Counter(got)) for n, got in kinds.items()},
    "cases": {
      n: {str(case): kind for case, kind in enumerate(got) if kind in FINDINGS}
      for n, got in kinds.items()
      if set(got) & set(FINDINGS)
    },
  }


def show(name: str, seed: int, case: int) -> None:
  """One input, and all that comes of it."""
  worker = Worker(name, seed)
  kind, why = worker.ask(case, "told")
  print(f"{worker.last_words()}\n{kind}: {why}")
  worker.close()


def main(_) -> None:
  args = flags.FLAGS
  if args.case is not None:
    if not args.reader:
      raise errors.UserError("--case needs --reader")
    show(args.reader, args.seed, args.case)
    return
  names = [args.reader] if args.reader else list(fuzz_readers.READERS)
  began = time.monotonic()
  counts = cases_of(args.inputs, names)
  results = run_all(args.seed, counts, args.num_workers)
  told = set()
  for name, got in results.items():
    for case, (kind, why) in enumerate(got):
      last = why.strip().splitlines()[-1][:300] if why.strip() else ""
      if kind in FINDINGS and (name, kind, last[:40]) not in told:
        told.add((name, kind, last[:40]))
        print(f"{name} {case} {kind}: {last}", file=sys.stderr)
  print(json.dumps(summary(results, args.seed, time.monotonic() - began)))


if __name__ == "__main__":
  if sys.argv[1:2] == ["--worker"]:
    import faulthandler

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    work(sys.argv[2], int(sys.argv[3]))
  else:
    define_flags()
    errors.run_main(main)
