"""The sharding model: entries, specs as values, indices, and the listed proto."""

import dataclasses
import pickle

import jax
import numpy as np
import pytest
from hypothesis import given
from jaxlib.xla_client import HloSharding, OpSharding

from shardmap import (
    Chunked,
    NoSharding,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    Unstacked,
    mesh_sharding_spec,
    spec_to_indices,
)
from tests.reference import loop_indices
from tests.strategies import specs, specs_and_shapes

C, U, S, R = Chunked, Unstacked, ShardedAxis, Replicated
N = None
Type = OpSharding.Type


# Entries


WITH_FIELD = [
    (Chunked, "chunks", "a number of chunks in Chunked"),
    (Unstacked, "size", "the size in Unstacked"),
    (ShardedAxis, "axis", "the axis in ShardedAxis"),
    (Replicated, "replicas", "the number of replicas in Replicated"),
]


each_kind = pytest.mark.parametrize(("kind", "field", "what"), WITH_FIELD)


def test_compares_and_hashes_by_type_and_value():
    assert Unstacked(2) != Replicated(2)
    assert Unstacked(2) != Chunked(2)
    assert ShardedAxis(2) != Replicated(2)
    assert Unstacked(2) != Unstacked(3)
    assert Unstacked(2) == Unstacked(2)
    assert NoSharding() == eval(repr(NoSharding()))
    assert len({Unstacked(2), Replicated(2), Unstacked(2), Chunked(2)}) == 3


@each_kind
def test_is_immutable(kind, field, what):
    entry = kind(2)
    with pytest.raises(dataclasses.FrozenInstanceError, match=field):
        setattr(entry, field, 3)


@each_kind
def test_takes_its_field_by_the_old_name(kind, field, what):
    assert kind(**{field: 2}) == kind(2)
    assert getattr(kind(2), field) == ((2,) if kind is Chunked else 2)
    assert dataclasses.replace(kind(2), **{field: 3}) == kind(3)


def test_chunks_are_stored_as_a_tuple_of_ints():
    for chunks in (2, [2], (2,), np.int32(2), np.array([2]), (n for n in [2])):
        entry = Chunked(chunks)
        assert entry == Chunked((2,))
        assert hash(entry) == hash(Chunked((2,)))
        assert type(entry.chunks) is tuple
        assert type(entry.chunks[0]) is int


def test_numpy_integers_are_stored_as_ints():
    for kind in (Unstacked, ShardedAxis, Replicated):
        assert [type(each) for each in dataclasses.astuple(kind(np.uint8(2)))] == [int]


@each_kind
def test_refuses_what_is_no_integer(kind, field, what):
    for value in (True, np.True_, 2.0, None, "2", *[[2, 2.0]] * (kind is Chunked)):
        with pytest.raises(TypeError, match=f"{what} must be an integer, got "):
            kind(value)


def test_refuses_sizes_below_one_and_negative_axes():
    for kind in (Chunked, Unstacked, Replicated, lambda n: C((2, n))):
        for value in (0, -3):
            text = f"at least 1, got {value}: a mesh dimension has at least one device"
            with pytest.raises(ValueError, match=text):
                kind(value)
    with pytest.raises(ValueError, match="at least 0, got -1: sharded axes are count"):
        ShardedAxis(-1)


# Specs as values


@given(specs())
def test_prints_as_the_code_that_builds_it_and_pickles(spec):
    assert eval(repr(spec)) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(eval(repr(spec))) == hash(spec)


def test_old_field_names_lists_and_no_sharding():
    spec = ShardingSpec(sharding=[NoSharding(), C([2])], mesh_mapping=[S(0)])
    assert spec.sharding == (None, C(2))
    assert spec.mesh_mapping == (S(0),)
    assert spec == ShardingSpec((None, C(2)), (S(0),))
    assert spec != ShardingSpec((C(2), None), (S(0),))
    assert spec != ShardingSpec((None, U(2)), (S(0),))
    assert len({spec, ShardingSpec((None, C(2)), (S(0),))}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError, match="sharding"):
        spec.sharding = ()


def test_chunked_into_no_chunks_is_not_cut():
    assert Chunked(()).chunks == ()
    spec = ShardingSpec((C([]), C(2)), (S(0),))
    assert spec == ShardingSpec((None, C(2)), (S(0),))
    assert spec.shard_shape((3, 4)) == (3, 2)


