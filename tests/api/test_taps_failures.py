"""Taps that fail, and taps that print."""

import functools
import io
import re

import jax
import numpy as np
import pytest

import shardmap as sm
from shardmap.api import taps
from tests.api.tap_recorder import (
    TWO,
    spmap_on_two,
)


def refuse_large(value):
    if value > 2:
        raise ValueError(f"{value} is large")


def test_a_failure_names_the_tap():
    y = sm.spmap(lambda x: taps.tap(refuse_large, x) + 1)(np.arange(4))
    np.testing.assert_array_equal(y, [1, 2, 3, 4])
    message = "the tap refuse_large failed on device cpu:3: ValueError: 3 is large"
    with pytest.raises(RuntimeError, match=f"^{message}$") as caught:
        taps.taps_barrier()
    assert isinstance(caught.value.__cause__, ValueError)
    taps.taps_barrier()


def test_an_eager_failure_is_raised_at_once():
    with pytest.raises(RuntimeError, match=r"refuse_large failed on device cpu:1: Val"):
        taps.tap(refuse_large, jax.device_put(5, TWO[1]))
    taps.taps_barrier()


def test_everything_works_after_a_failure(recorder):
    """With a collective behind the tap, and with the next programs under way."""

    def f(x):
        x = recorder.tap(taps.tap(refuse_large, x))
        return jax.lax.psum(taps.tap(refuse_large, x + 1), "i")

    mapped = sm.spmap(f, "i")
    for _ in range(3):
        for _ in range(3):
            assert mapped(np.arange(4))[0] == 10
        with pytest.raises(RuntimeError, match=r"and 8 more calls of taps failed"):
            taps.taps_barrier()
        assert mapped(np.zeros(4, int))[0] == 4
        assert recorder.wait() == {device: [device] * 3 + [0] for device in range(4)}
    assert sm.spmap(lambda x: x + 1)(np.arange(8))[7] == 8


def test_what_is_no_exception_is_reported_too():
    def leave(_):
        raise SystemExit(3)

    jax.jit(lambda x: taps.tap(leave, x))(1.0)
    with pytest.raises(RuntimeError, match=r"the tap leave failed .*: SystemExit: 3"):
        taps.taps_barrier()


def test_only_the_first_failure_is_logged_at_length(caplog):
    for _ in range(2):
        caplog.clear()
        sm.spmap(lambda x: taps.tap(refuse_large, x))(np.full(8, 3))
        with pytest.raises(RuntimeError, match=r"and 7 more calls of taps failed"):
            taps.taps_barrier()
        assert caplog.text.count("Traceback") == 1
        assert caplog.text.count("taps_barrier raises this, and counts") == 1


def test_functions_without_a_name():
    call = functools.partial(refuse_large)
    with pytest.raises(RuntimeError, match=re.escape(f"the tap {call!r} failed")):
        taps.tap(call, 9)


def test_print(capsys):
    x = jax.jit(lambda x: taps.tap_print(x))(np.arange(3))
    taps.taps_barrier()
    assert capsys.readouterr().out == "[0 1 2]\n"
    np.testing.assert_array_equal(x, [0, 1, 2])


def test_print_with_text_and_device():
    file = io.StringIO()

    @spmap_on_two
    def f(x):
        return taps.tap_print(x, "x is {:.2f}", result=-x, with_device=True, file=file)

    np.testing.assert_array_equal(f(np.array([0.5, 1.25])), [-0.5, -1.25])
    taps.taps_barrier()
    lines = file.getvalue().splitlines()
    assert sorted(lines) == ["cpu:0: x is 0.50", "cpu:1: x is 1.25"]


def test_print_of_a_pytree(capsys):
    taps.tap_print({"a": np.arange(2)}, "before: {}")
    assert capsys.readouterr().out == "before: {'a': array([0, 1], dtype=int32)}\n"


def test_print_of_something_the_text_does_not_fit():
    with pytest.raises(RuntimeError, match=r"the tap tap_print failed .*: IndexError"):
        taps.tap_print(1.0, "{} {}")
