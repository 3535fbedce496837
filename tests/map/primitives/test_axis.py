"""What an axis is called, and how its elements run."""

import pytest

from shardmap.map.primitives.axis import UNNAMED, Spread, axis_text, map_text


@pytest.mark.parametrize(
    ("size", "devices", "batch_size", "expected"),
    [
        (8, 8, None, (1, 1, 1)),
        (20, 8, None, (3, 3, 1)),
        (20, 8, 2, (3, 2, 2)),
        (20, 8, 100, (3, 3, 1)),
        (0, 8, None, (0, 0, 0)),
    ],
)
def test_how_elements_run(size, devices, batch_size, expected):
    spread = Spread.of(size, devices, batch_size)
    assert (spread.block, spread.vectorised, spread.steps) == expected
    assert spread.places == devices * expected[0]


def test_what_it_is_called():
    assert axis_text("i") == "axis 'i'"
    assert "axis" in axis_text(UNNAMED)
    assert map_text({"name": "f"}) == "spmap of f"
    assert str(Spread.of(2000, 1, 1)) == "1 device x 1 vectorised x 2,000 steps"
