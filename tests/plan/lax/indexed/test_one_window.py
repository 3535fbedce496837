"""Windows at known places are slices, and updates of slices."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from shardmap.plan.plan import plan
from tests.plan.checks import assert_same, check_cut, cuts
from tests.plan.plan_programs import reals
from tests.strategies import examples

TABLE = reals(12, 5)


def diffused(x):
    return x.at[1:-1].add(0.1 * (x[2:] - 2 * x[1:-1] + x[:-2]))


UPDATES = {
    "add": diffused,
    "set": lambda x: x.at[2:9, 1:3].set(x[:7, :2]),
    "multiply": lambda x: x.at[3, 2:4].multiply(x[0, :2]),
    "min": lambda x: x.at[4:].min(0.2),
    "subtract": lambda x: x.at[:5].subtract(x[1:6]),
    "far": lambda x: x.at[20:].add(1.0),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", UPDATES)
def test_a_window_is_updated_in_pieces(name):
    made = check_cut(UPDATES[name], TABLE, in_slices=({0: (3, 4, 5)},))
    assert (made.num_shards, len(made.stages)) == (3, 1)


def test_a_loop_of_updates():
    def fun(x):
        return lax.fori_loop(0, 3, lambda _, x: diffused(x), x)

    made = check_cut(fun, TABLE, in_slices=({0: (3, 4, 5)},))
    assert (made.num_shards, len(made.stages)) == (3, 1)


@examples(4)
@given(st.data(), st.sampled_from(sorted(UPDATES)))
def test_updates_under_any_cut(data, name):
    made = plan(UPDATES[name], TABLE, in_slices=data.draw(cuts((TABLE,))))
    assert_same(made.run(TABLE), jax.jit(UPDATES[name])(TABLE))
