"""The names that are bound where a function is traced: JAX's axis environment.

A map binds its axis there, and markers for the maps inside it. All of them are in the
keys of JAX's caches.
"""

import contextlib
import dataclasses
import re
from collections.abc import Collection, Hashable, Iterator

import jax

from shardmap._jax.context import casts_refused
from shardmap.map.primitives.axis import UNNAMED

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


_UNBOUND = re.compile(r"(?:Found an )?(unbound axis name: (.*?))(?:\. To fix this.*)?")
_REMEDY = ". Give the map that is meant this axis_name"
_BOUND = ", or use one that is bound here: "


@contextlib.contextmanager
def explained_axis_names(
    *bound: Hashable, mesh_axes: Collection[str] = ()
) -> Iterator[None]:
    """Context in which JAX's error for an unbound axis name lists the bound ones.

    JAX's own text advises `jax.shard_map`.

    Args:
      *bound: the names that are bound here.
      mesh_axes: those that the map is laid over, which collectives do not know.
    """
    try:
        with casts_refused():
            yield
    except NameError as error:
        text = str(error)
        if (unbound := _UNBOUND.fullmatch(text)) is None:
            raise
        if unbound[2] in mesh_axes:
            instead = [repr(name) for name in bound if name != UNNAMED]
            write = f"Write {instead[0]}, or pass" if instead else "Pass"
            error.args = (
                f"{unbound[2]!r} is a mesh axis: collectives in spmap use axis_name. "
                f"{write} axis_name={unbound[2]!r}",
            )
            raise
        if _REMEDY not in text:
            text = unbound[1] + _REMEDY
        for name in bound:
            if name != UNNAMED:
                text += f"{', ' if _BOUND in text else _BOUND}{name!r}"
        error.args = (text,)
        raise
