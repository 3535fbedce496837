"""A map in a plan: elements alone, or together where they talk."""

import jax
import jax.numpy as jnp
import pytest

from shardmap.api.spmap import spmap
from tests.plan.checks import check_cut
from tests.plan.plan_programs import X, Y, reals


@pytest.mark.few(2)
@pytest.mark.parametrize("axes", [(0, 0), (1, 1), (-1, 0), (0, 1)])
def test_elements_and_the_axes_of_one_are_cut(axes):
    into, out = axes
    fun = spmap(lambda x, w: jnp.sin(x) * 2 + w, in_axes=(into, None), out_axes=out)
    w = reals(X.shape[1] if into == 0 else X.shape[0])
    shard_plan = check_cut(fun, X, w, in_slices=({0: 2, 1: 3}, None))
    assert shard_plan.num_shards == 6


def test_elements_that_talk_are_all_there():
    def body(x):
        return x - jax.lax.pmean(x, "i"), jax.lax.axis_index("i")

    shard_plan = check_cut(spmap(body, axis_name="i"), X, in_slices=({1: 3},))
    assert shard_plan.num_shards == 3
    assert all(shard.in_slices[0][0] == slice(0, 8) for shard in shard_plan.shards)


RING = [(k, (3 * k + 1) % 8) for k in range(8)]
GROUPS = [[0, 3, 4, 7], [1, 2, 5, 6]]
TALKS = {
    "ppermute": lambda x: jax.lax.ppermute(x, "i", RING),
    "pbroadcast": lambda x: jax.lax.pbroadcast(x, "i", 3),
    "groups": lambda x: jax.lax.psum(x, "i", axis_index_groups=GROUPS),
    "groups in a loop": lambda x: jax.lax.fori_loop(
        0, 2, lambda _, x: jnp.sin(jax.lax.pmax(x, "i", axis_index_groups=GROUPS)), x
    ),
    "gather in groups": lambda x: jax.lax.all_gather(
        x, "i", axis_index_groups=GROUPS
    ).sum(0),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", TALKS)
def test_every_collective_finds_all_elements(name):
    fun = spmap(TALKS[name], axis_name="i")
    check_cut(fun, X, in_slices=({0: 2, 1: 3},))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "talk",
    [
        lambda x: jnp.sin(jax.lax.ppermute(x, ("j", "i"), RING)),
        lambda x: jax.lax.psum(x, ("j", "i"), axis_index_groups=GROUPS) * x,
    ],
)
def test_collectives_over_the_axes_of_two_maps(talk):
    fun = spmap(spmap(talk, axis_name="j"), axis_name="i")
    check_cut(fun, reals(4, 2, 3), in_slices=({0: 2, 2: 3},))


def test_a_result_that_is_not_mapped():
    def body(x, y):
        return x * 2, y.sum()

    fun = spmap(body, in_axes=(0, None), out_axes=(0, None))
    check_cut(fun, X, Y, in_slices=({0: 2}, None))


def test_a_map_in_a_map():
    fun = spmap(spmap(lambda x: x * 2 + 1))
    shard_plan = check_cut(fun, X, in_slices=({0: 4, 1: 3},))
    assert shard_plan.num_shards == 12
