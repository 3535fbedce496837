"""What is taken whole by name, and what is looked through."""

import jax

from shardmap.plan.plan import plan
from tests.plan.checks import assert_same
from tests.plan.plan_programs import X


def test_custom_derivatives_and_linear_solves():
    @jax.custom_vjp
    def half(x):
        return x * 0.5

    half.defvjp(lambda x: (x * 0.5, None), lambda _, g: (g * 0.5,))

    def fun(x):
        solved = jax.scipy.sparse.linalg.cg(lambda v: v * 3, x)[0]
        return half(x) + solved, jax.grad(lambda y: half(y).sum())(x)

    made = plan(fun, X, in_slices=({0: 2},))
    assert_same(made.run(X), jax.jit(fun)(X))
    assert made.num_shards == 6
