"""Counts of partitions as axes of a mesh."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardmap.map import partition_axes as partitions

FREE = P.UNCONSTRAINED


def mesh_of(layouts, total):
    axes = partitions.partition_axes(layouts, total)
    devices = np.array(jax.devices()[: math.prod(axes.values())])
    return jax.sharding.Mesh(devices.reshape(*axes.values()), [*axes])


@pytest.mark.parametrize(
    ("layouts", "total", "sizes"),
    [
        ([], 1, []),
        ([(4, 1)], 4, [4]),
        ([(4, 1), (2, 2)], 4, [2, 2]),
        ([(2, 3)], 6, [2, 3]),
        # One begins with 2 and one with 3: neither end divides the other.
        ([(2, 3), (3, 2)], 6, [2, 3]),
        ([(None, 2)], 8, [2, 4]),
    ],
)
def test_the_axes_are_the_fewest_that_say_all_parts(layouts, total, sizes):
    assert [*partitions.partition_axes(layouts, total).values()] == sizes


@pytest.mark.parametrize(
    "parts", [(4, 2), (2, 4), (8,), (1, 8, 1), (2, 2, 2), (4, None)]
)
def test_each_part_is_a_shard(parts):
    mesh = mesh_of([parts, (8,)], 8)
    sharding = partitions.partition_sharding(parts, mesh)
    assert partitions.total_partitions(parts) == math.prod(n or 1 for n in parts)
    pairs = zip(sharding.spec, parts, strict=True)
    assert all((entry is FREE) == (count is None) for entry, count in pairs)
    if None not in parts:
        shape = sharding.shard_shape((8,) * len(parts))
        assert shape == tuple(8 // count for count in parts)
        # Partition k, counted row-major, is on the k-th device.
        indices = sharding.devices_indices_map((8,) * len(parts))
        starts = [tuple(s.start or 0 for s in index) for index in indices.values()]
        assert starts == sorted(starts)


def test_a_mesh_without_such_axes_is_refused():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
    with pytest.raises(ValueError, match=r"parts \(2, 2\) need 4 devices .* {'x': 8}"):
        partitions.partition_sharding((2, 2), mesh)


def test_names_and_factors():
    assert partitions.is_partition_axis(f"{partitions.AXIS_PREFIX}0")
    assert not any(map(partitions.is_partition_axis, ["x", 0]))
    assert [partitions.prime_factors(n) for n in (1, 7, 12)] == [[], [7], [2, 2, 3]]
