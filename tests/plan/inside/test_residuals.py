"""What a backward pass computes again, and what it finds kept."""

import jax
import jax.numpy as jnp

import shardmap as sm
from tests.plan.checks import assert_same
from tests.plan.plan_programs import reals

W = reals(4, 8, seed=1) / 4


def loss(x, w):
    return (jnp.tanh(x @ w).sum(0) ** 2).sum()


def tanhs(fun, *args):
    return jax.jit(fun).lower(*args).as_text().count("stablehlo.tanh")


def test_what_a_backward_pass_computes_again():
    x = jnp.ones((16, 4))

    def count(**options):
        return tanhs(jax.grad(sm.chunked(loss, ({0: 4}, None), **options)), x, W)

    assert count(remat=False) == 1
    assert count() == 2
    saved = jax.checkpoint_policies.dots_saveable
    gradient = jax.grad(sm.chunked(loss, ({0: 4}, None), remat=saved), (0, 1))
    assert_same(gradient(x, W), jax.grad(loss, (0, 1))(x, W))
