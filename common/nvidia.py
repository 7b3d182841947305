"""The NVIDIA GPUs of this machine, without loading TensorFlow."""

import os
import subprocess


def visible_gpus(what: str) -> list[str]:
  """A property (`name`, `compute_cap`) of each GPU that nvidia-smi lists.

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
