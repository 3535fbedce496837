"""Protos, HLO shardings and Shardy text, there and back."""

import itertools
import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxlib.xla_client import HloSharding, OpSharding

from shardmap.sharding.entries import Chunked, Replicated, ShardedAxis, Unstacked
from shardmap.sharding.spec import ShardingSpec, spec_to_indices
from tests.reference import (
    index_of_tile,
    loop_indices,
    plain,
    same_layout,
    tiles_of_devices,
)
from tests.strategies import specs, specs_and_shapes

C, U, S, R = Chunked, Unstacked, ShardedAxis, Replicated
Type = OpSharding.Type


def make_proto(**fields):
    proto = OpSharding()
    for name, value in fields.items():
        setattr(proto, name, value)
    return proto


@given(specs_and_shapes(unstacked=False))
def test_proto_read_back_gives_the_same_map_as_the_indices(spec_and_shape):
    spec, shape = spec_and_shape
    hlo_sharding = HloSharding.from_proto(spec.sharding_proto())
    assert hlo_sharding == spec.hlo_sharding()
    tiles, counts = tiles_of_devices(hlo_sharding, len(shape), spec.num_shards)
    from_proto = [index_of_tile(shape, counts, tile) for tile in tiles]
    assert from_proto == [plain(i, shape) for i in spec_to_indices(shape, spec)]


@given(specs(unstacked=False, max_devices=8))
def test_hlo_sharding_is_that_of_the_named_sharding(spec):
    named = spec.named_sharding(jax.devices()[: spec.num_shards])
    # Private, as JAX has no public way from a NamedSharding to its HloSharding.
    expected = named._to_xla_hlo_sharding(len(spec.sharding))
    assert spec.hlo_sharding() == expected
    ours = spec.sharding_proto().SerializeToString()
    assert ours == expected.to_proto().SerializeToString()


def test_hlo_sharding_in_text():
    def text(sharding, mapping):
        return str(ShardingSpec(sharding, mapping).hlo_sharding())

    assert text((C(4), None), (S(0),)) == "{devices=[4,1]<=[4]}"
    assert (
        text((C(4), None), (S(0), R(2)))
        == "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"
    )
    assert (
        text((C(4), None), (R(2), S(0)))
        == "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
    )
    assert text((C(2), C(4)), (S(1), S(0))) == "{devices=[2,4]<=[4,2]T(1,0)}"
    assert text((C((2, 4)),), (S(1), S(0))) == "{devices=[8]<=[4,2]T(1,0)}"
    assert text((), (R(3),)) == "{replicated}"


def test_fully_replicated_is_of_type_replicated():
    for spec in (
        ShardingSpec((), ()),
        ShardingSpec((None, None), (R(2), R(3))),
        ShardingSpec((C(1), None), (R(4), S(0))),
    ):
        proto = spec.sharding_proto()
        assert isinstance(proto, OpSharding)
        assert proto.type == Type.REPLICATED
        assert not proto.tile_assignment_dimensions


def test_tiles_are_of_type_other_with_the_copies_last():
    proto = ShardingSpec((C(2), None, C(4)), (R(3), S(1), S(0))).sharding_proto()
    assert proto.type == Type.OTHER
    assert list(proto.tile_assignment_dimensions) == [2, 1, 4, 3]
    assert proto.replicate_on_last_tile_dim
    assert list(proto.iota_reshape_dims) == [3, 4, 2]
    assert list(proto.iota_transpose_perm) == [2, 1, 0]
    whole = ShardingSpec((C(2), None), (S(0), R(1))).sharding_proto()
    assert not whole.replicate_on_last_tile_dim
    assert list(whole.tile_assignment_dimensions) == [2, 1]


