"""How long an update takes on a cluster: compute, communication, their overlap.

  for hosts in 1 2 4; do
    sudo .venv/bin/python -m benchmarks.network.slow_network \\
      --rounds=1 --updates=10 --hosts=$hosts --gbit=0,1,10 \\
      --megabytes=1,45 --step_flags=... >>lines
  done # one host: without --megabytes, and with two --train_batch_size
  python -m research.scaling_model --measured=lines

Fits a `Machine` to measurements of this project (--measured, JSON lines of
slow_network.py and network/allreduce.py), says how far its predictions are from
the lines it was not fitted to and from published tables (published_scaling.py),
and what to turn on for which cluster. Writes --output.jsonl and --output.png.

`step_seconds` is the model: alpha-beta costs of collectives (Thakur et al.
2005, https://doi.org/10.1177/1094342005051521), and one channel on which groups
of gradients leave while the backward pass goes on.
"""

import dataclasses
import functools
import json
import math
import os
import re
import statistics
import types
from collections.abc import Sequence

import numpy as np
import scipy.optimize
from absl import flags

from benchmarks.network import slow_network
from common import errors
from config.bert_config import BertConfig
from gradients import power_sgd
from model import model_flops, weights
from records import record_shape
from research import published_scaling

os.environ["MPLBACKEND"] = "Agg"  # Jupyter names one that .venv lacks
from matplotlib import pyplot as plt

FLAGS = flags.FLAGS
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_BACKWARD = 2 / 3  # of a micro-batch's arithmetic, see `model_flops`
_FUSION_BYTES = 2**27  # Horovod's --fusion-threshold-mb
_TRAINED = (
  weights.ENCODER,
  weights.POOLER,
  weights.MASKED_LM,
  weights.NEXT_SENTENCE,
)


@dataclasses.dataclass(frozen=True)
class Machine:
  """What a rank and its wires can do; seconds and bytes.

  Attributes:
    flops: FLOP/s of the forward and backward pass.
    network: bytes/s of a host, each way.
    inside: bytes/s between ranks of one host, of each rank, each way.
    latency: of a message between hosts.
    latency_inside: of one inside of a host.
    start: from when a group is there to when it leaves: Horovod's cycle, and
      asking all ranks.
    byte: of the rank's core for a byte of float32 that it sends and sums. GPUs
      spend none.
    byte_half: for a byte of float16.
    cast: what an update takes longer for a number that leaves as float16:
      casts both ways and the loss scale, in so far as `byte_half` lacks them.
    update: for a weight that the optimizer changes.
    accumulate: for a gradient that a micro-batch adds.
    factor: PowerSGD's, for a number of a matrix that is sent as factors.
    shared_cores: cores that all ranks have together, as on a test bed; None:
      each rank has its own.
    trees: whether collectives use trees where those are faster, as NCCL's do.
  """

  flops: float
  network: float = math.inf
  inside: float = math.inf
  latency: float = 0.0
  latency_inside: float = 0.0
  start: float = 0.0
  byte: float = 0.0
  byte_half: float = 0.0
  cast: float = 0.0
  update: float = 0.0
  accumulate: float = 0.0
  factor: float = 0.0
  shared_cores: int | None = None
  trees: bool = False


