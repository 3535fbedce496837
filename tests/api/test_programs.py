"""What is made for a mapped function: programs, how often, and their lowered form."""

import gc
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from absl import logging as absl_logging
from jax import lax
from jaxlib.xla_client import HloSharding

import shardmap as sm

EIGHT = np.arange(8, dtype=np.float32)


class Counted:
    """A function that counts how often it is traced."""

    def __init__(self):
        self.traces = 0

    def method(self, x):
        self.traces += 1
        return x + 1


class Compiles:
    """Counts XLA compilations while it is entered."""

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def _listen(self, event, duration, **_):
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)


# Caching


def test_compiles_once_for_equal_calls_and_again_for_new_shapes():
    counted = Counted()
    mapped = sm.spmap(lambda x: counted.method(x))
    with Compiles() as compiles:
        for _ in range(5):
            mapped(EIGHT)
    assert (counted.traces, compiles.count) == (1, 1)
    with Compiles() as compiles:
        for _ in range(5):
            mapped(np.ones((8, 2), np.float32))
            mapped(EIGHT)
    assert (counted.traces, compiles.count) == (2, 1)


def test_a_mapped_method_compiles_once_per_object():
    """Until it is mapped anew, as by `jax.jit`: the object may have changed."""
    counted, other = Counted(), Counted()
    maps = sm.spmap(counted.method), sm.spmap(other.method)
    with Compiles() as compiles:
        for mapped in maps * 5:
            mapped(EIGHT)
    assert (counted.traces, other.traces, compiles.count) == (1, 1, 2)
    sm.spmap(counted.method)(EIGHT)
    assert (counted.traces, other.traces) == (2, 1)


def test_equal_callables_share_a_program():
    class Scale:
        traces = 0

        def __init__(self, factor):
            self.factor = factor

        def __eq__(self, other):
            return isinstance(other, Scale) and self.factor == other.factor

        def __hash__(self):
            return hash(self.factor)

        def __call__(self, x):
            Scale.traces += 1
            return x * self.factor

    first = Scale(3)
    mapped = sm.spmap(first)
    mapped(EIGHT)
    again = sm.spmap(Scale(3))
    again(EIGHT)
    assert Scale.traces == 1
    del first, mapped
    gc.collect()
    np.testing.assert_array_equal(again(np.ones((8, 2))), np.full((8, 2), 3.0))


def test_a_program_finds_its_function_under_grad_and_vmap_too():
    counted = Counted()
    mapped = sm.spmap(counted.method)
    gradient = jax.grad(lambda x: mapped(x).sum())
    gradient(EIGHT)
    jax.vmap(mapped)(np.ones((3, 8), np.float32))
    with Compiles() as compiles:
        for _ in range(5):
            gradient(EIGHT)
            jax.vmap(mapped)(np.ones((3, 8), np.float32))
    assert (counted.traces, compiles.count) == (1, 0)


def test_a_thousand_equal_calls_keep_nothing():
    mapped = sm.spmap(lambda x, y: x + y, devices=jax.devices()[:2])
    x = np.ones(2, np.float32)

    def live():
        gc.collect()
        return len(gc.get_objects())

    for _ in range(50):
        mapped(x, y=x)
        mapped(x, x)
    before = live()
    for _ in range(500):
        mapped(x, y=x)
        mapped(x, x)
    assert live() - before < 100


def test_eight_threads_at_once_also_for_first_calls():
    barrier = threading.Barrier(8)
    shared = sm.spmap(lambda x: x * lax.axis_size("i") + lax.psum(x, "i"), "i")

    def work(k):
        own = sm.spmap(lambda x: x * k)
        barrier.wait(timeout=60)
        for step in range(10):
            np.testing.assert_array_equal(own(EIGHT + step), (EIGHT + step) * k)
            x = EIGHT[: 1 + (k + step) % 4]
            np.testing.assert_array_equal(shared(x), x * len(x) + x.sum())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


# Lowered form


def test_specs_stand_at_the_positions_of_the_arguments():
    mapped = sm.spmap(
        lambda n, w, x: ({"a": x * n}, lax.psum(x @ w, "i")),
        "i",
        in_axes=(None, None, -1),
        out_axes=(1, None),
        static_broadcasted_argnums=0,
    )
    lowered = mapped.lower(2, np.ones((3, 5)), np.ones((3, 4)))
    cut = sm.ShardingSpec((None, sm.Chunked(4)), (sm.ShardedAxis(0),))
    assert lowered.in_specs == (
        None,
        sm.ShardingSpec((None, None), (sm.Replicated(4),)),
        cut,
    )
    assert lowered.out_specs == (
        {"a": cut},
        sm.ShardingSpec((None,), (sm.Replicated(4),)),
    )


def hlo_shardings(lowered):
    """The annotations of the program's parameters, in order."""
    return [
        line.split("sharding=")[1].split("}")[0] + "}"
        for line in lowered.as_text("hlo").splitlines()
        if "parameter(" in line and "sharding={" in line
    ]


@pytest.mark.parametrize("axis", [0, -1])
def test_the_programs_annotation_is_the_spec(axis):
    shape = [3, 3, 3]
    shape[axis] = 4
    lowered = sm.spmap(lambda x, y: x + y, in_axes=(axis, None)).lower(
        np.ones(shape, np.float32), np.float32(1)
    )
    annotations = hlo_shardings(lowered)
    assert len(annotations) == 2
    for annotation, spec in zip(annotations, lowered.in_specs, strict=True):
        assert HloSharding.from_string(annotation) == spec.hlo_sharding()
        proto = HloSharding.from_proto(spec.sharding_proto())
        assert HloSharding.from_string(annotation) == proto


# Logs


def test_one_line_per_moved_input(caplog):
    mapped = sm.spmap(lambda x, y: x + y)
    absl_logging.get_absl_logger().propagate = True
    with caplog.at_level(logging.DEBUG, logger="absl"):
        absl_logging.set_verbosity(absl_logging.DEBUG)
        try:
            mapped(jax.device_put(EIGHT, jax.devices()[1]), EIGHT)
        finally:
            absl_logging.set_verbosity(absl_logging.WARNING)
    moved = [r.getMessage() for r in caplog.records if "moved" in r.getMessage()]
    assert len(moved) == 1
    assert moved[0].startswith("shardmap: moved float32[8] from SingleDeviceSharding")
