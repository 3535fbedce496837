"""What is taken of pieces, put together, is what all elements give."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.engine.nodes import flatten
from shardmap.plan.lax.staged.one_pass.statistics import (
    EXPONENTIALS,
    SQUARES,
    PieceNumbers,
    all_exponentials,
    all_places,
    all_squares,
    constant_along,
    counts_of,
    place_of,
    unmoved,
)
from shardmap.plan.lax.table import CALLS
from tests.plan.plan_programs import reals

EDGES = (0, 5, 6, 11)
X = reals(11, 3)
PIECES = [X[a:b] for a, b in itertools.pairwise(EDGES)]


def of_pieces(kind, pieces, axes=(0,)):
    """The numbers of all pieces, by which of them they are."""
    starts = EDGES[:-1]
    found = [kind.of_piece(x, axes, s) for x, s in zip(pieces, starts, strict=True)]
    assert {len(each) for each in found} == {kind.numbers}
    return [jnp.concatenate(each, 0) for each in zip(*found, strict=True)]


def test_squares_around_any_centre():
    total, *rest = of_pieces(SQUARES, PIECES)
    np.testing.assert_allclose(total.sum(0), X.sum(0), rtol=1e-5)
    counts = counts_of((EDGES, ()), (0,))
    assert counts.tolist() == [[5], [1], [5]]
    for centre in (X.mean(0, keepdims=True), np.ones((1, 3), np.float32)):
        got = all_squares(jnp.asarray(centre), counts, (0,), *rest)
        np.testing.assert_allclose(got, ((X - centre) ** 2).sum(0), rtol=1e-5)


def test_squares_far_from_zero_lose_nothing():
    far = (X + 1e4).astype(np.float32)
    pieces = [far[a:b] for a, b in itertools.pairwise(EDGES)]
    _, *rest = of_pieces(SQUARES, pieces)
    centre = far.mean(0, keepdims=True)
    got = all_squares(jnp.asarray(centre), counts_of((EDGES, ()), (0,)), (0,), *rest)
    want = ((far.astype(np.float64) - centre) ** 2).sum(0)
    np.testing.assert_allclose(got, want, rtol=1e-3)


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_exponentials_around_the_largest(scale):
    pieces = [scale * piece for piece in PIECES]
    largest, sums, own = of_pieces(EXPONENTIALS, pieces)
    centre = jnp.asarray(scale * X.max(0, keepdims=True))
    np.testing.assert_allclose(largest.max(0, keepdims=True), centre)
    got = all_exponentials(centre, (0,), sums, own)
    want = np.exp((scale * X).astype(np.float64) - np.asarray(centre)).sum(0)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_piece_of_nothing_but_minus_infinity_adds_nothing():
    pieces = [PIECES[0], jnp.full((1, 3), -jnp.inf), PIECES[2]]
    _, sums, own = of_pieces(EXPONENTIALS, pieces)
    both = np.concatenate([PIECES[0], PIECES[2]])
    centre = jnp.asarray(both.max(0, keepdims=True))
    got = all_exponentials(centre, (0,), sums, own)
    np.testing.assert_allclose(got, np.exp(both - np.asarray(centre)).sum(0), rtol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("largest", [True, False])
def test_of_equal_extrema_in_several_pieces_the_first_is_found(largest):
    x = np.array([1, 0, 2, 2, 0, 0, 2, 1, 0, 1, 2], np.float32)[:, None]
    pieces = [x[a:b] for a, b in itertools.pairwise(EDGES)]
    best, places = of_pieces(place_of(largest, np.dtype(np.int32)), pieces)
    want = (np.argmax if largest else np.argmin)(x, 0)
    np.testing.assert_array_equal(all_places(largest, 0, best, places), want)


def test_what_is_the_same_along_an_axis_is_known():
    def constant(fun, axes, *shapes):
        avals = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
        graph = flatten(jax.make_jaxpr(fun)(*avals), CALLS)
        return constant_along(graph.outputs[0], axes) is not None

    assert constant(lambda c: jnp.broadcast_to(c[None], (11, 3)), (0,), (3,))
    assert constant(lambda c: jnp.broadcast_to(c, (11, 3)), (0,), (1, 3))
    assert constant(lambda c: c * 2, (0,), (1, 3))
    assert not constant(lambda c: jnp.broadcast_to(c[None], (11, 3)), (1,), (3,))
    assert not constant(lambda x: x * 2, (0,), (11, 3))


def test_transposes_are_looked_through():
    fun = jax.make_jaxpr(lambda x: x.transpose(1, 2, 0).transpose(0, 2, 1))
    graph = flatten(fun(jax.ShapeDtypeStruct((2, 3, 4), np.float32)), CALLS)
    value, perm = unmoved(graph.outputs[0])
    assert value is graph.inputs[0]
    assert [value.shape[k] for k in perm] == list(graph.outputs[0].shape) == [3, 2, 4]


def test_no_piece_looks_into_another_one():
    window = PieceNumbers.of(EDGES)
    assert (window.size, window.extent, window.stride) == (11, 4, 4)
