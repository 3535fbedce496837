"""Loops: which steps need the ones before, and who waits for whom."""

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
    assert "spmap runs them" not in axis.change


@pytest.mark.parametrize("fun", [unused, numbered, lambda x: lax.map(jnp.sin, x)])
def test_steps_that_need_none_before_are(fun):
    (axis,) = sm.explain(fun)(X).axes
    assert not axis.in_turn
    assert "vmap runs all at once" in axis.change


def test_uneven_blocks_are_said_step_by_step():
    mapped = sm.spmap(lambda x: jnp.sin(x).sum(), batch_size=3)
    report = sm.explain(mapped)(np.ones((104, 4), np.float32))
    (axis,) = report.axes
    assert axis.layout == "8 devices x 3 vectorised x 5 steps, the last of 1"
    assert "4 steps of 3 vectorised and one of 1" in axis.running
    assert axis.idle_places == 0
    assert report.remarks == ()
