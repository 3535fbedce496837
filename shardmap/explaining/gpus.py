"""Figures of GPUs, as XLA's compiler needs them where no GPU is."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """A kind of GPU, with the names of fields of XLA's ``GpuDeviceInfoProto``.

    The figures are the vendor's, and those that the driver tells. Sizes are in bytes.
    """

    name: str
    compute_capability: tuple[int, int]
    features: str
    links: int
    core_count: int
    fpus_per_core: int
    clock_rate_ghz: float
    device_memory_size: int
    memory_bandwidth: int
    l2_cache_size: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int


_H100 = Gpu(
    name="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    features="ACCELERATED_FEATURES",
    links=18,
    core_count=132,
    fpus_per_core=128,
    clock_rate_ghz=1.98,
    device_memory_size=84_942_979_072,
    memory_bandwidth=3_352_320_000_000,
    l2_cache_size=50 * 2**20,
    shared_memory_per_core=228 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
)

GPUS = {
    "h100": _H100,
    "h200": _H100._replace(
        name="NVIDIA H200",
        # Of 143,771 MiB, the driver keeps as large a part as of the H100's.
        device_memory_size=150_109_106_176,
        memory_bandwidth=4_800_000_000_000,
    ),
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        features="NONE",
        links=12,
        core_count=108,
        fpus_per_core=64,
        clock_rate_ghz=1.41,
        device_memory_size=85_100_068_864,
        memory_bandwidth=2_039_040_000_000,
        l2_cache_size=40 * 2**20,
        shared_memory_per_core=164 * 2**10,
        shared_memory_per_block_optin=163 * 2**10,
    ),
}


def target_config(gpu: Gpu) -> str:
    """The text proto of XLA's ``GpuTargetConfig`` for a GPU."""
    major, minor = gpu.compute_capability
    figures = "\n".join(
        f"  {name}: {gpu[k]}" for k, name in enumerate(gpu._fields[4:], 4)
    )
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
{figures}
  shared_memory_per_block: {48 * 2**10}
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
