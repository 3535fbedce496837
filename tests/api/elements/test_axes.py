"""What is decided of the axes of a call: results without one, and several processes."""

import jax
import numpy as np
import pytest
from jax import lax

from shardmap.api.elements.axes import (
    are_process_local,
    check_elements,
    unmapped,
    unmapped_that_differ,
)
from shardmap.map import tracing


def names():
    return ["x", "y"]


@pytest.mark.parametrize(
    ("are_global", "in_axes", "local"),
    [
        ((False, False), (0, 0), True),
        ((True, True), (0, 1), False),
        # What is not mapped does not count, unless there is nothing else.
        ((False, True), (0, None), True),
        ((True, False), (0, None), False),
        ((True, False), (None, None), False),
        ((False, False), (None, None), True),
    ],
)
def test_what_is_mapped_decides(are_global, in_axes, local):
    assert are_process_local(are_global, in_axes, names) is local


def test_both_kinds_together_are_refused():
    with pytest.raises(
        ValueError, match=r"\* x is a global array\n  \* y is process-local data\n"
    ):
        are_process_local((True, False), (0, 0), names)


def test_all_elements_are_counted():
    assert check_elements("f", 3, 2, None, 2) == 6
    assert check_elements("f", 3, 2, 6, 3) == 6


@pytest.mark.parametrize(
    ("own", "wanted", "divisor", "message"),
    [
        (0, None, 1, "spmap of f over 2 processes needs at least one element"),
        (3, 3, 1, "axis_size 3, .* but 3 on each of 2 are 6"),
        (3, None, 4, "3 elements on each of 2 processes do not divide among the 4"),
    ],
)
def test_other_counts_are_refused(own, wanted, divisor, message):
    with pytest.raises(ValueError, match=message):
        check_elements("f", own, 2, wanted, divisor)


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
