"""What operations take besides operands and results. See also `test_liveness`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardmap.plan.memory.kernels import nbytes, scratch
from shardmap.plan.memory.liveness import peak
from tests.plan.memory.test_liveness import COUNTED


def last(fun, *shapes, dtype=np.float32):
    avals = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return jax.make_jaxpr(fun)(*avals).jaxpr.eqns[-1]


@pytest.mark.parametrize(
    ("fun", "shapes", "found"),
    [
        (jnp.sin, [(64, 8)], 0),
        (jnp.transpose, [(64, 8)], 0),
        # Windows of 32, and of 16 and again.
        (lambda x: lax.reduce_max(x, (0,)), [(64, 8)], 64 * 8 * 4 // 16),
        (lambda x: lax.cumsum(x, 0), [(64, 8)], 64 * 8 * 4 * 9 // 8),
        # Three rows of 16 are there while those are sorted.
        (lambda x: lax.sort(x, dimension=1), [(64, 8)], 3 * 16 * 8 * 4),
        (lambda x: lax.sort(x, dimension=0), [(64, 8)], 3 * 64 * 8 * 4),
        # A vector: its result is laid out anew, and no operand.
        (jnp.dot, [(64, 8), (8,)], 64 * 4),
        (jnp.dot, [(64, 8), (8, 16)], int(0.6 * (64 + 16) * 8 * 4)),
        (jnp.dot, [(64, 4096), (4096, 16)], int(0.6 * (64 + 16) * 1024 * 4)),
        # Of many rows, a block at a time.
        (jnp.dot, [(2**16, 64), (64, 16)], int(0.6 * (4096 + 16) * 64 * 4)),
    ],
)
def test_how_much_a_kernel_takes(fun, shapes, found):
    assert scratch(last(fun, *shapes)) in (found, found + 1)


def test_bytes_as_they_are_stored():
    assert nbytes(last(jnp.sin, (3, 4)).outvars[0]) == 48
    assert nbytes(last(jnp.negative, (3, 4), dtype=np.int8).outvars[0]) == 12
    key = jax.make_jaxpr(jax.random.key)(0).jaxpr.outvars[0]
    assert nbytes(key) == 8


def test_it_is_part_of_what_a_function_holds():
    x = jax.ShapeDtypeStruct((4096, 64), np.float32)

    def fun(x):
        return lax.sort(x, dimension=0).sum(0)

    held = peak(jax.make_jaxpr(fun)(x).jaxpr).bytes
    # What is sorted, and three times sixteen of its 64 rows.
    assert held > 1.75 * 4096 * 64 * 4
    compiled = jax.jit(fun).lower(x).compile(compiler_options=COUNTED)
    assert compiled.memory_analysis().temp_size_in_bytes <= held
