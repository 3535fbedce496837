"""Variances, softmax, attention, places of extrema: read once, in pieces as in one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from shardmap.planning.engine.monoids import Monoid, Part, start
from shardmap.planning.lax.staged import monoids
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut, times_read
from tests.plan.plan_programs import reals

ROWS, COLUMNS = 160, 6
X = reals(ROWS, COLUMNS)


def standardised(x):
    return (x - x.mean(0, keepdims=True)) / (x.std(0, keepdims=True) + 1)


def around(x):
    """The centre is another one's."""
    return ((x - jnp.sin(x).max(0, keepdims=True)) ** 2).sum(0)


def product_with_itself(x):
    away = x.mean(0, keepdims=True) - x
    return (away * away).sum(0)


def covariance(x):
    away = x - x.mean(0, keepdims=True)
    return away.T @ away / (len(x) - 1)


def cross(x):
    y = jnp.abs(x)
    return (x - x.mean(0, keepdims=True)).T @ (y - y.mean(0, keepdims=True))


def elementwise(x):
    x, y = x[:, :3], x[:, 3:]
    a, b = x - x.mean(0, keepdims=True), y - y.mean(0, keepdims=True)
    return (a * b).sum(0), (a * a).sum(0) * (b * b).sum(0)


def of_vectors(x):
    """The centres are numbers."""
    a, b = x.sum(1), x[:, 0]
    a, b = a - a.mean(), b - b.mean()
    return a @ b, (a * a).sum() * (b * b).sum()


def whitened(x):
    """What needs the covariance comes later."""
    factor = jnp.linalg.cholesky(covariance(x) + jnp.eye(len(x.T), dtype=x.dtype))
    return (x - x.mean(0, keepdims=True)) @ factor


def exponentials(x):
    weights = jnp.exp(x - x.max(0, keepdims=True))
    return weights.sum(0), weights.T @ x


FUNCTIONS = {
    "variance": (lambda x: x.var(0), 1),
    "deviation of all": (lambda x: jnp.std(x, ddof=1), 1),
    "mean and variance": (lambda x: (x.mean(0), x.var(0)), 1),
    "standardised": (standardised, 2),
    "a product with itself": (product_with_itself, 1),
    "around another's": (around, 1),
    "around one number": (lambda x: ((x - x.mean()) ** 2).sum(), 1),
    "covariance": (covariance, 1),
    "jnp.cov": (lambda x: jnp.cov(x, rowvar=False), 1),
    "of two": (cross, 1),
    "elementwise": (elementwise, 1),
    "of vectors": (of_vectors, 1),
    "whitened": (whitened, 2),
    "exponentials": (exponentials, 1),
    "around the largest": (lambda x: jnp.exp(x - x.max()).sum(), 1),
    "softmax": (lambda x: jax.nn.softmax(x, 0), 2),
    "log-softmax": (lambda x: jax.nn.log_softmax(x, 0), 2),
    "log-sum-exp": (lambda x: jax.nn.logsumexp(x, 0), 1),
    "log-sum-exp of all": (jax.nn.logsumexp, 1),
    "argmax": (lambda x: jnp.argmax(x, 0), 1),
    "argmax with its value": (lambda x: (jnp.argmax(x, 0), x.max(0)), 1),
    "argmin of all": (jnp.argmin, 1),
    "argmax of the transpose": (lambda x: x.T.argmax(1), 1),
    "all of them": (lambda x: (x.var(0), jax.nn.logsumexp(x, 0), x.argmin(0)), 1),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_read_as_often_as_it_must_be(name):
    fun, reads = FUNCTIONS[name]
    shard_plan = check_cut(fun, X, in_slices={0: (50, 7, 63, 40)}, tolerance=1e-4)
    assert times_read(shard_plan) == reads


ODD = {
    "plain": lambda x: x,
    "equal elements": np.round,
    "all the same": lambda x: np.full_like(x, 0.1),
    "with an offset": lambda x: x + 16,
    "large": lambda x: x * 40 - 500 * (np.arange(ROWS) < 40)[:, None],
    "one piece of -inf": lambda x: with_one(x, -np.inf, slice(50, 57)),
    **{
        f"{odd} {where}": functools.partial(with_odd, odd=odd, rows=rows)
        for with_odd in [lambda x, odd, rows: with_one(x, odd, rows)]
        for odd in (np.nan, np.inf, -np.inf)
        for where, rows in {"once": slice(3, 4), "throughout": slice(None)}.items()
    },
}


def with_one(x, odd, rows):
    x = x.copy()
    x[rows, 1] = odd
    return x


TOLERANCES = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 6e-2}


