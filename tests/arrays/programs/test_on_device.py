"""Programs over the arrays of one device: where they run, and where results may go."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from shardmap.arrays.programs.on_device import operand, program


def run_on(device, fun, arrays):
    return program(device, fun, tuple(map(operand, arrays)))(*arrays)


def double(*arrays):
    return [array * 2 for array in arrays]


def on(number, value=1.0):
    return jax.device_put(np.full(3, value, np.float32), jax.devices()[number])


def check(number):
    device = jax.devices()[number]
    (result,) = run_on(device, double, [on(number)])
    assert result.devices() == {device}
    assert not result.committed
    np.testing.assert_array_equal(result, [2, 2, 2])


@pytest.mark.parametrize("number", [0, 3])
def test_results_are_on_the_device_and_uncommitted(number):
    check(number)


def test_results_meet_arrays_from_anywhere():
    (result,) = run_on(jax.devices()[3], double, [on(3)])
    total = result + on(5)
    assert total.devices() == {jax.devices()[5]}
    np.testing.assert_array_equal(total, [3, 3, 3])


def test_committing_a_result_copies_nothing():
    (result,) = run_on(jax.devices()[3], double, [on(3)])
    committed = jax.device_put(result, result.device)
    assert committed.committed
    assert committed.unsafe_buffer_pointer() == result.unsafe_buffer_pointer()


def new_program():
    """A function that no program was compiled for."""
    return lambda x: [x + 1]


def test_whatever_is_set_where_it_is_compiled():
    device = jax.devices()[3]
    mesh = jax.make_mesh((8,), ("i",))
    array = on(3)

    def run():
        (result,) = run_on(device, new_program(), [array])
        assert result.devices() == {device}
        assert not result.committed

    with jax.set_mesh(mesh):
        run()
    with jax.default_device(jax.devices()[1]):
        run()

    @jax.jit
    def traced(x):
        run()
        return x

    traced(1.0)


def test_wide_dtypes_stay_wide():
    with jax.enable_x64(True):
        wide = jax.device_put(np.ones(2), jax.devices()[2])
    (result,) = run_on(jax.devices()[2], new_program(), [wide])
    assert result.dtype == np.float64
    assert not result.committed


def test_weak_types_stay_weak():
    weak = jnp.asarray(2.0)
    assert weak.weak_type
    (result,) = run_on(jax.devices()[0], new_program(), [weak])
    assert result.weak_type
    (result,) = run_on(jax.devices()[0], new_program(), [jnp.float32(2)])
    assert not result.weak_type


def test_without_jit():
    with jax.disable_jit():
        (result,) = run_on(jax.devices()[3], double, [on(3)])
    np.testing.assert_array_equal(result, [2, 2, 2])


def test_arrays_in_host_memory():
    there = SingleDeviceSharding(jax.devices()[3], memory_kind="pinned_host")
    array = jax.device_put(np.ones((1, 3), np.float32), there)
    (result,) = run_on(jax.devices()[3], lambda x: [jax.lax.squeeze(x, (0,))], [array])
    np.testing.assert_array_equal(result, [1, 1, 1])


def test_an_equal_function_is_compiled_once():
    traces = []

    class Counted:
        def __call__(self, x):
            traces.append(x)
            return [x]

        def __eq__(self, other):
            return isinstance(other, Counted)

        def __hash__(self):
            return 0

    for _ in range(3):
        run_on(jax.devices()[1], Counted(), [on(1)])
    assert len(traces) == 1