@dataclasses.dataclass(frozen=True)
class Setting:
  """A model, its batch and how it is trained.

  Attributes:
    bert: a BertConfig.
    seq_length: tokens of a record.
    micro_batch: records of one, of a rank.
    predictions: masked tokens of a record.
    hosts: how many.
    ranks_per_host: on each.
    accumulation: micro-batches of an update.
    groups: --allreduce_groups; 0: what is there when the channel is free.
    overlaps: whether gradients leave before the backward pass is over. Not with
      several micro-batches, which are dropped as a whole if one gradient is not
      finite, and not with --xla=step.
    wire_bytes: of a gradient's number: 4 or, as float16, 2.
    powersgd_rank: --powersgd_rank.
    zero: --zero.
    hierarchical: horovodrun --hierarchical-allreduce: first inside of hosts,
      then between them, instead of one ring over all ranks.
  """

  bert: BertConfig
  seq_length: int
  micro_batch: int
  predictions: int = 20
  hosts: int = 1
  ranks_per_host: int = 1
  accumulation: int = 1
  groups: int = 4
  overlaps: bool = True
  wire_bytes: int = 4
  powersgd_rank: int = 0
  zero: bool = False
  hierarchical: bool = False

  @property
  def ranks(self) -> int:
    return self.hosts * self.ranks_per_host

  @property
  def examples(self) -> int:
    """Records of an update."""
    return self.ranks * self.accumulation * self.micro_batch

  @property
  def flops(self) -> float:
    """FLOPs of a micro-batch."""
    shape = record_shape.RecordShape(
      self.seq_length, self.predictions, self.bert.vocab_size
    )
    config = types.SimpleNamespace(
      stage_bert=self.bert, precision="fp32", precision_policy=(),
      sampled_softmax=0, xla="off",
    )  # fmt: skip
    matmuls = model_flops.of_run(config, self.micro_batch, shape)
    return model_flops.total(matmuls)

  def factors(self, shape) -> tuple:
    """Numbers of a gradient that leave in PowerSGD's first and second round."""
    if self.powersgd_rank and power_sgd.is_worth(shape, self.powersgd_rank):
      return shape[0] * self.powersgd_rank, shape[1] * self.powersgd_rank
    return math.prod(shape), 0


def shapes(bert: BertConfig) -> list[tuple]:
  """(name, shape) of the trained variables, in about the graph's order."""
  return [
    (w.name, w.shape) for w in weights.weights(bert) if w.part in _TRAINED
  ]


def numbers(bert: BertConfig) -> int:
  """How many weights are trained."""
  return sum(math.prod(shape) for _, shape in shapes(bert))


def in_factors(setting: Setting) -> int:
  """Numbers of the matrices that PowerSGD sends as factors."""
  return sum(
    math.prod(shape)
    for _, shape in shapes(setting.bert)
    if setting.factors(shape)[1]
  )


def gradients(setting: Setting) -> tuple:
  """The gradients in the order in which they are computed.

  Returns:
    The variables' shapes, and float [variables]: how much of the backward pass
    is over when each is there. The word embeddings', which the first of its
    matmuls and the last of its look-ups add to, is the last but few.
  """
  done, order = [0.0], shapes(setting.bert)[::-1]
  for name, shape in order:
    rows = setting.seq_length
    if name.startswith("cls/predictions"):
      rows = setting.predictions
    elif name.startswith(("cls/", "bert/pooler")):
      rows = 1
    if name == "cls/predictions/output_bias":  # with it, the logits' matmul
      shape = (setting.bert.vocab_size, setting.bert.hidden_size)
    is_looked_up = name.startswith("bert/embeddings")
    is_matrix = len(shape) == 2 and not is_looked_up
    done.append(done[-1] + is_matrix * rows * math.prod(shape))
  there = np.array(done[1:]) / done[-1]
  return [shape for _, shape in order], there


def reduce_scatter_seconds(machine: Machine, setting: Setting, size) -> float:
  """Seconds in which `size` bytes on each rank are summed, a part for each.

  So long takes an all-gather of as much, too; an all-reduce is both.
  """
  ranks, hosts, local = setting.ranks, setting.hosts, setting.ranks_per_host
  between = hosts - 1
  if machine.trees:
    between = min(between, math.ceil(math.log2(hosts)))
  seconds = between * machine.latency + (local - 1) * machine.latency_inside
  if setting.hierarchical:
    inside = size * (local - 1) / local / machine.inside
    return seconds + inside + size * (hosts - 1) / hosts / machine.network
  wire = min(
    machine.network if hosts > 1 else math.inf,
    machine.inside if local > 1 else math.inf,
  )
  return seconds + size * (ranks - 1) / ranks / wire


def transfer(machine: Machine, setting: Setting, size) -> tuple:
  """Seconds of an all-reduce (with ZeRO a reduce-scatter) of `size` numbers.

  Cores work while the wire does. If ranks share them they do not: in a ring all
  wait for the one that waits for a core.

  Returns:
    Seconds that it takes, and that it takes of the rank's core.
  """
  size = size * setting.wire_bytes
  rounds = 1 if setting.zero else 2
  per_byte = machine.byte if setting.wire_bytes == 4 else machine.byte_half
  sent = rounds * size * (setting.ranks - 1) / setting.ranks
  slow = crowd(machine, setting)
  core = sent * per_byte * slow
  wire = rounds * reduce_scatter_seconds(machine, setting, size)
  return (wire + core if slow > 1 else max(wire, core)), core


