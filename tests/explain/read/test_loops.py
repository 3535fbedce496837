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


@pytest.mark.parametrize("fun", [running_sum, recurrent, powers])
def test_steps_that_need_the_one_before_are_not_to_be_vectorised(fun):
    report = sm.explain(fun)(X)
    (axis,) = report.axes
    assert axis.in_turn
    assert "Each step takes what the one before gave." in " ".join(str(report).split())


def test_steps_that_need_none_before_are():
    report = sm.explain(lambda x: lax.map(jnp.sin, x))(X)
    (axis,) = report.axes
    assert not axis.in_turn
    assert "vmap runs all at once" in " ".join(str(report).split())


def test_uneven_blocks_are_said_step_by_step():
    mapped = sm.spmap(lambda x: jnp.sin(x).sum(), batch_size=3)
    report = sm.explain(mapped)(np.ones((104, 4), np.float32))
    (axis,) = report.axes
    assert axis.layout == "8 devices x 3 vectorised x 5 steps, the last of 1"
    assert axis.idle_places == 0
    assert report.remarks == ()