@pytest.mark.few(2)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_in_pieces_it_is_what_it_is_in_one(name, dtype):
    fun, _ = FUNCTIONS[name]
    if name == "whitened":
        fun = covariance  # LAPACK knows no short floats.
    dtype = jnp.dtype(dtype)
    rng = np.random.default_rng(len(name))
    lengths = np.diff([0, *sorted(rng.choice(ROWS - 1, 20, replace=False) + 1), ROWS])
    cuts = {0: (50, 7, 0, 63, 40), 1: 2}, {0: tuple(lengths.tolist())}
    whole = jax.jit(fun)
    ways = [
        plan(fun, X.astype(dtype), in_slices=cuts[0]).run,
        jax.jit(sm.chunked(fun, cuts[1])),
    ]
    for change in ODD.values():
        x = np.asarray(change(X), dtype)
        want = whole(x)
        largest = [
            np.abs(a[np.isfinite(a)]).max(initial=1)
            for a in map(floats, jax.tree.leaves(want))
        ]
        for run in ways:
            leaves = zip(*map(jax.tree.leaves, (run(x), want)), largest, strict=True)
            for ours, theirs, scale in leaves:
                assert ours.dtype == theirs.dtype
                bound = TOLERANCES[dtype.name]
                np.testing.assert_allclose(
                    floats(ours), floats(theirs), rtol=bound, atol=bound * scale
                )


def floats(x):
    return np.asarray(x).astype(np.float64)


@pytest.mark.deep
def test_it_is_no_less_accurate_than_two_passes():
    def fun(x):
        return x.mean(0), x.var(0), covariance(x)

    x = np.random.default_rng(0).standard_normal((4096, 32)).astype(np.float32)
    # Pieces with means of their own.
    x[1000:2000] += 10
    pieces = plan(fun, x, in_slices={0: (1000, 24, 3000, 72)})
    for offset in (0, 1e3, 1e4, 1e6, -1e5):
        y = (x + offset).astype(np.float32)
        # A column that is all the same.
        y[:, 0] = np.float32(offset + 0.1)
        exact = y.astype(np.float64)
        exact = exact.mean(0), exact.var(0), np.cov(exact, rowvar=False)
        got, want = pieces.run(y), jax.jit(fun)(y)
        assert (got[1] >= 0).all()
        for ours, theirs, true in zip(got, want, exact, strict=True):
            off, bound = (np.abs(floats(x) - true).max() for x in (ours, theirs))
            assert off <= 2 * bound + 3e-6 * np.abs(true).max()


def test_whole_numbers_and_wide_ones():
    x = np.arange(480, dtype=np.int32).reshape(160, 3) % 7
    fun = FUNCTIONS["all of them"][0]
    check_cut(lambda x: fun(x.astype(jnp.float32)), x, in_slices={0: 4}, tolerance=1e-5)
    check_cut(lambda x: (x.argmax(0), (x > 5).argmin(0)), x, in_slices={0: 4})
    with jax.enable_x64(True):
        check_cut(fun, X.astype(np.float64), in_slices={0: 4}, tolerance=1e-12)


