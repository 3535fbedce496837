"""Axes that run on devices because arrays are on them."""

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
        (
            lambda x: jax.vmap(score)(lax.with_sharding_constraint(x * 2, ROWS)),
            on(None, 1000, 64),
        ),
        (jax.vmap(score), on(NamedSharding(EXPLICIT, P("i")), 1000, 64)),
        (jax.vmap(score, in_axes=1), on(NamedSharding(LINE, P(None, "i")), 64, 1000)),
    ],
    ids=["jit", "bare", "in_shardings", "constraint", "explicit", "other dimension"],
)
def test_a_vmap_over_what_is_cut_runs_on_the_devices(fun, x):
    report = sm.explain(fun)(x)
    (axis,) = [axis for axis in report.axes if axis.kind == "vmap"]
    assert axis.layout == "8 devices x 125 vectorised x 1 step"
    assert axis.devices * axis.vectorised * axis.steps == 1000
    assert "along mesh axis 'i'" in axis.running


def test_a_vmap_over_what_is_whole_stays_on_one():
    x = on(NamedSharding(LINE, P(None, "i")), 1000, 64)
    axes = sm.explain(jax.vmap(score))(x).axes
    assert [(axis.kind, axis.devices) for axis in axes] == [
        ("sharding", 8),
        ("vmap", 1),
    ]


def test_each_mesh_axis_that_cuts_something_has_its_line():
    x = on(NamedSharding(MESH, P("data")), 1000, 64)
    w = on(NamedSharding(MESH, P(None, "model")), 64, 16)
    axes = sm.explain(jax.jit(lambda x, w: x @ w))(x, w).axes
    assert [(axis.name, axis.devices) for axis in axes] == [("data", 4), ("model", 2)]
    assert "dimension 1 of w" in axes[1].running


def test_nothing_that_is_cut_is_no_axis():
    assert sm.explain(jnp.sin)(on(NamedSharding(MESH, P()), 8)).axes == ()


def test_a_loop_over_what_is_cut_is_done_by_every_device():
    def loop(x):
        return lax.map(jnp.sin, x)

    (remark,) = sm.explain(loop)(on(ROWS, 1000, 64)).remarks
    assert "each of them does all of the steps" in remark.text
    assert sm.explain(jax.vmap(jnp.sin))(on(ROWS, 1000, 64)).remarks == ()
    assert (
        sm.explain(loop)(on(NamedSharding(LINE, P(None, "i")), 1000, 64)).remarks == ()
    )
