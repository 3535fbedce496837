"""Products of pieces, put together around the centres of all."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.lax.staged.one_pass.products import (
    ProductParams,
    all_centred,
    all_weighted,
    dot,
    free_axes,
    of_piece,
)
from shardmap.plan.lax.staged.one_pass.statistics import EXPONENTIALS, SQUARES
from tests.plan.plan_programs import reals

EDGES = (0, 4, 5, 9)
PLAIN = ((0, 1), (0, 1))
ROWS = (((0,), (0,)), ((), ()))


def params(kinds, perms=PLAIN, dims=ROWS, place=0):
    return ProductParams(dims, perms, kinds, place, EDGES, None)


def pieces(x):
    return [x[a:b] for a, b in itertools.pairwise(EDGES)]


def products(own, x, y):
    both = zip(pieces(x), pieces(y), strict=True)
    return jnp.concatenate([of_piece(a, b, own) for a, b in both])


def together(kind, x):
    """Those numbers of pieces that the products are put together with."""
    made = [kind.of_piece(jnp.asarray(piece), (0,)) for piece in pieces(x)]
    return [jnp.concatenate(each) for each in zip(*made, strict=True)]


def test_covariances_around_any_centres():
    x, y = reals(9, 3), reals(9, 2, seed=1)
    own = params((SQUARES, SQUARES))
    found = products(own, jnp.asarray(x), jnp.asarray(y))
    _, _, x_rest, x_mean = together(SQUARES, x)
    _, _, y_rest, y_mean = together(SQUARES, y)
    for c, d in ((x.mean(0), y.mean(0)), (np.ones(3), np.zeros(2))):
        centres = [jnp.asarray(each[None], jnp.float32) for each in (c, d)]
        rests, means = (x_rest, y_rest), (x_mean, y_mean)
        got = all_centred(own, np.diff(EDGES), found, centres, rests, means)
        np.testing.assert_allclose(got, (x - c).T @ (y - d), rtol=1e-4, atol=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("is_divided", [True, False])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_weights_of_a_softmax(is_divided, scale):
    x, y = scale * reals(9, 3), reals(9, 2, seed=1)
    own = params((EXPONENTIALS, None))
    found = products(own, jnp.asarray(x), jnp.asarray(y))
    _, sums, centres = together(EXPONENTIALS, x)
    centre = x.max(0, keepdims=True)
    weights = np.exp(x.astype(np.float64) - centre)
    divisor = weights.sum(0, keepdims=True) if is_divided else np.ones((1, 3))
    below = jnp.asarray(divisor, jnp.float32) if is_divided else None
    got = all_weighted(own, found, jnp.asarray(centre), below, sums, centres)
    np.testing.assert_allclose(got, (weights / divisor).T @ y, rtol=1e-4, atol=1e-6)


def test_axes_that_are_neither_summed_over_nor_batches():
    dims = (((1,), (0,)), ((0,), (2,)))
    assert free_axes(dims, 0, 4) == [2, 3]
    assert free_axes(dims, 1, 3) == [1]


@pytest.mark.few(1)
@pytest.mark.parametrize("batch", [((), ()), ((1,), (0,)), ((0, 2), (2, 0))])
def test_without_free_axes_it_is_a_sum(batch):
    shape = (4, 3, 2)
    contracted = tuple(k for k in range(3) if k not in batch[0])
    right = tuple(k for k in range(3) if k not in batch[1])
    x = jnp.asarray(reals(*shape))
    sizes = dict(zip((*contracted, *batch[0]), (*right, *batch[1]), strict=True))
    y = jnp.asarray(reals(*shape, seed=1)).transpose(
        [{v: k for k, v in sizes.items()}[axis] for axis in range(3)]
    )
    dims = ((contracted, right), batch)
    got = dot(x, y, dims, None)
    want = jax.lax.dot_general(x, y, dims)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
