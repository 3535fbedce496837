"""Taps: who calls the host function, on which devices and in which order.

The cases with numbers from the old `host_callback` tests are in the first part.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardmap as sm
from shardmap.api import taps
from tests.api.tap_recorder import (
    TWO,
    Recorder,
    numbered,
    spmap_on_two,
    tapped_map_of_map,
)


def whole(mesh_devices):
    mesh = Mesh(np.array(mesh_devices), "d")
    return NamedSharding(mesh, PartitionSpec("d"))


# The old cases


def test_eager(recorder):
    x = 3.0
    result = recorder.tap((2 * x, 3 * x), result=4 * x)
    assert result == 12.0
    assert recorder.wait() == {0: [(6.0, 9.0)]}


def test_call_is_done_when_an_eager_tap_returns(recorder):
    recorder.tap(jnp.float32(3.0))
    assert recorder.calls == {0: [3.0]}
    recorder.wait()


def test_jit_on_each_device_in_turn(recorder):
    @jax.jit
    def two_taps(x):
        return recorder.tap(recorder.tap(x) + 1)

    for device in TWO:
        assert two_taps(jax.device_put(111, device)) == 112
    assert recorder.wait() == {device: [111, 112] for device in range(2)}


def test_map_of_a_pair(recorder):
    def cube(x):
        y, square = recorder.tap((x, x * x))
        return y * square

    np.testing.assert_array_equal(spmap_on_two(cube)(np.array([3, 4])), [27, 64])
    assert recorder.wait() == {0: [(3, 9)], 1: [(4, 16)]}


def test_map_of_vmap(recorder):
    f = spmap_on_two(jax.vmap(lambda x: recorder.tap(2 * x)))
    np.testing.assert_array_equal(f(numbered(2, 3)), 2 * numbered(2, 3))
    assert recorder.wait() == {0: [[0, 2, 4]], 1: [[20, 22, 24]]}


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [(2, 3, 2), (2, 1, 3), (4, 2)])
def test_map_of_map_with_work_around_on_more_devices(recorder, shape):
    """What the outer function computes is there on each device of its element."""
    x = numbered(*shape)
    f = sm.spmap(tapped_map_of_map(recorder))
    np.testing.assert_array_equal(f(x), 2 * (x + 1) + 1)
    outer, inner = shape[:2]
    assert recorder.wait() == {
        inner * i + j: [
            (x[i] + 1).tolist(),
            (2 * (x[i, j] + 1)).tolist(),
            (2 * (x[i] + 1) + 1).tolist(),
        ]
        for i in range(outer)
        for j in range(inner)
    }


def test_vmap_of_map(recorder):
    f = jax.vmap(spmap_on_two(lambda x: recorder.tap(2 * x)))
    x = numbered(2, 2, 3)
    np.testing.assert_array_equal(f(x), 2 * x)
    assert recorder.wait() == {
        0: [[[0, 2, 4], [200, 202, 204]]],
        1: [[[20, 22, 24], [220, 222, 224]]],
    }


def test_jit_with_work_around_a_map(recorder):
    """Outside the map values are whole, and the first device's."""
    x = numbered(2, 3)
    f = jax.jit(tapped_map_of_map(recorder))
    np.testing.assert_array_equal(f(x), 2 * (x + 1) + 1)
    assert recorder.wait() == {
        0: [[[1, 2, 3], [11, 12, 13]], [2, 4, 6], [[3, 5, 7], [23, 25, 27]]],
        1: [[22, 24, 26]],
    }


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_sharded_jit_without_a_map(recorder, order):
    x = np.array([[0, 1, 2], [10, 11, 12]], np.int32)
    placed = jax.device_put(x, whole([TWO[k] for k in order]))
    f = jax.jit(lambda x: 5 * recorder.tap(x @ jnp.ones((3, 4), jnp.int32)))
    np.testing.assert_array_equal(f(placed), [[15] * 4, [165] * 4])
    assert recorder.wait() == {order[0]: [[[3, 3, 3, 3], [33, 33, 33, 33]]]}


def test_a_tap_is_one_equation_with_an_effect(recorder):
    def f(x):
        return jnp.sin(recorder.tap(x))

    jaxpr = jax.make_jaxpr(spmap_on_two(f, "i"))(np.ones(1)).jaxpr
    (equation,) = jaxpr.eqns
    inside = equation.params["call_jaxpr"]
    assert [e.primitive.name for e in inside.eqns] == ["tap", "sin"]
    assert [str(e) for e in jaxpr.effects] == ["Tap"]


