"""What shards compile, what they compute more than once, and how that is told."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardmap.plan.costs import Compiled, functions, functions_in_all, repeated, told
from shardmap.plan.cutting import cut_function
from shardmap.plan.engine.work import Choice
from tests.plan.plan_programs import reals

X = reals(64, 8)


def smoothed(x, kernel):
    return lax.conv_general_dilated(x[None, None], kernel[None, None], (1,), "VALID")[
        0, 0
    ]


def test_shards_of_one_length_share_a_function():
    def compiled(fun, x, pieces):
        [stage] = cut_function(fun, (x,), ({0: pieces},)).stages
        return functions(stage)

    assert compiled(jnp.sin, X, 8) == Compiled(1, 1, True)
    assert compiled(jnp.sin, X, (30, 30, 4)) == Compiled(2, 2, True)
    # The first, those between and the last; of so many shards some are looked at.
    few, *_, exact = compiled(lambda x: jnp.diff(jnp.pad(x, 1)), np.ones(9000), 1000)
    assert (few, exact) == (3, False)


def test_steps_of_a_loop_share_their_functions():
    def power(x, v):
        return lax.fori_loop(0, 6, lambda _, v: v / (1 + x.T @ (x @ v)), v)

    made = cut_function(power, (X, np.ones(8, np.float32)), ({0: 4}, None))
    each = [functions(stage).number for stage in made.stages]
    assert len(each) > 3
    assert functions_in_all(made) < sum(each)
    lone = cut_function(jnp.sin, (X,), ({0: 4},))
    assert functions_in_all(lone) == 1


def test_what_windows_make_shards_compute_again_is_counted():
    def twice(x, kernel):
        return smoothed(smoothed(x, kernel), kernel)

    x, kernel = np.ones(64, np.float32), np.ones(3, np.float32)
    # Each of four shards needs two more of the 62 results of the first: 68 in all.
    assert repeated(cut_function(twice, (x, kernel), ({0: 4}, None)), 0) == 6 * 3
    assert repeated(cut_function(smoothed, (x, kernel), ({0: 4}, None)), 0) == 0


def test_what_a_later_stage_computes_again_is_counted():
    def normal(x, w):
        y = x @ w
        return y / (y * y).sum(0, keepdims=True)

    made = cut_function(normal, (X, reals(8, 64)), ({0: 8}, None))
    assert [repeated(made, place) for place in (0, 1)] == [0, 64 * 8 * 64]


def test_loops_do_a_fraction_of_the_work_in_each_shard():
    def rows(x):
        return lax.scan(lambda c, row: (c + row.sum(), row * 2), 0.0, x.T)[1]

    made = cut_function(rows, (X,), ({0: 8},))
    assert repeated(made, len(made.stages) - 1) == 0


def test_both_sides_of_a_choice_are_told():
    choice = Choice(True, 2048, 1, 10**6, 4096)
    assert told("y", choice) == (
        "keeps y, 2.0 KiB: to compute it once more takes 1 M operations and reads "
        "4.0 KiB"
    )
    assert told("y", choice._replace(kept=False, times=3)) == (
        "computes y 3 times more, which takes 1 M operations and reads 4.0 KiB each "
        "time: kept it would be 2.0 KiB"
    )
