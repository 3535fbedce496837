"""From Python functions to the jaxprs that the map primitive carries.

While the function of one element is traced, its axis is bound, and markers for the maps
inside it are too. JAX's environment of axes has them, which is in the keys of its
caches.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from shardmap._jax.context import (
    NO_MESH,
    bound_axes,
    check_live,
)
from shardmap._jax.errors import explained_errors
from shardmap._jax.types import without_sharding
from shardmap._jax.walk import per_jaxpr, without_constants
from shardmap.arrays.trees import Flattened
from shardmap.map.collectives.checks import checked_collectives
from shardmap.map.primitives.axis import UNNAMED
from shardmap.map.primitives.map_primitive import MapPrimitive, spmap_p

# What is bound

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


# What is traced


class Body(NamedTuple):
    """The traced function of one element.

    Attributes:
      jaxpr: a jaxpr without constants; its first inputs take ``constants``.
      constants: arrays, or tracers of an enclosing trace.
      out_tree: the structure of the function's result.
    """

    jaxpr: Any
    constants: tuple[Any, ...]
    out_tree: Any


def trace_body(
    fun: Callable[..., Any],
    avals: Sequence[Any],
    axis_name: Hashable,
    axis_size: int,
    markers: Sequence[DevicesMarker | MeshAxisMarker] = (),
    mesh: AbstractMesh | None = None,
) -> Body:
    """Traces ``fun`` with the axis bound, its constants moved to the front.

    JAX caches the jaxpr as long as ``fun`` lives. Tracing the same function object with
    equal avals again is cheap and gives the same jaxpr object. Maps inside look up the
    markers with `is_bound`. ``mesh`` is that of `jax.set_mesh` inside ``fun``.
    """
    # The mesh is chosen when the map is lowered: values must not be typed with the mesh
    # that is set while they are traced.
    with (
        jax.sharding.use_abstract_mesh(mesh or NO_MESH),
        bound_axes({axis_name: axis_size} | dict.fromkeys([INSIDE, *markers], 1)),
    ):
        named = () if axis_name == UNNAMED else (axis_name,)
        over = {each.mesh_axis for each in markers if isinstance(each, MeshAxisMarker)}
        with explained_errors(*named, mesh_axes=over):
            closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(
                *map(without_sharding, avals)
            )
        jaxpr = closed.jaxpr
        if closed.consts:
            check_constants(closed.consts)
            jaxpr = without_constants(closed)
        jaxpr = _checked(jaxpr, axis_name, axis_size)
    out_tree = (
        out_shape.tree
        if isinstance(out_shape, Flattened)
        else jax.tree.structure(out_shape)
    )
    return Body(jaxpr, tuple(closed.consts), out_tree)


def check_constants(constants: Sequence[Any]) -> None:
    """Refuses references, which several devices would write to, and dead tracers."""
    check_live(constants)
    for aval in map(jax.typeof, constants):
        if isinstance(aval, jax.ref.AbstractRef):
            raise TypeError(
                f"a mapped function uses a reference that is made outside of it, {aval}"
                ". Make it inside, or take its value, x[...], as an argument, and "
                "return what to write to it."
            )


_checked = per_jaxpr(checked_collectives)


def bind_map(
    body: Body,
    args: Iterable[Any],
    in_axes: Iterable[int | None],
    out_axes: Iterable[int | None],
    params: dict[str, Any],
    primitive: MapPrimitive = spmap_p,
) -> list[Any]:
    """Binds a map of ``body``, whose constants are not mapped."""
    return primitive.bind(
        *body.constants,
        *args,
        in_axes=(None,) * len(body.constants) + tuple(in_axes),
        out_axes=tuple(out_axes),
        call_jaxpr=body.jaxpr,
        **params,
    )
