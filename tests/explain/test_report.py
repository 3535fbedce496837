"""What an explanation holds as data: numbers that follow from others, and JSON."""

import pytest

from shardmap.explain.report import Cost
from tests.explain import explanations


@pytest.mark.parametrize(
    ("size", "devices", "vectorised", "steps", "idle", "last", "layout"),
    [
        (256, 8, 32, 1, 0, None, "8 devices x 32 vectorised x 1 step"),
        (1, 1, 1, 1, 0, None, "1 device x 1 vectorised x 1 step"),
        (13, 8, 2, 1, 3, None, "8 devices x 2 vectorised x 1 step"),
        (40, 8, 2, 3, 0, 1, "8 devices x 2 vectorised x 3 steps, the last of 1"),
        (None, 1, 1, None, 0, None, "1 device x 1 vectorised x unknown steps"),
    ],
)
def test_an_axis_tells_its_layout(size, devices, vectorised, steps, idle, last, layout):
    axis = explanations.axis(
        size=size, devices=devices, vectorised=vectorised, steps=steps
    )
    assert (axis.idle_places, axis.last_step, axis.layout) == (idle, last, layout)
    said = "unknown size" if size is None else str(size)
    assert str(axis) == f"axis 'batch' of {said} = {layout}"


@pytest.mark.parametrize(
    ("flops", "moved", "intensity"),
    [(6.0, 2.0, 3.0), (None, 2.0, None), (6.0, 0.0, None), (6.0, None, None)],
)
def test_intensity(flops, moved, intensity):
    assert Cost(flops, moved, None, None, None, None).intensity == intensity
