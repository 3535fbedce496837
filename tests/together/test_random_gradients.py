"""Gradients of random maps, first and second ones, are those of `jax.vmap`."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmap as sm
from tests.map_programs import assert_same
from tests.strategies import examples
from tests.together.random_gradients import draw, gradients_of, has

FOUR = {"devices": 4}
WAYS = {
    "one element on each device": (4, FOUR),
    "two on each": (8, FOUR),
    "one device": (4, {"devices": 1}),
    "spmd": (4, {"lowering": "spmd"}),
    "batch_size": (8, {"devices": 2, "batch_size": 3}),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("way", WAYS)
@given(seed=st.integers(0, 2**30))
@settings(examples(5))
def test_random_gradients(way, seed):
    size, options = WAYS[way]
    if count := options.get("devices"):
        options = options | {"devices": jax.devices()[:count]}
    rng = np.random.default_rng([seed, [*WAYS].index(way)])
    # A loop over the elements reduces at the end only.
    program = draw(rng, int(rng.integers(2, 7)), together=way != "batch_size")
    # JAX has no second derivatives of references.
    twice = bool(rng.random() < 0.2) and not has(program, ["written"])
    is_jitted = rng.random() < 0.5
    args = [rng.uniform(-1, 1, shape) for shape in ((3,), (3,), (size, 3))]
    with jax.enable_x64(True):
        expected = jax.jit(gradients_of(program, jax.vmap, size, twice))(*args)
        given = gradients_of(program, sm.spmap, size, twice, **options)
        try:
            results = (jax.jit(given) if is_jitted else given)(*args)
        except ValueError as error:
            # The cotangent of what is shared in a checkpoint is added up there.
            if "batch_size=3 is less than the 4 elements" not in str(error):
                raise
            return
        assert_same(results, expected, 1e-6)
