"""The meshes of a program, and which of them is the one to speak of."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

LINE = sm.make_mesh({"i": 8})
GRID = sm.make_mesh({"data": 4, "model": 2})
HALF = sm.make_mesh({"i": 4}, jax.devices()[4:])
EXPLICIT = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Explicit,))
X = np.ones((8, 4), np.float32)


def over(mesh, name):
    return jax.shard_map(
        lambda x: lax.psum(x, name), mesh=mesh, in_specs=P(name), out_specs=P()
    )


def mesh_of(fun, *args):
    return sm.explain(fun)(*args).mesh


def test_the_mesh_is_that_of_maps_or_of_arrays():
    def fun(x):
        return over(HALF, "i")(x)

    assert mesh_of(fun, X) == (("i", 4),)
    whole = jax.device_put(X, NamedSharding(GRID, P()))
    assert mesh_of(lambda x: x + 1, whole) == (("data", 4), ("model", 2))
    assert mesh_of(lambda x: x + 1, X) == ()


def test_meshes_inside_of_loops_and_calls_are_found():
    def fun(x):
        step = jax.jit(over(LINE, "i"))
        return lax.scan(lambda c, _: (c + step(x).sum(), None), 0.0, None, length=2)

    assert mesh_of(fun, X) == (("i", 8),)


def test_an_abstract_mesh_is_the_one_that_arguments_lie_on():
    x = jax.device_put(X, NamedSharding(EXPLICIT, P("i")))
    fun = jax.shard_map(
        lambda x: x * 2,
        mesh=EXPLICIT.abstract_mesh,
        in_specs=P("i"),
        out_specs=P("i"),
    )
    report = sm.explain(fun)(x)
    assert (report.mesh, report.device_kind) == ((("i", 8),), "cpu")


def test_an_abstract_mesh_is_the_one_that_is_around():
    inner = jax.shard_map(
        lambda x: x + lax.psum(x, "data"),
        mesh=GRID.abstract_mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    fun = sm.spmap(inner, mesh=GRID, mesh_axes="model", in_axes=1)
    [sent] = [each for each in sm.explain(fun)(X).collectives if each.operation]
    assert sent.axes == ("data",)


def test_replicas_that_there_are_not_are_no_axis():
    fun = jax.jit(sm.spmap(lambda x: x * 2, "i"))
    assert sm.explain(fun)(X).mesh == (("i", 8),)


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
