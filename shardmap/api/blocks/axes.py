"""Which mesh axes cut which dimensions, and arrays reshaped to have them in front."""

import functools
import math
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardmap._jax.types import AnyMesh, Aval, PyTree, Value, is_typed, with_shape
from shardmap.map.primitives import typed
from shardmap.units import shown

Axes = dict[str, int]
"""Mesh axis names, each with the array dimension that it cuts."""


def is_axes(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and type(dimension) is int
        for name, dimension in value.items()
    )


def check_names(parameter: str, axes: PyTree, mesh: AnyMesh) -> None:
    """Refuses what are no axes of ``mesh``, in a pytree that was given.

    Raises:
      TypeError: leaves of other types.
      ValueError: axes that the mesh does not have, or dimensions below 0.
    """
    for leaf in jax.tree.leaves(axes, is_leaf=is_axes):
        if not is_axes(leaf):
            raise TypeError(
                f"mesh_map {parameter} must be dicts of mesh axis names and "
                f"dimensions, or (nested) containers of them, but got {shown(leaf)} in "
                f"{shown(axes)}."
            )
        if unknown := set(leaf) - set(mesh.axis_names):
            raise ValueError(
                f"mesh_map {parameter} names {sorted(unknown)}, but the mesh has the "
                f"axes {mesh.axis_names}."
            )
        if min(leaf.values(), default=0) < 0:
            raise ValueError(
                f"mesh_map {parameter} has a dimension below 0 in {leaf}; count from "
                "the front."
            )


def dimensions_of(axes: Axes, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes that cut each dimension, major to minor."""
    return [
        tuple(name for name, where in axes.items() if where == dimension)
        for dimension in range(ndim)
    ]


def reshaped(
    fun: Callable[..., Value], array: Value, axes: Axes, *rest: Hashable
) -> Value:
    """``fun(array, axes, *rest)``, also for what has a sharding in its type.

    Of an array with values only `jax.jit` makes one without.
    """
    if not axes:
        return array
    if not is_typed(jax.typeof(array)):
        return fun(array, axes, *rest)
    return _in_jit(fun, array, tuple(axes.items()), rest)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _in_jit(
    fun: Callable[..., Value],
    array: Value,
    axes: Sequence[tuple[str, int]],
    rest: Sequence[Hashable],
) -> Value:
    return fun(typed.untyped(array), dict(axes), *rest)


def to_blocks(array: Value, axes: Axes, levels: Sequence[str], mesh: AnyMesh) -> Value:
    """The array with the mesh axes that cut it in front, in the order of ``levels``."""
    shape: list[int] = []
    where: dict[str, int] = {}
    for size, names in zip(array.shape, dimensions_of(axes, array.ndim), strict=True):
        for name in names:
            where[name] = len(shape)
            shape.append(mesh.shape[name])
        shape.append(size // math.prod(mesh.shape[name] for name in names))
    front = [where[name] for name in levels if name in where]
    return jnp.moveaxis(array.reshape(shape), front, range(len(front)))


def from_blocks(array: Value, axes: Axes, levels: Sequence[str]) -> Value:
    """What `to_blocks` did, undone."""
    front = [name for name in levels if name in axes]
    dimensions = dimensions_of(axes, array.ndim - len(front))
    where: dict[str, int] = {}
    position = 0
    for names in dimensions:
        for name in names:
            where[name], position = position, position + 1
        position += 1
    array = jnp.moveaxis(array, range(len(front)), [where[name] for name in front])
    sizes = iter(array.shape)
    return array.reshape([math.prod(next(sizes) for _ in (*n, 0)) for n in dimensions])


def devices_of(mesh: AnyMesh) -> list[jax.Device]:
    """The devices of a mesh; none of an abstract one."""
    return list(mesh.devices.flat) if isinstance(mesh, Mesh) else []


def sharding_of(
    axes: Axes, mesh: AnyMesh, memory_kind: str | None = None
) -> NamedSharding:
    """The sharding of an array with these axes."""
    ndim = max(axes.values(), default=-1) + 1
    entries = [names or None for names in dimensions_of(axes, ndim)]
    return NamedSharding(mesh, PartitionSpec(*entries), memory_kind=memory_kind)


def scaled(
    mesh: AnyMesh, scale: Callable[[int, int], int], aval: Aval, axes: Axes
) -> Aval:
    """The kind of a block of an array, or of the array of such blocks."""
    shape = [
        scale(size, math.prod(mesh.shape[name] for name in names))
        for size, names in zip(aval.shape, dimensions_of(axes, aval.ndim), strict=True)
    ]
    return with_shape(aval, shape)
