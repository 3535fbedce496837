"""`host_callback`: the parameters that it had, told as its tests told them."""

import io

import jax
import numpy as np
import pytest

import shardmap as sm
from shardmap.compat import host_callback as hcb


def test_a_tap_is_given_the_transforms_and_the_device():
    seen = {}

    def note(value, transforms, *, device, what):
        seen[device.id] = float(value), transforms, what

    f = sm.spmap(lambda x: hcb.id_tap(note, 2 * x, tap_with_device=True, what="w"))
    np.testing.assert_array_equal(f(np.arange(4.0)), [0, 2, 4, 6])
    hcb.barrier_wait("here")
    assert seen == {k: (2.0 * k, (), "w") for k in range(4)}


@pytest.mark.parametrize(
    "make",
    [
        lambda seen: lambda x, transforms: seen.append(x),
        lambda seen: lambda x, _: seen.append(x),
        lambda seen: lambda x, *, transforms: seen.append(x),
        lambda seen: lambda x, **named: seen.append(x),
        lambda seen: lambda x: seen.append(x),
    ],
)
def test_host_functions_of_all_times(make):
    seen = []
    assert hcb.id_tap(make(seen), 3) == 3
    assert seen == [3]


def test_result_and_device_index():
    seen = []

    def note(x, transforms, device):
        seen.append(device.id)

    f = sm.spmap(
        lambda x: hcb.id_tap(note, x, result=-x, tap_with_device=True, device_index=2)
    )
    np.testing.assert_array_equal(f(np.arange(4.0)), [0, -1, -2, -3])
    hcb.barrier_wait()
    assert seen == [2]


def test_a_print_is_one_text_for_each_device():
    out = io.StringIO()
    f = sm.spmap(
        lambda x: hcb.id_print(
            {"b": x, "a": x.astype(np.int32) + 1},
            what="it",
            tap_with_device=True,
            output_stream=out,
        )
    )
    f(np.arange(2.0))
    hcb.barrier_wait()
    texts = ["device:" + text for text in out.getvalue().split("device:")[1:]]
    assert sorted(texts) == [
        f"device: {jax.devices()[k]} what: it\n{{'a': {k + 1}, 'b': {k}.0}}\n"
        for k in range(2)
    ]


def test_a_call_gives_what_the_host_says():
    def host(value, *, device):
        return value["x"] * 10**device.id, np.int32(device.id)

    @sm.spmap
    def f(x):
        shapes = (jax.ShapeDtypeStruct((), "f"), jax.ShapeDtypeStruct((), "i"))
        return hcb.call(host, {"x": x}, result_shape=shapes, call_with_device=True)

    scaled, ids = f(np.ones(3, np.float32))
    np.testing.assert_array_equal(scaled, [1, 10, 100])
    np.testing.assert_array_equal(ids, [0, 1, 2])


def test_what_a_tap_raises_is_raised_by_the_barrier():
    def fail(x, transforms):
        raise KeyError("missing")

    jax.block_until_ready(sm.spmap(lambda x: hcb.id_tap(fail, x))(np.ones(1)))
    with pytest.raises(hcb.CallbackException, match="the tap fail failed on") as caught:
        hcb.barrier_wait()
    assert isinstance(caught.value.__cause__, KeyError)
    hcb.barrier_wait()


@pytest.mark.parametrize(
    "tap",
    [
        lambda fail: hcb.id_tap(lambda x, _: fail(x), 0),
        lambda fail: hcb.call(fail, 0),
        lambda fail: hcb.call(fail, 0, result_shape=0),
    ],
)
def test_what_a_tap_raises_outside_of_a_program_is_a_callback_exception(tap):
    def fail(x):
        raise KeyError("missing")

    with pytest.raises(hcb.CallbackException, match="KeyError: 'missing'") as caught:
        tap(fail)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("flavor", hcb.CallbackFlavor)
def test_every_flavor_of_the_last_years_taps(flavor):
    out = io.StringIO()

    @jax.jit
    def f(x):
        hcb.id_print(x, output_stream=out, callback_flavor=flavor)
        hcb.id_tap(lambda x, _: out.write("tapped"), x, callback_flavor=flavor)
        return hcb.call(np.negative, x, result_shape=x, callback_flavor=flavor)

    assert f(1.0) == -1
    hcb.barrier_wait()
    assert out.getvalue() == "1.0\ntapped"


def test_a_number_is_its_own_result_shape():
    result = hcb.call(lambda x: x + 1, 2.0, result_shape=2.0)
    assert (result, result.dtype) == (3, jax.dtypes.canonicalize_dtype(float))


def test_the_receiver_of_the_first_taps_waits():
    seen = []
    with hcb.outfeed_receiver(receiver_name="r"):
        jax.jit(lambda x: hcb.id_tap(lambda v, _: seen.append(int(v)), x))(7)
    assert seen == [7]
