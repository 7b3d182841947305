"""How much of the all-reduce happens while the backward pass still runs.

  python -m benchmarks.network.overlap \\
    --bert_config_file=configs/bert_mini.json ...

Runs benchmarks/step.py on two ranks with Horovod's timeline, once for each XLA
mode, and prints one JSON line each. The last gradients of an update (the
embeddings') are there on all ranks when the slowest ends its backward pass, so
what Horovod reduced before overlapped with it. Further arguments go to
benchmarks/step.py.
"""

import collections
import json
import os
import sys
import tempfile

from benchmarks import measuring
from common import processes
from training import next_steps

RANKS = 2
# In the names of those tensors: as they are, and PowerSGD's first factors.
GRADIENTS = ("Accumulation_Allreduce", "powersgd")


def events(path: str) -> list[tuple]:
  """(tensor, activity, start, end) in seconds, by their start."""
  with open(path, encoding="utf-8") as f:
    text = f.read().rstrip().rstrip(",").removesuffix("]")
  names, begun, found = {}, collections.defaultdict(list), []
  for record in filter(None, json.loads(f"{text}]")):
    tensor, kind = record.get("pid"), record["ph"]
    if kind == "M" and record["name"] == "process_name":
      names[tensor] = record["args"].get("name", "")
    elif kind == "B":
      begun[tensor].append(record)
    elif kind == "E" and begun[tensor]:
      begin = begun[tensor].pop()
      times = begin["ts"] / 1e6, record["ts"] / 1e6
      found.append((names[tensor], begin["name"], *times))
  return sorted(found, key=lambda event: event[2])


def updates(found: list[tuple]) -> list[dict]:
  """Each update's gradients: when they came, and when they were reduced."""
  arrivals = collections.defaultdict(list)
  reductions = collections.defaultdict(list)
  for tensor, activity, start, end in found:
    if not any(name in tensor for name in GRADIENTS):
      continue
    if activity == "ALLREDUCE":
      reductions[tensor].append((start, end))
    # PowerSGD's second factors, "right", come of the first.
    elif activity.startswith("NEGOTIATE") and "right" not in tensor:
      arrivals[tensor].append(end)  # on all ranks
  result = []
  for k in range(min(map(len, reductions.values()), default=0)):
    came = max(times[k] for times in arrivals.values())
    starts = [times[k][0] for times in reductions.values()]
    last_end = max(times[k][1] for times in reductions.values())
    early = [start for start in starts if start < came]
    result.append(
      {
        "before_last_gradient": came - min(starts),
        "all_reduce": last_end - min(starts),
        "after_last_gradient": last_end - came,
        "tensors_started_early": len(early) / len(starts),
      }
    )
  return result


def summary(path: str) -> dict:
  """Medians of a timeline's updates, in seconds; the first two warm up.

  {} if no gradients are all-reduced in it.
  """
  measured = updates(events(path))[2:]
  if not measured:
    return {}
  median = lambda key: measuring.median(update[key] for update in measured)
  return {
    "seconds_from_first_all_reduce_to_last_gradient": median(
      "before_last_gradient"
    ),
    "seconds_of_all_reduce_after_it": median("after_last_gradient"),
    "share_of_gradients_started_before_it": median("tensors_started_early"),
  }


def measure(mode: str, arguments: list[str]) -> dict:
  """One run of benchmarks/step.py in an XLA mode."""
  command = next_steps.python("benchmarks.step", *arguments, xla=mode, rounds=2)
  with tempfile.TemporaryDirectory() as folder:
    timeline = os.path.join(folder, "timeline.json")
    printed = measuring.run(
      processes.horovodrun(RANKS, command),
      env={**os.environ, "HOROVOD_TIMELINE": timeline},
    )
    (step,) = measuring.json_lines(printed)
    found = summary(timeline)
  return {
    "xla": mode,
    "ranks": RANKS,
    "updates": step["updates"],
    "seconds_update": step["seconds_median"],
    **found,
  }


if __name__ == "__main__":
  for each in ("off", "layers", "step"):
    measuring.show(measure(each, sys.argv[1:]))
