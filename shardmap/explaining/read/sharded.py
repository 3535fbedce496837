"""Axes that run on devices because arrays are sharded.

Inputs and outputs are sharded, and intermediate values where a program uses
`jax.lax.with_sharding_constraint`.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

from shardmap.explaining.read.arrays import axis_sizes
from shardmap.explaining.read.vmaps import VmapAxis
from shardmap.explaining.report import ArrayLayout, Axis


class ShardedDimension(NamedTuple):
    """A sharded dimension of an array.

    Attributes:
      path: the key path of the array.
      dimension: the dimension.
      sizes: its mesh axes and their sizes.
    """

    path: str
    dimension: int
    sizes: dict[str, int]

    @property
    def shards(self) -> int:
        return math.prod(self.sizes.values())


def sharded_dimensions(
    arrays: Sequence[ArrayLayout], layouts: Sequence[Any]
) -> list[ShardedDimension]:
    """The dimensions of inputs and outputs that a `NamedSharding` shards.

    Args:
      arrays: inputs and outputs.
      layouts: the sharding of each.
    """
    return [
        cut
        for array, layout in zip(arrays, layouts, strict=True)
        if isinstance(layout, NamedSharding)
        for cut in _cuts(array.path, layout)
    ]


class ShardedArgument(NamedTuple):
    """An argument that is sharded.

    Attributes:
      axes: the mesh axes that shard it.
      comes_back: whether a result is like it, as of weights that are trained.
    """

    axes: frozenset[str]
    comes_back: bool


def sharded_arguments(
    arrays: Sequence[ArrayLayout], cuts: Sequence[ShardedDimension]
) -> dict[str, ShardedArgument]:
    """The arguments that are sharded, by key path."""
    results = {(a.shape, a.dtype, a.layout) for a in arrays if a.role == "output"}
    return {
        array.path: ShardedArgument(
            frozenset(name for cut in those for name in cut.sizes),
            (array.shape, array.dtype, array.layout) in results,
        )
        for array in arrays
        if array.role == "input"
        if (those := [cut for cut in cuts if cut.path == array.path])
    }


def _cuts(path: str, layout: NamedSharding) -> Iterator[ShardedDimension]:
    for dimension, sizes in enumerate(axis_sizes(layout)):
        if sizes:
            yield ShardedDimension(path, dimension, sizes)


def with_devices(
    axes: Sequence[Axis],
    vmaps: Sequence[VmapAxis],
    arrays: Sequence[ArrayLayout],
    cuts: Sequence[ShardedDimension],
    asked: Sequence[NamedSharding],
    mesh: Sequence[tuple[str, int]] = (),
) -> tuple[Axis, ...]:
    """Combines the axes of a program with the shardings of arrays.

    A vmap over a sharded dimension runs on the devices that have the shards. Other mesh
    axes with a sharded dimension are axes of their own.

    Args:
      axes: those of loops and maps.
      vmaps: those over arguments.
      arrays: inputs and outputs.
      cuts: the sharded dimensions of inputs and outputs.
      asked: the layouts that the program asks for.
      mesh: the names and sizes of the mesh axes, for the order.
    """
    used = {axis.name for axis in axes if axis.kind in ("shard_map", "pmap")}
    batched = []
    for axis, over in vmaps:
        dimensions = [(arrays[k].path, dimension) for k, dimension in over]
        along = [cut for cut in cuts if (cut.path, cut.dimension) in dimensions]
        if along:
            used.update(along[0].sizes)
            count = along[0].shards
            each = -(-axis.vectorised // count)
            axis = dataclasses.replace(axis, devices=count, vectorised=each)
        # Otherwise the partitioner decides what a device has of constrained values.
        if along or not asked:
            batched.append(axis)
    sizes: dict[str, int] = {}
    # An spmap has the mesh axes.
    if not any(axis.kind == "spmap" for axis in axes):
        of_values = [cut for each in asked for cut in _cuts("", each)]
        for cut in (*cuts, *of_values):
            sizes = cut.sizes | sizes  # Two meshes may name different axes alike.
    names = [name for name, _ in mesh if name in sizes]
    names += [name for name in sizes if name not in names]
    of_devices = [
        Axis(name, sizes[name], "sharding", sizes[name], 1, 1, 0, None, None)
        for name in names
        if name not in used
    ]
    before = (*of_devices, *batched)
    moved = [
        dataclasses.replace(
            axis, inside=None if axis.inside is None else axis.inside + len(before)
        )
        for axis in axes
    ]
    return (*before, *moved)


def idle_mesh_axes(
    mesh: Sequence[tuple[str, int]],
    axes: Sequence[Axis],
    cuts: Sequence[ShardedDimension],
) -> list[tuple[str, int]]:
    """The mesh axes along which nothing is sharded or mapped, with their sizes."""
    if any(axis.kind == "spmap" for axis in axes):
        return []
    used = {axis.name for axis in axes if axis.devices > 1}
    used.update(name for cut in cuts for name in cut.sizes)
    return [(name, size) for name, size in mesh if size > 1 and name not in used]
