"""Comparing the copies of results after a run."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm

EIGHT = np.arange(8, dtype=np.float32)


@pytest.mark.parametrize("true", [True, np.bool_(True)])
def test_copies_that_agree_pass(true):
    mapped = sm.spmap(
        lambda x, key: (lax.pmean(x, "i"), key, x),
        "i",
        in_axes=(0, None),
        out_axes=(None, None, 0),
        check_replicas=true,
    )
    for _ in range(2):
        mean, _, x = mapped(EIGHT, jax.random.key(0))
        np.testing.assert_array_equal(mean, 3.5)
        np.testing.assert_array_equal(x, EIGHT)


def test_nans_in_all_copies_agree():
    mapped = sm.spmap(
        lambda x: lax.psum(x * jnp.nan, "i"), "i", out_axes=None, check_replicas=True
    )
    assert np.isnan(mapped(EIGHT))


def test_copies_that_differ_are_named():
    calls = itertools.count()

    def body(x):
        counted = jax.pure_callback(
            lambda: np.float32([next(calls), 7]),
            jax.ShapeDtypeStruct((2,), jnp.float32),
        )
        return {"x": x, "counted": counted}

    axes = {"x": 0, "counted": None}
    mapped = sm.spmap(body, out_axes=axes, check_replicas=True)
    text = (
        r"copies of result\['counted'\] disagree: of its 2 values, 1 differ between "
        r"\S+:0 and \S+:1\. Something in the function is not the same on every device"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=text):
            mapped(EIGHT)
    sm.spmap(body, out_axes=axes)(EIGHT)
