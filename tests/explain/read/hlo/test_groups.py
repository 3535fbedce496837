"""Groups and pairs of devices, and the axes of a mesh that they lie along."""

import pytest

from shardmap.explain.read.hlo import groups

MESH = [("data", 4), ("model", 2)]
PAIRS = "source_target_pairs={{0,1},{1,0},{2,2}}, channel_id=1"


def test_pairs_are_of_different_devices():
    assert groups.pairs_of(PAIRS) == [(0, 1), (1, 0)]
    assert groups.pairs_of(PAIRS, with_themselves=True) == [(0, 1), (1, 0), (2, 2)]
    assert groups.pairs_of("no pairs") == []


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ([(0, 1), (3, 2)], ("model",)),
        ([(0, 2), (6, 0)], ("data",)),
        ([(0, 3)], ("data", "model")),
        ([(0, 0)], ()),
        ([], ()),
        # No device of the mesh.
        ([(0, 8)], ()),
    ],
)
def test_pairs_lie_along_axes(pairs, axes):
    assert groups.axes_of_pairs(pairs, MESH) == axes


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("replica_groups=[2,2]<=[4], to_apply=%add", [(0, 1), (2, 3)]),
        ("replica_groups=mesh['i'=2,'j'=2] {'j'}", [(0, 1), (2, 3)]),
        ("replica_groups=mesh['i'=4] {'i':(1)2}", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['i'=4] {'i':(2)2}", [(0, 1), (2, 3)]),
        (
            "replica_groups=mesh['i'=2,'j'=2], device_ids=([2,2]T(1,0)) {'j'}",
            [(0, 2), (1, 3)],
        ),
        ("no groups", [(0, 1, 2, 3)]),
    ],
)
def test_groups_in_every_notation(line, expected):
    assert groups.groups_of(line, 4) == expected
