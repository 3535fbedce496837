"""Python's numbers as arguments, results, tangents and constants of all that maps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from tests.map_programs import assert_same, both_lowerings

MESH = sm.make_mesh({"x": 2, "y": 4})
X = np.arange(8, dtype=np.float32)
SPMAPPED = {"in_axes": (0, None), "out_axes": (0, None)}

# Each takes X and a number, and gives 2 * X or X, and a number.
FUNCTIONS = {
    "spmap": sm.spmap(lambda v, s: (s * v, 3), **SPMAPPED),
    "spmap, spmd": sm.spmap(lambda v, s: (s * v, 3), **SPMAPPED, lowering="spmd"),
    "spmap in spmap": lambda v, s: sm.spmap(
        sm.spmap(lambda u, t: (t * u, 3), **SPMAPPED), **SPMAPPED
    )(v.reshape(2, 4), s),
    "mesh_map": sm.mesh_map(
        lambda v, s: (s * v, 3), MESH, ({"x": 0}, {}), ({"x": 0}, {})
    ),
    "mesh_map of wholes": sm.mesh_map(lambda v, s: (s * v, 3), MESH, ({}, {}), {}),
    "mesh_map, no axes": sm.mesh_map(
        lambda v, s: (s * v, 3), sm.make_mesh({}), ({}, {}), {}
    ),
    "sharded_jit": sm.sharded_jit(lambda v, s: (s * v, 3), ((8,), None), ((8,), None)),
    "constraint": lambda v, s: sm.with_sharding_constraint((s * v, 3), ((8,), None)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_go_in_and_out(name):
    fun = FUNCTIONS[name]

    def check(pair, expected):
        product, number = pair
        np.testing.assert_array_equal(np.reshape(product, X.shape), expected)
        assert int(number) == 3
        assert isinstance(number, jax.Array)

    check(fun(X, 2.0), 2 * X)
    check(jax.jit(fun)(X, 2.0), 2 * X)
    check(jax.jit(lambda v: fun(v, 2.0))(X), 2 * X)
    with jax.disable_jit():
        assert int(fun(jnp.asarray(X), 2.0)[1]) == 3


@pytest.mark.deep
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_are_differentiated(name):
    def product(s):
        return FUNCTIONS[name](X, s)[0].reshape(8)

    for run in (product, jax.jit(product)):
        value, tangent = jax.jvp(run, (2.0,), (1.0,))
        np.testing.assert_array_equal(value, 2 * X)
        np.testing.assert_array_equal(tangent, X)
        _, linear = jax.linearize(run, 2.0)
        np.testing.assert_array_equal(linear(0.5), X / 2)
        assert float(jax.grad(lambda s, f=run: f(s).sum())(2.0)) == 28
        np.testing.assert_array_equal(jax.jacfwd(run)(2.0), X)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_beside_what_is_vectorised(name):
    fun = FUNCTIONS[name]
    products = jax.vmap(lambda v: fun(v, 2.0)[0])(np.stack([X, -X]))
    np.testing.assert_array_equal(products.reshape(2, 8), np.stack([2 * X, -2 * X]))
    scaled = jax.vmap(lambda s: fun(X, s)[0])(np.ones(3, np.float32))
    np.testing.assert_array_equal(scaled.reshape(3, 8), np.stack([X] * 3))


ROUND = [(k, (k + 1) % 16) for k in range(16)]
COLLECTIVES = {
    "psum": lambda number: lax.psum(number, "i"),
    "pmean": lambda number: lax.pmean(number, "i"),
    "pmax": lambda number: lax.pmax(number, "i"),
    "all_gather": lambda number: lax.all_gather(number, "i"),
    "ppermute": lambda number: lax.ppermute(number, "i", ROUND),
    "pshuffle": lambda number: lax.pshuffle(number, "i", [b for _, b in ROUND]),
    "pbroadcast": lambda number: lax.pbroadcast(number, "i", 3),
}


@pytest.mark.few(1)
@both_lowerings
def test_numbers_are_sent(spmap):
    """A device has 2 of the elements, which all send the same."""

    def element(x):
        return x, {
            name: [jnp.asarray(send(number)) for number in (2.5, 3)]
            for name, send in COLLECTIVES.items()
        }

    x = np.arange(16, dtype=np.float32)
    expected = jax.vmap(element, axis_name="i")(x)
    assert_same(spmap(element, "i")(x), expected)