def test_more_pieces_do_not_take_more():
    x = jax.ShapeDtypeStruct((1000, 2000), np.float32)
    peaks = [
        plan(standardised, x, in_slices={0: count}).peak_bytes for count in (10, 40, 64)
    ]
    assert all(b <= 1.05 * a for a, b in itertools.pairwise(peaks))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("length", "more"), [(10, ()), (30, (jnp.argmin, jnp.var, jax.nn.logsumexp))]
)
def test_an_argmax_of_computed_floats_is_found(length, more):
    """A second pass may compute other last bits, and find no such number."""

    def fun(x, w):
        x = x / jnp.linalg.norm(x, axis=1, keepdims=True)
        w = w / jnp.linalg.norm(w, axis=1, keepdims=True)
        y = x @ w.T
        return [each(y, 1) for each in (jnp.argmax, *more)]

    args = reals(75, 9), reals(131, 9, seed=1)
    shard_plan = plan(fun, *args, in_slices=(None, {0: sm.Pieces(length)}))
    found = shard_plan.run(*args)
    assert (found[0] == jax.jit(fun)(*args)[0]).mean() > 0.95
    assert all(each.max() < 131 for each in found[:2])


KEYS = {0: (130, 67, 103, 100)}
Q, K, V = reals(3, 8), reals(400, 8), reals(400, 5)


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T / 3, axis=-1) @ v


def by_hand(q, k, v):
    logits = q @ k.T
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    return weights @ v / weights.sum(-1, keepdims=True)


def keys_first(q, k, v):
    return v.T @ jax.nn.softmax(k @ q.T, axis=0)


def masked(q, k, v):
    seen = jnp.arange(len(k))[None] < jnp.array([[400], [150], [0]])
    return jax.nn.softmax(jnp.where(seen, q @ k.T, -jnp.inf), axis=-1) @ v


@pytest.mark.few(1)
@pytest.mark.parametrize("fun", [attention, by_hand, keys_first, masked])
def test_attention_reads_keys_and_values_once(fun):
    shard_plan = plan(fun, Q, K, V, in_slices=(None, KEYS, KEYS))
    assert times_read(shard_plan, slice(1, 3)) == 1
    # A shard for each piece, and one that puts them together.
    assert shard_plan.num_shards == 5
    for scale in (1.0, 0.0, 30.0, 1e4):
        want = jax.jit(fun)(Q * scale, K, V)
        assert_same(shard_plan.run(Q * scale, K, V), want, tolerance=1e-4)


def test_attention_with_heads_and_batches():
    q, k, v = reals(2, 3, 4, 8), reals(2, 600, 4, 8), reals(2, 600, 4, 8)
    keys = {1: (100, 350, 150)}
    fun = jax.nn.dot_product_attention
    shard_plan = check_cut(fun, q, k, v, in_slices=(None, keys, keys), tolerance=1e-5)
    assert times_read(shard_plan, slice(1, 3)) == 1
    cuts = {0: 2, 1: 3}, {0: 2, 1: 3, 2: 2}, {0: 2, 1: 3, 2: 2}
    check_cut(fun, q, k, v, in_slices=cuts, tolerance=1e-5)


def test_attention_holds_pieces_of_keys_and_queries():
    """The logits of all keys take 8 MB."""
    q, k = (jax.ShapeDtypeStruct((n, 16), np.float32) for n in (256, 8192))
    for queries in (None, {0: 4}):
        cut = sm.chunked(attention, (queries, {0: 64}, {0: 64}))
        analysis = jax.jit(cut).lower(q, k, k).compile().memory_analysis()
        assert analysis.temp_size_in_bytes < 2**20


def test_columns_of_values_that_are_cut_take_two_passes():
    """A shard of some columns would not have the maxima that they are scaled by."""
    cuts = None, KEYS, {**KEYS, 1: 2}
    shard_plan = check_cut(attention, Q, K, V, in_slices=cuts, tolerance=1e-5)
    assert times_read(shard_plan, slice(1, 2)) > 1


