"""Values cut into partitions inside maps, and under JAX's transformations.

The cases of JAX's own test of `pmap` of `sharded_jit`, with its numbers, come first.
"""

import contextlib
import math
import re

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
    make_mesh,
    mesh_map,
    sharded_jit,
    spec_of,
    spmap,
    with_sharding_constraint,
)
from tests.api.partition_checks import assert_close, buffers, spread
from tests.map_programs import float_index

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


def spec_inside_a_map(parts, ndim, replicas=()):
    """The mapped axis of 2, then the partitions."""
    counts = (1,) * ndim if parts is None else tuple(parts)
    sharding = [Chunked(count) if count > 1 else None for count in (2, *counts)]
    axes = [ShardedAxis(k) for k in range(sum(entry is not None for entry in sharding))]
    return ShardingSpec(sharding, [*axes, *map(Replicated, replicas)])


def product(x, y):
    return x @ y


def with_constants(x, y):
    return x @ y + np.ones((4, 4), np.float32) + jnp.ones((4, 4))


@pytest.mark.few(1)
@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_map_of_a_product(pair, replicated):
    out = None if replicated else pair[0]
    got = check_map(product, pair, out, *FOUR, count=2 * math.prod(pair[0]))
    if pair == (P(4, 1), P(2, 2)):  # Two mesh axes of 2 say both.
        chunks = (2, 2) if out else (1, 1)
        assert spec_of(got).tile_counts == (2, math.prod(chunks), 1)
    else:
        replicas = () if out else [count for count in pair[0] if count > 1]
        assert spec_of(got) == spec_inside_a_map(out, 2, replicas)


def test_a_map_with_constant_arrays():
    check_map(with_constants, PAIRS[1], P(2, 1), *FOUR, count=4)


def test_a_map_of_nested_arguments_and_results():
    def fun(x, rest):
        a, (y, b) = rest
        z = (x @ y) * a + b
        return z, ((z + 1, x), z.T)

    args = (FOUR[0], (spread(2), (FOUR[1], spread(2))))
    in_parts = (P(2, 1), (None, (P(1, 2), None)))
    out_parts = (P(2, 1), ((P(1, 2), None), P(2, 1)))
    check_map(fun, in_parts, out_parts, *args, count=4)


@pytest.mark.deep
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
    check_map(fun, (P(2, 1), None, None), None, *args, count=4, in_axes=(None, None, 0))


def test_operands_and_results_are_cut_along_both():
    lowered = spmap(sharded_jit(product, ((2, 1), (1, 2)), (2, 1))).lower(*FOUR)
    assert lowered.in_specs == (
        spec_inside_a_map((2, 1), 2),
        spec_inside_a_map((1, 2), 2),
    )
    assert lowered.out_specs == spec_inside_a_map((2, 1), 2)
    # Each device multiplies its rows with all columns.
    assert "= f32[2,4]{1,0} dot(" in lowered.compile().as_text()


SWAP = [(0, 1), (1, 0)]


def with_collectives(x):
    total = jax.lax.psum(x, "i") + float_index("i")
    return total @ jax.lax.all_gather(x, "i")[0] + jax.lax.ppermute(x, "i", SWAP)


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", ["manual", "spmd"])
def test_collectives_go_over_the_mapped_axis_only(lowering):
    sharded = sharded_jit(with_collectives, (2, 2), (4, 1))
    got = spmap(sharded, "i", lowering=lowering)(FOUR[0])
    assert_close(got, jax.jit(jax.vmap(with_collectives, axis_name="i"))(FOUR[0]))
    assert spec_of(got).tile_counts == (2, 4, 1)
    assert len(buffers(got)) == 8


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [1, 6])
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


def test_a_map_inside_without_devices_of_its_own_leaves_partitions_alone():
    x = spread(4, 2, 4, 4)
    got = spmap(spmap(sharded_jit(product, (2, 1), (2, 1))))(x, x)
    assert_close(got, jax.jit(jax.vmap(jax.vmap(product)))(x, x))
    assert spec_of(got).tile_counts == (4, 1, 2, 1)


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
    def weighted(x, y):
        result = fun(x, y)
        return (jnp.cos(result) * jnp.broadcast_to(jnp.arange(4.0), result.shape)).sum()

    return weighted


