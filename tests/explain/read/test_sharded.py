"""Axes that run on devices because arrays are on them."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

LINE = sm.make_mesh({"i": 8})
MESH = sm.make_mesh({"data": 4, "model": 2})
EXPLICIT = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Explicit,))
ROWS = NamedSharding(LINE, P("i"))


def score(x):
    return jnp.tanh(x).sum()


def on(sharding, *shape):
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)


@pytest.mark.parametrize(
    ("fun", "x"),
    [
        (jax.jit(jax.vmap(score)), on(ROWS, 1000, 64)),
        (jax.vmap(score), on(ROWS, 1000, 64)),
        (jax.jit(jax.vmap(score), in_shardings=ROWS), on(None, 1000, 64)),
        (jax.vmap(score), on(NamedSharding(EXPLICIT, P("i")), 1000, 64)),
        (jax.vmap(score, in_axes=1), on(NamedSharding(LINE, P(None, "i")), 64, 1000)),
    ],
    ids=["jit", "bare", "in_shardings", "explicit", "other dimension"],
)
def test_a_vmap_over_what_is_cut_runs_on_the_devices(fun, x):
    report = sm.explain(fun)(x)
    (axis,) = [axis for axis in report.axes if axis.kind == "vmap"]
    assert axis.layout == "8 devices x 125 vectorised x 1 step"
    assert axis.devices * axis.vectorised * axis.steps == 1000


def rows(x):
    return jax.vmap(lambda row: jnp.tanh(row) * row.sum())(x)


def of_two_lengths(x, w):
    """Both are cut, in another way, along a dimension that is as long."""
    return jax.vmap(lambda row, w: jnp.tanh(row @ w).sum(), (0, None))(x, w)


def then_a_map(x):
    mapped = jax.shard_map(
        lambda block: block - lax.pmean(block, "data"),
        mesh=MESH,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    return mapped(rows(x))


def then_an_spmap(x):
    return sm.spmap(lambda row: row - lax.pmean(row, "i"), "i")(rows(x))


DATA, MODEL = NamedSharding(MESH, P("data")), NamedSharding(MESH, P(None, "model"))
ALL = NamedSharding(MESH, P(("data", "model")))
SQUARE = NamedSharding(MESH, P("data", "model"))
# Programs, and on how many devices each of their vmaps is, by the compiled shapes.
CROSSED = {
    "one length, cut twice": (
        of_two_lengths,
        [on(DATA, 64, 64), on(MODEL, 64, 64)],
        [4],
    ),
    "before a shard_map": (then_a_map, [on(SQUARE, 1000, 64)], [4]),
    "before an spmap": (then_an_spmap, [on(ROWS, 64, 16)], [8]),
    "two mesh axes": (rows, [on(ALL, 1000, 64)], [8]),
    "whole": (rows, [on(NamedSharding(MESH, P()), 1000, 64)], [1]),
    "along another dimension": (rows, [on(MODEL, 1000, 64)], [1]),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", CROSSED)
def test_a_vmap_is_where_the_compiler_puts_it(name):
    fun, args, devices = CROSSED[name]
    axes = sm.explain(fun)(*args).axes
    vmaps = [axis for axis in axes if axis.kind == "vmap"]
    assert [axis.devices for axis in vmaps] == devices
    for axis in vmaps:
        assert axis.devices * axis.vectorised * axis.steps == axis.size
    text = jax.jit(fun).lower(*args).compile().as_text()
    sizes = [axis.vectorised for axis in vmaps]
    local = re.findall(r"f32\[([\d,]+)\][^=]*(?:tanh|sine)\(", text)
    assert local
    for shape in local:
        assert [int(n) for n in shape.split(",")][: len(sizes)] == sizes


def test_a_vmap_is_left_out_where_the_partitioner_may_put_it_anywhere():
    def fun(x):
        return rows(lax.with_sharding_constraint(x * 2, ROWS)).sum()

    report = sm.explain(fun)(on(None, 1000, 64))
    assert report.mesh == (("i", 8),)
    (line,) = report.axes
    assert (line.kind, line.devices) == ("sharding", 8)


def test_a_map_over_some_axes_leaves_the_others_their_lines():
    fun = jax.shard_map(
        lambda x, w: lax.psum(x @ w, "data"),
        mesh=MESH,
        in_specs=(P("data"), P()),
        out_specs=P(),
        axis_names={"data"},
    )
    axes = sm.explain(jax.jit(fun))(on(DATA, 64, 32), on(MODEL, 32, 16)).axes
    assert [(axis.name, axis.kind) for axis in axes] == [
        ("model", "sharding"),
        ("data", "shard_map"),
    ]


def test_nothing_that_is_cut_is_no_axis():
    assert sm.explain(jnp.sin)(on(NamedSharding(MESH, P()), 8)).axes == ()


def test_what_a_program_asks_to_be_cut_has_a_line():
    """An uneven constraint: what comes in and out is whole."""

    def fun(x):
        return lax.with_sharding_constraint(x * 2, ROWS).sum(1)

    report = sm.explain(jax.jit(fun))(on(None, 100, 16))
    (axis,) = report.axes
    assert (axis.name, axis.devices) == ("i", 8)


def test_the_parts_of_sharded_jit_are_axes():
    fun = sm.sharded_jit(
        lambda x, w: jnp.tanh(x @ w), in_parts=((4, 2), None), out_parts=(8, 1)
    )
    report = sm.explain(fun)(np.ones((16, 8), np.float32), np.ones((8, 8), np.float32))
    assert {axis.kind for axis in report.axes} == {"sharding"}
    assert math.prod(axis.devices for axis in report.axes) == 8
    assert "each of 8 devices does the same" not in str(report)


def test_mesh_axes_are_in_the_order_of_the_mesh():
    w, x = on(MODEL, 64, 16), on(DATA, 1000, 64)
    axes = sm.explain(jax.jit(lambda w, x: x @ w))(w, x).axes
    assert [(axis.name, axis.devices) for axis in axes] == [("data", 4), ("model", 2)]