@pytest.mark.deep
def test_gradients_of_both():
    def loss(q, k, v):
        return (attention(q, k, v) ** 2).sum() + covariance(v).std()

    fun = jax.grad(loss, (0, 1, 2))
    check_cut(fun, Q, K, V, in_slices=(None, KEYS, KEYS), tolerance=1e-4)


def moments(x, y=None):
    """Their state, around the middle of what is finite."""
    different = [x] if y is None else [x, y]
    means = [monoids.finite(np, each.sum(0) / max(len(x), 1)) for each in different]
    away = [each - mean for each, mean in zip(different, means, strict=True)]
    sums, product = [each.sum(0) for each in away], (away[0] * away[-1]).sum(0)
    return [np.full_like(means[0], len(x)), *means, *sums, product]


def exponentials_of(x):
    largest = x.max(0, initial=-np.inf)
    return [largest, np.exp(x - monoids.finite(np, largest)).sum(0)]


def place_of(x, best, at):
    return [best(x, 0), at(x, 0).astype(np.int32)]


def around_one(state):
    return monoids.around(np, state, [np.float32(1)] * (len(state) // 2 - 1))


LAWS = {
    "moments": (moments, around_one),
    "moments of two": (lambda x: moments(x, x[:, ::-1]), around_one),
    "exponentials": (exponentials_of, lambda s: [s[0], monoids.scaled(np, s, s[0])]),
    "argmax": (lambda x: place_of(x, np.max, np.argmax), list),
    "argmin": (lambda x: place_of(x, np.min, np.argmin), list),
}
MONOIDS = [
    *monoids.MOMENTS.values(),
    *(monoids.EXPONENTIALS, monoids.LARGEST, monoids.SMALLEST),
]


def test_every_row_of_the_table_has_a_law():
    rows = [*monoids.MOMENTS.values()]
    rows += [each for each in vars(monoids).values() if isinstance(each, Monoid)]
    assert rows == MONOIDS
    assert len(LAWS) == len(MONOIDS)


@pytest.mark.few(2)
@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("change", ODD)
@pytest.mark.parametrize("name", LAWS)
@np.errstate(all="ignore")
def test_states_combine_in_any_order(name, change, xp):
    (state, result), monoid = LAWS[name], dict(zip(LAWS, MONOIDS, strict=True))[name]
    x = ODD[change](X).astype(np.float32)
    want = state(x)
    nothing = [
        np.full_like(each, start(Part(monoid, k), each.dtype))
        for k, each in enumerate(want)
    ]
    edges = [0, 1, 50, 57, 120, 160]
    parts = [nothing, nothing]
    for a, b in itertools.pairwise(edges):
        parts.append(state(x[a:b]))
        if name.startswith("arg"):
            parts[-1][1] += np.int32(a)
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(len(parts))
        left = functools.reduce(
            functools.partial(monoid.combine, xp), [parts[k] for k in order]
        )
        a, b, c, *others = (parts[k] for k in order)
        right = monoid.combine(xp, a, monoid.combine(xp, b, c))
        for other in others:
            right = monoid.combine(xp, other, right)
        for each in (left, right):
            each = list(map(np.asarray, each))
            assert [y.dtype for y in each] == [y.dtype for y in want]
            for ours, theirs in zip(
                flat(result(each)), flat(result(want)), strict=True
            ):
                bound = 2e-5 * np.abs(theirs[np.isfinite(theirs)]).max(initial=1)
                np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=bound)
    for part in (nothing, want):
        for both in ((nothing, part), (part, nothing)):
            for ours, theirs in zip(monoid.combine(xp, *both), part, strict=True):
                np.testing.assert_array_equal(np.asarray(ours), theirs)


def flat(result):
    return [np.asarray(each) for each in jax.tree.leaves(list(result))]


def test_no_elements_have_no_state():
    def fun(x):
        return jnp.exp(x - x.mean()).sum(), ((x - x.mean()) ** 2).sum()

    check_cut(fun, np.zeros((8, 0), np.float32), in_slices={0: 4})
