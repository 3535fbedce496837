"""Random bits: the same as of the whole call."""

import jax

from shardmap.plan.plan import plan
from tests.plan.checks import assert_same
from tests.plan.plan_programs import X


def test_a_key_that_is_not_threefry_is_whole():
    key = jax.random.key(0, impl="rbg")

    def fun(key, x):
        return jax.random.uniform(key, (8, 6)) + x

    made = plan(fun, key, X, in_slices=(None, {0: 2}))
    assert_same(made.run(key, X), jax.jit(fun)(key, X))
