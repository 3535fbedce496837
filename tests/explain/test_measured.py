"""What a call really takes, next to what was predicted."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

ROWS = NamedSharding(sm.make_mesh({"i": 8}), P("i"))


def share(x):
    return x / lax.psum(x, "i")


def test_the_prediction_is_that_of_the_report():
    x = jax.device_put(np.ones((16, 64), np.float32), ROWS)
    report = sm.explain(sm.spmap(share, "i"))(x)
    measurement = report.measure(x)
    assert measurement.predicted_bytes == report.cost.peak_bytes
    assert all(seconds > 0 for seconds in measurement.seconds)


def test_as_many_calls_as_are_asked_for_and_one_more():
    calls = []

    def note(x):
        calls.append(1)
        return x

    def fun(x):
        return jax.pure_callback(note, jax.ShapeDtypeStruct((4,), np.float32), x)

    x = jnp.ones(4, np.float32)
    measurement = sm.explain(fun)(x).measure(x, repeats=3)
    assert len(measurement.seconds) == 3
    assert len(calls) == 4


def test_donated_arguments_stay():
    x = jnp.ones((8, 4), np.float32)
    fun = jax.jit(lambda x: x + 1, donate_argnums=0)
    sm.explain(fun)(x).measure(x)
    np.testing.assert_array_equal(x, np.ones((8, 4)))


def test_keywords_and_numpy():
    report = sm.explain(lambda x, *, k: x * k)(np.ones(4, np.float32), k=np.float32(2))
    assert len(report.measure(np.ones(4, np.float32), k=np.float32(2)).seconds) == 5


def test_it_prints_what_it_took_beside_the_prediction():
    x = jnp.ones(4, np.float32)
    report = sm.explain(jnp.sin)(x)
    first, seconds, memory = str(report.measure(x, repeats=2)).splitlines()
    assert first == "sin, 2 calls"
    assert seconds.startswith("  time of a call: ")
    assert memory.endswith(f"predicted: {report.cost.peak_bytes} B")


def test_shapes_cannot_be_run():
    x = jax.ShapeDtypeStruct((4,), np.float32)
    with pytest.raises(TypeError, match=r"x is only a shape.*give arrays"):
        sm.explain(jnp.sin)(x).measure(x)


def test_arguments_of_another_shape_are_refused():
    report = sm.explain(lambda x: x * 2)(jnp.ones((8, 3)))
    with pytest.raises(ValueError, match=r"got x of shape \(9, 3\), .*for \(8, 3\)"):
        report.measure(jnp.ones((9, 3)))


def test_no_calls_are_refused():
    x = jnp.ones(4, np.float32)
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        sm.explain(jnp.sin)(x).measure(x, repeats=0)


def test_a_plan_and_what_travelled_cannot_be_run():
    x = np.ones(16, np.float32)
    report = sm.explain(sm.plan(lambda x: x * 2, x, in_slices={0: 4}))
    with pytest.raises(ValueError, match="it is of a plan"):
        report.measure(x)
    there = sm.explain(lambda x: x)(np.ones(4, np.float32))
    back = pickle.loads(pickle.dumps(there))
    assert back == there
    with pytest.raises(ValueError, match="Explain the function again"):
        back.measure(np.ones(4, np.float32))


def test_a_measurement_has_no_place_in_the_dict():
    assert "call" not in sm.explain(jnp.sin)(np.ones(4, np.float32)).to_dict()
