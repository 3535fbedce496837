"""Reductions of blocks, as the collective of all elements, and in parts."""

import jax
import numpy as np
import pytest

from shardmap.map.collectives.reductions import REDUCTIONS
from shardmap.map.primitives.axis import AxisLayout

AXIS = AxisLayout("i", 5, block=8)
# The last three are in empty places.
BLOCK = np.array(
    [[3, -1], [7, 2], [-5, 4], [0, 0], [1, 9], [100, -100], [99, -99], [0, -9]],
    np.int32,
)
NUMPY = {"add": np.sum, "max": np.max, "min": np.min, "mul": np.prod}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", NUMPY)
@pytest.mark.parametrize("dtype", ["float32", "int32", "float16"])
def test_of_the_elements_that_are_there(name, dtype):
    reduction, expected = REDUCTIONS[name], NUMPY[name]
    block = BLOCK.astype(dtype)
    result, differs = reduction(AXIS, block, axes=("i",))
    assert (result.dtype, differs) == (dtype, False)
    np.testing.assert_array_equal(result, expected(block[:5], 0))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NUMPY)
def test_of_groups(name):
    reduction, expected = REDUCTIONS[name], NUMPY[name]
    groups = [[0, 3], [4, 1, 2]]
    result, differs = reduction(AXIS, BLOCK, axes=("i",), axis_index_groups=groups)
    assert differs
    for group in groups:
        for k in group:
            np.testing.assert_array_equal(result[k], expected(BLOCK[group], 0))


@pytest.mark.parametrize("name", NUMPY)
def test_in_parts(name):
    reduction, expected = REDUCTIONS[name], NUMPY[name]
    so_far = reduction.start(jax.core.ShapedArray((2,), BLOCK.dtype))
    for first in (0, 4):
        part, numbers = BLOCK[first : first + 4], np.arange(first, first + 4)
        so_far = reduction.accumulate(so_far, part, numbers < 5)
    np.testing.assert_array_equal(so_far, expected(BLOCK[:5], 0))


def test_complex_numbers_are_ordered_by_their_real_parts():
    block = np.array([1 + 5j, 2 - 1j, 2 + 3j, 0, 0, 9, 9, 9], np.complex64)
    assert REDUCTIONS["max"](AXIS, block, axes=("i",))[0] == 2 + 3j
    assert REDUCTIONS["min"](AXIS, -block, axes=("i",))[0] == -2 - 3j
