"""Sliding windows."""

import jax

from shardmap.plan.plan import plan
from tests.plan.checks import assert_same
from tests.plan.plan_programs import IMAGE, max_pool


def test_gradients_of_pooling():

    def tangent(x):
        return jax.jvp(max_pool, (x,), (x * 0.5,))

    def gradient(x):
        return jax.grad(lambda x: (max_pool(x) ** 2).sum())(x)

    for fun in (tangent, gradient):
        made = plan(fun, IMAGE, in_slices=({0: 2, 1: 2},))
        assert_same(made.run(IMAGE), jax.jit(fun)(IMAGE))
        assert made.num_shards > 1
