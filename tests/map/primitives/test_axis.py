"""Elements in blocks on devices: where they are, and what fills the last block."""

import jax
import numpy as np
import pytest
from jax import lax

from shardmap.map.primitives.axis import (
    UNNAMED,
    AxisLayout,
    axis_text,
    map_text,
    pad,
    unpad,
)

ALONE = AxisLayout("i", 7, block=8)


def test_a_block_ends_in_empty_places():
    assert ALONE.padding == 1
    assert ALONE.vectorized_name == "block of 'i'"
    block = np.arange(16, dtype=np.uint32).reshape(8, 2)
    filled = ALONE.present(block, np.uint32(2**32 - 1))
    np.testing.assert_array_equal(filled[:7], block[:7])
    np.testing.assert_array_equal(filled[7], [2**32 - 1] * 2)
    full = AxisLayout("i", 8)
    assert full.present(block, 0) is block


def test_the_indices_of_each_device():
    axis = AxisLayout("i", 7, ("devices",), 4)
    mapped = jax.vmap(lambda _: axis.indices(), axis_name="devices")(np.zeros(4))
    np.testing.assert_array_equal(mapped, np.arange(8).reshape(4, 2))


def test_all_elements_come_together_in_the_order_of_the_names():
    def gathered(row):
        block = row + 10 * lax.axis_index("o")
        return ALONE.gather(block, ("o", "i")), ALONE.positions(("o", "i"))

    row = np.arange(8)
    every, positions = jax.vmap(
        lambda _: gathered(row), axis_name="o", axis_size=2, in_axes=0
    )(np.zeros(2))
    expected = [*range(7), *range(10, 17)]
    np.testing.assert_array_equal(every, [expected] * 2)
    # The empty place of the last one counts as the one before it.
    np.testing.assert_array_equal(positions, [[*range(8)], [*range(7, 14), 13]])


def test_groups_tell_the_number_and_the_place_of_each():
    axis = AxisLayout("i", 4)
    groups, number, place = axis.groups(("i",), [[0, 3], [2, 1]])
    assert groups == [[0, 3], [2, 1]]
    assert (list(number), list(place)) == ([0, 1, 1, 0], [0, 1, 0, 1])
    _, number, place = axis.groups(("i",), None)
    assert (list(number), list(place)) == ([0] * 4, [0, 1, 2, 3])


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool"])
def test_padding_repeats_the_last_and_is_taken_off(dtype):
    array = np.arange(14).reshape(2, 7).astype(dtype)
    padded, other = pad([array, array], [1, None], ALONE.padding)
    np.testing.assert_array_equal(padded, array[:, [*range(7), 6]])
    assert other is array
    taken, left = unpad([padded, padded], [1, None], ALONE)
    np.testing.assert_array_equal(taken, array)
    assert left is padded


def test_keys_are_padded_too():
    keys = jax.random.split(jax.random.key(0), 3)
    (padded,) = pad([keys], [0], 2)
    assert (padded[3:] == keys[2]).all()


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
    axis = AxisLayout("i", size, ("d",), devices, batch_size)
    assert (axis.block, axis.vectorised, axis.steps) == expected
    assert axis.places == devices * expected[0]


def test_what_it_is_called():
    assert axis_text("i") == "axis 'i'"
    assert "axis" in axis_text(UNNAMED)
    assert map_text({"name": "f"}) == "spmap of f"
    alone = AxisLayout("i", 2000, batch_size=1)
    assert str(alone) == "1 device x 1 vectorised x 2,000 steps"
