"""Which axes `explain` sees in a program, and how they run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap.explaining.read import visitor as reading
from tests.shared_jaxprs import at_most, nested

MESH = sm.make_mesh({"data": 4, "model": 2})


def axes(fun, *shapes):
    """The axes, indented by depth, each with its kind."""
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    those = sm.explain(fun)(*args).axes
    return [f"{'  ' * axis.depth}{axis.kind}: {axis}" for axis in those]


def double(x):
    return x * 2


def total(x):
    return x.sum()


# Maps over devices


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("length", "batch_size", "layout"),
    [
        (8, None, "8 devices x 1 vectorised x 1 step"),
        (32, None, "8 devices x 4 vectorised x 1 step"),
        (32, 2, "8 devices x 2 vectorised x 2 steps"),
        (32, 3, "8 devices x 3 vectorised x 2 steps, the last of 1"),
        (3, None, "3 devices x 1 vectorised x 1 step"),
        (11, None, "6 devices x 2 vectorised x 1 step"),
        (1, None, "1 device x 1 vectorised x 1 step"),
    ],
)
def test_spmap(length, batch_size, layout):
    mapped = sm.spmap(double, "i", batch_size=batch_size)
    assert axes(mapped, (length, 2)) == [f"spmap: axis 'i' of {length} = {layout}"]


@pytest.mark.parametrize("lowering", ["manual", "spmd"])
def test_maps_in_maps(lowering):
    inner = sm.spmap(double, "j")
    assert axes(sm.spmap(inner, "i", lowering=lowering), (2, 8, 3)) == [
        "spmap: axis 'i' of 2 = 2 devices x 1 vectorised x 1 step",
        "  spmap: axis 'j' of 8 = 4 devices x 2 vectorised x 1 step",
    ]


def test_a_map_in_a_map_without_devices_left():
    assert axes(sm.spmap(sm.spmap(double, "j"), "i"), (8, 4, 3)) == [
        "spmap: axis 'i' of 8 = 8 devices x 1 vectorised x 1 step",
        "  spmap: axis 'j' of 4 = 1 device x 4 vectorised x 1 step",
    ]


def test_mesh_map():
    mapped = sm.mesh_map(
        lambda x: x, MESH, ({"data": 0, "model": 1},), {"data": 0, "model": 1}
    )
    assert axes(mapped, (8, 4)) == [
        "shard_map: axis 'data' of 4 = 4 devices x 1 vectorised x 1 step",
        "  shard_map: axis 'model' of 2 = 2 devices x 1 vectorised x 1 step",
    ]


def test_pmap():
    assert axes(jax.pmap(double, "i"), (8, 4)) == [
        "pmap: axis 'i' of 8 = 8 devices x 1 vectorised x 1 step"
    ]


def test_a_shard_map_that_takes_its_one_row_is_no_pmap():
    """As a stage of a pipeline takes its weights."""
    fun = jax.shard_map(
        lambda w, x: lax.psum(jnp.tanh(x @ w[0]), "i"),
        mesh=sm.make_mesh({"i": 8}),
        in_specs=(P("i"), P()),
        out_specs=P(),
    )
    report = sm.explain(fun)(np.ones((8, 4, 4), np.float32), np.ones((2, 4), "f4"))
    (axis,) = report.axes
    assert axis.kind == "shard_map"


@pytest.mark.parametrize(
    ("fun", "specs", "repeated"),
    [
        (lambda x: x * 2, P("data"), {"model"}),
        (lambda x: x * 2, P("data", "model"), set()),
        (lambda x: x * 2, P(("model", "data")), set()),
        (lambda x: x * lax.axis_index("model"), P("data"), set()),
        (lambda x: x * 2, P(), {"data", "model"}),
        (lambda x: lax.scan(lambda c, _: (c * lax.axis_index(("data", "model")), None),
                            x, None, length=2)[0], P(), set()),
    ],
)  # fmt: skip
def test_a_mesh_axis_along_which_nothing_is_cut_is_said(fun, specs, repeated):
    mapped = jax.shard_map(
        fun, mesh=MESH, in_specs=specs, out_specs=specs, check_vma=False
    )
    report = sm.explain(mapped)(np.ones((8, 4), np.int32))
    assert {axis.name for axis in report.axes if axis.is_repeated} == repeated
    texts = [each.text for each in report.remarks if "all do the same" in each.text]
    assert len(texts) == len(repeated)
    verdict = str(report).splitlines()[1]
    for name in ("data", "model"):
        assert (repr(name) in verdict) == (name not in repeated)


# What is no axis of devices


def test_loops_have_steps():
    def fun(x):
        x, _ = lax.scan(lambda carry, _: (carry * 2, None), x, length=7)
        x = lax.fori_loop(0, 1, lambda k, x: x - k, x)  # One step is no loop.
        return lax.fori_loop(0, 5, lambda k, x: x + k, x)

    assert axes(fun, (3,)) == [
        "loop: an axis of 7 = 1 device x 1 vectorised x 7 steps",
        "loop: an axis of 5 = 1 device x 1 vectorised x 5 steps",
    ]


def test_a_loop_without_a_fixed_end():
    def fun(x):
        return lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x)

    assert axes(fun, (3,)) == [
        "while: an axis of unknown size = 1 device x 1 vectorised x unknown steps"
    ]


def test_what_is_in_the_loop_of_a_batched_map():
    def fun(xs):
        return lax.map(lambda x: lax.map(jnp.sin, x), xs, batch_size=2)

    assert axes(fun, (6, 3)) == [
        "loop: an axis of 3 = 1 device x 1 vectorised x 3 steps",
        "  loop: an axis of 3 = 1 device x 1 vectorised x 3 steps",
    ]


# Compositions


def test_vmap_around_map_around_vmap():
    assert axes(jax.vmap(sm.spmap(jax.vmap(total), "i")), (5, 8, 3, 2)) == [
        "vmap: an axis of 5 = 1 device x 5 vectorised x 1 step",
        "spmap: axis 'i' of 8 = 8 devices x 1 vectorised x 1 step",
    ]


def test_loop_around_map_in_jit():
    fun = jax.jit(lambda xs: lax.map(sm.spmap(double, "i"), xs))
    assert axes(fun, (5, 8, 3)) == [
        "loop: an axis of 5 = 1 device x 1 vectorised x 5 steps",
        "  spmap: axis 'i' of 8 = 8 devices x 1 vectorised x 1 step",
    ]


def test_branches_and_checkpoints():
    @jax.checkpoint
    def fun(x):
        mapped = sm.spmap(double, "i")
        return lax.cond(x.sum() > 0, mapped, lambda x: x, x)

    assert axes(fun, (8, 3)) == [
        "spmap: axis 'i' of 8 = 8 devices x 1 vectorised x 1 step"
    ]


def test_a_program_without_axes():
    assert axes(double, (3,)) == []


# Lines of the program


def test_sources():
    def fun(xs):
        return lax.map(jnp.sin, xs)  # The loop.

    with open(__file__, encoding="utf-8") as file:
        lines = file.readlines()
    (axis,) = sm.explain(fun)(np.ones((3, 2))).axes
    place, _, function = axis.source.partition(" ")
    number = int(place.rpartition(":")[2])
    assert lines[number - 1].strip().endswith("# The loop.")
    assert function.endswith("fun)")
    assert "test_visitor.py:" in place


def test_what_is_shared_is_walked_once_for_what_it_is_of(monkeypatch):
    monkeypatch.setattr(reading, "source_of", at_most(200, reading.source_of))

    def summed(x):
        return x * lax.scan(lambda c, row: (c + row, None), x[0], x)[0].sum()

    facts = reading.facts_of(nested(30, summed, np.ones((5, 2))))
    (loop,) = facts.axes
    assert (loop.kind, loop.size) == ("loop", 5)
