"""Bits in the order of a sort, and elements found by counting them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.engine.nodes import Scalar, flatten
from shardmap.plan.lax.staged.counting import (
    COUNTABLE,
    counted_out,
    from_ordered,
    ordered,
)
from shardmap.plan.lax.table import CALLS, TABLE

FLOATS = [-np.inf, -2.5, -1e-30, -0.0, 0.0, 1e-30, 1.0, 3e4, np.inf, np.nan]


def numbers(dtype):
    """Some of a dtype, the least and the largest among them, as a sort has them."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.array(FLOATS).astype(dtype)
    info = jnp.iinfo(dtype)
    return np.array([info.min, *range(max(info.min, -2), 3), info.max], dtype)


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", sorted(COUNTABLE, key=str), ids=str)
def test_bits_have_the_order_of_a_sort_and_come_back(dtype):
    with jax.enable_x64(True):
        x = jnp.asarray(numbers(dtype))
        bits = ordered(x)
        assert bits.dtype == np.dtype(f"uint{8 * dtype.itemsize}")
        want = np.argsort(np.asarray(bits), kind="stable")
        # -0.0 is less than 0.0 here, and equal in a sort, which is stable.
        np.testing.assert_array_equal(want, np.arange(len(x)))
        back = np.asarray(from_ordered(bits, dtype))
    assert back.dtype == dtype
    if jnp.issubdtype(dtype, jnp.floating):
        back, expected = back.astype(float), numbers(dtype).astype(float)
        np.testing.assert_array_equal(back, expected)
        np.testing.assert_array_equal(np.signbit(back), np.signbit(expected))
    else:
        np.testing.assert_array_equal(back, numbers(dtype))


def test_each_digit_is_two_equations_and_the_last_gives_the_element():
    def fun(x, ranks):
        return x, ranks

    x = np.random.default_rng(0).standard_normal((9, 3)).astype(np.float16)
    ranks = np.array([[0, 4, 8], [3, 3, 3]], np.int32)
    graph = flatten(jax.make_jaxpr(fun)(x, ranks), CALLS)
    graph.outputs = [counted_out(graph, *graph.inputs, 0, "here")]
    names = [node.name for node in graph.nodes]
    assert names.count("elements counted") == names.count("next digit") == 16 // 4
    values = dict(zip(graph.inputs, (x, ranks), strict=True))
    for node in graph.nodes:
        rule = TABLE.rule(node)
        boxes = [tuple((0, size) for size in shape) for shape in node.out_shapes]
        need = rule.backward(boxes, {})
        ins = [v.value if isinstance(v, Scalar) else values[v] for v in node.ins]
        starts = [jnp.int32(start) for start in need.starts]
        values.update(zip(node.outs, rule.emit(ins, need.static, starts), strict=True))
    got = np.asarray(values[graph.outputs[0]])
    np.testing.assert_array_equal(got, np.take_along_axis(np.sort(x, 0), ranks, 0))
