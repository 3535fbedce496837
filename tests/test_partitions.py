"""Values cut into partitions: alone, inside maps, and under JAX's transformations.

The cases of JAX's own test of `sharded_jit`, with its numbers, come first.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardmap.map.api import spmap
from shardmap.map.constraints import partition_axes, partition_cuts
from shardmap.map.partitions import sharded_jit, with_sharding_constraint
from shardmap.sharding.named import spec_of
from shardmap.sharding.spec import Chunked, Replicated, ShardedAxis, ShardingSpec


def spread(*shape):
    return np.sin(np.arange(math.prod(shape), dtype=np.float32)).reshape(shape)


X, Y = spread(8, 8), np.cos(spread(8, 8))


def assert_close(got, wanted):
    """Equal structures, dtypes and shapes, and nearly equal values."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def buffers(array):
    return [shard.data.shape for shard in array.addressable_shards]


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


@pytest.mark.parametrize("in_parts", [(P(2, 1), None), (P(2, 1),)], ids=["all", "x"])
@pytest.mark.parametrize("static", [1, (1,), -1])
def test_static_arguments(in_parts, static):
    got = sharded_jit(
        lambda x, y: x + y(), in_parts, P(2, 1), static_argnums=static
    )(X, lambda: 3)
    assert_close(got, jnp.asarray(X + 3))
    assert buffers(got) == [(4, 8)] * 2


def test_keyword_arguments_are_whole():
    got = sharded_jit(lambda x, *, y: x + y, (2, 1), (2, 1))(X, y=Y)
    assert_close(got, jnp.asarray(X + Y))


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

    got = sharded_jit(fun, parts, parts)(X)
    assert_close(got, jax.jit(lambda x: (x + 1) * 2)(X))
    assert buffers(got) == [shape] * 2


def test_a_constraint_inside_a_loop_inside_jit():
    @jax.jit
    def count(x):
        def step(x):
            return with_sharding_constraint(x + 1, P(2, 1))

        return jax.lax.while_loop(lambda x: x[0, 0] < X[0, 0] + 9.5, step, x)

    got = sharded_jit(count, None, None)(X)
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


def test_two_calls_compile_once():
    traces = []

    def fun(x):
        traces.append(x)
        return x * 2

    doubled = sharded_jit(fun, P(2), P(2))
    doubled(np.arange(8.0))
    with jax.log_compiles(False), jax.check_tracer_leaks(False):
        assert_close(
            doubled(np.arange(8.0) + 1), jnp.arange(8, dtype=np.float32) * 2 + 2
        )
        doubled(jax.device_put(np.arange(8.0), jax.devices()[5]))
    assert len(traces) == 1
    doubled(np.arange(6.0))
    assert len(traces) == 2


ANNOTATIONS = ["sharding={devices=[2,1]<=[2]}", "sharding={replicated}"]


@pytest.mark.parametrize(
    "sharded",
    [
        sharded_jit(lambda x, y: x + y, (P(2, 1), P(2, 1)), None),
        sharded_jit(
            lambda x, y: with_sharding_constraint(x, P(2, 1)) + y, None, None, 2
        ),
    ],
    ids=["arguments", "constraint"],
)
def test_the_hlo_is_annotated(sharded):
    text = jax.jit(sharded).lower(X, Y).as_text("hlo")
    for annotation in ANNOTATIONS:
        assert annotation in text


@pytest.mark.parametrize("parts", [(4, 1), (2, 2), (1, 4), (8, 1), (3, 2), (2, 3)])
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


def test_a_constraint_alone_under_jit_takes_the_first_devices():
    got = jax.jit(lambda x: with_sharding_constraint({"a": x, "b": x}, (2, 2)))(X)
    assert_close(got, {"a": jnp.asarray(X), "b": jnp.asarray(X)})
    assert len(pieces_in_order(got["a"])) == 4


def test_a_replicated_constraint_alone_changes_nothing():
    assert_close(with_sharding_constraint(jnp.asarray(X), None), jnp.asarray(X))
    got = jax.jit(lambda x: with_sharding_constraint(x, None))(X)
    assert buffers(got) == [(8, 8)]


