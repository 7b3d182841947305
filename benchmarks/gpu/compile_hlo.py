"""Compiles HLO modules for a GPU that need not be there, through JAX.

  python benchmarks/gpu/compile_hlo.py --target=h100.txtpb step.hlo ...

In the environment of requirements-gpu-check.txt. `--target` is XLA's
description of the GPU (`chips.Chip.text_proto`). For each module NAME.hlo it
writes the compiled one as NAME.txt and prints a JSON line: its memory, or the
error.
"""

import argparse
import json
import os
import pathlib
import time

# JAX's plugin looks for CUDA's libraries, which only running needs.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
import jax
from jax._src.interpreters import mlir
from jax._src.lib import xla_client  # no public way to compile an HLO module
from jax.experimental import topologies
from jaxlib.mlir import ir


def compile_module(device, path: pathlib.Path) -> dict:
  """What a JSON line says of the module in `path`."""
  xla = xla_client._xla
  began = time.perf_counter()
  with mlir.make_ir_context():
    program = device.client.compile(
      ir.Module.parse(xla.mlir.hlo_to_stablehlo(path.read_bytes())),
      xla_client.DeviceList((device,)),
      xla_client.CompileOptions(),
    )
  seconds = time.perf_counter() - began
  (compiled,) = program.hlo_modules()
  path.with_suffix(".txt").write_text(compiled.to_string())
  memory = program.get_compiled_memory_stats()
  return {
    "seconds": round(seconds, 1),
    "arguments": memory.argument_size_in_bytes,
    "results": memory.output_size_in_bytes,
    "donated": memory.alias_size_in_bytes,
    "temporary": memory.temp_size_in_bytes,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--target", type=pathlib.Path, required=True)
  parser.add_argument("modules", type=pathlib.Path, nargs="+")
  arguments = parser.parse_args()
  topology = topologies.get_topology_desc(
    platform="cuda",
    topology="1x1x1",
    target_config=arguments.target.read_text(),
  )
  for path in arguments.modules:
    try:
      found = compile_module(topology.devices[0], path)
    except jax.errors.JaxRuntimeError as e:
      found = {"error": str(e).splitlines()[0][:300]}
    print(json.dumps({"module": path.name, **found}), flush=True)


if __name__ == "__main__":
  main()
