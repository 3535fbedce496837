"""Devices of machines that are not here: their compilers compile for them."""

import contextlib
import difflib
import functools
import importlib
import itertools
import math
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from shardmap._jax import LIBTPU
from shardmap.explaining.chips import GPUS, Gpu
from shardmap.units import shown


class Machine(NamedTuple):
    """A TPU slice, or hosts with GPUs.

    Attributes:
      kind: the generation of TPUs or the kind of GPUs.
      sizes: the chips along each dimension; or the number of hosts and the GPUs of one.
      slices: how many such slices of TPUs.
    """

    kind: str
    sizes: tuple[int, ...]
    slices: int = 1

    def __str__(self) -> str:
        sizes = self.sizes[self.kind in GPUS and self.sizes[0] == 1 :]
        several = f"{self.slices}x" if self.slices > 1 else ""
        return f"{several}{self.kind}:{'x'.join(map(str, sizes))}"


_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SMALL = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))


def _of_cubes(most: int) -> tuple[tuple[int, ...], ...]:
    """The slices of cubes of 4 chips along each edge, of at most so many chips."""
    edges = itertools.combinations_with_replacement(range(4, 68, 4), 3)
    return _SMALL + tuple(each for each in edges if math.prod(each) <= most)


_TPUS = {
    "v4": _of_cubes(4096),
    "v5e": _FLAT,
    "v5p": _of_cubes(6144),
    "v6e": _FLAT,
    "tpu7x": _of_cubes(9216),
}
"""The slices of each generation that can be rented, as chips along each dimension."""

_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v7x": "tpu7x"}
_COUNTS_CORES = ("v4", "v5p", "tpu7x")
"""Generations whose names at the vendor count cores, two to a chip."""

MOST_GPUS = 8
"""GPUs of one host."""

_FORMS = (
    "TPUs with the chips along each dimension: 'v4:2x2x2', 'v5e:16x16', 'v5p:8x8x16', "
    "'v6e:4x4', 'tpu7x:2x2x1', or by the vendor's name, 'v5litepod-16'; slices of "
    "them: '2xv5e:16x16'; GPUs of one host or of several: 'h100:8', 'h100:32x8', "
    "'h200:8', 'a100:8'"
)

_lock = threading.Lock()


def devices(name: str) -> list[jax.Device]:
    """Returns the devices of a TPU slice or of hosts with GPUs that need not be here.

    The compiler of the TPU or GPU itself compiles for them, and `explain` tells of the
    programs; nothing runs on them. They go wherever devices go: ``devices=`` of a map,
    `make_mesh`, `jax.sharding.Mesh`. They are those of `jax.experimental.topologies`.

    The extras ``tpu-compiler`` and ``gpu-compiler`` of shardmap install the compilers.

    Args:
      name: a generation of TPUs and the chips along each dimension, such as
        ``"v5e:16x16"``, ``"v4:2x2x2"``, ``"v5p:8x8x16"``, ``"v6e:4x4"`` or
        ``"tpu7x:2x2x1"``; the name at the vendor, such as ``"v5litepod-256"`` or
        ``"v5p-128"``; two such slices, ``"2xv5e:16x16"``; or GPUs of one host,
        ``"h100:8"``, or of 32 hosts, ``"h200:32x8"`` or ``"a100:32x8"``.

    Returns:
      The devices, the same ones in every call. A chip of v4 or tpu7x is two devices.

    Raises:
      TypeError: ``name`` is not a string.
      ValueError: there is no such machine to rent; the message has the nearest.
      ImportError: the compiler is not installed; the message has the command for it.

    Example:
      >>> import shardmap as sm
      >>> sm.devices("v5e:3x5")
      Traceback (most recent call last):
      ValueError: devices knows no 'v5e:3x5'. Did you mean 'v5e:4x4'? Give TPUs ...
    """
    if not isinstance(name, str):
        raise TypeError(
            f"devices takes the name of a machine, got {shown(name)}. Give {_FORMS}."
        )
    machine = machine_named(name)
    with _lock:  # Each call of the compiler makes other devices.
        return list(_devices(machine))


