"""Specs to and from NamedSharding, other shardings, HloSharding, protos and Shardy."""

import itertools
import math
import re

import jax
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)
from jaxlib.xla_client import HloSharding, OpSharding

from shardmap import (
    Chunked,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    pmap_sharding,
    spec_of,
    spec_to_indices,
)
from tests.reference import (
    index_of_tile,
    loop_indices,
    plain,
    same_layout,
    tiles_of_devices,
)
from tests.strategies import specs, specs_and_shapes

C, S, R = Chunked, ShardedAxis, Replicated
P = PartitionSpec
Type = OpSharding.Type


# NamedSharding, and other shardings of JAX's


def mesh_of(sizes, names, devices=None):
    count = int(np.prod(sizes))
    devices = jax.devices()[:count] if devices is None else devices
    return Mesh(np.array(devices).reshape(sizes), names)


class MapSharding(jax.sharding.Sharding):
    """A sharding known only by what it says of each device."""

    def __init__(self, held):
        self.held = held

    def devices_indices_map(self, global_shape):
        return dict(zip(jax.devices(), self.held, strict=False))


@given(specs_and_shapes(unstacked=False, max_devices=8))
def test_named_sharding_puts_the_indices_on_the_devices(spec_and_shape):
    spec, shape = spec_and_shape
    devices = jax.devices()[: spec.num_shards][::-1]
    sharding = spec.named_sharding(devices)
    held = sharding.devices_indices_map(shape)
    assert [plain(held[device], shape) for device in devices] == [
        plain(index, shape) for index in spec_to_indices(shape, spec)
    ]
    assert sharding.shard_shape(shape) == spec.shard_shape(shape)


@given(specs(unstacked=False, max_devices=8))
def test_from_named_sharding_gives_back_the_spec(spec):
    sharding = spec.named_sharding(jax.devices()[: spec.num_shards])
    ndim = len(spec.sharding)
    assert ShardingSpec.from_named_sharding(sharding, ndim) == spec
    assert ShardingSpec.from_sharding(sharding, spec.tile_counts) == spec


def test_named_sharding_has_a_mesh_axis_per_mesh_dimension():
    spec = ShardingSpec((C((2, 2)), None, C(1)), (S(1), R(2), S(0), S(2)))
    sharding = spec.named_sharding(jax.devices(), ["a", "b", "c", "d"])
    assert dict(sharding.mesh.shape) == {"a": 2, "b": 2, "c": 2, "d": 1}
    assert list(sharding.mesh.devices.flat) == jax.devices()
    assert sharding.spec == P(("c", "a"), None, "d")
    default = spec.named_sharding(jax.devices())
    assert default.mesh.axis_names == ("axis0", "axis1", "axis2", "axis3")
    one = ShardingSpec((C(2),), (S(0),)).named_sharding(jax.devices()[:2], "data")
    assert one.mesh.axis_names == ("data",)
    assert one.spec == P("data")


def test_named_sharding_of_one_device_and_no_mesh_dimension_works():
    sharding = ShardingSpec((None,), ()).named_sharding(jax.devices()[3:4])
    y = jax.device_put(np.arange(3.0), sharding) + 1
    assert y.devices() == {jax.devices()[3]}
    np.testing.assert_array_equal(y, [1, 2, 3])


@pytest.mark.parametrize("count", [0, 3, 5])
def test_refuses_a_wrong_number_of_devices(count):
    spec = ShardingSpec((C(2),), (S(0), R(2)))
    text = rf"needs 4 devices \(a mesh of shape \(2, 2\)\), got {count}"
    with pytest.raises(ValueError, match=text):
        spec.named_sharding(jax.devices()[:count])


@pytest.mark.parametrize(
    ("partitions", "ndim", "expected"),
    [
        (P(), 2, ShardingSpec((None, None), (R(4), R(2), R(1)))),
        (P("x"), 2, ShardingSpec((C(4), None), (S(0), R(2), R(1)))),
        (P(None, "y"), 2, ShardingSpec((None, C(2)), (R(4), S(0), R(1)))),
        (P(("y", "x")), 1, ShardingSpec((C((2, 4)),), (S(1), S(0), R(1)))),
        (P((), ("x",)), 3, ShardingSpec((None, C(4), None), (S(0), R(2), R(1)))),
        (P("z", "y"), 2, ShardingSpec((C(1), C(2)), (R(4), S(1), S(0)))),
    ],
)
def test_from_named_sharding_of_chosen_partition_specs(partitions, ndim, expected):
    sharding = NamedSharding(mesh_of((4, 2, 1), ("x", "y", "z")), partitions)
    spec = ShardingSpec.from_named_sharding(sharding, ndim)
    assert spec == expected
    shape = (8,) * ndim
    held = sharding.devices_indices_map(shape)
    assert [plain(held[device], shape) for device in jax.devices()] == [
        plain(index, shape) for index in loop_indices(shape, spec).values()
    ]


