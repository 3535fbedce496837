"""The compilers of accelerators that are not here, as JAX's plugins bring them."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental import topologies

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


def gpu_devices(target_config: str, hosts: int, gpus: int) -> list[jax.Device]:
    """Compile-only devices of GPUs.

    Args:
      target_config: a text proto of XLA's ``GpuTargetConfig``.
      hosts: the number of hosts.
      gpus: the number of GPUs of each.

    Raises:
      ImportError: no plugin for CUDA is installed.
    """
    described = {
        "platform": "cuda",
        "target_config": target_config,
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
