"""Where a GPU's time goes: the kernels of a recorded run, and the gaps.

  XLA_FLAGS='--xla_dump_to=runs/mine/hlo --xla_dump_hlo_as_text' \\
    python run_pretraining.py --output_dir=runs/mine --profile_steps=40,43 ...
  python -m benchmarks.gpu.kernel_profile --run=runs/mine --gpu=h100

Prints a JSON line about an update: milliseconds of all kernels, of matmuls and
of the rest, and what the gaps between two kernels add up to; then a line for
each of the kernels with the most time. `roofline` is the share of its time that
a kernel of XLA would take at the chip's published bandwidth and FLOP/s, by
what XLA's text of its program reads, writes and multiplies. Recording slows
the host down, so that gaps are larger than in other updates.
"""

import collections
import glob
import os
import re

from absl import app, flags

from benchmarks import measuring
from benchmarks.gpu import chips, costs

FLAGS = flags.FLAGS
_DEVICE = "/device:GPU:0"
# cuBLAS' kernels, and the products that XLA makes with Triton.
_MATMUL = re.compile("nvjet|gemm|cutlass|splitK")


def read_events(path: str) -> list[tuple]:
  """(name, stats, start, end) of the GPU's kernels in order, microseconds."""
  from tensorflow.tsl.profiler.protobuf import xplane_pb2

  space = xplane_pb2.XSpace()
  with open(path, "rb") as f:
    space.ParseFromString(f.read())
  (plane,) = (plane for plane in space.planes if plane.name == _DEVICE)
  names = {n: about.name for n, about in plane.stat_metadata.items()}

  def value(stat):
    kind = stat.WhichOneof("value")
    found = getattr(stat, kind)
    return names[found] if kind == "ref_value" else found

  events = []
  for line in plane.lines:
    if "Compute" not in line.name:  # copies have streams of their own
      continue
    for event in line.events:
      start = event.offset_ps / 1e6
      stats = {names[s.metadata_id]: value(s) for s in event.stats}
      name = plane.event_metadata[event.metadata_id].name
      events.append((name, stats, start, start + event.duration_ps / 1e6))
  return sorted(events, key=lambda event: event[2])


def programs(folder: str) -> dict[str, dict[str, costs.Kernel]]:
  """Name of a module -> its `costs.Kernel`s by the name of an instruction."""
  found = {}
  for path in glob.glob(os.path.join(folder, "*gpu_after_optimizations.txt")):
    with open(path, encoding="utf-8") as f:
      text = f.read()
    name = re.match(r"HloModule ([^,\s]+)", text).group(1)
    found[name] = dict(costs.Module(text).launches())
  return found


def gaps(events: list[tuple]) -> float:
  """Microseconds in which no kernel ran, from the first to the last."""
  idle, end = 0.0, events[0][2]
  for _, _, start, stop in events:
    idle += max(0.0, start - end)
    end = max(end, stop)
  return idle


def kernel_lines(events, modules, chip, updates: int) -> list[dict]:
  """JSON lines of the kernels with the most time, the longest first."""
  spent, calls, best = collections.Counter(), collections.Counter(), {}
  for name, stats, start, end in events:
    module, op = stats.get("hlo_module", ""), stats.get("hlo_op", "")
    # Layers have ops of different names and kernels of the same.
    what = stats.get("tf_op", "").split(":")[-1]
    key = (name.split("<")[0][:80], module, op or what)
    spent[key] += end - start
    calls[key] += 1
    kernel = modules.get(module, {}).get(op)
    if kernel:
      best[key] = best.get(key, 0.0) + 1e6 * kernel.seconds(chip)
  return [
    {
      "kernel": key[0],
      "of": key[2],
      "program": key[1],
      "calls": calls[key] / updates,
      "microseconds": round(total / updates, 1),
      "roofline": round(best[key] / total, 3) if key in best else None,
    }
    for key, total in spent.most_common(FLAGS.kernels)
  ]


def main(_) -> None:
  pattern = os.path.join(FLAGS.run, "**", "*.xplane.pb")
  events = read_events(sorted(glob.glob(pattern, recursive=True))[-1])
  lasted = [(end - start) / 1e3 for _, _, start, end in events]
  matmuls = sum(
    ms
    for ms, (name, *_) in zip(lasted, events, strict=True)
    if _MATMUL.search(name)
  )
  updates = FLAGS.updates
  line = {
    "run": os.path.basename(FLAGS.run),
    "gpu": FLAGS.gpu,
    "kernels": len(events) / updates,
    "kernel_ms": round(sum(lasted) / updates, 2),
    "matmul_ms": round(matmuls / updates, 2),
    "gaps_ms": round(gaps(events) / 1e3 / updates, 2),
  }
  measuring.show(line)
  modules = programs(os.path.join(FLAGS.run, "hlo"))
  for line in kernel_lines(events, modules, chips.CHIPS[FLAGS.gpu], updates):
    measuring.show(line)


if __name__ == "__main__":
  flags.DEFINE_string("run", None, "Output folder of the run.", required=True)
  flags.DEFINE_enum("gpu", "h100", sorted(chips.CHIPS), "The GPU that ran it.")
  flags.DEFINE_integer("updates", 4, "Updates that were recorded.")
  flags.DEFINE_integer("kernels", 15, "Kernels to list.")
  app.run(main)
