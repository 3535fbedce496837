"""The meshes of a program, and which of them is the one to speak of."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap.explain.read.meshes import axes_of, device_of, largest_mesh, meshes_of

LINE = sm.make_mesh({"i": 8})
GRID = sm.make_mesh({"data": 4, "model": 2})
HALF = sm.make_mesh({"i": 4}, jax.devices()[4:])
EXPLICIT = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Explicit,))
X = np.ones((8, 4), np.float32)


def over(mesh, name):
    return jax.shard_map(
        lambda x: lax.psum(x, name), mesh=mesh, in_specs=P(name), out_specs=P()
    )


def jaxpr(fun, *args):
    return jax.make_jaxpr(fun)(*args).jaxpr


def test_the_largest_mesh_comes_first():
    def fun(x):
        return over(HALF, "i")(x), over(GRID, "data")(x)

    assert meshes_of(jaxpr(fun, X)) == [GRID, HALF]


def test_meshes_inside_of_loops_and_calls_are_found():
    def fun(x):
        step = jax.jit(over(LINE, "i"))
        return lax.scan(lambda c, _: (c + step(x).sum(), None), 0.0, None, length=2)

    assert meshes_of(jaxpr(fun, X)) == [LINE]


def test_a_program_without_a_map_has_none():
    assert meshes_of(jaxpr(lambda x: x + 1, X)) == []


def test_an_abstract_mesh_is_the_one_that_arguments_lie_on():
    x = jax.device_put(X, NamedSharding(EXPLICIT, P("i")))
    with jax.set_mesh(EXPLICIT):
        fun = jax.shard_map(lambda x: x * 2, in_specs=P("i"), out_specs=P("i"))
        program = jaxpr(fun, x)
        around = meshes_of(program)
    assert around == [EXPLICIT]
    assert meshes_of(program, (x,)) == [EXPLICIT]
    # Without them nothing says which devices it is.
    (left,) = meshes_of(program)
    assert isinstance(left, jax.sharding.AbstractMesh)


def test_an_abstract_mesh_is_the_one_that_is_around():
    inner = jax.shard_map(
        lambda x: x + lax.psum(x, "data"),
        mesh=GRID.abstract_mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    fun = sm.spmap(inner, mesh=GRID, mesh_axes="model", in_axes=1)
    assert {*meshes_of(jaxpr(fun, X))} == {GRID}
    [sent] = [each for each in sm.explain(fun)(X).collectives if each.operation]
    assert sent.axes == ("data",)


@pytest.mark.parametrize(
    ("meshes", "layouts", "axes"),
    [
        ([], [], ()),
        ([GRID], [], (("data", 4), ("model", 2))),
        ([HALF], [NamedSharding(GRID, P())], (("data", 4), ("model", 2))),
        ([], [SingleDeviceSharding(jax.devices()[0])], ()),
    ],
)
def test_the_axes_are_those_of_the_largest(meshes, layouts, axes):
    assert axes_of(largest_mesh(meshes, layouts)) == axes


def test_replicas_that_there_are_not_are_no_axis():
    fun = jax.jit(sm.spmap(lambda x: x * 2, "i"))
    assert sm.explain(fun)(X).mesh == (("i", 8),)


def test_a_device_is_one_of_the_mesh_or_where_an_array_lies():
    assert device_of([], [HALF]) == jax.devices()[4]
    assert device_of([SingleDeviceSharding(jax.devices()[3])], []) == jax.devices()[3]
    assert device_of([], []) == jax.devices()[0]


@pytest.mark.parametrize("lowering", ["manual", "spmd"])
def test_a_map_inside_may_be_called_as_the_mesh_axis_of_the_one_around(lowering):
    def shifted(x):
        pairs = [(k, (k + 1) % 8) for k in range(8)]
        return lax.psum(x, "i"), lax.ppermute(x, ("data", "i"), pairs)

    inside = sm.spmap(shifted, "data", lowering=lowering)
    fun = sm.spmap(inside, "i", lowering=lowering, mesh=GRID, mesh_axes="data")
    report = sm.explain(fun)(X[:4, :2])
    over = {(each.operation, each.axes, each.group_size) for each in report.collectives}
    # Of what the partitioner does XLA does not say that it is a psum.
    operation = "psum" if lowering == "manual" else None
    assert (operation, ("data",), 4) in over
    assert {axes for _, axes, _ in over} == {("data",)}