def test_a_method_can_be_decorated():
    class Model:
        scale = 3.0

        @functools.partial(sharded_jit, in_parts=((1,), (2,)), out_parts=(2,))
        def methodlike(self, x):
            return self * x

        @functools.partial(
            sharded_jit, in_parts=(None, (2,)), out_parts=(2,), static_argnums=0
        )
        def method(self, x):
            return self.scale * x

    assert_close(Model().method(X[0]), jnp.asarray(3 * X[0]))
    assert Model.method.__name__ == "method"


# Inside a map

FOUR = spread(2, 4, 4), np.cos(spread(2, 4, 4))

PAIRS = [
    (P(2, 1), P(2, 1)),
    (P(2, 1), P(1, 2)),
    (P(2, 2), P(2, 2)),
    (P(4, 1), P(2, 2)),
]


def check_map(fun, in_parts, out_parts, *args, count, in_axes=0):
    """`spmap` of the sharded function against `jax.vmap` of the plain one."""
    mapped = spmap(sharded_jit(fun, in_parts, out_parts), "i", in_axes=in_axes)
    got = mapped(*args)
    assert_close(got, jax.jit(jax.vmap(fun, in_axes, axis_name="i"))(*args))
    for leaf in jax.tree.leaves(got):
        assert len(buffers(leaf)) == count
        assert leaf.sharding.device_set == set(jax.devices()[:count])
    return got


def spec_inside_a_map(parts, total, ndim):
    """The mapped axis of 2, then the partitions."""
    counts = (1,) * ndim if parts is None else tuple(parts)
    sharding = [Chunked(2)] + [Chunked(count) if count > 1 else None for count in counts]
    axes = [ShardedAxis(k) for k in range(sum(entry is not None for entry in sharding))]
    return ShardingSpec(sharding, [*axes, *[Replicated(total)] * (parts is None)])


def product(x, y):
    return x @ y


def three(x, y):
    return x @ y, x @ y + x, x + y


def with_constants(x, y):
    return x @ y + np.ones((4, 4), np.float32) + jnp.ones((4, 4))


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_map_of_a_product(pair, replicated):
    out = None if replicated else pair[0]
    total = math.prod(pair[0])
    got = check_map(product, pair, out, *FOUR, count=2 * total)
    if set(map(tuple, pair)) != {(4, 1), (2, 2)}:
        assert spec_of(got) == spec_inside_a_map(out, total, 2)
    assert spec_of(got).tile_counts == (2, *(out or (1, 1)))


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("pair", PAIRS[1:], ids=str)
def test_a_map_with_several_results(pair, replicated):
    out = None if replicated else (pair[1], pair[0], None)
    check_map(three, pair, out, *FOUR, count=2 * math.prod(pair[0]))


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("pair", PAIRS[1:], ids=str)
def test_a_map_with_constant_arrays(pair, replicated):
    out = None if replicated else pair[0]
    check_map(with_constants, pair, out, *FOUR, count=2 * math.prod(pair[0]))


def test_a_map_of_nested_arguments_and_results():
    def fun(x, rest):
        a, (y, b) = rest
        z = (x @ y) * a + b
        return z, ((z + 1, x), z.T)

    args = (FOUR[0], (spread(2), (FOUR[1], spread(2))))
    in_parts = (P(2, 1), (None, (P(1, 2), None)))
    out_parts = (P(2, 1), ((P(1, 2), None), P(2, 1)))
    check_map(fun, in_parts, out_parts, *args, count=4)


def test_a_map_of_two_hundred_arguments():
    args = [spread(2, 4, 4) + k for k in range(200)]
    got = spmap(sharded_jit(lambda *args: sum(args), P(2, 1), P(2, 1)))(*args)
    np.testing.assert_allclose(got, sum(args), rtol=1e-4)
    assert buffers(got) == [(1, 2, 4)] * 4


def test_a_constraint_inside_a_map():
    def fun(x):
        return jnp.dot(with_sharding_constraint(x, P(2, 1)), x) * 2

    for inner in (sharded_jit(fun, None, None), fun):
        got = spmap(inner)(FOUR[0])
        assert_close(got, jax.jit(jax.vmap(lambda x: jnp.dot(x, x) * 2))(FOUR[0]))
        assert len(buffers(got)) == 4


def test_a_map_with_unmapped_arguments():
    def fun(x, y, _):
        return x @ y

    args = (FOUR[0][0], FOUR[1][0], spread(2))
    check_map(
        fun, (P(2, 1), None, None), None, *args, count=4, in_axes=(None, None, 0)
    )