def test_stacked_changes_unstacked_only():
    spec = ShardingSpec((U(2), C((2, 3)), N), (S(1), R(2), S(0), S(2)))
    expected = ShardingSpec((C(2), C((2, 3)), N), spec.mesh_mapping)
    assert spec.stacked() == expected
    assert expected.stacked() == expected


def test_mesh_shape_num_shards_and_shard_shape():
    spec = ShardingSpec((C((2, 3)), N, U(5)), (S(2), R(7), S(0), S(1)))
    assert spec.mesh_shape == (5, 7, 2, 3)
    assert spec.num_shards == 210
    assert spec.sharded_axis_sizes == (2, 3, 5)
    assert spec.tile_counts == (6, 1, 5)
    assert spec.shard_shape((12, 4, 5)) == (2, 4)
    assert spec.shard_shape(np.array([12, 4, 5])) == (2, 4)


def test_a_spec_of_very_many_devices_costs_nothing():
    spec = ShardingSpec((C((2**40, 2**20)), U(2**30)), (S(2), S(0), R(2**50), S(1)))
    assert spec.num_shards == 2**140
    assert spec.shard_shape((2**61, 2**30)) == (2,)
    assert spec.stacked().shard_shape((2**61, 2**30)) == (2, 1)


@pytest.mark.parametrize(
    ("sharding", "mesh_mapping", "problem"),
    [
        ((C(2),), (), r"1 sharded axes once, of sizes \(2,\), but uses \[\]\. Write"),
        ((C((2, 3)),), (S(0),), r"2 sharded axes .* \(2, 3\), but uses \[0\]"),
        ((U(3),), (S(0), R(2), S(0)), r"\(3,\), but uses \[0, 0\]\. .* for copies"),
        ((C(2), N), (S(0), S(1)), r"1 sharded axes once, .* but uses \[0, 1\]"),
        ((), (S(0),), r"its 0 sharded axes once, of sizes \(\), but uses \[0\]"),
    ],
)
def test_refuses_a_mapping_that_does_not_use_each_axis_once(
    sharding, mesh_mapping, problem
):
    with pytest.raises(
        ValueError, match=f"ShardingSpec.* is not a valid layout: .*{problem}"
    ):
        ShardingSpec(sharding, mesh_mapping)


def test_refuses_entries_of_another_type():
    with pytest.raises(TypeError, match=r"an entry of sharding must be .*got 2"):
        ShardingSpec((2,), ())
    with pytest.raises(TypeError, match=r"entry of mesh_mapping must be .*got None"):
        ShardingSpec((), (None,))


# Indices


ALL = np.s_[:]


ROWS = [(0, ALL), (1, ALL)]


MULTIPLE = [(0, ALL, np.s_[0:2]), (0, ALL, np.s_[2:4])] * 2


MULTIPLE += [(1, ALL, np.s_[0:2]), (1, ALL, np.s_[2:4])] * 2


