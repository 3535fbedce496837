"""The loops of a stage, its shards, and what each of them reads."""

import jax.numpy as jnp

from shardmap.plan.plan import plan
from tests.plan.checks import check_cut
from tests.plan.plan_programs import reals

X, Y = reals(6, 6), reals(4)


def test_results_with_different_loops_do_not_multiply():
    made = check_cut(
        lambda x, y: (jnp.sin(x), jnp.sin(y)), X, Y, in_slices=({0: 6}, {0: 4})
    )
    assert (made.num_shards, len(made.stages)) == (10, 1)


def test_two_plans_of_one_function_are_the_same():
    def boxes():
        made = plan(lambda x: jnp.cumsum(jnp.sin(x), 0), X, in_slices=({0: 3},))
        return [(shard.stage, shard.in_slices) for shard in made.shards]

    assert boxes() == boxes()
