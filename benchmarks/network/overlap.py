"""How much of the all-reduce happens while the backward pass still runs.

  python -m benchmarks.network.overlap \\
    --bert_config_file=configs/bert_mini.json ...

Runs benchmarks/step.py on two ranks with Horovod's timeline, once for each XLA
mode, and prints one JSON line each. The last gradients of an update (the
embeddings') are there on all ranks when the slowest ends its backward pass, so
what Horovod reduced before overlapped with it. Further arguments go to
benchmarks/step.py.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile

RANKS = 2
# In the names of those tensors: as they are, and PowerSGD's first factors.
GRADIENTS = ("Accumulation_Allreduce", "powersgd")


def events(path: str) -> list[tuple]:
  """(tensor, activity, start, end) in seconds, from a timeline."""
  with open(path, encoding="utf-8") as f:
    text = f.read().rstrip().rstrip(",")
  records = json.loads(text if text.endswith("]") else text + "]")
  names, open_events, found = {}, {}, []
  for record in records:
    if not record:
      continue
    tensor = record.get("pid")
    if record["ph"] == "M" and record["name"] == "process_name":
      names[tensor] = record["args"].get("name", "")
    elif record["ph"] == "B":
      open_events.setdefault(tensor, []).append(record)
    elif record["ph"] == "E" and open_events.get(tensor):
      begin = open_events[tensor].pop()
      found.append(
        (names[tensor], begin["name"], begin["ts"] / 1e6, record["ts"] / 1e6)
      )
  return found


def updates(found: list[tuple]) -> list[dict]:
  """Each update's gradients: when they came, and when they were reduced."""
  gradients = [e for e in found if any(name in e[0] for name in GRADIENTS)]
  arrivals, reductions = {}, {}
  for tensor, activity, start, end in sorted(gradients, key=lambda e: e[2]):
    if activity.startswith("NEGOTIATE"):
      if "right" not in tensor:  # PowerSGD's second factors come of the first
        arrivals.setdefault(tensor, []).append(end)  # on all ranks
    elif activity == "ALLREDUCE":
      reductions.setdefault(tensor, []).append((start, end))
  count = min(map(len, reductions.values()), default=0)
  result = []
  for k in range(count):
    came = max(times[k] for times in arrivals.values())
    spans = [times[k] for times in reductions.values()]
    first, last = min(s for s, _ in spans), max(e for _, e in spans)
    early = [s for s, _ in spans if s < came]
    result.append(
      {
        "before_last_gradient": came - first,
        "all_reduce": last - first,
        "after_last_gradient": last - came,
        "tensors_started_early": len(early) / len(spans),
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
  median = lambda key: round(statistics.median(u[key] for u in measured), 4)
  return {
    "seconds_from_first_all_reduce_to_last_gradient": median(
      "before_last_gradient"
    ),
    "seconds_of_all_reduce_after_it": median("after_last_gradient"),
    "share_of_gradients_started_before_it": median("tensors_started_early"),
  }


def measure(mode: str, arguments: list[str]) -> dict:
  """One run of benchmarks/step.py in an XLA mode."""
  horovodrun = os.path.join(os.path.dirname(sys.executable), "horovodrun")
  with tempfile.TemporaryDirectory() as folder:
    timeline = os.path.join(folder, "timeline.json")
    process = subprocess.run(
      [
        *[horovodrun, "-np", str(RANKS), "--timeline-filename", timeline],
        *[sys.executable, "-m", "benchmarks.step", f"--xla={mode}"],
        "--rounds=2",
        *arguments,
      ],
      capture_output=True,
      text=True,
      env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    if process.returncode:
      sys.exit(f"error: benchmarks/step.py failed:\n{process.stderr[-3000:]}")
    line = next(s for s in process.stdout.splitlines() if '"seconds_med' in s)
    step = json.loads(line[line.index("{") :])
    found = summary(timeline)
  return {
    "xla": mode,
    "ranks": RANKS,
    "updates": step["updates"],
    "seconds_update": step["seconds_median"],
    **found,
  }


def main() -> None:
  for mode in ("off", "layers", "step"):
    print(json.dumps(measure(mode, sys.argv[1:])), flush=True)


if __name__ == "__main__":
  main()
