"""Effects in maps whose axis is longer than the devices: once for each element."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import shardmap as sm


def seen_by(mapped, x):
    seen = []
    mapped(seen)(x)
    jax.effects_barrier()
    return collections.Counter(seen)


@pytest.mark.parametrize("size", [1, 7, 8, 13, 16])
@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_debug_callback_sees_each_element_once(size, batch_size):
    def mapped(seen):
        def body(x):
            jax.debug.callback(lambda v: seen.append(float(v)), x * 2)
            return x

        return sm.spmap(body, batch_size=batch_size)

    x = np.arange(size, dtype=np.float32)
    assert seen_by(mapped, x) == {2.0 * k: 1 for k in range(size)}


@pytest.mark.parametrize("size", [7, 13])
def test_in_control_flow_and_in_jit(size):
    def mapped(seen):
        @jax.jit
        def note(x):
            jax.debug.callback(lambda v: seen.append(float(v)), x)
            return x + 100

        def body(x):
            return jax.lax.scan(lambda c, _: (note(c), None), x, None, length=2)[0]

        return jax.jit(sm.spmap(body))

    x = np.arange(size, dtype=np.float32)
    expected = [float(k + step) for k in range(size) for step in (0, 100)]
    assert seen_by(mapped, x) == collections.Counter(expected)


def test_a_callback_with_a_result():
    calls = []

    def host(x):
        calls.append(float(x))
        return np.float32(x * 3)

    def body(x):
        return io_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x) + 1

    x = np.arange(11, dtype=np.float32)
    result = sm.spmap(body)(x)
    np.testing.assert_array_equal(result, x * 3 + 1)
    assert sorted(calls) == x.tolist()


def test_an_inner_map_of_more_elements_than_devices():
    def mapped(seen):
        def body(x):
            jax.debug.callback(lambda v: seen.append(float(v)), x)
            return x

        return sm.spmap(sm.spmap(body))

    x = np.arange(21, dtype=np.float32).reshape(3, 7)
    assert seen_by(mapped, x) == {float(k): 1 for k in range(21)}


@pytest.mark.parametrize("size", [5, 8, 11, 16])
@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"lowering": "spmd"}])
def test_a_tap_sees_each_element_once(size, options):
    seen = []

    def mapped(x):
        return sm.tap(lambda v: seen.append(float(v)), x * 2) + 1

    x = np.arange(size, dtype=np.float32)
    np.testing.assert_array_equal(sm.spmap(mapped, **options)(x), 2 * x + 1)
    sm.taps_barrier()
    assert sorted(seen) == (2 * x).tolist()
