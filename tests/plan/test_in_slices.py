"""Cuts as users write them."""

import copy
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmap.planning.engine.slices import pieces
from shardmap.planning.in_slices import AS_CHUNKED, EACH, Pieces, cut_points
from shardmap.planning.plan import plan
from shardmap.units import AUTO
from tests.plan.plan_programs import X, Y


@pytest.mark.parametrize(
    ("in_slices", "kind", "message"),
    [
        (
            ({5: 2}, None),
            ValueError,
            r"args\[0\] of shape \(8, 6\), axis 5: it has 2 axes",
        ),
        (({0: 2.5}, None), TypeError, "must be an integer, got 2.5"),
        (({0: 2, -2: 3}, None), ValueError, "axis -2: it has two cuts"),
        (({0: (3, 3)}, {0: 0}), ValueError, r"lengths \(3, 3\) sum to 6"),
        (({"a": 2}, None), TypeError, "an axis must be an int"),
        ((4, None), TypeError, r"in_slices\[0\] is 4"),
        (
            ({0: 2},),
            ValueError,
            "plan in_slices must be a pytree prefix of the args, with None for what "
            "stays whole: in_slices is a tuple of 1, but stands for a tuple of 2",
        ),
    ],
)
def test_bad_cuts_are_named(in_slices, kind, message):
    with pytest.raises(kind, match=message):
        plan(jnp.add, X, Y, in_slices=in_slices)


@pytest.mark.parametrize(
    ("cut", "size", "points"),
    [
        (None, 5, ()),
        (1, 5, ()),
        (2, 5, (3,)),
        (4, 10, (3, 6, 8)),
        (9, 3, (1, 2)),
        (3, 0, ()),
        (np.int64(2), 4, (2,)),
        ((4, 4, 2), 10, (4, 8)),
        ((0, 4, 0), 4, ()),
        ([(0, 1), (1, 4)], 4, (1,)),
        ([(1, 4), (0, 1)], 4, (1,)),
        ([slice(0, 1), slice(1, 4)], 4, (1,)),
        ([slice(None, 1), (1, 2), slice(2, None, 1)], 4, (1, 2)),
        (EACH, 4, (1, 2, 3)),
        (EACH, 1, ()),
        (Pieces(4), 10, (4, 8)),
        (Pieces(length=10), 10, ()),
    ],
)
def test_cuts(cut, size, points):
    assert cut_points(cut, size) == points


@pytest.mark.parametrize(
    ("cut", "kind", "message"),
    [
        (0, ValueError, "at least 1, got 0"),
        (True, TypeError, "must be an integer, got True"),
        (2.5, TypeError, "must be an integer, got 2.5"),
        ("rows", TypeError, "got 'rows'"),
        ((3, 3), ValueError, r"\(3, 3\) sum to 6, but the axis has size 5"),
        ((6, -1), ValueError, "negative"),
        ([(0, 2), (3, 5)], ValueError, "gap, overlap or run backwards at 2"),
        ([(0, 3), (2, 5)], ValueError, "gap, overlap"),
        ([(0, 3)], ValueError, "gap, overlap or run backwards at 3, on an axis of siz"),
        ([slice(0, 2), slice(3, 5)], ValueError, "gap, overlap or run backwards at 2"),
        ([slice(0, 5, 2)], TypeError, r"pairs, got slice\(0, 5, 2\)"),
        ([3], TypeError, r"\(start, stop\) pairs, got 3"),
    ],
)
def test_bad_cuts(cut, kind, message):
    with pytest.raises(kind, match=message):
        cut_points(cut, 5)


def test_slices_of_shards_are_cuts():
    shard_plan = plan(jnp.cos, jnp.ones((5, 2)), in_slices={0: (1, 3, 1)})
    rows = [shard.in_slices[0][0] for shard in shard_plan.shards]
    assert rows == [slice(0, 1), slice(1, 4), slice(4, 5)]
    again = plan(jnp.cos, jnp.ones((5, 2)), in_slices={0: rows})
    assert again.out_slices == shard_plan.out_slices


def test_each_prints_and_is_one_object():

    assert repr(EACH) == "EACH"
    assert pickle.loads(pickle.dumps(EACH)) is EACH
    assert copy.deepcopy(EACH) is EACH