def crowd(machine: Machine, setting: Setting) -> float:
  """How much longer a core takes that several ranks share."""
  if machine.shared_cores is None:
    return 1.0
  return max(1.0, setting.ranks / machine.shared_cores)


def exchange(ready: Sequence, costs, fuse=None) -> float:
  """Seconds from the beginning of the backward pass to the last gradient's sum.

  One channel sends what is there, in order. Meanwhile the backward pass gets
  what is left of the core.

  Args:
    ready: [n] after how many seconds of the backward pass each item is there,
      rising.
    costs: (first, last + 1) -> (seconds, seconds of the core) of sending these
      items together.
    fuse: (first, last + 1) -> whether these may be sent together, if they are
      there; None: each goes alone.
  """
  clock = work = 0.0
  first = 0
  while first < len(ready):
    clock += max(0.0, ready[first] - work)
    work = max(work, ready[first])
    last = first + 1
    while (
      fuse
      and last < len(ready)
      and ready[last] <= work
      and fuse(first, last + 1)
    ):
      last += 1
    seconds, core = costs(first, last)
    clock += seconds
    work += max(0.0, seconds - core)
    first = last
  return clock


def backward_seconds(
  machine: Machine, setting: Setting, seconds: float
) -> float:
  """Seconds of a backward pass that also sums its gradients over ranks."""
  if setting.ranks == 1:
    return seconds
  sizes, there = gradients(setting)
  overlaps = setting.overlaps and setting.accumulation == 1
  # Time goes on while a group waits to leave.
  ready = machine.start + seconds * (there if overlaps else np.ones_like(there))
  items = [[i] for i in range(len(sizes))]
  if setting.groups:
    items = np.array_split(
      np.arange(len(sizes)), min(setting.groups, len(sizes))
    )
  rounds = [
    np.sum([setting.factors(sizes[i]) for i in item], axis=0) for item in items
  ]

  def together(first, last):
    return np.sum(rounds[first:last], axis=0)

  def costs(first, last):
    parts = [
      transfer(machine, setting, part) for part in together(first, last) if part
    ]
    seconds, core = map(sum, zip(*parts, strict=True))
    return seconds + (len(parts) - 1) * machine.start, core

  def fits(first, last):
    size = together(first, last).sum() * setting.wire_bytes
    return size <= _FUSION_BYTES

  return exchange(
    [ready[item[-1]] for item in items], costs, None if setting.groups else fits
  )


def step_seconds(machine: Machine, setting: Setting) -> float:
  """Seconds of an update: micro-batches, communication, the optimizer."""
  slow = crowd(machine, setting)
  trained = numbers(setting.bert)
  micro = slow * setting.flops / machine.flops
  several = setting.accumulation > 1
  add = slow * machine.accumulate * trained * several
  whole = slow * machine.factor * in_factors(setting)
  update = slow * machine.update * trained
  if setting.ranks > 1:
    if setting.wire_bytes == 2:
      whole += slow * machine.cast * trained
    if setting.zero:
      weights = dataclasses.replace(setting, wire_bytes=4)
      update /= setting.ranks
      whole += machine.start + transfer(machine, weights, trained)[0]
  return (
    setting.accumulation * (micro + add)
    - micro * _BACKWARD
    + backward_seconds(machine, setting, micro * _BACKWARD)
    + whole
    + update
  )


# -----------------------------------------------------------------------------
# Own measurements
# -----------------------------------------------------------------------------


def setting_of(line: dict) -> Setting:
  """The setting of a line of slow_network.py: one rank a host."""
  words = " ".join(slow_network.CASES[line["case"]].flags)
  value = lambda flag, default: int(
    (re.findall(rf"--{flag}=(\d+)", words) or [default])[0]
  )
  return Setting(
    bert=read_config(line["bert_config"]),
    seq_length=line["seq_length"],
    micro_batch=line["micro_batch"],
    predictions=line["predictions"],
    hosts=line["ranks"],
    accumulation=line["accumulation"],
    groups=value("allreduce_groups", 4),
    wire_bytes=2 if "--fp16_allreduce" in words else 4,
    powersgd_rank=value("powersgd_rank", 0),
    zero=bool(value("zero", 0)),
  )