def machine_named(name: str) -> Machine:
    """The machine of a name.

    Raises:
      ValueError: there is no such machine.

    >>> str(machine_named("v5litepod-16")), str(machine_named("V5P-128"))
    ('v5e:4x4', 'v5p:4x4x4')
    >>> machine_named("h100:12")
    Traceback (most recent call last):
    ValueError: devices knows no 'h100:12': ... Did you mean 'h100:2x8'? Give TPUs ...
    """
    read = re.fullmatch(
        r"(?:([1-9]\d*)x)?([a-z]\w*?)([:-])(\d+(?:x\d+)*)", name.strip().lower()
    )
    if read is None:
        raise _unknown(name)
    kind = _ALIASES.get(read[2], read[2])
    sizes, slices = tuple(map(int, read[4].split("x"))), int(read[1] or 1)
    if (
        kind in GPUS
        and read[3] == ":"
        and len(sizes) < 3
        and min(sizes)
        and not read[1]
    ):
        hosts, gpus = (1, *sizes)[-2:]
        if gpus <= MOST_GPUS:
            return Machine(kind, (hosts, gpus))
        several = Machine(kind, (-(-hosts * gpus // MOST_GPUS), MOST_GPUS))
        raise _unknown(name, several, f": one host has up to {MOST_GPUS} GPUs")
    if kind not in _TPUS:
        raise _unknown(name)
    chips = math.prod(sizes)
    if read[3] == "-" and len(sizes) == 1:
        cores = 2 if kind in _COUNTS_CORES else 1
        # Of the slices with as many chips, the vendor gives the one nearest to a cube.
        of_count = [each for each in _TPUS[kind] if cores * math.prod(each) == chips]
        chips //= cores
        sizes = min(of_count, key=sum, default=())
    if sizes in _TPUS[kind]:
        return Machine(kind, sizes, slices)
    near = min(
        _TPUS[kind],
        key=lambda each: (abs(math.log(math.prod(each) / max(chips, 1))), sum(each)),
    )
    raise _unknown(name, Machine(kind, near, slices))


def _unknown(name: str, near: Machine | None = None, why: str = "") -> ValueError:
    """The error for a name, with the machine near it, or one that is written alike."""
    known = {str(Machine(kind, each)) for kind in _TPUS for each in _TPUS[kind]}
    known |= {f"{kind}:{gpus}" for kind in GPUS for gpus in (1, 2, 4, 8)}
    alike = difflib.get_close_matches(name.lower(), sorted(known), 1, 0.5)
    meant = f" Did you mean '{near or alike[0]}'?" if near or alike else ""
    return ValueError(f"devices knows no {name!r}{why}.{meant} Give {_FORMS}.")


@functools.cache
def _devices(machine: Machine) -> tuple[jax.Device, ...]:
    is_gpu = machine.kind in GPUS
    try:
        return tuple((_of_gpus if is_gpu else _of_tpus)(machine))
    except ImportError as error:
        extra, packages = "tpu-compiler", f"libtpu=={LIBTPU}"
        if is_gpu:
            extra = "gpu-compiler"
            packages = "'jax[cuda12-local]' nvidia-cuda-nvcc-cu12"
        raise ImportError(
            f"devices({str(machine)!r}) needs the compiler of these devices, which is "
            f"not installed: pip install {packages} (shardmap's extra {extra!r})."
        ) from error


# The compilers, as the plugins of JAX bring them

_CUDA_PLUGINS = "jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"

_LOADING = {
    # Else libtpu may be loaded by one process of a machine at a time.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Else the plugin refuses to load without the libraries that run programs.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


def _of_tpus(machine: Machine) -> list[jax.Device]:
    topology, rows = str(machine._replace(slices=1)), machine.sizes[:2]
    described: dict[str, Any] = {}
    # By default a host has several chips, and libtpu refuses fewer.
    if 1 in rows:
        described["chips_per_host_bounds"] = (*(min(size, 2) for size in rows), 1)
    if machine.slices > 1:
        described["num_slices"] = machine.slices
    try:
        return _compile_only(topology, platform="tpu", **described)
    except jax.errors.JaxRuntimeError:
        raise
    except RuntimeError as error:
        raise ImportError(str(error)) from error


def _of_gpus(machine: Machine) -> list[jax.Device]:
    hosts, gpus = machine.sizes
    described = {
        "platform": "cuda",
        "target_config": _target_config(GPUS[machine.kind]),
        "topology": f"1x{hosts}x{gpus}",
    }
    try:
        return _compile_only(**described)
    except NotImplementedError as error:
        # JAX loads plugins once. Where that was before, it was with the check.
        for name in _CUDA_PLUGINS:
            with contextlib.suppress(ModuleNotFoundError), _loading():
                importlib.import_module(name).initialize()
                return _compile_only(**described)
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


def _compile_only(*args: Any, **kwargs: Any) -> list[jax.Device]:
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
