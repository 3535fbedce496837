"""Effects in maps whose axis is longer than the devices: once for each element."""

import collections
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import shardmap as sm

# What is called how often: every kind of callback, in every place of a map

SCALAR = jax.ShapeDtypeStruct((), np.float32)


def called(seen):
    def host(value):
        seen.append(float(value))
        return np.float32(value)

    return host


KINDS = {
    "debug.callback": lambda host, x: (jax.debug.callback(host, x), x)[1],
    "debug.print": lambda host, x: (jax.debug.print("{}", x), x)[1],
    "io_callback": lambda host, x: (_io(host, x), x)[1],
    "ordered io_callback": lambda host, x: (_io(host, x, ordered=True), x)[1],
    "io_callback's result": lambda host, x: io_callback(host, SCALAR, x),
    "ordered result": lambda host, x: io_callback(host, SCALAR, x, ordered=True),
    "pure_callback": lambda host, x: jax.pure_callback(
        host, SCALAR, x, vmap_method="sequential"
    ),
    "pure_callback for one": lambda host, x: jax.pure_callback(host, SCALAR, x),
    "tap": lambda host, x: sm.tap(host, x),
    "tap's result": lambda host, x: sm.tap(host, x, result_shape=SCALAR),
}


def _io(host, x, **options):
    io_callback(lambda value: (host(value), None)[1], None, x, **options)


def around_a_map(f):
    def outer(x):
        return sm.spmap(lambda x: x + 0)(jnp.stack([f(x)] * 4))[0]

    return outer


def part_of_mesh(f):
    mesh = sm.make_mesh({"a": 4, "b": 2})
    return sm.spmap(f, mesh=mesh, mesh_axes="a")


PLACES = {
    "one each": ((8,), sm.spmap),
    "several": ((11,), sm.spmap),
    "in jit": ((11,), lambda f: jax.jit(sm.spmap(f))),
    "spmd": ((8,), lambda f: sm.spmap(f, lowering="spmd")),
    "spmd, several": ((11,), lambda f: sm.spmap(f, lowering="spmd")),
    "batch_size": ((11,), lambda f: sm.spmap(f, batch_size=1)),
    "nested": ((2, 4), lambda f: sm.spmap(sm.spmap(f))),
    "nested, several": ((3, 7), lambda f: sm.spmap(sm.spmap(f))),
    "nested spmd": ((3, 7), lambda f: sm.spmap(sm.spmap(f), lowering="spmd")),
    "outer": ((2,), lambda f: sm.spmap(around_a_map(f))),
    "outer, several": ((5,), lambda f: sm.spmap(around_a_map(f))),
    "part of a mesh": ((8,), part_of_mesh),
}
# Each device that has the value calls; a pure callback may be called any number of
# times, for empty places too.
EACH_DEVICE = {"outer": 4, "part of a mesh": 2}


@pytest.mark.few(1)
@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_each_element_calls_once_per_device(kind, place, capfd):
    shape, mapped = PLACES[place]
    x = np.arange(np.prod(shape), dtype=np.float32)
    seen = []
    f = mapped(lambda x: KINDS[kind](called(seen), x))
    np.testing.assert_array_equal(f(x.reshape(shape)), x.reshape(shape))
    sm.taps_barrier()
    if kind == "debug.print":
        seen = [float(line) for line in capfd.readouterr().out.split()]
    if kind.startswith("pure_callback"):
        assert set(seen) == set(x.tolist())
    else:
        times = EACH_DEVICE.get(place, 1)
        assert collections.Counter(seen) == dict.fromkeys(x.tolist(), times)


def in_control_flow(call):
    """In branches and loops that differ, in and out of a scan."""

    def f(x):
        def step(x, _):
            x = lax.cond(x > 5, call, lambda x: x, x)
            return lax.while_loop(lambda x: x < 3, lambda x: call(x) + 1, x), None

        return lax.scan(step, x, None, length=2)[0]

    return f


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "debug.print"])
@pytest.mark.parametrize("place", ["one each", "batch_size", "nested"])
def test_only_elements_that_get_there_call(kind, place):
    shape, mapped = PLACES[place]
    x = np.arange(np.prod(shape), dtype=np.float32)
    seen = []
    f = in_control_flow(lambda x: KINDS[kind](called(seen), x))
    np.testing.assert_array_equal(
        mapped(f)(x.reshape(shape)), np.maximum(x, 3).reshape(shape)
    )
    sm.taps_barrier()
    expected = collections.Counter({float(v): 2 for v in x if v > 5})
    expected.update(float(v) for start in (0, 1, 2) for v in range(start, 3))
    if kind.startswith("pure_callback"):
        assert set(seen) >= set(expected)
    else:
        assert collections.Counter(seen) == expected