# Order


def test_taps_of_a_device_are_in_order(recorder):
    """The values come at different times, and none depends on another."""

    def f(x):
        for k in range(20):
            late = jnp.sin(x @ x.T).sum() if k % 3 == 0 else x[0, 0]
            recorder.tap(k + 0 * late.astype(int))
        return x

    mapped = sm.spmap(f)
    for _ in range(5):
        mapped(np.ones((8, 100, 100), np.float32))
        assert recorder.wait() == {device: [*range(20)] for device in range(8)}


def test_programs_are_in_order(recorder):
    def slow(value, device):
        time.sleep(0.01)
        recorder(value, device)

    f = sm.spmap(lambda x: taps.tap(slow, x, with_device=True))
    g = jax.jit(lambda x: recorder.tap(x))
    expected = {device: [] for device in range(8)}
    for k in range(4):
        f(np.full(8, k))
        recorder.tap(jax.device_put(10 + k, jax.devices()[3]))
        g(jax.device_put(20 + k, jax.devices()[k]))
        for device, calls in expected.items():
            calls += [k] + [10 + k] * (device == 3) + [20 + k] * (device == k)
    assert recorder.wait() == expected


@pytest.mark.deep
def test_large_values_on_all_devices_do_not_hang(recorder):
    """The copies must not wait for a thread: all of them are in callbacks."""
    calls = []

    def look(value):
        calls.append(value.nbytes)

    def f(x):
        for k in range(10):
            taps.tap(look, x + k)
        return jax.lax.psum(x[0, 0], "i")

    sm.spmap(f, "i")(np.ones((8, 1000, 1000), np.float32))
    taps.taps_barrier()
    assert calls == [4_000_000] * 8 * 10


def test_threads(recorder):
    """Each thread's own barrier waits for its own programs."""

    def work(k):
        mine = Recorder()
        f = sm.spmap(lambda x: recorder.tap(mine.tap(x)) + k)
        for _ in range(5):
            f(np.full(k + 1, k))
            assert mine.wait() == {device: [k] for device in range(k + 1)}

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    calls = recorder.wait()
    assert {device: sorted(values) for device, values in calls.items()} == {
        device: [k for k in range(device, 8) for _ in range(5)] for device in range(8)
    }


# Devices


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("step", [1, -1])
def test_devices(recorder, count, step):
    devices = jax.devices()[::step][:count]
    f = sm.spmap(lambda x: recorder.tap(x), devices=devices)
    np.testing.assert_array_equal(f(np.arange(count)), np.arange(count))
    assert recorder.wait() == {device.id: [k] for k, device in enumerate(devices)}


def test_the_device_is_a_jax_device():
    seen = []
    taps.tap(lambda value, device: seen.append(device), 1.0, with_device=True)
    jax.jit(
        lambda x: taps.tap(lambda _, device: seen.append(device), x, with_device=1)
    )(jax.device_put(1.0, TWO[1]))
    taps.taps_barrier()
    assert seen == TWO


def test_eager_tap_of_a_placed_array(recorder):
    recorder.tap(jax.device_put(1.5, jax.devices()[5]))
    assert recorder.wait() == {5: [1.5]}


def test_eager_tap_of_a_sharded_array_has_the_whole_value(recorder):
    recorder.tap(jax.device_put(np.arange(4), whole(jax.devices()[4:])))
    assert recorder.wait() == {4: [[0, 1, 2, 3]]}


def test_inside_shard_map(recorder):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    spec = PartitionSpec("b", "a")
    f = jax.shard_map(
        lambda x: recorder.tap(x).sum(keepdims=True),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    x = numbered(2, 4)
    np.testing.assert_array_equal(jax.jit(f)(x), x)
    assert recorder.wait() == {
        2 * a + b: [[[10 * b + a]]] for a in range(4) for b in range(2)
    }


@pytest.mark.parametrize("inner_axes", [{"b"}, set()])
def test_shard_maps_that_cannot_be_tapped(recorder, inner_axes):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))

    def tapped(x):
        return recorder.tap(x)

    def f(x):
        if not inner_axes:
            return tapped(x)
        spec = PartitionSpec("b")
        return jax.shard_map(
            tapped, in_specs=spec, out_specs=spec, axis_names=inner_axes
        )(x)

    spec = PartitionSpec("a")
    outer = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"a"})
    with pytest.raises(NotImplementedError, match=r"the tap .*Recorder.*inside one"):
        jax.jit(outer)(np.ones(8))
