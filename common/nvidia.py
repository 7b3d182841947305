"""The NVIDIA GPUs of this machine, without loading TensorFlow."""

import os
import subprocess


def visible_gpus(what: str) -> list[str]:
  """What nvidia-smi says (`name`, `compute_cap`) of each GPU not hidden.

  They are those of CUDA_VISIBLE_DEVICES; [] without any, or without the tool.
  """
  chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
  if chosen in ("", "-1"):
    return []
  query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
  query += [f"--id={chosen}"] if chosen else []
  try:
    found = subprocess.run(query, capture_output=True, text=True, check=True)
  except (OSError, subprocess.CalledProcessError):
    return []
  return found.stdout.splitlines()
