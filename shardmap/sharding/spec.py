"""The sharding model: which shard of an array is on which device.

A `ShardingSpec` has two fields: how each dimension of the array is sharded (`sharding`,
one entry for each array dimension), and how the shards are placed on a mesh of devices
(`mesh_mapping`, one entry for each mesh dimension). An example, an array of shape
(4, 8) on six devices:

    spec = ShardingSpec(
        sharding=(None, Chunked((2,))),     rows are not cut, columns are cut in 2
        mesh_mapping=(Replicated(3), ShardedAxis(0)),
    )

    spec.mesh_shape == (3, 2)
    spec.indices((4, 8)) ==                 one row per copy, one column per half
        [[(:, 0:4), (:, 4:8)],
         [(:, 0:4), (:, 4:8)],
         [(:, 0:4), (:, 4:8)]]

Devices are numbered row-major over the mesh: the last mesh dimension varies fastest, so
device 1 holds `(:, 4:8)`. Devices along `Replicated` mesh dimensions hold copies: here
0, 2 and 4 do. With the mapping `(ShardedAxis(0), Replicated(3))`, adjacent devices hold
copies: 0, 1 and 2.

`ShardedAxis(k)` counts *sharded axes*: each number in a `Chunked` and each `Unstacked`
is one, in the order of the array's dimensions; dimensions that are not sharded do not
count. In the example the columns are sharded axis 0. `Chunked((2, 3))` is two sharded
axes, of sizes 2 and 3, whose 6 shards are numbered row-major.

XLA calls shards *tiles*, numbered row-major over the array. The tile assignment is a
transposition of the mesh: its dimensions in the order of the array's, copies last.
Indices and protos follow from it.

The names and the fields are those of `ShardingSpec` in JAX 0.2.6 to 0.9. The model is
Python and NumPy; conversions.py reads layouts from the shardings of JAX and XLA.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from shardmap._jax.protos import HloSharding, OpSharding
from shardmap._jax.types import Aval, Value
from shardmap.sharding import conversions
from shardmap.sharding.conversions import cut_spec
from shardmap.sharding.mesh import check_devices, too_few_devices
from shardmap.units import integer_of, shown

Index: TypeAlias = tuple[int | slice, ...]

_set = object.__setattr__
_MOST_LISTED = 1024
"""A proto lists as many devices as this."""


def _positive(what: str, value: Any) -> int:
    return integer_of(what, value, 1, ": a mesh dimension has at least one device")


def _as_code(value: Any) -> str:
    """The code that builds an entry or a spec: its type, and its fields by position."""
    fields = [
        repr(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if field.repr
    ]
    return f"{type(value).__name__}({', '.join(fields)})"


# The entries: immutable, compared and hashed by type and value.


@dataclass(frozen=True, repr=False, init=False, slots=True)
class Chunked:
    """Entry of a `ShardingSpec`: the dimension is sharded into ``prod(chunks)`` parts.

    The parts are equal, and the dimension stays. (`chunked` is something else: it runs
    a function with less memory.)

    With several numbers, the dimension is sharded over several mesh dimensions, major
    to minor. A spec stores ``Chunked(())``, which does not shard, as None.

    Attributes:
      chunks: the numbers of chunks, stored as a tuple. A single int is accepted.

    Raises:
      TypeError: a number of chunks is not an integer.
      ValueError: one is below 1.

    >>> Chunked(2) == Chunked([2])
    True
    >>> Chunked((2, 4))
    Chunked((2, 4))
    """

    chunks: tuple[int, ...]

    def __init__(self, chunks: int | Iterable[int]) -> None:
        numbers = tuple(chunks) if isinstance(chunks, Iterable) else (chunks,)
        what = "a number of chunks in Chunked"
        _set(self, "chunks", tuple(_positive(what, n) for n in numbers))

    __repr__ = _as_code


@dataclass(frozen=True, repr=False, slots=True)
class Unstacked:
    """Entry of a `ShardingSpec`: one index of the dimension on each device.

    The dimension does not exist inside the map. `jax.pmap` sharded mapped axes so.

    Attributes:
      size: the size of the dimension.

    Raises:
      TypeError: `size` is not an integer.
      ValueError: `size` is below 1. Leave a dimension of size 0 unsharded.

    >>> ShardingSpec((Unstacked(2),), (ShardedAxis(0),)).indices((2,)).tolist()
    [(0,), (1,)]
    """

    size: int

    def __post_init__(self) -> None:
        _set(self, "size", _positive("the size in Unstacked", self.size))

    __repr__ = _as_code


@dataclass(frozen=True, slots=True)
class NoSharding:
    """Entry of a `ShardingSpec`: the dimension is not sharded. The same as None.

    >>> ShardingSpec((NoSharding(),), ())
    ShardingSpec((None,), ())
    """


@dataclass(frozen=True, repr=False, slots=True)
class ShardedAxis:
    """Entry of a mesh mapping: the mesh dimension shards one sharded axis.

    Attributes:
      axis: the number of the sharded axis, from 0. Only sharded dimensions count; each
        number in a `Chunked` counts as one.

    Raises:
      TypeError: `axis` is not an integer.
      ValueError: `axis` is negative.

    >>> ShardingSpec((None, Chunked(4)), (ShardedAxis(0),)).mesh_shape
    (4,)
    """

    axis: int

    def __post_init__(self) -> None:
        why = ": sharded axes are counted from the first"
        _set(self, "axis", integer_of("the axis in ShardedAxis", self.axis, 0, why))

    __repr__ = _as_code


@dataclass(frozen=True, repr=False, slots=True)
class Replicated:
    """Entry of a mesh mapping: devices along the mesh dimension hold copies.

    Attributes:
      replicas: the number of copies, which is the size of the mesh dimension.

    Raises:
      TypeError: `replicas` is not an integer.
      ValueError: `replicas` is below 1.

    >>> ShardingSpec((), (Replicated(3),)).num_shards
    3
    """

    replicas: int

    def __post_init__(self) -> None:
        what = "the number of replicas in Replicated"
        _set(self, "replicas", _positive(what, self.replicas))

    __repr__ = _as_code


AvalDimSharding: TypeAlias = Chunked | Unstacked | NoSharding | None
MeshDimAssignment: TypeAlias = ShardedAxis | Replicated


def _stored(entry: Any) -> Chunked | Unstacked | None:
    if entry is None or isinstance(entry, NoSharding):
        return None
    if isinstance(entry, Chunked):
        return entry if entry.chunks else None
    if isinstance(entry, Unstacked):
        return entry
    raise TypeError(
        "an entry of sharding must be Chunked, Unstacked, NoSharding or None, got "
        f"{shown(entry)}"
    )


def _axis_sizes(entry: Chunked | Unstacked | None) -> tuple[int, ...]:
    """The sizes of the sharded axes of one array dimension."""
    if entry is None:
        return ()
    return entry.chunks if isinstance(entry, Chunked) else (entry.size,)


@dataclass(frozen=True, repr=False, init=False, slots=True)
class ShardingSpec:
    """Describes how an array is sharded, and how its shards are placed on a mesh.

    It has the constructor and the fields of `ShardingSpec` in JAX 0.4.

    Attributes:
      sharding: one `Chunked`, `Unstacked` or None for each array dimension.
        `NoSharding()` is stored as None.
      mesh_mapping: one `ShardedAxis` or `Replicated` for each mesh dimension.

    Raises:
      TypeError: an entry has another type.
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
        _set(self, "sharding", tuple(_stored(entry) for entry in sharding))
        _set(self, "mesh_mapping", tuple(mesh_mapping))
        for assignment in self.mesh_mapping:
            if not isinstance(assignment, ShardedAxis | Replicated):
                raise TypeError(
                    "an entry of mesh_mapping must be ShardedAxis or Replicated, got "
                    f"{shown(assignment)}"
                )
        sizes = self.sharded_axis_sizes
        used = [a.axis for a in self.mesh_mapping if isinstance(a, ShardedAxis)]
        if sorted(used) != list(range(len(sizes))):
            raise ValueError(
                f"{self!r} is not a valid layout: mesh_mapping must use each of its "
                f"{len(sizes)} sharded axes once, of sizes {sizes}, but uses {used}. "
                "Write ShardedAxis(k) for axis k, counted from 0, and Replicated for "
                "copies"
            )

    __repr__ = _as_code

    def _repr_html_(self) -> str:
        from shardmap.explaining.draw.html import of_spec

        return of_spec(self)

    @property
    def sharded_axis_sizes(self) -> tuple[int, ...]:
        """The sizes of the sharded axes, which `ShardedAxis` numbers.

        >>> spec = ShardingSpec((Chunked((2, 3)),), [ShardedAxis(1), ShardedAxis(0)])
        >>> spec.sharded_axis_sizes
        (2, 3)
        """
        return tuple(size for entry in self.sharding for size in _axis_sizes(entry))

    @property
    def tile_counts(self) -> tuple[int, ...]:
        """The number of shards of each array dimension.

        >>> spec = ShardingSpec((Chunked((2, 3)),), [ShardedAxis(1), ShardedAxis(0)])
        >>> spec.tile_counts
        (6,)
        """
        return tuple(math.prod(_axis_sizes(entry)) for entry in self.sharding)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The shape of the mesh, with one size for each entry of `mesh_mapping`."""
        sizes = self.sharded_axis_sizes
        return tuple(
            sizes[assignment.axis]
            if isinstance(assignment, ShardedAxis)
            else assignment.replicas
            for assignment in self.mesh_mapping
        )

    @property
    def num_shards(self) -> int:
        """The number of devices, including copies."""
        return math.prod(self.mesh_shape)

    @property
    def tile_order(self) -> list[int]:
        """The mesh dimensions in the order of the array's dimensions, copies last.

        >>> ShardingSpec((None, Chunked(2)), (Replicated(3), ShardedAxis(0))).tile_order
        [1, 0]
        """
        places = [
            assignment.axis if isinstance(assignment, ShardedAxis) else math.inf
            for assignment in self.mesh_mapping
        ]
        return sorted(range(len(places)), key=places.__getitem__)

    @property
    def dim_shardings(self) -> tuple[tuple[int, ...], ...]:
        """For each array dimension, the mesh dimensions that shard it, major to minor.

        >>> spec = ShardingSpec((Chunked((2, 3)),), [ShardedAxis(1), ShardedAxis(0)])
        >>> spec.dim_shardings
        ((1, 0),)
        """
        in_order = iter(self.tile_order)
        return tuple(
            tuple(itertools.islice(in_order, len(_axis_sizes(entry))))
            for entry in self.sharding
        )

    def _piece_sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The size of a shard in each dimension; ValueError if `shape` does not fit."""
        shape = tuple(integer_of("a dimension of the shape", size, 0) for size in shape)
        if len(shape) != len(self.sharding):
            raise ValueError(
                f"shape {shape} has {len(shape)} dimensions, but {self!r} has "
                f"{len(self.sharding)} entries in sharding: give one per dimension, "
                "None where it is not cut"
            )
        for dimension, (size, entry, shards) in enumerate(
            zip(shape, self.sharding, self.tile_counts, strict=True)
        ):
            if isinstance(entry, Unstacked) and size != entry.size:
                problem = f"write Unstacked({size}), or Chunked for longer shards"
            elif size % shards:
                padded = -(-size // shards) * shards
                problem = f"pad it to {padded}, or cut it into fewer shards"
            else:
                continue
            raise ValueError(
                f"shape {shape} does not fit {self!r}: dimension {dimension} has size "
                f"{size}, but is cut by {entry!r} into {shards} equal shards: {problem}"
            )
        return tuple(
            size // shards for size, shards in zip(shape, self.tile_counts, strict=True)
        )

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of one shard of an array of shape `shape`.

        `Unstacked` dimensions are left out, because they do not exist inside the map.

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
        """Returns the index of each device's shard in an array of shape `shape`.

        Args:
          shape: the shape of the whole array.

        Returns:
          An object array of shape `mesh_shape`. Each entry is a tuple with one item for
          each dimension: `slice(None)` if it is not sharded, `slice(start, stop)` for
          `Chunked`, an int for `Unstacked`.

        Raises:
          ValueError: as `shard_shape`.

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
        copied = tuple(self.tile_order[len(order) :])
        on_mesh = np.expand_dims(tiles.transpose(order), copied)
        return np.broadcast_to(on_mesh, self.mesh_shape).copy()

    def stacked(self) -> ShardingSpec:
        """Returns the layout seen from outside: `Unstacked(n)` becomes `Chunked((n,))`.

        >>> ShardingSpec((Unstacked(4), None), (ShardedAxis(0),)).stacked()
        ShardingSpec((Chunked((4,)), None), (ShardedAxis(0),))
        """
        sharding = [
            Chunked(entry.size) if isinstance(entry, Unstacked) else entry
            for entry in self.sharding
        ]
        return ShardingSpec(sharding, self.mesh_mapping)

    def _check_stacked(self, wanted: str) -> None:
        """Raises ValueError if a dimension is `Unstacked`, for `wanted`."""
        for dimension, entry in enumerate(self.sharding):
            if isinstance(entry, Unstacked):
                raise ValueError(
                    f"{self!r} has no {wanted}: dimension {dimension} is {entry!r}, "
                    "which does not exist inside the map. spec.stacked() is the same "
                    "layout as seen from outside"
                )

    def tile_assignment(self) -> np.ndarray:
        """Returns the tile assignment of the proto.

        Returns:
          The numbers of the devices, in an array with one dimension for each array
          dimension, and a last one for copies if anything is `Replicated`.

        Raises:
          ValueError: a dimension is `Unstacked`; use `spec.stacked()`.

        >>> spec = ShardingSpec((Chunked(2),), (Replicated(2), ShardedAxis(0)))
        >>> spec.tile_assignment()
        array([[0, 2],
               [1, 3]])
        """
        self._check_stacked("tile assignment")
        devices = np.arange(self.num_shards).reshape(self.mesh_shape)
        is_copied = len(self.mesh_mapping) > len(self.sharded_axis_sizes)
        return devices.transpose(self.tile_order).reshape(
            [*self.tile_counts, *[-1] * is_copied]
        )

    def sharding_proto(self) -> OpSharding:
        """Returns the equivalent `OpSharding` proto, as JAX 0.4 did.

        It lists up to 1,024 devices. For more it uses the compact form, whose size does
        not depend on their number.

        Raises:
          ValueError: a dimension is `Unstacked`; use `spec.stacked()`.

        >>> spec = ShardingSpec((Chunked(2),), (Replicated(2), ShardedAxis(0)))
        >>> proto = spec.sharding_proto()
        >>> proto.tile_assignment_dimensions, proto.tile_assignment_devices
        ([2, 2], [0, 2, 1, 3])
        >>> ShardingSpec((None,), (Replicated(2),)).sharding_proto().type.name
        'REPLICATED'
        """
        self._check_stacked("proto")
        if self.num_shards > _MOST_LISTED:
            return self.hlo_sharding().to_proto()
        proto = OpSharding()
        if not self.sharded_axis_sizes:
            proto.type = OpSharding.Type.REPLICATED
            return proto
        devices = self.tile_assignment()
        proto.type = OpSharding.Type.OTHER
        proto.tile_assignment_dimensions = devices.shape
        proto.tile_assignment_devices = devices.reshape(-1).tolist()
        proto.replicate_on_last_tile_dim = devices.ndim > len(self.sharding)
        return proto

    # To and from JAX's and XLA's shardings

    def hlo_sharding(self) -> HloSharding:
        """Returns the equivalent `HloSharding` of XLA.

        Raises:
          ValueError: a dimension is `Unstacked`; use `spec.stacked()`.

        >>> spec = ShardingSpec((Chunked(4), None), (ShardedAxis(0), Replicated(2)))
        >>> spec.hlo_sharding()
        {devices=[4,1,2]<=[8] last_tile_dim_replicate}
        """
        self._check_stacked("proto")
        tiles = math.prod(self.tile_counts)
        if tiles == 1:
            return HloSharding.replicate()
        copies = math.prod(self.mesh_shape) // tiles
        last_tile_dims = [OpSharding.Type.REPLICATED] if copies > 1 else []
        return HloSharding.iota_tile(
            (*self.tile_counts, copies) if copies > 1 else self.tile_counts,
            reshape_dims=self.mesh_shape,
            transpose_perm=self.tile_order,
            subgroup_types=last_tile_dims,
        )

    def sdy(self, axis_names: Sequence[str] | None = None) -> str:
        """Returns the layout as Shardy text: the mesh in one line, the sharding in the
        next.

        Args:
          axis_names: a name for each mesh dimension. Default: "axis0", "axis1", ...

        Raises:
          ValueError: a dimension is `Unstacked`, or there are not as many different
            names as mesh dimensions.

        >>> print(ShardingSpec((Chunked(4), None), [ShardedAxis(0)]).sdy(["x"]))
        sdy.mesh @mesh = <["x"=4]>
        #sdy.sharding<@mesh, [{"x"}, {}]>
        """
        self._check_stacked("Shardy text")
        names = self._axis_names(axis_names)
        # A mesh without dimensions is called so when JAX lowers it.
        mesh = "@mesh" if names else "@empty_mesh"
        sizes = ", ".join(
            f'"{name}"={size}'
            for name, size in zip(names, self.mesh_shape, strict=True)
        )
        axes = ", ".join(
            "{" + ", ".join(f'"{names[d]}"' for d in dimensions) + "}"
            for dimensions in self.dim_shardings
        )
        return f"sdy.mesh {mesh} = <[{sizes}]>\n#sdy.sharding<{mesh}, [{axes}]>"

    def named_sharding(
        self,
        devices: Sequence[jax.Device] | np.ndarray,
        axis_names: Sequence[str] | None = None,
    ) -> NamedSharding:
        """Returns the equivalent `jax.sharding.NamedSharding` over `devices`.

        Args:
          devices: `num_shards` devices, flat (row-major over the mesh) or as an array.
          axis_names: a name for each mesh dimension. Default: "axis0", "axis1", ...

        Raises:
          ValueError: a dimension is `Unstacked`, the number of devices is wrong, or
            there are not as many different names as mesh dimensions.

        >>> import jax
        >>> spec = ShardingSpec((None, Chunked(1)), (ShardedAxis(0),))
        >>> tuple(spec.named_sharding(jax.devices()[:1], ["x"]).spec)
        (None, 'x')
        """
        self._check_stacked("NamedSharding")
        flat = np.asarray(devices, dtype=object).reshape(-1)
        needed = math.prod(self.mesh_shape)
        if flat.size != needed:
            raise ValueError(
                f"{self!r} needs {needed} devices (a mesh of shape {self.mesh_shape}), "
                f"got {flat.size}.{too_few_devices(needed)}"
            )
        check_devices("named_sharding", flat)
        names = self._axis_names(axis_names)
        dims = {
            dimension: [names[d] for d in cut_by]
            for dimension, cut_by in enumerate(self.dim_shardings)
        }
        mesh = Mesh(flat.reshape(self.mesh_shape), names)
        return NamedSharding(mesh, cut_spec(dims))

    def _axis_names(self, axis_names: Sequence[str] | None) -> tuple[str, ...]:
        """A name per mesh dimension: the names given, or "axis0", "axis1", ..."""
        count = len(self.mesh_shape)
        if axis_names is None:
            return tuple(f"axis{dimension}" for dimension in range(count))
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        if len(names) != count or len(set(names)) != count:
            raise ValueError(
                f"axis_names must be {count} different names, one per mesh dimension "
                f"of {self!r}, got {len(names)}: {names}"
            )
        return names

    @classmethod
    def _on_mesh(
        cls, mesh_shape: Sequence[int], dim_shardings: Sequence[Sequence[int]]
    ) -> ShardingSpec:
        """The spec with this `mesh_shape` and these `dim_shardings`."""
        cutting = [d for dimensions in dim_shardings for d in dimensions]
        return cls(
            [
                Chunked(mesh_shape[d] for d in dimensions)
                for dimensions in dim_shardings
            ],
            [
                ShardedAxis(cutting.index(d)) if d in cutting else Replicated(size)
                for d, size in enumerate(mesh_shape)
            ],
        )

    @classmethod
    def from_proto(
        cls,
        proto: OpSharding | HloSharding,
        ndim: int | None = None,
        num_devices: int | None = None,
    ) -> ShardingSpec:
        """Returns the spec of a proto. Device k holds the same indices.

        Reads device lists (V1) and the compact iota form (V2).

        Args:
          proto: an `OpSharding`, or an `HloSharding`.
          ndim: the rank of the array; required for REPLICATED, which does not contain
            it.
          num_devices: the number of devices; required for REPLICATED too.

        Raises:
          TypeError: `proto` is neither.
          ValueError: no spec expresses the proto (MANUAL, MAXIMAL, TUPLE, devices in an
            order of no mesh), or `ndim` or `num_devices` is missing or differs.

        >>> spec = ShardingSpec((Chunked(4), None), (Replicated(2), ShardedAxis(0)))
        >>> ShardingSpec.from_proto(spec.sharding_proto()) == spec
        True
        """
        return cls._on_mesh(*conversions.from_proto(proto, ndim, num_devices))

    @classmethod
    def from_named_sharding(cls, sharding: NamedSharding, ndim: int) -> ShardingSpec:
        """Returns the spec of a `NamedSharding` of an array of rank `ndim`.

        Each mesh axis is one mesh dimension, so `spec.indices(shape)` has the shape of
        `sharding.mesh.devices`.

        Raises:
          TypeError: `sharding` is not a NamedSharding.
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
        return cls._on_mesh(*conversions.from_named_sharding(sharding, ndim))

    @classmethod
    def from_sharding(cls, sharding: Sharding, shape: Sequence[int]) -> ShardingSpec:
        """Returns the spec of any `jax.sharding.Sharding` of an array of shape `shape`.

        Device k is the k-th in `sharding.devices_indices_map(shape)`.

        Raises:
          TypeError: `sharding` is not a Sharding.
          ValueError: no spec expresses the layout.

        >>> import jax
        >>> sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        >>> ShardingSpec.from_sharding(sharding, (4, 8))
        ShardingSpec((None, None), ())
        """
        return cls._on_mesh(*conversions.from_sharding(sharding, shape))


def spec_to_indices(shape: Sequence[int], spec: ShardingSpec) -> tuple[Index, ...]:
    """Returns the index of each device's shard, in row-major order of the mesh.

    The entries of `ShardingSpec.indices` as a flat tuple, like `spec_to_indices` in JAX
    0.4.

    Raises:
      TypeError: an argument is not a shape or not a spec.
      ValueError: as `ShardingSpec.shard_shape`.

    >>> spec = ShardingSpec((Chunked(2),), (ShardedAxis(0), Replicated(2)))
    >>> spec_to_indices((4,), spec)[:2]
    ((slice(0, 2, None),), (slice(0, 2, None),))
    """
    if not isinstance(spec, ShardingSpec) or not isinstance(shape, Iterable):
        raise TypeError(
            "spec_to_indices takes a shape and a ShardingSpec, in this order, but got "
            f"{shown(shape)} and {shown(spec)}"
        )
    return tuple(spec.indices(shape).flat)


def spec_of(array: Value) -> ShardingSpec:
    """Returns the spec of an array.

    Args:
      array: a `jax.Array`, a `jax.ShapeDtypeStruct` with a sharding, or a NumPy array,
        which counts as being on one device.

    Raises:
      TypeError: `array` has no known sharding, such as a tracer.
      ValueError: no spec expresses its sharding.

    >>> spec_of(np.zeros((4, 8)))
    ShardingSpec((None, None), ())
    """
    if isinstance(array, np.ndarray | np.generic):
        return ShardingSpec((None,) * array.ndim, ())
    return ShardingSpec.from_sharding(conversions.sharding_of(array), array.shape)


def mesh_sharding_spec(
    axis_sizes: dict[str, int], axis_names: Sequence[str]
) -> Callable[[int | Aval | jax.ShapeDtypeStruct, dict[str, int]], ShardingSpec]:
    """Returns a function that gives the specs of arrays on a mesh with named axes.

    JAX had this as `pxla.mesh_sharding_specs`.

    Args:
      axis_sizes: the size of each mesh axis.
      axis_names: the mesh axes in the order of the mesh.

    Returns:
      A function of an array's rank, or its aval, whose shape must divide, and a dict
      from mesh axis names to array dimensions, as for `mesh_map`. If several mesh axes
      shard one dimension, the order of the dict is major to minor.

    Example:
      >>> import shardmap as sm
      >>> spec = sm.mesh_sharding_spec({"x": 2, "y": 4}, ("x", "y"))
      >>> spec(2, {"y": 0})
      ShardingSpec((Chunked((4,)), None), (Replicated(2), ShardedAxis(0)))
      >>> spec(jax.ShapeDtypeStruct((8, 3), np.float32), {"y": 0}) == spec(2, {"y": 0})
      True
    """
    order = {name: dimension for dimension, name in enumerate(axis_names)}

    def spec(
        aval: int | Aval | jax.ShapeDtypeStruct, axes: dict[str, int]
    ) -> ShardingSpec:
        ndim = aval if isinstance(aval, int) else len(aval.shape)
        for name, dimension in axes.items():
            if name not in order or not 0 <= dimension < ndim:
                raise ValueError(
                    f"axes {axes} do not fit an array of rank {ndim} on a mesh with "
                    f"axes {tuple(axis_names)}: {name!r} cuts dimension {dimension}."
                )
        dim_shardings = [
            [order[name] for name, where in axes.items() if where == dimension]
            for dimension in range(ndim)
        ]
        on_mesh = ShardingSpec._on_mesh(
            [axis_sizes[name] for name in order], dim_shardings
        )
        if not isinstance(aval, int):
            on_mesh.shard_shape(aval.shape)
        return on_mesh

    return spec
