"""The plan that most tests run, and its result."""

import jax
import pytest

from shardmap.planning.plan import plan
from tests.plan.run.checks import W, X, columns


@pytest.fixture(scope="module")
def shard_plan():
    return plan(columns, X, W, in_slices=({0: 8}, None))


@pytest.fixture(scope="module")
def want():
    return jax.jit(columns)(X, W)