def test_from_named_sharding_over_an_abstract_mesh():
    sharding = NamedSharding(AbstractMesh((4, 2), ("x", "y")), P("y"))
    expected = ShardingSpec((C(2),), (R(4), S(0)))
    assert ShardingSpec.from_named_sharding(sharding, 1) == expected


def explicit_mesh(kind):
    return AbstractMesh((2, 2), ("x", "y"), axis_types=(kind, AxisType.Explicit))


@pytest.mark.parametrize(
    ("sharding", "text"),
    [
        (
            NamedSharding(explicit_mesh(AxisType.Auto), P(None, None, "x")),
            "has 3 entries, but the array has only 2 dimensions",
        ),
        (
            NamedSharding(explicit_mesh(AxisType.Auto), P("x", P.UNCONSTRAINED)),
            "expresses .*UNCONSTRAINED.* over .* Name mesh axes, or None",
        ),
        (
            NamedSharding(explicit_mesh(AxisType.Auto), P("x", unreduced={"y"})),
            "expresses .*unreduced.* over .* nor unreduced or Manual axes",
        ),
        (
            NamedSharding(explicit_mesh(AxisType.Manual), P("y")),
            "expresses .* over .*Manual.* nor unreduced or Manual axes",
        ),
    ],
)
def test_refuses_a_named_sharding_that_no_spec_expresses(sharding, text):
    with pytest.raises(ValueError, match=text):
        ShardingSpec.from_named_sharding(sharding, 2)


def test_from_named_sharding_refuses_another_type():
    sharding = SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(TypeError, match="expected a NamedSharding, got SingleDevice"):
        ShardingSpec.from_named_sharding(sharding, 1)


@given(specs_and_shapes(unstacked=False, max_devices=8))
def test_from_sharding_reads_any_sharding_by_what_each_device_holds(spec_and_shape):
    spec, shape = spec_and_shape
    held = spec_to_indices(shape, spec)
    back = ShardingSpec.from_sharding(MapSharding(held), shape)
    assert back.num_shards == spec.num_shards
    assert [plain(index, shape) for index in spec_to_indices(shape, back)] == [
        plain(index, shape) for index in held
    ]


def test_from_sharding_of_a_single_device():
    sharding = SingleDeviceSharding(jax.devices()[2])
    assert ShardingSpec.from_sharding(sharding, (2, 3)) == ShardingSpec((None,) * 2, ())
    assert ShardingSpec.from_sharding(sharding, ()) == ShardingSpec((), ())


def test_from_sharding_refuses_unequal_pieces_and_unordered_devices():
    uneven = MapSharding([np.s_[0:1,], np.s_[1:4,]])
    text = r"cuts dimension 0 of size 4 into unequal shards \[\(0, 1\), \(1, 4\)\]"
    with pytest.raises(ValueError, match=text):
        ShardingSpec.from_sharding(uneven, (4,))
    diagonal = MapSharding([np.s_[0:2, 0:2], np.s_[2:4, 2:4]])
    with pytest.raises(ValueError, match="an order that no ShardingSpec expresses"):
        ShardingSpec.from_sharding(diagonal, (4, 4))
    with pytest.raises(TypeError, match=r"expected a jax.sharding.Sharding, got 3"):
        ShardingSpec.from_sharding(3, (4,))


