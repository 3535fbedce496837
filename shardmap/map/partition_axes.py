"""Numbers of partitions for each dimension, as the axes of a mesh."""

import itertools
import math
import operator
from collections.abc import Collection
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from shardmap._jax.types import AnyMesh
from shardmap.sharding.conversions import cut_spec

Parts = tuple[int | None, ...]


AXIS_PREFIX = "_partitions"


def is_partition_axis(name: Any) -> bool:
    """Whether a mesh axis is one for partitions."""
    return isinstance(name, str) and name.startswith(AXIS_PREFIX)


def total_partitions(parts: Parts) -> int:
    """How many partitions there are."""
    return math.prod(count or 1 for count in parts)


def partition_axes(layouts: Collection[Parts], total: int) -> dict[str, int]:
    """The fewest mesh axes, and their sizes, that can say all of these parts.

    For (4, 1) alone it is one axis of 4; for (4, 1) and (2, 2) it is two of 2.
    """
    ends = {1, total}
    for parts in layouts:
        ends.update(itertools.accumulate((n or 1 for n in parts), operator.mul))
    steps = list(itertools.pairwise(sorted(ends)))
    if all(end % start == 0 for start, end in steps):
        sizes = [end // start for start, end in steps]
    else:
        sizes = prime_factors(total)
    return {f"{AXIS_PREFIX}{k}": size for k, size in enumerate(sizes)}


def prime_factors(number: int) -> list[int]:
    factors = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def partition_cuts(parts: Parts, mesh: AnyMesh) -> dict[int, tuple[str, ...]]:
    """Which dimensions are cut, and along which axes of the mesh.

    Raises:
      ValueError: the mesh has no axes for these parts.
    """
    unused = [name for name in mesh.axis_names if is_partition_axis(name)]
    cuts = {}
    for dimension, count in enumerate(parts):
        names: list[str] = []
        left = count or 1
        for name in unused:
            if left > 1 and left % mesh.shape[name] == 0:
                names.append(name)
                left //= mesh.shape[name]
        if left > 1:
            raise ValueError(
                f"parts {parts} need {total_partitions(parts)} devices for each "
                f"element, but the mesh around them, {dict(mesh.shape)}, has no axes "
                "for partitions. Leave mesh and mesh_axes out of the outermost spmap, "
                "so that it makes them, or cut along other axes of your own mesh with "
                "jax.lax.with_sharding_constraint; inside of jax.shard_map there are "
                "none."
            )
        if names:
            cuts[dimension] = tuple(names)
            unused = [name for name in unused if name not in names]
    return cuts


def partition_sharding(parts: Parts, mesh: AnyMesh) -> NamedSharding:
    """The sharding of a value with these parts."""
    cuts: dict[int, tuple[Any, ...]] = {
        dimension: (PartitionSpec.UNCONSTRAINED,) if count is None else ()
        for dimension, count in enumerate(parts)
    }
    return NamedSharding(mesh, cut_spec(cuts | partition_cuts(parts, mesh)))
