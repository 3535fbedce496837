"""Protos that list their devices, as JAX made them before the compact form."""

import pytest
from hypothesis import given
from jaxlib.xla_client import HloSharding, OpSharding

from shardmap.sharding.entries import Chunked as C
from shardmap.sharding.entries import Replicated as R
from shardmap.sharding.entries import ShardedAxis as S
from shardmap.sharding.spec import ShardingSpec
from tests.reference import same_layout
from tests.strategies import specs

Type = OpSharding.Type


@given(specs(unstacked=False))
def test_a_proto_that_lists_its_devices_says_the_same(spec):
    listed = spec.sharding_proto(tile_assignment_devices=True)
    assert not listed.iota_reshape_dims
    has_tiles = any(isinstance(a, S) for a in spec.mesh_mapping)
    assert (listed.type == Type.OTHER) == has_tiles
    back = ShardingSpec.from_proto(listed, len(spec.sharding), spec.num_shards)
    assert same_layout(back, spec)
    compact = spec.hlo_sharding()
    assert HloSharding.from_proto(listed).is_replicated() == compact.is_replicated()
    if not compact.is_replicated():
        devices = compact.tile_assignment_devices()
        assert list(listed.tile_assignment_devices) == list(devices)


# As JAX's ShardingSpec made them while protos listed devices.
@pytest.mark.parametrize(
    ("spec", "tiles", "devices", "copied"),
    [
        (ShardingSpec((C(2), None), (S(0),)), [2, 1], [0, 1], False),
        (ShardingSpec((C(2), C(2)), (S(1), S(0))), [2, 2], [0, 2, 1, 3], False),
        (ShardingSpec((None, C((2, 2))), (S(1), S(0))), [1, 4], [0, 2, 1, 3], False),
        (ShardingSpec((C(2),), (S(0), R(2))), [2, 2], [0, 1, 2, 3], True),
        (ShardingSpec((C(2),), (R(2), S(0))), [2, 2], [0, 2, 1, 3], True),
        (ShardingSpec((C(2),), (S(0), R(1))), [2, 1], [0, 1], True),
        (
            ShardingSpec((C(2),), (R(2), S(0), R(2))),
            [2, 4],
            [0, 1, 4, 5, 2, 3, 6, 7],
            1,
        ),
        (ShardingSpec((C(1), None), (S(0),)), [1, 1], [0], False),
        (ShardingSpec((C(1),), (S(0), R(3))), [1, 3], [0, 1, 2], True),
    ],
)
def test_devices_that_are_listed(spec, tiles, devices, copied):
    proto = spec.sharding_proto(tile_assignment_devices=True)
    assert proto.type == Type.OTHER
    assert list(proto.tile_assignment_dimensions) == tiles
    assert list(proto.tile_assignment_devices) == devices
    assert proto.replicate_on_last_tile_dim == bool(copied)


def test_only_copies_list_no_devices():
    for spec in (ShardingSpec((None,), (R(2),)), ShardingSpec((), ())):
        proto = spec.sharding_proto(tile_assignment_devices=True)
        assert proto.type == Type.REPLICATED
        assert not proto.tile_assignment_devices
