"""The mesh axes that stand for partitions."""

import itertools
import math

import jax

from shardmap.map.constraint import partition_axes, partition_cuts


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
