"""What is asked of a function that is explained: by what it can do, not what it is."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

X = np.ones((8, 4), np.float32)
ROWS = NamedSharding(sm.make_mesh({"i": 8}), P("i"))


def test_a_function_of_another_package_is_asked_the_same():
    """No class of ours is looked for."""
    asked = []

    class Another:
        def __init__(self):
            self.jitted = jax.jit(lambda x: x * 2)

        def __call__(self, x):
            raise AssertionError("it says itself how it is traced")

        def trace(self, *args):
            asked.append("trace")
            return self.jitted.trace(*args)

        def lower(self, *args):
            asked.append("lower")
            return self.jitted.lower(*args)

    report = sm.explain(Another())(X)
    assert asked == ["trace", "lower"]
    assert report.outputs[0].shape == X.shape


@pytest.mark.parametrize("static", [None, 1, (1,)])
def test_stages_of_a_library_have_those_of_jax(static):
    """As those of `flax.nnx.jit`."""

    @dataclasses.dataclass
    class Stage:
        traced: object = None
        lowered: object = None

    class Wrapped:
        static_argnums = static

        def __init__(self):
            self.jitted = jax.jit(lambda x: x.sum(), in_shardings=ROWS)

        def __call__(self, x):
            raise AssertionError("it says itself how it is traced")

        def trace(self, *args):
            return Stage(traced=self.jitted.trace(*args))

        def lower(self, *args):
            return Stage(lowered=self.jitted.lower(*args))

    report = sm.explain(Wrapped())(X)
    assert [each.kind for each in report.collectives] == ["all-reduce"]


def test_the_updates_of_a_module_of_flax_are_explained():
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")
    model = nnx.Linear(4, 16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        value, gradient = nnx.value_and_grad(lambda m: m(x).mean())(model)
        optimizer.update(model, gradient)
        return value

    with jax.numpy_rank_promotion("allow"):
        report = sm.explain(step)(model, optimizer, jax.device_put(X, ROWS))
    # The loss, and the gradient of the kernel, which the model keeps.
    assert sorted(each.bytes_in for each in report.collectives) == [4, 256]
    assert {re.split(r"\W", each.path)[0] for each in report.inputs} == {
        "model",
        "optimizer",
        "x",
    }


def test_a_matrix_with_a_trace_is_no_traced_function():
    class Matrix:
        def __call__(self, x):
            return x @ x.T

        def trace(self):
            raise AssertionError("the sum of its diagonal")

    assert sm.explain(Matrix())(X).outputs[0].shape == (8, 8)


def test_static_arguments_are_no_arrays():
    scale = sm.spmap(lambda x, k: x * k, static_broadcasted_argnums=1)
    assert [each.path for each in sm.explain(scale)(X, 2).inputs] == ["x"]


def test_what_to_change_is_what_the_map_has():
    mesh = sm.make_mesh(data=4, model=2)
    devices = "Give devices=, or mesh= and mesh_axes=, for other devices; "
    batches = "batch_size= to vectorise fewer elements at once; "
    elements = "axis_size=, or longer arrays, for more elements."
    for on in {"mesh": mesh, "mesh_axes": "data"}, {"devices": jax.devices()[:4]}, {}:
        mapped = sm.explain(sm.spmap(lambda x: x * 2, "i", **on))
        short, long = mapped(X[:4]), mapped(np.tile(X, (2, 1)))
        assert devices + elements in " ".join(str(short).split())
        assert devices + batches + elements in " ".join(str(long).split())
    steps = sm.explain(sm.spmap(lambda x: x * 2, batch_size=1))(np.tile(X, (2, 1)))
    assert f"{devices}a larger batch_size= to" in " ".join(str(steps).split())
