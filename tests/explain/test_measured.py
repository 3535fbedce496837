"""What a call really takes, next to what was predicted."""

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap.explain import measured
from shardmap.explain.measured import Number

ROWS = NamedSharding(sm.make_mesh({"i": 8}), P("i"))


def share(x):
    return x / lax.psum(x, "i")


def test_bytes_are_those_that_lie_on_a_device():
    x = jax.device_put(np.ones((16, 64), np.float32), ROWS)
    found = sm.explain(sm.spmap(share, "i"), interconnect="nvlink4")(x).measure(x)
    time, grown, ins, outs = found.numbers
    assert (ins.measured, ins.predicted) == (2 * 64 * 4, 2 * 64 * 4)
    assert (outs.measured, outs.predicted) == (2 * 64 * 4, 2 * 64 * 4)
    assert time.measured > 0
    assert time.predicted > 0
    assert grown.predicted is not None


@pytest.mark.deep
def test_the_growth_of_memory_is_seen():
    x = jax.device_put(np.ones((8 << 20,), np.float32), ROWS)
    found = sm.explain(lambda x: jnp.sort(x.reshape(8, -1), 1) + 1)(x).measure(x)
    grown = found.numbers[1]
    if grown.measured is not None:
        assert 0 <= grown.measured < 100 * grown.predicted


def test_memory_that_was_left_is_given_back_before_a_call_is_measured(monkeypatch):
    """What a call takes from what an earlier one left would not be seen."""
    seen = []
    memory = measured._memory

    def noted(devices):
        seen.append(measured._of_process("VmRSS"))
        return memory(devices)

    monkeypatch.setattr(measured, "_memory", noted)
    x = jnp.ones((64, 64), np.float32)
    report = sm.explain(lambda x: x @ x)(x)
    blocks = [np.ones(1 << 12) for _ in range(4000)]
    last = blocks[-1]  # Below this the process keeps what it gets back.
    del blocks
    before = measured._of_process("VmRSS")
    report.measure(x)
    if before is not None:  # Linux says it.
        assert seen[0] < before - (64 << 20)
    assert last.size == 1 << 12


def test_as_many_calls_as_are_asked_for_and_one_more():
    calls = []

    def note(x):
        calls.append(1)
        return x

    def fun(x):
        return jax.pure_callback(note, jax.ShapeDtypeStruct((4,), np.float32), x)

    x = jnp.ones(4, np.float32)
    found = sm.explain(fun)(x).measure(x, repeats=3)
    assert len(found.seconds) == 3
    assert len(calls) == 4


def test_donated_arguments_stay():
    x = jnp.ones((8, 4), np.float32)
    fun = jax.jit(lambda x: x + 1, donate_argnums=0)
    sm.explain(fun)(x).measure(x)
    np.testing.assert_array_equal(x, np.ones((8, 4)))


def test_keywords_and_numpy():
    found = sm.explain(lambda x, *, k: x * k)(np.ones(4, np.float32), k=np.float32(2))
    measured = found.measure(np.ones(4, np.float32), k=np.float32(2))
    assert measured.numbers[2].measured is None
    assert measured.numbers[2].texts()[0] == "unknown"


def test_it_prints_as_a_table():
    x = jnp.ones(4, np.float32)
    text = str(sm.explain(jnp.sin)(x).measure(x, repeats=2))
    assert text.splitlines()[0] == "sin, 2 calls"
    assert re.search(r"arguments on a device +16 B +16 B +1\.00 x", text)
    assert "interconnect=" in text


def test_shapes_cannot_be_run():
    x = jax.ShapeDtypeStruct((4,), np.float32)
    with pytest.raises(TypeError, match=r"at \[0\]\[0\] is only a shape.*give arrays"):
        sm.explain(jnp.sin)(x).measure(x)


def test_no_calls_are_refused():
    x = jnp.ones(4, np.float32)
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        sm.explain(jnp.sin)(x).measure(x, repeats=0)


def test_what_was_not_compiled_or_travelled_cannot_be_run():
    mesh = jax.sharding.AbstractMesh((16,), ("i",))
    mapped = sm.spmap(share, "i", mesh=mesh, mesh_axes="i")
    report = sm.explain(mapped)(jax.ShapeDtypeStruct((16,), np.float32))
    with pytest.raises(ValueError, match="nothing was compiled"):
        report.measure(np.ones(16, np.float32))
    there = sm.explain(lambda x: x)(np.ones(4, np.float32))
    back = pickle.loads(pickle.dumps(there))
    assert back == there
    with pytest.raises(ValueError, match="Explain it again"):
        back.measure(np.ones(4, np.float32))


def test_a_measurement_has_no_place_in_the_dict():
    assert "call" not in sm.explain(jnp.sin)(np.ones(4, np.float32)).to_dict()


@pytest.mark.parametrize(
    ("measured", "predicted", "ratio"),
    [(2.0, 1.0, 2.0), (None, 1.0, None), (1.0, None, None), (1.0, 0, None)],
)
def test_the_ratio(measured, predicted, ratio):
    assert Number("time", measured, predicted, "s", "").ratio == ratio
