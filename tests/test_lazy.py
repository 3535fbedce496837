"""What the package says of names that it does not have."""

import operator

import pytest

import shardmap as sm


def test_what_is_called_otherwise_is_named():
    with pytest.raises(AttributeError, match=r"'pmap'. Use shardmap.spmap, which has"):
        operator.attrgetter("pmap")(sm)
    with pytest.raises(AttributeError, match=r"'spmapp'. Did you mean 'spmap' or"):
        operator.attrgetter("spmapp")(sm)
    with pytest.raises(AttributeError, match=r"Did you mean 'make_mesh'\?$"):
        operator.attrgetter("makemesh")(sm)
    for name, instead in {
        "replicate": "shardmap.device_put_replicated",
        "PartitionSpec": "jax.sharding.PartitionSpec",
        "P": "jax.sharding.PartitionSpec",
        "NamedSharding": "jax.sharding.NamedSharding",
        "OpSharding": "shardmap.ShardingSpec.sharding_proto, which returns one",
        "ShardedDeviceArray": "shardmap.compat.ShardedDeviceArray, for old programs",
    }.items():
        with pytest.raises(AttributeError, match=rf"'{name}'. Use {instead}\.$"):
            operator.attrgetter(name)(sm)
    assert not hasattr(sm, "xmap")
