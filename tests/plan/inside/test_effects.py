"""What a function in pieces shows while it runs: once per piece, in order."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import shardmap as sm

X = jnp.arange(14.0, dtype=jnp.float32).reshape(7, 2)
PIECES = [X[:3], X[3:5], X[5:]]


@pytest.fixture
def seen():
    return []


def shown(seen, expected):
    """That these values were shown, in this order."""
    jax.effects_barrier()
    assert len(seen) == len(expected)
    for found, wanted in zip(seen, expected, strict=True):
        jax.tree.map(np.testing.assert_allclose, found, wanted)
    seen.clear()


def tapped(seen, x):
    sm.tap(seen.append, x)


def called_back(seen, x):
    jax.debug.callback(seen.append, x, ordered=True)


def through_io(seen, x):
    io_callback(seen.append, None, x, ordered=True)


SHOW = [tapped, called_back, through_io]


@pytest.mark.few(1)
@pytest.mark.parametrize("show", SHOW)
def test_each_piece_is_shown_in_order(seen, show):
    def fun(x):
        show(seen, x)
        show(seen, x * 2)
        return x.sum(0)

    chunked = sm.chunked(fun, {0: 3})
    expected = [y for x in PIECES for y in (x, x * 2)]
    for call in (chunked, jax.jit(chunked)):
        np.testing.assert_allclose(call(X), X.sum(0))
        shown(seen, expected)


def test_prints(capfd):
    def fun(x):
        jax.debug.print("rows {}", x[:, 0])
        return x * 2

    jax.block_until_ready(sm.chunked(fun, {0: 3})(X))
    jax.effects_barrier()
    rows = re.findall(r"rows \[(.*?)\]", capfd.readouterr().out)
    assert [row.split() for row in rows] == [
        ["0.", "2.", "4."],
        ["6.", "8."],
        ["10.", "12."],
    ]


def test_what_is_whole_is_shown_once(seen):
    def fun(x, w):
        tapped(seen, w)
        tapped(seen, x.sum())
        sm.tap(lambda _: seen.append(0), ())
        return x * w.sum()

    sm.chunked(fun, ({0: 3}, None))(X, X[0])
    shown(seen, [X[0], 0, X.sum()])


def test_several_values_are_shown_in_the_same_pieces(seen):
    def fun(x, y, w):
        tapped(seen, (x, y, w))
        return x + y

    w = jnp.ones(9, jnp.float32)
    sm.chunked(fun, ({0: 3}, {0: 3}, {0: 3}))(X, X + 1, w)
    shown(seen, [(x, x + 1, w) for x in PIECES])


def test_blocks_of_a_product_are_shown(seen):
    def fun(x):
        y = x @ x.T
        tapped(seen, y)
        return y

    sm.chunked(fun, {0: 2})(X)
    rows = X[:4], X[4:]
    shown(seen, [a @ b.T for a in rows for b in rows])


def test_neighbours_are_shown_as_they_are_computed(seen):
    def fun(x):
        y = x[1:] - x[:-1] ** 2
        tapped(seen, y)
        return y

    made = sm.chunked(fun, {0: 3})(X)
    jax.effects_barrier()
    assert len(seen) == 3
    np.testing.assert_allclose(np.concatenate(seen), made)


def twice(x):
    return jnp.stack([x, x + 100])


@pytest.mark.few(1)
@pytest.mark.parametrize("remat", [True, False])
def test_a_gradient_shows_what_the_function_shows(seen, remat):
    def loss(x):
        tapped(seen, x)
        return jnp.sin(x).sum()

    chunked = sm.chunked(loss, {0: 3}, remat=remat)
    for gradient in (jax.grad(chunked), jax.jit(jax.grad(chunked))):
        np.testing.assert_allclose(gradient(X), jnp.cos(X), rtol=1e-6)
        shown(seen, PIECES)


TRANSFORMED = {
    "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (x,)), PIECES),
    "vmap": (lambda f: lambda x: jax.vmap(f)(twice(x)), [twice(x) for x in PIECES]),
    "scan": (
        lambda f: lambda x: lax.scan(lambda c, y: (c, f(y)), 0, twice(x))[1],
        [x + k for k in (0, 100) for x in PIECES],
    ),
    "cond": (lambda f: lambda x: lax.cond(x[0, 0] < 1, f, jnp.cos, x), PIECES),
    "chunked": (lambda f: sm.chunked(f, {0: 7}), list(X[:, None])),
    "gradient in pieces": (
        lambda f: sm.chunked(jax.grad(lambda x: f(x).sum()), {0: 3}),
        PIECES,
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations(seen, name):
    def fun(x):
        tapped(seen, x)
        return jnp.sin(x)

    change, expected = TRANSFORMED[name]
    result = jax.jit(change(sm.chunked(fun, {0: 3})))(X)
    shown(seen, expected)
    jax.tree.map(np.testing.assert_allclose, result, change(jnp.sin)(X))


def test_inside_a_map(seen):
    def fun(x):
        sm.tap(lambda x, device: seen.append((device.id, x)), x, with_device=True)
        return x - lax.psum(x, "i")

    xs = jnp.stack([X * k for k in range(3)])
    mapped = sm.spmap(sm.chunked(fun, {0: 3}), "i")
    np.testing.assert_allclose(mapped(xs), jax.vmap(fun, axis_name="i")(xs))
    jax.effects_barrier()
    seen = [each for each in seen if each[1].ndim == 2]
    for number in range(3):
        own = [x for device, x in seen if device == jax.devices()[number].id]
        jax.tree.map(np.testing.assert_allclose, own, [x * number for x in PIECES])


# Taken whole


def host(seen, x):
    def call(x):
        seen.append(x)
        return np.float32(len(seen))

    return io_callback(call, jax.ShapeDtypeStruct((), np.float32), x, ordered=True)


def test_what_gives_results_happens_once(seen):
    def fun(x):
        y = x * 2
        count = host(seen, y)
        return y + count, (y * count).sum()

    each, total = sm.chunked(fun, {0: 3})(X)
    shown(seen, [X * 2])
    np.testing.assert_allclose(each, X * 2 + 1)
    np.testing.assert_allclose(total, (X * 2).sum())


def in_a_loop(seen, x):
    def step(carry, k):
        tapped(seen, carry)
        return carry + k, None

    return lax.scan(step, x, jnp.arange(2, dtype=jnp.float32))[0]


def in_a_branch(seen, x):
    def show(x):
        tapped(seen, x)
        tapped(seen, x)
        return x

    return lax.cond(x.sum() > 0, show, lambda x: x, x)


@pytest.mark.few(1)
@pytest.mark.parametrize("show", [in_a_loop, in_a_branch])
def test_loops_and_branches_with_effects_are_whole(seen, show):
    def fun(x):
        return show(seen, x * 3)

    chunked = sm.chunked(fun, {0: 3})
    made = jax.jit(chunked)(X)
    shown(seen, [X * 3, X * 3])
    np.testing.assert_allclose(made, fun(X))
    seen.clear()
    assert "what has an effect and gives results happens once" in str(
        chunked.explain(X)
    )


# Refused


def test_a_plan_refuses_effects_of_what_is_in_pieces(seen):
    def fun(x):
        tapped(seen, x)
        return x

    with pytest.raises(ValueError, match=r"tap at .* has an effect"):
        sm.plan(sm.chunked(fun, {0: 3}), X, in_slices={0: 2})


def test_references_are_refused():
    def fun(x):
        ref = jax.new_ref(x)
        ref[...] += 1
        return ref[...]

    with pytest.raises(ValueError, match=r"chunked cannot cut .*has an effect"):
        sm.chunked(fun, {0: 3})(X)
    ref = jax.new_ref(X)
    message = r"cannot cut .* closes over .*, a reference of JAX; pass .*ref\[\.\.\.\]"
    with pytest.raises(ValueError, match=message):
        sm.chunked(lambda x: x + ref[...], {0: 3})(X)
    with pytest.raises(ValueError, match=message):
        sm.plan(lambda x: x + ref[...], X, in_slices={0: 3})
