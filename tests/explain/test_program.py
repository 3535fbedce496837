"""What becomes of a function: its devices, arrays and notes, compiled or not."""

import jax
import numpy as np
from jax import lax

import shardmap as sm

X = np.ones((8, 4), np.float32)


def of(fun, *args):
    return sm.explain(fun)(*args)


def test_a_map_is_compiled_for_its_devices():
    program = of(sm.spmap(lambda x: lax.psum(x, "i"), "i"), X)
    assert program.cost is not None
    assert (program.num_devices, program.available) == (8, jax.local_device_count())
    assert program.mesh == (("i", 8),)
    assert [array.path for array in program.arrays] == ["x", "result"]
    assert [each.operation for each in program.collectives] == ["psum"]
    assert program.notes == ()
