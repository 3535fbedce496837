"""The compilers of accelerators that are not here, as JAX's plugins bring them."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from shardmap.explaining.chips import Gpu

_CUDA_PLUGINS = "jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"

_LOADING = {
    # Else libtpu may be loaded by one process of a machine at a time.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Else the plugin refuses to load without the libraries that run programs.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


def tpu_devices(
    topology: str, sizes: Sequence[int], num_slices: int
) -> list[jax.Device]:
    """Compile-only devices of TPUs.

    Args:
      topology: such as ``"v5e:2x4"``.
      sizes: its dimensions.
      num_slices: how many such slices.

    Raises:
      ImportError: libtpu is not installed.
    """
    described: dict[str, Any] = {}
    # By default a host has several chips, and libtpu refuses fewer.
    if 1 in sizes[:2]:
        described["chips_per_host_bounds"] = (*(min(size, 2) for size in sizes[:2]), 1)
    if num_slices > 1:
        described["num_slices"] = num_slices
    try:
        return _devices(topology, platform="tpu", **described)
    except jax.errors.JaxRuntimeError:
        raise
    except RuntimeError as error:
        raise ImportError(str(error)) from error


def gpu_devices(gpu: Gpu, hosts: int, gpus: int) -> list[jax.Device]:
    """Compile-only devices of GPUs.

    Args:
      gpu: their kind.
      hosts: the number of hosts.
      gpus: the number of GPUs of each.

    Raises:
      ImportError: no plugin for CUDA is installed.
    """
    described = {
        "platform": "cuda",
        "target_config": _target_config(gpu),
        "topology": f"1x{hosts}x{gpus}",
    }
    try:
        return _devices(**described)
    except NotImplementedError as error:
        # JAX loads plugins once. Where that was before, it was with the check.
        for name in _CUDA_PLUGINS:
            with contextlib.suppress(ModuleNotFoundError), _loading():
                importlib.import_module(name).initialize()
                return _devices(**described)
        raise ImportError(str(error)) from error


def _target_config(gpu: Gpu) -> str:
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


def _devices(*args: Any, **kwargs: Any) -> list[jax.Device]:
    with _loading():
        return list(topologies.get_topology_desc(*args, **kwargs).devices)


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    """A context in which the compilers load, and what they write on stderr is lost."""
    before = dict(os.environ)
    os.environ.update({k: v for k, v in _LOADING.items() if k not in before})
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        for name in _LOADING.keys() - before.keys():
            del os.environ[name]
