"""What `jax.vmap` has no rule for, it can after this: as a loop over elements."""

import jax
import numpy as np
import pytest
from jax import lax

from shardmap.map.collectives.split import vectorizable
from tests.map_programs import float_index

X = np.arange(8, dtype=np.float32).reshape(4, 2)


def vectorized(fun, axis_env=(), name="i"):
    env = [("i", 4), *axis_env]
    jaxpr = jax.make_jaxpr(fun, axis_env=env)(X[0]).jaxpr
    changed = vectorizable(jaxpr, name, 4)
    (result,) = jax.vmap(lambda x: jax.core.eval_jaxpr(changed, (), x), axis_name=name)(
        X
    )
    return result


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (
            lambda x: lax.psum(x, "i", axis_index_groups=[[0, 3], [1, 2]]),
            X[[0, 1, 1, 0]] + X[[3, 2, 2, 3]],
        ),
        (
            lambda x: lax.ppermute(x, "i", [(0, 2), (3, 1)]),
            np.stack([0 * X[0], X[3], X[0], 0 * X[0]]),
        ),
        (lambda x: x * float_index("i"), X * np.arange(4, dtype=np.float32)[:, None]),
    ],
    ids=["groups", "permutation", "index"],
)
def test_collectives_are_those_of_a_loop(fun, expected):
    np.testing.assert_array_equal(vectorized(fun), expected)


def test_what_needs_nothing_stays_the_object_that_it_was():
    jaxpr = jax.make_jaxpr(lambda x: x + 1)(X[0]).jaxpr
    assert vectorizable(jaxpr, "i", 4) is jaxpr
    assert vectorizable(jaxpr, None, 4) is jaxpr


def test_groups_of_another_axis_stay():
    def fun(x):
        groups = [[0, 1], [2, 3]]
        return lax.all_to_all(x, "o", 0, 0, axis_index_groups=groups, tiled=True)

    jaxpr = jax.make_jaxpr(fun, axis_env=[("o", 4)])(X[0]).jaxpr
    changed = vectorizable(jaxpr, None, 3)
    assert [e.primitive.name for e in changed.eqns] == ["grouped_all_to_all"]
