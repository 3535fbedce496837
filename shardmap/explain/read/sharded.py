"""The axes that run on devices because arrays are on them."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

from shardmap.explain.report import ArrayLayout, Axis, Remark

_OF_MAPS = ("spmap", "mesh_map", "shard_map", "pmap")
_CHANGE = (
    "The arrays' shardings say how many devices: jax.device_put, in_shardings= or "
    "jax.lax.with_sharding_constraint."
)


class Cut(NamedTuple):
    """A dimension of an array that is cut.

    Attributes:
      path: the array's.
      dimension, length: the dimension.
      names: the mesh axes that cut it.
      shards: into how many shards.
      sizes: how many devices there are along each of the mesh axes.
    """

    path: str
    dimension: int
    length: int
    names: tuple[str, ...]
    shards: int
    sizes: tuple[int, ...]


def cuts_of(arrays: Sequence[ArrayLayout], layouts: Sequence[Any]) -> list[Cut]:
    """The cut dimensions of inputs and outputs.

    Args:
      arrays: inputs and outputs.
      layouts: the sharding of each; others than `NamedSharding` have no names.
    """
    return [
        cut
        for array, layout in zip(arrays, layouts, strict=True)
        if isinstance(layout, NamedSharding)
        for cut in _cuts(array, layout)
    ]


def _cuts(array: ArrayLayout, layout: NamedSharding) -> Iterator[Cut]:
    for dimension, entry in enumerate(layout.spec.partitions):
        names = entry if isinstance(entry, tuple) else (entry,)
        sizes = {
            name: layout.mesh.shape[name]
            for name in names
            if isinstance(name, str) and layout.mesh.shape[name] > 1
        }
        shards = 1
        for size in sizes.values():
            shards *= size
        if shards > 1:
            length = array.shape[dimension]
            sizes_of = tuple(sizes.values())
            yield Cut(array.path, dimension, length, tuple(sizes), shards, sizes_of)


def with_devices(axes: Sequence[Axis], cuts: Sequence[Cut]) -> tuple[Axis, ...]:
    """The axes, crossed with how arrays are sharded.

    A vmap over a dimension that is cut runs on the devices that have the shards. Mesh
    axes that cut something else are axes of their own.

    Args:
      axes: those of the program.
      cuts: the cut dimensions.
    """
    if any(axis.kind in _OF_MAPS for axis in axes):
        return tuple(axes)
    used: set[str] = set()
    crossed = []
    for axis in axes:
        cut = _cut_of(axis, cuts, used) if axis.kind == "vmap" else None
        if cut is not None and axis.size is not None:
            used.update(cut.names)
            axis = _on_devices(axis, cut)
        crossed.append(axis)
    left: dict[str, list[Cut]] = {}
    for cut in cuts:
        for name in cut.names:
            if name not in used:
                left.setdefault(name, []).append(cut)
    own = [_mesh_axis(name, those) for name, those in left.items()]
    return (
        *own,
        *(
            dataclasses.replace(
                axis, inside=None if axis.inside is None else axis.inside + len(own)
            )
            for axis in crossed
        ),
    )


def _cut_of(axis: Axis, cuts: Sequence[Cut], used: set[str]) -> Cut | None:
    fitting = [
        c for c in cuts if c.length == axis.size and not used.intersection(c.names)
    ]
    # Two ways to cut the same length: it cannot be told which one it is.
    return fitting[0] if len({cut.names for cut in fitting}) == 1 else None


def _on_devices(axis: Axis, cut: Cut) -> Axis:
    assert axis.size is not None
    each = -(-axis.size // cut.shards)
    names = " and ".join(map(repr, cut.names))
    running = (
        f"on {cut.shards:,} devices at once, along mesh axis {names}, as {cut.path} "
        f"is cut; {each:,} elements are one batched operation"
    )
    return dataclasses.replace(
        axis, devices=cut.shards, vectorised=each, running=running, change=_CHANGE
    )


def _mesh_axis(name: str, cuts: Sequence[Cut]) -> Axis:
    cut = cuts[0]
    size = cut.sizes[cut.names.index(name)]
    more = f", and {len(cuts) - 1:,} more" if len(cuts) > 1 else ""
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
        running=(
            f"on {size:,} devices at once, cut by the partitioner: dimension "
            f"{cut.dimension} of {cut.path}{more}"
        ),
        change=_CHANGE,
    )


def looped(axes: Sequence[Axis], cuts: Sequence[Cut]) -> list[Remark]:
    """Loops over a dimension that is cut: every device does all of their steps."""
    return [
        Remark(
            f"a loop of {axis.size:,} steps goes over dimension 0 of {cut.path}, which "
            f"is cut over {cut.shards:,} devices: each of them does all of the steps",
            "Each step needs the one before: cut another dimension, which a step can "
            "then do its part of."
            if axis.in_turn
            else "vmap over it, or spmap, with batch_size= to bound the memory: each "
            "device then does its own part.",
            axis.source,
        )
        for axis in axes
        if axis.kind == "loop" and axis.devices == 1 and axis.inside is None
        for cut in [c for c in cuts if (c.dimension, c.length) == (0, axis.size)][:1]
    ]
