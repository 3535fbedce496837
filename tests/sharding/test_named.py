"""NamedSharding there and back, the spec of an array, and the layout of pmap."""

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

from shardmap.sharding.entries import Chunked, Replicated, ShardedAxis, Unstacked
from shardmap.sharding.spec import ShardingSpec, pmap_sharding, spec_of, spec_to_indices
from tests.reference import loop_indices, plain
from tests.strategies import specs, specs_and_shapes

C, U, S, R = Chunked, Unstacked, ShardedAxis, Replicated
P = PartitionSpec


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


def test_named_sharding_takes_devices_flat_or_as_an_array():
    spec = ShardingSpec((C(4),), (S(0), R(2)))
    flat = spec.named_sharding(jax.devices())
    for shape in [(8,), (4, 2), (2, 4)]:
        devices = np.array(jax.devices()).reshape(shape)
        assert spec.named_sharding(devices) == flat


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


def test_unstacked_has_no_named_sharding_and_names_stacked():
    spec = ShardingSpec((U(2),), (S(0),))
    with pytest.raises(ValueError, match=r"no NamedSharding: .*spec.stacked\(\)"):
        spec.named_sharding(jax.devices()[:2])


@pytest.mark.parametrize(
    ("partitions", "ndim", "expected"),
    [
        (P(), 2, ShardingSpec((None, None), (R(4), R(2), R(1)))),
        (P("x"), 2, ShardingSpec((C(4), None), (S(0), R(2), R(1)))),
        (P(None, "y"), 2, ShardingSpec((None, C(2)), (R(4), S(0), R(1)))),
        (P("y", "x"), 2, ShardingSpec((C(2), C(4)), (S(1), S(0), R(1)))),
        (P(("x", "y")), 1, ShardingSpec((C((4, 2)),), (S(0), S(1), R(1)))),
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


def test_from_named_sharding_counts_devices_in_the_order_of_the_mesh():
    devices = [jax.devices()[k] for k in (3, 1, 0, 2)]
    sharding = NamedSharding(mesh_of((2, 2), ("x", "y"), devices), P("y"))
    spec = ShardingSpec.from_named_sharding(sharding, 1)
    held = sharding.devices_indices_map((4,))
    assert [held[device] for device in devices] == list(spec_to_indices((4,), spec))


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
            "UNCONSTRAINED dimension is left to the compiler. Name its mesh axes",
        ),
        (
            NamedSharding(explicit_mesh(AxisType.Auto), P("x", unreduced={"y"})),
            "hold terms of a sum, which is still to be reduced",
        ),
        (
            NamedSharding(explicit_mesh(AxisType.Manual), P("y")),
            "it has MANUAL axes",
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
            "has size 9 and needs one device per index, got 8 devices. Cut",
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