@pytest.mark.parametrize("factor", [1, 2**4, 2**10])
def test_proto_does_not_grow_with_the_number_of_devices(factor):
    spec = ShardingSpec(
        (C((2**4, factor)), None), (S(1), R(2**3), S(0), R(2**3 * 1024 // factor))
    )
    proto = spec.sharding_proto()
    assert not proto.tile_assignment_devices
    assert len(proto.SerializeToString()) < 48
    assert ShardingSpec.from_proto(proto).num_shards == spec.num_shards == 2**20


def test_unstacked_has_no_proto_and_names_stacked():
    spec = ShardingSpec((None, U(4)), (S(0),))
    for what, ask in (
        ("proto", spec.sharding_proto),
        ("proto", lambda: spec.sharding_proto(tile_assignment_devices=True)),
        ("proto", spec.hlo_sharding),
        ("Shardy text", spec.sdy),
    ):
        text = rf"has no {what}: dimension 1 is Unstacked\(4\).*spec.stacked\(\) is the"
        with pytest.raises(ValueError, match=text):
            ask()
    assert str(spec.stacked().hlo_sharding()) == "{devices=[1,4]<=[4]}"


@given(specs(unstacked=False))
def test_from_proto_gives_back_an_equal_layout(spec):
    ndim = len(spec.sharding)
    for given_proto in (spec.sharding_proto(), spec.hlo_sharding()):
        back = ShardingSpec.from_proto(given_proto, ndim, spec.num_shards)
        assert back.num_shards == spec.num_shards
        assert same_layout(back, spec)
        assert back.hlo_sharding() == spec.hlo_sharding()


@given(specs(unstacked=False, max_devices=24), st.randoms(use_true_random=False))
def test_from_proto_reads_device_lists_with_copies_in_any_order(spec, random):
    hlo_sharding = spec.hlo_sharding()
    if hlo_sharding.is_replicated():
        return
    copies = spec.num_shards // math.prod(spec.tile_counts)
    devices = list(hlo_sharding.tile_assignment_devices())
    shuffled = []
    for start in range(0, len(devices), copies):
        group = devices[start : start + copies]
        random.shuffle(group)
        shuffled += group
    proto = make_proto(
        type=Type.OTHER,
        tile_assignment_dimensions=[*spec.tile_counts, copies],
        tile_assignment_devices=shuffled,
        replicate_on_last_tile_dim=True,
    )
    back = ShardingSpec.from_proto(proto, len(spec.sharding), spec.num_shards)
    assert same_layout(back, spec)


def brute_force_specs(num_devices):
    """Every layout of one dimension that a spec expresses, and that spec."""
    factors = [
        sizes
        for length in range(4)
        for sizes in itertools.product(range(2, num_devices + 1), repeat=length)
        if math.prod(sizes) == num_devices
    ]
    layouts = {}
    for sizes in factors:
        for sharded in itertools.product([True, False], repeat=len(sizes)):
            places = [place for place, is_sharded in enumerate(sharded) if is_sharded]
            for order in itertools.permutations(places):
                chunks = [sizes[place] for place in order]
                mapping = [
                    S(order.index(place)) if place in order else R(size)
                    for place, size in enumerate(sizes)
                ]
                spec = ShardingSpec([C(chunks) if chunks else None], mapping)
                tiles = spec.tile_counts[0]
                held = loop_indices((tiles,), spec).values()
                layouts[tiles, tuple(plain(i, (tiles,))[0][0] for i in held)] = spec
    return layouts


@pytest.mark.parametrize("num_devices", [4, 6])
def test_from_proto_reads_a_device_list_exactly_if_some_spec_expresses_it(num_devices):
    layouts = brute_force_specs(num_devices)
    refused = 0
    for tiles in (d for d in range(2, num_devices + 1) if num_devices % d == 0):
        copies = num_devices // tiles
        for devices in itertools.permutations(range(num_devices)):
            proto = make_proto(
                type=Type.OTHER,
                tile_assignment_dimensions=[tiles, copies],
                tile_assignment_devices=devices,
                replicate_on_last_tile_dim=True,
            )
            held = [devices.index(device) // copies for device in range(num_devices)]
            expected = layouts.get((tiles, tuple(held)))
            if expected is None:
                refused += 1
                with pytest.raises(ValueError, match="is no transposition of a mesh"):
                    ShardingSpec.from_proto(proto)
            else:
                assert same_layout(ShardingSpec.from_proto(proto), expected)
    assert refused


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{devices=[2,2]0,2,1,3}", ShardingSpec((C(2), C(2)), (S(1), S(0)))),
        ("{devices=[2,2]<=[4]}", ShardingSpec((C(2), C(2)), (S(0), S(1)))),
        (
            "{devices=[2,3]<=[3,2]T(1,0)}",
            ShardingSpec((C(2), C(3)), (S(1), S(0))),
        ),
        (
            "{devices=[4,6]<=[3,8]T(1,0)}",
            ShardingSpec((C(4), C((2, 3))), (S(2), S(0), S(1))),
        ),
        (
            "{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}",
            ShardingSpec((C(2), None), (R(4), S(0))),
        ),
        (
            "{devices=[2,1,2,2]<=[2,2,2]T(1,2,0) "
            "last_tile_dims={replicated,replicated}}",
            ShardingSpec((C(2), None), (R(2), S(0), R(2))),
        ),
        (
            "{devices=[2,4]<=[2,4]T(1,0) last_tile_dim_replicate}",
            ShardingSpec((C(2),), (R(2), S(0), R(2))),
        ),
        (
            "{devices=[4,2]0,1,4,5,2,3,6,7 last_tile_dim_replicate}",
            ShardingSpec((C((2, 2)),), (S(1), S(0), R(2))),
        ),
    ],
)
def test_from_proto_of_chosen_texts(text, expected):
    proto = HloSharding.from_string(text).to_proto()
    assert ShardingSpec.from_proto(proto) == expected
    assert expected.hlo_sharding().num_devices() == expected.num_shards


def iota_proto(tiles, reshape, transpose, **fields):
    return make_proto(
        type=Type.OTHER,
        tile_assignment_dimensions=tiles,
        iota_reshape_dims=reshape,
        iota_transpose_perm=transpose,
        **fields,
    )


def test_iota_need_not_be_in_its_shortest_form():
    proto = iota_proto([2, 1, 4], [2, 1, 2, 2, 1], [2, 4, 1, 0, 3])
    expected = ShardingSpec((C(2), None, C((2, 2))), (S(1), S(0), S(2)))
    assert ShardingSpec.from_proto(proto) == expected
    assert HloSharding.from_proto(proto) == expected.hlo_sharding()


def test_refuses_an_iota_whose_copies_are_no_mesh_dimensions():
    # Devices 0, 4, 8 and 1 share the first tile.
    proto = iota_proto([3, 4], [3, 4], [1, 0], replicate_on_last_tile_dim=True)
    assert HloSharding.from_proto(proto).tile_assignment_devices()[:4] == [0, 1, 4, 8]
    with pytest.raises(
        ValueError, match="no ShardingSpec expresses: it is no transpos"
    ):
        ShardingSpec.from_proto(proto)


def test_replicated_subgroups_are_read_as_copies():
    kinds = [Type.REPLICATED, Type.REPLICATED]
    proto = iota_proto([2, 2, 3], [12], [0], last_tile_dims=kinds)
    assert ShardingSpec.from_proto(proto) == ShardingSpec((C(2),), (S(0), R(6)))


def test_one_tile_of_one_device_is_whole():
    proto = make_proto(
        type=Type.OTHER,
        tile_assignment_dimensions=[1, 1],
        tile_assignment_devices=[0],
    )
    assert ShardingSpec.from_proto(proto) == ShardingSpec((None, None), ())


def test_replicated_proto_needs_rank_and_devices():
    proto = make_proto(type=Type.REPLICATED)
    assert ShardingSpec.from_proto(proto, 2, 3) == ShardingSpec((None,) * 2, (R(3),))
    assert ShardingSpec.from_proto(proto, 2, 1) == ShardingSpec((None,) * 2, ())
    text = r"neither rank nor devices: pass ndim \(got 2\) and num_devices \(got None\)"
    with pytest.raises(ValueError, match=text):
        ShardingSpec.from_proto(proto, ndim=2)
    with pytest.raises(ValueError, match=r"pass ndim \(got None\) and .* \(got 3\)"):
        ShardingSpec.from_proto(proto, num_devices=3)


def test_rank_and_devices_must_be_those_of_the_proto():
    proto = ShardingSpec((C(2), None), (S(0), R(2))).sharding_proto()
    with pytest.raises(ValueError, match="ndim is 3, but the proto is for 2"):
        ShardingSpec.from_proto(proto, ndim=3)
    with pytest.raises(ValueError, match="num_devices is 8, but the proto is for 4"):
        ShardingSpec.from_proto(proto, num_devices=8)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("{manual}", "MANUAL"),
        ("{maximal device=3}", "MAXIMAL"),
        ("{{replicated}, {devices=[2]<=[2]}}", "TUPLE"),
        ("{unknown}", "UNKNOWN"),
        ("{unreduced}", "UNREDUCED"),
    ],
)
def test_refuses_a_kind_that_no_spec_expresses(text, kind):
    proto = HloSharding.from_string(text).to_proto()
    with pytest.raises(
        ValueError, match=f"expresses a proto of type {kind}: it can say"
    ):
        ShardingSpec.from_proto(proto, 1, 2)


