"""Pictures of layouts: to scale, and of different layouts different."""

import re

import hypothesis
import hypothesis.strategies as st
import pytest

from shardmap.explain.draw import svg
from shardmap.sharding.spec import Chunked, Replicated, ShardedAxis, ShardingSpec
from tests.explain.layouts import layouts, places_of

ROWS = ShardingSpec((Chunked(4), None), (ShardedAxis(0),))
COLUMNS = ShardingSpec((None, Chunked(2)), (ShardedAxis(0),))
COPIES = ShardingSpec((None, None), (Replicated(8),))


def boxes(picture):
    """Left, top, width and height of each shard."""
    shards = re.findall(r'<g class="shard"><rect[^>]*>', picture)
    found = [re.findall(r'(?:x|y|width|height)="([\d.]+)"', each) for each in shards]
    return [[float(number) for number in each[:4]] for each in found]


def size_of(picture):
    """How wide and how high all shards are together."""
    found = boxes(picture)
    left, top = (min(each[k] for each in found) for k in (0, 1))
    return (
        max(x + width for x, _, width, _ in found) - left,
        max(y + height for _, y, _, height in found) - top,
    )


@pytest.mark.parametrize("spec", [ROWS, COLUMNS, COPIES])
@pytest.mark.parametrize("shape", [(64, 64), (128, 64), (64, 128)])
def test_an_array_is_drawn_to_scale(spec, shape):
    width, height = size_of(svg.array("x", spec, shape).picture)
    # There is room between the shards, and for numbers in them.
    assert height / width == pytest.approx(shape[0] / shape[1], rel=0.3)


def test_a_narrow_array_is_no_square():
    width, height = size_of(svg.array("x", ROWS, (1000, 4)).picture)
    assert height > 4 * width
    width, height = size_of(svg.array("x", COLUMNS, (4, 1000)).picture)
    assert width > 4 * height


@pytest.mark.parametrize("shape", [(1000, 4), (8, 8), (8, 10**6), (10**9, 2), (0, 2)])
def test_a_picture_is_as_wide_as_a_phone_at_most(shape):
    for spec in (ROWS, COLUMNS, COPIES):
        picture = svg.array("x", spec, shape).picture
        width, height = map(int, re.findall(r' (?:width|height)="(\d+)"', picture)[:2])
        assert width <= svg.WIDTH + 2
        assert height < 2 * svg.HEIGHT
        assert min(each[3] for each in boxes(picture)) >= svg.LEAST_HEIGHT - 0.1


@hypothesis.given(layouts(), st.data())
def test_different_layouts_of_a_shape_have_different_pictures(one, data):
    """The picture with the words below it; what is read out loud says the shape."""
    spec, shape = one
    fits = [
        other
        for other, other_shape in data.draw(st.lists(layouts(), max_size=8))
        if other_shape == shape
    ]
    for other in (*fits, *turned(spec)):
        drawn = [seen(svg.array("x", each, shape)) for each in (spec, other)]
        places = [places_of(each, shape) for each in (spec, other)]
        assert (drawn[0] == drawn[1]) == (places[0] == places[1]), (spec, other, shape)


def turned(spec):
    """The same shards, on other devices."""
    mapping = spec.mesh_mapping
    for k in range(1, len(mapping)):
        yield ShardingSpec(spec.sharding, mapping[k:] + mapping[:k])


def seen(drawing):
    picture = re.sub(r"<title>.*?</title>", "", drawing.picture)
    return re.sub(r'aria-label="[^"]*"', "", picture), drawing.caption


@hypothesis.given(layouts())
def test_a_device_has_its_colour_wherever_it_is(layout):
    spec, shape = layout
    picture = svg.array("x", spec, shape).picture
    for shard in re.findall(r'<g class="shard">.*?</g>', picture):
        (said,) = re.findall(r'<text class="holders"[^>]*>([^<]*)', shard)
        if "..." in said:
            continue
        devices = []
        for run in said.split(","):
            first, _, last = run.partition("-")
            devices += range(int(first), int(last or first) + 1)
        colours = [int(n) for n in re.findall(r"colour(\d)", shard)]
        assert colours == list(dict.fromkeys(k % svg.COLOURS for k in devices))
