"""Which results may not be given without the axis, and what is said of them."""

import jax
import numpy as np
import pytest
from jax import lax

from shardmap.api.elements.refusals import unmapped, unmapped_that_differ
from shardmap.map import tracing

FOUR = tracing.Batch("i", 4)


@pytest.mark.parametrize(
    ("out_axes", "bad"),
    [((None,) * 4, [0, 1]), ((0, None, None, None), [1]), ((0, 0, None, None), [])],
)
def test_results_that_differ_are_found(out_axes, bad):
    def fun(x, y):
        return x + y, lax.axis_index("i"), lax.psum(x, "i"), y * 2

    avals = [jax.core.ShapedArray((), np.float32)] * 2
    body = tracing.trace_body(fun, avals, "i", 4)
    assert unmapped_that_differ(out_axes, body, (0, None), FOUR) == bad


def test_the_error_names_the_results():
    error = unmapped("f", ["result['a']", "result['b']"])
    assert isinstance(error, ValueError)
    assert "results of f can differ" in str(error)
    assert "\n  * result['a']\n  * result['b']\n" in str(error)
