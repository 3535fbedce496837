"""Collectives: what the program says, what the arithmetic says, what XLA compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from tests.map_programs import collectives_of

DEVICES = 8
MESH = sm.make_mesh({"data": 4, "model": 2})


def shape(*dimensions, dtype=np.float32):
    return jax.ShapeDtypeStruct(dimensions, dtype)


def table(report):
    """What is sent, without where and how long."""
    return [
        (each.operation, each.axes, each.group_size, each.count, each.bytes_in)
        for each in report.collectives
    ]


def instructions(fun, *args):
    """How many collectives the compiled program has."""
    return sum(collectives_of(fun, *args).values())


def shift(x):
    size = lax.axis_size("i")
    return lax.ppermute(x, "i", [(k, (k + 1) % size) for k in range(size)])


def every(x):
    """One row for each element of the axis."""
    return jnp.broadcast_to(x, (lax.axis_size("i"), *x.shape)) * x.sum()


# For each: the function, and what a device puts in and gets out, in numbers, if it has
# ``block`` elements of ``length`` numbers.
COLLECTIVES = {
    "psum": (
        "all-reduce",
        lambda x: lax.psum(x, "i"),
        lambda length, block: (length, length),
    ),
    "pmax": (
        "all-reduce",
        lambda x: lax.pmax(x, "i"),
        lambda length, block: (length, length),
    ),
    "pmin": (
        "all-reduce",
        lambda x: lax.pmin(x, "i"),
        lambda length, block: (length, length),
    ),
    "all_gather": (
        "all-gather",
        lambda x: lax.all_gather(x, "i"),
        lambda length, block: (block * length, DEVICES * block * length),
    ),
    "psum_scatter": (
        "reduce-scatter",
        lambda x: lax.psum_scatter(every(x), "i"),
        lambda length, block: (DEVICES * block * length, block * length),
    ),
    "all_to_all": (
        "all-to-all",
        lambda x: lax.all_to_all(every(x), "i", 0, 0),
        lambda length, block: (DEVICES * block * block * length,) * 2,
    ),
    "ppermute": (
        "collective-permute",
        shift,
        # Of the others the next one is on the same device.
        lambda length, block: (length, length),
    ),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("operation", COLLECTIVES)
def test_every_collective_of_a_map(operation, block):
    kind, fun, sizes = COLLECTIVES[operation]
    x = shape(DEVICES * block, 5)
    mapped = sm.spmap(fun, "i")
    (each,) = sm.explain(mapped)(x).collectives
    assert (each.kind, each.operation, each.axes) == (kind, operation, ("i",))
    assert (each.group_size, each.count) == (DEVICES, 1)
    assert (each.bytes_in, each.bytes_out) == tuple(4 * n for n in sizes(5, block))
    assert each.added_by_partitioner is False
    assert instructions(mapped, x) == 1


@pytest.mark.few(3)
@pytest.mark.parametrize("operation", COLLECTIVES)
def test_pmap_and_shard_map_send_what_spmap_sends(operation):
    _, fun, _ = COLLECTIVES[operation]
    x = shape(DEVICES, 5)
    expected = table(sm.explain(sm.spmap(fun, "i"))(x))
    assert table(sm.explain(jax.pmap(fun, "i"))(x)) == expected
    sharded = jax.shard_map(
        lambda block: fun(block[0])[None],
        mesh=sm.make_mesh({"i": DEVICES}),
        in_specs=P("i"),
        out_specs=P("i"),
        check_vma=False,
    )
    assert table(sm.explain(sharded)(x)) == expected


@pytest.mark.parametrize(
    ("axis", "group_size"), [("i", 2), ("j", 4), (("i", "j"), 8), (("j", "i"), 8)]
)
def test_axes_of_nested_maps(axis, group_size):
    fun = sm.spmap(sm.spmap(lambda x: lax.psum(x, axis), "j"), "i")
    names = axis if isinstance(axis, tuple) else (axis,)
    (each,) = sm.explain(fun)(shape(2, 4, 3)).collectives
    assert (set(each.axes), each.group_size) == (set(names), group_size)
    assert each.bytes_in == 12


@pytest.mark.parametrize("length", [2, 8])
@pytest.mark.parametrize("name", [None, "i"])
def test_the_axis_of_a_map_is_that_of_its_mesh(name, length):
    mapped = sm.spmap(
        lambda x, w: x * w, name, in_axes=(0, None), mesh=MESH, mesh_axes="model"
    )
    report = sm.explain(jax.grad(lambda w, x: mapped(x, w).sum()))
    collectives = report(shape(3), shape(length, 3)).collectives
    assert {each.axes for each in collectives} == {("model",)}


def test_an_inner_map_whose_elements_are_one_batched_operation_sends_nothing():
    fun = sm.spmap(sm.spmap(lambda x: lax.psum(x, "j"), "j"), "i")
    assert sm.explain(fun)(shape(8, 4, 3)).collectives == ()


def test_vmap_around_a_map_sends_more_at_once():
    fun = jax.vmap(sm.spmap(lambda x: lax.psum(x, "i"), "i"))
    report = sm.explain(fun)(shape(5, 8, 3))
    assert table(report) == [("psum", ("i",), 8, 1, 60)]


@pytest.mark.parametrize("alone", [0, 1])
def test_groups_of_several_lengths_have_that_of_the_longest(alone):
    groups = [[0, 1, 2], [3, 4, 5, 6]]
    groups.insert(alone, [7])
    fun = sm.spmap(lambda x: lax.psum(x, "i", axis_index_groups=groups), "i")
    report = sm.explain(fun)(shape(8, 3))
    assert table(report) == [("psum", ("i",), 4, 1, 12)]


# How often


def test_loops_multiply():
    def step(x, _):
        x, _ = lax.scan(lambda x, _: (lax.psum(x, "i") / 9, None), x, length=3)
        return lax.pmax(x, "i") / 2, None

    fun = sm.spmap(lambda x: lax.scan(step, x, length=5)[0], "i")
    report = sm.explain(fun)(shape(8, 3))
    assert sorted(table(report)) == [
        ("pmax", ("i",), 8, 5, 12),
        ("psum", ("i",), 8, 15, 12),
    ]
    for each in report.collectives:
        ring = 2 * each.bytes_in * 7 // 8
        assert each.link_bytes == each.count * ring


@pytest.mark.few(2)
@pytest.mark.parametrize("operation", COLLECTIVES)
def test_bytes_on_a_link(operation):
    _, fun, _ = COLLECTIVES[operation]
    (each,) = sm.explain(sm.spmap(fun, "i"))(shape(8, 40)).collectives
    factors = {"all-reduce": 7 / 4, "all-gather": 7, "collective-permute": 1}
    assert each.link_bytes == factors.get(each.kind, 7 / 8) * each.bytes_in


def test_a_loop_without_a_fixed_end_is_not_counted():
    def fun(x):
        return lax.while_loop(lambda x: lax.pmax(x.sum(), "i") > 1, lambda x: x / 2, x)

    (each,) = sm.explain(sm.spmap(fun, "i"))(shape(8, 3)).collectives
    assert each.count is None
    assert each.link_bytes is None


def test_the_loop_of_a_map_sends_once():
    """Its steps add up on the device first."""
    fun = sm.spmap(lambda x: lax.psum(x, "i"), "i", batch_size=2)
    x = shape(32, 3)
    report = sm.explain(fun)(x)
    assert table(report) == [("psum", ("i",), 8, 1, 12)]
    assert instructions(fun, x) == 1


def test_branches_are_noted():
    def fun(x):
        return lax.cond(x.sum() > 0, lambda x: lax.psum(x, "i"), lambda x: x, x)

    report = sm.explain(sm.spmap(fun, "i"))(shape(8, 3))
    assert table(report) == [("psum", ("i",), 8, 1, 12)]
    assert any("branch" in note for note in report.notes)


# What the compiler adds, removes, and changes


def test_what_the_partitioner_adds_is_marked():
    fun = jax.jit(
        jnp.dot,
        in_shardings=(
            NamedSharding(MESH, P(None, "model")),
            NamedSharding(MESH, P("model")),
        ),
        out_shardings=NamedSharding(MESH, P()),
    )
    args = shape(8, 4), shape(4, 6)
    (each,) = sm.explain(fun)(*args).collectives
    assert (each.kind, each.group_size) == ("all-reduce", 2)
    assert each.added_by_partitioner
    assert (each.operation, each.axes) == (None, ("model",))
    assert "test_what_the_partitioner_adds_is_marked" in each.source
    assert each.bytes_in == 8 * 6 * 4
    assert instructions(fun, *args) == 1


@pytest.mark.parametrize("operation", ["psum", "pmax"])
def test_the_partitioner_does_the_reductions_of_a_map(operation):
    _, fun, _ = COLLECTIVES[operation]
    report = sm.explain(sm.spmap(fun, "i", lowering="spmd"))(shape(24, 5))
    assert table(report) == [(None, ("i",), 8, 1, 20)]
    assert report.notes == ()
