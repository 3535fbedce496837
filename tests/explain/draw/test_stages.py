"""The stages of a plan, drawn: boxes to scale, and the words beside them."""

import re
from typing import NamedTuple

import pytest

from shardmap.explain.draw.stages import drawn


class Stage(NamedTuple):
    """As much of a plan's stage as a picture takes."""

    number: int = 1
    shards: int = 2
    shard_bytes: int = 1024
    kept_bytes: int = 512
    reads: str = "x"
    makes: tuple = ("a sum", "a product")
    moved: tuple = (10, 5)


def widths(text, kind='y="1" '):
    boxes = re.findall(r"<rect [^>]*>", text)
    return [
        float(re.search(r'width="([\d.]+)"', box)[1]) for box in boxes if kind in box
    ]


def test_the_words():
    text = drawn([Stage(reads="<x>")])
    assert '<h3>Stage 1 <span class="quiet">2 shards</span>' in text
    assert "<p>Reads &lt;x&gt;.</p>" in text
    assert "<p>Makes a sum; a product.</p>" in text
    assert "2 shards, 1.0 KiB in a shard, 512 B kept" in text
    assert "Reads" not in drawn([Stage(reads="")])


@pytest.mark.parametrize(("moved", "ratio"), [((10, 5), 0.5), ((5, 5), 1), ((0, 0), 1)])
def test_boxes_are_to_scale(moved, ratio):
    first, second = widths(drawn([Stage(moved=moved)]))
    assert second == pytest.approx(first * ratio)


def test_bars_are_to_one_scale_for_all_stages():
    text = drawn([Stage(), Stage(2, shard_bytes=2048)])
    bars = widths(text, 'height="18"')
    assert bars == [130, 65, 260, 65]


def test_many_shards_are_some_boxes_and_a_count():
    text = drawn([Stage(shards=1000, moved=(1,) * 8)])
    assert len(widths(text)) == 8
    assert "... 992 more" in text


def test_nothing():
    assert drawn([]) == ""
