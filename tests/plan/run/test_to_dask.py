"""The results of a plan as arrays of Dask."""

import gc

import jax
import numpy as np
import pytest

from shardmap.plan.plan import plan
from tests.plan.run.test_engines import W, X, assert_bytes, mapped, score


def test_arrays_of_dask_come_out(tmp_path):
    da = pytest.importorskip("dask.array", reason="the result under test")
    made = plan(score, X, W, in_slices=({0: 40}, None))
    want = made.run(X, W)
    for x in (X, mapped(tmp_path), da.from_array(X, chunks=(24, 5))):
        got = made.to_dask(x, W)
        assert [each.shape for each in got] == [np.shape(each) for each in want]
        assert_bytes([each.compute(scheduler="sync") for each in got], want)
    got = made.to_dask()
    assert_bytes([each.compute(scheduler="sync") for each in got], want)
    with pytest.raises(ValueError, match="Dask has no random keys"):
        plan(lambda key: key, jax.random.key(0)).to_dask(jax.random.key(0))


@pytest.mark.parametrize("kind", [np.ones, jax.ShapeDtypeStruct])
def test_arguments_that_are_gone_are_asked_for(kind):
    made = plan(lambda x, by: x * by, kind((8, 2), np.float32), 2.0)
    gc.collect()
    for call in (made.traffic, made.to_dask):
        with pytest.raises(ValueError, match="shapes only, or are gone: pass them ag"):
            call()