@given(st.integers(1, 20), st.integers(1, 25))
def test_near_equal_pieces(size, count):
    lengths = [b - a for a, b in pieces(cut_points(count, size), size)]
    assert sum(lengths) == size
    assert max(lengths) - min(lengths) <= 1
    assert len(lengths) == min(count, size)


def test_cuts_of_one_argument_that_is_a_dict():
    args = {"w": np.ones((3, 2), np.float32), "x": np.ones((6, 3), np.float32)}
    shard_plan = plan(
        lambda d: d["x"] @ d["w"], args, in_slices={"w": None, "x": {0: 3}}
    )
    assert shard_plan.num_shards == 3
    with pytest.raises(
        ValueError, match=r"with the keys \[.v.\], but stands for a dict .*\[.w"
    ):
        plan(lambda d: d["x"], args, in_slices={"v": None})


class InChunks:
    """An array of a store, of which it is noted what is read."""

    def __init__(self, array, chunks):
        self.array, self.chunks, self.reads = array, chunks, []
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, index):
        self.reads.append(index)
        return self.array[index]


def test_an_array_is_cut_as_it_lies_in_chunks():
    x = InChunks(X, (3, 4))
    shard_plan = plan(jnp.cos, x, in_slices={0: AS_CHUNKED})
    assert shard_plan.out_slices == {0: [(0, 3), (3, 6), (6, 8)]}
    np.testing.assert_allclose(shard_plan.run(x), np.cos(X), rtol=1e-6)
    assert sorted(index[0].start for index in x.reads) == [0, 3, 6]
    of_dask = InChunks(X, ((1, 5, 2), (6,)))
    shard_plan = plan(jnp.cos, of_dask, in_slices={0: AS_CHUNKED, 1: AS_CHUNKED})
    assert shard_plan.out_slices == {0: [(0, 1), (1, 6), (6, 8)]}
    with pytest.raises(ValueError, match=r"args\[0\](.|\n)*which this is not"):
        plan(jnp.cos, X, in_slices={0: AS_CHUNKED})


def test_pieces_that_memory_asks_for_are_whole_chunks():
    x = InChunks(np.ones((64, 4), np.float32), (6, 4))
    shard_plan = plan(jnp.cos, x, in_slices={0: AUTO}, memory="1 kB")
    assert shard_plan.out_slices == {0: [(0, 24), (24, 42), (42, 64)]}
    assert shard_plan.peak_bytes == 2 * 24 * 4 * 4


@pytest.mark.parametrize(
    ("count", "points"),
    [(2, (50,)), (4, (20, 50, 70)), (10, tuple(range(10, 95, 10))), (20, None)],
)
def test_pieces_go_to_the_borders_of_chunks(count, points):
    borders = tuple(range(10, 95, 10))
    found = cut_points(count, 95, borders)
    assert found == (points or cut_points(count, 95))


@given(st.integers(1, 60), st.integers(1, 30), st.integers(1, 60))
def test_as_many_pieces_at_borders(size, length, count):
    borders = tuple(range(length, size, length))
    found = cut_points(count, size, borders)
    plain = cut_points(count, size)
    assert len(found) == len(plain)
    assert list(found) == sorted(set(found))
    assert found == plain if len(plain) > len(borders) else set(found) <= set(borders)


def test_lengths_of_pieces_that_cannot_be():
    with pytest.raises(ValueError, match="length of pieces must be at least 1, got 0"):
        Pieces(0)
    with pytest.raises(TypeError, match=r"must be an integer, got 2\.5"):
        Pieces(2.5)
    assert pickle.loads(pickle.dumps(AS_CHUNKED)) is AS_CHUNKED


def test_a_dict_with_numbers_as_keys_is_cut_by_leaf():
    tables = {0: X, 1: X}
    for cuts in {0: {0: 4}, 1: {0: 4}}, {0: 4}:
        shard_plan = plan(lambda x: x[0] + x[1], tables, in_slices=(cuts,))
        assert shard_plan.num_shards == 4
    # Numbers are axes where they have cuts; None cuts nothing either way.
    whole = {0: None, 1: None}
    lines = {0: X[0], 1: X[1]}
    for args in (tables, lines):
        uncut = plan(lambda x: x[0] + x[1], args, in_slices=(whole,))
        assert uncut.num_shards == 1
    by_axis = plan(lambda x: x[0] + x[1], tables, in_slices=({0: None, 1: EACH},))
    assert by_axis.num_shards == X.shape[1]
