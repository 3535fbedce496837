"""The mesh axes that stand for partitions."""

import itertools
import math

import jax
import pytest

from shardmap.map.constraint import partition_axes, partition_cuts


@pytest.mark.parametrize(
    ("layouts", "sizes"),
    [
        ([(4, 1)], [4]),
        ([(4, 1), (1, 4)], [4]),
        ([(4, 1), (2, 2)], [2, 2]),
        ([(2, 2, 3), (4, 1, 3)], [2, 2, 3]),
        ([(2, 3), (3, 2)], [2, 3]),
        ([(2, None, 3), (6, 1)], [2, 3]),
        ([(1, 1)], []),
    ],
)
def test_partition_axes(layouts, sizes):
    total = math.prod(count or 1 for count in layouts[0])
    assert list(partition_axes(layouts, total).values()) == sizes


def test_partition_axes_can_say_all_parts():
    for total in (1, 2, 4, 6, 8, 12):
        kinds = [
            parts
            for parts in itertools.product(range(1, total + 1), repeat=3)
            if math.prod(parts) == total
        ]
        for first, second in itertools.combinations_with_replacement(kinds, 2):
            axes = partition_axes([first, second], total)
            assert math.prod(axes.values()) == total
            mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
            for parts in (first, second):
                cuts = partition_cuts(parts, mesh)
                used = [name for names in cuts.values() for name in names]
                assert len(used) == len(set(used))
                for dimension, count in enumerate(parts):
                    names = cuts.get(dimension, ())
                    assert math.prod(axes[name] for name in names) == count
