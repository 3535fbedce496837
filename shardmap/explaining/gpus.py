"""Figures of GPUs, as XLA's compiler needs them where no GPU is."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """A kind of GPU. Sizes are in bytes.

    The figures are the vendor's, and those that the driver tells.
    """

    name: str
    compute_capability: tuple[int, int]
    features: str
    cores: int
    fpus_per_core: int
    clock_ghz: float
    memory: int
    memory_bandwidth: int
    l2_cache: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    links: int


_H100 = Gpu(
    name="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    features="ACCELERATED_FEATURES",
    cores=132,
    fpus_per_core=128,
    clock_ghz=1.98,
    memory=84_942_979_072,
    memory_bandwidth=3_352_320_000_000,
    l2_cache=50 * 2**20,
    shared_memory_per_core=228 * 2**10,
    shared_memory_per_block=227 * 2**10,
    links=18,
)

GPUS = {
    "h100": _H100,
    "h200": _H100._replace(
        name="NVIDIA H200",
        # Of 143,771 MiB, the driver keeps as large a part as of the H100's.
        memory=150_109_106_176,
        memory_bandwidth=4_800_000_000_000,
    ),
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        features="NONE",
        cores=108,
        fpus_per_core=64,
        clock_ghz=1.41,
        memory=85_100_068_864,
        memory_bandwidth=2_039_040_000_000,
        l2_cache=40 * 2**20,
        shared_memory_per_core=164 * 2**10,
        shared_memory_per_block=163 * 2**10,
        links=12,
    ),
}


def target_config(gpu: Gpu) -> str:
    """The text proto of XLA's ``GpuTargetConfig`` for a GPU."""
    major, minor = gpu.compute_capability
    return f"""
gpu_device_info {{
  name: "{gpu.name}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.{minor}"
  cuda_compute_capability {{
    major: {major}
    minor: {minor}
    feature_extension: {gpu.features}
  }}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus_per_core}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  memory_bandwidth: {gpu.memory_bandwidth}
  l2_cache_size: {gpu.l2_cache}
  shared_memory_per_core: {gpu.shared_memory_per_core}
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block}
  threads_per_warp: 32
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  registers_per_core_limit: {2**16}
  registers_per_block_limit: {2**16}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  device_address_bits: 64
  pcie_bandwidth: {32 * 2**30}
  ecc_enabled: true
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: {gpu.links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""
