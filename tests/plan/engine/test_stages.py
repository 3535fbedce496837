"""The loops of a stage, and its shards."""

import jax.numpy as jnp

from shardmap.plan.engine.stages import stages_of
from tests.plan.engine.toys import CUT, NOT, analysed


def test_one_axis_twice_in_a_result_gives_two_loops():
    def with_transpose(x):
        return x + x

    found = analysed(with_transpose, (6, 6), cuts=[[CUT, CUT]])
    found.classes.unite(
        (found.graph.inputs[0].number, 0), (found.graph.inputs[0].number, 1)
    )
    [stage] = stages_of(found)
    assert stage.num_shards == 9


def test_results_with_different_loops_do_not_multiply():
    found = analysed(
        lambda x, y: (jnp.sin(x), jnp.sin(y)), (6,), (4,), cuts=[[CUT], [CUT]]
    )
    [stage] = stages_of(found)
    assert stage.num_shards == 6
    made = [stage.recipe(k)[0] for k in range(6)]
    assert all(sum(box is not None for box in boxes) == 1 for boxes in made)


def test_two_runs_give_the_same_plan():
    def run():
        found = analysed(
            lambda x, y: jnp.sin(jnp.sum(x + y, 0)),
            (6, 2),
            (6, 2),
            cuts=[[CUT, NOT]] * 2,
        )
        return [stage.recipe(k)[0] for stage in stages_of(found) for k in range(2)]

    assert run() == run()
