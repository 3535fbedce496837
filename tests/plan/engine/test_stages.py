"""The loops of a stage, its shards, and what each of them reads."""

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

from shardmap.plan.plan import plan
from tests.plan.checks import assert_same, check_cut, cuts
from tests.plan.plan_programs import reals
from tests.strategies import examples

X, Y = reals(6, 6), reals(4)


def several(x):
    y = jnp.sin(x) + jnp.arange(6.0)[None]
    return y + y.T[::-1], y[1:, ::2] - x[:-1, 1::2].sum()


@examples(2)
@given(st.data())
def test_a_box_is_what_the_whole_result_has_there(data):
    made = plan(several, X, in_slices=data.draw(cuts((X,))))
    assert_same(made.run(X), jax.jit(several)(X), 1e-4)


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
