"""Loops: which steps need the ones before, and who waits for whom."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm

X = np.ones((24, 4), np.float32)
TOTAL = np.float32(0)


def running_sum(x):
    return lax.scan(lambda c, row: (c + row.sum(), c), TOTAL, x)


def recurrent(x):
    return lax.scan(lambda c, row: (jnp.tanh(c + row), c), x[0], x)


def powers(x):
    return lax.fori_loop(0, 24, lambda k, c: c * 2, x)


def unused(x):
    return lax.scan(lambda c, row: (c, jnp.sin(row)), TOTAL, x)


def numbered(x):
    return lax.scan(lambda k, row: (k + 1, row * k), 0, jnp.arange(24))


@pytest.mark.parametrize("fun", [running_sum, recurrent, powers])
def test_steps_that_need_the_one_before_are_not_to_be_vectorised(fun):
    (axis,) = sm.explain(fun)(X).axes
    assert axis.in_turn
    assert axis.running.endswith("each takes what the one before gave")
    assert "cannot run at once" in axis.change
    assert "spmap lays them" not in axis.change


@pytest.mark.parametrize("fun", [unused, numbered, lambda x: lax.map(jnp.sin, x)])
def test_steps_that_need_none_before_are(fun):
    (axis,) = sm.explain(fun)(X).axes
    assert not axis.in_turn
    assert "vmap does all at once" in axis.change


def until(bound):
    def fun(x):
        return lax.while_loop(lambda c: c.sum() < bound, lambda c: c * 1.5, x)

    return fun


@pytest.mark.parametrize(
    "fun", [jax.vmap(until(100)), sm.spmap(until(100)), jax.jit(jax.vmap(until(100)))]
)
def test_vectorised_elements_wait_for_the_slowest(fun):
    report = sm.explain(fun)(X)
    (loop,) = [axis for axis in report.axes if axis.kind == "while"]
    assert "until the slowest" in loop.running
    assert any("until the slowest" in each.text for each in report.remarks)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("fun", "x"),
    [
        (until(100), X),
        (sm.spmap(until(100), batch_size=1), X),
        (sm.spmap(until(100)), X[:8]),
        (
            # All of them go on as long as the counter says.
            jax.vmap(
                lambda x: lax.while_loop(
                    lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 2), (0, x)
                )
            ),
            X,
        ),
    ],
    ids=["alone", "one at a time", "one on each device", "a counter"],
)
def test_nobody_waits_where_each_is_alone_or_all_take_as_long(fun, x):
    report = sm.explain(fun)(x)
    assert not [each for each in report.axes if "slowest" in each.running]
    assert not [each for each in report.remarks if "slowest" in each.text]


def test_uneven_blocks_are_said_step_by_step():
    mapped = sm.spmap(lambda x: jnp.sin(x).sum(), batch_size=3)
    report = sm.explain(mapped)(np.ones((104, 4), np.float32))
    (axis,) = report.axes
    assert axis.layout == "8 devices x 3 vectorised x 5 steps, the last of 1"
    assert "4 steps of 3 vectorised and one of 1" in axis.running
    assert axis.idle_places == 0
    assert report.remarks == ()


def test_batches_of_a_loop_are_said_step_by_step():
    looped = sm.explain(lambda x: lax.map(jnp.sin, x, batch_size=16))
    (axis,) = looped(np.ones(100, np.float32)).axes
    assert (axis.size, axis.vectorised, axis.steps, axis.last_step) == (100, 16, 7, 4)
    assert axis.running == "6 steps of 16 vectorised and one of 4, one after another"
