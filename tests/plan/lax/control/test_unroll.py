"""Loops that are unrolled so that a cut passes, and maps."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from shardmap.api.spmap import spmap
from shardmap.planning.chunked import chunked
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut, cuts, times_read
from tests.plan.plan_programs import X, reals
from tests.strategies import examples

POINTS, TARGETS, START = reals(11, 3), reals(11, seed=4), reals(3, seed=5)
RAGGED = {0: (2, 4, 5)}


def means(points, centres):
    """The steps of k-means."""

    def step(_, centres):
        distance = ((points[:, None] - centres[None]) ** 2).sum(-1)
        nearest = jax.nn.one_hot(distance.argmin(1), centres.shape[0])
        return (nearest.T @ points) / (nearest.sum(0)[:, None] + 1e-3)

    return lax.fori_loop(0, 3, step, centres)


def descent(points, targets, start):
    def step(w, _):
        error = points @ w - targets
        return w - 0.1 * points.T @ error / len(targets), (error**2).mean()

    return lax.scan(step, start, None, length=3)


def test_a_stage_for_each_step():
    shard_plan = check_cut(
        means, POINTS, POINTS[:4], in_slices=(RAGGED, None), tolerance=2e-4
    )
    assert [stage.num_shards for stage in shard_plan.stages] == [3, 3, 3, 1]
    args = POINTS, TARGETS, START
    check_cut(descent, *args, in_slices=(RAGGED, RAGGED, None), tolerance=2e-4)


@pytest.mark.deep
def test_the_gradient_of_a_descent():
    def fun(*args):
        return (descent(*args)[0] ** 2).sum()

    args = POINTS, TARGETS, START
    check_cut(
        jax.grad(fun, (0, 2)), *args, in_slices=(RAGGED, RAGGED, None), tolerance=5e-4
    )


@examples(2)
@given(st.data())
def test_steps_under_any_cut(data):
    def power(matrix, start):
        def step(_, v):
            w = matrix @ v
            return w / jnp.linalg.norm(w)

        return lax.fori_loop(0, 2, step, start)

    for fun, args in (
        (descent, (POINTS, TARGETS, START)),
        (power, (reals(6, 6), reals(6))),
    ):
        in_slices = data.draw(cuts(args))
        shard_plan = plan(fun, *args, in_slices=in_slices)
        assert_same(shard_plan.run(*args), jax.jit(fun)(*args), 1e-3)


STEPS = 4


def heat(x):
    def step(_, x):
        return x + 0.1 * (jnp.roll(x, 1) - 2 * x + jnp.roll(x, -1))

    return lax.fori_loop(0, STEPS, step, x)


@pytest.mark.few(1)
@pytest.mark.parametrize("partial", [True, False])
def test_steps_that_read_their_neighbours_are_one_pass(partial):
    x = reals(40)
    shard_plan = check_cut(heat, x, in_slices=({0: (9, 17, 14)},), partial=partial)
    assert len(shard_plan.stages) == 1
    assert shard_plan.shards[1].in_slices[0] == (slice(5, 30),)
    check_cut(jax.grad(lambda x: (heat(x) ** 2).sum()), x, in_slices=({0: 3},))


def test_xla_does_not_fuse_steps():
    """It would compute each of them several times, in more memory."""
    x = reals(40)
    lowered = jax.jit(chunked(heat, {0: 4})).lower(x).as_text()
    assert lowered.count("optimization_barrier") >= STEPS


SAME = {
    "dilation": lambda x: lax.reduce_window(x, -np.inf, lax.max, (3,), (1,), "SAME"),
    "convolution": lambda x: lax.conv_general_dilated(
        x[None, None], jnp.ones((1, 1, 3)) / 4, (1,), "SAME"
    )[0, 0],
    "reversal": lambda x: 2 * x[::-1],
}


def repeated(step):
    return lambda x: lax.fori_loop(0, 3, lambda _, x: step(x), x)


def scanned(step):
    return lambda x: lax.scan(lambda x, _: (step(x), x.max()), x, length=3)[0]


def gradient(step):
    return jax.grad(lambda x: (repeated(step)(x) ** 2).sum())


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("loop", "step"),
    [
        *itertools.product([repeated, scanned], SAME),
        *itertools.product([gradient], ["convolution", "reversal"]),
    ],
)
def test_steps_that_see_an_axis_as_long_as_their_results(loop, step):
    """The carried axis is the one that a step sees, with the neighbours."""
    fun, x = loop(SAME[step]), reals(60)
    shard_plan = check_cut(fun, x, in_slices=({0: 4},))
    assert times_read(shard_plan) < 2
    assert_same(chunked(fun, {0: 4})(x), jax.jit(fun)(x))


def test_a_loop_is_unrolled_beside_what_is_whole():
    """Each loop is looked at alone: one that gains nothing stays a loop."""

    def fun(x):
        whole = lax.fori_loop(0, 3, lambda _, x: jnp.fft.fft(x).real / 4, x)
        return heat(x), whole

    x = reals(40)
    shard_plan = check_cut(fun, x, in_slices=({0: 4},))
    assert shard_plan.num_shards == 4
    assert "stops at scan" in str(shard_plan.explain())


def test_a_loop_that_gains_nothing_stays_a_loop():
    def fun(x):
        return lax.fori_loop(0, 3, lambda _, x: jnp.fft.fft(x, axis=0).real, x)

    shard_plan = plan(fun, X, in_slices=({0: 2},))
    text = str(shard_plan.explain())
    assert "stops at scan" in text
    assert "the body of the loop or branch mixes this axis at fft" in text
    assert "test_unroll.py" in text


def long_descent(points, targets):
    def step(_, w):
        return w - 0.1 * points.T @ (points @ w - targets) / len(targets)

    return lax.fori_loop(0, 40, step, jnp.zeros(3))


def test_a_long_loop_that_sums_over_the_cut_is_cut():
    shard_plan = plan(long_descent, POINTS, TARGETS, in_slices=({0: 2}, {0: 2}))
    assert [stage.num_shards for stage in shard_plan.stages] == [2] * 40 + [1]
    # Steps that run the same functions are told in one line.
    assert str(shard_plan).count("\n  stage") <= 6


def test_a_cut_carry_is_kept_now_and_then():
    """Otherwise each step would compute it again from the first step."""

    def fun(x):
        return lax.fori_loop(0, 40, lambda _, x: x - 0.1 * x.mean(0, keepdims=True), x)

    x = reals(64, 4)
    shard_plan = plan(fun, x, in_slices={0: 2})
    assert len(shard_plan.stages) == 41
    assert str(shard_plan).count("\n  stage") <= 16
    assert "read args[0] 9 times" in str(shard_plan)
    assert_same(shard_plan.run(x), jax.jit(fun)(x), 1e-4)


def test_a_long_loop_without_stages_stays_a_loop():
    def fun(x):
        return lax.fori_loop(0, 300, lambda _, x: jnp.roll(x, 1) * 0.5 + x, x)

    with pytest.warns(UserWarning, match="runs as a whole"):
        shard_plan = plan(fun, reals(2000), in_slices=({0: 3},))
    assert "mixes this axis" in str(shard_plan.explain())
    assert "2,048 where they are one function" in str(shard_plan.explain())


def test_a_loop_to_a_tolerance_says_what_would_be_cut():
    def fun(points, targets):
        def step(w):
            return w - 0.1 * points.T @ (points @ w - targets)

        return lax.while_loop(lambda w: w.sum() < 3, step, jnp.zeros(3))

    with pytest.warns(UserWarning, match="runs as a whole"):
        shard_plan = plan(fun, POINTS, TARGETS, in_slices=({0: 2}, {0: 2}))
    assert "as that of lax.fori_loop or lax.scan is" in str(shard_plan.explain())


def talking(x):
    """One element."""
    return (
        x / lax.psum(x, "i") + lax.pmax(x, "i") - lax.pmean(x, "i"),
        lax.pmin(x, "i") + lax.axis_index("i").astype(x.dtype),
    )


@pytest.mark.parametrize(("combine", "stages"), [(lax.psum, 1), (lax.pmax, 2)])
def test_sums_in_pieces_go_through_a_sum_of_elements_alone(combine, stages):
    fun = jax.vmap(
        lambda x: combine(jnp.sin(x).sum(), "i"), axis_name="i", out_axes=None
    )
    shard_plan = check_cut(fun, X, in_slices=({1: 3},))
    assert len(shard_plan.stages) == stages


@pytest.mark.few(1)
@pytest.mark.parametrize("mapped", [jax.vmap, spmap], ids=["vmap", "spmap"])
def test_elements_that_talk_are_cut_along_their_axis(mapped):
    fun = mapped(talking, axis_name="i")
    x = np.abs(X) + 1
    shard_plan = check_cut(fun, x, in_slices=({0: (3, 5), 1: 2},))
    assert shard_plan.num_shards > 4

    def loss(x):
        return jnp.sin(mapped(lambda x: x / lax.psum(x, "i"), axis_name="i")(x)).sum()

    check_cut(jax.grad(loss), x, in_slices=({0: (3, 5)},), tolerance=1e-4)


@pytest.mark.deep
def test_elements_that_send():
    def body(x):
        ring = [(k, (k + 1) % 8) for k in range(8)]
        return lax.all_gather(x, "i").sum(0) - x, lax.ppermute(x, "i", ring)

    check_cut(spmap(body, axis_name="i"), X, in_slices=({0: (3, 5)},))


def test_chunks_of_a_map_are_chunks_of_all_its_elements():
    """A function may have attributes that are called like those of what chunks it."""
    fun = spmap(lambda row: row.sum())
    assert_same(chunked(fun, ({0: 2},))(X), X.sum(1))
    fun = spmap(talking, axis_name="i")
    x = np.abs(X) + 1
    assert_same(jax.jit(chunked(fun, ({0: (3, 5)},)))(x), fun(x), 1e-4)
