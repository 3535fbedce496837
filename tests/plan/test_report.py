"""What a plan tells about itself."""

import jax.numpy as jnp

from shardmap.plan.plan import plan
from tests.plan.plan_programs import X, Y


def test_explain_and_str():
    def fun(x, w):
        return jnp.sort(x @ w, 0), x.sum(0)

    made = plan(fun, X, Y[:6], in_slices=({0: 2, 1: 3}, None))
    text = made.explain()
    for line in (
        "args[0]: float32[8, 6]",
        "axis 0: asked to be cut into 2 pieces of 4",
        "gives parts of result[1], combined by add",
        "reaches axis 0 of result[1]",
        "ends at sort",
        "test_report.py",
        "(cut another axis)",
        "axis 0: whole, as asked",
    ):
        assert line in text
    assert f"ShardPlan: {made.num_shards} shards" in str(made)
    assert text == plan(fun, X, Y[:6], in_slices=({0: 2, 1: 3}, None)).explain()
