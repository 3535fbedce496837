"""How often the work of loops is done, next to what it is by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm

ROWS, WIDTH = 500, 256
X = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
WHOLE = 4 * ROWS * WIDTH


@pytest.mark.parametrize(
    ("fun", "passes"),
    [
        # Reads and writes all; and once more, to begin with zeros.
        (lambda x: lax.map(jnp.sin, x), (2, 5)),
        (lambda x: lax.scan(lambda c, r: (c + r, None), x[0], x)[0], (1, 5)),
        # The carry moves with each row, both ways, in more than one operation.
        (lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x), (2, 9)),
    ],
    ids=["map", "sum", "running sum"],
)
def test_a_step_reads_and_writes_its_row_and_not_all_rows(fun, passes):
    moved = sm.explain(fun)(X).cost.bytes_accessed
    least, most = passes
    assert least * WHOLE <= moved <= most * WHOLE


def test_flops_count_every_step():
    cost = sm.explain(lambda x: lax.map(lambda r: r * r + r, x))(X).cost
    # Two for each entry, and the counter of the loop.
    assert 2 * ROWS * WIDTH <= cost.flops <= 2 * ROWS * WIDTH + 10 * ROWS