def test_spec_of_arrays():
    x = np.arange(32.0).reshape(8, 4)
    spec = ShardingSpec((C((2, 2)), None), (S(1), R(2), S(0)))
    placed = jax.device_put(x, spec.named_sharding(jax.devices()))
    whole = ShardingSpec((None, None), ())
    assert spec_of(placed) == spec
    assert spec_of(x) == whole
    assert spec_of(np.float32(1)) == ShardingSpec((), ())
    assert spec_of(jax.numpy.asarray(x)) == whole
    assert spec_of(jax.device_put(x, jax.devices()[5])) == whole
    described = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed.sharding)
    assert spec_of(described) == spec
    keys = jax.random.split(jax.random.key(0), 4)
    row = ShardingSpec((C(4),), (S(0),))
    placed_keys = jax.device_put(keys, row.named_sharding(jax.devices()[:4]))
    assert spec_of(placed_keys) == row


@pytest.mark.parametrize("value", [3, [1, 2], jax.ShapeDtypeStruct((2,), np.int32)])
def test_spec_of_refuses_what_has_no_sharding(value):
    with pytest.raises(TypeError, match=r"spec_of needs an array, got .* no sharding"):
        spec_of(value)


def test_spec_of_refuses_a_tracer():
    with pytest.raises(TypeError, match="needs an array with values, got the tracer"):
        jax.jit(spec_of)(np.zeros(2))


@pytest.mark.parametrize(("dim", "axis"), [(0, 0), (1, 1), (-1, 1), (-2, 0)])
def test_pmap_sharding_gives_each_device_one_index(dim, axis):
    shape = (4, 6)
    sharding = pmap_sharding(shape, dim)
    assert isinstance(sharding, NamedSharding)
    held = sharding.devices_indices_map(shape)
    assert list(held) == jax.local_devices()[: shape[axis]]
    for k, index in enumerate(held.values()):
        expected = [(0, 4), (0, 6)]
        expected[axis] = (k, k + 1)
        assert plain(index, shape) == tuple(expected)
    x = jax.device_put(np.arange(24).reshape(shape), sharding)
    np.testing.assert_array_equal(x, np.arange(24).reshape(shape))


def test_pmap_sharding_is_the_layout_of_the_output_of_pmap():
    x = np.arange(24.0).reshape(8, 3)
    y = jax.pmap(lambda row: row + 1)(x)
    assert y.sharding.is_equivalent_to(pmap_sharding(x.shape), x.ndim)


def test_pmap_sharding_over_given_devices():
    devices = jax.devices()[::-1][:3]
    for given_devices in (devices, np.array(devices)):
        sharding = pmap_sharding((2, 3), 1, given_devices)
        assert list(sharding.devices_indices_map((2, 3))) == devices


def test_pmap_sharding_of_no_dimension_copies():
    for shape in ((), (3, 2)):
        everywhere = pmap_sharding(shape, None)
        assert everywhere.is_fully_replicated
        assert everywhere.device_set == set(jax.local_devices())
        some = pmap_sharding(shape, None, jax.devices()[2:4])
        assert some.is_fully_replicated
        assert some.device_set == set(jax.devices()[2:4])


@pytest.mark.parametrize(
    ("shape", "dim", "count", "text"),
    [
        ((4, 2), 0, 3, "dimension 0 of shape .* has size 4 .* got 3 devices"),
        ((4, 2), 1, 8, "dimension 1 of shape .* has size 2 .* got 8 devices"),
        (
            (9,),
            0,
            None,
            "has size 9 and needs as many devices, got 8 devices. Cut",
        ),
        ((4, 2), 2, None, r"sharded_dim 2 is out of range for shape \(4, 2\) of 2 dim"),
        ((), 0, None, r"sharded_dim 0 is out of range for shape \(\) of 0 dimensions"),
        ((4,), -2, None, "sharded_dim -2 is out of range"),
    ],
)
def test_pmap_sharding_refuses(shape, dim, count, text):
    devices = None if count is None else jax.devices()[:count]
    with pytest.raises(ValueError, match=text):
        pmap_sharding(shape, dim, devices)


# HloSharding and protos


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
    ours = spec.hlo_sharding().to_proto().SerializeToString()
    assert ours == expected.to_proto().SerializeToString()


