"""What --xla compiles and --recompute computes again, by their values."""

import functools

from common.errors import UserError
from common.nvidia import visible_gpus

# --xla; `xla_patches.jit` says what each compiles.
MODES = ("off", "auto", "layers", "step")
KERNELS = ("layers",)  # those that compile kernels one by one
UPDATE = ("layers", "step")  # those that compile the update
# Those whose shapes may vary: large programs would compile for each again.
VARIED = ("off", "layers")
# --recompute.
RECOMPUTE = ("gelu", "attention", "layer_norm", "layer")

# For Blackwell XLA of TensorFlow 2.21 writes PTX of a version that does not
# know it: https://github.com/tensorflow/tensorflow/issues/111958
_BLACKWELL = 10  # its major compute capability


@functools.cache  # nvidia-smi is slow, and each stage has a config
def check_gpus() -> None:
  """Raises `UserError` if there is a GPU that XLA does not compile for."""
  for gpu in visible_gpus("name,compute_cap"):
    name, _, capability = gpu.rpartition(", ")
    if int(capability.split(".")[0]) >= _BLACKWELL:
      raise UserError(
        "--xla compiles for GPUs of compute capability up to 9.x (Hopper), and "
        f"{name} has {capability}: give --xla=off"
      )
