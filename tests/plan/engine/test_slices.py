"""Cuts as users write them, and the algebra of boxes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmap.plan.engine.slices import (
    Window,
    contains,
    hull,
    merge,
    pieces,
    refine,
    volume,
)
from shardmap.plan.in_slices import EACH, cut_points


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
        (EACH, 4, (1, 2, 3)),
        (EACH, 1, ()),
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
        ([(0, 3)], ValueError, "end at 3, but the axis has size 5"),
        ([3], TypeError, r"\(start, stop\) pairs, got 3"),
    ],
)
def test_bad_cuts(cut, kind, message):
    with pytest.raises(kind, match=message):
        cut_points(cut, 5)


def test_each_prints_and_is_one_object():
    import copy
    import pickle

    assert repr(EACH) == "EACH"
    assert pickle.loads(pickle.dumps(EACH)) is EACH
    assert copy.deepcopy(EACH) is EACH


@given(st.integers(1, 20), st.integers(1, 25))
def test_near_equal_pieces(size, count):
    lengths = [b - a for a, b in pieces(cut_points(count, size), size)]
    assert sum(lengths) == size
    assert max(lengths) - min(lengths) <= 1
    assert len(lengths) == min(count, size)


def test_refinement():
    assert refine([(2, 4), (3,), ()]) == (2, 3, 4)


intervals = st.tuples(st.integers(0, 9), st.integers(1, 5)).map(
    lambda pair: (pair[0], pair[0] + pair[1])
)
boxes = st.tuples(intervals, intervals)


@given(st.lists(boxes, min_size=1, max_size=7), st.integers(1, 4))
def test_merged_boxes_hold_all_and_cost_no_more_than_their_hull(found, limit):
    merged = merge(found, limit)
    assert len(merged) <= max(limit, 1)
    for box in found:
        assert any(contains(outer, box) for outer in merged)
    whole = found[0]
    for box in found:
        whole = hull(whole, box)
    assert all(contains(whole, box) for box in merged)


def test_far_boxes_stay_apart():
    assert len(merge([((0, 2), (8, 9)), ((8, 9), (0, 2))], 4)) == 2


windows = st.builds(
    Window,
    size=st.integers(1, 9),
    stride=st.integers(1, 3),
    pad=st.integers(-2, 4),
    extent=st.integers(1, 4),
    dilation=st.integers(1, 3),
)


@given(windows, st.integers(0, 8), st.integers(1, 4))
def test_a_window_reads_exactly_what_it_covers(window, start, length):
    """Compared with a walk over every position of the dilated, padded input."""
    stop = start + length
    positions = range(start * window.stride, (stop - 1) * window.stride + window.extent)
    held = [p - window.pad for p in positions]
    elements = [
        p // window.dilation
        for p in held
        if p % window.dilation == 0 and 0 <= p // window.dilation < window.size
    ]
    interval, before, after = window.reads((start, stop))
    if not elements:
        assert interval == (0, 0)
        assert before + after == len(held)
        return
    assert interval == (min(elements), max(elements) + 1)
    assert held[before] == min(elements) * window.dilation
    assert held[len(held) - 1 - after] == max(elements) * window.dilation


def test_a_reversed_window():
    window = Window(10, reverse=True)
    assert window.reads((0, 3)) == ((7, 10), 0, 0)
    assert window.moves((3, 4), 10) == (6, 7)


def test_volume_of_nothing():
    assert volume(()) == 1
    assert volume(((3, 3), (0, 2))) == 0
