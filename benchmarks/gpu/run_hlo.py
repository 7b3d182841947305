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
import json
import math
import statistics
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


def seconds_of(run, a, b) -> float:
  began = time.perf_counter()
  jax.block_until_ready(run(a, b))
  return time.perf_counter() - began


def make_matmuls(about: dict):
  """Runs each product of the model; returns FLOP/s of one micro-batch."""
  runs = []
  for count, batch, m, k, n, transpose, dtype in about["matmuls"]:
    a, b = [batch, m, k], [batch, k, n]
    key = jax.random.key(0)
    a, b = (jax.random.normal(key, s, jnp.dtype(dtype)) for s in (a, b))
    if transpose == "a":
      a, product = a.mT, lambda a, b: a.mT @ b
    elif transpose == "b":
      b, product = b.mT, lambda a, b: a @ b.mT
    else:
      product = lambda a, b: a @ b
    times = 1
    for _ in range(3):  # the first ones take as long as the launch
      run = repeated(product, times)
      seconds_of(run, a, b)
      seconds = seconds_of(run, a, b)
      if seconds >= LEAST_SECONDS:
        break
      times = math.ceil(times * LEAST_SECONDS / seconds)
    else:
      run = repeated(product, times)
      seconds_of(run, a, b)
    runs.append((count / times, run, a, b, 2.0 * batch * m * k * n * count))

  def rate() -> float:
    seconds = sum(seconds_of(run, a, b) * share for share, run, a, b, _ in runs)
    return sum(flops for *_, flops in runs) / seconds

  return rate


def peak_memory(device) -> float | None:
  """Peak bytes on the device, where JAX knows them."""
  stats = device.memory_stats() or {}
  return stats.get("peak_bytes_in_use")


def main() -> None:
  arguments = parse_arguments()
  with open(arguments.module + ".json", encoding="utf-8") as f:
    about = json.load(f)
  step = Step(arguments.module, about)
  step()
  first_loss = float(step.loss)
  step()
  peak = peak_memory(step.device)
  matmul_rate = make_matmuls(about)
  seconds, rates = [], []
  for _ in range(arguments.steps):
    began = time.perf_counter()
    step()
    seconds.append(time.perf_counter() - began)
    rates.append(matmul_rate())
  median, rate = statistics.median(seconds), statistics.median(rates)
  p10, p90 = np.percentile(seconds, [10, 90])
  result = {
    k: about[k]
    for k in (
      "bert_config",
      "precision",
      "micro_batch",
      "seq_length",
      "predictions",
    )
  } | {
    "device": step.device.device_kind,
    "steps": len(seconds),
    "compile_seconds": round(step.compile_seconds, 2),
    "seconds_median": round(median, 5),
    "seconds_p10": round(float(p10), 5),
    "seconds_p90": round(float(p90), 5),
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
