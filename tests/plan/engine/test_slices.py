"""Merging the boxes in which one value is wanted."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from shardmap.planning.engine.slices import contains, merge, volume
from tests.strategies import examples


@st.composite
def boxes(draw):
    rank = draw(st.integers(1, 2))
    starts = st.tuples(*[st.integers(0, 40)] * rank)
    lengths = st.tuples(*[st.integers(1, 12)] * rank)
    pairs = draw(st.lists(st.tuples(starts, lengths), min_size=1, max_size=8))
    return [
        tuple((start, start + n) for start, n in zip(*pair, strict=True))
        for pair in pairs
    ]


@examples(10)
@given(boxes(), st.integers(1, 4))
def test_merged_boxes_hold_all_at_no_cost(boxes, limit):
    merged = merge(boxes, limit)
    assert len(merged) <= limit
    assert all(any(contains(box, each) for box in merged) for each in boxes)
    apart = merge(boxes, len(boxes))
    assert sum(map(volume, apart)) <= sum(map(volume, dict.fromkeys(boxes)))
    assert merged == apart or len(merged) == 1


@pytest.mark.parametrize("step", [3, 40])
def test_thousands_of_boxes_merge_where_they_touch(step):
    """Those that do not touch become one: each would be compared with all others."""
    many = [((k * step, k * step + 3),) for k in range(5000)]
    far = [((10**6, 10**6 + 1),)]
    found = merge(many + far, 4)
    assert len(found) == (2 if step == 3 else 1)
    assert found[-1][0][1] == 10**6 + 1
