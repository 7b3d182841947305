"""Times a training step that export_hlo.py wrote, through JAX's runtime.

  python benchmarks/gpu/run_hlo.py --module=step

Needs jax and numpy, on whatever device JAX finds, and nothing of this project
or TensorFlow. Fills the module's parameters as step.json says, compiles it for
the device, and runs step after step, each from the weights and moments of the
one before. The matmul rate is measured in the same process, at the shapes of
the model and in turns with the steps: each product is repeated on the device,
so that launching it from here is not in its time. Prints one JSON line.
"""

import argparse
import functools
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib import xla_client  # no public way to compile an HLO module

jax.config.update("jax_enable_x64", True)  # token ids and counters are int64
LEAST_SECONDS = 5e-3  # of a product that is repeated on the device


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--module", default="step")
  parser.add_argument("--steps", type=int, default=20)
  return parser.parse_args()


def fill(parameter: dict, rng) -> np.ndarray:
  """A parameter's first value."""
  shape, kind = parameter["shape"], parameter["fill"]["kind"]
  dtype = jnp.dtype(parameter["dtype"])
  if kind == "ints":
    return rng.integers(0, parameter["fill"]["below"], shape).astype(dtype)
  if kind == "normal":
    values = rng.standard_normal(shape, np.float32)
    return (values * parameter["fill"]["stddev"]).astype(dtype)
  return (np.ones if kind == "ones" else np.zeros)(shape, dtype)


class Step:
  """The compiled module and its state."""

  def __init__(self, module: str, about: dict):
    self.device = jax.devices()[0]
    client = self.device.client
    with open(module + ".hlo", "rb") as f:
      program = xla_client._xla.mlir.hlo_to_stablehlo(f.read())
    began = time.perf_counter()
    self._program = client.compile_and_load(
      program,
      xla_client.DeviceList((self.device,)),
      xla_client.CompileOptions(),
    )
    self.compile_seconds = time.perf_counter() - began
    rng = np.random.default_rng(0)
    self._values = [
      jax.device_put(fill(p, rng), self.device) for p in about["parameters"]
    ]
    self._results = about["results"]
    self.loss = None

  def __call__(self) -> None:
    """One update; returns when it is done."""
    results = self._program.execute_sharded(self._values)
    arrays = [a[0] for a in results.disassemble_into_single_device_arrays()]
    for parameter, array in zip(self._results, arrays, strict=True):
      if parameter is None:
        self.loss = array
      else:
        self._values[parameter] = array
    jax.block_until_ready(arrays)


def repeated(product, times: int):
  """`product` of two arrays, `times` times one after the other.

  Between two of them one number is written, so that no product is left out.
  """

  def program(a, b):
    def again(_, state):
      a, c = state
      # x * 0 is not 0 for all x: XLA has to know the product before.
      a = a.at[0, 0, 0].add(c[0, 0, 0] * 0)
      return a, product(a, b)

    return jax.lax.fori_loop(1, times, again, (a, product(a, b)))[1]

  return jax.jit(program)


def seconds_of(run, *values) -> float:
  began = time.perf_counter()
  jax.block_until_ready(run(*values))
  return time.perf_counter() - began


def make_product(
  batch: int, m: int, k: int, n: int, transpose: str, dtype: str
):
  """(function that multiplies n times and waits, n): it takes long enough."""
  key = jax.random.key(0)
  a = jax.random.normal(key, [batch, m, k], jnp.dtype(dtype))
  b = jax.random.normal(key, [batch, k, n], jnp.dtype(dtype))
  product = lambda a, b: a @ b
  if transpose == "a":
    a, product = a.mT, lambda a, b: a.mT @ b
  elif transpose == "b":
    b, product = b.mT, lambda a, b: a @ b.mT
  times = 1
  for _ in range(3):  # the first ones take as long as the launch
    run = functools.partial(repeated(product, times), a, b)
    seconds_of(run)
    seconds = seconds_of(run)
    if seconds >= LEAST_SECONDS:
      break
    times = math.ceil(times * LEAST_SECONDS / seconds)
  return run, times


def make_matmuls(about: dict):
  """A function: FLOP/s over one micro-batch's products."""
  products = []
  for count, batch, m, k, n, *how in about["matmuls"]:
    run, times = make_product(batch, m, k, n, *how)
    products.append((run, count / times, 2.0 * batch * m * k * n * count))

  def rate() -> float:
    seconds = sum(seconds_of(run) * share for run, share, _ in products)
    return sum(flops for *_, flops in products) / seconds

  return rate


def main() -> None:
  arguments = parse_arguments()
  with open(arguments.module + ".json", encoding="utf-8") as f:
    about = json.load(f)
  step = Step(arguments.module, about)
  step()
  first_loss = float(step.loss)
  step()
  memory = step.device.memory_stats() or {}  # only where JAX knows it
  peak = memory.get("peak_bytes_in_use")
  matmul_rate = make_matmuls(about)
  seconds, rates = [], []
  for _ in range(arguments.steps):
    seconds.append(seconds_of(step))
    rates.append(matmul_rate())
  p10, median, p90 = map(float, np.percentile(seconds, [10, 50, 90]))
  rate = float(np.median(rates))
  result = {
    "bert_config": about["bert_config"],
    "precision": about["precision"],
    "micro_batch": about["micro_batch"],
    "seq_length": about["seq_length"],
    "predictions": about["predictions"],
    "device": step.device.device_kind,
    "steps": len(seconds),
    "compile_seconds": round(step.compile_seconds, 2),
    "seconds_median": round(median, 5),
    "seconds_p10": round(p10, 5),
    "seconds_p90": round(p90, 5),
    "examples_per_second": round(about["micro_batch"] / median, 2),
    "peak_memory_mb": peak and round(peak / 2**20),
    "model_gflop": round(about["model_gflop"], 2),
    "matmul_gflop_per_second": round(rate / 1e9, 1),
    "mfu": round(about["model_gflop"] * 1e9 / median / rate, 4),
    "first_loss_sum": round(first_loss, 3),
    "last_loss_sum": round(float(step.loss), 3),
  }
  print(json.dumps(result))


if __name__ == "__main__":
  main()
