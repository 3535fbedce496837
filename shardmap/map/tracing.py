"""From Python functions to the jaxprs that the map primitive carries."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from shardmap._jax.context import (
    NO_MESH,
    bound_axes,
    casts_refused,
    check_types_unchecked,
    check_vma_off,
)
from shardmap._jax.types import (
    ClosedJaxpr,
    Jaxpr,
    PyTree,
    Value,
    without_sharding,
)
from shardmap._jax.walk import per_jaxpr
from shardmap.map.collectives.checks import checked_collectives
from shardmap.map.collectives.split import vectorizable
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


_UNBOUND = re.compile(r"(?:Found an )?(unbound axis name: .*?)(?:\. To fix this.*)?")
_REMEDY = ". Give the map that is meant this axis_name"
_BOUND = ", or use one that is bound here: "


@contextlib.contextmanager
def explained_axis_names(*bound: Hashable) -> Iterator[None]:
    """Context in which JAX's error for an unbound axis name lists the bound ones.

    JAX's own text advises `jax.shard_map`.
    """
    try:
        with casts_refused():
            yield
    except NameError as error:
        text = str(error)
        if (unbound := _UNBOUND.fullmatch(text)) is None:
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
        with explained_axis_names(axis_name):
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


class Batch(NamedTuple):
    """A vmap: the name and size of its axis."""

    name: Hashable
    size: int

    def vectorize(
        self, jaxpr: Jaxpr, in_dims: Sequence[int | None], out_dims: Any
    ) -> Callable[..., Any]:
        """`jax.vmap` of ``jaxpr``; all operands may be unmapped."""
        return self.vectorize_function(self.function(jaxpr), in_dims, out_dims)

    def function(self, jaxpr: Jaxpr) -> Callable[..., list[Any]]:
        """``jaxpr`` as a function that `jax.vmap` takes."""
        jaxpr = vectorizable(jaxpr, self.name, self.size)
        return lambda *args: jax.core.eval_jaxpr(jaxpr, (), *args)

    def vectorize_function(
        self, fun: Callable[..., Any], in_dims: Sequence[int | None], out_dims: Any
    ) -> Callable[..., Any]:
        """`jax.vmap` of ``fun``; all operands may be unmapped.

        JAX's own batching rules must know its collectives over this axis.
        """
        vmap = functools.partial(
            jax.vmap, out_axes=out_dims, axis_name=self.name, axis_size=self.size
        )
        if any(dim is not None for dim in in_dims):
            return vmap(fun, in_axes=tuple(in_dims))
        # jax.vmap requires a mapped operand.
        mapped = vmap(lambda _, *args: fun(*args), in_axes=(0, *in_dims))
        # In `jax.export` the size may be a symbol, which NumPy does not know.
        zeros = np.zeros if isinstance(self.size, int) else jnp.zeros
        return lambda *args: mapped(zeros(self.size, bool), *args)


@per_jaxpr
def batched_results(
    jaxpr: Jaxpr, batch: Batch, dims: tuple[int | None, ...]
) -> tuple[bool, ...]:
    """Which results of ``jaxpr`` are batched, if operands are at ``dims``."""
    avals = [var.aval for var in jaxpr.invars]
    return batched_results_of(batch.function(jaxpr), avals, batch, dims)


def batch_observer(tell: Callable[[tuple[bool, ...]], None]) -> Callable[..., Any]:
    """An identity. Under `jax.vmap` it tells which operands are batched."""

    # The batching rule of a custom_vmap is told.
    @jax.custom_batching.custom_vmap
    def observe(*operands: Value) -> Any:
        return operands

    @observe.def_vmap
    def observe_vmap(_size: int, in_batched: Any, *operands: Value) -> Any:
        tell(tuple(in_batched))
        return operands, tuple(in_batched)

    return cast(Callable[..., Any], observe)


def batched_results_of(
    fun: Callable[..., Sequence[Any]],
    avals: Sequence[Any],
    batch: Batch,
    dims: Sequence[int | None],
) -> tuple[bool, ...]:
    """Which results of ``fun`` are batched under `jax.vmap`.

    Args:
      fun: takes and returns flat values.
      avals: of its operands without the batch.
      batch, dims: the vmap's axis, and where each operand has it.
    """
    batched: tuple[bool, ...] = ()

    def tell(in_batched: tuple[bool, ...]) -> None:
        nonlocal batched
        batched = in_batched

    observe = batch_observer(tell)

    def observed(*args: Value) -> Any:
        nonlocal batched
        results = fun(*args)
        batched = (False,) * len(results)
        return observe(*results) if results else ()

    structs = []
    for aval, dim in zip(avals, dims, strict=True):
        shape = list(aval.shape)
        if dim is not None:
            shape.insert(dim, batch.size)
        structs.append(jax.ShapeDtypeStruct(shape, aval.dtype))
    with check_vma_off():
        jax.eval_shape(batch.vectorize_function(observed, dims, 0), *structs)
    return batched


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
