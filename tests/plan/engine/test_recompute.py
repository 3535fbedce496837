"""What a later stage finds kept, and what every shard makes for itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.planning.engine import nodes, propagate
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same
from tests.plan.plan_programs import reals


def conv(x, kernel, stride=1):
    return lax.conv_general_dilated(
        x[None, None], kernel[None, None], (stride, stride), ((1, 1), (1, 1))
    )[0, 0]


def convolutions(x, kernel):
    y = jnp.maximum(conv(x, kernel), 0.0)
    return conv(jnp.maximum(conv(y, kernel, 2), 0.0), kernel)


def pools(x, kernel):
    y = lax.reduce_window(
        conv(x, kernel), -jnp.inf, lax.max, (2, 2), (2, 2), ((0, 0), (0, 0))
    )
    return lax.reduce_window(y, 0.0, lax.add, (5, 5), (1, 1), "SAME")


def moving(x, _):
    return (lax.reduce_window(x, 0.0, lax.add, (7, 1), (1, 1), "SAME") / 7).mean(0)


def side(x, c):
    return jnp.tanh(x @ c.T + (c * c).sum(1)[None]).sum(0)


def kept(shard_plan):
    """The elements of all that later stages read."""
    return sum(
        result.value.size
        for stage in shard_plan.stages[:-1]
        for result in stage.results
        if result.value not in shard_plan.stages[-1].results
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fun", "shape", "cut"),
    [
        (convolutions, (3, 3), {0: 4, 1: 4}),
        (pools, (3, 3), {0: 4, 1: 2}),
        (moving, (3, 3), {0: 4}),
    ],
)
def test_windows_divide_the_work_before_them(fun, shape, cut, monkeypatch):
    monkeypatch.setattr(propagate, "WORTH_KEEPING", 2**6)
    x, kernel = reals(64, 48), reals(*shape)
    shard_plan = plan(fun, x, kernel, in_slices=(cut, None))
    assert len(shard_plan.stages) == 1
    assert shard_plan.num_shards == np.prod(list(cut.values()))
    assert_same(shard_plan.run(x, kernel), jax.jit(fun)(x, kernel), 1e-4)


def test_a_side_operand_alone_is_kept(monkeypatch):
    monkeypatch.setattr(propagate, "WORTH_KEEPING", 2**6)
    x, c = reals(64, 8), reals(6, 8)
    shard_plan = plan(side, x, c, in_slices=({0: 8}, None))
    assert [stage.num_shards for stage in shard_plan.stages] == [1, 8]
    assert kept(shard_plan) == 6
    assert_same(shard_plan.run(x, c), jax.jit(side)(x, c), 1e-4)


def normal(x, w):
    y = x @ w
    return (y - y.mean(0, keepdims=True)) / (y.std(0, keepdims=True) + 1)


def chosen(shard_plan):
    """The names of what is kept that could be computed again."""
    return {value.producer.name for value in shard_plan._cut_program.analysis.costly}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("columns", "features", "kept"), [(256, 4, True), (4, 64, False), (16, 16, False)]
)
def test_a_product_is_kept_where_that_costs_less(columns, features, kept):
    x, w = reals(96, columns), reals(columns, features)
    shard_plan = plan(normal, x, w, in_slices=({0: 8}, None))
    size = 96 * features * 4
    assert ("dot_general" in chosen(shard_plan)) == kept
    assert (max(cost.kept_bytes for cost in shard_plan.stage_costs) >= size) == kept
    assert_same(shard_plan.run(x, w), jax.jit(normal)(x, w), 1e-4)
    for told in (str(shard_plan), str(shard_plan.explain())):
        assert (f"keeps the dot_general of shape (96, {features}) (" in told) == kept


def by_rank(x):
    return jnp.sort(x, 0) * x


def gains(x):
    return jnp.fft.fft(x, axis=0).real * x


@pytest.mark.parametrize("fun", [by_rank, gains])
def test_what_each_shard_would_compute_whole_is_kept(fun, monkeypatch):
    """One shard sorts; the others take pieces of that."""
    monkeypatch.setattr(propagate, "WORTH_KEEPING", 2**6)
    x = reals(2**12, 2)
    shard_plan = plan(fun, x, in_slices={0: 8})
    assert [stage.num_shards for stage in shard_plan.stages] == [1, 8]
    assert_same(shard_plan.run(x), jax.jit(fun)(x), 1e-5)


def test_the_steps_of_a_loop_that_each_shard_would_run_are_run_once(monkeypatch):
    monkeypatch.setattr(propagate, "WORTH_KEEPING", 2**6)

    def fun(x, rows):
        return x * lax.scan(lambda c, row: (c / 2 + row, c), rows[0], rows)[1]

    x = reals(64, 2)
    shard_plan = plan(fun, x, x, in_slices=({0: 8}, None))
    assert [stage.num_shards for stage in shard_plan.stages] == [1, 8]
    assert_same(shard_plan.run(x, x), jax.jit(fun)(x, x), 1e-5)


def test_what_is_kept_beside_pieces_is_computed_once(monkeypatch):
    monkeypatch.setattr(propagate, "WORTH_KEEPING", 2**6)

    def fun(x, w):
        y = x @ w
        return jnp.sort(x, 0) * (y - y.max(0, keepdims=True))

    x, w = reals(2**12, 64), reals(64, 64)
    shard_plan = plan(fun, x, w, in_slices=({0: 8}, None))
    assert {"sort", "dot_general"} <= {*chosen(shard_plan)}
    assert_same(shard_plan.run(x, w), jax.jit(fun)(x, w), 1e-5)


def test_what_does_not_fit_is_computed_again():
    x, w = reals(96, 256), reals(256, 32)
    kept = 96 * 32 * 4
    roomy = plan(normal, x, w, in_slices=({0: sm.AUTO}, None), memory=80_000)
    assert chosen(roomy) == {"dot_general"}
    shard_plan = plan(normal, x, w, in_slices=({0: sm.AUTO}, None), memory=40_000)
    assert not chosen(shard_plan)
    assert shard_plan.peak_bytes <= 40_000 < w.nbytes + kept
    assert_same(shard_plan.run(x, w), jax.jit(normal)(x, w), 1e-4)


def test_values_without_elements_take_nothing():
    def fun(x):
        none = jnp.sin(x[:0])
        return jnp.cos(none), jnp.tanh(x @ x.T).sum(0)

    x = reals(600, 400)
    shard_plan = plan(fun, x, in_slices={0: 3})
    assert "axis 0" in str(shard_plan)
    none, sums = shard_plan.run(x)
    assert none.shape == (0, 400)
    assert_same(sums, jax.jit(fun)(x)[1], 1e-3)
    assert sm.chunked(fun, {0: 3})(x)[0].shape == (0, 400)


def columns(x):
    y = jnp.cumsum(x, 1)
    return y[:, -1], y[:, 0]


def squares(x):
    y = x @ x[:64]
    return (y * y).astype(jnp.bfloat16)


NARROWED = {
    "column": (lambda x: jnp.cumsum(x, 1)[:, -1], 4 * 2**9),
    "diagonal": (lambda x: jnp.diagonal(x @ x.T), 4 * 2**9),
    "rounded": (squares, 2 * 2**15),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(("narrow", "nbytes"), NARROWED.values(), ids=NARROWED)
def test_the_smallest_of_what_is_computed_is_kept(narrow, nbytes):
    def fun(x):
        return [y - y.mean(0, keepdims=True) for y in jax.tree.leaves(narrow(x))]

    x = reals(2**9, 64)
    shard_plan = plan(fun, x, in_slices={0: 8})
    assert [stage.num_shards for stage in shard_plan.stages] == [8, 8]
    every = shard_plan._cut_program.analysis.costly
    assert sum(map(nodes.nbytes, every)) == nbytes
    assert not shard_plan.stage_costs[1].reads
    assert_same(shard_plan.run(x), jax.jit(fun)(x), 1e-2)


def test_a_value_that_is_compared_is_kept_where_it_is_smallest():
    def fun(x):
        y = jnp.diagonal(x @ x.T)
        return jnp.sqrt(y - y.min())

    x = reals(2**9, 64)
    shard_plan = plan(fun, x, in_slices={0: 8})
    assert shard_plan.stage_costs[0].kept_bytes <= 4 * (2**9 + 1)
    assert_same(shard_plan.run(x), jax.jit(fun)(x), 1e-3)


@pytest.mark.deep
def test_statistics_of_many_rows_are_selected_from_by_one_shard():
    def fun(x):
        means = jnp.median(x, 1)
        return jnp.quantile(means, jnp.array([0.1, 0.9])), means.mean()

    x = reals(2**9, 512)
    shard_plan = plan(fun, x, in_slices={0: 8})
    assert len(shard_plan.stages) <= 3
    assert shard_plan.stages[-1].num_shards == 1
    assert_same(shard_plan.run(x), jax.jit(fun)(x), 1e-5)


def test_selections_of_a_product_that_is_cut_along_both_axes():
    x, w = reals(64, 4000), reals(4000, 8)
    shard_plan = plan(
        lambda x, w: jnp.median(x @ w, 0), x, w, in_slices=({0: 4}, {1: 2})
    )
    assert shard_plan.stage_costs[0].reads == "args[0] twice, args[1] 4 times"
    assert all(not cost.reads for cost in shard_plan.stage_costs[1:])


@pytest.mark.deep
def test_random_numbers_that_do_not_fit_are_drawn_again():
    key = jax.random.key(0)
    shard_plan = plan(
        lambda key: jax.random.normal(key, (2**15,)).std(), key, memory="80 kB"
    )
    assert len(shard_plan.stages) > 1
    assert not chosen(shard_plan)
