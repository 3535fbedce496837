"""Pictures of layouts: fixed pictures, and what every picture must say."""

import inspect
import re

import hypothesis
import jax
import numpy as np
import pytest

from shardmap import (
    Chunked,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    Unstacked,
    make_mesh,
    picture,
    spec_of,
)
from tests.explain.layouts import layouts, places_of


def test_scalar_with_copies_is_one_box():
    spec = ShardingSpec((), (Replicated(8),))
    assert picture(spec, ()) == inspect.cleandoc("""
        () on 8 devices, all of it on each
             +----------------------+
             | whole on devices 0-7 |
             +----------------------+
    """)


def test_unstacked_dimension_is_labelled_by_index():
    spec = ShardingSpec((None, Unstacked(4)), (ShardedAxis(0),))
    assert picture(spec, (5, 4)) == inspect.cleandoc("""
        (5, 4) on 4 devices, (5,) on each: dimension 1 across
               0   1   2   3
             +---+---+---+---+
             | 0 | 1 | 2 | 3 |
             +---+---+---+---+
    """)


def test_two_cut_dimensions_make_rows_and_columns():
    spec = ShardingSpec((Chunked(2), Chunked(4)), (ShardedAxis(1), ShardedAxis(0)))
    assert picture(spec, (8, 8)) == inspect.cleandoc("""
        (8, 8) on 8 devices, (4, 2) on each: dimension 0 down, 1 across
                  0:2   2:4   4:6   6:8
                +-----+-----+-----+-----+
            0:4 |  0  |  2  |  4  |  6  |
                +-----+-----+-----+-----+
            4:8 |  1  |  3  |  5  |  7  |
                +-----+-----+-----+-----+
    """)


def test_three_cut_dimensions_make_one_grid_per_outer_shard():
    spec = ShardingSpec(
        (Chunked(2), None, Chunked(2), Unstacked(2)),
        (ShardedAxis(0), ShardedAxis(1), ShardedAxis(2)),
    )
    text = picture(spec, (4, 3, 6, 2))
    assert text.split("\n")[0].endswith("(2, 3, 3) on each: dimension 2 down, 3 across")
    assert "  [0:2, :, :, :]" in text.split("\n")
    assert "  [2:4, :, :, :]" in text.split("\n")
    assert numbers_in_boxes(text) == list(range(8))


def test_long_dimensions_and_many_grids_are_left_out():
    spec = ShardingSpec((Unstacked(100),), (ShardedAxis(0),))
    text = picture(spec, (100,))
    assert "|  4  |  5  | ... | 99  |" in text
    spec = ShardingSpec(
        (Unstacked(6), Unstacked(2), Unstacked(2)),
        (ShardedAxis(0), ShardedAxis(1), ShardedAxis(2)),
    )
    assert picture(spec, (6, 2, 2)).endswith("\n  ... and 2 more")


def test_a_shape_that_does_not_fit_is_refused():
    spec = ShardingSpec((Chunked(4),), (ShardedAxis(0),))
    with pytest.raises(ValueError, match="6"):
        picture(spec, (6,))


def numbers_in_boxes(text):
    """The device numbers of all boxes, in reading order, ranges written out."""
    numbers = []
    for box in re.findall(r"(?<=\|)(?: whole on devices)?([ \d,-]+)(?=\|)", text):
        for run in box.strip().split(","):
            first, _, last = run.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def test_rows_are_drawn_as_rows():
    spec = ShardingSpec((Chunked(2), None), (ShardedAxis(0), Replicated(2)))
    assert picture(spec, (4, 4)) == inspect.cleandoc("""
        (4, 4) on 4 devices, (2, 4) on each: dimension 0 down
                +-----+
            0:2 | 0-1 |
            2:4 | 2-3 |
                +-----+
    """)


@hypothesis.given(layouts(), layouts())
def test_different_layouts_have_different_pictures(one, other):
    places = [places_of(*each) for each in (one, other)]
    drawn = [picture(*each) for each in (one, other)]
    assert (drawn[0] == drawn[1]) == (places[0] == places[1])


@hypothesis.given(layouts())
def test_every_device_is_drawn_once(layout):
    spec, shape = layout
    text = picture(spec, shape)
    assert sorted(numbers_in_boxes(text)) == list(range(int(np.prod(spec.mesh_shape))))


@hypothesis.given(layouts())
def test_boxes_follow_the_indices(layout):
    """Reading the boxes in order walks the shards in the order of their indices."""
    spec, shape = layout
    holders = {}
    for device, index in enumerate(spec.indices(shape).reshape(-1)):
        start = tuple(i.start or 0 if isinstance(i, slice) else i for i in index)
        stop = tuple(i.stop if isinstance(i, slice) else i for i in index)
        holders.setdefault((start, str(stop)), []).append(device)
    expected = [device for key in sorted(holders) for device in sorted(holders[key])]
    text = picture(spec, shape)
    assert numbers_in_boxes(text) == expected


MESH = make_mesh({"x": 4, "y": 2})
P = jax.sharding.PartitionSpec


def test_arrays_shardings_and_partition_specs_are_drawn_alike():
    sharding = jax.sharding.NamedSharding(MESH, P("x", None, "y"))
    x = jax.device_put(np.ones((8, 3, 4), np.float32), sharding)
    drawn = picture(spec_of(x), x.shape)
    assert "dimension 0 down, 2 across" in drawn
    for other in (
        picture(x),
        picture(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)),
        picture(sharding, x.shape),
        picture(sharding.spec, x.shape, mesh=MESH),
        picture(sharding.spec, x.shape, mesh=MESH.abstract_mesh),
    ):
        assert other == drawn
        assert "<table" in other._repr_html_()


def test_the_devices_are_those_of_the_array():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:3:-1]), "x")
    drawn = picture(
        jax.device_put(np.ones(4), jax.sharding.NamedSharding(mesh, P("x")))
    )
    assert numbers_in_boxes(drawn) == [7, 6, 5, 4]


def test_a_tree_of_arrays_is_a_line_for_each():
    cut = jax.sharding.NamedSharding(MESH, P("x"))
    tree = {"bias": np.ones(3), "w": [jax.device_put(np.ones((8, 2)), cut), 2.5]}
    drawn = picture(tree)
    assert drawn == inspect.cleandoc("""
        ['bias']  (3,) on 1 device, all of it on each
        ['w'][0]  (8, 2) on 8 devices, (2, 2) on each: dimension 0 down
        ['w'][1]  () on 1 device, all of it on each
    """)
    assert drawn._repr_html_().startswith("<pre>[&#x27;bias&#x27;]  (3,)")
    assert picture({"w": tree["w"][0]}).startswith("['w']  (8, 2) on 8 devices")


def test_what_lies_nowhere_is_refused():
    with pytest.raises(
        TypeError, match=r"a NamedSharding needs the shape of the array"
    ):
        picture(jax.sharding.NamedSharding(MESH, P("x")))
    with pytest.raises(TypeError, match=r"mesh whose axes it names: .*, mesh=mesh\)"):
        picture(P("x"), (8,))
    with pytest.raises(TypeError, match=r"argument value\['name'\]: it is 'data'"):
        picture({"name": "data"})
    with pytest.raises(TypeError, match=r"argument value\['x'\]: .* has no sharding"):
        picture({"x": jax.ShapeDtypeStruct((8,), np.float32)})
