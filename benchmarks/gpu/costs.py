"""What a compiled HLO module would cost: kernels, bytes, FLOPs, a roofline.

Reads XLA's text of an optimized module. A kernel reads its operands from memory
and writes its results there; what is in a fusion is not written. Its time is
the longer of its bytes at the memory's bandwidth and its FLOPs at the matrix
units' peak, so that no machine is faster, and a good one takes twice that.
"""

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = (.+)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.-]+) \(")
_SHAPE = re.compile(r"\b(pred|bf16|[fsu]\d\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%([\w.-]+)")
# They hand on what is in memory.
_FREE = frozenset(
  "parameter constant tuple get-tuple-element bitcast after-all "
  "partition-id replica-id".split()
)


class Instruction(NamedTuple):
  """One line of a computation."""

  shapes: list  # [(type, dimensions)] of its results
  opcode: str
  operands: list  # names
  rest: str  # attributes

  @property
  def called(self) -> list:
    """The names of the computations that it runs, not for each element."""
    runs = self.opcode in ("fusion", "call", "while")
    return _CALLED.findall(self.rest) if runs else []


class Kernel(NamedTuple):
  """What the GPU runs at once."""

  bytes: float  # read and written
  flops: float = 0.0  # of matmuls
  type: str = ""  # of a matmul's factors
  library: str = ""  # that a matmul is called from, "triton" if XLA writes it

  def seconds(self, chip) -> float:
    """Seconds at best, on a `chips.Chip`."""
    peak = chip.flops.get(self.type, chip.flops["f32"])
    return max(self.bytes / chip.bandwidth, self.flops / peak)


def _size(shape) -> float:
  kind, dims = shape
  bits = 8 if kind == "pred" else int(re.search(r"\d+", kind).group())
  return math.prod(dims) * bits / 8


def _closing(text: str) -> int:
  """Where the bracket closes that `text` begins with."""
  depth = 0
  for i, c in enumerate(text):
    depth += (c == "(") - (c == ")")
    if not depth:
      return i
  raise ValueError(f"no closing bracket: {text[:80]}")


def _instruction(text: str) -> Instruction:
  end = _closing(text) + 1 if text[0] == "(" else text.index(" ")
  result, text = text[:end], text[end:].lstrip()
  opcode, _, _ = text.partition("(")
  text = text[len(opcode) :]
  end = _closing(text)
  operands = re.findall(r"%([\w.-]+)", text[:end])
  shapes = []
  for kind, sizes in _SHAPE.findall(result):
    shapes.append((kind, [int(n) for n in sizes.split(",") if n]))
  return Instruction(shapes, opcode, operands, text[end + 1 :])


class Module:
  """A compiled module's computations: name -> {name: `Instruction`}."""

  def __init__(self, text: str):
    self.computations, current = {}, None
    for line in text.splitlines():
      if found := _COMPUTATION.match(line):
        current = self.computations.setdefault(found.group(2), {})
        if found.group(1):
          self.entry = found.group(2)
      elif current is not None and (found := _INSTRUCTION.match(line)):
        current[found.group(1)] = _instruction(found.group(2))

  def kernels(self, computation: str | None = None) -> Iterator[Kernel]:
    """Every `Kernel` that a run launches, in order."""
    inside = self.computations[computation or self.entry]
    for one in inside.values():
      if one.opcode in _FREE:
        continue
      if one.opcode in ("call", "while"):
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', one.rest)
        for _ in range(int(trips.group(1)) if trips else 1):
          for called in one.called:
            yield from self.kernels(called)
      else:
        yield self._kernel(one, inside)

  def _within(self, one, inside):
    """`one`, or for a fusion all that is in it: (instruction, computation)."""
    if one.opcode != "fusion":
      yield one, inside
    for name in one.called:
      body = self.computations[name]
      for part in body.values():
        yield from self._within(part, body)

  def _read(self, one, inside) -> float:
    """Bytes of the operands, of a table only the rows that are gathered."""
    operands = dict.fromkeys(one.operands)
    total = sum(_size(s) for o in operands for s in inside[o].shapes)
    for body in map(self.computations.get, one.called):
      for name, part in body.items():
        users = [p for p in body.values() if name in p.operands]
        looked_up = users and all(
          p.opcode in ("gather", "dynamic-slice") and p.operands[0] == name
          for p in users
        )
        if part.opcode == "parameter" and looked_up:
          rows = sum(_size(p.shapes[0]) for p in users)
          total -= max(0.0, _size(part.shapes[0]) - rows)
    return total

  def _kernel(self, one, inside) -> Kernel:
    results = one.shapes
    type_, library, flops = "", "", 0.0
    if one.opcode == "custom-call":
      target = re.search(r'custom_call_target="([^"]*)"', one.rest).group(1)
      if "gemm" in target or "matmul" in target:
        library, results = target.strip("_"), one.shapes[:1]  # no work space
        type_, flops = _matmul(one, inside)
    else:
      for part, where in self._within(one, inside):
        if part.opcode == "dot":
          library = "triton" if "triton" in one.rest else "loop"
          type_, more = _matmul(part, where)
          flops += more
    total = self._read(one, inside) + sum(map(_size, results))
    return Kernel(total, flops, type_, library)


def _matmul(one, inside) -> tuple:
  """The type of a product's first factor, and FLOPs."""
  kind, dims = inside[one.operands[0]].shapes[0]
  text = re.search(
    r'lhs_contracting_dim(?:s|ensions)"?[=:][\[{]([^\]}]*)', one.rest
  ).group(1)
  depth = math.prod(dims[int(n)] for n in re.findall(r"\d+", text))
  return kind, 2.0 * math.prod(one.shapes[0][1]) * depth


def summary(kernels: list) -> dict:
  """Sums for one JSON line."""
  gemms = collections.Counter(
    f"{k.library} {k.type}" for k in kernels if k.library
  )
  return {
    "kernels": len(kernels),
    "gigabytes": round(sum(k.bytes for k in kernels) / 1e9, 2),
    "teraflop": round(sum(k.flops for k in kernels) / 1e12, 4),
    "gemms": dict(gemms.most_common()),
    "fp32_gemms": sum(bool(k.library) and k.type == "f32" for k in kernels),
  }
