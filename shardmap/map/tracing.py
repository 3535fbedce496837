"""From Python functions to the jaxprs that the map primitive carries."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from shardmap._jax.context import (
    NO_MESH,
    bound_axes,
    casts_refused,
    check_types_unchecked,
)
from shardmap._jax.types import (
    ClosedJaxpr,
    PyTree,
    without_sharding,
)
from shardmap._jax.walk import per_jaxpr
from shardmap.map.collectives.checks import checked_collectives
from shardmap.map.primitives.axis import UNNAMED
from shardmap.map.primitives.map_primitive import MapPrimitive, spmap_p

_INSIDE = "_inside_spmap"


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
    return is_bound(_INSIDE)


@jax.tree_util.register_pytree_node_class
class Flattened:
    """A user's result as its leaves and its structure.

    JAX unflattens results with placeholders for arrays, which a user's class may
    refuse.
    """

    def __init__(self, leaves: Sequence[Any], tree: PyTree) -> None:
        self.leaves = leaves
        self.tree = tree

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        return self.leaves, self.tree

    @classmethod
    def tree_unflatten(cls, tree: PyTree, leaves: Sequence[Any]) -> "Flattened":
        return cls(leaves, tree)


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


@contextlib.contextmanager
def element_trace(
    axis_name: Hashable,
    axis_size: int,
    markers: Sequence[DevicesMarker | MeshAxisMarker] = (),
    mesh: AbstractMesh | None = None,
) -> Iterator[None]:
    """The context in which the function of one element is traced; see `trace_body`."""
    # The mesh is chosen when the map is lowered: values must not be typed with the mesh
    # that is set while they are traced.
    with (
        jax.sharding.use_abstract_mesh(mesh or NO_MESH),
        bound_axes({axis_name: axis_size} | dict.fromkeys([_INSIDE, *markers], 1)),
    ):
        yield


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
    equal avals again is cheap and gives the same jaxpr object.

    Args:
      fun: the function of one element.
      avals: of its arguments.
      axis_name, axis_size: of the map.
      markers: what maps inside look up with `is_bound`.
      mesh: the mesh of `jax.set_mesh` inside ``fun``; None: none.
    """
    check_types_unchecked()
    with element_trace(axis_name, axis_size, markers, mesh):
        over = {each.mesh_axis for each in markers if isinstance(each, MeshAxisMarker)}
        with explained_axis_names(axis_name, mesh_axes=over):
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
    """Refuses references, which several devices would write to."""
    for aval in map(jax.typeof, constants):
        if isinstance(aval, jax.ref.AbstractRef):
            raise TypeError(
                f"a mapped function uses a reference that is made outside of it, {aval}"
                ". Make it inside, or take its value, x[...], as an argument, and "
                "return what to write to it."
            )


_checked = per_jaxpr(checked_collectives)


@per_jaxpr
def without_constants(closed: ClosedJaxpr) -> Any:
    """The jaxpr with its constants as its first inputs."""
    jaxpr: Any = closed.jaxpr
    return jaxpr.replace(
        constvars=[],
        invars=[*jaxpr.constvars, *jaxpr.invars],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


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
