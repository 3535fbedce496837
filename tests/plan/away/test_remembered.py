"""The arguments that a plan was made for, as long as somebody else holds them."""

import gc

import jax
import numpy as np
import pytest

from shardmap.plan.away.remembered import Remembered, remembered
from shardmap.plan.plan import plan


def test_arguments_that_are_gone_are_asked_for():
    made = plan(
        lambda x: x * 2 + 1, jax.ShapeDtypeStruct((8, 2), np.float32), in_slices={0: 2}
    )
    with pytest.raises(ValueError, match="were shapes only, or are gone"):
        made.traffic()
    assert made.traffic(np.ones((8, 2), np.float32)).here == 128


def test_arrays_are_not_kept_alive_and_numbers_are():
    x = np.ones((8, 2), np.float32)
    kept = Remembered((x, {"by": 2.0}))
    [array, named] = kept.args()
    assert array is x
    assert named == {"by": 2.0}
    del array, x
    gc.collect()
    with pytest.raises(ValueError, match="are gone: give them again"):
        kept.args()
    assert remembered(None) == ()
