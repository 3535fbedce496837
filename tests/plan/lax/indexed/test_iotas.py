"""Indices that count along an axis are one loop with the axis that they look at."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.engine.nodes import flatten
from shardmap.plan.lax.indexed.iotas import Iota, counted, iota_of
from shardmap.plan.lax.table import CALLS
from tests.plan.checks import check_cut
from tests.plan.plan_programs import reals

X = reals(6, 4)


def of(fun):
    graph = flatten(jax.make_jaxpr(fun)(), CALLS)
    return iota_of(graph.outputs[0])


@pytest.mark.parametrize(
    ("fun", "found"),
    [
        (lambda: jnp.arange(6), Iota(0, 0)),
        (lambda: jnp.arange(6) + 3, Iota(0, 3)),
        (lambda: 3 + (jnp.arange(6) + 1), Iota(0, 4)),
        (lambda: jnp.arange(6)[:, None], Iota(0, 0)),
        (lambda: jnp.arange(6)[None].astype(jnp.int8), Iota(1, 0)),
        (lambda: jnp.broadcast_to(jnp.arange(6)[None, :, None], (2, 6, 3)), Iota(1, 0)),
        (lambda: jnp.arange(6).reshape(1, 6, 1), Iota(1, 0)),
        (lambda: jnp.arange(6)[None][0], Iota(0, 0)),
        (lambda: jnp.arange(6) * 2, None),
        (lambda: jnp.arange(6).reshape(2, 3), None),
        (lambda: jnp.arange(6.0), None),
        (lambda: jnp.ones(6, int), None),
    ],
)
def test_what_an_array_counts_along(fun, found):
    assert of(fun) == found


@pytest.mark.parametrize("offset", [0, -6])
def test_where_negative_places_are_brought_back_it_is_known_which_are(offset):
    """As indexing does: ``where(i < 0, i + n, i)``."""

    def wrapped():
        i = jnp.arange(6) + offset
        return jax.lax.select(i < 0, i + 6, i)

    assert of(wrapped) == Iota(0, 0)
    assert (
        of(lambda: jax.lax.select(jnp.arange(6) < 3, jnp.arange(6), jnp.arange(6)))
        is None
    )


def test_the_axes_of_a_gather_that_are_one_loop_with_its_indices():
    def taken(x, i):
        return x[jnp.arange(6), i]

    i = np.array([3, 1, 0, 2, 2, 1], np.int32)
    graph = flatten(jax.make_jaxpr(taken)(X, i), CALLS)
    [gather] = [node for node in graph.nodes if node.name == "gather"]
    assert counted(gather, (0, 1)) == {0: 0}
    # Shifted ones look at other rows than their own.
    graph = flatten(
        jax.make_jaxpr(lambda x, i: x[jnp.arange(5) + 1, i])(X, i[:5]), CALLS
    )
    [gather] = [node for node in graph.nodes if node.name == "gather"]
    assert counted(gather, (0, 1)) == {}
    made = check_cut(taken, X, i, in_slices=({0: 3}, {0: 3}))
    assert [shard.in_slices[0][0] for shard in made.shards] == [
        slice(0, 2),
        slice(2, 4),
        slice(4, 6),
    ]
