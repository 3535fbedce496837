"""`sharded_jit` and `with_sharding_constraint` alone: parts, devices, messages.

The cases of JAX's own test of `sharded_jit`, with its numbers, come first.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardmap import (
    Chunked,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    sharded_jit,
    spec_of,
    with_sharding_constraint,
)
from tests.api.partition_checks import assert_close, buffers, spread

X, Y = spread(8, 8), np.cos(spread(8, 8))


def pieces_in_order(array):
    """The pieces by number of their device."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    assert [shard.device for shard in shards] == jax.devices()[: len(shards)]
    return [np.asarray(shard.data) for shard in shards]


# Alone


def test_a_replicated_result_is_whole_on_both_devices():
    got = sharded_jit(lambda x, y: x + y, (P(2, 1), P(2, 1)), None)(X, Y)
    assert_close(got, jnp.asarray(X + Y))
    assert buffers(got) == [(8, 8)] * 2
    assert spec_of(got) == ShardingSpec((None, None), (Replicated(2),))


ARGUMENTS = (X, (Y, [1.0, X + Y]))


@pytest.mark.parametrize(
    "in_parts",
    [(None, (P(2, 1), [None, P(2, 1)])), [None, ((2, 1), [None, (2, 1)])], None],
    ids=["P", "tuples", "None"],
)
def test_parts_are_a_pytree_prefix_of_the_arguments(in_parts):
    def fun(x, rest):
        y, (a, z) = rest
        return (x @ y) * a + z

    got = sharded_jit(fun, in_parts, P(2, 1))(*ARGUMENTS)
    assert_close(got, jax.jit(fun)(*ARGUMENTS))
    assert buffers(got) == [(4, 8)] * 2


def test_one_tuple_of_ints_is_for_all_arguments():
    got = sharded_jit(lambda x, y: x - y, (2, 1), (1, 2))(X, Y)
    assert_close(got, jnp.asarray(X - Y))
    assert buffers(got) == [(8, 4)] * 2


@pytest.mark.parametrize(
    ("out_parts", "shapes"),
    [
        (
            (P(2, 1), ((P(1, 2), None), P(2, 1))),
            [(4, 8), (8, 4), (8, 8), (4, 8)],
        ),
        (None, [(8, 8)] * 4),
    ],
    ids=["nested", "None"],
)
def test_parts_are_a_pytree_prefix_of_the_result(out_parts, shapes):
    def fun(x):
        return x + 1, ((x + 2, x + 3), x + 4)

    got = sharded_jit(fun, P(2, 1), out_parts)(X)
    assert_close(got, jax.jit(fun)(X))
    assert [buffers(leaf) for leaf in jax.tree.leaves(got)] == [[s] * 2 for s in shapes]


@pytest.mark.parametrize("in_parts", [(P(2, 1), None), (P(2, 1),)])
def test_static_arguments(in_parts):
    got = sharded_jit(lambda x, y: x + y(), in_parts, P(2, 1), static_argnums=1)(
        X, lambda: 3
    )
    assert_close(got, jnp.asarray(X + 3))
    assert buffers(got) == [(4, 8)] * 2


def test_without_any_parts_there_is_one_device():
    got = sharded_jit(lambda x: x + 1, None, None)(1.0)
    assert float(got) == 2.0
    assert buffers(got) == [()]


def test_num_partitions_says_how_many_devices_where_no_parts_do():
    got = sharded_jit(lambda x: with_sharding_constraint(x, None) + 1, None, None, 4)(X)
    assert_close(got, jnp.asarray(X + 1))
    assert buffers(got) == [(8, 8)] * 4


@pytest.mark.parametrize(
    ("parts", "shape"), [(P(2, 1), (4, 8)), (P(1, 2), (8, 4)), (None, (8, 8))]
)
def test_a_constraint_inside(parts, shape):
    def fun(x):
        return with_sharding_constraint(x + 1, P(1, 2)) * 2

    got = sharded_jit(fun, parts, parts, 2)(X)
    assert_close(got, jax.jit(lambda x: (x + 1) * 2)(X))
    assert buffers(got) == [shape] * 2


def test_a_constraint_inside_a_loop_inside_jit():
    @jax.jit
    def count(x):
        def step(x):
            return with_sharding_constraint(x + 1, P(2, 1))

        return jax.lax.while_loop(lambda x: x[0, 0] < X[0, 0] + 9.5, step, x)

    got = sharded_jit(count, None, None, 2)(X)
    assert_close(got, jnp.asarray(X + 10))
    assert buffers(got) == [(8, 8)] * 2


def test_the_gradient_of_a_constraint():
    def gradient(parts, z, cotangent):
        def fun(z):
            return jnp.sin(z if parts is None else with_sharding_constraint(z, parts))

        return jax.vjp(fun, z)[1](cotangent)[0]

    got = sharded_jit(functools.partial(gradient, P(2, 2)), P(4, 1), None)(X, Y)
    assert_close(got, jax.jit(functools.partial(gradient, None))(X, Y))
    assert buffers(got) == [(8, 8)] * 4


# Stages


def scaled(x, n, y, *, z):
    return {"sum": x * n + y["y"], "z": z}


