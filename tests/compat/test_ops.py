"""What the first years' programs call by function compute what it computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.compat import ops, util


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (ops.index_update, [1, 9, 9]),
        (ops.index_add, [1, 11, 12]),
        (ops.index_mul, [1, 18, 27]),
        (ops.index_min, [1, 2, 3]),
        (ops.index_max, [1, 9, 9]),
    ],
)
def test_updates(function, expected):
    x = np.array([1, 2, 3])
    np.testing.assert_array_equal(function(x, jnp.index_exp[1:], 9), expected)
    np.testing.assert_array_equal(x, [1, 2, 3])


def test_xla_computation_takes_static_arguments():
    made = ops.xla_computation(lambda x, n: x * n, static_argnums=1)(jnp.ones(3), 2)
    assert "multiply" in made.as_hlo_text()


def test_lists_must_be_equally_long():
    with pytest.raises(ValueError, match="shorter"):
        util.safe_map(max, [1, 2], [1])
    with pytest.raises(ValueError, match="longer"):
        util.safe_zip([1], [1, 2])


def test_tie_in_is_its_second_argument():
    assert jax.jit(lambda x: ops.tie_in(x, 2 * x))(3) == 6
