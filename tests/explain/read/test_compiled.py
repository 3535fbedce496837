"""The numbers of an explanation are true.

They are compared with what XLA says of the compiled program, and with the buffers of
arrays that a call made.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

MESH = sm.make_mesh({"data": 4, "model": 2})


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def shapes_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def double(x):
    return x * 2


def center(x):
    return x - lax.pmean(x, "i")


def product(x, w):
    return lax.psum(x @ w, "model")


PROGRAMS = {
    "spmap": (sm.spmap(center, "i"), ones(8, 3)),
    "blocks": (sm.spmap(center, "i"), ones(24, 3)),
    "loop": (sm.spmap(double, batch_size=2), ones(32, 3)),
    "spmd": (sm.spmap(center, "i", lowering="spmd"), ones(16, 3)),
    "ragged": (sm.spmap(center, "i"), ones(11, 3)),
    "few": (sm.spmap(double), ones(3, 5)),
    "last axis": (sm.spmap(double, in_axes=1, out_axes=-1), ones(3, 8)),
    "one result": (
        sm.spmap(lambda x: lax.psum(x, "i"), "i", out_axes=None),
        ones(8, 3),
    ),
    "not mapped": (
        sm.spmap(lambda x, w: x @ w, in_axes=(0, None)),
        ones(8, 3),
        ones(3, 2),
    ),
    "pytrees": (
        sm.spmap(lambda x: {"a": x["a"] * 2, "b": (x["b"],)}),
        {"a": ones(8, 2), "b": ones(8, dtype=np.int8)},
    ),
    "nested": (
        sm.spmap(sm.spmap(lambda x: lax.psum(x, ("i", "j")), "j"), "i"),
        ones(2, 4, 3),
    ),
    "mesh_map": (
        sm.mesh_map(
            product,
            MESH,
            in_axes=({"data": 0, "model": 1}, {"model": 0}),
            out_axes={"data": 0},
        ),
        ones(8, 6),
        ones(6, 3),
    ),
    "shard_map": (
        jax.shard_map(
            lambda x: lax.psum(x, "data"),
            mesh=MESH,
            in_specs=P("data", "model"),
            out_specs=P(None, "model"),
        ),
        ones(8, 4),
    ),
    "pmap": (jax.pmap(center, "i"), ones(8, 3)),
    "vmap": (jax.vmap(double), ones(4, 3)),
    "map": (lambda xs: lax.map(jnp.sin, xs, batch_size=2), ones(5, 3)),
    "jit": (
        jax.jit(
            lambda x, w: jnp.sin(x @ w),
            in_shardings=(
                NamedSharding(MESH, P("data")),
                NamedSharding(MESH, P(None, "model")),
            ),
        ),
        ones(8, 4),
        ones(4, 6),
    ),
    "around": (jax.jit(lambda x: sm.spmap(center, "i")(x + 1).sum(0)), ones(8, 3)),
    "plain": (lambda x: jnp.sum(x), ones(8, 3)),
}
programs = pytest.mark.parametrize("name", PROGRAMS)


@pytest.fixture(scope="module")
def explained():
    """The explanation of each program, made once."""
    made = {}

    def explanation(name):
        if name not in made:
            fun, *args = PROGRAMS[name]
            made[name] = sm.explain(fun)(*shapes_of(args))
        return made[name]

    return explanation


def compiled_program(fun, args):
    """The program as a call would compile it."""
    if not hasattr(fun, "lower"):
        fun = jax.jit(fun)
    return fun.lower(*args).compile()


@pytest.mark.few(3)
@programs
def test_cost_is_what_the_compiler_says(name, explained):
    fun, *args = PROGRAMS[name]
    compiled = compiled_program(fun, args)
    analysis = compiled.cost_analysis() or {}
    memory = compiled.memory_analysis()
    cost = explained(name).cost
    has_loops = " while(" in compiled.as_text()
    if not has_loops:
        assert cost.flops == analysis.get("flops", 0)
    assert cost.bytes_accessed == analysis.get("bytes accessed")
    said = any("steps of a loop once" in note for note in explained(name).notes)
    assert said == has_loops
    assert cost.argument_bytes == memory.argument_size_in_bytes
    assert cost.output_bytes == memory.output_size_in_bytes
    assert cost.temporary_bytes >= memory.temp_size_in_bytes  # Constants, too.
    all_of_it = cost.argument_bytes + cost.output_bytes + cost.temporary_bytes
    assert cost.peak_bytes == all_of_it
    assert getattr(memory, "total_allocation_bytes", all_of_it) == all_of_it


def test_a_donated_argument_saves_memory():
    x = jax.ShapeDtypeStruct((8, 100), np.float32)
    kept = sm.explain(sm.spmap(double))(x).cost
    donated = sm.explain(sm.spmap(double, donate_argnums=0))(x).cost
    assert kept.peak_bytes - donated.peak_bytes == 400


@pytest.mark.few(3)
@programs
def test_layouts_are_those_of_the_buffers(name, explained):
    fun, *args = PROGRAMS[name]
    shardings = jax.tree.leaves(compiled_program(fun, args).input_shardings)
    placed = map(jax.device_put, jax.tree.leaves(args), shardings)
    buffers = [*placed, *jax.tree.leaves(fun(*args))]
    for array, made in zip(explained(name).arrays, buffers, strict=True):
        shards = [shard.data for shard in made.addressable_shards]
        assert (array.shape, array.dtype) == (made.shape, str(made.dtype))
        assert array.bytes == made.nbytes
        assert {array.shard_bytes} == {shard.nbytes for shard in shards}
        assert {array.shard_shape} == {shard.shape for shard in shards}
        assert array.num_devices == len(shards)
        assert array.copies == sum(shard.nbytes for shard in shards) // made.nbytes
        assert array.spec == sm.spec_of(made)


def test_flops_count_the_products_of_every_step():
    def fun(x):
        return lax.scan(lambda c, _: (jnp.tanh(c @ x), None), x, length=50)[0]

    cost = sm.explain(fun)(ones(64, 64)).cost
    assert cost.flops == pytest.approx(50 * 2 * 64**3, rel=1e-3)
    nested = sm.explain(lambda x: lax.map(fun, x))(ones(3, 64, 64)).cost
    assert nested.flops == pytest.approx(3 * cost.flops, rel=1e-3)
    rows = NamedSharding(sm.make_mesh({"i": 8}), P("i"))
    sharded = sm.explain(jax.jit(fun, in_shardings=rows))(ones(64, 64)).cost
    assert sharded.flops == pytest.approx(cost.flops / 8, rel=1e-2)


def test_products_of_vectors_count_in_every_step():
    """XLA writes them as a sum of products, which is no product to it."""
    x = jax.ShapeDtypeStruct((64, 1000), np.float32)
    report = sm.explain(lambda a, b: lax.map(lambda t: t[0] @ t[1], (a, b)))(x, x)
    assert report.cost.flops == pytest.approx(64 * 2 * 1000, rel=0.02)


def test_flops_count_the_longer_branch_in_every_step():
    def branch(c, k):
        return lax.cond(k > 2, lambda c: c @ c, lambda c: c @ c @ c, c), None

    def fun(x):
        return lax.scan(branch, x, jnp.arange(9))[0]

    cost = sm.explain(fun)(ones(64, 64)).cost
    assert cost.flops == pytest.approx(9 * 4 * 64**3, rel=1e-3)


@pytest.mark.parametrize(
    ("groups", "kwargs"),
    [
        (1, {"padding": "VALID"}),
        (4, {"padding": "VALID", "feature_group_count": 4}),
        (1, {"padding": [(1, 2)] * 2, "lhs_dilation": (2, 2)}),
    ],
    ids=["plain", "grouped", "transposed"],
)
def test_flops_count_the_convolutions_of_every_step(groups, kwargs):
    x, kernel = ones(2, 8, 32, 32), ones(8, 8 // groups, 3, 3)

    def cost(length):
        def step(c, _):
            y = lax.conv_general_dilated(c * x, kernel, (1, 1), **kwargs)
            return c + y.mean(), None

        def fun(x):
            return lax.scan(step, x.mean(), length=length)[0]

        return sm.explain(fun)(x).cost

    once, often = cost(1), cost(10)
    assert often.flops == pytest.approx(10 * once.flops, rel=0.1)


def test_a_loop_of_unknown_length_counts_once_and_that_is_said():
    def fun(x):
        return lax.while_loop(lambda x: x.sum() > 1, lambda x: jnp.sin(x) @ x, x)

    report = sm.explain(fun)(ones(8, 8))
    assert report.cost.flops < 2 * 1200
    assert any("only the running program knows" in n for n in report.notes)


@pytest.mark.parametrize("analysis", [None, {"bytes accessed": -1.0}])
def test_of_a_compiler_that_counts_nothing_operations_are_known(monkeypatch, analysis):
    """As of GPUs that are not here."""
    monkeypatch.setattr(jax.stages.Compiled, "cost_analysis", lambda self: analysis)
    cost = sm.explain(lambda x: jnp.sin(x @ x))(ones(64, 64)).cost
    assert (cost.flops, cost.bytes_accessed) == (2 * 64**3, None)


class _OfHost:
    """A program with arrays on the host, as its compiler tells it."""

    def __getattr__(self, name):
        sizes = {"host_argument_size_in_bytes": 3000, "host_temp_size_in_bytes": 96}
        if not name.endswith("_size_in_bytes"):
            raise AttributeError(name)
        return sizes.get(name, 0 if name.startswith("host") else 8)


def test_memory_of_the_host_is_apart(monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: _OfHost())
    report = sm.explain(jnp.sin)(ones(3))
    assert (report.cost.argument_bytes, report.cost.host_bytes) == (8, 3096)
    assert re.search(r"Memory of the host +3.0 KiB", str(report))


# The result


def test_to_dict_is_json(explained):
    report = explained("mesh_map")
    read = json.loads(json.dumps(report.to_dict()))
    assert read["num_devices"] == report.num_devices
    assert [axis["layout"] for axis in read["axes"]] == [
        axis.layout for axis in report.axes
    ]
    assert [array["shard_bytes"] for array in read["arrays"]] == [
        array.shard_bytes for array in report.arrays
    ]
    assert read["cost"]["flops"] == report.cost.flops


def test_specs_in_a_dict_are_code_that_builds_them(explained):
    for array in explained("mesh_map").to_dict()["arrays"]:
        spec = eval(array["spec"], {name: getattr(sm, name) for name in sm.__all__})
        assert isinstance(spec, sm.ShardingSpec)
