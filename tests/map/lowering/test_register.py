"""Maps as programs for many devices: nesting, names, meshes around, shared jaxprs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from tests.map.map_checks import mesh_of, nest, step
from tests.map_programs import (
    assert_same,
    both_lowerings,
    collectives_of,
    float_index,
    same_under_vmap,
    spread,
)

# Nesting


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "transform",
    [
        lambda fun: fun,
        lambda fun: lambda x, w: jax.jvp(lambda x: fun(x, w), (x,), (x,)),
        lambda fun: jax.value_and_grad(lambda x, w: (fun(x, w) ** 2).sum()),
    ],
    ids=["call", "jvp", "grad"],
)
def test_perfect_nests_have_the_collectives_of_one_map_over_a_grid(transform):
    mesh = mesh_of((4, 2), ("i", "j"))
    grid = jax.shard_map(
        lambda x, w: step(x[0, 0], w)[None, None],
        mesh=mesh,
        in_specs=(P("i", "j"), P()),
        out_specs=P("i", "j"),
        check_vma=False,
    )
    x, w = spread((4, 2, 3)), spread((3,))
    lying = jax.device_put((x, w), (NamedSharding(mesh, P("i", "j")), None))
    ours, theirs = transform(nest(sm.spmap, step)), transform(grid)
    assert_same(jax.jit(ours)(x, w), jax.jit(theirs)(x, w))
    counts = [collectives_of(jax.jit(fun), *lying) for fun in (ours, theirs)]
    assert sum(counts[0].values()) <= sum(counts[1].values())
    assert set(counts[0]) <= set(counts[1])


@both_lowerings
def test_a_nest_lies_on_all_devices(spmap):
    result = nest(spmap, step)(spread((4, 2, 3)), spread((3,)))
    assert result.sharding.spec == P("i", "j")
    assert {s.data.shape for s in result.addressable_shards} == {(1, 1, 3)}


def test_siblings_of_different_names_and_sizes():
    def build(map_):
        def fun(x):
            four = map_(lambda y: lax.psum(y, ("i", "j")) * y, axis_name="j")(x)
            two = map_(
                lambda y: lax.psum(y, "k") * y * float_index("i"), axis_name="k"
            )(x[:2])
            three = map_(lambda y: y - lax.pmean(y, ("k", "i")), axis_name="k")(x[1:])
            return four.sum() + two.sum(), four, two, three

        return map_(fun, axis_name="i")

    same_under_vmap(build, spread((2, 4)))


@pytest.mark.deep
@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(2, 3), (4, 4), (8, 3), (3, 5), (16, 2)])
@pytest.mark.parametrize("name", ["i", frozenset("i")], ids=str)
def test_an_inner_name_hides_the_outer_one(name, shape):
    def build(map_):
        def fun(x):
            inner = map_(lambda y: lax.pmean(jnp.sin(y), name) * y, axis_name=name)
            return lax.pmean(x, name).sum() * inner(x) + float_index(name)

        mapped = map_(fun, axis_name=name)
        return jax.value_and_grad(lambda x: (mapped(x) ** 2).sum())

    same_under_vmap(build, spread(shape))


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", [(2, 2), (4, 4), (8, 2)])
@pytest.mark.parametrize("outer", ["axis1", "axis0", ("a", 1), frozenset("x")])
def test_names_of_mesh_axes_do_not_capture_names_of_maps(outer, shape):
    # Mesh axes of maps without a usable name are called axis0, axis1, ...
    def build(map_):
        def fun(x):
            doubled = map_(lambda y: (y * 2, y.sum()))(x[:, None])[0]
            again = map_(
                lambda y: lax.psum(y, "axis0") * (1 + lax.psum(y, "axis0")),
                axis_name="axis0",
            )(x)
            return doubled, again, lax.axis_index("outside")

        inner = map_(fun, axis_name="outside")
        return map_(lambda x: inner(x)[:2], axis_name=outer)

    same_under_vmap(build, spread((*shape, 2)))


def test_a_collective_over_an_outer_axis_meets_a_mesh_name():
    name = frozenset("x")

    def build(map_):
        def inner(y):
            return lax.psum(y, name) * 3 + lax.psum(y, "axis0") + lax.psum(y, "axis1")

        middle = map_(map_(inner, axis_name="axis1"), axis_name="axis0")
        return map_(lambda x: middle(x) + lax.psum(x, name), axis_name=name)

    same_under_vmap(build, spread((4, 4, 2)))


def test_outer_indices_with_maps_inside():
    # On a mesh that is only partly manual, JAX lowers axis_index in another way.
    def build(map_):
        def fun(x):
            inner = map_(lambda y: y * float_index("i"), axis_name="j")

            def step(carry, row):
                return carry + lax.axis_index("i"), inner(x) + row

            carry, rows = lax.scan(step, 0, x)
            return carry, rows, lax.axis_index("i")

        return map_(fun, axis_name="i")

    same_under_vmap(build, spread((4, 2)))


@pytest.mark.deep
def test_inner_maps_in_control_flow():
    def build(map_):
        def inner(scale):
            return map_(
                lambda y: jnp.sin(y * scale) + lax.pmean(y, ("i", "j")), axis_name="j"
            )

        def fun(x):
            def step(carry, y):
                y = inner(carry)(y)
                chosen = lax.cond(y.sum() > 0, inner(2.0), lambda y: y * 2, y)
                return jnp.cos(chosen.mean()), chosen

            return lax.scan(step, jnp.ones(()), x)[1]

        mapped = map_(fun, axis_name="i")
        return jax.value_and_grad(lambda x: (mapped(x) ** 2).sum())

    same_under_vmap(build, spread((2, 3, 2)), tolerance=1e-4)


def test_branches_that_differ_between_devices():
    def build(map_):
        def fun(x):
            doubled = map_(lambda y: y * 2, axis_name="j")
            summed = map_(lambda y: y * lax.psum(y, "j"), axis_name="j")
            return lax.cond(lax.axis_index("i") == 0, doubled, summed, x)

        return map_(fun, axis_name="i")

    same_under_vmap(build, spread((4, 2)))


def test_loops_that_differ_between_devices():
    def build(map_):
        grow = map_(lambda y: y * 2 + lax.pmean(y, "j"), axis_name="j")

        def fun(x):
            return lax.while_loop(lambda x: x.sum() < 50, grow, x)

        return map_(fun, axis_name="i")

    same_under_vmap(build, 1 + np.arange(8, dtype=np.float32).reshape(4, 2))


# Cost of lowering


@both_lowerings
@jax.enable_checks(False)  # JAX's type checker looks into each call.
def test_shared_functions_are_lowered_once(spmap):
    def doubled(fun):
        return jax.jit(lambda x: fun(x) + fun(x * 0.5))

    fun = jnp.sin
    for _ in range(16):  # 65,536 calls, of 17 functions.
        fun = doubled(fun)

    mapped = spmap(lambda x: fun(x) + lax.psum(x, "i"), "i")
    text = jax.jit(mapped).lower(np.ones(4, np.float32)).as_text()
    assert text.count("func.func") < 40
