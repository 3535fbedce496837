"""What is made for a mapped function: programs, how often, and their lowered form."""

import gc
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
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


@jax.tree_util.register_pytree_node_class
class Flattens:
    """A mapping that flattens again when it is rebuilt, as haiku's up to 2022."""

    def __init__(self, mapping):
        self.leaves, self.structure = jax.tree.flatten(dict(mapping))

    def tree_flatten(self):
        return self.leaves, self.structure

    @classmethod
    def tree_unflatten(cls, structure, leaves):
        return cls(jax.tree.unflatten(structure, leaves))

    def __getitem__(self, key):
        return jax.tree.unflatten(self.structure, self.leaves)[key]


@pytest.mark.parametrize("kind", ["spmap", "mesh_map", "sharded_jit"])
def test_a_container_that_flattens_again_when_it_is_rebuilt(kind):
    mesh = sm.make_mesh({"i": 8})

    def swap(x):
        return Flattens({"a": x["b"], "b": x["a"]}), {"sum": x["a"] + 1, "none": None}

    mapped = {
        "spmap": lambda: sm.spmap(swap, donate_argnums=0),
        "mesh_map": lambda: sm.mesh_map(swap, mesh, ({"i": 0},), {"i": 0}),
        "sharded_jit": lambda: sm.sharded_jit(swap, ((8,),), ((8,), None), 8),
    }[kind]()
    given = Flattens({"a": EIGHT, "b": -EIGHT})
    lowered = mapped.lower(given).compile()
    for run in (mapped, lowered, jax.jit(mapped), mapped):
        result, others = run(given)
        np.testing.assert_array_equal(result["a"], -EIGHT)
        np.testing.assert_array_equal(others["sum"], EIGHT + 1)
    assert mapped.explain(given)


# Caching


@pytest.mark.usefixtures("young_heap")
def test_a_nested_map_that_is_made_at_each_call_compiles_once_and_is_freed():
    counted = Counted()
    pair = np.ones((2, 2, 2), np.float32)

    def element(x):
        return counted.method(x)

    with Compiles() as compiles:
        for _ in range(3):
            y = sm.spmap(sm.spmap(sm.spmap(element, "a"), "b"), "c")(pair)
            z = sm.spmap(sm.sharded_jit(element, ((2,),), (2,)))(np.ones((2, 4)))
    assert (counted.traces, compiles.count) == (2, 2)
    np.testing.assert_array_equal(y, pair + 1)
    np.testing.assert_array_equal(z, np.full((2, 4), 2))
    other = sm.spmap(sm.spmap(element, "a"), "b", out_axes=1)
    assert other(np.zeros((2, 4, 1))).shape == (4, 2, 1)
    held = weakref.ref(element)
    del element, other
    gc.collect()
    assert held() is None


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


@pytest.mark.usefixtures("young_heap")
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


@pytest.mark.usefixtures("young_heap")
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
    with caplog.at_level(logging.DEBUG, logger="shardmap"):
        mapped(jax.device_put(EIGHT, jax.devices()[1]), EIGHT)
    moved = [r.getMessage() for r in caplog.records if "moved" in r.getMessage()]
    assert len(moved) == 1
    assert moved[0].startswith("shardmap: moved float32[8] from SingleDeviceSharding")
