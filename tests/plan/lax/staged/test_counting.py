"""Bits in the order of a sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.lax.staged.counting import COUNTABLE, from_ordered, ordered

FLOATS = [-np.inf, -2.5, -1e-30, -0.0, 0.0, 1e-30, 1.0, 3e4, np.inf, np.nan]


def numbers(dtype):
    """Some of a dtype, the least and the largest among them, as a sort has them."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.array(FLOATS).astype(dtype)
    info = jnp.iinfo(dtype)
    return np.array([info.min, *range(max(info.min, -2), 3), info.max], dtype)


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", sorted(COUNTABLE, key=str), ids=str)
def test_bits_have_the_order_of_a_sort_and_come_back(dtype):
    with jax.enable_x64(True):
        x = jnp.asarray(numbers(dtype))
        bits = ordered(x)
        assert bits.dtype == np.dtype(f"uint{8 * dtype.itemsize}")
        want = np.argsort(np.asarray(bits), kind="stable")
        # -0.0 is less than 0.0 here, and equal in a sort, which is stable.
        np.testing.assert_array_equal(want, np.arange(len(x)))
        back = np.asarray(from_ordered(bits, dtype))
    assert back.dtype == dtype
    if jnp.issubdtype(dtype, jnp.floating):
        back, expected = back.astype(float), numbers(dtype).astype(float)
        np.testing.assert_array_equal(back, expected)
        np.testing.assert_array_equal(np.signbit(back), np.signbit(expected))
    else:
        np.testing.assert_array_equal(back, numbers(dtype))
