"""Devices of machines that are not here: their compilers compile for them."""

import functools
import re
import threading

import jax

from shardmap._jax import compilers
from shardmap.explaining.gpus import GPUS, target_config
from shardmap.units import shown

_TPUS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}
"""Generations of TPUs, and how many dimensions their slices have."""

_FORMS = (
    "TPUs with the chips along each dimension: 'v4:2x2x2', 'v5e:16x16', 'v5p:8x8x16', "
    "'v6e:4x4', 'tpu7x:2x2x1'; GPUs of one host or of several: 'h100:8', 'h100:32x8', "
    "'a100:8'"
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
        ``"tpu7x:2x2x1"``; or GPUs of one host, ``"h100:8"``, or of 32 hosts,
        ``"h100:32x8"`` or ``"a100:32x8"``.

    Returns:
      The devices, the same ones in every call. A chip of v4 or tpu7x is two devices.

    Raises:
      TypeError: ``name`` is not a string.
      ValueError: there is no such machine.
      ImportError: the compiler is not installed; the message has the command for it.

    Example:
      >>> import shardmap as sm
      >>> sm.devices("v5e")
      Traceback (most recent call last):
      ValueError: devices knows no 'v5e'. Give TPUs with the chips along each ...
    """
    if not isinstance(name, str):
        raise TypeError(
            f"devices takes the name of a machine, got {shown(name)}. Give {_FORMS}."
        )
    read = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)", name)
    kind, sizes = (read[1], read[2].split("x")) if read else ("", [])
    if len(sizes) not in ((1, 2) if kind in GPUS else (_TPUS.get(kind),)):
        raise ValueError(f"devices knows no {name!r}. Give {_FORMS}.")
    with _lock:  # Each call of the compiler makes other devices.
        return list(_devices(name, kind, *map(int, sizes)))


@functools.cache
def _devices(name: str, kind: str, *sizes: int) -> tuple[jax.Device, ...]:
    try:
        if kind in GPUS:
            hosts, gpus = (1, *sizes)[-2:]
            config = target_config(GPUS[kind])
            return tuple(compilers.gpu_devices(config, hosts, gpus))
        return tuple(compilers.tpu_devices(name, sizes))
    except ImportError as error:
        extra, packages = "tpu-compiler", f"libtpu=={compilers.LIBTPU}"
        if kind in GPUS:
            extra, packages = (
                "gpu-compiler",
                "'jax[cuda12-local]' nvidia-cuda-nvcc-cu12",
            )
        raise ImportError(
            f"devices({name!r}) needs the compiler of these devices, which is not "
            f"installed: pip install {packages} (shardmap's extra {extra!r})."
        ) from error
    except ValueError as error:
        raise ValueError(f"devices({name!r}): {error}. Give {_FORMS}.") from None
