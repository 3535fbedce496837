"""Axes that run on devices because arrays are sharded.

Inputs and outputs are sharded, and intermediate values where a program uses
`jax.lax.with_sharding_constraint`.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from jax.sharding import NamedSharding

from shardmap.explaining.read.arrays import axis_sizes
from shardmap.explaining.read.vmaps import VmapAxis
from shardmap.explaining.report import ArrayLayout, Axis

Cuts = Sequence[dict[str, int]]
"""For each dimension of an array, the mesh axes that shard it and their sizes."""


class ShardedArgument(NamedTuple):
    """An argument that is sharded.

    Attributes:
      axes: the mesh axes that shard it.
      comes_back: whether a result is like it, as of weights that are trained.
    """

    axes: frozenset[str]
    comes_back: bool


def sharded_arguments(
    arrays: Sequence[ArrayLayout], cuts: Iterable[Cuts]
) -> dict[str, ShardedArgument]:
    """The arguments that are sharded, by key path."""
    results = {(a.shape, a.dtype, a.layout) for a in arrays if a.role == "output"}
    return {
        array.path: ShardedArgument(
            frozenset(itertools.chain(*those)),
            (array.shape, array.dtype, array.layout) in results,
        )
        for array, those in zip(arrays, cuts, strict=True)
        if array.role == "input" and any(those)
    }


def with_devices(
    axes: Sequence[Axis],
    vmaps: Sequence[VmapAxis],
    cuts: Sequence[Cuts],
    asked: Collection[NamedSharding],
    mesh: Sequence[tuple[str, int]],
) -> tuple[Axis, ...]:
    """Combines the axes of a program with the shardings of arrays.

    A vmap over a sharded dimension runs on the devices that have the shards. Other mesh
    axes with a sharded dimension, or along which a program asks for shards, are axes of
    their own, in the order of the mesh.
    """
    used = {axis.name for axis in axes if axis.kind in ("shard_map", "pmap")}
    batched = []
    for axis, over in vmaps:
        sizes = next(
            filter(None, (dict(enumerate(cuts[k])).get(d) for k, d in over)), {}
        )
        used.update(sizes)
        # Otherwise the partitioner decides what a device has of constrained values.
        if sizes or not asked:
            count = math.prod(sizes.values())
            each = -(-axis.vectorised // count)
            batched.append(dataclasses.replace(axis, devices=count, vectorised=each))
    sizes = {}
    # An spmap has the mesh axes.
    if not any(axis.kind == "spmap" for axis in axes):
        for cut in itertools.chain(*cuts, *map(axis_sizes, asked)):
            sizes = cut | sizes  # Two meshes may name different axes alike.
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
    mesh: Sequence[tuple[str, int]], axes: Sequence[Axis], cuts: Iterable[Cuts]
) -> list[tuple[str, int]]:
    """The mesh axes along which nothing is sharded or mapped, with their sizes."""
    if any(axis.kind == "spmap" for axis in axes):
        return []
    used = {axis.name for axis in axes if axis.devices > 1}
    used.update(*itertools.chain(*cuts))
    return [(name, size) for name, size in mesh if size > 1 and name not in used]
