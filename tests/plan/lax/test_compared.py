"""A computed float that is compared with its own extremum, which is recomputed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from tests.plan.checks import assert_same

ROWS, COLUMNS = 48, 250


def cosines(x, w):
    """Their last bits depend on the length of the pieces."""
    x, w = (a / jnp.sqrt((a * a).sum(1, keepdims=True)) for a in (x, w))
    return x @ w.T


@pytest.fixture(scope="module")
def arrays():
    random = np.random.default_rng(0)
    shapes = (ROWS, 32), (COLUMNS, 32)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


LOSSES = {
    "max": lambda x, w: cosines(x, w).max(1).sum(),
    "min": lambda x, w: cosines(x, w).min(1).sum(),
    "max of all": lambda x, w: cosines(x, w).max(),
    "both": lambda x, w: jnp.ptp(cosines(x, w), axis=1).std(),
    "transposed": lambda x, w: cosines(x, w).T.max(0).sum(),
}
"""Their gradients compare elements with the maximum."""

CUTS = {
    "the axis": (None, {0: 3}),
    "short last piece": (None, {0: sm.Pieces(64)}),
    "both axes": ({0: 2}, {0: 4}),
    "the other axis": ({0: 4}, None),
}


@pytest.mark.few(2)
@pytest.mark.one_in(4)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_that_of_jit(loss, cuts, arrays):
    grad = jax.grad(LOSSES[loss], argnums=(0, 1))
    shard_plan = sm.plan(grad, *arrays, in_slices=CUTS[cuts])
    assert_same(shard_plan.run(*arrays), jax.jit(grad)(*arrays), 1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("order", ["inside", "outside"])
def test_the_gradient_in_loops_is_that_of_jit(order, arrays):
    def chunked(fun):
        return sm.chunked(fun, (None, {0: sm.Pieces(64)}), strict=True)

    def grad(fun):
        return jax.grad(fun, argnums=(0, 1))

    loss = LOSSES["max"]
    ours = chunked(grad(loss)) if order == "inside" else grad(chunked(loss))
    assert_same(jax.jit(ours)(*arrays), jax.jit(grad(loss))(*arrays), 1e-5)


def test_the_gradient_within_memory_is_that_of_jit(arrays):
    grad = jax.grad(LOSSES["max"], argnums=(0, 1))
    shard_plan = sm.plan(grad, *arrays, memory="128 kB")
    assert shard_plan.num_shards > 1
    assert_same(shard_plan.run(*arrays), jax.jit(grad)(*arrays), 1e-5)


COMPARISONS = {
    "==": lambda y, best: y == best(y),
    "!=": lambda y, best: best(y) != y,
    ">=": lambda y, best: y >= best(y),
    "<=": lambda y, best: best(y) <= y,
    "<": lambda y, best: y < best(y),
    ">": lambda y, best: best(y) > y,
}


@pytest.mark.few(2)
@pytest.mark.parametrize("sign", COMPARISONS)
def test_as_many_elements_are_found_as_by_jit(sign, arrays):
    def fun(x, w):
        y = cosines(x, w)
        is_best = COMPARISONS[sign](y, lambda y: y.max(1, keepdims=True))
        return is_best.sum(1), COMPARISONS[sign](-y, lambda y: y.max()).sum()

    shard_plan = sm.plan(fun, *arrays, in_slices=(None, {0: 3}))
    assert_same(shard_plan.run(*arrays), jax.jit(fun)(*arrays), 0)


GROUPS = np.arange(COLUMNS) % 5
SELECTED = {
    "the largest five": lambda y: y >= jax.lax.top_k(y, 5)[0][:, -1:],
    "the second": lambda y: (y >= jax.lax.top_k(y, 2)[0][:, 1:]) & (y < best_of(y)),
    "a constant": lambda y: y == jax.lax.stop_gradient(best_of(y)),
    "of those that are numbers": lambda y: y == jnp.nanmax(y, 1, keepdims=True),
    "of the transpose": lambda y: y == y.T.max(0)[:, None],
    "of a slice": lambda y: y == best_of(y[:, :-3]),
    "at least": lambda y: y >= jnp.maximum(best_of(y), 0.1),
    "negative": lambda y: y == -((-y).min(1, keepdims=True)),
    "reshaped": lambda y: y == y.reshape(ROWS, 50, 5).max((1, 2))[:, None],
    "of all, sorted": lambda y: y >= jnp.sort(y.ravel())[-5],
    "of integers": lambda y: is_best((y * 1e6).astype(jnp.int32)),
    "of two halves": lambda y: (
        y == jnp.maximum(best_of(y[:, :125]), best_of(y[:, 125:]))
    ),
    "times a number": lambda y: 2.3 * y >= 2.3 * best_of(y),
    "logarithms": lambda y: jnp.log(y + 2) >= jnp.log(best_of(y) + 2),
    "of groups": lambda y: y == jax.ops.segment_max(y.T, GROUPS, 5)[GROUPS].T,
}


def best_of(y):
    return y.max(1, keepdims=True)


def is_best(y):
    return y == best_of(y)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SELECTED)
def test_what_is_selected_is_found(name, arrays):
    def fun(x, w):
        return SELECTED[name](cosines(x, w)).sum(1)

    shard_plan = sm.plan(fun, *arrays, in_slices=(None, {0: 3}))
    assert_same(shard_plan.run(*arrays), jax.jit(fun)(*arrays), 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["the second", "of the transpose", "logarithms"])
def test_what_is_selected_is_found_in_loops(name, arrays):
    def fun(x, w):
        return SELECTED[name](cosines(x, w)).sum(1)

    in_loops = sm.chunked(fun, (None, {0: 3}))
    assert_same(in_loops(*arrays), jax.jit(fun)(*arrays), 0)


@pytest.mark.deep
def test_no_element_is_larger_than_the_largest(arrays):
    """Each maximum stands in two pieces."""

    def fun(x, w):
        y = cosines(x, w)
        return (y > best_of(y)).sum(), (y >= best_of(y)).sum(1).clip(max=1)

    x, w = arrays
    twice = np.concatenate([w[:125], w[124::-1]])
    shard_plan = sm.plan(fun, x, twice, in_slices=(None, {0: sm.Pieces(100)}))
    assert_same(shard_plan.run(x, twice), jax.jit(fun)(x, twice), 0)


def test_gradients_of_extrema_of_groups_are_numbers(arrays):
    def loss(x, w):
        return jax.ops.segment_max(cosines(x, w).T, GROUPS, 5).sum()

    grad = jax.grad(loss, argnums=(0, 1))
    shard_plan = sm.plan(grad, *arrays, in_slices=(None, {0: 3}))
    assert_same(shard_plan.run(*arrays), jax.jit(grad)(*arrays), 1e-5)


def test_what_is_exact_is_computed_again():
    """Nothing is kept but the threshold of each row."""

    def fun(x):
        y = jnp.abs(x.T) - 2
        return (y >= jax.lax.top_k(y, 3)[0][:, -1:]).sum(1)

    x = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
    shard_plan = sm.plan(fun, x, in_slices={0: 4})
    assert_same(shard_plan.run(x), jax.jit(fun)(x), 0)
    assert all(stage.kept_bytes < x.nbytes // 8 for stage in shard_plan.stage_costs)


def largest(y):
    return y.max(0, keepdims=True)


def scaled(y):
    least = y.min(0, keepdims=True)
    return (y - least) / (largest(y) - least)


EDGES = {
    "square root": lambda y: jnp.isnan(jnp.sqrt(largest(y) - y)),
    "quotient": lambda y: jnp.isinf(1 / (y - largest(y))),
    "gradient of a cube root": lambda y: jnp.isinf(
        jax.grad(lambda d: jnp.cbrt(d).sum())(y - largest(y))
    ),
    "roots": lambda y: jnp.isnan(jnp.sqrt(jnp.log(largest(y) + 2) - jnp.log(y + 2))),
    "logarithm": lambda y: jnp.isinf(jnp.log(y + largest(-y))),
    "arc cosine": lambda y: jnp.isnan(jnp.arccos(y / largest(jnp.abs(y)))),
    "power": lambda y: jnp.isnan(scaled(y) ** 0.5),
    "floor": lambda y: jnp.floor(y - largest(y)) == 0,
    "sign": lambda y: jnp.sign(y - largest(y)) == 0,
    "zero": lambda y: y - largest(y) >= 0,
    "zeros": lambda y: y - largest(y) >= jnp.zeros_like(y),
    "remainder": lambda y: jnp.mod(y + largest(-y), 4) > 3,
    "angle": lambda y: jnp.arctan2(y + largest(-y), -1) > 1,
    "gamma function": lambda y: jnp.isnan(jax.scipy.special.gammainc(2, scaled(y))),
    "exponential": lambda y: jnp.exp(y - largest(y)) == 1,
    "sign bit": lambda y: jnp.signbit(y + largest(-y)),
    "histogram": jax.vmap(lambda y: jnp.histogram(y, 10)[0], 1),
    "loop": lambda y: lax.fori_loop(
        0, 3, lambda k, n: n ^ (y >= largest(y)), jnp.zeros(y.shape, bool)
    ),
    "square root in a branch": lambda y: jnp.isnan(
        lax.cond(
            y[0, 0] > 9, lambda y, m: y, lambda y, m: jnp.sqrt(m - y), y, largest(y)
        )
    ),
    "branch": lambda y: lax.cond(
        y[0, 0] > 9, lambda y, m: y < m, lambda y, m: y >= m, y, largest(y)
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_an_extremum_may_be_zero(dtype, arrays):
    """XLA takes the numbers next to it for 0, too."""

    def fun(w):
        d = ((w[:, None] - w[None]) ** 2).sum(-1)
        most = (-d).max(1, keepdims=True)
        return d == d.min(0, keepdims=True), d <= d.min(1, keepdims=True), -d >= most

    w = arrays[0][:24].astype(dtype)
    shard_plan = sm.plan(fun, w, in_slices={0: 5})
    assert_same(shard_plan.run(w), (np.eye(24, dtype=bool),) * 3, 0)
    assert_same(sm.chunked(fun, {0: 5})(w), (np.eye(24, dtype=bool),) * 3, 0)


@pytest.mark.few(5)
@pytest.mark.one_in(4)
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(
    ("pieces", "partial"), [(2, True), (3, False), (7, True), (7, None)]
)
def test_the_element_that_was_selected_lies_on_an_edge(edge, pieces, partial, arrays):
    """It does not where a later stage computes it again, with other last bits."""

    def fun(x, w):
        return EDGES[edge](cosines(x, w).T).sum(0)

    cut = None, {0: pieces}
    want = jax.jit(fun)(*arrays)
    if partial is None:
        assert_same(sm.chunked(fun, cut)(*arrays), want, 0)
    else:
        shard_plan = sm.plan(fun, *arrays, in_slices=cut, partial=partial)
        assert_same(shard_plan.run(*arrays), want, 0)


def test_running_maxima_are_elements(arrays):
    """As in the drawdown of a price."""

    def fun(x, w):
        y = cosines(w, x)
        return jnp.isnan(jnp.sqrt(lax.cummax(y) - y)).sum(0)

    shard_plan = sm.plan(fun, *arrays, in_slices=(None, {0: 7}))
    assert (
        max(stage.kept_bytes for stage in shard_plan.stage_costs) >= 4 * ROWS * COLUMNS
    )
    assert_same(shard_plan.run(*arrays), np.zeros(ROWS, np.int32), 0)


def test_an_extremum_is_compared_and_subtracted(arrays):
    """The comparison is rewritten, and knows the extrema of the pieces."""

    def fun(x, w):
        y = cosines(w, x)
        least = y.min(0, keepdims=True)
        return jnp.isnan(jnp.sqrt(y - least)).sum(0), (y == least).sum(0)

    shard_plan = sm.plan(fun, *arrays, in_slices=(None, {0: 7}))
    assert_same(shard_plan.run(*arrays), jax.jit(fun)(*arrays), 0)


@pytest.mark.parametrize("partial", [True, False])
def test_each_element_finds_its_place_among_all(partial, arrays):
    def ranks(x, w):
        y = cosines(x, w).ravel()
        return y, jnp.searchsorted(jnp.sort(y), y)

    shard_plan = sm.plan(ranks, *arrays, in_slices=(None, {0: 3}), partial=partial)
    y, places = shard_plan.run(*arrays)
    np.testing.assert_array_equal(places, np.searchsorted(np.sort(y), y))


def test_an_equation_that_is_written_twice_is_one(arrays):
    """So it is known that the maximum is one of the elements."""

    def fun(x, w):
        return (cosines(x, w).T - largest(cosines(x, w).T) >= 0).sum(0)

    shard_plan = sm.plan(fun, *arrays, in_slices=(None, {0: 3}))
    assert len(shard_plan.stages) == 3
    assert_same(shard_plan.run(*arrays), np.ones(ROWS, np.int32), 0)


def test_nan_infinities_and_equal_elements(arrays):
    def fun(x, w):
        y = cosines(x, w)
        best, least = y.max(1, keepdims=True), jnp.maximum(y, 0)
        found = y == best, y < best, least == least.min(1, keepdims=True)
        return [each.sum(1) for each in found]

    x, w = arrays[0].copy(), arrays[1]
    x[3], x[4, 0], x[5] = np.nan, np.inf, 0
    shard_plan = sm.plan(fun, x, w, in_slices=(None, {0: sm.Pieces(64)}))
    assert_same(shard_plan.run(x, w), jax.jit(fun)(x, w), 0)


def test_a_maximum_along_another_axis_is_another_maximum():
    """A square has the maxima of its rows beside those of its columns."""

    def fun(x):
        y = jnp.exp(x) / jnp.sqrt((x * x).sum(0, keepdims=True))
        return (y > y.max(1)[None]).sum(0), (y >= y.max(1)[:, None]).sum(0)

    x = np.random.default_rng(0).standard_normal((40, 40)).astype(np.float32)
    shard_plan = sm.plan(fun, x, in_slices=({1: 4},))
    assert_same(shard_plan.run(x), jax.jit(fun)(x), 0)