@functools.cache
def read_config(name: str) -> BertConfig:
  """One of configs/, by its file's name."""
  return BertConfig.from_json_file(os.path.join(_ROOT, "configs", name))


def _variant(line):
  """Lines of one have one efficiency: its passes' speed over its matmuls'."""
  return line["bert_config"], line["precision"], line["xla"]


def _matmul_seconds(line):
  rate = line["matmul_gflop_per_second"] * 1e9
  return line["accumulation"] * setting_of(line).flops / rate


def fit_rank(lines: Sequence[dict]) -> tuple:
  """What one rank alone does, from runs of one rank.

  seconds = matmuls' / efficiency + weights x (update + added x accumulate)
            + numbers sent as factors x factor

  Least squares of relative errors; no cost is below 0.

  Returns:
    dict variant -> efficiency, and a dict of `Machine`'s update, accumulate,
    factor.
  """
  variants = sorted({_variant(line) for line in lines})
  rows = []
  for line in lines:
    setting = setting_of(line)
    trained = numbers(setting.bert)
    several = setting.accumulation > 1
    row = [_matmul_seconds(line) * (_variant(line) == v) for v in variants]
    row += [trained, trained * setting.accumulation * several]
    rows.append(np.array([*row, in_factors(setting)]) / line["seconds_median"])
  # Columns of one size, or the solver takes small ones for nothing.
  scale = np.abs(rows).max(axis=0)
  scale[scale == 0] = 1.0
  found, _ = scipy.optimize.nnls(np.array(rows) / scale, np.ones(len(rows)))
  found /= scale
  names = ("update", "accumulate", "factor")
  costs = dict(zip(names, map(float, found[-3:]), strict=True))
  inverse = found[: len(variants)]
  return {
    v: 1 / float(x) for v, x in zip(variants, inverse, strict=True)
  }, costs


def fit_wire(lines: Sequence[dict]) -> dict:
  """`Machine`'s start, byte, byte_half from network/allreduce.py, no rate set.

  Seconds of one group are a straight line over bytes sent, since then the cores
  bound it.
  """
  found = {}
  for case, name, width in (
    ("one group", "byte", 4),
    ("one group, fp16", "byte_half", 2),
  ):
    points = [
      (line["megabytes"] * 2**20 * width / 4, line["seconds_median"])
      for line in lines
      if line["case"] == case
    ]
    sizes, seconds = np.array(points).T
    per_byte, start = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    found[name] = float(per_byte)
    found.setdefault("start", max(0.0, float(start)))
  return found


# network/allreduce.py's case -> (groups, bytes of a number).
_REDUCTIONS = {
  "one group": (1, 4),
  "four groups": (4, 4),
  "one group, fp16": (1, 2),
}


def read_lines(paths: Sequence[str]) -> tuple[list, list]:
  """What slow_network.py printed, of each case the median of its runs.

  Returns:
    Its lines, and those of network/allreduce.py in `_REDUCTIONS`.

  Raises:
    UserError: a line is of neither.
  """
  steps, reductions = [], []
  for path in paths:
    with open(path, encoding="utf-8") as f:
      for number, text in enumerate(f, 1):
        line = json.loads(text)
        if "bert_config" in line and line.get("case") in slow_network.CASES:
          steps.append(line)
        elif "tensors" in line and "gbit_measured" in line:
          reductions.append(line)
        else:
          raise errors.UserError(
            f"{path}, line {number}: not one of slow_network.py"
          )
  reductions = [r for r in reductions if r["case"] in _REDUCTIONS]
  return _medians(steps), reductions


def _medians(lines):
  """One line of those that differ in what was measured only."""
  measured = ("seconds_median", "matmul_gflop_per_second", "gbit_measured")
  told = ("case", "ranks", "gbit", "micro_batch", "seq_length", "bert_config")
  runs = {}
  for line in lines:
    runs.setdefault(tuple(line[key] for key in told), []).append(line)
  return [
    same[0] | {key: statistics.median(x[key] for x in same) for key in measured}
    for same in runs.values()
  ]