@pytest.mark.parametrize("kind", ["manual", "unreduced"])
@pytest.mark.parametrize("others", ["", "replicated,"])
def test_refuses_a_subgroup_that_no_spec_expresses(kind, others):
    sizes = "2,2,2" if others else "2,2"
    count = 8 if others else 4
    text = f"{{devices=[{sizes}]<=[{count}] last_tile_dims={{{others}{kind}}}}}"
    proto = HloSharding.from_string(text).to_proto()
    with pytest.raises(
        ValueError, match=f"a last tile dimension of type {kind.upper()}"
    ):
        ShardingSpec.from_proto(proto)


@pytest.mark.parametrize(
    "text",
    [
        "{devices=[4]0,1,3,2}",
        "{devices=[4]1,0,3,2}",
        "{devices=[2,3]<=[2,3]T(1,0)}",
        "{devices=[6,4]<=[3,8]T(1,0)}",
        "{devices=[6,2]<=[3,4]T(1,0)}",
        "{devices=[3,4]<=[3,4]T(1,0) last_tile_dim_replicate}",
    ],
)
def test_refuses_an_order_of_devices_that_no_spec_expresses(text):
    proto = HloSharding.from_string(text).to_proto()
    with pytest.raises(
        ValueError, match="no ShardingSpec expresses: it is no transpos"
    ):
        ShardingSpec.from_proto(proto)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tile_assignment_devices": [0, 1, 2]}, "4 entries, but it gives 3 devices"),
        ({"iota_reshape_dims": [6], "iota_transpose_perm": [0]}, "gives 6 devices"),
        ({}, r"tile dimensions \[2, 2\] have 4 entries, but it gives 1 devices"),
        (
            {"tile_assignment_devices": [0, 1, 2, 2]},
            r"list the devices 0 to 3 once each, got \[0, 1, 2, 2\]",
        ),
        (
            {"tile_assignment_devices": [4, 1, 2, 3]},
            r"list the devices 0 to 3 once each, got \[4, 1, 2, 3\]",
        ),
    ],
)
def test_refuses_a_malformed_proto(fields, text):
    proto = make_proto(type=Type.OTHER, tile_assignment_dimensions=[2, 2], **fields)
    with pytest.raises(ValueError, match=text):
        ShardingSpec.from_proto(proto)


def test_refuses_what_is_no_proto():
    with pytest.raises(TypeError, match=r"expected an OpSharding proto .* got 'x'"):
        ShardingSpec.from_proto("x")
