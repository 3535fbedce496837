"""Each element from those at its place: when parts pass."""

import jax
import numpy as np
import pytest

from shardmap.plan.plan import plan
from tests.plan.checks import assert_same


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "fun",
    [
        lambda x, y: x.sum(0) / y,
        lambda x, y: x.sum(0) * y,
        lambda x, y: x.sum(0) @ y,
        lambda x, y: (x * y[None]).sum(0) / y.sum(),
        lambda x, y: x.sum(0) * np.inf,
        lambda x, y: x.sum(0) / 0,
    ],
)
def test_parts_do_not_meet_zeros_and_infinities(fun):
    """``1 / 0`` is infinite, ``3 / 0 - 2 / 0`` is no number."""
    x = np.eye(8, 6, dtype=np.float32) - 0.5 * np.eye(8, 6, -3, dtype=np.float32)
    y = np.array([0, np.inf, 1, -np.inf, 0, 2], np.float32)
    made = plan(fun, x, y, in_slices=({0: 4}, None))
    assert_same(made.run(x, y), jax.jit(fun)(x, y))
    assert made.num_shards > 1
