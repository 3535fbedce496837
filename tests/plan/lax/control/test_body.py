"""What is known of the body of a loop before it is cut."""

import jax
import jax.numpy as jnp
import numpy as np

from shardmap.plan.lax.control.body import Frozen, InnerBody, fit, fits
from shardmap.plan.lax.table import CALLS, TABLE

X = jax.ShapeDtypeStruct((4, 6), np.float32)


def body(fun, *avals):
    return InnerBody(jax.make_jaxpr(fun)(*avals), TABLE, CALLS)


def unbroken(made, value):
    unions, broken, sums = made.loops()
    roots = {unions.find(key) for key in [*broken, *(each.key for each in sums)]}
    return [
        axis
        for axis in range(len(value.shape))
        if unions.find((value.number, axis)) not in roots
    ]


def test_an_axis_is_a_loop_until_something_mixes_it():
    made = body(lambda x, y: jnp.sin(x) + jnp.cumsum(y, 1), X, X)
    x, y = made.graph.inputs
    assert unbroken(made, x) == [0, 1]
    assert unbroken(made, y) == [0]
    made = body(lambda x: jnp.sin(x).T, X)
    assert unbroken(made, made.graph.inputs[0]) == [0, 1]
    made = body(lambda x: x.sum(0), X)
    assert unbroken(made, made.graph.inputs[0]) == [1]


def test_a_body_runs_for_a_box():
    constant = np.arange(24, dtype=np.float32).reshape(4, 6)
    made = body(lambda x: (x * 2 + jnp.asarray(constant), x[0]), X)
    wanted = [((1, 3), (2, 6)), None]
    recipe = made.trace(wanted)
    assert made.needs(recipe) == [((1, 3), (2, 6))]
    x = np.ones((2, 4), np.float32)
    starts = [jnp.int32(s) for s in recipe.starts]
    result, nothing = made.run(recipe, wanted, [x], starts)
    np.testing.assert_array_equal(result, 2 + constant[1:3, 2:6])
    assert nothing is None


def test_what_is_carried_is_cut_down_to_what_is_read():
    x = np.arange(10)
    needs, carried = [None, ((3, 5),), ((0, 2),)], [((0, 1),), ((2, 9),), ((0, 2),)]
    fitted = fit([x, x, x], needs, carried)
    np.testing.assert_array_equal(fitted[1], [1, 2])
    assert fitted[0] is x
    assert fitted[2] is x
    assert fits(needs, carried) == (None, ((1, 3),), ((0, 2),))


def test_equal_keys_are_equal_whatever_is_in_them():
    one, other = Frozen("key", [1]), Frozen("key", [2])
    assert one == other
    assert {one: 0} == {other: 0}
    assert one != Frozen("another key", [1])