TRANSFORMATIONS = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(loss(f), (0, 1)),
    "jit of grad": lambda f: jax.jit(jax.grad(loss(f), (0, 1))),
    "jvp": lambda f: lambda x, y: jax.jvp(f, (x, y), (y, x)),
    "hessian": lambda f: jax.hessian(lambda x, y: loss(f)(x, y)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(loss(f))),
    "scan": lambda f: (
        lambda x, y: jax.lax.scan(lambda c, _: (f(c, y), c), x, None, length=3)
    ),
    "itself": lambda f: lambda x, y: f(f(x, y), y),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("transform", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_transformed(transform):
    x, y = FOUR[0]
    assert_close(transform(SHARDED)(x, y), jax.jit(transform(plain))(x, y))


@pytest.mark.few(1)
@pytest.mark.parametrize("transform", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_transformed_inside_a_map(transform):
    got = spmap(transform(SHARDED))(*FOUR)
    assert_close(got, jax.jit(jax.vmap(transform(plain)))(*FOUR))
    assert {len(buffers(leaf)) for leaf in jax.tree.leaves(got)} == {4}


def test_the_gradient_of_a_map_is_cut_like_its_arguments():
    got = jax.jit(jax.grad(lambda x, y: spmap(SHARDED)(x, y).sum(), (0, 1)))(*FOUR)
    assert_close(got, jax.grad(lambda x, y: jax.vmap(plain)(x, y).sum(), (0, 1))(*FOUR))
    assert [spec_of(leaf).tile_counts for leaf in got] == [(2, 2, 1), (2, 1, 2)]


@pytest.mark.few(1)
@pytest.mark.parametrize("dims", [(0, 0), (2, None), (None, 1)])
def test_vmap_leaves_the_new_dimension_alone(dims):
    x, y = spread(4, 4, 4), np.cos(spread(4, 4, 4))
    args = [a if dim is not None else a[0] for a, dim in zip((x, y), dims, strict=True)]
    wanted = jax.jit(jax.vmap(plain, dims))(*args)
    vectorized = jax.vmap(SHARDED, dims)
    assert_close(vectorized(*args), wanted)
    assert_close(jax.jit(vectorized)(*args), wanted)
    got = spmap(vectorized)(*(np.stack([a, a]) for a in args))
    assert_close(got, jnp.stack([wanted, wanted]))
    assert len(buffers(got)) == 4


def test_vmap_inserts_its_dimension_where_it_is():
    constrain = jax.vmap(lambda x: with_sharding_constraint(x, (2, 4)), 1, 1)
    got = constrain(spread(4, 3, 8))
    assert_close(got, jnp.asarray(spread(4, 3, 8)))
    assert spec_of(got).tile_counts == (2, 1, 4)


def test_the_spmd_lowering_keeps_elements_apart():
    mapped = spmap(sharded_jit(jnp.sin, (2, 1), (2, 1)), lowering="spmd")
    text = mapped.lower(FOUR[0]).compile().as_text()
    assert "= f32[1,2,4]{2,1,0}" in text
    assert "all-gather" not in text


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


# What is wrong


def constrained(parts):
    return lambda x: with_sharding_constraint(x, parts)


def test_too_few_devices_for_a_map():
    with pytest.raises(
        ValueError,
        match=r"spmap over 'i' with 9 partitions inside requires at least 9 devices "
        r"\(18 for all 2 elements at a time\), but there are 8\. "
        r"There are 8 devices here; for 9 virtual",
    ):
        spmap(sharded_jit(lambda x: x, (9,), None), "i")(np.ones((2, 9)))


def test_totals_that_differ_inside_a_map():
    with pytest.raises(
        ValueError, match=r"over 'i', .* has 4 total partitions but 2 are expected"
    ):
        spmap(lambda x: constrained((2, 2))(constrained((2, 1))(x)), "i")(FOUR[0])


MESH = make_mesh({"d": 4, "m": 2})
FOUR_ROWS = spread(4, 4, 4)


def on_rows(fun, kind, lowering):
    """`fun` of each of four elements on a mesh that is given."""
    if kind == "spmap":
        return spmap(fun, mesh=MESH, mesh_axes="d", lowering=lowering)
    return mesh_map(
        lambda x: fun(x[0])[None],
        MESH,
        {"d": 0},
        {"d": 0},
        axis_names="d",
        lowering=lowering,
    )


@pytest.mark.parametrize("lowering", ["manual", "spmd"])
@pytest.mark.parametrize("kind", ["spmap", "mesh_map"])
@pytest.mark.parametrize(
    "fun",
    [constrained((2, 1)), sharded_jit(jnp.sin, (2, 1), None)],
    ids=["constraint", "sharded_jit"],
)
def test_a_mesh_that_is_given_has_no_axes_for_partitions(fun, kind, lowering):
    with pytest.raises(
        ValueError,
        match=r"parts \((None, )?2, 1\) need 2 devices for each element, but the mesh "
        r"\{'d': 4, 'm': 2\} has no axes for them\. Leave .* with_sharding_constraint",
    ):
        on_rows(fun, kind, lowering)(FOUR_ROWS)


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", ["manual", "spmd"])
@pytest.mark.parametrize("kind", ["spmap", "mesh_map"])
@pytest.mark.parametrize("mesh", [MESH, MESH.abstract_mesh], ids=["mesh", "abstract"])
def test_its_other_axes_are_named_instead(mesh, kind, lowering):
    def fun(x):
        cut = NamedSharding(mesh, P("m"))
        return jax.lax.with_sharding_constraint(jnp.sin(x), cut) * 2

    mapped = on_rows(fun, kind, lowering)
    assert_close(mapped(FOUR_ROWS), jnp.sin(FOUR_ROWS) * 2)
    text = jax.jit(mapped).lower(FOUR_ROWS).compile().as_text()
    sines = re.findall(r"= f32\[([\d,]+)\]\S* sine\(", text)
    assert sines == ["1,2,4"]


def test_inside_shard_map_there_are_no_axes_for_partitions():
    mesh = Mesh(jax.devices()[:2], "d")
    with pytest.raises(ValueError, match=r"mesh {.d.: 2} has no axes for them"):
        jax.jit(
            jax.shard_map(
                constrained((2, 1)),
                mesh=mesh,
                in_specs=P("d"),
                out_specs=P("d"),
            )
        )(spread(8, 8))


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("fun", [constrained((2, 1)), SHARDED], ids=["parts", "jit"])
def test_vmap_with_a_name(fun, is_set):
    args = FOUR[: 2 if fun is SHARDED else 1]
    mesh = Mesh(jax.devices()[:2], "d")
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        got = jax.vmap(fun, axis_name="k")(*args)
    assert_close(got, jax.vmap(plain)(*args) if fun is SHARDED else jnp.asarray(*args))


def test_partitions_in_a_map_with_a_loop():
    def fun(x):
        doubled = sharded_jit(lambda x: 2 * jnp.sin(x), (4, 1), (4, 1))(x)
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, doubled)

    text = spmap(fun, "i").lower(np.ones((2, 8, 3), np.float32)).compile().as_text()
    assert "f32[2,3]" in text