# The cases of JAX's old SpecToIndicesTest: shape, spec, indices in device order.
SPEC_TO_INDICES = {
    "ShardsPerAxis": (
        (4, 8),
        ShardingSpec([C(2), C(2)], [S(0), S(1)]),
        [np.s_[0:2, 0:4], np.s_[0:2, 4:8], np.s_[2:4, 0:4], np.s_[2:4, 4:8]],
    ),
    "ShardedAxisPermutation": (
        (4, 8),
        ShardingSpec([C(2), C(2)], [S(1), S(0)]),
        [np.s_[0:2, 0:4], np.s_[2:4, 0:4], np.s_[0:2, 4:8], np.s_[2:4, 4:8]],
    ),
    "ShardedAxisPermutationAndReplication": (
        (4, 8),
        ShardingSpec([C(2), C(2)], [R(2), S(1), S(0)]),
        [np.s_[0:2, 0:4], np.s_[2:4, 0:4], np.s_[0:2, 4:8], np.s_[2:4, 4:8]] * 2,
    ),
    "UnshardedAxis": (
        (4, 8),
        ShardingSpec([C(2), N], [S(0)]),
        [np.s_[0:2, :], np.s_[2:4, :]],
    ),
    "NoSharding": ((4, 8), ShardingSpec([N, N], []), [np.s_[:, :]]),
    "UnmaterializedAxis1": (
        (4, 8),
        ShardingSpec([U(4), N], [S(0)]),
        [np.s_[0, :], np.s_[1, :], np.s_[2, :], np.s_[3, :]],
    ),
    "UnmaterializedAxis2": (
        (2, 2),
        ShardingSpec([N, U(2)], [S(0)]),
        [np.s_[:, 0], np.s_[:, 1]],
    ),
    "ReplicationAfterUnsharded": (
        (2, 8),
        ShardingSpec([U(2), N], [S(0), R(3)]),
        [np.s_[0, :]] * 3 + [np.s_[1, :]] * 3,
    ),
    "ReplicationPosition2": (
        (2, 8),
        ShardingSpec([U(2), C(2)], [S(0), S(1), R(3)]),
        [np.s_[0, 0:4]] * 3
        + [np.s_[0, 4:8]] * 3
        + [np.s_[1, 0:4]] * 3
        + [np.s_[1, 4:8]] * 3,
    ),
    "ReplicationPosition1": (
        (2, 8),
        ShardingSpec([U(2), C(2)], [S(0), R(3), S(1)]),
        [np.s_[0, 0:4], np.s_[0, 4:8]] * 3 + [np.s_[1, 0:4], np.s_[1, 4:8]] * 3,
    ),
    "ReplicationPosition0": ((2, 8), ShardingSpec([U(2), N], [R(3), S(0)]), ROWS * 3),
    "MultipleReplications": (
        (2, 7, 4),
        ShardingSpec([U(2), N, C(2)], [R(3), R(2), S(0), R(2), S(1)]),
        MULTIPLE * 6,
    ),
    "ReplicatedScalar": ((), ShardingSpec([], [R(3)]), [()] * 3),
}


# The cases of JAX's old ShardArgsTest.
SHARD_ARGS = {
    "in_axes=0": SPEC_TO_INDICES["UnmaterializedAxis1"],
    "in_axes=1": SPEC_TO_INDICES["UnmaterializedAxis2"],
    "unsharded": SPEC_TO_INDICES["NoSharding"],
    "partitioned 1 axis": SPEC_TO_INDICES["UnshardedAxis"],
    "partitioned 2 axes": SPEC_TO_INDICES["ShardsPerAxis"],
    "partitioned 2 axes permuted": SPEC_TO_INDICES["ShardedAxisPermutation"],
    "partitioned+sharding": (
        (2, 8),
        ShardingSpec([U(2), C(2)], [S(0), S(1)]),
        [np.s_[0, 0:4], np.s_[0, 4:8], np.s_[1, 0:4], np.s_[1, 4:8]],
    ),
    "replication+sharding": SPEC_TO_INDICES["ReplicationAfterUnsharded"],
    "replication only": (
        (2, 8),
        ShardingSpec([N, N], [R(3)]),
        [np.s_[:, :]] * 3,
    ),
    "multiple replicated": (
        (1, 8),
        ShardingSpec([U(1), C(2)], [R(2), S(0), R(2), S(1)]),
        [np.s_[0, 0:4], np.s_[0, 4:8]] * 4,
    ),
    "replicated scalar": ((), ShardingSpec([], [R(2), R(3)]), [()] * 6),
}


def cases(table):
    return pytest.mark.parametrize(
        ("shape", "spec", "expected"), table.values(), ids=list(table)
    )


@cases(SPEC_TO_INDICES | SHARD_ARGS)
def test_indices_of_the_old_tests(shape, spec, expected):
    assert spec_to_indices(shape, spec) == tuple(expected)


@cases(SHARD_ARGS)
def test_shards_of_the_old_tests(shape, spec, expected):
    """The layout as seen from outside puts x[indices[k]] on device k."""
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    devices = jax.devices()[: len(expected)]
    placed = jax.device_put(x, spec.stacked().named_sharding(devices))
    buffers = {shard.device: shard.data for shard in placed.addressable_shards}
    assert list(buffers) == devices
    for device, index in zip(devices, expected, strict=True):
        held = np.asarray(buffers[device])
        assert held.size == np.size(np.asarray(x)[index])
        np.testing.assert_array_equal(
            held.reshape(spec.shard_shape(shape)), np.asarray(x)[index]
        )


@given(specs_and_shapes())
def test_indices_agree_with_the_loop(spec_and_shape):
    spec, shape = spec_and_shape
    expected = loop_indices(shape, spec)
    indices = spec.indices(shape)
    assert isinstance(indices, np.ndarray)
    assert indices.dtype == object
    assert indices.shape == spec.mesh_shape
    assert {place: indices[place] for place in np.ndindex(indices.shape)} == expected
    assert spec_to_indices(shape, spec) == tuple(expected.values())
    assert spec.num_shards == len(expected)