class Fit:
  """A machine as lines of it say, and which lines those were.

  Fitted: all runs of one rank; of variants (a config in a precision and XLA
  mode) that have none, the efficiency from their `_FITTED` case on the fastest
  network; what casts take from `float16` on two hosts without a limit; and of
  network/allreduce.py what one group took there. All else is predicted, given
  the network's and the matmuls' rates that were measured in the same run.
  """

  _FITTED = ("groups", "plain", "bf16")

  def __init__(self, steps: Sequence[dict], reductions: Sequence[dict], cores):
    self.cores = cores
    alone = [line for line in steps if line["ranks"] == 1]
    wires = [
      r
      for r in reductions
      if r["ranks"] == 2 and not r["gbit"] and _REDUCTIONS[r["case"]][0] == 1
    ]
    if not alone or not wires:
      raise errors.UserError(
        "--measured: no runs of one rank, or of network/allreduce.py on two "
        "hosts without a rate; see the top of research/scaling_model.py"
      )
    self.efficiencies, costs = fit_rank(alone)
    self.costs = costs | fit_wire(wires)
    self.fitted = [*alone, *wires]
    for line in steps:
      if (line["case"], line["ranks"], line["gbit"]) == ("float16", 2, 0):
        longer = line["seconds_median"] - self.predict(line)
        weights = numbers(setting_of(line).bert)
        self.costs["cast"] = max(0.0, float(longer / weights))
        self.fitted.append(line)
    for variant in sorted({_variant(line) for line in steps}):
      if variant not in self.efficiencies:
        self._fit_efficiency(variant, steps)

  def _fit_efficiency(self, variant, steps):
    """The efficiency with which one line's seconds are what is predicted."""
    lines = [
      line
      for line in steps
      if _variant(line) == variant and line["case"] in self._FITTED
    ]
    if not lines:
      return
    line = max(lines, key=lambda x: x["gbit_measured"])
    seconds = line["seconds_median"]

    def error(efficiency):
      self.efficiencies[variant] = efficiency
      return self.predict(line) - seconds

    self.efficiencies[variant] = scipy.optimize.brentq(error, 0.02, 50.0)
    self.fitted.append(line)

  def machine(self, line: dict) -> Machine:
    """In the run of `line`: its network, and at its matmul rate, if it has one.

    That rate is of all ranks at once, so cores that they share are in it.
    """
    rate, flops = line.get("matmul_gflop_per_second"), math.inf
    if rate:
      flops = rate * 1e9 * self.efficiencies[_variant(line)]
      setting = setting_of(line)
      flops *= max(1.0, setting.ranks / self.cores)
    return Machine(
      flops=flops,
      network=line["gbit_measured"] * 1e9 / 8,
      shared_cores=self.cores,
      **self.costs,
    )

  def predict(self, line: dict) -> float:
    """Seconds of the update, or of the all-reduce, that `line` measured."""
    if "bert_config" in line:
      return step_seconds(self.machine(line), setting_of(line))
    _, width = _REDUCTIONS[line["case"]]
    machine = self.machine(line)
    setting = Setting(
      bert=None,
      seq_length=0,
      micro_batch=0,
      hosts=line["ranks"],
      wire_bytes=width,
    )
    size = line["megabytes"] * 2**20 / 4
    # Groups that are there together leave together.
    return machine.start + transfer(machine, setting, size)[0]

  def results(self, lines: Sequence[dict]) -> list[dict]:
    """Predictions for each line, and their errors."""
    found = []
    for line in lines:
      measured = line.get("seconds_median")
      if "bert_config" in line and _variant(line) not in self.efficiencies:
        continue
      predicted = self.predict(line)
      found.append(
        {
          "kind": "step" if "bert_config" in line else "all-reduce",
          "what": line.get("bert_config", f"{line.get('megabytes')} MB"),
          "case": line["case"],
          "ranks": line["ranks"],
          "gbit": line["gbit"],
          "fitted": any(line is other for other in self.fitted),
          "seconds_measured": measured,
          "seconds_predicted": round(float(predicted), 5),
          "error": round(float(predicted / measured - 1), 4),
        }
      )
    return found


# -----------------------------------------------------------------------------
# Published tables
# -----------------------------------------------------------------------------


