"""Maps that the partitioner cuts: padded to whole blocks, and laid on the mesh."""

import numpy as np
import pytest
from jax import lax

import shardmap as sm

MESH = sm.make_mesh({"x": 8})


@pytest.mark.few(2)
@pytest.mark.parametrize("size", [8, 16, 5, 11])
def test_elements_are_laid_in_blocks_and_padding_is_taken_off(size):
    x = np.arange(2.0 * size, dtype=np.float32).reshape(size, 2)
    mapped = sm.spmap(
        lambda x: (x * 2, lax.pmax(x, "i")),
        "i",
        lowering="spmd",
        mesh=MESH,
        mesh_axes="x",
        out_axes=(1, None),
    )
    doubled, most = mapped(x)
    np.testing.assert_array_equal(doubled, 2 * x.T)
    np.testing.assert_array_equal(most, x.max(0))
    text = mapped.lower(x).as_text()
    # Of what does not divide the last is there again, behind.
    padded = -(-size // 8) * 8
    assert (f"tensor<{padded}x2xf32>" in text) or size % 8 == 0
