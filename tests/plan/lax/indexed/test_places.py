"""Places that are known when a program runs, and parts of what is taken there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardmap.plan.engine.nodes import flatten
from shardmap.plan.lax.indexed.places import as_int32, combiner_of
from shardmap.plan.lax.table import CALLS
from tests.plan.checks import check_cut

EXTREMES = {
    "int8": [-128, 127],
    "uint8": [0, 255],
    "uint32": [0, 2**32 - 1],
    "int64": [-(2**63), 2**63 - 1],
    "uint64": [0, 2**64 - 1],
}


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", EXTREMES)
def test_what_is_far_outside_stays_far_outside(dtype):
    """Also when the start of a box is subtracted from it."""
    with jax.enable_x64(True):
        found = as_int32(np.array(EXTREMES[dtype], dtype))
    assert found.dtype == jnp.int32
    least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    assert found.tolist() == [min(max(n, least), most) for n in EXTREMES[dtype]]


def gather_of(dtype, rows=6):
    def taken(x, i):
        return x[i]

    with jax.enable_x64(rows >= 2**31):
        index = jax.ShapeDtypeStruct((3,), jnp.asarray(0).dtype)
        x = jax.ShapeDtypeStruct((rows, 2), dtype)
        graph = flatten(jax.make_jaxpr(taken)(x, index), CALLS)
    return next(node for node in graph.nodes if node.name == "gather")


def test_parts_are_added_or_of_truth_values_any():
    assert combiner_of(gather_of(np.float32)) == "add"
    assert combiner_of(gather_of(np.int8)) == "add"
    assert combiner_of(gather_of(np.bool_)) == "or"


def test_keys_and_places_that_are_no_int32_are_no_parts():
    assert combiner_of(gather_of(jax.random.key(0).dtype)) is None
    assert combiner_of(gather_of(np.int8, 2**31 - 1)) == "add"
    assert combiner_of(gather_of(np.int8, 2**31)) is None


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", EXTREMES)
def test_places_of_any_integers(dtype):
    numbers = lax.GatherDimensionNumbers((), (0,), (0,))

    def taken(x, i):
        return lax.gather(x, i[:, None], numbers, (1,))

    with jax.enable_x64(True):
        i = np.array([3, 1, 0, 7], dtype)
        check_cut(taken, np.arange(12.0), i, in_slices=({0: 3}, {0: 2}))