EVERY_USE_OF_A_SHAPE = [
    lambda spec, shape: spec.indices(shape),
    lambda spec, shape: spec.shard_shape(shape),
    lambda spec, shape: spec_to_indices(shape, spec),
]


@pytest.mark.parametrize("use", EVERY_USE_OF_A_SHAPE)
@pytest.mark.parametrize(
    ("shape", "error", "text"),
    [
        (
            (4,),
            ValueError,
            r"shape \(4,\) has 1 dimensions, but .* has 3 entries .*: give one per dim",
        ),
        (
            (9, 3, 5),
            ValueError,
            r"dimension 0 has size 9, but is cut by Chunked\(\(2, 2\)\) into 4 equal "
            "shards: pad it to 12, or cut it into fewer shards",
        ),
        (
            (8, 6, 5),
            ValueError,
            r"dimension 1 has size 6, but is cut by Unstacked\(3\) into 3 equal "
            r"shards: write Unstacked\(6\), or Chunked",
        ),
        (
            (6, 2, -1),
            ValueError,
            "a dimension of the shape must be at least 0, got -1",
        ),
        (
            (8.0, 3, 5),
            TypeError,
            "a dimension of the shape must be an integer, got 8.0",
        ),
    ],
)
def test_refuses_a_shape_that_does_not_fit(use, shape, error, text):
    spec = ShardingSpec((C((2, 2)), U(3), N), (S(0), S(1), S(2)))
    with pytest.raises(error, match=text):
        use(spec, shape)


# The proto, and which device holds which tile


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
    proto = spec.sharding_proto()
    assert proto.type == Type.OTHER
    assert proto.tile_assignment_dimensions == tiles
    assert proto.tile_assignment_devices == devices
    assert spec.tile_assignment().tolist() == np.reshape(devices, tiles).tolist()
    assert proto.replicate_on_last_tile_dim == bool(copied)


def test_more_devices_than_1024_are_not_listed():
    for size, is_listed in ((1024, True), (1025, False)):
        spec = ShardingSpec((C(size), None), (S(0),))
        proto = spec.sharding_proto()
        assert proto.tile_assignment_devices == [*range(size)] * is_listed
        assert bool(proto.iota_reshape_dims) != is_listed
        assert HloSharding.from_proto(proto) == spec.hlo_sharding()
        assert ShardingSpec.from_proto(proto) == spec


def test_unstacked_has_no_proto_and_names_stacked():
    spec = ShardingSpec((None, U(4)), (S(0),))
    for what, ask in (
        ("proto", spec.sharding_proto),
        ("tile assignment", spec.tile_assignment),
        ("proto", spec.hlo_sharding),
        ("Shardy text", spec.sdy),
        ("NamedSharding", lambda: spec.named_sharding(jax.devices()[:4])),
    ):
        text = rf"has no {what}: dimension 1 is Unstacked\(4\).*spec.stacked\(\) is the"
        with pytest.raises(ValueError, match=text):
            ask()
    assert str(spec.stacked().hlo_sharding()) == "{devices=[1,4]<=[4]}"


# Specs of mesh axes


def test_mesh_sharding_spec_takes_avals_as_pxla_did():
    spec_on = mesh_sharding_spec({"x": 2, "y": 4}, ("x", "y"))
    for aval in (
        jax.core.ShapedArray((3, 8), np.float32),
        jax.ShapeDtypeStruct((3, 8), np.float32),
        np.zeros((3, 8)),
    ):
        expected = ShardingSpec((None, C((4, 2))), (S(1), S(0)))
        assert (
            spec_on(aval, {"y": 1, "x": 1}) == spec_on(2, {"y": 1, "x": 1}) == expected
        )
        assert spec_on(aval, {}) == ShardingSpec((None, None), (R(2), R(4)))
    with pytest.raises(
        ValueError, match=r"dimension 0 has size 3, .* into 2 equal shards"
    ):
        spec_on(aval, {"x": 0})


def test_mesh_sharding_spec_refuses_axes_without_a_dimension():
    with pytest.raises(ValueError, match=r"rank 1 .*: 'x' cuts dimension 1"):
        mesh_sharding_spec({"x": 2}, ("x",))(1, {"x": 1})
