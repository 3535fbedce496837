"""The sharding model: which piece of an array lies on which device.

A `ShardingSpec` answers two questions. How is each dimension of the array cut
(`sharding`, one entry per array dimension)? And how are the pieces laid on a mesh of
devices (`mesh_mapping`, one entry per mesh dimension)? A worked example, an array of
shape (4, 8) on six devices:

    spec = ShardingSpec(
        sharding=(None, Chunked((2,))),     rows stay whole, columns are cut in 2
        mesh_mapping=(Replicated(3), ShardedAxis(0)),
    )

    spec.mesh_shape == (3, 2)
    spec.indices((4, 8)) ==                 one row per copy, one column per half
        [[(:, 0:4), (:, 4:8)],
         [(:, 0:4), (:, 4:8)],
         [(:, 0:4), (:, 4:8)]]

Devices are numbered row-major over the mesh: the last mesh dimension moves fastest, so
device 1 holds `(:, 4:8)`. Copies lie along the `Replicated` mesh dimensions, and their
place in the mapping decides which devices hold the same: here 0, 2 and 4 do. With the
mapping `(ShardedAxis(0), Replicated(3))` copies are neighbours: devices 0, 1 and 2.

`ShardedAxis(k)` counts *sharded axes*: each number in a `Chunked` and each `Unstacked`
is one, in the order of the array's dimensions, and dimensions that are not cut are
passed over. In the example the columns are sharded axis 0. `Chunked((2, 3))` is two
sharded axes, of sizes 2 and 3, whose 6 pieces are numbered row-major.

The idea, the names and the fields are those of `ShardingSpec` in JAX 0.2.6 to 0.9.
This file is the model alone: no device is looked at, and only `indices` does work that
grows with the number of devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

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

if TYPE_CHECKING:
    import jax
    from jax.sharding import NamedSharding, Sharding
    from jaxlib.xla_client import HloSharding, OpSharding

Index: TypeAlias = tuple[int | slice, ...]


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
class ShardingSpec:
    """How an array is cut, and how its pieces are laid on a mesh of devices.

    See the top of this file for a worked example. As `ShardingSpec` in JAX 0.4.

    Attributes:
      sharding: one `Chunked`, `Unstacked` or None per array dimension. `NoSharding()`
        is stored as None.
      mesh_mapping: one `ShardedAxis` or `Replicated` per mesh dimension.

    Raises:
      TypeError: an entry is of another type.
      ValueError: `mesh_mapping` does not use each sharded axis exactly once.

    >>> spec = ShardingSpec([Chunked(4), None], [ShardedAxis(0), Replicated(2)])
    >>> spec
    ShardingSpec((Chunked((4,)), None), (ShardedAxis(0), Replicated(2)))
    >>> spec.mesh_shape, spec.num_shards, spec.shard_shape((8, 3))
    ((4, 2), 8, (2, 3))
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

        >>> spec = ShardingSpec((Chunked((2, 3)),), [ShardedAxis(1), ShardedAxis(0)])
        >>> spec.sharded_axis_sizes
        (2, 3)
        """
        return tuple(size for entry in self.sharding for size in _chunks(entry))

    @property
    def tile_counts(self) -> tuple[int, ...]:
        """The number of pieces of each array dimension, 1 where it is not cut.

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
        """The size of a piece in each dimension; ValueError if `shape` does not fit."""
        shape = tuple(integer(size, "a dimension of the shape") for size in shape)
        if len(shape) != len(self.sharding):
            raise ValueError(
                f"shape {shape} has {len(shape)} dimensions, but {self!r} has "
                f"{len(self.sharding)} entries in sharding: give one per dimension, "
                "None where it is not cut"
            )
        problems = []
        for dimension, (size, entry, pieces) in enumerate(
            zip(shape, self.sharding, self.tile_counts, strict=True)
        ):
            if size < 0:
                problems.append(f"dimension {dimension} has the negative size {size}")
            elif isinstance(entry, Unstacked) and size != entry.size:
                problems.append(
                    f"dimension {dimension} has size {size}, but its entry is "
                    f"{entry!r}: write Unstacked({size}), or Chunked for pieces longer "
                    "than 1"
                )
            elif size % pieces:
                problems.append(
                    f"dimension {dimension} has size {size}, which {entry!r} does not "
                    f"divide into {pieces} equal pieces: pad it to "
                    f"{-(-size // pieces) * pieces} or cut it into fewer pieces"
                )
        if problems:
            raise ValueError(
                f"shape {shape} does not fit {self!r}: {'; '.join(problems)}"
            )
        return tuple(
            size // pieces for size, pieces in zip(shape, self.tile_counts, strict=True)
        )

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one piece of an array of shape `shape`.

        `Unstacked` dimensions are left out: inside the map they do not exist.

        Raises:
          ValueError: `shape` has another rank, a dimension is not divisible, or an
            `Unstacked` has another size.

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

        >>> mapping = (ShardedAxis(1), ShardedAxis(0))
        >>> spec = ShardingSpec((Unstacked(2), Chunked(2)), mapping)
        >>> spec.indices((2, 4))[1, 0]
        (0, slice(2, 4, None))
        """
        pieces: list[list[int | slice]] = []
        for entry, size, count in zip(
            self.sharding, self._piece_sizes(shape), self.tile_counts, strict=True
        ):
            if entry is None:
                pieces.append([slice(None)])
            elif isinstance(entry, Unstacked):
                pieces.append(list(range(count)))
            else:
                pieces.append([slice(i * size, (i + 1) * size) for i in range(count)])
        tiles = np.fromiter(
            itertools.product(*pieces), dtype=object, count=math.prod(self.tile_counts)
        ).reshape(self.sharded_axis_sizes)
        # From the order of the array's dimensions to the order of the mesh, where a
        # replicated dimension is first one of size 1 and then repeats what it holds.
        order = [a.axis for a in self.mesh_mapping if isinstance(a, ShardedAxis)]
        copied = [
            d for d, a in enumerate(self.mesh_mapping) if isinstance(a, Replicated)
        ]
        on_mesh = np.expand_dims(tiles.transpose(order), tuple(copied))
        return np.broadcast_to(on_mesh, self.mesh_shape).copy()

    def stacked(self) -> ShardingSpec:
        """The same layout seen from outside: `Unstacked(n)` becomes `Chunked((n,))`.

        >>> ShardingSpec((Unstacked(4), None), (ShardedAxis(0),)).stacked()
        ShardingSpec((Chunked((4,)), None), (ShardedAxis(0),))
        """
        sharding = [
            Chunked(entry.size) if isinstance(entry, Unstacked) else entry
            for entry in self.sharding
        ]
        return ShardingSpec(sharding, self.mesh_mapping)

    def check_stacked(self, wanted: str) -> None:
        """Raises ValueError if a dimension is `Unstacked`: `wanted` cannot say it."""
        for dimension, entry in enumerate(self.sharding):
            if isinstance(entry, Unstacked):
                raise ValueError(
                    f"{self!r} has no {wanted}: dimension {dimension} is {entry!r}, "
                    "which does not exist inside the map. spec.stacked() is the same "
                    "layout as seen from outside"
                )

    def hlo_sharding(self) -> HloSharding:
        """The equal `HloSharding`, XLA's own form of this layout.

        Raises:
          ValueError: a dimension is `Unstacked`; use `spec.stacked()`.

        >>> spec = ShardingSpec((Chunked(4), None), (ShardedAxis(0), Replicated(2)))
        >>> spec.hlo_sharding()
        {devices=[4,1,2]<=[8] last_tile_dim_replicate}
        """
        from shardmap.sharding import proto

        return proto.hlo_sharding(self)

    def sharding_proto(self, *, tile_assignment_devices: bool = False) -> OpSharding:
        """The equal `OpSharding` proto, in the compact form that lists no devices.

        Args:
          tile_assignment_devices: list the devices in the proto's field of this name,
            as JAX did before there was the compact form. Like there, a `Chunked` or a
            `Replicated` of 1 counts: with any `Chunked` the type is OTHER. The compact
            form is JAX's of today, of type REPLICATED wherever there is one tile.

        Raises:
          ValueError: a dimension is `Unstacked`; use `spec.stacked()`.

        >>> ShardingSpec((None,), (Replicated(2),)).sharding_proto().type.name
        'REPLICATED'
        >>> spec = ShardingSpec((Chunked(2),), (Replicated(2), ShardedAxis(0)))
        >>> proto = spec.sharding_proto(tile_assignment_devices=True)
        >>> list(proto.tile_assignment_devices)
        [0, 2, 1, 3]
        """
        if tile_assignment_devices:
            from shardmap.sharding import proto

            return proto.listed_proto(self)
        return self.hlo_sharding().to_proto()

    def sdy(self, axis_names: Sequence[str] | None = None) -> str:
        """The layout as Shardy text: the mesh on one line, the sharding on the next.

        Args:
          axis_names: a name per mesh dimension, by default "axis0", "axis1", ...

        Raises:
          ValueError: a dimension is `Unstacked`, or there are not as many different
            names as mesh dimensions.

        >>> print(ShardingSpec((Chunked(4), None), [ShardedAxis(0)]).sdy(["x"]))
        sdy.mesh @mesh = <["x"=4]>
        #sdy.sharding<@mesh, [{"x"}, {}]>
        """
        from shardmap.sharding import proto

        return proto.sdy(self, axis_names)

    def named_sharding(
        self,
        devices: Sequence[jax.Device] | np.ndarray,
        axis_names: Sequence[str] | None = None,
    ) -> NamedSharding:
        """The equal `jax.sharding.NamedSharding` over `devices`.

        Args:
          devices: `num_shards` devices, flat (row-major over the mesh) or as an array.
          axis_names: a name per mesh dimension, by default "axis0", "axis1", ...

        Raises:
          ValueError: a dimension is `Unstacked`, the number of devices is wrong, or
            there are not as many different names as mesh dimensions.

        >>> import jax
        >>> spec = ShardingSpec((None, Chunked(1)), (ShardedAxis(0),))
        >>> tuple(spec.named_sharding(jax.devices()[:1], ["x"]).spec)
        (None, 'x')
        """
        from shardmap.sharding import named

        return named.named_sharding(self, devices, axis_names)

    @classmethod
    def from_proto(
        cls,
        proto: OpSharding | HloSharding,
        ndim: int | None = None,
        num_devices: int | None = None,
    ) -> ShardingSpec:
        """The spec of a proto: device k holds the same indices.

        Reads explicit device lists (V1) and the iota form (V2).

        Args:
          proto: an `OpSharding`, or an `HloSharding`.
          ndim: the rank of the array; needed for REPLICATED, which does not hold it.
          num_devices: the number of devices; needed for REPLICATED as well.

        Raises:
          TypeError: `proto` is neither.
          ValueError: no spec expresses the proto (MANUAL, MAXIMAL, TUPLE, an order of
            devices that is no mesh), or `ndim` or `num_devices` is missing or differs.

        >>> spec = ShardingSpec((Chunked(4), None), (Replicated(2), ShardedAxis(0)))
        >>> ShardingSpec.from_proto(spec.sharding_proto()) == spec
        True
        """
        from shardmap.sharding import proto as proto_module

        return proto_module.from_proto(proto, ndim, num_devices)

    @classmethod
    def from_named_sharding(cls, sharding: NamedSharding, ndim: int) -> ShardingSpec:
        """The spec of a `NamedSharding` of an array of rank `ndim`.

        Each mesh axis is one mesh dimension, so `spec.indices(shape)` has the shape of
        `sharding.mesh.devices` and device k is the k-th of `mesh.devices.flat`.

        Raises:
          TypeError: `sharding` is no NamedSharding.
          ValueError: its PartitionSpec is longer than `ndim`, or has UNCONSTRAINED,
            unreduced or manual parts, which no spec expresses.

        >>> import jax
        >>> mesh = jax.sharding.AbstractMesh((4, 2), ("x", "y"))
        >>> sharding = jax.sharding.NamedSharding(
        ...     mesh, jax.sharding.PartitionSpec(("y", "x"))
        ... )
        >>> ShardingSpec.from_named_sharding(sharding, ndim=1)
        ShardingSpec((Chunked((2, 4)),), (ShardedAxis(1), ShardedAxis(0)))
        """
        from shardmap.sharding import named

        return named.from_named_sharding(sharding, ndim)

    @classmethod
    def from_sharding(cls, sharding: Sharding, shape: Sequence[int]) -> ShardingSpec:
        """The spec of any `jax.sharding.Sharding` of an array of shape `shape`.

        Device k is the k-th that `sharding.devices_indices_map(shape)` lists.

        Raises:
          TypeError: `sharding` is no Sharding.
          ValueError: no spec expresses the layout.

        >>> import jax
        >>> sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        >>> ShardingSpec.from_sharding(sharding, (4, 8))
        ShardingSpec((None, None), ())
        """
        from shardmap.sharding import named

        return named.from_sharding(sharding, shape)


def spec_to_indices(shape: Sequence[int], spec: ShardingSpec) -> tuple[Index, ...]:
    """`spec.indices(shape)`, flat: one entry per device, row-major over the mesh.

    As `spec_to_indices` in JAX 0.4.

    Raises:
      ValueError: as `ShardingSpec.shard_shape`.

    >>> spec = ShardingSpec((Chunked(2),), (ShardedAxis(0), Replicated(2)))
    >>> spec_to_indices((4,), spec)[:2]
    ((slice(0, 2, None),), (slice(0, 2, None),))
    """
    return tuple(spec.indices(shape).flat)
