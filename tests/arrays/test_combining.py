"""What each combination of parts starts from changes nothing."""

import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.arrays.combining import COMBINE_IN_NUMPY, identity

NUMBERS = [np.float32, np.float16, jnp.bfloat16, np.int8, np.uint16]


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("combiner", ["add", "mul", "max", "min"])
def test_a_start_changes_no_number(combiner, dtype):
    values = np.array([0, 1, 100]).astype(dtype)
    start = identity(combiner, dtype)
    assert start.dtype == dtype
    np.testing.assert_array_equal(COMBINE_IN_NUMPY[combiner](start, values), values)


@pytest.mark.parametrize("combiner", ["add", "mul", "max", "min"])
def test_a_start_changes_no_complex_number(combiner):
    values = np.array([0, 1 - 100j], np.complex64)
    if combiner in ("max", "min"):
        values = np.append(values, np.array([-np.inf + 5j, np.inf + 5j], np.complex64))
    start = identity(combiner, np.complex64)
    np.testing.assert_array_equal(COMBINE_IN_NUMPY[combiner](start, values), values)


@pytest.mark.parametrize("combiner", ["and", "max", "min", "or", "xor"])
def test_a_start_changes_no_truth_value(combiner):
    values = np.array([True, False])
    start = identity(combiner, np.bool_)
    np.testing.assert_array_equal(COMBINE_IN_NUMPY[combiner](start, values), values)


@pytest.mark.parametrize("combiner", ["and", "or", "xor"])
@pytest.mark.parametrize("dtype", [np.int8, np.uint32])
def test_a_start_changes_no_bit(combiner, dtype):
    values = np.array([0, 1, 100, -1]).astype(dtype)
    np.testing.assert_array_equal(
        COMBINE_IN_NUMPY[combiner](identity(combiner, dtype), values), values
    )
