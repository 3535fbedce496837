"""What is known of indices when a plan is made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.plan import plan
from tests.plan.checks import assert_same, check_cut
from tests.plan.plan_programs import reals

TABLE = reals(40, 3)
KNOWN = {
    "a triangle": lambda: jnp.tril_indices(12)[0],
    "a step": lambda: jnp.arange(2, 30, 3)[::-1],
    "negative": lambda: jnp.array([-3, 1, 2]) % 7 + jnp.array([-7, 7, 8]) // 3 + 4,
    "clipped": lambda: jnp.clip(jnp.arange(-3, 36), 0, 31),
    "repeated": lambda: jnp.repeat(jnp.arange(10), 3) + jnp.repeat(jnp.arange(3), 10),
    "a grid": lambda: jnp.stack(jnp.meshgrid(jnp.arange(30), jnp.arange(3)))[0].T,
    "chosen": lambda: jnp.where(jnp.arange(30) > 2, jnp.arange(30), 3),
    "shifted": lambda: jnp.roll(jnp.cumsum(jnp.arange(5, 0, -1)), 2),
    "sorted truth": lambda: jnp.nonzero(jnp.arange(40) % 3 == 0, size=14)[0],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KNOWN)
def test_pieces_look_at_pieces_where_indices_are_known(name):
    made = check_cut(lambda x: jnp.sin(x[KNOWN[name]()]), TABLE, in_slices={0: 5})
    assert made.shards[0].combiner == "insert"
    assert len(made.stages) == 1


def test_indices_that_depend_on_an_argument_are_not_known():
    def fun(x, k):
        return x[jnp.arange(30) + k]

    made = check_cut(fun, TABLE, np.int32(2), in_slices=({0: 5}, None))
    assert made.shards[0].combiner == "add"


def test_counts_that_wrap_around_are_no_rows():
    x, labels = reals(300, 2), np.zeros(300, np.int32)

    def fun(x, labels):
        return x[jnp.arange(300).astype(jnp.uint8), labels]

    made = plan(fun, x, labels, in_slices=({0: 3}, {0: 3}))
    assert_same(made.run(x, labels), jax.jit(fun)(x, labels))