def gpu(hardware: published_scaling.Hardware, setting: Setting, single: float):
  """A `Machine` of a vendor's figures that does `single` examples/s alone.

  PowerSGD's matrices are read or written nine times (two of three products
  read one, two make one; gradient and error are added and the error is kept);
  orthonormal bases are taken for nothing, as we have not measured them on GPUs.
  """
  return Machine(
    flops=setting.flops / setting.micro_batch * single,
    network=hardware.network,
    inside=hardware.inside,
    latency=published_scaling.LATENCY,
    latency_inside=published_scaling.LATENCY_INSIDE,
    update=published_scaling.UPDATE_BYTES / hardware.memory,
    factor=9 * 4 / hardware.memory,
    trees=True,
  )


def published() -> list[dict]:
  """Each row of the tables, what is predicted of it, and how far off it is."""
  found = []
  for table in published_scaling.TABLES:
    hardware = published_scaling.HARDWARE[table.hardware]
    for hosts, accumulation, measured in table.rows:
      setting = Setting(
        bert=read_config(table.bert),
        seq_length=table.seq_length,
        micro_batch=table.micro_batch,
        predictions=table.predictions,
        hosts=hosts,
        ranks_per_host=table.per_host,
        accumulation=accumulation,
        groups=0,
        overlaps=table.overlaps,
        wire_bytes=table.wire_bytes,
      )
      machine = gpu(hardware, setting, table.single)
      predicted = setting.examples / step_seconds(machine, setting)
      found.append(
        {
          "kind": "published",
          "what": table.name,
          "hardware": table.hardware,
          "seq_length": table.seq_length,
          "ranks": setting.ranks,
          "accumulation": accumulation,
          "examples_per_second_measured": measured,
          "examples_per_second_predicted": round(float(predicted), 1),
          "examples_per_second_ideal": round(table.single * setting.ranks, 1),
          "error": round(float(predicted / measured - 1), 4),
          "source": table.source,
        }
      )
  return found + deepspeed()


def deepspeed() -> list[dict]:
  """DeepSpeed's hours of both phases, predicted from one GPU's examples/s."""
  hardware, found = published_scaling.HARDWARE["DGX-2 V100"], []
  for hosts, measured in published_scaling.DEEPSPEED_HOURS:
    hours = ideal = 0.0
    for phase in published_scaling.DEEPSPEED_PHASES:
      ranks = 16 * hosts
      setting = Setting(
        bert=read_config("bert_large.json"),
        seq_length=phase.seq_length,
        micro_batch=phase.micro_batch,
        predictions=phase.predictions,
        hosts=hosts,
        ranks_per_host=16,
        accumulation=phase.batch // (ranks * phase.micro_batch),
        groups=1,
        overlaps=False,  # --delay_allreduce
        wire_bytes=2,
      )
      machine = gpu(hardware, setting, phase.single)
      updates = phase.examples / phase.batch
      hours += updates * step_seconds(machine, setting) / 3600
      ideal += phase.examples / phase.single / ranks / 3600
    found.append(
      {
        "kind": "published",
        "what": "DeepSpeed, both phases",
        "hardware": "DGX-2 V100",
        "ranks": 16 * hosts,
        "hours_measured": round(measured, 3),
        "hours_predicted": round(float(hours), 3),
        "hours_ideal": round(ideal, 3),
        # Of the speed, as in the other tables.
        "error": round(float(measured / hours - 1), 4),
        "source": published_scaling.DEEPSPEED,
      }
    )
  return found


def perseus() -> list[dict]:
  """How much of Perseus' five times communication can be, by host rate."""
  found = []
  for gbit in (1, 2.5, 10, 25):
    setting = Setting(
      bert=read_config("bert_base.json"),
      seq_length=256,
      micro_batch=22,
      predictions=40,
      hosts=2,
      ranks_per_host=8,
    )
    hardware = published_scaling.Hardware(
      gbit * 1e9 / 8,
      published_scaling.PERSEUS_INSIDE,
      published_scaling.PERSEUS_MEMORY,
    )
    single = published_scaling.PERSEUS_FLOPS / setting.flops * 22
    machine = gpu(hardware, setting, single)
    bare = dataclasses.replace(setting, groups=1, overlaps=False)
    half = dataclasses.replace(setting, wire_bytes=2)
    seconds = [float(step_seconds(machine, s)) for s in (bare, setting, half)]
    found.append(
      {
        "kind": "perseus",
        "gbit": gbit,
        "seconds_without_overlap": round(seconds[0], 4),
        "ratio_groups": round(seconds[0] / seconds[1], 3),
        "ratio_groups_float16": round(seconds[0] / seconds[2], 3),
        "ratio_no_communication": round(
          seconds[0] * single / setting.micro_batch, 3
        ),
        "ratio_published": published_scaling.PERSEUS_RATIO,
        "source": published_scaling.PERSEUS,
      }
    )
  return found


