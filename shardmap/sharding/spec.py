"""The sharding model: which shard of an array is on which device.

A `ShardingSpec` answers two questions. How is each dimension of the array cut
(`sharding`, one entry per array dimension)? And how are the shards laid on a mesh of
devices (`mesh_mapping`, one entry per mesh dimension)? A worked example, an array of
shape (4, 8) on six devices:

    spec = ShardingSpec(
        sharding=(None, Chunked((2,))),     rows are not cut, columns are cut in 2
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
sharded axes, of sizes 2 and 3, whose 6 shards are numbered row-major.

The idea, the names and the fields are those of `ShardingSpec` in JAX 0.2.6 to 0.9.
model.py has what a spec means by itself; here are its ways to and from XLA's protos and
JAX's shardings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jaxlib.xla_client import HloSharding, OpSharding

from shardmap._jax.types import Value
from shardmap.later import html_of
from shardmap.sharding import named
from shardmap.sharding import proto as protos
from shardmap.sharding.entries import Chunked, Replicated, ShardedAxis, Unstacked
from shardmap.sharding.model import Index, SpecModel


@dataclass(frozen=True, repr=False, init=False, slots=True)
class ShardingSpec(SpecModel):
    """How an array is cut, and how its shards are laid on a mesh of devices.

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

    def _repr_html_(self) -> str:
        return html_of(self)

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

    def hlo_sharding(self) -> HloSharding:
        """The equal `HloSharding`, XLA's own form of this layout.

        Raises:
          ValueError: a dimension is `Unstacked`; use `spec.stacked()`.

        >>> spec = ShardingSpec((Chunked(4), None), (ShardedAxis(0), Replicated(2)))
        >>> spec.hlo_sharding()
        {devices=[4,1,2]<=[8] last_tile_dim_replicate}
        """
        return protos.hlo_sharding(self)

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
            return protos.listed_proto(self)
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
        return protos.sdy(self, axis_names)

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
        return cls(*protos.from_proto(proto, ndim, num_devices))

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
        return cls(*named.from_named_sharding(sharding, ndim))

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
        return cls(*named.from_sharding(sharding, shape))


def spec_to_indices(shape: Sequence[int], spec: ShardingSpec) -> tuple[Index, ...]:
    """`spec.indices(shape)`, flat: one entry per device, row-major over the mesh.

    As `spec_to_indices` in JAX 0.4.

    Raises:
      TypeError: these are no shape and no spec.
      ValueError: as `ShardingSpec.shard_shape`.

    >>> spec = ShardingSpec((Chunked(2),), (ShardedAxis(0), Replicated(2)))
    >>> spec_to_indices((4,), spec)[:2]
    ((slice(0, 2, None),), (slice(0, 2, None),))
    """
    if not isinstance(spec, ShardingSpec) or not isinstance(shape, Iterable):
        raise TypeError(
            "spec_to_indices takes a shape and a ShardingSpec, in this order, but got "
            f"{shape!r} and {spec!r}"
        )
    return tuple(spec.indices(shape).flat)


def spec_of(array: Value) -> ShardingSpec:
    """The spec of an array: which device holds which part of it.

    Args:
      array: a `jax.Array`, a `jax.ShapeDtypeStruct` with a sharding, or a NumPy array,
        which counts as lying on one device.

    Raises:
      TypeError: `array` has no known sharding, as a tracer has none.
      ValueError: no spec expresses its sharding.

    >>> spec_of(np.zeros((4, 8)))
    ShardingSpec((None, None), ())
    """
    if isinstance(array, np.ndarray | np.generic):
        return ShardingSpec((None,) * array.ndim, ())
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"spec_of needs an array with values, got the tracer {array}: where it "
            "lies is only known once the program is compiled"
        )
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"spec_of needs an array, got {array!r} of type {type(array).__name__}, "
            "which has no sharding"
        )
    return ShardingSpec.from_sharding(sharding, array.shape)


def pmap_sharding(
    shape: Sequence[int],
    sharded_dim: int | None = 0,
    devices: Sequence[jax.Device] | np.ndarray | None = None,
) -> NamedSharding:
    """The layout `jax.pmap` gives an array: one dimension, one index per device.

    What `jax.sharding.PmapSharding.default` gave up to JAX 0.9, as a NamedSharding: the
    dimension stays, cut into shards of length 1.

    Args:
      shape: the shape of the array.
      sharded_dim: the dimension that is spread over the devices; negative counts from
        the end. None: every device holds the whole array.
      devices: as many devices as the dimension is long. By default the first of
        `jax.local_devices()`, with `sharded_dim=None` all of them.

    Raises:
      ValueError: `sharded_dim` is out of range, or the number of devices is not the
        size of the dimension.

    >>> pmap_sharding((1, 5)).shard_shape((1, 5))
    (1, 5)
    """
    if not isinstance(shape, Iterable):
        raise TypeError(
            f"pmap_sharding shape must be a tuple of ints, such as ({shape!r},), but "
            f"got {shape!r}"
        )
    shape = tuple(shape)
    if devices is not None:
        devices = np.asarray(devices, dtype=object).reshape(-1)
    if sharded_dim is None:
        devices = jax.local_devices() if devices is None else devices
        copied = ShardingSpec((None,) * len(shape), (Replicated(len(devices)),))
        return copied.named_sharding(devices)
    if not -len(shape) <= sharded_dim < len(shape):
        raise ValueError(
            f"sharded_dim {sharded_dim} is out of range for shape {shape} of "
            f"{len(shape)} dimensions"
        )
    size = shape[sharded_dim]
    if devices is None:
        devices = jax.local_devices()[:size]
    if len(devices) != size:
        raise ValueError(
            f"dimension {sharded_dim} of shape {shape} has size {size} and needs one "
            f"device per index, got {len(devices)} devices. Cut it into longer shards "
            "with a ShardingSpec and Chunked, or pass as many devices"
        )
    entries: list[Chunked | None] = [None] * len(shape)
    entries[sharded_dim] = Chunked(size)
    return ShardingSpec(entries, (ShardedAxis(0),)).named_sharding(devices)
