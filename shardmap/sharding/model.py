"""What a `ShardingSpec` says, and which part of an array that is for each device.

Pure Python and NumPy: no device is looked at, and only `indices` does work that grows
with the number of devices. The top of spec.py has a worked example.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from shardmap.sharding.entries import (
    AvalDimSharding,
    Chunked,
    MeshDimAssignment,
    NoSharding,
    Replicated,
    ShardedAxis,
    Unstacked,
    integer,
)

Index: TypeAlias = tuple[int | slice, ...]

SpecParts: TypeAlias = tuple[Sequence[AvalDimSharding], Sequence[MeshDimAssignment]]
"""What a `ShardingSpec` is built from: its sharding and its mesh_mapping."""


def _chunks(entry: Chunked | Unstacked | None) -> tuple[int, ...]:
    """The sizes of the sharded axes of one array dimension."""
    if entry is None:
        return ()
    return entry.chunks if isinstance(entry, Chunked) else (entry.size,)


def _stored(entry: Any) -> Chunked | Unstacked | None:
    if entry is None or isinstance(entry, NoSharding):
        return None
    if isinstance(entry, Chunked | Unstacked):
        return entry
    raise TypeError(
        "an entry of sharding must be Chunked, Unstacked, NoSharding or None, got "
        f"{entry!r}"
    )


@dataclass(frozen=True, repr=False, init=False, slots=True)
class SpecModel:
    """The state of a `ShardingSpec`, what it means for shapes, and its indices.

    Attributes:
      sharding: one `Chunked`, `Unstacked` or None per array dimension.
      mesh_mapping: one `ShardedAxis` or `Replicated` per mesh dimension.
    """

    sharding: tuple[Chunked | Unstacked | None, ...]
    mesh_mapping: tuple[MeshDimAssignment, ...]

    def __init__(
        self,
        sharding: Iterable[AvalDimSharding],
        mesh_mapping: Iterable[MeshDimAssignment],
    ) -> None:
        object.__setattr__(
            self, "sharding", tuple(_stored(entry) for entry in sharding)
        )
        object.__setattr__(self, "mesh_mapping", tuple(mesh_mapping))
        for assignment in self.mesh_mapping:
            if not isinstance(assignment, ShardedAxis | Replicated):
                raise TypeError(
                    "an entry of mesh_mapping must be ShardedAxis or Replicated, got "
                    f"{assignment!r}"
                )
        self._check_each_axis_is_used_once()

    def _check_each_axis_is_used_once(self) -> None:
        sizes = self.sharded_axis_sizes
        users: dict[int, list[int]] = {axis: [] for axis in range(len(sizes))}
        for dimension, assignment in enumerate(self.mesh_mapping):
            if isinstance(assignment, ShardedAxis):
                users.setdefault(assignment.axis, []).append(dimension)
        problems = []
        for axis, dimensions in users.items():
            if axis >= len(sizes):
                problems.append(
                    f"mesh dimension {dimensions[0]} is ShardedAxis({axis}), but there "
                    f"are only {len(sizes)} sharded axes, counted from 0"
                )
            elif not dimensions:
                problems.append(
                    f"sharded axis {axis} of size {sizes[axis]} is used by no mesh "
                    f"dimension: add ShardedAxis({axis}) to mesh_mapping"
                )
            elif len(dimensions) > 1:
                problems.append(
                    f"sharded axis {axis} of size {sizes[axis]} is used by mesh "
                    f"dimensions {dimensions}: use it once, and Replicated for copies"
                )
        if problems:
            raise ValueError(f"{self!r} is no layout: {'; '.join(problems)}")

    def __repr__(self) -> str:
        return f"ShardingSpec({self.sharding!r}, {self.mesh_mapping!r})"

    @property
    def sharded_axis_sizes(self) -> tuple[int, ...]:
        """The sizes of the axes that `ShardedAxis` counts.

        >>> from shardmap.sharding.spec import ShardingSpec
        >>> spec = ShardingSpec((Chunked((2, 3)),), [ShardedAxis(1), ShardedAxis(0)])
        >>> spec.sharded_axis_sizes
        (2, 3)
        """
        return tuple(size for entry in self.sharding for size in _chunks(entry))

    @property
    def tile_counts(self) -> tuple[int, ...]:
        """The number of shards of each array dimension, 1 where it is not cut.

        >>> from shardmap.sharding.spec import ShardingSpec
        >>> spec = ShardingSpec((Chunked((2, 3)),), [ShardedAxis(1), ShardedAxis(0)])
        >>> spec.tile_counts
        (6,)
        """
        return tuple(math.prod(_chunks(entry)) for entry in self.sharding)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The shape of the device mesh: one size per entry of `mesh_mapping`."""
        sizes = self.sharded_axis_sizes
        return tuple(
            sizes[assignment.axis]
            if isinstance(assignment, ShardedAxis)
            else assignment.replicas
            for assignment in self.mesh_mapping
        )

    @property
    def num_shards(self) -> int:
        """The number of devices, copies counted."""
        return math.prod(self.mesh_shape)

    def _piece_sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The size of a shard in each dimension; ValueError if `shape` does not fit."""
        shape = tuple(integer(size, "a dimension of the shape") for size in shape)
        if len(shape) != len(self.sharding):
            raise ValueError(
                f"shape {shape} has {len(shape)} dimensions, but {self!r} has "
                f"{len(self.sharding)} entries in sharding: give one per dimension, "
                "None where it is not cut"
            )
        problems = []
        for dimension, (size, entry, shards) in enumerate(
            zip(shape, self.sharding, self.tile_counts, strict=True)
        ):
            if size < 0:
                problems.append(f"dimension {dimension} has the negative size {size}")
            elif isinstance(entry, Unstacked) and size != entry.size:
                problems.append(
                    f"dimension {dimension} has size {size}, but its entry is "
                    f"{entry!r}: write Unstacked({size}), or Chunked for shards longer "
                    "than 1"
                )
            elif size % shards:
                problems.append(
                    f"dimension {dimension} has size {size}, which {entry!r} does not "
                    f"divide into {shards} equal shards: pad it to "
                    f"{-(-size // shards) * shards} or cut it into fewer shards"
                )
        if problems:
            raise ValueError(
                f"shape {shape} does not fit {self!r}: {'; '.join(problems)}"
            )
        return tuple(
            size // shards for size, shards in zip(shape, self.tile_counts, strict=True)
        )

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one shard of an array of shape `shape`.

        `Unstacked` dimensions are left out: inside the map they do not exist.

        Raises:
          ValueError: `shape` has another rank, a dimension is not divisible, or an
            `Unstacked` has another size.

        >>> from shardmap.sharding.spec import ShardingSpec
        >>> ShardingSpec((Unstacked(4), None), (ShardedAxis(0),)).shard_shape((4, 8))
        (8,)
        """
        return tuple(
            size
            for size, entry in zip(self._piece_sizes(shape), self.sharding, strict=True)
            if not isinstance(entry, Unstacked)
        )

    def indices(self, shape: Sequence[int]) -> np.ndarray:
        """Which part of an array of shape `shape` each device holds.

        Args:
          shape: the shape of the whole array.

        Returns:
          An object array of shape `mesh_shape`. Each entry is a tuple that indexes the
          array, with one item per dimension: `slice(None)` where it is not cut,
          `slice(start, stop)` for `Chunked`, an int for `Unstacked`.

        Raises:
          ValueError: as `shard_shape`.

        >>> from shardmap.sharding.spec import ShardingSpec
        >>> mapping = (ShardedAxis(1), ShardedAxis(0))
        >>> spec = ShardingSpec((Unstacked(2), Chunked(2)), mapping)
        >>> spec.indices((2, 4))[1, 0]
        (0, slice(2, 4, None))
        """
        shards: list[list[int | slice]] = []
        for entry, size, count in zip(
            self.sharding, self._piece_sizes(shape), self.tile_counts, strict=True
        ):
            if entry is None:
                shards.append([slice(None)])
            elif isinstance(entry, Unstacked):
                shards.append(list(range(count)))
            else:
                shards.append([slice(i * size, (i + 1) * size) for i in range(count)])
        tiles = np.fromiter(
            itertools.product(*shards), dtype=object, count=math.prod(self.tile_counts)
        ).reshape(self.sharded_axis_sizes)
        # From the order of the array's dimensions to the order of the mesh, where a
        # replicated dimension is first one of size 1 and then repeats what it holds.
        order = [a.axis for a in self.mesh_mapping if isinstance(a, ShardedAxis)]
        copied = [
            d for d, a in enumerate(self.mesh_mapping) if isinstance(a, Replicated)
        ]
        on_mesh = np.expand_dims(tiles.transpose(order), tuple(copied))
        return np.broadcast_to(on_mesh, self.mesh_shape).copy()

    def check_stacked(self, wanted: str) -> None:
        """Raises ValueError if a dimension is `Unstacked`: `wanted` cannot say it."""
        for dimension, entry in enumerate(self.sharding):
            if isinstance(entry, Unstacked):
                raise ValueError(
                    f"{self!r} has no {wanted}: dimension {dimension} is {entry!r}, "
                    "which does not exist inside the map. spec.stacked() is the same "
                    "layout as seen from outside"
                )