@pytest.mark.parametrize("factor", [1, 2**4, 2**10])
def test_proto_does_not_grow_with_the_number_of_devices(factor):
    spec = ShardingSpec(
        (C((2**4, factor)), None), (S(1), R(2**3), S(0), R(2**3 * 1024 // factor))
    )
    proto = spec.sharding_proto()
    assert not proto.tile_assignment_devices
    assert len(proto.SerializeToString()) < 48
    assert ShardingSpec.from_proto(proto).num_shards == spec.num_shards == 2**20


@given(specs(unstacked=False))
def test_from_proto_gives_back_an_equal_layout(spec):
    ndim = len(spec.sharding)
    for given_proto in (spec.sharding_proto(), spec.hlo_sharding()):
        back = ShardingSpec.from_proto(given_proto, ndim, spec.num_shards)
        assert back.num_shards == spec.num_shards
        assert same_layout(back, spec)
        assert back.hlo_sharding() == spec.hlo_sharding()


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


def test_replicated_subgroups_are_read_as_copies():
    kinds = [Type.REPLICATED, Type.REPLICATED]
    proto = iota_proto([2, 2, 3], [12], [0], last_tile_dims=kinds)
    assert ShardingSpec.from_proto(proto) == ShardingSpec((C(2),), (S(0), R(6)))


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


ORDER = "an order that no ShardingSpec expresses: it is no transposition of a mesh"
OF_TYPE = "expresses a proto of type"
OF_LAST = "a last tile dimension of type"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{manual}", f"{OF_TYPE} MANUAL: it can say"),
        ("{maximal device=3}", f"{OF_TYPE} MAXIMAL: it can say"),
        ("{{replicated}, {devices=[2]<=[2]}}", f"{OF_TYPE} TUPLE: it can say"),
        ("{unknown}", f"{OF_TYPE} UNKNOWN: it can say"),
        ("{unreduced}", f"{OF_TYPE} UNREDUCED: it can say"),
        ("{devices=[2,2]<=[4] last_tile_dims={manual}}", f"{OF_LAST} MANUAL"),
        ("{devices=[2,2]<=[4] last_tile_dims={unreduced}}", f"{OF_LAST} UNREDUCED"),
        (
            "{devices=[2,2,2]<=[8] last_tile_dims={replicated,manual}}",
            f"{OF_LAST} MANUAL",
        ),
        ("{devices=[4]0,1,3,2}", ORDER),
        ("{devices=[4]1,0,3,2}", ORDER),
        ("{devices=[2,3]<=[2,3]T(1,0)}", ORDER),
        ("{devices=[6,4]<=[3,8]T(1,0)}", ORDER),
        ("{devices=[3,4]<=[3,4]T(1,0) last_tile_dim_replicate}", ORDER),
    ],
)
def test_refuses_a_proto_that_no_spec_expresses(text, message):
    proto = HloSharding.from_string(text).to_proto()
    with pytest.raises(ValueError, match=message):
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


# Shardy


def test_sdy_in_text():
    spec = ShardingSpec((C((2, 3)), None), (S(1), R(5), S(0)))
    assert spec.sdy() == (
        'sdy.mesh @mesh = <["axis0"=3, "axis1"=5, "axis2"=2]>\n'
        '#sdy.sharding<@mesh, [{"axis2", "axis0"}, {}]>'
    )
    assert spec.sdy(["x", "y", "z"]).endswith('[{"z", "x"}, {}]>')
    assert ShardingSpec((C(2),), (S(0),)).sdy("data") == (
        'sdy.mesh @mesh = <["data"=2]>\n#sdy.sharding<@mesh, [{"data"}]>'
    )


@given(specs(unstacked=False, max_devices=8, max_ndim=3))
def test_sdy_is_what_jax_prints_when_it_lowers_the_named_sharding(spec):
    named = spec.named_sharding(jax.devices()[: spec.num_shards])
    x = jax.ShapeDtypeStruct(spec.tile_counts, np.float32)
    text = jax.jit(lambda x: x, in_shardings=named).lower(x).as_text()
    mesh, sharding = spec.sdy().split("\n")
    assert f"{mesh} {{" in text
    assert re.search(r"sdy\.sharding = (.*?>)}", text)[1] == sharding


@pytest.mark.parametrize("names", [["x"], ["x", "y", "z"], ["x", "x"], "xy"])
def test_refuses_axis_names_that_do_not_fit_the_mesh(names):
    spec = ShardingSpec((C(2),), (S(0), R(2)))
    text = "axis_names must be 2 different names, one per mesh dimension of .*, got "
    with pytest.raises(ValueError, match=text):
        spec.sdy(names)
    with pytest.raises(ValueError, match=text):
        spec.named_sharding(jax.devices()[:4], names)
