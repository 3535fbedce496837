"""One call of `spmap`, read: where its arrays are, and what tells the next one."""

import jax
import numpy as np

import shardmap as sm

X = np.ones((8, 3), np.float32)


def read(fun, *args, **options):
    mapped = sm.spmap(fun, "i", **options)
    return mapped._programs.infer_params(args, {})


def test_a_call_knows_its_devices_arrays_and_what_it_is():
    call = read(lambda x: x.sum(), X)
    assert [device.id for device in call.devices] == list(range(8))
    assert [s.spec for s in call.shardings.operands] == [jax.P("i")]
    operands, results = call.global_avals
    assert [aval.shape for aval in (*operands, *results)] == [(8, 3), (8,)]
    assert call.described == (
        "axis 'i' of 8 elements on devices [0, 1, 2, 3, 4, 5, 6, 7], elements "
        "['float32[3]']"
    )
    assert not call.communicates
    assert call.process_local is None


def test_constants_are_no_arguments():
    held = jax.numpy.ones(3)
    call = read(lambda x: jax.lax.psum(x * held, "i"), X)
    assert len(call.body.constants) == 1
    assert len(call.shardings.operands) == 1
    assert call.communicates
