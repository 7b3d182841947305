"""NVIDIA's data center GPUs as XLA wants to know them, by published figures.

From the data sheets of each, and per multiprocessor from the CUDA C++
Programming Guide's table "Technical Specifications per Compute Capability".
"""

from typing import NamedTuple

_KB, _MB = 2**10, 2**20


class Chip(NamedTuple):
  """One GPU; memory in bytes, bandwidth in bytes/s."""

  model: str
  capability: tuple  # compute capability
  multiprocessors: int
  fp32_units: int  # per multiprocessor
  clock_ghz: float  # boost
  memory: int
  bandwidth: float
  l2: int
  shared: int  # per multiprocessor
  flops: dict  # dense FLOP/s of matmuls by their type; fp32 as TF32

  def text_proto(self) -> str:
    """XLA's GpuTargetConfigProto."""
    major, minor = self.capability
    return f"""
      platform_name: "CUDA"
      device_description_str: "{self.model}"
      dnn_version_info {{ major: 9 minor: 10 }}
      runtime_version {{ major: 12 minor: 9 }}
      gpu_device_info {{
        name: "{self.model}"
        device_vendor: "NVIDIA"
        cuda_compute_capability {{ major: {major} minor: {minor} }}
        core_count: {self.multiprocessors}
        fpus_per_core: {self.fp32_units}
        clock_rate_ghz: {self.clock_ghz}
        device_memory_size: {self.memory}
        memory_bandwidth: {self.bandwidth:.0f}
        l2_cache_size: {self.l2}
        shared_memory_per_core: {self.shared}
        shared_memory_per_block: {48 * _KB}
        shared_memory_per_block_optin: {self.shared - _KB}
        registers_per_core_limit: {64 * _KB}
        registers_per_block_limit: {64 * _KB}
        threads_per_core_limit: 2048
        threads_per_block_limit: 1024
        threads_per_warp: 32
        block_dim_limit_x: {2**31 - 1}
        block_dim_limit_y: {2**16 - 1}
        block_dim_limit_z: {2**16 - 1}
      }}
    """


_HOPPER = {"bf16": 989.4e12, "f16": 989.4e12, "f32": 494.7e12}
_AMPERE = {"bf16": 312e12, "f16": 312e12, "f32": 156e12}

CHIPS = {
  "h100": Chip(
    "NVIDIA H100 SXM5 80GB", (9, 0), 132, 128, 1.83, 80 * 10**9, 3.35e12,
    50 * _MB, 228 * _KB, _HOPPER,
  ),
  "h200": Chip(
    "NVIDIA H200 SXM5 141GB", (9, 0), 132, 128, 1.83, 141 * 10**9, 4.8e12,
    50 * _MB, 228 * _KB, _HOPPER,
  ),
  "a100": Chip(
    "NVIDIA A100 SXM4 80GB", (8, 0), 108, 64, 1.41, 80 * 10**9, 2.039e12,
    40 * _MB, 164 * _KB, _AMPERE,
  ),
}  # fmt: skip
