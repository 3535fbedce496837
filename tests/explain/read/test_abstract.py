"""Programs over an abstract mesh, which are not compiled."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardmap as sm

SIZES = {"data": 4, "model": 2}
MESH = sm.make_mesh(SIZES)


def abstract(sizes):
    kinds = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def shape(*dimensions):
    return jax.ShapeDtypeStruct(dimensions, np.float32)


def center(x):
    return x - lax.pmean(x, "data")


def spread(x):
    """A collective of every kind, whose blocks are larger than elements."""
    rows = lax.all_gather(x, "i")
    mixed = lax.all_to_all(rows, "i", 0, 0)
    size = lax.axis_size("i")
    moved = lax.ppermute(x, "i", [(k, (k + 1) % size) for k in range(size)])
    return lax.psum_scatter(mixed, "i") + moved + lax.pmax(x, "i")


def repeated(x):
    def step(x, _):
        x, _ = lax.scan(lambda x, _: (lax.psum(x, "i") / 9, None), x, length=3)
        return lax.pmax(x, "i") / 2, None

    return lax.scan(step, x, length=5)[0]


def until(x):
    return lax.while_loop(lambda x: lax.pmax(x.sum(), "i") > 1, lambda x: x / 2, x)


def over(fun, axis="data"):
    return lambda mesh: sm.spmap(fun, "i", mesh=mesh, mesh_axes=axis)


def nested(mesh):
    inner = sm.spmap(
        lambda x: lax.psum(x, ("i", "j")), "j", mesh=mesh, mesh_axes="model"
    )
    return sm.spmap(inner, "i", mesh=mesh, mesh_axes="data")


PROGRAMS = {
    "blocks": over(spread),
    "elements": over(lambda x: lax.psum(x, "i"), ("data", "model")),
    "loops": over(repeated),
    "while": over(until),
    "nested": nested,
    "mesh_map": lambda mesh: sm.mesh_map(center, mesh, ({"data": 0},), {"data": 0}),
    "shard_map": lambda mesh: jax.jit(
        jax.shard_map(center, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    ),
    "on one device": lambda mesh: sm.mesh_map(
        sm.spmap(center), mesh, ({"data": 0},), {"data": 0}
    ),
    "inside": lambda mesh: lambda x: over(spread)(mesh)(x),
    "vmap": lambda mesh: jax.jit(jax.vmap(over(repeated)(mesh))),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_gives_what_the_devices_do(name):
    """All but what only the compiler knows."""
    real = sm.explain(PROGRAMS[name](MESH))(shape(8, 4, 3))
    imagined = sm.explain(PROGRAMS[name](abstract(SIZES)))(shape(8, 4, 3))
    assert imagined.arrays == real.arrays
    assert imagined.mesh == real.mesh
    assert imagined.num_devices == real.num_devices
    assert list(map(str, imagined.axes)) == list(map(str, real.axes))
    found, expected = (
        sorted(
            (each.kind, each.axes, each.count or 0, each.bytes_in, each.bytes_out,
             each.operation, each.group_size, each.link_bytes or 0, each.source)
            for each in report.collectives
        )
        for report in (imagined, real)
    )  # fmt: skip
    assert found == expected != []


def test_a_mesh_of_thousands_of_devices():
    mapped = sm.spmap(
        lambda x: lax.psum(x, "i"), "i", mesh=abstract({"i": 4096}), mesh_axes="i"
    )
    report = sm.explain(mapped, interconnect="tpu-v5p")(shape(8192, 1000))
    assert [str(axis) for axis in report.axes] == [
        "axis 'i' of 8,192 = 4,096 devices x 2 vectorised x 1 step"
    ]
    (sent,) = report.collectives
    assert (sent.operation, sent.axes, sent.group_size) == ("psum", ("i",), 4096)
    assert (sent.bytes_in, sent.bytes_out) == (4000, 4000)
    assert sent.seconds == report.interconnect.time("all-reduce", 4000, 4096)
    assert report.inputs[0].shard_shape == (2, 1000)
    assert (report.cost, report.device_kind, report.available) == (None, None, None)
    assert report.notes[0].startswith("Nothing was compiled: the mesh is abstract")
    assert "4,096 abstract devices, mesh 'i': 4,096" in str(report)


def test_the_partitioner_is_read_as_the_program():
    mesh = abstract(SIZES)
    mapped = sm.spmap(
        lambda x: lax.psum(x, "i"), "i", mesh=mesh, mesh_axes="data", lowering="spmd"
    )
    (sent,) = sm.explain(mapped)(shape(8, 3)).collectives
    assert (sent.operation, sent.axes, sent.bytes_in) == ("psum", ("data",), 12)


def test_what_no_map_fixes_is_for_the_compiler():
    fun = sm.explain(lambda x: over(until)(abstract(SIZES))(x + 1) * 2)
    assert [a.layout for a in fun(shape(8, 3)).arrays] == [
        "as the compiler decides"
    ] * 2


def test_a_collective_that_is_registered_late_is_seen():
    own_p = Primitive("own_and_late")
    own_p.def_abstract_eval(lambda x, axes: x)

    def fun(x):
        return lax.scan(lambda c, _: (own_p.bind(c, axes=("i",)), None), x, length=3)[0]

    mapped = jax.shard_map(
        fun,
        mesh=abstract({"i": 16}),
        in_specs=P("i"),
        out_specs=P("i"),
        check_vma=False,
    )
    explain = sm.explain(jax.jit(mapped))
    assert explain(shape(16, 3)).collectives == ()
    sm.register_collective(own_p, "add")
    (sent,) = explain(shape(16, 3)).collectives
    assert (sent.operation, sent.group_size, sent.count) == ("own_and_late", 16, 3)
