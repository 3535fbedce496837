"""The sharding model and its indices."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given

from shardmap.sharding.entries import (
    Chunked,
    Replicated,
    ShardedAxis,
    Unstacked,
)
from shardmap.sharding.spec import ShardingSpec, spec_to_indices
from tests.reference import loop_indices
from tests.strategies import specs_and_shapes

C, U, S, R = Chunked, Unstacked, ShardedAxis, Replicated
N = None
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


@pytest.mark.parametrize("make", [np.asarray, jax.numpy.asarray])
@cases(SHARD_ARGS)
def test_shards_of_the_old_tests(shape, spec, expected, make):
    """The layout as seen from outside puts x[indices[k]] on device k."""
    x = make(np.arange(np.prod(shape, dtype=int)).reshape(shape))
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


@given(specs_and_shapes())
def test_every_element_is_in_as_many_shards_as_there_are_replicas(spec_and_shape):
    spec, shape = spec_and_shape
    counts = np.zeros(shape, dtype=int)
    for index in spec_to_indices(shape, spec):
        counts[index] += 1
        assert counts[index].shape == spec.shard_shape(shape)
    replicas = [a.replicas for a in spec.mesh_mapping if isinstance(a, Replicated)]
    assert (counts == np.prod(replicas, dtype=int)).all()


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 8), ShardingSpec((C((2,)), C((4,))), (S(1), S(0)))),
        ((8,), ShardingSpec((C((2, 4)),), (S(0), S(1)))),
        ((8,), ShardingSpec((C((2, 4)),), (S(1), S(0)))),
        ((2, 12, 5, 3), ShardingSpec((U(2), C((2, 3)), N, U(3)), map(S, [3, 1, 0, 2]))),
        ((), ShardingSpec((), (R(2), R(2)))),
        ((0, 4), ShardingSpec((C(2), C(2)), (R(2), S(1), S(0)))),
    ],
)
def test_indices_of_chosen_specs_agree_with_the_loop(shape, spec):
    indices = spec.indices(shape)
    assert dict(np.ndenumerate(indices)) == loop_indices(shape, spec)


def test_chunks_of_one_dimension_lie_on_the_mesh_in_either_order():
    major_first = ShardingSpec((C((2, 2)),), (S(0), S(1)))
    minor_first = ShardingSpec((C((2, 2)),), (S(1), S(0)))
    assert [s.start for (s,) in spec_to_indices((4,), major_first)] == [0, 1, 2, 3]
    assert [s.start for (s,) in spec_to_indices((4,), minor_first)] == [0, 2, 1, 3]


def test_replication_is_the_inner_dimension_in_the_example_of_the_design():
    spec = ShardingSpec((C(4),), (S(0), R(2)))
    x = np.array([1, 2, 3, 4])
    held = [x[index].item() for index in spec_to_indices((4,), spec)]
    assert held == [1, 1, 2, 2, 3, 3, 4, 4]


def test_one_piece_is_a_slice_with_numbers_and_an_uncut_dimension_is_not():
    spec = ShardingSpec((C(1), N), (S(0),))
    assert spec_to_indices((4, 8), spec) == ((slice(0, 4), slice(None)),)


def test_indices_may_be_written_to_without_changing_others():
    spec = ShardingSpec((C(2),), (S(0), R(2)))
    indices = spec.indices((4,))
    indices[0, 0] = None
    assert indices[0, 1] == (slice(0, 2),)


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
        ((C(2),), (), r"axis 0 of size 2 is used by no mesh dimension: add Sha.*\(0\)"),
        (
            (C((2, 3)),),
            (S(0),),
            "sharded axis 1 of size 3 is used by no mesh dimension",
        ),
        (
            (U(3),),
            (S(0), R(2), S(0)),
            r"sharded axis 0 of size 3 is used by mesh dimensions \[0, 2\]: use it",
        ),
        (
            (C(2), N),
            (S(0), S(1)),
            r"mesh dimension 1 is ShardedAxis\(1\), but there are only 1 sharded axes",
        ),
        ((), (S(0),), r"ShardedAxis\(0\), but there are only 0 sharded axes"),
        (
            (C((2, 3)),),
            (S(2),),
            "axis 0 of size 2 .* axis 1 of size 3 .* only 2 sharded axes",
        ),
    ],
)
def test_refuses_a_mapping_that_does_not_use_each_axis_once(
    sharding, mesh_mapping, problem
):
    with pytest.raises(ValueError, match=f"ShardingSpec.* is no layout: .*{problem}"):
        ShardingSpec(sharding, mesh_mapping)


def test_refuses_entries_of_another_type():
    with pytest.raises(TypeError, match=r"an entry of sharding must be .*got 2"):
        ShardingSpec((2,), ())
    with pytest.raises(TypeError, match=r"entry of mesh_mapping must be .*got None"):
        ShardingSpec((), (None,))


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
            r"dimension 0 has size 9, which Chunked\(\(2, 2\)\) does not divide into 4 "
            "equal shards: pad it to 12 or cut it into fewer shards",
        ),
        (
            (8, 6, 5),
            ValueError,
            r"dimension 1 has size 6, but its entry is Unstacked\(3\): "
            r"write Unstacked\(6\), or Chunked",
        ),
        (
            (6, 2, -1),
            ValueError,
            "dimension 0 has size 6.*; dimension 1 has size 2.*; "
            "dimension 2 has the negative size -1",
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


def test_no_two_devices_of_an_unreplicated_spec_overlap():
    spec = ShardingSpec((C((2, 2)), C(2)), (S(2), S(1), S(0)))
    held = [
        set(itertools.product(range(*rows.indices(8)), range(*columns.indices(4))))
        for rows, columns in spec_to_indices((8, 4), spec)
    ]
    assert sum(map(len, held)) == len(set.union(*held)) == 32
