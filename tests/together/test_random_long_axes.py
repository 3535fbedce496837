"""Half precision on axes of thousands of elements, against sums in float64.

The random programs have few elements, where half precision loses nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import shardmap as sm
from tests.strategies import examples

DTYPES = ["bfloat16", "float16"]


@pytest.mark.deep
@given(
    size=st.integers(2000, 9000),
    dtype=st.sampled_from(DTYPES),
    devices=st.integers(1, 8),
    batch_size=st.sampled_from([None, 1, 7, 1000]),
    lowering=st.sampled_from(["manual", "spmd"]),
    cut=st.none() | st.integers(1, 1999),
    operation=st.sampled_from([lax.psum, lax.pmean]),
    seed=st.integers(0, 1000),
)
@settings(examples(6))
def test_sums_and_gradients(
    size, dtype, devices, batch_size, lowering, cut, operation, seed
):
    # Groups need all elements at once.
    groups = None
    if cut is not None and operation is lax.psum:
        groups = [[*range(cut)], [*range(cut, size)]]
    if groups or lowering == "spmd":
        batch_size = None
    out_axes = 0 if groups else None
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.uniform(0.5, 1.5, (size, 2)), dtype)
    w = jnp.asarray(rng.uniform(0.5, 1.5, 2), dtype)

    def element(x, w):
        if operation is lax.psum:
            return lax.psum(x * w, "i", axis_index_groups=groups)
        return operation(x * w, "i")

    mapped = sm.spmap(
        element,
        "i",
        in_axes=(0, None),
        out_axes=out_axes,
        devices=jax.devices()[:devices],
        batch_size=batch_size,
        lowering=lowering,
    )
    products = np.asarray(x * w[None], np.float64)
    total = products.sum(0)
    if operation is lax.pmean:
        total = total / size
    expected = total
    if groups:
        sums = products[:cut].sum(0), products[cut:].sum(0)
        expected = np.stack([sums[k >= cut] for k in range(size)])
    assert_rounded(mapped(x, w), expected)
    if out_axes is not None:
        return

    def loss(x, w):
        return mapped(x, w).astype(np.float32).sum()

    of_x, of_w = jax.grad(loss, (0, 1))(x, w)
    share = 1 / size if operation is lax.pmean else 1
    assert_rounded(of_x, np.broadcast_to(np.asarray(w, np.float64) * share, x.shape))
    assert_rounded(of_w, np.asarray(x, np.float64).sum(0) * share)


def assert_rounded(values, expected):
    """Each rounded some times: once a device, and once for each that adds it."""
    np.testing.assert_allclose(np.asarray(values, np.float64), expected, rtol=2**-5)
