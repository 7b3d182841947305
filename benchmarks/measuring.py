"""What benchmarks share: they run commands in turns and print JSON lines."""

import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from absl import flags

from common import settings


def run(command: list, **options) -> str:
  """What a command prints, its messages last; this program ends if it fails."""
  words = list(map(str, command))
  done = subprocess.run(words, capture_output=True, text=True, **options)
  if done.returncode:
    sys.exit(
      f"error: status {done.returncode} of {shlex.join(words)}\n"
      f"{done.stderr[-3000:]}"
    )
  return done.stdout + done.stderr


def config_of(kind: type, values: flags.FlagValues):
  """The config, a `RunConfig`, of flags alone: no model's folder is read."""
  present, in_files, contents = kind.read_flags(values)
  defaults = {name: values[name].value for name in values}
  return settings.make(kind, defaults | in_files | present, contents)


def size(usual, tiny):
  """A size that the flag --tiny, which a benchmark has, makes small."""
  return tiny if flags.FLAGS.tiny else usual


def json_lines(text: str) -> list[dict]:
  """The JSON lines in it, which horovodrun marks with their rank."""
  return [
    json.loads(line[line.index('{"') :])
    for line in text.splitlines()
    if '{"' in line
  ]


def show(line: dict) -> None:
  """Prints one JSON line."""
  print(json.dumps(line), flush=True)


def tell(*words) -> None:
  """Prints what is for the person who waits."""
  print(*words, file=sys.stderr, flush=True)


def seconds_of(function: Callable) -> float:
  """Seconds that a call takes."""
  began = time.perf_counter()
  function()
  return time.perf_counter() - began


def in_turns(cases: dict[str, Callable], rounds: int) -> dict[str, list]:
  """Name -> what its function returned in each round, one after another."""
  results: dict[str, list] = {name: [] for name in cases}
  for number in range(1, rounds + 1):
    for name, case in cases.items():
      results[name].append(case())
    newest = "  ".join(f"{name} {got[-1]:.3f}" for name, got in results.items())
    tell(f"round {number}: {newest}")
  return results


def median(values, digits: int = 4) -> float:
  """Rounded for a JSON line."""
  return round(float(statistics.median(values)), digits)


def median_ratio(above: list, below: list, digits: int = 4) -> float:
  """The median over rounds of the ratio in each round."""
  ratios = [a / b for a, b in zip(above, below, strict=True)]
  return median(ratios, digits)
