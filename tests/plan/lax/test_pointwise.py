"""Each element from those at its place: when parts pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut
from tests.plan.plan_programs import reals


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
    shard_plan = plan(fun, x, y, in_slices=({0: 4}, None))
    assert_same(shard_plan.run(x, y), jax.jit(fun)(x, y))
    assert shard_plan.num_shards > 1


WEIGHTS = reals(6, 4, seed=3)
INFINITE = np.where(WEIGHTS > 1, np.inf, WEIGHTS)


def smoothed(x):
    kernel = np.full((1, 1, 3), 0.25, np.float32)
    return lax.conv_general_dilated(x.sum(0)[None, None], kernel, (1,), "SAME")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("fun", "stages"),
    [
        (lambda x: x.mean(0) @ WEIGHTS, 1),
        (lambda x: jnp.einsum("ij,i->j", WEIGHTS, x.sum(0)), 1),
        (smoothed, 1),
        (lambda x: x.sum(0) * WEIGHTS[:, 0], 1),
        (lambda x: (x * 8).astype(jnp.int32).sum(0) @ x[:6].astype(jnp.int32), 1),
        (lambda x: x.sum(0) @ INFINITE, 2),
        (lambda x: x.sum(0) @ np.tile(WEIGHTS, 2), 2),
    ],
)
def test_parts_pass_products_with_constants_unless_they_grow(fun, stages):
    shard_plan = check_cut(fun, reals(8, 6), in_slices=({0: 4},))
    assert len(shard_plan.stages) == stages
