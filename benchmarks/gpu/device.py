"""Shows that TensorFlow multiplies on this machine's GPU, and how fast.

  python -m benchmarks.gpu.device

Prints one JSON line, in which `tflops` is the rate of bf16 products of 8192 x
8192 matrices; ends with status 1 if there is no GPU, but a CPU will do where
nvidia-smi lists none.
"""

import sys

from benchmarks import measuring
from common.nvidia import visible_gpus
from common.tensorflow_v1 import tf

REPEATS = 50


def matmul_seconds(size: int, jit: bool) -> float:
  """Of one product, after another of which each waits for the one before."""
  with tf.Graph().as_default(), tf.Session() as session:
    a = tf.Variable(tf.random.normal([size, size], dtype=tf.bfloat16))

    def chain(b):
      for _ in range(REPEATS):
        b = tf.matmul(a, b) * tf.constant(0.01, tf.bfloat16)
      return tf.reduce_sum(tf.cast(b, tf.float32))

    run = tf.function(chain, jit_compile=True) if jit else chain
    done = run(a)
    session.run(tf.global_variables_initializer())
    session.run(done)
    times = [measuring.seconds_of(lambda: session.run(done)) for _ in range(5)]
  return min(times) / REPEATS


def main() -> None:
  devices = tf.config.list_physical_devices("GPU")
  if visible_gpus("name") and not devices:
    sys.exit("TensorFlow sees no GPU: TF_CPP_MIN_LOG_LEVEL=0 says why")
  size = 8192 if devices else 256
  rates = {
    name: round(2 * size**3 / matmul_seconds(size, jit) / 1e12, 3)
    for name, jit in (("tflops", False), ("tflops_xla", True))
  }
  details = [tf.config.experimental.get_device_details(d) for d in devices]
  measuring.show(
    {"tensorflow": tf.__version__, "details": str(details), **rates}
  )


if __name__ == "__main__":
  main()
