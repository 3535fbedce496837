"""Sorting along an axis that is cut."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from shardmap.plan.lax.staged.sort import coalesced, layers, network
from shardmap.plan.plan import plan
from tests.plan.checks import assert_same, cuts
from tests.plan.plan_programs import reals
from tests.strategies import examples

TALL = reals(23, 3)
EQUAL = np.round(TALL)
SPECIAL = np.where(EQUAL == 0, -0.0, np.where(EQUAL > 1, np.nan, EQUAL) + 0.0)
SPECIAL = SPECIAL.astype(np.float32)
SPECIAL[::4] = 0.0


def check_equal(fun, *args, in_slices):
    made = plan(fun, *args, in_slices=in_slices)
    got, want = made.run(*args), jax.jit(fun)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
        if a.dtype.kind == "f":
            np.testing.assert_array_equal(np.signbit(a), np.signbit(b))
    assert all(stage.num_shards > 1 for stage in made.stages)
    return made


@pytest.mark.few(1)
@pytest.mark.parametrize("x", [TALL, SPECIAL, EQUAL.astype(np.int32), TALL > 0])
def test_pieces_are_merged(x):
    made = check_equal(lambda x: jnp.sort(x, 0), x, in_slices=({0: (4, 2, 9, 8)},))
    assert [stage.num_shards for stage in made.stages] == [3, 2, 2, 2, 4]
    assert made.out_slices == {0: [(0, 4), (4, 6), (6, 15), (15, 23)]}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.argsort(x, axis=0),
        lambda x: jnp.argsort(x, axis=0, descending=True),
        lambda x: lax.sort((x, x + 1, x * x), dimension=0, num_keys=1),
        lambda x: lax.sort((x, jnp.cos(x)), dimension=0, num_keys=2),
        lambda x: jnp.diff(jnp.sort(x, 0), axis=0),
    ],
)
def test_keys_and_values(fun):
    check_equal(fun, SPECIAL, in_slices=({0: 5},))


def test_a_shard_holds_two_pieces():
    x = reals(1 << 14)
    made = plan(jnp.sort, x, in_slices=({0: 16},))
    for stage in made.stages:
        reads = stage.recipe(0)[1].reads
        held = sum(b - a for _, box in reads for a, b in box)
        assert held <= 4 * len(x) // 16, "keys and places of two pieces"


def test_the_network_sorts():
    for count in range(2, 12):
        numbers = np.random.default_rng(count).permutation(count)
        for pairs in network(count):
            for a, b in pairs:
                numbers[[a, b]] = sorted(numbers[[a, b]])
        np.testing.assert_array_equal(numbers, np.arange(count))


@examples(5)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=9), st.integers(0, 99))
def test_pieces_of_any_lengths_are_sorted(lengths, seed):
    edges = coalesced((0, *np.cumsum(lengths).tolist()))
    numbers = np.random.default_rng(seed).permutation(edges[-1])
    for a, b in itertools.pairwise(edges):
        numbers[a:b] = np.sort(numbers[a:b])
    for pairs in layers(edges):
        numbers = np.concatenate(
            [np.sort(numbers[np.r_[a:b, c:d]]) for (a, b), (c, d) in pairs]
        )
    np.testing.assert_array_equal(numbers, np.arange(edges[-1]))


@examples(2)
@given(st.data(), st.booleans())
def test_a_sort_in_any_pieces(data, gradient):
    def fun(x):
        found = jnp.sort(jnp.sin(x), 0)
        return found[2:-1] * jnp.arange(20.0)[:, None]

    made = jax.grad(lambda x: (fun(x) ** 2).sum()) if gradient else fun
    in_slices = data.draw(cuts((TALL,)))
    assert_same(plan(made, TALL, in_slices=in_slices).run(TALL), jax.jit(made)(TALL))