@pytest.mark.few(1)
@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "debug.print"])
@pytest.mark.parametrize("place", ["several", "spmd, several"])
def test_vectorised_elements_call_together(kind, place):
    """Those that do not get there call too, as under `jax.vmap`."""
    shape, mapped = PLACES[place]
    x = np.arange(*shape, dtype=np.float32)
    seen = []
    f = mapped(in_control_flow(lambda x: KINDS[kind](called(seen), x)))
    if "io_callback" in kind or kind == "ordered result":
        with pytest.raises(
            NotImplementedError, match=r"io_callback in a cond, .* give the map batch_s"
        ):
            f(x)
        return
    if (kind, place) == ("tap's result", "several"):
        # The empty places would have no number that ends the loop.
        with pytest.raises(NotImplementedError, match="block has empty places"):
            f(x)
        return
    np.testing.assert_array_equal(f(x), np.maximum(x, 3))
    sm.taps_barrier()
    assert set(seen) == set(x.tolist())


def test_ordered_debug_callbacks_are_for_one_device():
    """JAX refuses several, and vectorises a loop's condition wrongly."""
    seen = []

    def f(x):
        def goes_on(x):
            jax.debug.callback(lambda v: seen.append(int(v)), x, ordered=True)
            return x < 2

        return lax.while_loop(goes_on, lambda x: x + 1, x)

    x = np.arange(4, dtype=np.int32)
    with pytest.raises(ValueError, match="not supported for more than 1 device"):
        sm.spmap(f)(x)
    first = {"devices": jax.devices()[:1]}
    with pytest.raises(NotImplementedError, match="an ordered call of the host in the"):
        sm.spmap(f, **first)(x)
    np.testing.assert_array_equal(sm.spmap(f, **first, batch_size=1)(x), [2, 2, 2, 3])
    jax.effects_barrier()
    assert seen == [0, 1, 2, 1, 2, 2, 3]


@pytest.mark.parametrize("count", [1, 8])
def test_ready_calls_keep_the_order_of_ordered_callbacks(count):
    """Also beside another map whose callbacks have the same effect."""
    seen = []

    def call(name, x):
        def host(x):
            time.sleep(0.001 if name == "a" else 0)
            seen.append((name, int(x)))

        io_callback(host, None, x, ordered=True)

    first = sm.spmap(lambda x: (call("a", x), call("b", x), x)[2])
    second = sm.spmap(lambda x: (call("c", x), x)[1])
    places = np.arange(count)
    for k in range(4):
        first(10 * k + places)
        second(10 * k + places)
    jax.effects_barrier()
    for place in places:
        here = [(name, x // 10) for name, x in seen if x % 10 == place]
        assert here == [(name, k) for k in range(4) for name in "abc"]


def test_io_callbacks_in_loops_of_several_elements_are_refused():
    def f(x):
        def body(carry):
            k, x = carry
            _io(lambda v: None, x)
            return k + 1, lax.psum(x, "i")

        return lax.while_loop(lambda carry: carry[0] < 2, body, (0, x))[1]

    x = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(sm.spmap(f, "i")(x), np.full(4, 24))
    with pytest.raises(
        NotImplementedError,
        match=r"a while, in a map over axis 'i' that vectorises 2 of 4 elements",
    ):
        sm.spmap(f, "i", devices=jax.devices()[:2])(x)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["tap", "io_callback", "debug.callback"])
def test_beside_partitions(kind):
    seen = []

    def f(x):
        KINDS[kind](called(seen), x[0, 0])
        return sm.sharded_jit(jnp.dot, in_parts=((2, 1), None), out_parts=(2, 1))(x, x)

    x = np.ones((4, 4, 4), np.float32) * np.arange(4, dtype=np.float32)[:, None, None]
    np.testing.assert_array_equal(sm.spmap(f)(x), x @ x)
    sm.taps_barrier()
    assert set(seen) == {0, 1, 2, 3}
