"""Pickling of mapped functions.

The function and the options are pickled, compiled programs are not. JAX cannot pickle
devices, nor meshes: they are pickled as platforms and numbers, and become devices of
the process that loads them.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from shardmap.sharding.mesh import too_few_devices


def reduced(mapped: Any, fun: Callable[..., Any], options: Any) -> Any:
    """The result of ``__reduce__`` for a mapped function, made of the other two."""
    module = getattr(mapped, "__module__", None)
    there: Any = sys.modules.get(module) if isinstance(module, str) else None
    for name in getattr(mapped, "__qualname__", "").split("."):
        there = getattr(there, name, None)
    if there is mapped and module != "__main__":
        return mapped.__qualname__  # By its name, as functions of a module are.
    by_name: dict[str, Any] = {}
    if devices := getattr(options, "devices", None):
        by_name["devices"] = _names(devices)
    mesh = getattr(options, "mesh", None)
    if isinstance(mesh, Mesh):
        by_name["mesh"] = _names(mesh.devices.flat), mesh.devices.shape, mesh.axis_names
    rest = options._replace(**dict.fromkeys(by_name))
    return _restored, (type(mapped), fun, rest, by_name)


def _restored(
    kind: Any, fun: Callable[..., Any], options: Any, by_name: dict[str, Any]
) -> Any:
    fields: dict[str, Any] = {}
    if "devices" in by_name:
        fields["devices"] = tuple(_devices(by_name["devices"]))
    if "mesh" in by_name:
        names, shape, axis_names = by_name["mesh"]
        fields["mesh"] = Mesh(np.array(_devices(names)).reshape(shape), axis_names)
    return kind(fun, options._replace(**fields))


def _names(devices: Iterable[jax.Device]) -> list[tuple[str, int]]:
    return [(device.platform, device.id) for device in devices]


def _devices(names: Iterable[tuple[str, int]]) -> list[jax.Device]:
    devices = []
    for platform, number in names:
        here = {device.id: device for device in jax.devices(platform)}
        if number not in here:
            raise ValueError(
                f"a mapped function that was pickled names the {platform} device "
                f"{number}, but this process has {sorted(here)}. Pickle one without "
                f"devices= and mesh=.{too_few_devices(number + 1)}"
            )
        devices.append(here[number])
    return devices