def test_operands_and_results_are_cut_along_both():
    mapped = spmap(sharded_jit(product, ((2, 1), (1, 4)), (2, 1)))
    with pytest.raises(ValueError, match="4 total partitions but 2 are expected"):
        mapped(*FOUR)
    lowered = spmap(sharded_jit(product, ((2, 1), (1, 2)), (2, 1))).lower(*FOUR)
    assert lowered.in_specs == (
        spec_inside_a_map((2, 1), 2, 2),
        spec_inside_a_map((1, 2), 2, 2),
    )
    assert lowered.out_specs == spec_inside_a_map((2, 1), 2, 2)
    # Each device multiplies its rows with all columns.
    assert "f32[4,4]{1,0} all-gather" in "".join(
        line.replace("f32[1,4,4]{2,1,0}", "f32[4,4]{1,0}")
        for line in lowered.compile().as_text().splitlines()
    )
    assert "= f32[2,4]{1,0} dot(" in lowered.compile().as_text()


def with_collectives(x):
    total = jax.lax.psum(x, "i") + jax.lax.axis_index("i")
    return total @ jax.lax.all_gather(x, "i")[0] + jax.lax.ppermute(x, "i", [(0, 1)])


@pytest.mark.parametrize("lowering", ["manual", "spmd"])
def test_collectives_go_over_the_mapped_axis_only(lowering):
    sharded = sharded_jit(with_collectives, (2, 2), (4, 1))
    got = spmap(sharded, "i", lowering=lowering)(FOUR[0])
    assert_close(got, jax.jit(jax.vmap(with_collectives, axis_name="i"))(FOUR[0]))
    assert spec_of(got).tile_counts == (2, 4, 1)
    assert len(buffers(got)) == 8


@pytest.mark.parametrize("size", [1, 3, 4, 6])
def test_more_elements_than_devices_for_them_share_these(size):
    x = spread(size, 4, 4)

    def fun(x):
        return x @ x + jax.lax.psum(x, "i")

    got = spmap(sharded_jit(fun, (2, 2), (2, 2)), "i")(x)
    assert_close(got, jax.jit(jax.vmap(fun, axis_name="i"))(x))
    assert len(buffers(got)) == 4 * min(size, 2)


def test_maps_inside_maps_have_partitions_too():
    def fun(x):
        return x @ x + jax.lax.psum(x, ("i", "j"))

    x = spread(2, 2, 4, 4)
    got = spmap(spmap(sharded_jit(fun, (2, 1), (1, 2)), "j"), "i")(x)
    assert_close(got, jax.jit(jax.vmap(jax.vmap(fun, axis_name="j"), axis_name="i"))(x))
    assert spec_of(got).tile_counts == (2, 2, 1, 2)
    assert len(buffers(got)) == 8


def test_partitions_on_given_devices():
    devices = jax.devices()[::-1][:4]
    got = spmap(sharded_jit(jnp.sin, (2, 1), (2, 1)), devices=devices)(FOUR[0])
    assert_close(got, jnp.sin(FOUR[0]))
    assert list(got.sharding.mesh.devices.flat) == devices


# Transformations

SHARDED = sharded_jit(lambda x, y: jnp.sin(x) @ y, ((2, 1), (1, 2)), (2, 1))


def plain(x, y):
    return jnp.sin(x) @ y


def loss(fun):
    return lambda x, y: (jnp.cos(fun(x, y)) * jnp.arange(4.0)).sum()


TRANSFORMATIONS = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(loss(f), (0, 1)),
    "jit of grad": lambda f: jax.jit(jax.grad(loss(f), (0, 1))),
    "jvp": lambda f: lambda x, y: jax.jvp(f, (x, y), (y, x)),
    "hessian": lambda f: jax.hessian(lambda x, y: loss(f)(x, y)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(loss(f))),
    "scan": lambda f: lambda x, y: jax.lax.scan(
        lambda c, _: (f(c, y), c), x, None, length=3
    ),
    "itself": lambda f: lambda x, y: f(f(x, y), y),
}


