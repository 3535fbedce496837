"""Axes that run on devices because arrays are sharded.

Inputs and outputs are sharded, and intermediate values where a program uses
`jax.lax.with_sharding_constraint`.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

from shardmap.explaining.read.constraints import LayoutConstraint, axis_sizes
from shardmap.explaining.read.visitor import Facts
from shardmap.explaining.report import MAPS, ArrayLayout, Axis, argument_of

_CHANGE = (
    "The arrays' shardings say how many devices: jax.device_put, in_shardings= or "
    "jax.lax.with_sharding_constraint."
)
_MOST_NAMED = 3
"""If more dimensions than these are sharded, only the arguments are named."""


class ShardedDimension(NamedTuple):
    """A sharded dimension of an array.

    Attributes:
      path: the key path of the array.
      dimension, length: the dimension.
      sizes: its mesh axes and their sizes.
      is_result: whether the array is an output.
    """

    path: str
    dimension: int
    length: int
    sizes: dict[str, int]
    is_result: bool = False

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
        for cut in _cuts(array.path, array.shape, layout, array.role == "output")
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


def constrained(constraints: Sequence[LayoutConstraint]) -> list[ShardedDimension]:
    """The dimensions that the constraints of a program shard."""
    dimensions: list[ShardedDimension] = []
    for each in constraints:
        path = "a value" + (f" at {each.source}" if each.source else "")
        dimensions += _cuts(path, each.whole, each.sharding)
    return dimensions


def _cuts(
    path: str, shape: tuple[int, ...], layout: NamedSharding, is_result: bool = False
) -> Iterator[ShardedDimension]:
    for dimension, all_sizes in enumerate(axis_sizes(layout)):
        sizes = {name: size for name, size in all_sizes.items() if size > 1}
        if sizes:
            length = shape[dimension]
            yield ShardedDimension(path, dimension, length, sizes, is_result)


def with_devices(
    facts: Facts,
    arrays: Sequence[ArrayLayout],
    cuts: Sequence[ShardedDimension],
    asked: Sequence[ShardedDimension],
    mesh: Sequence[tuple[str, int]] = (),
) -> tuple[Axis, ...]:
    """Combines the axes of a program with the shardings of arrays.

    A vmap over a sharded dimension runs on the devices that have the shards. Other mesh
    axes with a sharded dimension are axes of their own.

    Args:
      facts: the axes of the program, and the arguments that they map over.
      arrays: inputs and outputs.
      cuts: the sharded dimensions of inputs and outputs.
      asked: the sharded dimensions of the layout constraints.
      mesh: the names and sizes of the mesh axes, for the order.
    """
    axes, over = list(facts.axes), {}
    for number, those in facts.over.items():
        over[number] = {(arrays[k].path, dimension) for k, dimension in those}
        paths = tuple(arrays[k].path for k in sorted({k for k, _ in those}))
        axes[number] = dataclasses.replace(axes[number], over=paths)
    used = {axis.name for axis in axes if axis.kind in ("shard_map", "pmap")}
    crossed = []
    for number, axis in enumerate(axes):
        if axis.kind == "vmap" and not _is_of_map(axes, number):
            arguments = over.get(number, set())
            along = [c for c in cuts if (c.path, c.dimension) in arguments]
            # The vmap may be over other arrays of that length.
            others = asked if arguments else [*cuts, *asked]
            if along:
                used.update(along[0].sizes)
                axis = _on_devices(axis, along[0])
            elif any(axis.size in (None, cut.length) for cut in others):
                running = "one batched operation: on how many devices cannot be told"
                axis = dataclasses.replace(axis, vectorised=None, running=running)
        crossed.append(axis)
    # An spmap has the mesh axes.
    if any(axis.kind == "spmap" for axis in axes):
        return tuple(crossed)
    left: dict[str, list[ShardedDimension]] = {}
    for cut in (*cuts, *asked):
        for name in cut.sizes:
            if name not in used:
                left.setdefault(name, []).append(cut)
    names = [name for name, _ in mesh if name in left]
    names += [name for name in left if name not in names]
    of_devices = [_mesh_axis(name, left[name]) for name in names]
    return (
        *of_devices,
        *(
            dataclasses.replace(
                axis,
                inside=None if axis.inside is None else axis.inside + len(of_devices),
            )
            for axis in crossed
        ),
    )


def _is_of_map(axes: Sequence[Axis], number: int) -> bool:
    """Whether an axis is around or inside a map, which then has the devices."""
    lines = [{place, *_around(axes, axis)} for place, axis in enumerate(axes)]
    return any(
        axis.kind in MAPS and (number in lines[place] or place in lines[number])
        for place, axis in enumerate(axes)
    )


def _around(axes: Sequence[Axis], axis: Axis) -> Iterator[int]:
    while axis.inside is not None:
        yield axis.inside
        axis = axes[axis.inside]


def _on_devices(axis: Axis, cut: ShardedDimension) -> Axis:
    assert axis.size is not None
    each = -(-axis.size // cut.shards)
    along = " and ".join(map(repr, cut.sizes))
    running = (
        f"on {cut.shards:,} devices at once, along mesh axis {along}, as {cut.path} is "
        f"sharded; {each:,} elements are one batched operation"
    )
    return dataclasses.replace(
        axis, devices=cut.shards, vectorised=each, running=running, change=_CHANGE
    )


def _mesh_axis(name: str, cuts: Sequence[ShardedDimension]) -> Axis:
    size = cuts[0].sizes[name]
    # Results are there after the inputs.
    cuts = [cut for cut in cuts if not cut.is_result] or cuts
    what = ", ".join(f"dimension {cut.dimension} of {cut.path}" for cut in cuts)
    if len(cuts) > _MOST_NAMED:
        paths = dict.fromkeys(cut.path for cut in cuts)
        whole = dict.fromkeys(map(argument_of, paths))
        what = f"{len(paths):,} arrays of {', '.join(whole)}"
    return Axis(
        name=name,
        size=size,
        kind="sharding",
        devices=size,
        vectorised=1,
        steps=1,
        depth=0,
        inside=None,
        source=None,
        running=f"on {size:,} devices at once: {what}",
        change=_CHANGE,
    )


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
