"""The names that are bound where a function is traced: JAX's axis environment.

A map binds its axis there, and markers for the maps inside it. All of them are in the
keys of JAX's caches.
"""

import dataclasses
from collections.abc import Hashable

import jax

INSIDE = "_inside_spmap"
"""What `inside_map` looks up."""


@dataclasses.dataclass(frozen=True)
class DevicesMarker:
    """Marker in the axis environment: the devices of the outermost map."""

    devices: tuple[jax.Device, ...]


@dataclasses.dataclass(frozen=True)
class MeshAxisMarker:
    """Marker in the axis environment: a mesh axis that a map around uses."""

    mesh_axis: str


def is_bound(axis_name: Hashable) -> bool:
    """Whether the axis environment has this name, which is in JAX's cache keys."""
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def inside_map() -> bool:
    """Whether the function of one element of a map is being traced."""
    return is_bound(INSIDE)
