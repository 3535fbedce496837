"""One axis is cut before an operation that needs it whole, and another one behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut, cuts
from tests.plan.plan_programs import reals
from tests.strategies import examples

IMAGE = reals(12, 9)


def spectrum(x):
    return jnp.abs(jnp.fft.fft2(x)) * 0.1


def sorted_twice(x):
    return jnp.sort(jnp.sort(x, 1) * 2, 0)


def filtered(x):
    return jnp.fft.irfft2(jnp.fft.rfft2(x) * 0.5, s=(12, 9))


@pytest.mark.few(1)
@pytest.mark.parametrize("fun", [sorted_twice, filtered])
def test_rows_and_then_columns(fun):
    shard_plan = check_cut(fun, IMAGE, in_slices=({0: (3, 4, 5)},), tolerance=1e-4)
    assert len(shard_plan.stages) > 1
    assert all(stage.num_shards >= 3 for stage in shard_plan.stages)


def test_a_transform_of_a_product_along_all_of_its_axes():
    x, w = reals(12, 400), reals(400, 9)
    shard_plan = check_cut(
        lambda x, w: jnp.abs(jnp.fft.fft2(x @ w)),
        *(x, w),
        in_slices=({0: 4}, None),
        tolerance=1e-3,
    )
    assert [stage.num_shards for stage in shard_plan.stages] == [4, 4]


def test_the_gradient_of_rows_and_columns():
    gradient = jax.grad(lambda x: (spectrum(x) ** 2).sum())
    check_cut(gradient, IMAGE, in_slices=({0: (3, 4, 5)},), tolerance=1e-3)


@examples(4)
@given(st.data(), st.sampled_from([spectrum, sorted_twice, filtered]))
def test_any_change_of_cut(data, fun):
    shard_plan = plan(fun, IMAGE, in_slices=data.draw(cuts((IMAGE,))))
    assert_same(shard_plan.run(IMAGE), jax.jit(fun)(IMAGE), 1e-4)


def test_an_argument_is_not_read_in_another_cut_than_was_asked():
    shard_plan = plan(lambda x: jnp.fft.fft(x * 2, axis=0), IMAGE, in_slices=({0: 3},))
    assert shard_plan.num_shards == 1
    assert "works on the whole of this axis" in str(shard_plan.explain())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fun",
    [lambda x: jnp.linalg.eigvalsh(x @ x.T), lambda x: jnp.sort((x * x).sum(1))],
)
def test_what_is_small_is_made_in_pieces_for_what_needs_it_whole(fun):
    x = reals(12, 400)
    shard_plan = check_cut(fun, x, in_slices=({0: 4},), tolerance=1e-3)
    assert shard_plan.stages[0].num_shards >= 4
    assert shard_plan.stages[-1].num_shards == 1
    assert shard_plan.peak_bytes < x.nbytes


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fun",
    [
        lambda x, w: jnp.argsort(x @ w),
        lambda x, w: jax.grad(lambda y: jnp.sort(y)[:6].sum())(x @ w),
        lambda x, w: jax.lax.sort((x @ w, x[:, 0]), num_keys=1),
    ],
)
def test_a_sort_of_several_operands(fun):
    x, w = reals(12, 40), reals(40)
    shard_plan = check_cut(fun, x, w, in_slices=({0: 4}, None), tolerance=1e-4)
    assert shard_plan.stages[0].num_shards >= 4
    assert shard_plan.peak_bytes < x.nbytes


def test_a_solve_is_cut_along_its_right_hand_sides():
    lower, x, w = jnp.tril(jnp.abs(reals(12, 12)) + 1), reals(12, 9), reals(9, 6)

    def fun(lower, x):
        return jax.scipy.linalg.solve_triangular(lower, x @ w, lower=True)

    shard_plan = check_cut(fun, lower, x, in_slices=(None, {0: 3}), tolerance=1e-3)
    assert all(stage.num_shards >= 3 for stage in shard_plan.stages)


def test_what_a_callback_makes_is_part_of_a_matrix():
    """A callback without arguments is an operation without operands."""

    def fun(x):
        drift = jax.ShapeDtypeStruct((12, 12), np.float32)
        return jnp.linalg.eigvalsh(x @ x.T + jax.pure_callback(fixed, drift))

    def fixed():
        return np.eye(12, dtype=np.float32)

    check_cut(fun, reals(12, 400), in_slices=({0: 4},), tolerance=1e-3)


def test_random_numbers_are_drawn_in_pieces_for_what_needs_them_whole():
    def fun(x):
        return jnp.sort(x + jax.random.normal(jax.random.key(0), x.shape))

    x = reals(4000)
    shard_plan = check_cut(fun, x, in_slices=({0: 8},))
    assert shard_plan.stages[0].num_shards == 8
    assert shard_plan.peak_bytes < plan(fun, x, in_slices={}).peak_bytes / 2