# -----------------------------------------------------------------------------
# What to turn on
# -----------------------------------------------------------------------------

# Changes to a setting; the first is Horovod's optimizer without any overlap.
CHOICES = {
  "plain": {"groups": 1, "overlaps": False},
  "groups": {},
  "float16": {"wire_bytes": 2},
  "float16, hierarchical": {"wire_bytes": 2, "hierarchical": True},
  "float16, zero": {"wire_bytes": 2, "zero": True},
  "8 micro-batches": {"accumulation": 8},
  "float16 + 8": {"wire_bytes": 2, "accumulation": 8},
  "powersgd": {"powersgd_rank": 16, "groups": 1},
  "powersgd + 8": {"powersgd_rank": 16, "groups": 1, "accumulation": 8},
}
# Same training, same batch; then same training; then all.
_EXACT = tuple(CHOICES)[:5]
_LARGER = ("8 micro-batches", "float16 + 8")
_CLUSTERS = tuple(
  (gpus, gbit) for gpus in (16, 64, 256, 1024) for gbit in (1, 10, 25, 100)
)
_BEST_WITHIN = 1.02  # the plainest that is so near to the fastest


def cluster_speeds(gpus: int, gbit: float) -> dict:
  """choice -> examples/s of BERT-Large on A100, 8 a host, and the ideal."""
  table = published_scaling.TABLES[0]
  nominal = published_scaling.HARDWARE[table.hardware]
  setting = Setting(
    bert=read_config(table.bert),
    seq_length=table.seq_length,
    micro_batch=table.micro_batch,
    hosts=gpus // 8,
    ranks_per_host=8,
  )
  hardware = nominal._replace(network=gbit * 1e9 / 8)
  machine = gpu(hardware, setting, table.single)
  speeds = {"ideal": table.single * gpus}
  for name, changes in CHOICES.items():
    changed = dataclasses.replace(setting, **changes)
    speeds[name] = changed.examples / step_seconds(machine, changed)
  return speeds


def best(speeds: dict, names: Sequence[str]) -> str:
  """The first of `names` that is within 2% of the fastest of them."""
  fastest = max(speeds[name] for name in names)
  return next(n for n in names if speeds[n] * _BEST_WITHIN >= fastest)


def recommendations() -> list[dict]:
  """For each cluster all choices' examples/s, the best, and its efficiency."""
  found = []
  for gpus, gbit in _CLUSTERS:
    speeds = cluster_speeds(gpus, gbit)
    line = {"kind": "cluster", "gpus": gpus, "gbit": gbit}
    line |= {name: round(speed) for name, speed in speeds.items()}
    for key, names in (
      ("best_same_batch", _EXACT),
      ("best_exact", _EXACT + _LARGER),
      ("best", tuple(CHOICES)),
    ):
      name = best(speeds, names)
      line[key] = name
      line[f"{key}_efficiency"] = round(speeds[name] / speeds["ideal"], 3)
    found.append(line)
  return found


def markdown(lines: Sequence[dict]) -> str:
  """`recommendations` as a table."""
  names = list(CHOICES)
  rows = [
    ["GPUs", "Gbit/s a host", *names, "best, same batch", "exact", "of all"],
    ["---"] * (len(names) + 5),
  ]
  for line in lines:
    share = lambda key, line=line: (
      f"{line[key]}, {line[key + '_efficiency']:.0%}"
    )
    rows.append(
      [
        f"{line['gpus']:,}",
        f"{line['gbit']}",
        *(f"{line[name]:,}" for name in names),
        share("best_same_batch"),
        share("best_exact"),
        share("best"),
      ]
    )
  return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# -----------------------------------------------------------------------------
# Figures
# -----------------------------------------------------------------------------


def summary(errors_of: Sequence[float]) -> str:
  sizes = [abs(e) for e in errors_of]
  if not sizes:
    return "none"
  within = sum(size <= 0.15 for size in sizes)
  return (
    f"median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}, "
    f"{within} of {len(sizes)} within 15%"
  )


