"""Places that are known when a program runs, and parts of what is taken there."""

import jax
import numpy as np
import pytest
from jax import lax

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
def test_places_of_any_integers(dtype):
    numbers = lax.GatherDimensionNumbers((), (0,), (0,))

    def taken(x, i):
        return lax.gather(x, i[:, None], numbers, (1,))

    with jax.enable_x64(True):
        i = np.array([3, 1, 0, 7, *EXTREMES[dtype]], dtype)
        check_cut(taken, np.arange(12.0), i, in_slices=({0: 3}, {0: 2}))
