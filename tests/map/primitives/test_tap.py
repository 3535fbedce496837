"""Taps: whose device is said, calls for one device only, and values that come back."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardmap as sm
from tests.api.tap_recorder import TWO, spmap_on_two

SCALAR = jax.ShapeDtypeStruct((), np.float32)


def devices_of(mapped, x):
    """Which devices each element is tapped on."""
    seen = collections.defaultdict(set)

    def note(value, device):
        seen[int(value)].add(device.id)

    mapped(lambda x: sm.tap(note, x, with_device=True))(x)
    sm.taps_barrier()
    return dict(seen)


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


# Under the partitioner


def test_one_device_calls_for_all_elements_under_the_partitioner():
    seen = devices_of(lambda f: sm.spmap(f, lowering="spmd"), numbers(11))
    assert seen == {k: {0} for k in range(11)}


# One device only


def test_calls_for_one_device_of_a_map(recorder):
    f = sm.spmap(lambda x: recorder.tap(x, device_index=3))
    np.testing.assert_array_equal(f(numbers(16)), numbers(16))
    assert recorder.wait() == {3: [6, 7]}


@pytest.mark.parametrize("index", [0, 1])
def test_the_whole_value_on_one_device(recorder, index):
    """A case with numbers from the old `host_callback` tests."""
    x = np.array([[0, 1, 2], [10, 11, 12]], np.int32)
    placed = jax.device_put(
        x, NamedSharding(Mesh(np.array(TWO), "d"), PartitionSpec("d"))
    )
    ones = jnp.ones((3, 4), jnp.int32)
    f = jax.jit(lambda x: 5 * recorder.tap(x @ ones, device_index=index))
    np.testing.assert_array_equal(f(placed), [[15] * 4, [165] * 4])
    assert recorder.wait() == {index: [[[3, 3, 3, 3], [33, 33, 33, 33]]]}


def test_print_for_one_device(capsys):
    f = spmap_on_two(lambda x: sm.tap_print(x, device_index=1, with_device=True))
    f(numbers(2))
    sm.taps_barrier()
    assert capsys.readouterr().out == "cpu:1: 1\n"


@pytest.mark.parametrize("transform", [jax.jit, spmap_on_two])
def test_a_device_that_is_not_there(recorder, transform):
    count = 1 if transform is jax.jit else 2
    with pytest.raises(
        ValueError, match=rf"has device_index=5, but the program is for {count} device"
    ):
        transform(lambda x: recorder.tap(x, device_index=5))(numbers(2))


def test_a_negative_device(recorder):
    with pytest.raises(ValueError, match="a device_index from 0 on, got -1"):
        recorder.tap(1, device_index=-1)


# Values that come back


def scaled(value, device):
    return np.float32(10 * value + device.id)


LAYOUTS = {
    "one each": (8, {}),
    "several": (11, {}),
    "spmd": (8, {"lowering": "spmd"}),
    "spmd, several": (11, {"lowering": "spmd"}),
    "batch_size": (11, {"batch_size": 1}),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_come_back_to_a_map(layout):
    size, options = LAYOUTS[layout]
    x = numbers(size).astype(np.float32)
    f = sm.spmap(
        lambda x: 2 * sm.tap(scaled, x, result_shape=SCALAR, with_device=True),
        **options,
    )
    devices = 0 if "lowering" in options else numbers(size) // -(-size // 8)
    expected = 2 * (10 * x + devices)
    np.testing.assert_array_equal(f(x), expected)
    np.testing.assert_array_equal(jax.jit(f)(x), expected)
    sm.taps_barrier()


def test_pytrees_come_back():
    def host(value):
        return {"a": value["x"] + 1, "b": (np.zeros(2, np.int32), True)}

    shape = {
        "a": SCALAR,
        "b": (
            jax.ShapeDtypeStruct((2,), np.int32),
            jax.ShapeDtypeStruct((), np.bool_),
        ),
    }
    result = jax.jit(lambda x: sm.tap(host, {"x": x}, result_shape=shape))(
        np.float32(3)
    )
    assert (result["a"], result["b"][0].tolist(), result["b"][1]) == (4, [0, 0], True)
    assert result["b"][1].dtype == bool


def test_under_vmap_each_element_is_a_call():
    calls = []

    def host(pair):
        calls.append(jax.tree.map(float, pair))
        return pair[0] * pair[1]

    f = jax.vmap(
        lambda x, y: sm.tap(host, (x, y), result_shape=SCALAR), in_axes=(0, None)
    )
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(f)(x, np.float32(2)), 2 * x)
    sm.taps_barrier()
    assert calls == [(0, 2), (1, 2), (2, 2)]


def test_values_for_the_steps_of_a_loop():
    def f(x):
        def goes_on(x):
            return sm.tap(lambda v: v < 5, x, result_shape=_bool())

        return lax.while_loop(goes_on, lambda x: x + 2, x)

    expected = [6, 5, 6, 5, 6, 5, 6, 7, 8, 9, 10]
    np.testing.assert_array_equal(sm.spmap(f)(numbers(8)), expected[:8])
    np.testing.assert_array_equal(sm.spmap(f, batch_size=1)(numbers(11)), expected)
    sm.taps_barrier()


def _bool():
    return jax.ShapeDtypeStruct((), np.bool_)


def test_values_have_no_derivative():
    def f(x):
        return sm.tap(np.sin, x, result_shape=SCALAR)

    message = "the tap sin returns values to a program that is differentiated"
    for g in (f, lambda x: sm.spmap(f)(x[None])[0]):
        with pytest.raises(NotImplementedError, match=message):
            jax.grad(g)(jnp.float32(1))
    assert jax.grad(lambda x: x * f(lax.stop_gradient(x)))(0.0) == 0
    count = jax.ShapeDtypeStruct((), np.int32)
    assert (
        jax.grad(
            lambda x: x * sm.tap(lambda v: 3, x, result_shape=count).astype(np.float32)
        )(1.0)
        == 3
    )


def refuse(_):
    raise ValueError("no")


def test_a_failure_leaves_no_number():
    f = sm.spmap(lambda x: sm.tap(refuse, x, result_shape=(SCALAR, _bool())))
    inexact, boolean = f(numbers(3))
    assert np.isnan(inexact).all()
    assert not boolean.any()
    with pytest.raises(RuntimeError, match=r"refuse failed .* no \(and 2 more"):
        sm.taps_barrier()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ((1, 2), r"returned PyTreeDef\(\(\*, \*\)\), but result_shape is PyTreeDef"),
        (np.ones(3, np.float32), r"returned float32\[3\], but result_shape says float"),
        (1j, r"returned complex128\[\], but result_shape says float32\[\]"),
    ],
)
def test_what_was_not_promised(returned, message):
    with pytest.raises(RuntimeError, match=message):
        sm.tap(lambda _: returned, 1.0, result_shape=SCALAR)


def test_promises_that_cannot_be_made():
    with pytest.raises(TypeError, match=r"leaves have a shape and a dtype.* one is 3"):
        sm.tap(refuse, 1.0, result_shape=3)
    with pytest.raises(TypeError, match="cannot return key<"):
        sm.tap(refuse, 1.0, result_shape=jax.random.key(0))
    with pytest.raises(ValueError, match="tap got result and result_shape"):
        sm.tap(refuse, 1.0, result=1.0, result_shape=SCALAR)
    with pytest.raises(ValueError, match="in a map every device needs a result"):
        spmap_on_two(lambda x: sm.tap(refuse, x, result_shape=x, device_index=1))(
            numbers(2)
        )


# Copies


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("names", "shape"), [(("i", "_replicas"), (4, 2)), (("_replicas", "i"), (2, 4))]
)
def test_copies_of_a_map_call_once(recorder, names, shape):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), names)
    mapped = functools.partial(sm.spmap, axis_name="i", mesh=mesh, mesh_axes="i")
    x = numbers(8).astype(np.float32)
    np.testing.assert_array_equal(mapped(lambda x: recorder.tap(x) + 1)(x), x + 1)
    devices = sm.submesh(mesh, ("i",)).devices
    assert recorder.wait() == {
        device.id: part.tolist()
        for device, part in zip(devices, np.split(x, len(devices)), strict=True)
    }
    calls = []

    def host(value):
        calls.append(float(value))
        return np.float32(10 * value)

    result = mapped(lambda x: sm.tap(host, x, result_shape=SCALAR))(x)
    sm.taps_barrier()
    for shard in result.addressable_shards:
        np.testing.assert_array_equal(shard.data, 10 * x[shard.index])
    assert sorted(calls) == x.tolist()


def test_copies_in_a_shard_map_call_once(recorder):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("i", "_replicas"))
    spec = PartitionSpec("i")
    f = jax.shard_map(
        lambda x: recorder.tap(x), mesh=mesh, in_specs=spec, out_specs=spec
    )
    jax.jit(f)(numbers(4))
    assert recorder.wait() == {0: [[0]], 2: [[1]], 4: [[2]], 6: [[3]]}