def plot(lines: Sequence[dict], path: str) -> None:
  """Predictions over measurements, and efficiencies over networks, as a PNG."""
  figure, (left, right) = plt.subplots(
    1, 2, figsize=(11, 4.4), layout="constrained"
  )
  for label, color, chosen in (
    ("fitted", "#9db8d6", lambda x: x.get("fitted")),
    ("own runs, predicted", "#b2401f", lambda x: x.get("fitted") is False),
  ):
    points = [x for x in lines if "seconds_measured" in x and chosen(x)]
    left.plot(
      [x["seconds_measured"] for x in points],
      [x["seconds_predicted"] / x["seconds_measured"] for x in points],
      "o", ms=4, color=color, label=label,
    )  # fmt: skip
  points = [x for x in lines if "examples_per_second_measured" in x]
  seconds = lambda x, which: 65536 / x[f"examples_per_second_{which}"]
  left.plot(
    [seconds(x, "measured") for x in points],
    [seconds(x, "predicted") / seconds(x, "measured") for x in points],
    "s", ms=4, mfc="none", color="black",
    label="published, 65,536 examples",
  )  # fmt: skip
  left.axhspan(0.85, 1.15, color="grey", alpha=0.15)
  left.axhline(1.0, color="grey", lw=0.8)
  left.set_xscale("log")
  left.set_xlabel("measured (s)")
  left.set_ylabel("predicted / measured")
  left.legend(fontsize=8)
  rates = np.geomspace(1, 400, 40)
  speeds = [cluster_speeds(64, rate) for rate in rates]
  for number, name in enumerate(CHOICES):
    right.plot(
      rates, [100 * s[name] / s["ideal"] for s in speeds],
      lw=1.3, color=f"C{number}", label=name,
    )  # fmt: skip
  right.set_xscale("log")
  right.set_xlabel(
    "Gbit/s of a host; 64 A100, 8 a host, BERT-Large, 128 tokens"
  )
  right.set_ylabel("efficiency (%)")
  right.set_ylim(0, 102)
  right.legend(fontsize=8, loc="lower right")
  for axis in (left, right):
    axis.grid(alpha=0.3)
  figure.savefig(path, dpi=90)
  plt.close(figure)


def define_flags() -> None:
  results = os.path.join("research", "results")
  flags.DEFINE_list(
    "measured",
    [os.path.join(results, "scaling.jsonl")],
    "JSON Lines files of slow_network.py and network/allreduce.py.",
  )
  flags.DEFINE_integer(
    "cores", 2, "Cores that all measured ranks shared.", lower_bound=1
  )
  flags.DEFINE_string(
    "output",
    os.path.join(results, "scaling_model"),
    "Where to write NAME.jsonl and NAME.png.",
  )


def main(_) -> None:
  steps, reductions = read_lines(FLAGS.measured)
  fit = Fit(steps, reductions, FLAGS.cores)
  own = fit.results([*steps, *reductions])
  theirs, clusters = published(), recommendations()
  parameters = {
    "kind": "machine",
    "cores": fit.cores,
    **{name: float(f"{value:.4g}") for name, value in fit.costs.items()},
    "efficiencies": {
      " ".join(variant): round(value, 4)
      for variant, value in fit.efficiencies.items()
    },
  }
  lines = [parameters, *own, *theirs, *perseus(), *clusters]
  with open(f"{FLAGS.output}.jsonl", "w", encoding="utf-8") as f:
    f.writelines(json.dumps(line) + "\n" for line in lines)
  plot(lines, f"{FLAGS.output}.png")
  print(json.dumps(parameters))
  for label, chosen in (
    ("own runs that it was fitted to", [x for x in own if x["fitted"]]),
    (
      "own updates that it was not",
      [x for x in own if not x["fitted"] and x["kind"] == "step"],
    ),
    (
      "own all-reduces that it was not",
      [x for x in own if not x["fitted"] and x["kind"] != "step"],
    ),
    ("published on several hosts", [x for x in theirs if x["ranks"] > 16]),
    ("published, all", theirs),
  ):
    print(f"{label}: {summary([x['error'] for x in chosen])}")
  print(markdown(clusters))


if __name__ == "__main__":
  define_flags()
  errors.run_main(main)
