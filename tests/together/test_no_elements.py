"""Maps over an axis of size 0: what `jax.vmap` gives, or refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from tests.map_programs import both_lowerings

X = np.zeros((0, 3), np.float32)
W = np.ones(3, np.float32)


def assert_same_as(results, expected):
    assert jax.tree.structure(results) == jax.tree.structure(expected)
    for one, other in zip(
        jax.tree.leaves(results), jax.tree.leaves(expected), strict=True
    ):
        assert isinstance(one, jax.Array)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(one, other)


def several(x, w):
    i = lax.axis_index("i")
    return {"sum": x.sum(), "rows": (x * w, lax.psum(x, "i")), "index": i, "w": w}


@pytest.mark.few(1)
@both_lowerings
def test_shapes_and_dtypes_are_those_of_vmap(spmap):
    options = {"in_axes": (0, None), "axis_name": "i"}
    f, expected = spmap(several, **options), jax.vmap(several, **options)(X, W)
    assert_same_as(f(X, W), expected)
    assert_same_as(jax.jit(f)(X, W), expected)
    assert_same_as(f(jnp.asarray(X), W), expected)
    assert jax.eval_shape(f, X, W) == jax.eval_shape(lambda: expected)
    assert_same_as(f.lower(X, W).compile()(X, W), expected)
    with jax.disable_jit():
        shapes = jax.tree.map(jnp.shape, f(X, W))
    assert shapes == jax.tree.map(jnp.shape, expected)


@both_lowerings
def test_collectives_are_those_of_vmap(spmap):
    def collectives(x):
        return (
            lax.psum(x, "i"),
            lax.pmean(x, "i"),
            lax.pmax(x, "i"),
            lax.all_gather(x, "i"),
            lax.ppermute(x, "i", []),
            lax.psum(1, "i") + jnp.zeros((), jnp.int32),
        )

    assert_same_as(spmap(collectives, "i")(X), jax.vmap(collectives, axis_name="i")(X))


@pytest.mark.few(1)
@both_lowerings
def test_results_without_the_axis(spmap):
    def totals(x, w):
        return lax.psum(x, "i"), lax.pmax(x, "i"), lax.pmean(x, "i"), 2 * w

    options = {"in_axes": (0, None), "out_axes": None, "axis_name": "i"}
    f, expected = spmap(totals, **options), jax.vmap(totals, **options)(X, W)
    assert_same_as(f(X, W), expected)
    assert_same_as(jax.jit(f)(X, W), expected)
    grads = jax.grad(lambda w: f(X, w)[3].sum())(W)
    np.testing.assert_array_equal(grads, [2, 2, 2])


@pytest.mark.few(1)
@both_lowerings
def test_gradients(spmap):
    def loss(mapped, x, w):
        return mapped(lambda x, w: jnp.sin(x) * w, in_axes=(0, None))(x, w).sum()

    for wrap in (lambda f: f, jax.jit):
        grads = wrap(jax.grad(lambda *a: loss(spmap, *a), argnums=(0, 1)))(X, W)
        assert_same_as(
            grads, jax.grad(lambda *a: loss(jax.vmap, *a), argnums=(0, 1))(X, W)
        )


@both_lowerings
def test_under_vmap_scan_and_cond(spmap):
    f = spmap(lambda x: x + 1)
    assert jax.vmap(f)(np.zeros((5, 0, 3), np.float32)).shape == (5, 0, 3)
    assert jax.vmap(f, in_axes=1, out_axes=1)(X).shape == (0, 3)
    carried, _ = lax.scan(lambda c, _: (f(c), None), jnp.asarray(X), length=3)
    assert carried.shape == (0, 3)
    assert lax.cond(True, f, lambda x: x, jnp.asarray(X)).shape == (0, 3)


@pytest.mark.few(1)
@both_lowerings
@pytest.mark.parametrize("shape", [(0, 4, 2), (4, 0, 2), (0, 0, 2)])
def test_nested(spmap, shape):
    def body(x):
        return x + lax.psum(x, "j")

    x = np.zeros(shape, np.float32)
    nested = spmap(spmap(body, "j"), "i")
    expected = jax.vmap(jax.vmap(body, axis_name="j"), axis_name="i")(x)
    for f in (nested, jax.jit(nested)):
        assert_same_as(f(x), expected)
    mesh = sm.make_mesh({"a": 4, "b": 2})
    inner = spmap(body, "j", mesh=mesh, mesh_axes="b")
    assert_same_as(spmap(inner, "i", mesh=mesh, mesh_axes="a")(x), expected)


def test_no_element_calls_the_host_for_what_all_have():
    seen = []

    def f(x, w):
        def step(w, _):
            return sm.tap(seen.append, w * 2), sm.tap(seen.append, x)

        sm.tap(seen.append, (x, 1.0))
        return jax.lax.scan(step, w, None, length=2)[0]

    for run in (sm.spmap, jax.vmap):
        result = run(f, in_axes=(0, None), out_axes=None)(X, W)
        np.testing.assert_array_equal(result, 4 * W)
    sm.taps_barrier()
    assert seen == []


@both_lowerings
def test_keys_and_partitions(spmap):
    keys = jax.random.split(jax.random.key(0), 0)
    made = spmap(lambda key: jax.random.split(key, 2))(keys)
    assert (made.shape, made.dtype) == ((0, 2), keys.dtype)
    cut = sm.sharded_jit(lambda x: x + 1, in_parts=None, out_parts=None)
    assert spmap(cut)(X).shape == (0, 3)


@both_lowerings
@pytest.mark.parametrize("size", [8, 11])
def test_collectives_of_elements_without_entries(spmap, size):
    x = np.zeros((size, 0), np.float32)
    scattered = spmap(lambda x: lax.psum_scatter(x, "i", tiled=True), "i")
    assert scattered(x).shape == (size, 0)
    gathered = spmap(lambda x: lax.all_gather(x, "i"), "i")
    assert gathered(x).shape == (size, size, 0)


def test_axis_size_0():
    assert sm.spmap(lambda: jnp.ones(3), axis_size=0)().shape == (0, 3)