def test_what_is_lowered_takes_the_arguments_as_the_function_does():
    split = sharded_jit(
        scaled, (P(2, 1), None, {"y": P(1, 2)}), {"sum": P(1, 2), "z": None}, None, 1
    )
    args, elsewhere = (X, 3, {"y": Y}), jax.device_put(Y, jax.devices()[5])
    lowered = split.lower(X, 3, {"y": elsewhere}, z=elsewhere)
    assert_close(lowered.compile()(X, {"y": Y}, z=Y), split(*args, z=Y))
    rows = ShardingSpec((Chunked((2,)), None), (ShardedAxis(0),))
    columns = ShardingSpec((None, Chunked((2,))), (ShardedAxis(0),))
    whole = ShardingSpec((None, None), (Replicated(2),))
    assert lowered.in_specs == (rows, None, {"y": columns}, {"z": whole})
    assert lowered.out_specs == {"sum": columns, "z": whole}
    assert lowered.out_info["sum"].shape == (8, 8)


def test_calls_of_other_kinds_have_programs_of_their_own():
    split = sharded_jit(lambda x, n: list(x[:n]), None, None, 2, static_argnums=1)
    for size, n in ((4, 2), (4, 3), (5, 5)):
        assert_close(split(X[:size], n), list(jnp.asarray(X[:n])))
    assert_close(split(np.arange(4), 2), list(jnp.arange(2)))


ANNOTATIONS = ["sharding={devices=[2,1]<=[2]}", "sharding={replicated}"]


@pytest.mark.parametrize(
    "sharded",
    [
        sharded_jit(lambda x, y: x + y, (P(2, 1), P(2, 1)), None),
        sharded_jit(
            lambda x, y: with_sharding_constraint(x, P(2, 1)) + y, None, None, 2
        ),
        sharded_jit(
            lambda x, y: with_sharding_constraint(x, None) + y, P(2, 1), P(2, 1)
        ),
    ],
    ids=["arguments", "constraint", "replicated constraint"],
)
def test_the_hlo_is_annotated(sharded):
    text = sharded.lower(X, Y).as_text("hlo")
    for annotation in ANNOTATIONS:
        assert annotation in text


def test_a_program_is_on_as_many_devices_as_there_are_partitions():
    sharded = sharded_jit(lambda x: x + 1, P(2, 1), P(2, 1))
    for around in (jax.jit, lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))):
        assert buffers(around(sharded)(X)) == [(4, 8)] * 2
    got = jax.jit(lambda x: with_sharding_constraint({"a": x, "b": x}, (2, 2)))(X)
    assert_close(got, {"a": jnp.asarray(X), "b": jnp.asarray(X)})
    assert spec_of(got["a"]).tile_counts == (2, 2)
    assert len(got["a"].sharding.device_set) == 4


@pytest.mark.parametrize("parts", [(1, 4), (8, 1), (3, 2)])
def test_partition_k_is_on_device_k(parts):
    x = spread(24, 24)
    wanted = [
        column
        for row in np.split(x, parts[0])
        for column in np.split(row, parts[1], axis=1)
    ]
    results = (
        sharded_jit(lambda x: x * 1, parts, parts)(x),
        with_sharding_constraint(x, parts),
    )
    for got in results:
        assert_close(pieces_in_order(got), wanted)
        sharding = [Chunked(count) if count > 1 else None for count in parts]
        axes = [ShardedAxis(k) for k in range(sum(count > 1 for count in parts))]
        assert spec_of(got) == ShardingSpec(sharding, axes)


def test_parts_of_several_kinds_in_one_program():
    def fun(x, y):
        z = with_sharding_constraint(x @ y, (3, 2))
        return with_sharding_constraint(z + 1, (1, 6)), z

    x, y = spread(6, 6), spread(6, 6)
    got = sharded_jit(fun, ((2, 3), (6, 1)), ((6, 1), (1, 6)))(x, y)
    assert_close(got, (jnp.asarray(x @ y + 1), jnp.asarray(x @ y)))
    assert buffers(got[0]) == [(1, 6)] * 6


PLACES = {
    "numpy": np.asarray,
    "uncommitted": jnp.asarray,
    "another device": lambda x: jax.device_put(x, jax.devices()[6]),
    "other devices": lambda x: jax.device_put(
        x, NamedSharding(Mesh(jax.devices()[4:], "d"), P(None, "d"))
    ),
    "as wanted": lambda x: with_sharding_constraint(x, (2, 1)),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_arguments_may_lie_anywhere(place):
    x = place(X)
    assert_close(sharded_jit(jnp.sin, (2, 1), None)(x), jnp.sin(X))
    assert buffers(with_sharding_constraint(x, (1, 4))) == [(8, 2)] * 4


def test_a_replicated_constraint_alone_changes_nothing():
    assert_close(with_sharding_constraint(jnp.asarray(X), None), jnp.asarray(X))
    got = jax.jit(lambda x: with_sharding_constraint(x, None))(X)
    assert buffers(got) == [(8, 8)]


def test_devices_are_the_first_ones_or_those_of_set_mesh():
    x, y = np.ones((4, 6), np.float32), np.ones((6, 4), np.float32)
    product = sharded_jit(lambda x, y: x @ y, ((2, 2), None), (2, 2))
    assert product(x, y).sharding.device_set == {*jax.devices()[:4]}
    last = jax.devices()[4:]
    with jax.set_mesh(Mesh(np.array(last), "a")):
        result = product(x, y)
    np.testing.assert_array_equal(result, x @ y)
    assert result.sharding.device_set == {*last}
    with jax.set_mesh(Mesh(jax.devices()[:1], "a")):
        with pytest.raises(
            ValueError, match="requires 4 devices, but only 1 device is"
        ):
            product(x, y)
