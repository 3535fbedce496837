"""Cuts as users write them, and the algebra of boxes."""

from hypothesis import given
from hypothesis import strategies as st

from shardmap.plan.engine.slices import (
    Window,
    contains,
    hull,
    merge,
    refine,
    volume,
)


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
    interval, (before, after) = window.reads((start, stop))
    if not elements:
        assert interval == (0, 0)
        assert before + after == len(held)
        return
    assert interval == (min(elements), max(elements) + 1)
    assert held[before] == min(elements) * window.dilation
    assert held[len(held) - 1 - after] == max(elements) * window.dilation


def test_a_reversed_window():
    window = Window(10, reverse=True)
    assert window.reads((0, 3)) == ((7, 10), (0, 0))
    assert window.moves((3, 4), 10) == (6, 7)


def test_volume_of_nothing():
    assert volume(()) == 1
    assert volume(((3, 3), (0, 2))) == 0
