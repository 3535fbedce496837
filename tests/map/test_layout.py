"""Where elements go: devices, the mesh and its names, how operands and results lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap.map.layout import map_shardings
from shardmap.map.primitives.map_primitive import MapParams


def equation_of(fun, *shapes):
    """The map equation of a mapped function that is a program of its own."""
    jaxpr = fun.trace(*map(np.zeros, shapes)).jaxpr
    # Its results may be constrained.
    (equation,) = [e for e in jaxpr.eqns if e.primitive is sm.extend.spmap_p]
    return equation


def mesh_of(fun, *shapes):
    """The mesh of a mapped function: a dict from axis names to sizes."""
    return dict(equation_of(fun, *shapes).params["mesh"].shape)


def specs_of(fun, *shapes):
    """The partition specs of operands and results."""
    shardings = map_shardings(MapParams.of(equation_of(fun, *shapes)))
    return tuple([sharding.spec for sharding in side] for side in shardings)


def nest(*names, **options):
    """A map in a map, once for each name, the first outermost."""
    fun = jnp.sin
    for name in reversed(names):
        fun = sm.spmap(fun, name, **options)
    return fun


# Mesh axes


@pytest.mark.parametrize(
    ("names", "shape", "expected"),
    [
        (["i"], (4,), {"i": 4}),
        ([None], (4,), {"axis0": 4}),
        (["i", "j"], (4, 2), {"i": 4, "j": 2}),
        (["i", "j"], (2, 4), {"i": 2, "j": 4}),
        (["a", "b", "c"], (2, 2, 2), {"a": 2, "b": 2, "c": 2}),
        (["i", "j"], (8, 2), {"i": 8}),
        (["i", "j"], (4, 3), {"i": 4, "j": 2}),
        (["i", "j"], (3, 5), {"i": 3, "j": 2}),
        (["i", "j"], (16, 2), {"i": 8}),
        ([None, None], (2, 2), {"axis0": 2, "axis1": 2}),
        (["i", "i"], (2, 2), {"i": 2, "axis1": 2}),
        (["axis1", None], (2, 2), {"axis1": 2, "axis2": 2}),
        ([None, "axis0"], (2, 2), {"axis1": 2, "axis0": 2}),
        ([("a", 1), "j"], (2, 2), {"axis0": 2, "j": 2}),
        ([("a", 1), "j", "axis0"], (8, 2, 2), {"axis1": 8}),
    ],
)
def test_a_level_of_nesting_is_a_mesh_axis(names, shape, expected):
    assert mesh_of(nest(*names), shape) == expected


def test_siblings_share_an_axis():
    def same(x):
        return sm.spmap(jnp.sin, "j")(x), sm.spmap(jnp.cos, "j")(x)

    def different(x):
        return sm.spmap(jnp.sin, "j")(x), sm.spmap(jnp.cos, "k")(x[:2])

    assert mesh_of(sm.spmap(same, "i"), (2, 4)) == {"i": 2, "j": 4}
    assert mesh_of(sm.spmap(different, "i"), (2, 4)) == {"i": 2, "axis1": 4}


def test_maps_in_other_equations_count_too():
    def fun(x):
        @jax.checkpoint
        @jax.jit
        def step(carry, row):
            grown = lax.cond(row.sum() > 0, sm.spmap(jnp.sin, "j"), jnp.cos, row)
            return carry, grown

        return lax.scan(step, 0.0, x)[1]

    assert mesh_of(sm.spmap(fun, "i"), (4, 3, 2)) == {"i": 4, "j": 2}


# How arrays are sharded


def test_mapped_dimensions_are_cut():
    fun = sm.spmap(
        lambda x, w: (x * w[None], w, x), "i", in_axes=(1, None), out_axes=(2, None, 0)
    )
    assert specs_of(fun, (3, 4, 2), (2,)) == (
        [P(None, "i"), P()],
        [P(None, None, "i"), P(), P("i")],
    )


def test_nested_maps_cut_further():
    assert specs_of(nest("i", "j"), (4, 2, 3)) == ([P("i", "j")], [P("i", "j")])
    inner = sm.spmap(jnp.sin, "j", in_axes=1, out_axes=0)
    outer = sm.spmap(inner, "i", in_axes=0, out_axes=1)
    assert specs_of(outer, (4, 3, 2)) == ([P("i", None, "j")], [P("j", "i")])


def test_elementwise_work_in_between_is_cut_too():
    def fun(x, y, z):
        inner = sm.spmap(jnp.add, "j")
        return jnp.exp(inner(x * 2, y)) - 1, x, 3 * x, z + 1

    operands, results = specs_of(sm.spmap(fun, "i"), (4, 2), (4, 2), (4, 2))
    assert operands == [P("i", "j"), P("i", "j"), P("i")]
    assert results == [P("i", "j"), P("i", "j"), P("i", "j"), P("i")]


def test_other_work_in_between_keeps_a_dimension_whole():
    def fun(x, y):
        inner = sm.spmap(jnp.add, "j")
        return inner(x[::-1], y), x, jnp.cumsum(y)

    operands, results = specs_of(sm.spmap(fun, "i"), (4, 2), (4, 2))
    assert operands == [P("i"), P("i")]
    assert results == [P("i", "j"), P("i"), P("i")]


def test_weights_that_a_map_inside_cuts_stay_cut_when_they_are_updated():
    def loss(w, x):
        part = jax.jit(lambda w: lax.psum(jnp.tanh(x @ w).sum(), "model"))
        return jax.jit(sm.spmap(part, "model", out_axes=None))(w)

    def step(w, momentum, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        value = lax.pmean(value, "data")
        momentum = 0.9 * momentum + lax.pmean(gradient, "data")
        # `jnp.where` and `jnp.clip` are under `jax.jit`.
        momentum = jnp.where(value < jnp.inf, jnp.clip(momentum, -9, 9), 0)
        return w - 0.1 * momentum, momentum, value

    step = sm.spmap(step, "data", in_axes=(None, None, 0), out_axes=None)
    w, x = np.ones((4, 3, 2), np.float32), np.ones((2, 5, 3), np.float32)
    compiled = step.lower(w, w, x).compile()
    assert "all-gather" not in compiled.as_text()
    results = compiled(w, w, x)
    assert [result.sharding.spec for result in results] == [P("model"), P("model"), P()]
    value, gradient = jax.value_and_grad(
        lambda w: jnp.tanh(x[:, None] @ w).sum((1, 2, 3)).mean()
    )(w)
    for result, expected in zip(
        results,
        (w - 0.1 * (0.9 * w + gradient), 0.9 * w + gradient, value),
        strict=True,
    ):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_uses_that_disagree_keep_a_dimension_whole():
    def fun(x):
        rows = sm.spmap(jnp.sin, "j")
        return rows(x), sm.spmap(jnp.sin, "j", in_axes=1)(x)

    operands, results = specs_of(sm.spmap(fun, "i"), (4, 2, 2))
    assert operands == [P("i")]
    assert results == [P("i", "j"), P("i", "j")]


def test_results_without_entries_are_whole():
    fun = sm.spmap(lambda x: (x[:, :0], x), "i")
    assert specs_of(fun, (4, 2, 3)) == ([P("i")], [P(), P("i")])
