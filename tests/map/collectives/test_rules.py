"""Collectives over axes of any length, against vmap and against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import shardmap as sm
from tests.map.collectives.bodies import BODIES, both, ring
from tests.map.map_checks import array, assert_close
from tests.map_programs import assert_same, both_lowerings

SIZES = [1, 3, 8, 12, 16, 17]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("size", "lowering"),
    [(size, "manual") for size in SIZES] + [(8, "spmd"), (17, "spmd")],
)
def test_each_collective(size, lowering):
    def all_bodies(x):
        return {name: body(x, size) for name, body in BODIES.items()}

    x = array(size, 3)
    expected = jax.jit(jax.vmap(all_bodies, axis_name="i"))(x)
    results = sm.spmap(all_bodies, "i", lowering=lowering)(x)
    for name in BODIES:
        assert_close(results[name], expected[name], name)


def test_spmd_computes_both_branches_and_all_steps():
    size = 16

    def branch(x):
        def other(x):
            return lax.all_gather(x, "i").sum() + lax.psum(x, "i")

        return lax.cond(lax.axis_index("i") % 2 == 0, lax.neg, other, x)

    def loop(x):
        def step(carry):
            return carry[0] + 1, carry[1] + lax.ppermute(carry[1], "i", ring(size))

        return lax.while_loop(lambda carry: carry[0] < x, step, (0.0, x))[1]

    x = np.arange(size, dtype=np.float32)
    for body in (branch, loop):
        results = sm.spmap(body, "i", lowering="spmd")(x)
        expected = jax.jit(jax.vmap(body, axis_name="i"))(x)
        assert_close(results, expected, body.__name__)


# JAX has no derivative of pmax and pmin, of loops of unknown length in reverse, and a
# wrong one of all_to_all from one axis to another.
WITHOUT_GRADIENT = ["pmax", "pmin", "in a while", "all_to_all to another axis"]


@pytest.mark.parametrize(
    ("size", "lowering", "part"),
    [
        (3, "manual", 0),
        pytest.param(3, "manual", 1, marks=pytest.mark.deep),
        pytest.param(17, "spmd", 0, marks=pytest.mark.deep),
        pytest.param(17, "spmd", 1, marks=pytest.mark.deep),
    ],
)
def test_gradients(size, lowering, part):
    """Of every other body: all of them are one program that takes long to compile."""

    def gradient(fun):
        def loss(x):
            return sum((leaf**2).sum() for leaf in jax.tree.leaves(fun(x)))

        return jax.grad(loss)

    names = sorted(set(BODIES) - set(WITHOUT_GRADIENT))[part::2]
    pairs = {name: both(name, size, lowering=lowering) for name in names}
    mapped, expected = (
        jax.jit(lambda x, k=k: {n: gradient(p[k])(x) for n, p in pairs.items()})
        for k in range(2)
    )
    x = array(size, 3) / 50
    results, wanted = mapped(x), expected(x)
    for name in names:
        assert_close(results[name], wanted[name], name)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "devices"),
    [("psum", 3), ("ppermute reversed", 1), ("all_to_all tiled", 4)],
)
def test_over_given_devices(name, devices):
    mapped, expected = both(name, 7, devices=jax.devices()[-devices:])
    x = array(7, 3)
    result = mapped(x)
    assert_close(result, expected(x))
    used = -(-7 // -(-7 // devices))
    assert result.sharding.device_set == set(jax.devices()[-devices:][:used])


@pytest.mark.one_in(2)
@both_lowerings
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_extremes_keep_nan(spmap, dtype):
    for size in (8, 13):
        groups = [[*range(size // 2)], [*range(size // 2, size)]]

        def body(x, groups=groups):
            several = dict.fromkeys(["all", "groups"])
            several["all"] = lax.pmax(x, "i"), lax.pmin(x, "i")
            if dtype != "complex64":
                several["groups"] = lax.pmax(x, "i", axis_index_groups=groups)
            return several

        x = np.arange(2 * size, dtype=jnp.dtype(dtype)).reshape(size, 2)
        x[1, 0] = np.nan
        results = jax.tree.map(np.asarray, spmap(body, "i")(x))
        for result, number in zip(results["all"], (2 * size - 1, 1), strict=True):
            assert np.isnan(result[:, 0]).all()
            np.testing.assert_array_equal(result[:, 1], number)
        if dtype != "complex64":
            half = size // 2
            assert np.isnan(results["groups"][:half, 0]).all()
            assert (results["groups"][half:, 0] == 2 * size - 2).all()


@pytest.mark.few(1)
@both_lowerings
def test_dtypes(spmap):
    def element(xs):
        results = []
        for x in xs:
            results += [lax.psum(x, "i"), lax.all_gather(x, "i")]
            if not jnp.iscomplexobj(x):
                results += [lax.pmax(x, "i"), lax.pmin(x, "i")]
        return results

    dtypes = "int8", "uint32", "bool", "bfloat16", "complex64"
    xs = [array(11, 3).astype(jnp.dtype(dtype)) for dtype in dtypes]
    expected = jax.jit(jax.vmap(element, axis_name="i"))(xs)
    assert_same(spmap(element, "i")(xs), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_extrema_of_floats_without_infinity(dtype):
    x = jnp.arange(11).astype(dtype)

    def extrema(x):
        groups = [list(range(5)), list(range(5, 11))]
        return (
            lax.pmax(x, "i"),
            lax.pmin(x, "i"),
            lax.pmax(x, "i", axis_index_groups=groups),
        )

    mapped = sm.spmap(extrema, "i")(x)
    expected = [10] * 11, [0] * 11, [4] * 5 + [10] * 6
    for got, want in zip(mapped, expected, strict=True):
        np.testing.assert_array_equal(got.astype(np.float32), want)


@pytest.mark.few(1)
@both_lowerings
@pytest.mark.parametrize("size", [8, 11])
def test_extrema_of_complex_numbers(spmap, size):
    x = (array(size, 3) % 2 + 1j * array(size, 3)).astype(np.complex64)
    x[0, 0], x[1, 1] = complex(-np.inf, -3), complex(np.inf, 2)
    groups = [list(range(0, size, 2)), list(range(1, size, 2))]

    def extrema(x):
        [_, largest] = lax.pmax([x.real, x], "i")
        return largest, lax.pmin(x, "i", axis_index_groups=groups)

    largest, smallest = spmap(extrema, "i", out_axes=(None, 0))(x)
    # NumPy compares the real parts first, as JAX does.
    np.testing.assert_array_equal(largest, x.max(0))
    for group in groups:
        expected = np.broadcast_to(x[group].min(0), (len(group), 3))
        np.testing.assert_array_equal(smallest[np.array(group)], expected)


def test_extrema_of_complex_numbers_in_steps():
    x = (array(16, 3) % 2 - 1j * array(16, 3)).astype(np.complex64)
    mapped = sm.spmap(lambda x: lax.pmax(x, "i"), "i", out_axes=None, batch_size=1)
    np.testing.assert_array_equal(mapped(x), x.max(0))


@pytest.mark.few(1)
@pytest.mark.one_in(2)
@both_lowerings
@pytest.mark.parametrize("size", [8, 11])
def test_random_keys(spmap, size):
    def fun(key):
        keys = jax.random.split(key, 2 * size)
        return (
            lax.all_gather(key, "i"),
            lax.ppermute(key, "i", ring(size)),
            lax.all_to_all(keys[:size], "i", 0, 0),
            lax.all_to_all(keys, "i", 0, 0, tiled=True),
        )

    keys = jax.random.split(jax.random.key(1), size)
    expected = jax.jit(jax.vmap(fun, axis_name="i"))(keys)
    assert_same(spmap(fun, "i")(keys), expected)


@pytest.mark.few(1)
@pytest.mark.one_in(2)
@both_lowerings
@pytest.mark.parametrize("size", [8, 11])
def test_pbroadcast_of_any_dtype(spmap, size):
    # jax.vmap has no rule for it.
    x = array(size, 3)
    keys = jax.random.split(jax.random.key(1), size)
    for values in (x, x > 0, x.astype(np.int8), x.astype(np.complex64), keys):
        values = jnp.asarray(values)
        got = spmap(lambda x: lax.pbroadcast(x, "i", 5), "i")(values)
        assert_same(got, jnp.stack([values[5]] * size))
    zeros = np.full(size, complex(-0.0, -0.0), np.complex64)
    for values in (zeros, zeros.real):
        got = np.asarray(spmap(lambda x: lax.pbroadcast(x, "i", 5), "i")(values))
        assert got.tobytes() == values.tobytes()


@pytest.mark.few(1)
@both_lowerings
@pytest.mark.parametrize("size", [8, 11])
def test_arrays_without_entries(spmap, size):
    def fun(x, w):
        pieces = jnp.stack([x] * size)
        return (
            lax.psum(x, "i") * w[None],
            lax.all_gather(x, "i"),
            lax.all_gather(x, "i", axis=1, tiled=True),
            lax.all_to_all(pieces, "i", 0, 1),
            lax.psum_scatter(pieces, "i"),
            lax.ppermute(x, "i", ring(size)),
            lax.axis_index("i"),
        )

    args = np.ones((size, 2, 0), np.float32), np.ones(0, np.float32)
    options = {"axis_name": "i", "in_axes": (0, None)}
    expected = jax.jit(jax.vmap(fun, **options))(*args)
    assert_same(spmap(fun, **options)(*args), expected)
    assert_same(jax.jit(spmap(fun, **options))(*args), expected)


@pytest.mark.few(1)
@pytest.mark.one_in(2)
@both_lowerings
@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (16, 2)])
def test_bfloat16_in_maps_inside_maps(spmap, shape):
    # XLA's CPU compiler aborts the process at what JAX makes of these.
    def body(x):
        pieces = jnp.stack([x] * shape[0])
        return (
            lax.psum(x, "i"),
            lax.psum((x, x.astype(np.float32)), ("j", "i")),
            lax.pmax(x, "j") + lax.pmin(x, "i"),
            lax.psum_scatter(pieces, "i", tiled=True),
        )

    def nested(map_):
        return map_(map_(body, axis_name="j"), axis_name="i")

    x = array(*shape, 2).astype(jnp.bfloat16)
    assert_same(nested(spmap)(x), jax.jit(nested(jax.vmap))(x))


@given(
    size=st.integers(1, 30),
    devices=st.integers(1, 8),
    data=st.data(),
)
def test_any_permutation(size, devices, data):
    targets = data.draw(st.permutations(range(size)))
    kept = data.draw(st.integers(0, size))
    pairs = list(enumerate(targets))[:kept]
    mapped = sm.spmap(
        lambda x: lax.ppermute(x, "i", pairs), "i", devices=jax.devices()[:devices]
    )
    expected = np.zeros(size, np.float32)
    for start, end in pairs:
        expected[end] = start + 1
    np.testing.assert_array_equal(mapped(np.arange(1.0, size + 1)), expected)


def test_a_permutation_that_leaves_elements_out_then_a_sum():
    # Indices out of range go wrong in XLA's CPU compiler of JAX 0.10.
    def body(x):
        return x + lax.ppermute(x, "i", [(0, 2)])

    x = np.array([1, 2, 3], np.int32)
    np.testing.assert_array_equal(
        sm.spmap(body, "i", devices=jax.devices()[:2])(x), [1, 2, 4]
    )
