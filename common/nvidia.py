"""The NVIDIA GPUs of this machine, without loading TensorFlow."""

import ctypes
import os
import pathlib
import subprocess


def visible_gpus(what: str) -> list[str]:
  """Properties (`name,compute_cap`) of each GPU that nvidia-smi lists.

  CUDA_VISIBLE_DEVICES may hide some; [] without a GPU, or without the tool.
  """
  visible = os.environ.get("CUDA_VISIBLE_DEVICES")
  if visible in ("", "-1"):  # all are hidden
    return []
  query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
  if visible:
    query.append(f"--id={visible}")
  try:
    listing = subprocess.run(query, capture_output=True, text=True, check=True)
  except (OSError, subprocess.CalledProcessError):
    return []
  return listing.stdout.splitlines()


def network_line(
  sysfs: str = "/sys/class/infiniband", library: str = "libibverbs.so.1"
) -> str:
  """How NCCL reaches other hosts, as far as this host tells.

  Without the `library` of InfiniBand and RoCE, or an adapter in `sysfs` with an
  active port, it takes TCP, and says so in its own log only (NCCL_DEBUG=INFO).
  """
  active = set()
  for state in pathlib.Path(sysfs).glob("*/ports/*/state"):
    if "ACTIVE" in state.read_text():  # `4: ACTIVE`
      active.add(state.parts[-4])
  adapters = ", ".join(sorted(active))
  if not adapters:
    return "network between hosts: TCP, for no active port of RDMA is here"
  if os.environ.get("NCCL_IB_DISABLE") == "1":
    return f"network between hosts: TCP, not {adapters} (NCCL_IB_DISABLE=1)"
  try:
    ctypes.CDLL(library)
  except OSError as e:
    return (
      f"network between hosts: TCP, not {adapters} ({e}): install "
      "libibverbs1 and ibverbs-providers"
    )
  return f"network between hosts: {adapters}, by InfiniBand or RoCE"
