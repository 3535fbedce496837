"""Taps: the values they see under transformations, and what they leave unchanged."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from shardmap.api import taps
from shardmap.compat import host_callback
from tests.api.tap_recorder import (
    numbered,
    spmap_on_two,
)

# Transformations


def test_elements_in_blocks_come_one_by_one(recorder):
    f = spmap_on_two(lambda x: recorder.tap(2 * x))
    np.testing.assert_array_equal(f(np.arange(4)), [0, 2, 4, 6])
    assert recorder.wait() == {0: [0, 2], 1: [4, 6]}


def test_vmap_puts_the_batch_in_front_of_what_is_batched(recorder):
    def f(x, y):
        return recorder.tap({"x": x, "y": y, "z": x[0] + y})

    result = jax.vmap(f, in_axes=(1, None), out_axes={"x": 1, "y": None, "z": 0})(
        numbered(2, 3), 7.0
    )
    np.testing.assert_array_equal(result["x"], numbered(2, 3))
    assert recorder.wait() == {
        0: [{"x": numbered(2, 3).T.tolist(), "y": 7, "z": [7, 8, 9]}]
    }


def test_vmap_over_nothing_tapped_is_one_call(recorder):
    jax.vmap(lambda x: x + recorder.tap(jnp.ones(())))(numbered(3))
    assert recorder.wait() == {0: [1]}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "inner", [lambda f: f, jax.checkpoint, jax.jit], ids=["plain", "checkpoint", "jit"]
)
def test_grad_taps_values_once(recorder, inner):
    def loss(x):
        return spmap_on_two(inner(lambda x: recorder.tap(3 * x) ** 2))(x).sum()

    x = numbered(2) + 1
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), 18 * x)
    assert recorder.wait() == {0: [3], 1: [6]}


def test_grad_inside_a_map_and_of_a_nested_map(recorder):
    def loss(x):
        return sm.spmap(lambda y: recorder.tap(3 * y) ** 2)(recorder.tap(x)).sum()

    x = numbered(2, 4)
    np.testing.assert_array_equal(sm.spmap(jax.grad(loss))(x), 18 * x)
    expected = {
        4 * i + j: [x[i].tolist(), 3 * x[i, j]] for i in range(2) for j in range(4)
    }
    assert recorder.wait() == expected
    np.testing.assert_array_equal(
        jax.grad(lambda x: sm.spmap(loss)(x).sum())(x), 18 * x
    )
    assert recorder.wait() == expected


def test_rules_of_custom_derivatives_may_tap(recorder):
    @jax.custom_vjp
    def f(x):
        return recorder.tap(x)

    f.defvjp(lambda x: (recorder.tap(x + 1), None), lambda _, g: (recorder.tap(g + 2),))
    mapped = spmap_on_two(f)
    np.testing.assert_array_equal(mapped(numbered(2)), [0, 1])
    assert recorder.wait() == {0: [0], 1: [1]}
    jax.grad(lambda x: mapped(x).sum())(numbered(2))
    assert recorder.wait() == {0: [1, 3], 1: [2, 3]}


def test_linear_transpose_has_no_value_to_tap(recorder):
    (y,) = jax.linear_transpose(lambda x: recorder.tap(2 * x), 1.0)(5.0)
    assert y == 10


@pytest.mark.parametrize(
    "setting", ["jax_disable_jit", "jax_debug_nans", "jax_debug_infs"]
)
def test_settings(recorder, setting):
    with getattr(jax, setting.removeprefix("jax_"))(True):
        spmap_on_two(lambda x: recorder.tap(2 * x))(numbered(2))
        calls = recorder.wait()
    assert [x for values in calls.values() for x in np.ravel(values)] == [0, 2]


# Values


def test_the_value_comes_back_unchanged(recorder):
    x = {"a": np.arange(3), "b": [1.5, None]}
    assert recorder.tap(x) is x
    assert recorder.wait() == {0: [{"a": [0, 1, 2], "b": [1.5, None]}]}


def test_result(recorder):
    f = spmap_on_two(lambda x: recorder.tap(x, result=(x + 1, x + 2)))
    np.testing.assert_array_equal(f(numbered(2)), [[1, 2], [2, 3]])
    assert recorder.wait() == {0: [0], 1: [1]}


@pytest.mark.parametrize(
    ("transform", "calls"),
    [(jax.jit, {0: [[0, 3], [5, 6]]}), (spmap_on_two, {0: [0, 5], 1: [3, 6]})],
)
def test_unused_values_and_results_are_tapped(recorder, transform, calls):
    def f(x):
        recorder.tap(3 * x)
        recorder.tap(x + 5, result=x)
        return 0 * x

    jax.jit(lambda x: (transform(f)(x), 1)[1])(numbered(2))
    assert recorder.wait() == calls


@pytest.mark.parametrize(
    "dtype", [bool, np.int8, np.uint32, np.float16, jnp.bfloat16, np.complex64]
)
def test_types(dtype):
    seen = []
    x = np.array([[0, 1], [1, 0]]).astype(dtype)
    spmap_on_two(lambda x: taps.tap(lambda v: seen.append(v), x))(x)
    taps.taps_barrier()
    assert {value.dtype for value in seen} == {np.dtype(dtype)}
    assert {tuple(value.tolist()) for value in seen} == {(0, 1), (1, 0)}


def test_values_are_arrays_of_their_own():
    seen = []

    def keep(value):
        assert type(value) is np.ndarray
        value += 1
        seen.append(value)

    f = jax.jit(lambda x: taps.tap(keep, x) + taps.tap(keep, x + 1))
    for k in range(5):
        np.testing.assert_array_equal(f(np.full(1000, k)), np.full(1000, 2 * k + 1))
    taps.taps_barrier()
    assert [set(value.tolist()) for value in seen] == [
        {k + j} for k in range(5) for j in (1, 2)
    ]


def test_nothing_to_show(recorder):
    assert spmap_on_two(lambda x: recorder.tap((), result=x))(numbered(2)).shape == (2,)
    recorder.tap(())
    assert recorder.wait() == {0: [(), ()], 1: [()]}


def test_without_standard_output_nothing_is_printed(monkeypatch):
    """As by `print`."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        for show in (sm.tap_print, host_callback.id_print):
            np.testing.assert_array_equal(show(np.ones(3)), np.ones(3))
        jax.effects_barrier()
        sm.taps_barrier()  # It raises what a tap has raised.


def test_keys_are_given_as_their_data(recorder):
    f = spmap_on_two(lambda k: jax.random.bits(recorder.tap(jax.random.key(k))))
    f(np.arange(2))
    assert recorder.wait() == {0: [[0, 0]], 1: [[0, 1]]}


@pytest.mark.parametrize("func", [None, "print"])
def test_a_tap_wants_a_function(func):
    with pytest.raises(TypeError, match=f"tap expects a callable, but got {func!r}"):
        taps.tap(func, 1.0)


def test_a_tap_wants_arrays(recorder):
    with pytest.raises(TypeError, match=r"tap takes arrays, but x\['a'\] is 'text' of"):
        recorder.tap({"a": "text"})
    with pytest.raises(TypeError, match="tap_print takes arrays, but x is 'a' of type"):
        sm.tap_print("a")