@pytest.mark.parametrize("transform", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_transformed(transform):
    x, y = FOUR[0]
    x = FOUR[0][0]
    assert_close(transform(SHARDED)(x, y), jax.jit(transform(plain))(x, y))


@pytest.mark.parametrize("transform", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_transformed_inside_a_map(transform):
    got = spmap(transform(SHARDED))(*FOUR)
    assert_close(got, jax.jit(jax.vmap(transform(plain)))(*FOUR))
    assert {len(buffers(leaf)) for leaf in jax.tree.leaves(got)} == {4}


@pytest.mark.parametrize("name", ["jit", "jit of grad", "jvp"])
def test_transformed_outside_of_a_map(name):
    transform = TRANSFORMATIONS[name]
    got = transform(spmap(SHARDED))(*FOUR)
    assert_close(got, jax.jit(transform(jax.vmap(plain)))(*FOUR))


def test_the_gradient_of_a_map_is_cut_like_its_arguments():
    got = jax.jit(jax.grad(lambda x, y: spmap(SHARDED)(x, y).sum(), (0, 1)))(*FOUR)
    assert_close(got, jax.grad(lambda x, y: jax.vmap(plain)(x, y).sum(), (0, 1))(*FOUR))
    assert [spec_of(leaf).tile_counts for leaf in got] == [(2, 2, 1), (2, 1, 2)]


@pytest.mark.parametrize("dims", [(0, 0), (2, None), (None, 1)])
def test_vmap_leaves_the_new_dimension_alone(dims):
    x, y = spread(4, 4, 4), np.cos(spread(4, 4, 4))
    args = [a if dim is not None else a[0] for a, dim in zip((x, y), dims, strict=True)]
    for transform in (lambda f: f, jax.jit, spmap_over_two):
        given = args if transform is not spmap_over_two else [np.stack([a] * 2) for a in args]
        got = transform(jax.vmap(SHARDED, dims))(*given)
        wanted = jax.jit(jax.vmap(plain, dims))(*args)
        assert_close(got, wanted if given is args else jnp.stack([wanted] * 2))


def spmap_over_two(fun):
    return spmap(fun)


def test_a_map_inside_vmap():
    x = spread(3, 2, 4, 4)
    got = jax.vmap(spmap(SHARDED))(x, x)
    assert_close(got, jax.jit(jax.vmap(jax.vmap(plain)))(x, x))
    assert spec_of(got).tile_counts == (1, 2, 2, 1)


def test_the_same_function_alone_and_in_a_map():
    def fun(x):
        return jnp.sin(with_sharding_constraint(x, (2, 1)))

    for transform in (fun, jax.jit(fun), jax.checkpoint(fun)):
        for _ in range(2):
            assert_close(jax.jit(transform)(FOUR[0][0]), jnp.sin(FOUR[0][0]))
            assert_close(spmap(transform)(FOUR[0]), jnp.sin(FOUR[0]))


@pytest.mark.parametrize("option", [jax.disable_jit, jax.debug_nans])
def test_debugging_options(option):
    with option(True):
        assert_close(SHARDED(X, Y), jnp.asarray(np.sin(X) @ Y))
        assert_close(spmap(SHARDED)(*FOUR), jnp.asarray(np.sin(FOUR[0]) @ FOUR[1]))


# What is wrong


def test_too_few_devices():
    with pytest.raises(
        ValueError,
        match="sharded_jit computation requires 9 devices, but only 8 devices are",
    ):
        sharded_jit(lambda x: x, P(9), None)(np.ones(9))
    with pytest.raises(
        ValueError,
        match="with_sharding_constraint computation requires 9 devices, but only 8",
    ):
        with_sharding_constraint(np.ones(9), (9,))


def test_too_few_devices_for_a_map():
    with pytest.raises(
        ValueError,
        match=r"spmap over 'i' with 9 partitions inside requires at least 9 devices "
        r"\(2 elements x 9 partitions = 18 .* only 8 devices are available",
    ):
        spmap(sharded_jit(lambda x: x, (9,), None), "i")(np.ones((2, 9)))


def constrained(parts):
    return lambda x: with_sharding_constraint(x, parts)


@pytest.mark.parametrize(
    ("sharded", "message"),
    [
        (
            sharded_jit(lambda x: x, (2, 1), (2, 2)),
            r"out_parts of result has 4 total partitions but 2 are expected, as "
            r"in_parts of x has",
        ),
        (
            sharded_jit(constrained((1, 2)), (2, 2), (2, 2)),
            r"with_sharding_constraint has 2 total partitions but 4 are expected, as "
            r"in_parts of x",
        ),
        (
            sharded_jit(lambda x: x, (2, 1), None, num_partitions=4),
            r"in_parts of x has 2 total partitions but 4 are expected, as "
            r"num_partitions",
        ),
        (
            sharded_jit(lambda x: constrained((8, 1))(constrained((2, 1))(x)), None, None),
            r"with_sharding_constraint has 8 total partitions but 2 are expected",
        ),
    ],
)
def test_totals_that_differ(sharded, message):
    for fun in (sharded, jax.jit(sharded)):
        with pytest.raises(ValueError, match=message):
            fun(X)


def test_totals_that_differ_inside_a_map():
    with pytest.raises(
        ValueError, match=r"over 'i', .* has 4 total partitions but 2 are expected"
    ):
        spmap(lambda x: constrained((2, 2))(constrained((2, 1))(x)), "i")(FOUR[0])


@pytest.mark.parametrize(
    ("in_parts", "out_parts", "message"),
    [
        (
            ({"a": (2, 1), "b": None},),
            None,
            r"tree\['a'\] is float32\[5,8\]: dimension 0 of size 5 is not divisible by "
            r"2 parts",
        ),
        (
            (2, 4),
            None,
            r"tree\['a'\] .* dimension 0 of size 5 [^.]*tree\['b'\] is float32\[4\] "
            r"\(rank 1\), but parts \(2, 4\) are for rank 2",
        ),
        (
            None,
            [(1, 3), None],
            r"result\[0\] is float32\[5,8\]: dimension 1 of size 8 is not divisible by 3",
        ),
        (({"a": None},), None, r"in_parts must be a pytree prefix of the positional"),
        (None, [None], r"sharded_jit of fun out_parts must be a pytree prefix of the"),
    ],
)
def test_parts_that_do_not_fit(in_parts, out_parts, message):
    def fun(tree):
        return [tree["a"], tree["b"]]

    tree = {"a": spread(5, 8), "b": spread(4)}
    with pytest.raises(ValueError, match="(?s)sharded_jit of fun.*" + message):
        sharded_jit(fun, in_parts, out_parts)(tree)


def test_a_constraint_that_does_not_fit():
    with pytest.raises(ValueError, match=r"x\['a'\] is float32\[5\]: dimension 0 of"):
        with_sharding_constraint({"a": spread(5)}, (2,))
    with pytest.raises(ValueError, match=r"x is float32\[5\] \(rank 1\), but parts"):
        spmap(constrained((1, 2)))(spread(2, 5))


@pytest.mark.parametrize("parts", [2, "x", (2, "x"), (2.0,), P("x"), (True, 2)])
def test_parts_that_are_none(parts):
    for make in (
        lambda: sharded_jit(jnp.sin, parts, None),
        lambda: sharded_jit(jnp.sin, None, parts),
        lambda: with_sharding_constraint(X, parts),
    ):
        with pytest.raises(TypeError, match="must be a tuple of ints, None, or"):
            make()


def test_other_mistakes():
    with pytest.raises(ValueError, match=r"in_parts must be counts of at least 1"):
        sharded_jit(jnp.sin, (2, 0), None)
    with pytest.raises(ValueError, match=r"num_partitions must be counts of at least"):
        sharded_jit(jnp.sin, None, None, 0)
    with pytest.raises(TypeError, match="sharded_jit expects a callable, but got 3"):
        sharded_jit(3, None, None)
    with pytest.raises(TypeError, match=r"argument name of type .*str.* static_argnums"):
        sharded_jit(lambda x, name: x, None, None)(X, "x")


def test_a_mesh_without_axes_for_partitions():
    mesh = Mesh(jax.devices()[:2], "d")
    with pytest.raises(ValueError, match=r"\(2, 1\) need 2 devices .* \{'d': 2\}, has"):
        spmap(SHARDED, mesh=mesh, mesh_axes="d")(*FOUR)
    with pytest.raises(ValueError, match="inside of jax.shard_map there are none"):
        jax.jit(
            jax.shard_map(
                constrained((2, 1)),
                mesh=mesh,
                in_specs=P("d"),
                out_specs=P("d"),
            )
        )(X)


# The mesh axes for partitions


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
