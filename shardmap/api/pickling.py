"""Mapped functions as bytes, for other processes.

A mapped function is its function and its options; what was compiled for it is made
anew. JAX cannot pickle devices, and so no meshes: they travel by platform and number,
and are those of the process that reads them.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh


class _Device(NamedTuple):
    platform: str
    id: int


class _Mesh(NamedTuple):
    devices: list[_Device]
    shape: tuple[int, ...]
    axis_names: tuple[str, ...]


def reduced(mapped: Any, fun: Callable[..., Any], options: Any) -> Any:
    """What ``__reduce__`` gives for a mapped function.

    Args:
      mapped: the mapped function, made from the other two.
      fun: the function.
      options: a named tuple, in which devices and meshes may stand.
    """
    module = getattr(mapped, "__module__", None)
    found: Any = sys.modules.get(module) if isinstance(module, str) else None
    for name in getattr(mapped, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    if found is mapped and module != "__main__":
        return mapped.__qualname__  # As functions of a module are, by its name.
    return _restored, (type(mapped), fun, options._replace(**_packed(options)))


def _packed(options: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if devices := getattr(options, "devices", None):
        fields["devices"] = tuple(map(_pack, devices))
    mesh = getattr(options, "mesh", None)
    if isinstance(mesh, Mesh):
        devices = list(map(_pack, mesh.devices.flat))
        fields["mesh"] = _Mesh(devices, mesh.devices.shape, mesh.axis_names)
    return fields


def _restored(kind: Any, fun: Callable[..., Any], options: Any) -> Any:
    fields: dict[str, Any] = {}
    if devices := getattr(options, "devices", None):
        fields["devices"] = tuple(map(_unpack, devices))
    mesh = getattr(options, "mesh", None)
    if isinstance(mesh, _Mesh):
        grid = np.asarray(list(map(_unpack, mesh.devices)), dtype=object)
        fields["mesh"] = Mesh(grid.reshape(mesh.shape), mesh.axis_names)
    return kind(fun, options._replace(**fields))


def _pack(device: jax.Device) -> _Device:
    return _Device(device.platform, device.id)


def _unpack(device: _Device) -> jax.Device:
    here = {other.id: other for other in jax.devices(device.platform)}
    if device.id not in here:
        raise ValueError(
            f"a mapped function that was pickled names the {device.platform} device "
            f"{device.id}, but this process has {sorted(here)}. Pickle one without "
            "devices= and mesh=, or start this process with as many devices."
        )
    return here[device.id]
